"""A LoRA policy as one model: its adapter is added to the weights that it acts on."""

from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn

from grpo_nb.policy.loading import quietly
from grpo_nb.policy.model import Policy
from grpo_nb.policy.source import ModelError

MOST_KL = 0.05
"""Nats per token from the policy to the merged model; rounding to bfloat16 stays below a tenth of it."""
PROBE = "Who was late? The grandson of Ann, in 1987; he's 31 years old. What do we know of 東京 and its cafés?"


def merged(policy: Policy) -> Policy:
    """The policy with its adapter in the base weights, W + (alpha / r) B A; a policy that trains in full is unchanged.

    The given policy cannot be used afterwards: its base model is the result's. Sums are rounded to the type of the
    base weights. An output head that shares its weights with the input embeddings gets its own where the adapter acts
    on one of the two.

    Raises:
        ModelError: the base weights are quantised, a sum is not finite, or the merged model gives other log-probs.
    """
    policy.settle()
    policy.refuse_interrupted()
    if not isinstance(policy.model, PeftModel):
        return policy
    base: Any = policy.model.get_base_model()
    if getattr(base, "is_quantized", False):
        raise ModelError(
            f"the base weights of '{policy.name}' are quantised, so an adapter cannot be added to them without loss. "
            "Export the adapter alone (format='adapter'), or train on the model before it was quantised"
        )
    names, before = list(policy.model.active_adapters), _log_probs(policy)
    _untie(base)
    try:
        with quietly():
            whole: Any = policy.model.merge_and_unload(safe_merge=True, adapter_names=names)
    except ValueError as error:  # peft's word for numbers that are not finite
        raise ModelError(f"the adapter cannot be merged into '{policy.name}': {error}. Export another stage") from error
    whole.requires_grad_(True)
    _state_tie(whole)
    made = Policy(whole, policy.tokenizer, policy.name, policy.tokenization.switches, policy.origin)
    made._silenced = policy._silenced  # the base model's own configuration, for saving it
    difference = float((before.exp() * (before - _log_probs(made))).sum(-1).mean())
    if not difference <= MOST_KL:
        raise ModelError(
            f"merged, '{policy.name}' is another model: the mean KL to it is {difference:.2g} nats per token, at most "
            f"{MOST_KL} is rounding. Export the adapter alone (format='adapter')"
        )
    return made


def _log_probs(policy: Policy) -> Tensor:
    """[T, V] of every next token of PROBE."""
    ids: Any = policy.tokenizer(PROBE, return_tensors="pt")["input_ids"][:, : policy.context].to(policy.device)
    with torch.no_grad(), policy.eval_mode(), quietly():
        logits: Tensor = policy.model(input_ids=ids).logits[0]
        return logits.float().log_softmax(-1)


def _ends(base: Any) -> tuple[Any, Any]:
    """The input embeddings and the output head, either of them perhaps in an adapter's wrapper; None for none."""
    return base.get_input_embeddings(), base.get_output_embeddings()


def _untie(base: Any) -> None:
    """Give an output head its own weights where the adapter acts on it or on the embeddings that it shares them with:
    what is added to one must not change the other."""
    outer = _ends(base)
    inner = [getattr(end, "base_layer", end) for end in outer]
    if None in inner or all(a is b for a, b in zip(outer, inner, strict=True)):
        return
    if inner[0].weight is inner[1].weight:
        inner[1].weight = nn.Parameter(inner[1].weight.detach().clone(), requires_grad=False)


def _state_tie(whole: Any) -> None:
    """Let the configuration say whether embeddings and head share their weights, so that both are saved."""
    embeddings, head = _ends(whole)
    if head is None or not whole.config.get_text_config().tie_word_embeddings:
        return
    if embeddings.weight is not head.weight:
        for config in (whole.config, whole.config.get_text_config()):
            config.tie_word_embeddings = False
        whole.all_tied_weights_keys = {}
