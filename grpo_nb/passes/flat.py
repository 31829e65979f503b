"""One line of tokens without padding: prompts first, each once, and the completions after them.

A batch of rows as long as its longest wastes what the shorter ones lack, and repeats a prompt for each completion. In
a line every token is computed once, whatever the lengths are; attention gets the places where sequences begin.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

Ids = Sequence[int]


@dataclass(frozen=True)
class Spans:
    """Sequences that lie one after the other: span i is [ends[i], ends[i + 1])."""

    ends: Int[Tensor, "span_plus_one"]
    """int32, from 0."""
    longest: int

    @staticmethod
    def of(lengths: Sequence[int]) -> "Spans":
        """Spans of these lengths, on the CPU."""
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return Spans(ends, max(lengths))


@dataclass(frozen=True)
class Tree:
    """Attention tree: a token sees the earlier tokens of its span; a completion's tokens also see their prompt."""

    spans: Spans
    """Spans of the complete line, causal among themselves."""
    prompts: Spans | None = None
    """Spans of shared prompts, the first of the line; None where each span has its own prompt."""
    answers: Spans | None = None
    """Rest of the line by prompt: all completions of one prompt are one span."""
    shared: int = 0
    """Tokens of the shared prompts."""


@dataclass(frozen=True)
class FlatBatch:
    """Completions with their prompts in one line, ready for the model; the counterpart of `Batch`."""

    input_ids: Int[Tensor, "token"]
    position_ids: Int[Tensor, "token"]
    tree: Tree
    places: Int[Tensor, "target"]
    """The token that predicts each completion token, completion after completion."""
    targets: Int[Tensor, "target"]
    cells: Int[Tensor, "target"]
    """Index of each target in the flattened [batch, column] table."""
    completion_mask: Bool[Tensor, "batch column"]

    def __len__(self) -> int:
        return self.completion_mask.shape[0]

    def to(self, device: torch.device) -> "FlatBatch":
        """Copy on another device, in one transfer that does not wait for the device's other work."""
        own = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        spans = {name: value for name, value in vars(self.tree).items() if isinstance(value, Spans)}
        moved = iter(_moved([*own.values(), *(value.ends for value in spans.values())], device))
        tensors: dict[str, Any] = {name: next(moved) for name in own}
        there: dict[str, Any] = {name: replace(value, ends=next(moved)) for name, value in spans.items()}
        return replace(self, tree=replace(self.tree, **there), **tensors)


def flatten(prompts: Sequence[Ids], completions: Sequence[Ids], prompt_of: Sequence[int], shares: bool) -> FlatBatch:
    """Completions and their prompts as one line, on the CPU.

    Args:
        prompts: token ids, at least one each.
        completions: token ids, in the order of the batch's rows.
        prompt_of: the prompt of each completion; those of one prompt need not be neighbours.
        shares: whether a prompt stands once before all of its completions.
    """
    if not shares:
        prompts, prompt_of = [prompts[p] for p in prompt_of], range(len(completions))
    order = sorted(range(len(completions)), key=lambda row: prompt_of[row])
    line: list[int] = []
    positions: list[int] = []
    last: list[int] = []  # the place of each prompt's last token
    starts = [0] * len(completions)

    def append(ids: Ids, first: int) -> None:
        line.extend(ids)
        positions.extend(range(first, first + len(ids)))

    if shares:
        for prompt in prompts:
            append(prompt, 0)
            last.append(len(line) - 1)
    shared = len(line)
    for row in order:
        prompt = prompts[prompt_of[row]]
        if not shares:
            append(prompt, 0)
            last.append(len(line) - 1)
        starts[row] = len(line)
        append(completions[row], len(prompt))
    width = max(map(len, completions))
    places: list[int] = []
    cells: list[int] = []
    for row, completion in enumerate(completions):
        count = len(completion)
        places += [last[prompt_of[row]], *range(starts[row], starts[row] + count - 1)][:count]
        cells += range(row * width, row * width + count)
    mask = torch.zeros(len(completions), width, dtype=torch.bool)
    mask.view(-1)[cells] = True
    targets = [token for completion in completions for token in completion]
    return FlatBatch(
        torch.tensor(line),
        torch.tensor(positions),
        _tree(prompts, [completions[row] for row in order], [prompt_of[row] for row in order], shared),
        torch.tensor(places, dtype=torch.long),
        torch.tensor(targets, dtype=torch.long),
        torch.tensor(cells, dtype=torch.long),
        mask,
    )


def _moved(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    joined = torch.cat([tensor.flatten().long() for tensor in tensors])
    joined = joined.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else joined.to(device)
    parts = joined.split([tensor.numel() for tensor in tensors])
    return [part.to(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _tree(prompts: Sequence[Ids], completions: Sequence[Ids], prompt_of: Sequence[int], shared: int) -> Tree:
    """Tree of completions in the order of their prompts."""
    if not shared:
        return Tree(Spans.of([len(prompts[p]) + len(ids) for p, ids in zip(prompt_of, completions, strict=True)]))
    behind = [0] * len(prompts)
    for p, ids in zip(prompt_of, completions, strict=True):
        behind[p] += len(ids)
    own = [len(prompt) for prompt in prompts]
    spans = Spans.of([*own, *map(len, completions)])
    return Tree(spans, Spans.of(own), Spans.of(behind), shared=shared)
