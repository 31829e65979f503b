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
# SmolLM2-135M-Instruct on BBQ and HaluEval QA, against two baselines: SFT for the same seconds, and SFT on all gold
# answers. All results were measured once and are committed; `TRAIN` repeats one of the runs. **The goal**: to see what
# GRPO improves on a small model, what it does not, and how certain that is.
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
# | Disability_status.jsonl, which no run trains on | the same | 1,336,984 | 375d40d9b71f |
# | 400 rows of qa_data.json | RUCAIBox/HaluEval, `data/` | 248,367 | c47e9895d787 |
#
# The weights were dequantised from a 4-bit file (Q4_1); the original weights were not measured.
# Each seed holds out a fifth of each category's templates and a fifth of the texts: 1,328, 928 and 1,296 items of BBQ
# for seeds 0, 1 and 2, from 15 templates each, and 80 questions. So few templates and questions make wide intervals.

# %%
tables.changed_settings(presets.gpu_result(MODEL, BBQ, QA))

# %% [markdown]
# ## The table
# Greedy answers to all held-out items. SFT trains on the gold answers of a third of the templates and texts; GRPO then
# trains on all training prompts, with rewards alone. *Look at* the disambiguated row first: guessing between the two
# persons is right in half of its items.

# %%
result.table()

# %% [markdown]
# ## How certain is it?
# Each arm minus GRPO, on the same items of the same seed. An interval that contains 0 shows no difference. Of the
# trained arms' 56 intervals, two exclude 0, about as many as chance gives; an earlier study on other splits had found
# the same two.

# %%
result.differences()

# %% [markdown]
# ## What each arm changed
# - **SFT** brings most of the gain: the answer format, "unknown" where the text does not give the answer, a quotation.
# - **GRPO** probably has more QA answers that are right and quoted than the SFT that it started from and SFT for the
#   same seconds (see above). It reaches the level of SFT with three times the gold answers.
# - **SFT for the same seconds** raises the ambiguous items as far, within noise, but not QA; it lowers the general
#   probe most of all arms.
# - **Without KL**, QA is highest and the ambiguous items stay at the SFT level, both within noise.
# - **No arm learns to read**: where the text gives the answer, every arm guesses between the two persons.
#
# The page *The measured result* lists what else was tried, and where it fails.

# %% [markdown]
# ## The curves
# Mean over the seeds, with the range from lowest to highest; seed 1 ended at step 72. *Look at* QA: it still rises
# after BBQ has levelled off.

# %%
result.curves("reward/fairness/mean", "reward/hallucination/mean")

# %%
result.curves("kl/fairness", "kl/hallucination")

# %%
result.seeds()

# %% [markdown]
# ## Which checkpoint
# Quick evaluations of one seed during training, on 200 BBQ items (ambiguous and disambiguated together) and 26 QA
# questions, none of them in the table. *Look at* the bars: so few questions do not show whether a stage is better than
# another, and the changes of the fairness accuracy lie within them.

# %%
front = result.front(SEED)
plots.pareto(front)

# %%
report.front(front)

# %% [markdown]
# ## Ten answers
# The first five held-out items of each objective in the order of seed 0, not picked by hand.

# %%
result.examples()

# %% [markdown]
# ## Check them yourself
# Every answer is in `notebooks/result/predictions`, one file for each arm, seed, stage and benchmark, in a format that
# `grpo-nb score` and any other scorer can read:
# `grpo-nb score bbq --data data/bbq --field answer --part --predictions FILE`.
#
# To repeat the study behind the table:
# `python -m grpo_nb.dev.result sweeps/result --devices 0 --jobs 4 --take notebooks/result`

# %% [markdown]
# ## Repeat one run
# If `TRAIN` is True, the cells train SFT and GRPO for one seed and evaluate the three stages. A second *Run All*
# resumes.

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
# can go wrong in a run.
