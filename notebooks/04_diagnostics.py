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
# This notebook reads a run's folder, so the run may be training, finished, or on another machine's disk; only the
# profile and the section *Ask the model* load the model. **The goal**: to know whether the run improved the model
# beyond chance, what went wrong, and what to change next time.
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
EXPORT = ""  # folder to export the model to; it must not exist
PROFILE_STEPS = 1  # 0 on a machine without the run's model

# %% [markdown]
# `RUN` is None, a name in `runs/`, or the path of any run's folder. The first table lists the settings that differ
# from the defaults; the folded table lists all of them.

# %%
run = project.open_run(RUN, needs="grpo")
display(tables.changed_settings(run.config), tables.settings(run.config))
g.attach(run).summary()

# %% [markdown]
# ## The curves
# *Look at* reward (rising), KL (inside its band), length (neither collapsing nor at the cap) and the share of groups
# without signal (all answers of such a group score the same, so it teaches nothing).

# %%
report.report(run)

# %% [markdown]
# Every kind of metric in this run's log: unit, meaning, and healthy range.

# %%
report.glossary(run)

# %% [markdown]
# ## Before and after
# Differences on the same held-out items, with 95% intervals over templates and texts. An interval that contains 0
# shows no difference. *Look at* the rows that should not change, too: what was right after SFT should still be right.

# %%
report.comparison(run)

# %%
plots.before_after(report.stages_compared(run))

# %% [markdown]
# ## Compare runs
# Tick the runs whose curves you want to overlay; the tables below list the settings that differ and the state of
# each run. If `OTHER` is set, the next cell also compares each metric over the steps that both runs have, and their
# findings. A difference of means that is smaller than the spread over steps is noise.

# %%
compare_view.RunsView(also=[run])

# %%
if OTHER:
    display(g.compare(OTHER, run))

# %% [markdown]
# ## Which checkpoint
# Quick evaluations made during training, on questions that neither training nor the table above uses. The Pareto front
# lists the stages that no other stage beats: a stage drops out only if another is better in every objective, beyond
# chance. `pareto.best(run, "fairness")` and
# `pareto.knee(run)` name a stage; `evaluate.load_best(run, "fairness")` and `evaluate.load_knee(run)` load its
# weights.

# %%
front = pareto.pareto(run)
plots.pareto(front)

# %%
report.front(front)

# %% [markdown]
# ## Export the model
# If `EXPORT` is set, the cell exports the best stage as a PEFT adapter or, if all weights were trained, as a
# transformers model, with a model card filled from this run. `format="gguf"` writes one file, if that file reads back
# as the same model; `push="owner/name"` uploads the folder with the token in `HF_TOKEN`.

# %%
if EXPORT:
    print(g.export(run, EXPORT, stage="best"))

# %% [markdown]
# ## Answers
# The kinds of answers over the steps, then the newest samples. Read some: if reward rises while the text gets worse,
# the model is hacking the reward.

# %%
plots.answers(run.metrics(), run.config)

# %%
for name in run.config.objectives:
    display(report.samples(run, objective=name))

# %% [markdown]
# ## One prompt over time
# The answers to one prompt from the first step to the newest, with their rewards; surprising tokens are shaded.
# *Look at* when the answer changed, and whether its wording changed too. Filter by label, length and reward.

# %%
over_time.OverTime(run)

# %% [markdown]
# ## Findings
# The rules that guard training, applied to the complete log. Each finding shows what happened and what to change.

# %%
tables.findings(g.diagnose(run))

# %% [markdown]
# ## Events
# Changed settings, starts, guard actions, checkpoints that were set aside; routine checkpoints are left out.

# %%
report.events(run)

# %% [markdown]
# ## Where the time goes
# `doctor.profile` trains a copy of the run for `PROFILE_STEPS` steps under torch's profiler; the run does not change.
# *Look at* the phase with the most seconds per step and its first operators. The trace, in the run's folder, opens at
# https://ui.perfetto.dev. The second table lists what held memory at the end of the step. `doctor.memory_snapshot()`
# lists it at any time; a kind whose count grows every step is a leak.

# %%
if PROFILE_STEPS:
    own = project.own(run)
    profiled = doctor.profile(run, steps=PROFILE_STEPS, tasks=own.tasks, rewards=own.rewards)
    display(tables.Table(pd.DataFrame(profiled.rows()), f"{profiled.trace.name}: the trace"))
    display(tables.Table(pd.DataFrame(profiled.memory.rows()), "live tensors"))

