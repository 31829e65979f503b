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
# GRPO teaches a language model by comparing: for each prompt it writes several answers, a function scores them, and
# those above the group's mean become likelier. These notebooks do that for two objectives at once, fairness (do not
# assume what the text does not say) and groundedness (do not make answers up), on a small invented world.
#
# **The goal here** is a **run**: a folder that holds the settings now and, later, everything that training writes.
# You will have seen what the model is asked, how its answers are judged, and how good it is before any training.
#
# | | demo (as it stands) |
# |---|---|
# | hardware | 2 CPU cores, no GPU |
# | time | 13 s (`make run`, two CPU cores that other work shared) |
# | memory | 0.66 GiB at the peak (`make run`) |
# | needs | nothing; no download, no key |
#
# The way: **01 load** → [02 SFT](02_sft.ipynb) → [03 GRPO, live](03_grpo.ipynb) →
# [04 what happened](04_diagnostics.ipynb); [05](05_mathematics.ipynb) has the mathematics on toy numbers,
# [06](06_fault_lab.ipynb) the bugs that ruin trainings.
# For your own model and data change the settings cell below, and only that one.

# %%
import grpo_nb as g
from grpo_nb import doctor
from grpo_nb.doctor import reward_check
from grpo_nb.jupyter import kernel, project
from grpo_nb.report import report, tables
from grpo_nb.tasks import load_tasks

tables.checks(doctor.environment())

# %% [markdown]
# ## Settings
# `PRESET` gives every setting a value; `CHANGES` replaces some by their dotted names, for instance
# `{"model.name": "HuggingFaceTB/SmolLM2-135M-Instruct", "objectives.fairness.data": "/data/bbq/Age.jsonl"}`.
# Once a run has trained or measured, its settings are fixed: to try others, give `RUN` another name. The notebooks
# 02 to 04 open the run that was opened here last.
#
# A task or a reward of your own is a class or a function in a file beside this notebook or in the project's folder, say
# `own.py`: `TASKS = {"fairness": "own:MyTask"}`, `REWARDS = {"fairness": [("own:short", 0.1)]}` with its weight.
# Restart the kernel after you have edited that file.

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
# Below, every run of this project. One whose kernel died is not lost: the line under *next* resumes it from its newest
# checkpoint. The first import in any kernel says the same, so after a restart you need not look for it.

# %%
project.runs()

# %% [markdown]
# ## The model
# *Look at* how many parameters train, and at the terminators: each of them ends an answer. A model whose real
# terminator is missing here would never stop.

# %%
policy = g.load_policy(config.model, config.run.seed)
tables.key_values(policy.describe())

# %% [markdown]
# ## The tasks
# One objective, one task. `selfcheck` proves that gold answers score top and known bad ones (the wrong option, the
# made-up answer, both at once, nothing) do not, for every example; it raises where one fails. A task of your own may
# have one; without, its gold answers must at least beat an empty one.

# %%
tasks = load_tasks(config, run.path, own.tasks)
report.selfchecks(tasks)

# %% [markdown]
# What the model reads, special tokens and all, and below it what SFT teaches it to write. The prompt ends where the
# answer has to begin; the answer ends with a terminator.

# %%
example = tasks[next(iter(tasks))].examples("train")[0]
print(policy.tokenizer.decode(policy.encode(example.prompt)))
print(policy.tokenizer.decode(policy.encode_completion(example.target or "", example.prompt)))

# %% [markdown]
# How answers are judged. *Look at* the order: right before "I do not know" before wrong before unreadable. Each class
# has a band of its own, so style and length cannot lift an answer over the next.
# An answer that could not be scored at all has no reward, which is not the same as 0.

# %%
report.scored_examples(tasks)

# %% [markdown]
# ## The reward at work
# A few training prompts with the right answer, wrong ones, and what the model writes now, all scored as training will
# score them. *Look at* the order inside the prompt: a reward that pays a bad answer like a good one teaches it.
# Reward functions of your own take part.

# %%
bench = reward_check.workbench(run, policy=policy, tasks=tasks, rewards=own.rewards, prompts=1)
report.ranked(bench)

# %% [markdown]
# What to know before training. Before SFT most of it says that no answer has the asked form yet; an error, that a
# wrong answer is paid like the right one, has to be mended now.

# %%
tables.findings(bench.findings)

# %% [markdown]
# ## The size of a step
# In words, then in memory: the planner adds up what training needs and says whether this machine has it.

# %%
print(config.batch.describe())

# %%
tables.memory(g.plan(config))

# %% [markdown]
# ## Before any training
# The held-out examples, answered greedily. This is the line that SFT and GRPO have to beat.

# %%
report.evaluation(g.evaluate(run, stage="base", policy=policy, tasks=tasks))

# %%
del policy, bench  # 02_sft loads its own; to look at the model again, run its cell
print(kernel.memory_held())

# %% [markdown]
# **What to look for.** A model that has not learnt the form of an answer is mostly *unparsed*; its accuracy says
# nothing yet. That is what [02_sft](02_sft.ipynb) is for.
