"""Completions of a few tokens after shared prompts, for `LlamaLayers`: prompts and completions in rectangles."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from grpo_nb.policy.llama_layers import LlamaLayers

Ids = Sequence[int]


@dataclass(frozen=True)
class GroupedBatch:
    """Rows with a prompt and then, one after the other, its completions without their last tokens.

    Both are padded on the right: a causal mask alone hides what follows a prompt from it.
    """

    input_ids: Int[Tensor, "prompt sequence"]
    positions: Int[Tensor, "prompt sequence"]
    mask: Float[Tensor, "#prompt 1 query sequence"]
    """Attention mask of each prompt's last token and its completions: 0 or -inf."""
    width: int
    """Width of a prompt, with its padding."""
    predicts: Int[Tensor, "queries"]
    """Places in `input_ids` that a token is predicted from: of each row a prompt's last token, then completions."""
    places: Int[Tensor, "batch token"]
    """Index into `predicts` that each completion token follows; arbitrary outside the mask."""
    tokens: Int[Tensor, "batch token"]
    completion_mask: Bool[Tensor, "batch token"]

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def pick(self, values: Float[Tensor, "queries"]) -> Float[Tensor, "batch token"]:
        """Values at each of `predicts`, arranged by the completion tokens they predict."""
        return values[self.places]

    def pick_logits(self, logits: Float[Tensor, "queries vocab"]) -> Float[Tensor, "batch token"]:
        """The logit of each completion token."""
        flat = self.places * logits.shape[1] + self.tokens
        return logits.flatten().gather(0, flat.flatten()).view_as(flat)

    def logits(self, layers: LlamaLayers) -> Float[Tensor, "queries vocab"]:
        """Logits at each of `predicts`."""
        prompts = len(self.input_ids)
        last, scale, width = len(layers.layers) - 1, layers.scale, self.width

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.unflatten(0, (prompts, -1)).transpose(1, 2) for x in (q, k, v))
            grouped = q.shape[1] != k.shape[1]
            if i == last:
                seen = sdpa(q, k, v, attn_mask=self.mask, scale=scale, enable_gqa=grouped)
                return seen.transpose(1, 2).flatten(2).flatten(0, 1)
            own = sdpa(
                q[:, :, :width], k[:, :, :width], v[:, :, :width], is_causal=True, scale=scale, enable_gqa=grouped
            )
            rest = sdpa(q[:, :, width:], k, v, attn_mask=self.mask[:, :, 1:], scale=scale, enable_gqa=grouped)
            return torch.cat([own, rest], 2).transpose(1, 2).flatten(2).flatten(0, 1)

        return layers(self.input_ids, layers.turns(self.positions), attend, self.predicts)


def group(prompts: Sequence[Ids], completions: Sequence[Ids], prompt_of: Sequence[int], pad_id: int) -> GroupedBatch:
    """Completions after their prompts, equal ones of a prompt once; see `packing.pack` for the arguments."""
    left, right = max(map(len, prompts)), max(map(len, completions))
    numbers: list[dict[tuple[int, ...], int]] = [{} for _ in prompts]
    number = [numbers[p].setdefault(tuple(c), len(numbers[p])) for p, c in zip(prompt_of, completions, strict=True)]
    members, own = max(number) + 1, right - 1
    lengths = torch.tensor([len(ids) for ids in prompts])
    ids = torch.full((len(prompts), left + members * own), pad_id)
    ids[:, :left] = padded(prompts, left, pad_id)
    tokens = padded(completions, right, pad_id)
    p, k = torch.tensor(prompt_of), torch.tensor(number)
    ids[:, left:].view(len(prompts), members, own)[p, k] = tokens[:, :own]
    place = torch.arange(own)
    positions = torch.cat([torch.arange(left).expand(len(prompts), -1), (lengths[:, None] + place.repeat(members))], 1)
    queries = 1 + members * own
    inside = (k * own)[:, None] + torch.arange(right)  # token t of a completion follows its token t - 1
    inside[:, 0] = 0
    rows = torch.arange(len(prompts))[:, None]
    columns = torch.cat([lengths[:, None] - 1, (left + torch.arange(members * own)).expand(len(prompts), -1)], 1)
    return GroupedBatch(
        input_ids=ids,
        positions=positions,
        mask=_mask(lengths, left, members, own),
        width=left,
        predicts=(rows * ids.shape[1] + columns).flatten(),
        places=p[:, None] * queries + inside,
        tokens=tokens,
        completion_mask=torch.arange(right) < torch.tensor([len(c) for c in completions])[:, None],
    )


def padded(rows: Sequence[Ids], width: int, pad_id: int) -> Int[Tensor, "row width"]:
    """Rows of ids, filled up on the right."""
    return torch.tensor([[*ids, *[pad_id] * (width - len(ids))] for ids in rows])


def _mask(lengths: Tensor, left: int, members: int, own: int) -> Float[Tensor, "#prompt 1 query sequence"]:
    """Tree mask: each prompt's last token sees the prompt; a completion's token also sees its own completion so far."""
    if len(lengths.unique()) == 1:
        lengths = lengths[:1]
    member = torch.arange(members).repeat_interleave(own)
    causal = torch.arange(members * own)
    tree = (member[:, None] == member) & (causal[:, None] >= causal)
    tree = torch.cat([torch.zeros(1, members * own, dtype=torch.bool), tree])
    prompt = torch.arange(left) < lengths[:, None]
    seen = torch.cat([prompt[:, None].expand(-1, len(tree), -1), tree.expand(len(lengths), -1, -1)], 2)
    return torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)[:, None]
