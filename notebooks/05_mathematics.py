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
# Nothing is trained here: the cells call the training functions on tensors small enough to check by hand.
# **The goal**: to know how each algorithm setting affects a single token.
#
# | | |
# |---|---|
# | hardware | anything |
# | time | 7 s (`make run`, two CPU cores) |
# | memory | 0.59 GiB at the peak (`make run`) |
# | needs | nothing, not even a run |

# %%
import inspect

import torch
from IPython.display import Code

import grpo_nb as g
from grpo_nb import combine_gradients, losses, plots
from grpo_nb.algorithms import ALGORITHMS
from grpo_nb.jupyter import kernel
from grpo_nb.report import tables, toy_math

print("grpo_nb", g.__version__)

# %% tags=["parameters"]
CAP = 512  # max_completion_length, in "Reductions"

# %% [markdown]
# ## 1. Advantages
# A completion is compared with the other completions of its prompt:
#
# $$A_i = \frac{R_i - \bar R}{s + 10^{-4}} \qquad
# \bar R = \frac{1}{K} \sum_j R_j \qquad s^2 = \frac{1}{K-1} \sum_j (R_j - \bar R)^2$$
#
# One prompt, four completions, two of them right:

# %%
torch.set_printoptions(precision=4, sci_mode=False)
R = torch.tensor([1.0, 0.0, 0.0, 1.0])
(R - R.mean()) / (R.std() + 1e-4)

# %% [markdown]
# The training function gives the same, here with three more prompts. It takes rewards `[prompt, group]` and lengths.

# %%
print(inspect.signature(losses.advantages))
rewards = torch.tensor([[1, 0, 0, 1], [2, 2, 2, 5], [0.5, 0.5, 0.5, 0.5], [torch.nan, 0, 1, 1]])
lengths = torch.full((4, 4), 9)
groups = losses.GroupRewards(rewards, lengths)
losses.advantages(groups, "group_std")[..., 0]

# %% [markdown]
# Row 3 has equal rewards, so no signal: its advantages are exactly 0. In row 4 one completion could not be scored: the
# function gives it 0 and compares the others without it; training leaves out such a group.

# %%
losses.has_signal(rewards)

# %% [markdown]
# Every way to compute advantages, on the rewards 2, 2, 2 and 5. What is subtracted is the *baseline*: Dr. GRPO
# (`mean_only`) subtracts the mean and does not divide by $s$; RLOO excludes $R_i$ from its own baseline; `batch_std`
# divides by the deviation over all prompts.

# %%
for name in losses.ADVANTAGES:
    print(f"{name:22}", losses.advantages(groups, name)[1, :, 0])

# %% [markdown]
# `opo` weights the baseline by length. If the best completion has 900 tokens, the baseline nearly equals its reward.
# `reinforce_pp` and `reinforce_pp_baseline` change as well: they standardise over all tokens of the batch, so a long
# completion counts more.

# %%
lengths[1, 3] = 900
long = losses.GroupRewards(rewards, lengths)
for name in ("group_std", "opo", "reinforce_pp", "reinforce_pp_baseline"):
    print(f"{name:22}", losses.advantages(long, name)[1, :, 0])

# %% [markdown]
# ## 2. Ratio and clip
# After the first update of a step the policy differs from the old policy, which sampled. PPO, whose clip GRPO uses,
# weights each token by the ratio of the two and clips:
#
# $$r_t = \frac{\pi(t)}{\pi_{old}(t)} \qquad
# L_t = -\min\left(r_t A,\ clip(r_t,\ 1 - \epsilon_{low},\ 1 + \epsilon_{high})\, A\right)$$
#
# The minimum takes the smaller gain: to move on past the clip earns nothing, to move back always does. Five tokens of a
# good completion, $A = 1$, by hand:

# %%
ratio = torch.tensor([[0.5, 0.9, 1.0, 1.1, 2.0]])
A = torch.tensor([[1.0]])
-torch.min(ratio * A, ratio.clamp(0.8, 1.2) * A)

# %% [markdown]
# The training function takes log-probs:

# %%
Code(inspect.getsource(losses.ppo_clip), language="python")

