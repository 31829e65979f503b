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
# # 3. GRPO: train on two objectives, and steer while it trains
#
# The policy samples a group of completions for every prompt; those that score above their group's mean become likelier.
# A KL penalty, weighted by one β per objective, keeps it near the reference, the frozen result of SFT. **The goal**: to
# remove the flaws that SFT taught, to steer a run, and to follow one step through the code.
#
# | | demo |
# |---|---|
# | hardware | 2 CPU cores, no GPU |
# | time | 26 s (`make run`, two CPU cores) |
# | memory | 0.69 GiB at the peak (`make run`) |
# | needs | the result of [02_sft](02_sft.ipynb) |
#
# After a closed browser, a restarted kernel or a lost machine, run the notebook again: training continues from the
# newest checkpoint.

# %%
import inspect

import torch
from IPython.display import Code

import grpo_nb as g
from grpo_nb import losses
from grpo_nb.jupyter import kernel, project
from grpo_nb.report import report
from grpo_nb.training import grpo, replay

print("grpo_nb", g.__version__)

# %% tags=["parameters"]
RUN = None  # the run that 01_load opened last; a name or a path opens another one
STEER_STEPS = 200  # that the last section trains, for you to steer; 0 leaves it out

# %%
run = project.open_run(RUN, needs="sft")
config, own = run.config, project.own(run)
print(config.batch.describe())

# %% [markdown]
# ## Start
# The cell trains the first third of the steps in a thread and returns at once; the dashboard appears below it. To keep
# it in view, right-click it and choose *Create New View for Cell Output*.

