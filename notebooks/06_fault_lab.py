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
# # 6. The fault lab: inject a bug and see which rule finds it
#
# Every bug here has ruined real trainings, mostly without an error: the loss looked fine, and nothing was learned.
# Choose one, train a few steps with it, and read the doctor's findings. **The goal**: to recognise a bug by its
# numbers, and to trust a run without findings.
#
# | | demo |
# |---|---|
# | hardware | 2 CPU cores, no GPU |
# | time | 13 s (`make run`, two CPU cores) |
# | memory | 0.61 GiB at the peak (`make run`) |
# | needs | the result of [02_sft](02_sft.ipynb) |

# %%
import inspect

from IPython.display import Code

import grpo_nb as g
from grpo_nb import fault_lab
from grpo_nb.fault_lab import bench, explosion, matrix
from grpo_nb.jupyter import kernel, project
from grpo_nb.plots import exhibits

print("grpo_nb", g.__version__)

# %% tags=["parameters"]
RUN = "demo"
FAULT = "overwritten_gradients"

# %%
lab = fault_lab.Lab.of(project.open_run(RUN, needs="sft"))
matrix.catalogue()

# %% [markdown]
# ## Choose a fault
# Choose a fault and press the button: its run trains live below, and the doctor's findings follow. The trainer has no
# switch for faults: each is a context manager that patches the package while its run trains. The run starts from the
# demo's SFT result, with the demo's prompts per step and group size.

# %%
workbench = bench.Bench(lab, FAULT)
workbench

# %% [markdown]
# The source of the bug. *Look at* its size: most bugs are one line.

# %%
fault = workbench.fault
Code(inspect.getsource(fault.inject), language="python")

# %% [markdown]
# ## Train with it
# This cell does what the button does. It returns at once, and the kernel stays free. A guard may end the training,
# since it rejects updates with impossible numbers.

# %%
workbench.start()

# %%
await workbench.wait()

# %% [markdown]
# ## The doctor's findings
# *Look at* the numbers in the finding, then at what to change. The doctor may also find consequences of the fault.

# %%
workbench.findings()

# %% [markdown]
# The steps until the first of the fault's own findings, and the limit that the tests enforce:

# %%
outcome = workbench.trial.outcome()
print(f"{fault.id}: caught after {outcome.caught(fault)} step(s), at most {fault.within}; found {dict(outcome.found)}")

# %% [markdown]
# ## The same run without a fault
# Without a fault, no rule may fire: this run must produce no warnings or errors.

# %%
workbench.start("clean", steps=5)

# %%
await workbench.wait()

# %%
workbench.findings()

# %% [markdown]
# ## All faults
# Recorded once, with three seeds. *Look at* the limits (*at most*) first: a rule that stops a run must fire before the
# bug has ruined it.

# %%
by_fault, by_rule = matrix.tables()
by_fault

# %% [markdown]
# The number of runs in which each rule fired, by fault. If a fault triggers one rule, that rule identifies it; if it
# triggers several, the first identifies it, and the others are consequences.

# %%
by_rule

# %% [markdown]
# ## An explosion, with and without guards
# In a field report, gradients reached 10^8, then every weight was NaN. The first run reproduces the reported code: the
# ratio against the reference, gradients in half precision, no clamp, and `if norm > 10: skip`, which lets NaN through.
# The second run has the default settings, with the same data, model, seed and learning rate. Each trains for up to ten
# steps.

# %%
courses = explosion.compare(lab)

# %% [markdown]
# *Look at* the two gradient norms. The guards undo a step after which the KL exceeds `guards.rollback_kl`, halve the
# learning rate, and continue.

# %%
exhibits.explosion(explosion.table(courses))

# %%
ours, reported = courses["defaults"], courses["as reported"]
print(f"as reported: {reported.rounds} rounds, weights finite: {reported.finite}")
print(f"defaults: {ours.rounds} rounds, weights finite: {ours.finite}, undone: {ours.rolled_back}")

# %%
print(kernel.memory_held())

# %% [markdown]
# ## After
# The same rules check every training: [04_diagnostics](04_diagnostics.ipynb) applies them to your run's log.
