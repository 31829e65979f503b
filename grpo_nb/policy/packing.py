"""Shared prompts: one row holds a prompt once and all of its completions, each of which sees the prompt and itself.

A group of K completions of T tokens after P tokens of prompt takes P + K T tokens through the model instead of
K (P + T). The attention mask is a tree: the prompt is causal, a completion's token sees the prompt and the earlier
tokens of its own completion, at the positions that it would have alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from grpo_nb.policy.source import ModelError

Ids = Sequence[int]

MASKED = 1.5
"""Cost of attention under a tree mask relative to a causal one: no fused kernel skips what the mask hides."""
WORTH = 0.9
"""Share of the cost alone below which prompts are shared."""

PADDING, PROMPT = -1, 0
"""Segment of a filler and of a prompt's token; completion k of its row is segment k + 1."""


@dataclass(frozen=True)
class PackedBatch:
    """Completions after shared prompts, ready for the model; the counterpart of `Batch`."""

    input_ids: Int[Tensor, "prompt sequence"]
    segments: Int[Tensor, "prompt sequence"]
    position_ids: Int[Tensor, "prompt sequence"]
    rows: Int[Tensor, "batch"]
    """The packed row of each completion."""
    columns: Int[Tensor, "batch token"]
    """The column whose logits predict each completion token; any outside the mask."""
    tokens: Int[Tensor, "batch token"]
    completion_mask: Bool[Tensor, "batch token"]
    start: int
    """The prompts' last column: from there on logits are needed."""

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def to(self, device: torch.device) -> "PackedBatch":
        """Copy of the batch on another device."""
        moved: dict[str, Any] = {k: value.to(device) for k, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **moved)

    def pick(self, values: Float[Tensor, "prompt column"]) -> Float[Tensor, "batch token"]:
        """Values at the columns, counted from `start`, that predict the completion tokens."""
        return values.flatten()[self._places(values.shape[1])]

    def pick_logits(self, logits: Float[Tensor, "prompt column vocab"]) -> Float[Tensor, "batch token"]:
        """The logit of each completion token; no logits are copied for completions that share a column."""
        places = self._places(logits.shape[1]) * logits.shape[2] + self.tokens
        return logits.flatten().gather(0, places.flatten()).view_as(places)

    def _places(self, columns: int) -> Int[Tensor, "batch token"]:
        return self.rows[:, None] * columns + self.columns - self.start

    def attention_mask(self, dtype: torch.dtype) -> Float[Tensor, "prompt 1 sequence sequence"]:
        """0 where a token sees another, the lowest number of the type elsewhere. A filler sees itself."""
        width = self.segments.shape[1]
        causal = torch.ones(width, width, dtype=torch.bool, device=self.segments.device).tril()
        seen, sees = self.segments[:, None, :], self.segments[:, :, None]
        allowed = causal & ((seen == PROMPT) | (seen == sees)) & (seen != PADDING)
        allowed |= torch.eye(width, dtype=torch.bool, device=allowed.device)
        mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
        return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]


def pack(prompts: Sequence[Ids], completions: Sequence[Ids], prompt_of: Sequence[int], pad_id: int) -> PackedBatch:
    """Pack completions after their prompts, on the CPU; prompts end in one column, padding stands on both sides.

    Args:
        prompts: token ids, at least one each.
        completions: token ids, in the order of the batch's rows.
        prompt_of: the prompt of each completion; those of one prompt need not be neighbours.
        pad_id: id of the padding.
    """
    left, longest = max(map(len, prompts)), max(map(len, completions))
    ends = [left] * len(prompts)
    starts = []
    for row, completion in zip(prompt_of, completions, strict=True):
        starts.append(ends[row])
        ends[row] += len(completion)
    shape = len(prompts), max(ends)
    ids = torch.full(shape, pad_id, dtype=torch.long)
    segments = torch.full(shape, PADDING)
    positions = torch.zeros(shape, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        place = slice(left - len(prompt), left)
        ids[row, place], segments[row, place] = torch.tensor(prompt), PROMPT
        positions[row, place] = torch.arange(len(prompt))
    tokens = torch.full((len(completions), longest), pad_id, dtype=torch.long)
    columns = torch.full(tokens.shape, left - 1)
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    for k, (row, completion, start) in enumerate(zip(prompt_of, completions, starts, strict=True)):
        count = len(completion)
        place = slice(start, start + count)
        tokens[k, :count] = ids[row, place] = torch.tensor(completion)
        segments[row, place] = k + 1
        positions[row, place] = len(prompts[row]) + torch.arange(count)
        columns[k, 1:count] = torch.arange(start, start + max(count - 1, 0))
        mask[k, :count] = True
    return PackedBatch(ids, segments, positions, torch.tensor(prompt_of), columns, tokens, mask, left - 1)


def pays(config: Any, prompts: Sequence[Ids], completions: Sequence[Ids], prompt_of: Sequence[int]) -> bool:
    """Whether shared prompts are cheaper than rows of their own, and no layer's window is shorter than a row.

    Counts operations: a token of a row of S costs its weights and S / (6 hidden) of that in attention, as a layer has
    24 hidden^2 of the one and 4 S hidden of the other (Kaplan et al. 2020, table 1).

    Args:
        config: of the language model.
        prompts, completions, prompt_of: as `pack`.
    """
    longest = max(len(prompts[p]) + len(ids) for p, ids in zip(prompt_of, completions, strict=True))
    if longest > (window(config) or longest):
        return False
    left, right = max(map(len, prompts)), max(map(len, completions))
    own = [0] * len(prompts)
    for row, completion in zip(prompt_of, completions, strict=True):
        own[row] += len(completion)
    alone, packed, six = left + right, left + max(own), 6 * config.hidden_size
    cost_alone = len(completions) * alone * (1 + alone / six)
    return bool(len(prompts) * packed * (1 + MASKED * packed / six) < WORTH * cost_alone)


def window(config: Any) -> int | None:
    """The fewest tokens that any layer of a model looks back; None where all layers see everything.

    Within it a window hides nothing, and the tree mask, which every layer gets as it is, is right.
    """
    sizes = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return min((size for size in sizes if size), default=None)


def check_rows(prompt_ids_B: Sequence[Sequence[int]], completion_ids_B: Sequence[Sequence[int]], context: int) -> None:
    """Refuse rows that cannot be scored.

    Raises:
        ModelError: lists of different lengths, an empty prompt, or a row beyond the context.
    """
    if len(prompt_ids_B) != len(completion_ids_B) or not prompt_ids_B:
        raise ModelError(f"{len(prompt_ids_B)} prompts for {len(completion_ids_B)} completions; needs one for each")
    if not all(map(len, prompt_ids_B)):
        raise ModelError("a prompt without tokens: the first completion token needs one to follow")
    longest = max(len(p) + len(c) for p, c in zip(prompt_ids_B, completion_ids_B, strict=True))
    if longest > context:
        raise ModelError(f"a row of {longest} tokens; the model's context is {context}: shorten prompts or completions")
