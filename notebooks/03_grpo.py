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
# objective.
#
# | | demo |
# |---|---|
# | hardware | 2 CPU cores, no GPU |
# | time | 56 s (`make run`, two CPU cores) |
# | needs | the result of [02_sft](02_sft.ipynb) |
#
# Everything shown is read from the run's folder. You may close the browser, restart the kernel or lose the machine:
# run the notebook again, and it goes on from the newest checkpoint.

# %%
import grpo_nb as g
from grpo_nb import project, report

print("grpo_nb", g.__version__)

# %% tags=["parameters"]
RUN = "demo"

# %%
run = project.open_run(RUN, needs="sft")
config = run.config
print(config.batch.describe())

# %% [markdown]
# ## Start
# The first third of the steps. The cell returns at once; *drag a slider now*: the new value is **requested** until
# the next step begins, and then **in use**. `auto` leaves β to its controller, which holds the KL in the band
# that the settings give; moving the slider takes β over by hand.

# %%
part = max(config.run.steps // 3, 1)
training = g.start(run, steps=part)
training

# %% [markdown]
# *Look at* reward first. The loss hovers around 0 by construction and says little; reward, KL, length and the share
# of groups without a signal say what is going on.

# %%
await training.wait()

# %% [markdown]
# ## The same knob from code
# What a slider does, a line does. The two rows after the turn carry the new β, and who turned it is in the log.

# %%
objective = next(iter(config.objectives))
beta = run.knobs[f"beta/{objective}"]
beta.set(2 * run.metrics()[f"beta/{objective}"].iloc[-1], by="notebook 03")
training = g.start(run, steps=part + 2)
await training.wait()

# %%
report.knob_trace(run, f"beta/{objective}", around=part)

# %%
beta.set_auto(by="notebook 03")

# %% [markdown]
# ## A restart loses nothing
# The run has stopped twice by now, and each start went on from where it was. *Try it*: restart the kernel while the
# next cell trains, then *Run All*. Steps already done are not done again, rows past the newest checkpoint are set
# aside and redone to the same bits, and the curves join.

# %%
training = g.start(run)
training

# %%
await training.wait()

# %% [markdown]
# The whole curve, with a mark where each start took over; below it, what was logged at those moments.

# %%
training.report()

# %%
report.starts(run)

# %% [markdown]
# ## After
# The held-out examples again. *Look at* bias and the hallucinated share, and whether the answers that were right
# before still are.

# %%
report.evaluation(g.evaluate(run, stage="latest"))

# %% [markdown]
# Whether this is better than chance, and what went wrong on the way, is what [04_diagnostics](04_diagnostics.ipynb)
# reads from the log.