# %%
logp_old = torch.full((1, 5), -2.0)
logp = (logp_old + ratio.log()).requires_grad_()
clip = losses.ClipConfig(low=0.2, high=0.2)
good = losses.ppo_clip(logp, logp_old, A, clip)
good.detach()

# %% [markdown]
# The gradient matters more than the value: $-\partial L / \partial \log \pi$ is how hard each token is still pulled
# up. At ratio 2 it is 0.

# %%
torch.autograd.grad(-good.sum(), logp)[0]

# %% [markdown]
# The tokens of a bad completion, $A = -1$, are pushed down until the ratio falls below 0.8.

# %%
bad = losses.ppo_clip(logp, logp_old, -A, clip)
torch.autograd.grad(-bad.sum(), logp)[0]

# %% [markdown]
# The push grows with the ratio: a bad token that became 8 times likelier is pushed down 8 times as hard, so a single
# token can cause a spike in the gradient. With a dual clip of 3 (`algorithm.dual_clip`, off by default) its gradient is
# 0 beyond ratio 3.

# %%
far = (torch.full((1, 1), -4.0) + torch.tensor(8.0).log()).requires_grad_()
for dual in (None, 3.0):
    loss = losses.ppo_clip(far, torch.full((1, 1), -4.0), -A, losses.ClipConfig(dual=dual))
    print(dual, torch.autograd.grad(-loss.sum(), far)[0])

# %% [markdown]
# A *surrogate* is what takes the place of $L_t$. The plot shows the gradient against the ratio for every surrogate with
# one ratio per token. CISPO uses the capped ratio (5 for `cispo_cap`) as a constant weight, so every token keeps a
# gradient; SAPO's gradient fades; CPGD's does not grow with the ratio.

# %%
pulls = {f"A = {a:+d}": toy_math.pulls(float(a)) for a in (1, -1)}
plots.curves(pulls, "−dL / dlog p", mark=1.0, log=True)

# %% [markdown]
# GSPO and GMPO have one ratio per completion, $r = \exp(\frac{1}{T} \sum_t \log r_t)$; GMPO clips each token's
# log-ratio before the mean, GSPO clips $r$. Inside the clip they agree, here for log-ratios of 0.3 and −0.1:

# %%
delta = torch.tensor([[0.3, -0.1]])
wide = losses.ClipConfig(low=0.5, high=0.5)
for name in ("ppo_clip", "gspo", "gmpo"):
    print(f"{name:10}", -losses.SURROGATES[name](delta, torch.zeros(1, 2), A, wide, None))

# %% [markdown]
# ## 3. KL to the reference
# KL(policy ‖ reference) $= \sum \pi \log(\pi / \pi_{ref})$, in nats per token, is estimated from the sampled token
# alone, with $d = \log \pi_{ref} - \log \pi$:
#
# $$k_1 = -d \qquad k_2 = \frac{d^2}{2} \qquad k_3 = e^d - d - 1$$
#
# A policy and a reference over a vocabulary of five tokens, and the exact KL:

# %%
policy = torch.tensor([2.5, 1.0, -1.0, 0.0, -1.0], dtype=torch.float64)
reference = torch.tensor([-0.5, 1.0, 2.0, 0.0, 0.0], dtype=torch.float64)
logp, logp_ref = policy.log_softmax(-1)[None], reference.log_softmax(-1)[None]
p = logp.exp()
(p * (logp - logp_ref)).sum()

# %% [markdown]
# Each estimator per token, and its mean under the policy. The means of `k1` and `k3` equal the exact value; that of
# `k2` does not. (20.0 bounds the exponent of `k3`: $e^d$ of a token that the policy made nearly impossible would
# overflow, and gradients of 10⁸ follow.)

# %%
for name, estimate in losses.KL.items():
    values = estimate(logp, logp_ref, 20.0, None)
    print(f"{name:6}", values, "mean", (p * values).sum())

# %% [markdown]
# In a *loss*, the gradient counts, with the sampled tokens held fixed. `k1` has a mean gradient of 0, since
# $\sum \pi \nabla \log \pi = 0$: the settings refuse it as a loss and allow it as a cost in the reward
# (`k1_in_reward`). `k2` has exactly the KL's gradient. `k3` has that of KL(reference ‖ policy): another direction to
# the same minimum, and GRPO's choice. `k3_k2` has the value of `k3` and the gradient of `k2`.

