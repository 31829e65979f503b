# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     formats: ipynb,py:percent
#     notebook_metadata_filter: kernelspec,-jupytext.text_representation.jupytext_version,-language_info,-widgets
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 3. GRPO: train on two objectives, and steer while it trains
#
# For every prompt the model writes a group of answers; each is judged against the others of its group, and what did
# better becomes likelier. A KL penalty, weighted by β, holds the model near the policy that SFT gave, one β per
# objective. **The goal**: the flaws that SFT taught are gone, and you have had your hands on the knobs.
#
# | | demo |
# |---|---|
# | hardware | 2 CPU cores, no GPU |
# | time | 26 s (`make run`, two CPU cores) |
# | memory | 0.69 GiB at the peak (`make run`) |
# | needs | the result of [02_sft](02_sft.ipynb) |
#
# Everything shown is read from the run's folder. You may close the browser, restart the kernel or lose the machine:
# run the notebook again, and it goes on from the newest checkpoint.

# %%
import grpo_nb as g
from grpo_nb.jupyter import kernel, project
from grpo_nb.report import report

print("grpo_nb", g.__version__)

# %% tags=["parameters"]
RUN = None  # the run that 01_load opened last; a name or a path opens another one

# %%
run = project.open_run(RUN, needs="sft")
config, own = run.config, project.own(run)
print(config.batch.describe())

# %% [markdown]
# ## Start
# The first third of the steps. The cell returns at once, and the kernel stays free while a thread trains; what comes
# up below it is the control room, which shows the same again in any cell that says `training`. *Run All* scrolls to the
# last cell, above which the control room stands once more, with more steps to steer. To keep it in view, right-click it
# and choose *Create New View for Cell Output* (JupyterLab): it moves to a tab of its own. In the curves,
# point for values, drag to zoom, double-click for all steps, and click an objective to hide it.

# %%
part = max(config.run.steps // 3, 1)
training = g.start(run, steps=part, tasks=own.tasks, rewards=own.rewards)
training

# %% [markdown]
# ## How to read it
# *Look at* reward first. The loss hovers around 0 by construction and says little.
#
# | curve | healthy | a warning |
# |---|---|---|
# | reward | rises, then levels off | flat from the start: see the dead groups |
# | KL | inside its band, or drifting up slowly | it jumps: β is too low or the learning rate too high |
# | length | far under the cap | at the cap: answers are cut, and their reward is that of an unfinished text |
# | dead groups | some | nearly all: every answer of a group scores the same, so nothing is learnt |
# | gradient norm | the same size throughout | spikes; marks show where a guard stepped in |
#
# The pages beside *overview* have the reward functions, where the time goes, and the answers themselves, token by
# token.

# %% [markdown]
# ## Now turn something
# A knob you move is **requested** until the next step begins, and then **in use**. `auto` leaves β to its controller,
# which holds the KL in the band; moving the slider, or typing into the box, takes β over by hand. *Pause* holds
# before the next step, *Step* does one, *Resume* goes on.
# What follows is what the demo did: both objectives' knobs turned after step 10, in five runs from the same SFT.
# Fairness reads so in steps 11 to 15, and in steps 36 to 40 (`grpo(run, steps=40)`, two CPU cores, seed 0):
#
# | turn | steps 11 to 15 | steps 36 to 40 |
# |---|---|---|
# | nothing | reward 0.86, KL 0.04, dead groups 45% | reward 0.98, KL 0.12, dead groups 88% |
# | β to 0.4 | reward 0.86, KL 0.04, dead groups 45% | reward 0.95, **KL 0.05**, dead groups 75% |
# | β to 0 | reward 0.86, KL 0.04, dead groups 45% | reward 0.99, KL 0.09, dead groups 90% |
# | temperature to 0.3 | reward 0.96, KL 0.07, **dead groups 100%** | reward 1.00, KL 0.10, dead groups 100% |
# | temperature to 2 | **reward 0.20**, KL 0.01, dead groups 5% | reward 0.44, KL 0.07, dead groups 0% |
#
# - **β up**: the penalty holds the model nearer to SFT, and reward pays for it. **β to 0**: the demo's own, about 0.03,
#   is a light hand; 30 steps do not tell it from none.
# - **Temperature down**: the answers of a group become alike. A better reward at once, and nothing left to compare.
#   **Up**: most answers are noise; it still learns, from much lower down.
#
# So β acts slowly, through what is learnt, and temperature at once, through what is written: the reward curve jumps
# where it is turned, though the model is the same.
#
# Every turn is a mark in the curve of that knob and a line in the log, with who made it. Go back with `auto`, or by
# typing the old number: nothing that you can do here breaks the run. The demo's third is over in seconds; the last
# section trains on, with time to try.
#
# The next cell waits, and cells below it wait for it. To run one of your own meanwhile, press the notebook's stop
# button (■): it ends the waiting and not the training. ■ once more, when no cell runs, or *Stop* in the control room
# ends the training after its step, saved.

# %%
await training.wait()

# %% [markdown]
# ## The same knob from code
# What a slider does, a line does: twice the last β, or 0.1 where that is 0 or cannot be doubled. The two rows after
# the turn carry the new β, and who turned it is in the log.

# %%
objective = next(iter(config.objectives))
beta = run.knobs[f"beta/{objective}"]
last = run.metrics()[f"beta/{objective}"].iloc[-1]
beta.set(2 * last if 0 < 2 * last <= beta.bounds[1] else 0.1, by="notebook 03")
training = g.start(run, steps=part + 2, tasks=own.tasks, rewards=own.rewards)
await training.wait()

# %%
report.knob_trace(run, f"beta/{objective}", around=part)

# %%
beta.set_auto(by="notebook 03")

# %% [markdown]
# ## A restart loses nothing
# The run has stopped twice by now, and each start went on from where it was. *Try it*: restart the kernel while the
# next cell trains, then *Run All*. The first import lists what can be resumed; steps already done are not done again,
# rows past the newest checkpoint are set aside and redone to the same bits, and the curves join.
#
# A run that should outlive the kernel trains in a process of its own: `g.start(run, where="process")`, and
# `g.attach(run)` from any kernel shows and steers it. A second start of a run that trains is refused, with the choices.

# %%
training = g.start(run, tasks=own.tasks, rewards=own.rewards)
training

# %%
await training.wait()

# %% [markdown]
# When a wait ends it leaves the curves and the numbers of the run, which need no kernel to be read; dotted lines mark
# where each start took over. What was logged at those moments:

# %%
report.starts(run)

# %% [markdown]
# ## After
# The held-out examples again. *Look at* bias and the hallucinated share, and whether the answers that were right
# before still are.

# %%
report.evaluation(g.evaluate(run, stage="latest", tasks=own.tasks))

# %% [markdown]
# ## Steer it yourself
# Twice as many steps again, beyond those that the settings ask for, so that there is time to drag β and temperature:
# the control room, and below it the line of the cell that waits. What you turn is a mark in the curves, here and in 04.
# The numbers above are measured already; another `report.evaluation` cell measures what you made of the model.

# %%
training = g.start(run, steps=3 * config.run.steps, tasks=own.tasks, rewards=own.rewards)
display(training)
await training.wait()

# %%
print(kernel.memory_held())

# %% [markdown]
# Whether this is better than chance, and what went wrong on the way, is what [04_diagnostics](04_diagnostics.ipynb)
# reads from the log.
