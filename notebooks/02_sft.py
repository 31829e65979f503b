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
# # 2. SFT: the model learns the answer format
#
# GRPO compares answers; a model that never answers in the required format gives it nothing to compare. A short SFT on
# gold answers fixes that. **The goal**: nearly every answer has the required format. The demo's gold answers are
# **flawed on purpose**: where the text does not answer the question, they follow the stereotype or invent. The model
# will learn that too, and GRPO has to correct it.
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
# The loaded model's answers to a few held-out prompts. *Look at* the label: *unparsed* answers all earn the same, so
# none is better than another.

# %%
report.answers(run, stage="base", limit=2, tasks=own.tasks)

# %% [markdown]
# ## Train
# SFT runs in a worker thread: this cell returns at once, the picture updates by itself, and the kernel stays free. A
# completed SFT is not repeated; an interrupted one continues from its newest checkpoint.

# %%
training = g.start(run, stage="sft", tasks=own.tasks)
training

# %% [markdown]
# The next cell waits for SFT; its curves stay in the notebook. The notebook's stop button (■) ends the wait while SFT
# continues; a second ■ ends SFT after the current step and saves.

# %%
await training.wait()

# %% [markdown]
# ## After
# The loss on examples that SFT did not see, in nats per token. *Look at* both numbers: a loss that did not fall means
# that nothing was learned; a loss near 0 means that answers no longer vary, so GRPO has nothing to compare.

# %%
report.sft_losses(run)

# %%
report.answers(run, stage="sft", limit=2, tasks=own.tasks)

# %% [markdown]
# The held-out evaluation. *Look at* `unparsed_rate`, which should now be near 0, and at bias and the hallucinated
# share, which the flawed gold answers have made worse.

# %%
report.evaluation(g.evaluate(run, stage="sft", tasks=own.tasks))

# %%
print(kernel.memory_held())

# %% [markdown]
# The demo's model now answers in the required format, with the flaws of the gold answers. If your model misses the
# format, raise `sft.steps`: GRPO learns from differences between parsed answers. [03_grpo](03_grpo.ipynb) continues
# from here.
