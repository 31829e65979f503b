"""A policy in JSON values: its origin and the choices made for it."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from grpo_nb.policy import anatomy, template_date
from grpo_nb.policy.eval_mode import Silenced


def describe(policy: Any, size: int, silenced: Sequence[Silenced]) -> dict[str, object]:
    """Description of a policy for people and the log; `size`: parameters of the model before a reference was added."""
    tokenization, model = policy.tokenization, policy.model
    learning = list(policy.parameters_by_name().values())
    return {
        "name": policy.name,
        "architecture": type(anatomy.plain(model)).__name__,
        "parameters": size,
        "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "train": "full" if isinstance(model, PreTrainedModel) else f"lora, rank {anatomy.rank(model)}",
        "dtype": str(policy.dtype).removeprefix("torch."),
        "trainable_dtype": str(learning[0].dtype).removeprefix("torch."),
        "device": str(policy.device),
        "context": policy.context,
        "vocabulary": tokenization.rows,
        "stop tokens": {tokenization.token(i): i for i in policy.stop_token_ids},
        "turn_end": tokenization.token(tokenization.turn_end),
        "pad": f"{tokenization.token(policy.pad_id)} ({policy.pad_id}): {tokenization.pad_reason}",
        "bos": None if tokenization.bos is None else tokenization.token(tokenization.bos),
        "chat_template": bool(policy.tokenizer.chat_template),
        "reference": policy.has_reference,
        "notes": _notes(policy, silenced),
    }


def _notes(policy: Any, off: Sequence[Silenced]) -> list[str]:
    tokenization = policy.tokenization
    dropped = f"dropout set to 0 in {len(off)} places (or router noise), e.g. {off[0].name}" if off else ""
    lacking = tokenization.beyond
    beyond = f"{len(lacking)} tokens without a row, refused in prompts, e.g. {lacking[:1]}"
    dated = f"the chat template writes a date: {tokenization.date:%Y-%m-%d}"
    notes = (
        dropped,
        beyond if lacking else "",
        anatomy.towers_note(policy.model),
        dated if template_date.is_read(policy.tokenizer) else "",
    )
    return [note for note in notes if note]
