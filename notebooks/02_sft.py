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
# # 2. SFT: the model learns the form of an answer
#
# GRPO needs answers it can compare; a model that never answers in the asked form gives it nothing. A short
# supervised warm-up on gold answers mends that. **The goal**: nearly every answer has the asked form. The demo's gold
# answers are **flawed on purpose**: where the text does not tell, they follow the stereotype or invent. The model will
# learn that too, and GRPO will have to repair it.
#
# | | demo |
# |---|---|
# | hardware | 2 CPU cores, no GPU |
# | time | 60 s (`make run`, two CPU cores that other work shared) |
# | memory | 0.70 GiB at the peak (`make run`) |
# | needs | the run that [01_load](01_load.ipynb) made |

# %%
import grpo_nb as g
from grpo_nb.jupyter import kernel, project
from grpo_nb.report import report

print("grpo_nb", g.__version__)

# %% tags=["parameters"]
RUN = None  # the run that 01_load opened last; a name or a path opens another one

# %%
run = project.open_run(RUN)
sft, own = run.config.sft, project.own(run)
print(f"{sft.steps} steps of {sft.batch} examples; data: {sft.data or 'gold answers'}")

# %% [markdown]
# ## Before
# A few held-out prompts, answered by the model as it was loaded. *Look at* the label: *unparsed* answers cannot be
# judged, so none of them is better than another.

# %%
report.answers(run, stage="base", limit=2, tasks=own.tasks)

# %% [markdown]
# ## Train
# In a worker thread: this cell returns at once, the picture moves by itself, and the kernel stays free. SFT that is
# complete is not done twice; one that was interrupted goes on from its newest checkpoint.

# %%
warmup = g.start(run, stage="sft", tasks=own.tasks)
warmup

# %% [markdown]
# The next cell waits, and leaves the curves when it ends. The notebook's stop button (■) ends the waiting, and SFT goes
# on; ■ once more ends SFT after the current step and saves.

# %%
await warmup.wait()

# %% [markdown]
# ## After
# The loss on examples that SFT did not see, in nats per token. *Look at* both numbers: a loss that did not fall
# means that nothing was learnt, a loss near 0 that everything was copied and no answer varies any more.

# %%
report.sft_losses(run)

# %%
report.answers(run, stage="sft", limit=2, tasks=own.tasks)

# %% [markdown]
# The held-out evaluation. *Look at* `unparsed_rate`, which should be near 0 now, and at the bias and the
# hallucinated share, which SFT on flawed answers has made worse.

# %%
report.evaluation(g.evaluate(run, stage="sft", tasks=own.tasks))

# %%
print(kernel.memory_held())

# %% [markdown]
# In the demo the model answers in the asked form now, and has the flaws of its teacher. A model that still does not
# needs more `sft.steps`: GRPO learns from differences between answers that can be read.
# [03_grpo](03_grpo.ipynb) goes on from here.