# %%
theta = policy.clone().requires_grad_()
new = theta.log_softmax(-1)[None]
(exact,) = torch.autograd.grad((new.exp() * (new - logp_ref)).sum(), theta, retain_graph=True)
print(f"{'exact':6}", exact)
for name, estimate in losses.KL.items():
    loss = (p * estimate(new, logp_ref, 20.0, None)).sum()
    print(f"{name:6}", torch.autograd.grad(loss, theta, retain_graph=True)[0])

# %% [markdown]
# A real run once used $clamp(d, 0, 10)$ in place of `k3` and logged a KL of 0. It is 0 wherever $d < 0$, for every
# token that the policy has made likelier (the left half of the plot); here it misses over nine tenths of the exact
# value.

# %%
(p * losses.kl_clamped_exhibit(logp, logp_ref)).sum()

# %%
plots.curves({"Estimators of one token": toy_math.kl_curves()}, "nats", mark=0.0, top=10)

# %% [markdown]
# ## 4. Reductions
# Three ways to average the per-token losses $l_{it}$ of $N$ completions with $T_i$ tokens, at most $T_{max}$:
# `sequence_mean` (of `grpo`), `token_mean` (`dapo`) and `constant_length` (`dr_grpo`):
#
# $$\frac{1}{N} \sum_i \frac{1}{T_i} \sum_t l_{it} \qquad
# \frac{\sum_{it} l_{it}}{\sum_i T_i} \qquad \frac{\sum_{it} l_{it}}{N\, T_{max}}$$
#
# Three completions of 8, 64 and `CAP` tokens with equal losses:

# %%
mask = torch.arange(CAP) < torch.tensor([[8], [64], [CAP]])
normalizer = losses.LossNormalizer(sequences=3, tokens=int(mask.sum()), max_completion_length=CAP)
per_token = torch.ones(3, CAP, requires_grad=True)
for name, reduce in losses.REDUCTIONS.items():
    (weight,) = torch.autograd.grad(reduce(per_token, mask, normalizer), per_token)
    print(f"{name:16} a token: {weight[:, 0]}   a completion: {weight.sum(1)}")

# %% [markdown]
# Under `sequence_mean` a token of the longest completion counts 64 times less than a token of the shortest: a long
# answer is hardly punished if wrong, and hardly rewarded if right. Under the others every token counts the same, so a
# long completion counts more.
#
# ## 5. The loss
#
# $$L = reduce(L_t) + \beta \cdot reduce(k_t)$$
#
# The policy term raises what earned more than its group, the KL term pulls back to the reference; a controller raises β
# while KL is above its band and lowers it below. An algorithm is one row of a table: advantage, surrogate, reduction,
# KL, clip.

# %%
ALGORITHMS["grpo"]

# %%
logp_old = torch.tensor([[-0.5, -1.0], [-0.7, -2.0]])
logp = logp_old + torch.tensor([[0.1, 0.3], [0.0, -0.1]])
inputs = losses.LossInputs(logp, logp_old, logp_old - 0.2, torch.tensor([[1.0], [-1.0]]), torch.ones(2, 2, dtype=bool))
config = losses.LossConfig(ALGORITHMS["grpo"], clip)
losses.loss_terms(inputs, config, beta=0.05, normalizer=losses.LossNormalizer(2, 4, 2))

# %% [markdown]
# Every algorithm of the package:

# %%
toy_math.algorithms()

# %% [markdown]
# ## 6. When objectives disagree
# The gradients of two objectives conflict: $g_1 \cdot g_2 < 0$. The progress of objective $i$ is $g_i \cdot step$.
# Under `sum`, the default, the larger gradient decides, and the other objective may get worse. PCGrad removes from each
# the component that opposes the other and adds what is left, which for exactly opposite gradients is nothing; MGDA
# takes the shortest vector from the origin to the line between the tips of both.

