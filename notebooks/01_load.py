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
# # 1. Load: the model, the tasks, and where we start
#
# GRPO trains a language model by comparison: the model samples several answers to each prompt, a function scores them,
# and answers above the group's mean become likelier. These notebooks train on two objectives at once, fairness (assume
# nothing that the text does not state) and groundedness (make nothing up), in a small synthetic world.
#
# **The goal here** is a **run**: a folder that holds the settings and, later, everything that training writes. You
# will also see the model's prompts, how its answers are scored, and how good it is before training.
#
# | | demo (as it stands) |
# |---|---|
# | hardware | 2 CPU cores, no GPU |
# | time | 13 s (`make run`, two CPU cores that other work shared) |
# | memory | 0.66 GiB at the peak (`make run`) |
# | needs | nothing; no download, no key |
#
# The order: **01 load** → [02 SFT](02_sft.ipynb) → [03 GRPO, live](03_grpo.ipynb) →
# [04 what happened](04_diagnostics.ipynb); [05](05_mathematics.ipynb) has the mathematics on toy numbers,
# [06](06_fault_lab.ipynb) the bugs that ruin trainings, [07](07_result.ipynb) the result on a real model. For your own
# model and data, change only the settings cell below.

# %%
import grpo_nb as g
from grpo_nb import doctor
from grpo_nb.doctor import reward_check
from grpo_nb.jupyter import kernel, project, settings_form
from grpo_nb.report import report, tables
from grpo_nb.tasks import load_tasks

tables.checks(doctor.environment())

# %% [markdown]
# ## Settings
# `PRESET` gives every setting a value; `CHANGES` overrides some by dotted name, for instance
# `{"model.name": "HuggingFaceTB/SmolLM2-135M-Instruct", "objectives.fairness.data": "/data/bbq/Age.jsonl"}`.
# Once a run has trained or been evaluated, its settings are fixed: to try others, change `RUN`. Notebooks 02 to 04
# open the run that this notebook opened last.
#
# Put your own task (a class) or reward (a function) in a file next to this notebook or in the project's folder, say
# `own.py`, and name it: `TASKS = {"fairness": "own:MyTask"}`, `REWARDS = {"fairness": [("own:short", 0.1)]}` with its
# weight. Restart the kernel after you edit that file.

# %% tags=["parameters"]
RUN = "demo"
PRESET = "demo"
CHANGES = {}
TASKS = {}
REWARDS = {}

# %%
run = project.open_run(RUN, preset=PRESET, changes=CHANGES, tasks=TASKS, rewards=REWARDS)
config, own = run.config, project.own(run)
print(run.path)
tables.settings(config)

# %% [markdown]
# The form searches and edits the settings. It checks each value, plans the memory, and gives the line of `CHANGES` to
# copy into the settings cell above; it changes no run.

# %%
settings_form.SettingsForm(PRESET, CHANGES)

# %% [markdown]
# The table lists every run of this project. If a run's kernel died, the line under *next* resumes it from its newest
# checkpoint. The first import in any kernel shows the same lines.

# %%
project.runs()

# %% [markdown]
# ## The model
# *Look at* the number of trainable parameters and at the stop tokens: each of them ends an answer. A model whose real
# stop token is missing here would never stop.

# %%
policy = g.load_policy(config.model, config.run.seed)
tables.key_values(policy.describe())

# %% [markdown]
# ## The tasks
# Each objective has one task. `selfcheck` checks every example: the gold answer must get the top score, and known bad
# answers (the wrong option, the made-up answer, both at once, nothing) must not. Otherwise it raises an error. Your own
# task may define `selfcheck`; without it, gold answers must at least beat an empty one.

# %%
tasks = load_tasks(config, run.path, own.tasks)
report.selfchecks(tasks)

# %% [markdown]
# The prompt that the model reads, with special tokens, and below it the answer that SFT teaches. The prompt ends where
# the answer begins; the answer ends with a stop token.

# %%
example = tasks[next(iter(tasks))].examples("train")[0]
print(policy.tokenizer.decode(policy.encode(example.prompt)))
print(policy.tokenizer.decode(policy.encode_completion(example.target or "", example.prompt)))

# %% [markdown]
# How answers are scored. *Look at* the order: right, "I do not know", wrong, unreadable. Each class has its own range
# of rewards, so style and length cannot lift an answer into a better class. An answer that cannot be scored has no
# reward, which is not the same as 0.

# %%
report.scored_examples(tasks)

# %% [markdown]
# ## The reward at work
# Right, wrong and the model's own answers to one training prompt per objective, scored as in training. *Look at* the
# order within a prompt: a reward that scores a bad answer as high as a good one teaches the bad one. Your own reward
# functions are included.

# %%
bench = reward_check.workbench(run, policy=policy, tasks=tasks, rewards=own.rewards, prompts=1)
report.ranked(bench)

# %% [markdown]
# Findings before training. Before SFT, most report that no answer has the required format yet. Fix any error now, such
# as a wrong answer that earns as much as the right one.

# %%
tables.findings(bench.findings)

# %% [markdown]
# ## The size of a step
# First the batch, then the memory: the planner adds up what training needs and shows whether this machine has it.

# %%
print(config.batch.describe())

# %%
tables.memory(g.plan(config))

# %% [markdown]
# ## Before any training
# Greedy answers to the held-out examples: the baseline that SFT and GRPO have to beat.

# %%
report.evaluation(g.evaluate(run, stage="base", policy=policy, tasks=tasks))

# %%
del policy, bench  # 02_sft loads its own; to look at the model again, run its cell
print(kernel.memory_held())

# %% [markdown]
# **What to look for.** While the model has not learnt the answer format, most answers are *unparsed*, and accuracy
# means nothing yet. [02_sft](02_sft.ipynb) teaches the format.
