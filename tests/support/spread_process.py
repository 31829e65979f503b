"""One rank that holds its part of a run's policy: `python -m tests.support.spread_process RUN OUT`, with torchrun's
variables. OUT-RANK.json has what the rank holds, and what it scores and draws together with the others."""

import json
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from grpo_nb.config import SamplingConfig
from grpo_nb.policy.model import Policy
from grpo_nb.ranks import launch, link
from grpo_nb.ranks.lockstep import lockstep
from grpo_nb.rollout import EagerEngine, Request
from grpo_nb.run.run import Run
from grpo_nb.training import spread

PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]
TOKENS = 6


def drawn(policy: Policy, prompts: list[list[int]]) -> list[list[int]]:
    sampling = SamplingConfig(max_completion_length=TOKENS, temperature=1.0)
    uniforms = torch.rand(len(prompts), TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return [list(ids) for ids in EagerEngine().generate(policy, Request(prompts, 1, sampling, uniforms)).completion_ids]


def scores(policy: Policy, prompts: list[list[int]]) -> list[float]:
    with policy.eval_mode():
        batch = policy.collate(prompts, [row[:2] for row in prompts])
        found: list[float] = policy.logprobs(batch).logprobs[batch.completion_mask].tolist()
    return found


def gradient(policy: Policy, prompts: list[list[int]]) -> float:
    """Size of the gradient of one pass."""
    batch = policy.collate(prompts, [row[:2] for row in prompts])
    policy.logprobs(batch).logprobs.sum().backward()
    return sum(float(p.grad.abs().sum()) for p in policy.parameters_by_name().values() if p.grad is not None)


def measured(policy: Policy, own: list[list[int]]) -> dict[str, object]:
    return {"drawn": drawn(policy, own), "scores": scores(policy, own), "gradient": gradient(policy, own)}


def main(path: str, out: str) -> None:
    torch.set_num_threads(1)
    link.joined()
    place, passes, run = launch.place(), lockstep("gloo", 60.0), Run.open(path)
    assert place is not None
    policy = spread.own_part(run, None, passes)
    named = dict(policy.model.named_parameters())
    spread_out = [p for p in named.values() if isinstance(p, DTensor)]
    report = {
        "held": sum(p.to_local().numel() for p in spread_out),
        "whole": sum(p.numel() for p in spread_out),
        "adapters": sum(p.numel() for p in named.values() if not isinstance(p, DTensor)),
        "trained": sum(p.numel() for p in policy.parameters_by_name().values()),
    }
    own = PROMPTS[: place.size - place.rank]  # rank 0 has most, the last one
    with passes.section():
        report |= measured(policy, own)
    with passes.section():
        try:
            batch = policy.collate(own, own)
            scored = policy.logprobs(batch)
            if place.rank:
                raise ValueError("between a forward pass and its backward pass")
            scored.logprobs.sum().backward()
        except ValueError:
            pass
    with passes.section():
        report["after"] = scores(policy, own)
    Path(f"{out}-{place.rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
