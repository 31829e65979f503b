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
# # 6. The fault lab: put a bug in, and see it named
#
# Every bug here has ruined real trainings, mostly without an error: the loss looked fine, and nothing was learnt.
# Choose one, train a few steps with it, and read what the doctor says. **The goal**: to recognise a bug by its
# numbers, and to trust a run in which none is found.
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
# Choose one and press the button: its run trains below, live, and the doctor's verdict follows. The trainer has no
# switch for any of this. A fault is a context manager that patches the package while its run trains; the run begins
# from the demo's SFT result, with its prompts and group size.

# %%
workbench = bench.Bench(lab, FAULT)
workbench

# %% [markdown]
# The bug itself. *Look at* how little it takes: most are one line.

# %%
fault = workbench.fault
Code(inspect.getsource(fault.inject), language="python")

# %% [markdown]
# ## Train with it
# What the button does. The cell returns at once, and the kernel stays free; a guard may end the training, since an
# update whose numbers cannot be right is not kept.

# %%
workbench.start()

# %%
await workbench.wait()

# %% [markdown]
# ## What the doctor says
# *Look at* the numbers in the finding, then at what to change. What follows from the fault may be found as well.

# %%
workbench.findings()

# %% [markdown]
# What it took: the steps until one of the fault's own findings came, and the bound that the tests hold.

# %%
outcome = workbench.trial.outcome()
print(f"{fault.id}: caught after {outcome.caught(fault)} step(s), at most {fault.within}; found {dict(outcome.found)}")

# %% [markdown]
# ## The same run without a fault
# A rule that fires on a healthy run is worth nothing. Here nothing but notes may come.

# %%
workbench.start("clean", steps=5)

# %%
await workbench.wait()

# %%
workbench.findings()

# %% [markdown]
# ## All faults
# Measured once for all, with three seeds. *Look at* the bounds first: what stops a run must come before the bug has
# spoilt it.

# %%
by_fault, by_rule = matrix.tables()
by_fault

# %% [markdown]
# Fault by rule: in how many runs each rule fired. A fault that sets off one rule is easy to name; one that sets off
# three is named by the first of them, since the others follow from it.

# %%
by_rule

# %% [markdown]
# ## An explosion, and what the guards make of it
# A field report: gradients reached 10^8, then every weight was NaN. Its code is here again: the ratio against the
# reference, gradients in half precision, no clamp, and `if norm > 10: skip`, which lets NaN through. Beside it run the
# defaults, on the same data, model, seed and learning rate, for ten rounds.

# %%
courses = explosion.compare(lab)

# %% [markdown]
# *Look at* the two gradient norms. The guards undo a round after which the KL exceeds `guards.rollback_kl`, halve the
# learning rate, and go on.

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
# The same rules watch every training and read every log: [04_diagnostics](04_diagnostics.ipynb) asks them about yours.