# %%
part = max(config.run.steps // 3, 1)
training = g.start(run, steps=part, tasks=own.tasks, rewards=own.rewards)
training

# %% [markdown]
# ## How to read it
# | curve | healthy | a warning |
# |---|---|---|
# | reward | rises, then levels off | flat from the start: see the groups without signal |
# | KL | inside its band; single steps may spike | stays above it: β too low or learning rate too high |
# | length | far under the cap | at the cap: completions are truncated |
# | groups without signal | some; nearly all once solved | nearly all at a low reward: nothing to learn |
# | gradient norm | flat, or slowly falling | spikes; marks show where a guard acted |

# %% [markdown]
# ## Change a setting
# A change is **requested** until the next step begins, then **active**. With `auto`, the controller raises β while KL
# (the median of five steps) is above its band and lowers it below; the slider or the box sets β by hand. Measured on
# the demo, changed for both objectives after step 10, fairness shown (`grpo(run, steps=40)`, two CPU cores, seed 0):
#
# | change | steps 11 to 15 | steps 36 to 40 |
# |---|---|---|
# | nothing | reward 0.86, KL 0.04, without signal 45% | reward 0.98, KL 0.12, without signal 88% |
# | β to 0.4 | reward 0.86, KL 0.04, without signal 45% | reward 0.95, **KL 0.05**, without signal 75% |
# | β to 0 | reward 0.86, KL 0.04, without signal 45% | reward 0.99, KL 0.09, without signal 90% |
# | temperature to 0.3 | reward 0.96, KL 0.07, **without signal 100%** | reward 1.00, KL 0.10, without signal 100% |
# | temperature to 2 | **reward 0.20**, KL 0.01, without signal 5% | reward 0.44, KL 0.07, without signal 0% |
#
# β acts slowly, through what the model learns; temperature acts at once, on sampling: a low one makes the completions
# of a group alike, a high one makes them noise. In 30 steps the demo's own β, about 0.03, cannot be distinguished from
# 0; in a long run, nothing but β stops KL from growing until texts degenerate.
#
# Every change leaves a mark in its curve and a line in the log. `auto` or the old number restores the setting, not the
# weights.
#
# The next cell waits. The notebook's stop button (■) ends the wait; pressed again, it ends training after the current
# step and saves, like *Stop* in the dashboard.

# %%
await training.wait()

# %% [markdown]
# ## One step, inside
# ```
#  prompt ──► K completions ──► rewards ──► advantages ──► loss = policy + β·KL ──► gradient ──► weights
#              sampled           task        within the     ratio, clip,             clipped       Adam
#                                            group          log-probs of reference
# ```
# The function that trains. Parts 1 to 5 are taken apart below:

# %%
Code(inspect.getsource(grpo.grpo_step), language="python")

# %% [markdown]
# A checkpoint and the seed determine every token, so `replay` can recompute a step that follows a checkpoint, from its
# prompts to its loss:

# %%
step = replay.replay(run, tasks=own.tasks, rewards=own.rewards)
objective = next(iter(config.objectives))
logged = run.metrics().set_index("step").loc[step.plan.step]
print("step", step.plan.step, "KL", step.batch.kl[objective], "logged", logged[f"kl/{objective}"])

# %% [markdown]
# **1, 2. Completions and rewards** of the first prompt whose rewards differ:

# %%
rows, rollouts = step.group(objective), step.batch.rollouts
print(rollouts.example(rows[0]).prompt)
for i in rows:
    print(f"{step.batch.scores[i].value:6.3f}  {rollouts.texts[i]}")

# %% [markdown]
# **4. Advantages**: each reward minus the group's mean, divided by the group's standard deviation.

# %%
R = torch.tensor([[step.batch.scores[i].value for i in rows]])
lengths = step.batch.lengths[rows][None]
print("by hand", (R - R.mean()) / (R.std() + 1e-4))
print("library", losses.advantages(losses.GroupRewards(R, lengths), "group_std")[..., 0])
print("step   ", step.batch.advantages[rows, 0])

# %% [markdown]
# **3, 5. Log-probs and ratio** of the same tokens under the old policy, which sampled them, the policy now and the
# reference. Before the first update, old and now are equal: the ratio is 1, and nothing is clipped.

# %%
inputs = step.inputs(rows)
logp, old, ref, mask = inputs.logp, inputs.logp_old, inputs.logp_ref, inputs.mask
ratio, A, d = (logp - old).exp(), inputs.advantage, ref - logp
best = int(A[:, 0].argmax())
columns = {"old": old, "now": logp, "reference": ref, "ratio": ratio, "k3": d.exp() - d - 1}
print(f"{'token':14}", *(f"{name:>9}" for name in columns))
for t, token in enumerate(step.policy.token_texts(rollouts.completion_ids[rows[best]])):
    print(f"{token!r:14}", *(f"{table[best, t].item():9.4f}" for table in columns.values()))

# %% [markdown]
# **The loss**: for each token $-\min(rA, clip(r)A) + \beta\, k_3$, averaged over each completion, then over the group.
# $k_3 = e^d - d - 1$ with $d = \log \pi_{ref} - \log \pi$ estimates KL(policy ‖ reference).

# %%
clip, beta = step.plan.loss.clip, step.plan.betas[objective]
gain = torch.min(ratio * A, ratio.clamp(1 - clip.low, 1 + clip.high) * A)
per_token = (-gain + beta * (d.exp() - d - 1)) * mask
by_hand = (per_token.sum(1) / mask.sum(1)).mean()
terms = losses.loss_terms(inputs, step.plan.loss, beta, step.normalizer(rows))
print(f"by hand {by_hand.item():.6f}, library {sum(terms.values()).item():.6f}:")
print(*(f"{name} {value.item():.6f}" for name, value in terms.items()))

# %% [markdown]
# (Both agree for the demo's `grpo`; another `algorithm.name` has another surrogate, reduction or KL.) The policy term
# is near 0, since a group's advantages sum to 0 and all ratios are 1. Its gradient, the mean of $-A \nabla \log \pi$,
# is not: it makes good completions likelier.

# %%
terms["policy"].backward()
print("gradient norm", torch.cat([p.grad.flatten() for p in step.policy.parameters_by_name().values()]).norm().item())
del step, inputs, logp, ratio, d, columns, gain, per_token, by_hand, terms

# %% [markdown]
# ## Set β from code
# Twice the last β, or 0.1 if that product is 0 or out of bounds; `auto` gives β back to the controller.

# %%
objective = next(iter(config.objectives))
beta = run.knobs[f"beta/{objective}"]
last = run.metrics()[f"beta/{objective}"].iloc[-1]
beta.set(2 * last if 0 < 2 * last <= beta.bounds[1] else 0.1, by="notebook 03")
training = g.start(run, steps=part + 2, tasks=own.tasks, rewards=own.rewards)
await training.wait()

# %%
report.knob_trace(run, f"beta/{objective}", around=part)

# %%
beta.set_auto(by="notebook 03")

# %% [markdown]
# ## A restart loses nothing
# *Try it*: restart the kernel while the next cell trains, then *Run All*. The steps after the newest checkpoint are
# recomputed bit for bit, and the curves join. A run started with `g.start(run, where="process")` outlives the kernel;
# `g.attach(run)` shows and steers it from any other.

# %%
training = g.start(run, tasks=own.tasks, rewards=own.rewards)
training

# %%
await training.wait()

# %% [markdown]
# Dotted lines mark every resume. The log of starts and ends:

# %%
report.starts(run)

# %% [markdown]
# ## After
# The held-out examples again: bias, the hallucinated share, and accuracy.

# %%
report.evaluation(g.evaluate(run, stage="latest", tasks=own.tasks))

# %% [markdown]
# ## Steer it yourself
# `STEER_STEPS` more steps, in which you can change β and temperature.

# %%
training = g.start(run, steps=config.run.steps + STEER_STEPS, tasks=own.tasks, rewards=own.rewards)
display(training)
await training.wait()

# %% [markdown]
# ## Exercises
# Answer first, then open. Each answer is runnable code.
#
# **1.** A group of 8 has the rewards 1, 1, 1, 1, 1, 1, 1, 1. What does it teach?
#
# <details><summary>Answer</summary>
#
# Nothing about the reward: every advantage is 0, and only the KL penalty acts. The panel "Truncation, groups without
# signal" shows their share.
#
# ```python
# same = losses.GroupRewards(torch.ones(1, 8), torch.full((1, 8), 9))
# assert not same.has_signal().any() and not losses.advantages(same, "group_std").any()
# ```
# </details>
#
# **2.** In the first update of a step, every ratio is 1. What would a clip of 0.01 instead of 0.2 change?
#
# <details><summary>Answer</summary>
#
# Nothing: clipping acts from the second update on (`batch.num_iterations` or `batch.mini_batch`).
#
# ```python
# x, A = torch.zeros(1, 3), torch.tensor([[0.7]])
# narrow, wide = (losses.ppo_clip(x, x, A, losses.ClipConfig(low=c, high=c)) for c in (0.01, 0.2))
# assert torch.equal(narrow, wide)
# ```
# </details>
#
# **3.** At the very first step the policy is the reference. How large is the KL term, and its gradient?
#
# <details><summary>Answer</summary>
#
# Both are 0, whatever β: the penalty acts once the policy has moved.
#
# ```python
# x = torch.tensor([[-0.5, -2.0]], requires_grad=True)
# kl = losses.kl_k3(x, x.detach(), 20.0)
# assert not kl.any() and not torch.autograd.grad(kl.sum(), x)[0].any()
# ```
# </details>
#
# **4.** At ratio 1, a token has advantage 1 and is 1.5 nats likelier than under the reference. At which β does the
# penalty (`k3`) cancel the gradient of the advantage?
#
# <details><summary>Answer</summary>
#
# The gradient of `k3` is $1 - e^{-1.5} = 0.777$ per unit of β, so at β = 1.29. The demo's 0.03 is far weaker.
#
# ```python
# x = torch.tensor([[-1.0]], requires_grad=True)
# (pull,) = torch.autograd.grad(losses.kl_k3(x, torch.tensor([[-2.5]]), 20.0).sum(), x)
# assert abs(1 / pull.item() - 1.29) < 0.005
# ```
# </details>

# %%
print(kernel.memory_held())

# %% [markdown]
# Next: [04_diagnostics](04_diagnostics.ipynb) shows whether the gain is beyond chance, and what went wrong during
# training.