# %%
gradients = [torch.tensor([1.0, 0.4]), torch.tensor([-2.2, 1.0])]
gram = combine_gradients.gram([{"w": one} for one in gradients])
for name in ("sum", "pcgrad", "mgda"):
    share = combine_gradients.COMBINERS[name](gram, torch.ones(2, dtype=torch.float64), torch.Generator())
    step = combine_gradients.combine([{"w": one} for one in gradients], share)["w"]
    print(f"{name:8} step {step}   progress of 1 and 2: {torch.stack(gradients) @ step}")

# %% [markdown]
# All combiners; `cagrad` and `upgrad` need `pip install "grpo_nb[combine]"`:

# %%
answers = toy_math.conflict(gradients, weights=[1.0, 1.0])
tables.Table(answers)

# %%
plots.arrows([tuple(x.tolist()) for x in gradients], dict(zip(answers["combine"], answers["step"], strict=True)))

# %% [markdown]
# ## Exercises
# Answer first, then open. Each answer is runnable code.
#
# **1.** All rewards of a group are doubled and raised by 3. What happens to its `group_std` advantages?
#
# <details><summary>Answer</summary>
#
# Nothing: subtracting the mean removes the 3, dividing by $s$ removes the 2 (but for the 1e-4).
#
# ```python
# one = torch.tensor([[1.0, 0.0, 0.0, 1.0]])
# nine = torch.full((1, 4), 9)
# before = losses.advantages(losses.GroupRewards(one, nine), "group_std")
# after = losses.advantages(losses.GroupRewards(2 * one + 3, nine), "group_std")
# torch.testing.assert_close(before, after, atol=1e-3, rtol=0)
# ```
# </details>
#
# **2.** One of eight completions is right. Which advantage does it get, and which do the seven others get?
#
# <details><summary>Answer</summary>
#
# 2.4742 and −0.3535: a rare success has a large advantage, and the eight sum to 0.
#
# ```python
# eight = losses.GroupRewards(torch.eye(8)[:1], torch.full((1, 8), 9))
# found = losses.advantages(eight, "group_std")[0, :, 0]
# torch.testing.assert_close(found, torch.tensor([2.4742] + [-0.3535] * 7), atol=1e-4, rtol=0)
# ```
# </details>
#
# **3.** A token of a bad completion, $A = -1$, has ratio 0.7; another has 1.5; the clip is 0.2. Which of them still
# has a gradient?
#
# <details><summary>Answer</summary>
#
# Only the second: 0.7 is below 0.8, so it has been pushed far enough.
#
# ```python
# x = torch.tensor([[0.7, 1.5]]).log().requires_grad_()
# loss = losses.ppo_clip(x, torch.zeros(1, 2), torch.tensor([[-1.0]]), losses.ClipConfig(low=0.2, high=0.2))
# torch.testing.assert_close(torch.autograd.grad(loss.sum(), x)[0], torch.tensor([[0.0, 1.5]]))
# ```
# </details>
#
# **4.** A token is $e$ times as likely under the policy as under the reference. What are `k1`, `k2` and `k3`?
#
# <details><summary>Answer</summary>
#
# $d = -1$: 1, 0.5 and $e^{-1} = 0.3679$ nats.
#
# ```python
# found = [float(losses.KL[k](torch.tensor([[-1.0]]), torch.tensor([[-2.0]]), 20.0, None)) for k in ("k1", "k2", "k3")]
# torch.testing.assert_close(found, [1.0, 0.5, 0.3679], atol=1e-4, rtol=0)
# ```
# </details>
#
# **5.** β rises from 0.05 to 0.1. Which of the two loss terms in section 5 changes, and how?
#
# <details><summary>Answer</summary>
#
# `kl` doubles; `policy` does not change.
#
# ```python
# low, high = (losses.loss_terms(inputs, config, beta, losses.LossNormalizer(2, 4, 2)) for beta in (0.05, 0.1))
# torch.testing.assert_close(high["kl"], 2 * low["kl"])
# torch.testing.assert_close(high["policy"], low["policy"])
# ```
# </details>

# %%
print(kernel.memory_held())

# %% [markdown]
# ## Next
# In the settings cell of [01_load](01_load.ipynb), `CHANGES = {"algorithm.name": "gspo"}` trains with another row, and
# `"algorithm.gradient_report_every": 10` logs each objective's gradient. [06_fault_lab](06_fault_lab.ipynb) puts bugs
# into a run.
