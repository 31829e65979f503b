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
# # 5. The mathematics, on toy numbers
#
# Nothing is trained here. Every cell calls the functions that train, on tensors small enough to check by hand.
# **The goal**: to know what each choice in the settings does to a single token.
#
# | | |
# |---|---|
# | hardware | anything |
# | time | 7 s (`make run`, two CPU cores) |
# | memory | 0.47 GiB at the peak (`make run`) |
# | needs | nothing, not even a run |

# %%
import torch

import grpo_nb as g
from grpo_nb import plots
from grpo_nb.jupyter import kernel
from grpo_nb.report import tables, toy_math

print("grpo_nb", g.__version__)

# %% tags=["parameters"]
CAP = 512  # tokens an answer may have, in "What a long answer weighs"

# %% [markdown]
# ## An algorithm is four choices
# How rewards become advantages; what each token contributes and what holds it; what the contributions are averaged
# over; how the KL to the reference is estimated. `sapo` has temperatures in place of a clip. One more choice is in no
# row: `algorithm.advantage` = `batch_std` divides by the spread of the whole batch.

# %%
toy_math.algorithms()

# %% [markdown]
# ## Advantages
# Four prompts, four answers each. *Look at* the third, whose answers are equally good: nothing to compare, so exactly
# 0 for all but `reinforce_pp`, which compares with the whole batch. In the last, one answer could not be scored: it
# gets 0, and the others are compared as if it were not there.

# %%
nan = float("nan")
rewards = torch.tensor([[1, 0, 0, 1], [2, 2, 2, 5], [0.5, 0.5, 0.5, 0.5], [nan, 0, 1, 1]])
toy_math.advantages(rewards)

# %% [markdown]
# `opo` weighs its baseline by length: make the best answer of the second prompt long, and it becomes the baseline.
# `reinforce_pp` and `reinforce_pp_baseline` move as well, for every prompt: they take mean and spread over all tokens
# of the batch, of which that answer now has most.

# %%
lengths = torch.tensor([[9, 9, 9, 9], [9, 9, 9, 900], [9, 9, 9, 9], [9, 9, 9, 9]])
toy_math.advantages(rewards, lengths)

# %% [markdown]
# ## KL: the value and the gradient are two questions
# A policy and a reference over five tokens. `k1` and `k3` have the right mean; as a *loss*, `k1` has no gradient at
# all (it may go into the reward), `k3` pulls in another direction, and `k2`'s direction is exact though its mean is
# not. `k3_k2` takes each from where it is right. *Look at* the last line: it reads a tenth of the truth.

# %%
policy = torch.tensor([2.5, 1.0, -1.0, 0.0, -1.0], dtype=torch.float64)
reference = torch.tensor([-0.5, 1.0, 2.0, 0.0, 0.0], dtype=torch.float64)
toy_math.kl_estimators(policy, reference)

# %% [markdown]
# One token at a time. Left of 0 the policy likes the token better than the reference does: that is where training
# takes it, and where `clamp(ref − new, 0, 10)` sees nothing. `k3_k2` has the value of `k3`, so no
# line of its own.

# %%
plots.curves({"Estimators of one token": toy_math.kl_curves()}, "nats", mark=0.0, top=10)

# %% [markdown]
# ## Clipping
# After the first update the policy is no longer the one that sampled. Each line is how hard a token is still pulled,
# by its ratio. PPO lets go on one side of each picture only: above 1.2 where the answer was good, below 0.8 where it
# was bad. CISPO weighs instead of letting go, and its weight ends at a cap (5 for `cispo_cap`); SAPO fades; CPGD's pull
# never grows.

# %%
good, bad = (toy_math.pulls(advantage) for advantage in (1.0, -1.0))
plots.curves({"A = +1": good, "A = −1": bad}, "−dL / dlog p", mark=1.0, log=True)

# %% [markdown]
# A bad answer that became likely pulls without end under PPO: at ratio 8, eight times as hard. The dual clip ends it.

# %%
dual = toy_math.pulls(-1.0, ["ppo_clip"], dual=3.0).rename(columns={"ppo_clip": "dual clip 3"})
plots.curves({"A = −1": dual.join(bad["ppo_clip"])}, "−dL / dlog p", mark=1.0, log=True)

# %% [markdown]
# GSPO and GMPO have one ratio for the whole answer: log-ratios of +0.3 and −0.1 make a ratio of e^0.1 = 1.105 for both
# tokens, where PPO has 1.35 and 0.905.

# %%
toy_math.per_token(["ppo_clip", "gspo", "gmpo"], [0.3, -0.1], clip=0.5)

# %% [markdown]
# ## What a long answer weighs
# Three answers with the same advantage. `sequence_mean` gives each the same weight, so a token of a long one counts
# for little: long wrong answers are hardly punished. `token_mean` and `constant_length` weigh every token alike.

# %%
toy_math.long_answers([8, 64, CAP], CAP)

# %% [markdown]
# ## When objectives disagree
# Fairness pulls one way, groundedness another. *Look at* the progress: under `sum` the larger gradient wins and the
# other objective gets worse (below 0). The others settle it, each in its own way; `cagrad` and `upgrad` are here where
# their solvers are installed (`pip install "grpo_nb[combine]"`). With two objectives that disagree,
# `pcgrad` and `upgrad` take the same step.

# %%
gradients = [torch.tensor([1.0, 0.4]), torch.tensor([-2.2, 1.0])]
answers = toy_math.conflict(gradients, weights=[1.0, 1.0])
tables.Table(answers)

# %%
plots.arrows([tuple(x.tolist()) for x in gradients], dict(zip(answers["combine"], answers["step"], strict=True)))

# %%
print(kernel.memory_held())

# %% [markdown]
# ## Next
# This was the last. Back to the start with another algorithm: in the settings cell of [01_load](01_load.ipynb),
# `CHANGES = {"algorithm.name": "gspo"}` trains with any of these, and `"algorithm.gradient_report_every": 10` logs each
# objective's and each term's gradient as it trains.
