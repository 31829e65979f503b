"""A LoRA policy as one model: its adapter is added to the weights that it acts on."""

from typing import Any

from peft import PeftModel

from grpo_nb.policy.loading import quietly
from grpo_nb.policy.model import Policy
from grpo_nb.policy.source import ModelError


def merged(policy: Policy) -> Policy:
    """The policy with its adapter in the base weights, W + (alpha / r) B A; one that trains in full as it is.

    The given policy cannot be used afterwards: its base model is the result's. Sums are rounded to the type of the
    base weights.

    Raises:
        ModelError: the base weights are quantised, or a sum is not finite.
    """
    policy.settle()
    policy.refuse_torn()
    if not isinstance(policy.model, PeftModel):
        return policy
    base: Any = policy.model.get_base_model()
    if getattr(base, "is_quantized", False):
        raise ModelError(
            f"the base weights of '{policy.name}' are quantised, so an adapter cannot be added to them without loss. "
            "Export the adapter alone (format='adapter'), or train on the model before it was quantised"
        )
    names = list(policy.model.active_adapters)
    try:
        with quietly():
            whole: Any = policy.model.merge_and_unload(safe_merge=True, adapter_names=names)
    except ValueError as error:  # peft's word for numbers that are not finite
        raise ModelError(f"the adapter cannot be merged into '{policy.name}': {error}. Export another stage") from error
    whole.requires_grad_(True)
    made = Policy(whole, policy.tokenizer, policy.name, policy.tokenization.switches, policy.origin)
    made._silenced = policy._silenced  # the base model's own configuration, for saving it
    return made
