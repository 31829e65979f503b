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
# # 4. Diagnostics: what happened, and what to change
#
# This notebook reads the run's folder, so it works on a run that trains now, ended last week, or lies on another
# machine's disk; only the profile and the questions near its end load the model. **The goal**: to know whether the run
# did any good, beyond chance, what went wrong on the way, and what to change next time.
#
# | | demo |
# |---|---|
# | hardware | anything |
# | time | 15 s (`make run`, two CPU cores) |
# | memory | 0.82 GiB at the peak (`make run`) |
# | needs | a run with steps of [03_grpo](03_grpo.ipynb) |

# %%
import pandas as pd
import torch

import grpo_nb as g
from grpo_nb import doctor, losses, plots
from grpo_nb.evaluation import pareto
from grpo_nb.jupyter import compare_view, kernel, over_time, project, talk
from grpo_nb.report import report, tables

print("grpo_nb", g.__version__)

# %% tags=["parameters"]
RUN = None  # the run that 01_load opened last; a name or a path opens another one
OTHER = ""  # name or path of a run to compare with
EXPORT = ""  # new folder for a model to take home
PROFILE_STEPS = 1  # 0 on a machine without the run's model

# %% [markdown]
# `RUN` is None, a name below `runs/`, or the path of a run's folder anywhere. The table has the settings that differ
# from the defaults; below it, folded, are all of them.

# %%
run = project.open_run(RUN, needs="grpo")
display(tables.changed_settings(run.config), tables.settings(run.config))
g.attach(run).summary()

# %% [markdown]
# ## The curves
# *Look at* reward (up), KL (inside its band), length (neither collapsing nor at the cap) and the share of groups
# without a signal (a group whose answers all score the same teaches nothing).

# %%
report.report(run)

# %% [markdown]
# Every kind of metric in this run's log: unit, meaning, and what is healthy.

# %%
report.glossary(run)

# %% [markdown]
# ## Before and after
# Differences on the same held-out items, with 95% intervals over templates and texts. An interval that holds 0 is no
# result. *Look at* the lines that should not have moved, too: what was right after SFT should still be right.

# %%
report.comparison(run)

# %%
plots.before_after(report.stages_compared(run))

# %% [markdown]
# ## Beside other runs
# Check runs of the project to lay their curves over each other; below are the settings that differ and where each run
# stands. With `OTHER` set, also each metric over the steps that both have, and the findings of each. *Look at* a
# difference of means beside the spread over steps: a smaller one is noise.

# %%
compare_view.RunsView(also=[run])

# %%
if OTHER:
    display(g.compare(OTHER, run))

# %% [markdown]
# ## Which checkpoint
# The quick evaluations made while it trained, on questions that neither training nor the table above has. A stage is
# off the front only where another is better in every objective, beyond chance. `pareto.best(run, "fairness")` and
# `pareto.knee(run)` name a stage; `evaluate.load_best(run, "fairness")` and `evaluate.load_knee(run)` load its weights.

# %%
front = pareto.pareto(run)
plots.pareto(front)

# %%
report.front(front)

# %% [markdown]
# ## Take it home
# With `EXPORT` set: the best stage as a PEFT adapter or, where all weights were trained, as a transformers model, with
# a model card that is filled from this run. `format="gguf"` writes one file, where it reads back as the same model;
# `push="owner/name"` uploads the folder, with the token in `HF_TOKEN`.

# %%
if EXPORT:
    print(g.export(run, EXPORT, stage="best"))

# %% [markdown]
# ## What it wrote
# The kinds of answers over the steps, then the newest samples. Reward going up while the text gets worse is reward
# hacking: read some.

# %%
plots.answers(run.metrics(), run.config)

# %%
for name in run.config.objectives:
    display(report.samples(run, objective=name))

# %% [markdown]
# ## One prompt over time
# The answers to one prompt from the first step to the newest, with what they earned; a surprising token is shaded.
# *Look at* when the answer turned, and whether its wording went with it. Filter by label, length and reward.

# %%
over_time.OverTime(run)

# %% [markdown]
# ## Findings
# The rules that guard training, replayed over the whole log. Each says what it saw and what to change.

# %%
tables.findings(g.diagnose(run))

# %% [markdown]
# ## Events
# What was out of the ordinary: turned knobs, starts, guards, checkpoints that were set aside.

# %%
report.events(run)

# %% [markdown]
# ## Where the time goes
# `doctor.profile` trains a copy for a step under torch's profiler; the run stays as it is. *Look at* the phase with the
# most seconds a step and its first operators. The trace, in the run's folder, opens at https://ui.perfetto.dev. The
# second table is what held memory at the end of the step; `doctor.memory_snapshot()` lists it at any time, and a kind
# whose count grows from step to step is a leak.

# %%
if PROFILE_STEPS:
    own = project.own(run)
    profiled = doctor.profile(run, steps=PROFILE_STEPS, tasks=own.tasks, rewards=own.rewards)
    display(tables.Table(pd.DataFrame(profiled.rows()), f"{profiled.trace.name}: the trace"))
    display(tables.Table(pd.DataFrame(profiled.memory.rows()), "live tensors"))

# %% [markdown]
# ## Talk to it
# The same question to the base model, after SFT and after GRPO, side by side. Type one, or choose an example: its task
# then scores each answer. One model is in memory, loaded at the first question.

# %%
talk.Talk(run, tasks=project.own(run).tasks)

# %% [markdown]
# ## When it fails
# Below a cell that fails with a well-known error stands why, and what to change. For a CUDA error or a nan that names
# no line, restart the kernel and begin with `doctor.debug_mode()`: several times slower, but it names the line.
# `doctor.bundle(run)` packs what a bug report needs: versions, hardware, settings, last metrics, events and traceback,
# with keys struck out, and no prompt, completion or weight.

# %%
print(doctor.explain(RuntimeError("Trying to backward through the graph a second time")))
print(doctor.bundle(run).name, "is in the run's folder")

# %% [markdown]
# ## Exhibit: a KL that is none
# Some GRPO code penalises `clamp(ref - new, 0, 10)`. *Look at* its column: where the policy has made a token likelier
# than the reference did (negative rows), it is 0, so drift that way costs nothing, and everywhere else its slope is
# the same however far the drift. k2 and k3 are 0 only where both agree and grow on both sides.
# [05_mathematics](05_mathematics.ipynb) has the rest: what each estimator's mean and gradient are.

# %%
gap = torch.linspace(-2, 2, 9)[None]  # log-prob of the reference minus the policy's, one token each
columns = {name: losses.KL[name](-gap, 0 * gap, 20.0)[0].tolist() for name in ("k2", "k3")}
exhibit = losses.kl_clamped_exhibit(-gap, 0 * gap)
clamped = {"ref - new": gap[0].tolist(), "clamp(ref - new, 0, 10)": exhibit[0].tolist()}
tables.Table(pd.DataFrame(clamped | columns))

# %%
print(kernel.memory_held())

# %% [markdown]
# ## What to change
# Begin a new run for other settings (`RUN` and `CHANGES` in [01_load](01_load.ipynb)); a run's own settings never
# change, so that its curves stay comparable. β, temperature and learning rate can be turned while it trains.
