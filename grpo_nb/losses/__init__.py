"""The mathematics of GRPO as pure functions: tensors and plain numbers in, tensors out.

    shaping      rewards before they are compared
    advantages   rewards of a group -> advantages
    surrogates   what each token contributes, and what holds it
    kl           KL(policy || reference), estimator by estimator
    weights      what multiplies a token: another sampler's correction, the entropy mask
    reductions   per-token numbers -> one
    terms        the loss: policy + KL + entropy
    diagnostics  what the log reports of a step

An algorithm is a row of `grpo_nb.algorithms.ALGORITHMS` that names one advantage, surrogate, reduction and KL.
Everything computes in the type it is given; log-probs are in nats. `logp` carries the gradient; `logp_old` (the
policy that sampled, before this step's updates) and `logp_ref` (the reference) never do. What a mask leaves out may
hold anything, NaN and inf too: it is replaced before any exp, because a NaN that is multiplied by 0 afterwards is
still a NaN in the gradient.
"""

from grpo_nb.losses.advantages import ADVANTAGES, GroupRewards, advantages, group_std, has_signal
from grpo_nb.losses.diagnostics import clamped_share, clip_fractions, masked_mean, ratio_deviation
from grpo_nb.losses.kl import (
    KL,
    kl_clamped_exhibit,
    kl_k1,
    kl_k2,
    kl_k3,
    kl_k3_k2,
    kl_loss,
    kl_weight,
)
from grpo_nb.losses.reductions import REDUCTIONS, constant_length, sequence_mean, token_mean
from grpo_nb.losses.shaping import Moments, overlong_penalty, stop_properly
from grpo_nb.losses.surrogates import (
    SURROGATES,
    ClipConfig,
    cispo,
    cispo_cap,
    cpgd,
    gmpo,
    gspo,
    gspo_token,
    ppo_clip,
    sapo,
)
from grpo_nb.losses.terms import LossConfig, LossInputs, loss_terms
from grpo_nb.losses.tokens import LossNormalizer, log_ratio
from grpo_nb.losses.weights import Correction, correction, top_entropy

__all__ = [
    "ADVANTAGES",
    "KL",
    "REDUCTIONS",
    "SURROGATES",
    "ClipConfig",
    "Correction",
    "GroupRewards",
    "LossConfig",
    "LossInputs",
    "LossNormalizer",
    "Moments",
    "advantages",
    "cispo",
    "cispo_cap",
    "clamped_share",
    "clip_fractions",
    "constant_length",
    "correction",
    "cpgd",
    "gmpo",
    "group_std",
    "gspo",
    "gspo_token",
    "has_signal",
    "kl_clamped_exhibit",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kl_k3_k2",
    "kl_loss",
    "kl_weight",
    "log_ratio",
    "loss_terms",
    "masked_mean",
    "overlong_penalty",
    "ppo_clip",
    "ratio_deviation",
    "sapo",
    "sequence_mean",
    "stop_properly",
    "token_mean",
    "top_entropy",
]