# %% [markdown]
# ## Ask the model
# Put the same question to the model as loaded, after SFT and after GRPO, side by side. Type one, or choose an example
# to have its task score each answer. Only one model is in memory, loaded at the first question.

# %%
talk.Talk(run, tasks=project.own(run).tasks)

# %% [markdown]
# ## When it fails
# If a cell fails with a well-known error, the cause and what to change appear below it. If a CUDA error or a NaN names
# no line, restart the kernel and begin with `doctor.debug_mode()`: training is several times slower, but the error
# names the line. `doctor.bundle(run)` packs what a bug report needs: versions, hardware, settings, last metrics,
# events and traceback. Keys are redacted; prompts, completions and weights are left out.

# %%
print(doctor.explain(RuntimeError("Trying to backward through the graph a second time")))
print(doctor.bundle(run).name, "is in the run's folder")

# %% [markdown]
# ## Exhibit: a clamp that is not a KL
# Some GRPO code penalises `clamp(ref - new, 0, 10)`. *Look at* its column: every token that became likelier than under
# the reference (negative rows) costs 0, so that drift is free; in the other rows the slope is constant, however large
# the drift. k2 and k3 are 0 only where both models agree, and grow on both sides.
# [05_mathematics](05_mathematics.ipynb) shows the mean and gradient of each estimator.

# %%
gap = torch.linspace(-2, 2, 9)[None]  # log-prob of the reference minus the policy's, one token each
columns = {name: losses.KL[name](-gap, 0 * gap, 20.0)[0].tolist() for name in ("k2", "k3")}
exhibit = losses.kl_clamped_exhibit(-gap, 0 * gap)
clamped = {"ref - new": gap[0].tolist(), "clamp(ref - new, 0, 10)": exhibit[0].tolist()}
tables.Table(pd.DataFrame(clamped | columns))

# %% [markdown]
# ## Exercises
# Answer first, then open. Each answer is runnable code.
#
# **1.** Every group of the last 40 steps is without signal. Is that a fault?
#
# <details><summary>Answer</summary>
#
# Not if all answers are correct: the policy has solved these prompts. If half of them are wrong, the reward does not
# separate right from wrong, and the rule reports an error for the same share.
#
# ```python
# from grpo_nb import presets, rules
#
# def severity(correct):
#     row = {"status": "ok", "frac_reward_zero_std/fairness": 1.0, "label/fairness/correct": correct}
#     findings = rules.post_mortem([row | {"step": n} for n in range(1, 41)], presets.demo())
#     return {finding.rule: finding.severity for finding in findings}["dead_groups"]
#
# assert severity(correct=1.0) == "info" and severity(correct=0.5) == "error"
# ```
# </details>
#
# **2.** A run penalises `clamp(ref - new, 0, 10)` and logs 0. Has the policy stayed near the reference?
#
# <details><summary>Answer</summary>
#
# The 0 does not show it: a token that became likelier, however much, costs 0.
#
# ```python
# new, ref = torch.tensor([[2.0]]), torch.zeros(1, 1)
# assert losses.kl_clamped_exhibit(new, ref).item() == 0 and losses.KL["k3"](new, ref, 20.0, None).item() > 1
# ```
# </details>
#
# **3.** 40 answers are half right. Is the interval wider if they come from 8 templates or from 40?
#
# <details><summary>Answer</summary>
#
# From 8: answers to one template resemble each other, so the bootstrap resamples templates, not answers.
#
# ```python
# from grpo_nb.evaluation import intervals
#
# verdicts = [1.0] * 20 + [0.0] * 20
#
# def share(rows):
#     return {"correct": sum(verdicts[i] for i in rows) / len(rows)}
#
# def width(templates):
#     names = [str(i * templates // 40) for i in range(40)]
#     drawn = intervals.bootstrap(share, names, seed=0)
#     found = intervals.with_intervals(share(range(40)), drawn, names)["correct"]
#     return found["high"] - found["low"]
#
# assert width(8) > width(40)
# ```
# </details>

# %%
print(kernel.memory_held())

# %% [markdown]
# ## What to change
# For other settings, start a new run (`RUN` and `CHANGES` in [01_load](01_load.ipynb)): a run's settings never change,
# so that its curves stay comparable. The live values β, temperature and learning rate can be changed while it trains.
# Next: [05_mathematics](05_mathematics.ipynb) shows how each setting affects a single token.
