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
# # 7. The result: a real model, the real benchmarks, three seeds
#
# SmolLM2-135M-Instruct on BBQ and HaluEval QA, against the honest rivals: SFT for the same seconds, and SFT on all the
# gold answers. Everything shown was measured once and is committed; `TRAIN` repeats one row of it. **The goal**: to see
# what GRPO buys on a small model, what it does not, and how sure that is.
#
# | | |
# |---|---|
# | hardware | anything; with `TRAIN`, one GPU of 24 GB |
# | time | 23 s (`make run`, two CPU cores) |
# | memory | 0.53 GiB at the peak (`make run`) |
# | needs | a clone; with `TRAIN`, the model, BBQ and HaluEval |

# %%
import grpo_nb as g
from grpo_nb import plots, presets
from grpo_nb.dev import result_views as result
from grpo_nb.jupyter import kernel
from grpo_nb.report import report, tables

print("grpo_nb", g.__version__)

# %% tags=["parameters"]
RUN = "result"  # name below runs/ of the run that TRAIN makes
TRAIN = False  # True trains and evaluates one run: one seed of "GRPO from SFT"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"  # or a folder, or a .gguf file
BBQ, QA = "data/bbq", "data/halueval/qa_data.json"
SEED = 0

# %% [markdown]
# ## The data
# | file | from | bytes | SHA-256 |
# |---|---|---|---|
# | Age.jsonl | nyu-mll/BBQ, `data/` | 3,091,834 | 46e805b3fc2d |
# | Religion.jsonl | the same | 1,118,728 | cb9555f9f345 |
# | Sexual_orientation.jsonl | the same | 729,010 | 2c71036b9e75 |
# | Disability_status.jsonl, which no run learns from | the same | 1,336,984 | 375d40d9b71f |
# | 400 rows of qa_data.json | RUCAIBox/HaluEval, `data/` | 248,367 | c47e9895d787 |
#
# The weights were dequantised from a 4-bit file (Q4_1), so the numbers are a little below the original model's.
# A fifth of the templates of each category and a fifth of the texts are held out: 1,328, 928 and 1,296 items of BBQ
# from 15 templates, and 80 questions, by seed. Few templates and few questions make wide intervals.

# %%
tables.changed_settings(presets.gpu_result(MODEL, BBQ, QA))

# %% [markdown]
# ## The table
# Greedy answers to everything held out. SFT learns the gold answers of a third of the templates and texts. From there
# GRPO is asked all of them and sees rewards alone. *Look at* the disambiguated row first: guessing between the two
# persons gives half of its answers.

# %%
result.table()

# %% [markdown]
# ## How sure is it?
# Each arm less GRPO on the same items of the same seed. An interval that holds 0 is no difference. Of the 56 intervals
# of trained arms two leave it out, as many as chance gives; an earlier study on other splits had pointed at the same.

# %%
result.differences()

# %% [markdown]
# ## What each choice bought
# - **SFT** buys most of it: the form of an answer, "unknown" where the text does not tell, a quotation.
# - **GRPO** adds QA answers that are right and quoted, over the SFT that it started from and over SFT for the same
#   seconds. It ends where SFT with three times the gold answers ends.
# - **The same seconds of SFT** repair the ambiguous items as well, but not QA; the general probe falls furthest.
# - **Without KL** QA is highest and the ambiguous items stay as they were, both within noise.
# - **Nothing buys reading**: where the text tells, every arm guesses between the two persons.
#
# The page *The measured result* tells what was tried besides, and where it fails.

# %% [markdown]
# ## The curves
# Mean of the seeds, from the lowest to the highest. *Look at* how long QA still rises when BBQ has levelled off.

# %%
result.curves("reward/fairness/mean", "reward/hallucination/mean")

# %%
result.curves("kl/fairness", "kl/hallucination")

# %%
result.seeds()

# %% [markdown]
# ## Which checkpoint
# The quick evaluations of one seed while it trained, on questions of their own. *Look at* the bars: with so few
# questions hardly any stage surely beats another.

# %%
front = result.front(SEED)
plots.pareto(front)

# %%
report.front(front)

# %% [markdown]
# ## Ten answers
# The first five held-out items of each objective in the seeded order of seed 0: picked by the seed, not by hand.

# %%
result.examples()

# %% [markdown]
# ## Check them yourself
# Every answer is in `notebooks/result/predictions`, a file for each arm, seed, stage and benchmark, in the form that
# `grpo-nb score` reads and any other scorer can:
# `grpo-nb score bbq --data data/bbq --field answer --part --predictions FILE`.
#
# The study behind the table: `python -m grpo_nb.dev.result sweeps/result --devices 0 --jobs 4 --take notebooks/result`

# %% [markdown]
# ## One row from nothing
# With `TRAIN`: SFT, GRPO and both evaluations of one seed. A second *Run All* resumes.

# %%
config = presets.gpu_result(MODEL, BBQ, QA).replace(**{"run.seed": SEED})
session = g.start(g.Run.open_or_create(f"runs/{RUN}", config)) if TRAIN else None
session

# %%
if session:
    await session.wait()
    for stage in ("base", "sft", "latest"):
        g.evaluate(session.run, stage=stage)
    display(report.comparison(session.run))

# %%
print(kernel.memory_held())

# %% [markdown]
# ## After
# [04_diagnostics](04_diagnostics.ipynb) reads the run that `TRAIN` made; [06_fault_lab](06_fault_lab.ipynb) shows what
# can go wrong in one.
