"""A step on one GPU and on several, each with the same work: weak scaling.

    python -m grpo_nb.dev.ranks_bench --size 0.6b --json one.json
    torchrun --standalone --nproc-per-node 2 -m grpo_nb.dev.ranks_bench --size 0.6b --against one.json
    torchrun --standalone --nproc-per-node 2 -m grpo_nb.dev.ranks_bench --size 8b --shard --steps 3

The work is that of `grpo_nb.dev.peer_work`: random weights, so that completions run to the cap, and so many prompts a
GPU. Rank 0 prints the median step, tokens a second, what each rank took and the peak memory of each GPU. With `--shard`
the base is spread over the GPUs (FSDP2), and the peak counts from before it is loaded.
"""

import argparse
import json
import logging
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from grpo_nb.cli.values import setting
from grpo_nb.dev.bench import WARM_UP, machine
from grpo_nb.dev.peer_work import (
    OBJECTIVE,
    SIZES,
    Words,
    Work,
    lora_model,
    lora_on,
    model_config,
    our_config,
    random_model,
    taste,
    words_tokenizer,
)
from grpo_nb.metrics import keys
from grpo_nb.policy.model import Policy
from grpo_nb.policy.roofline import now
from grpo_nb.ranks.link import joined
from grpo_nb.run.run import Run
from grpo_nb.training.follower import follow
from grpo_nb.training.grpo import grpo
from grpo_nb.training.resume import Given

PHASES = ("rollout", "score", "reference", "train", "guard")
Figures = dict[str, Any]


def policy_of(work: Work, train: str, device: torch.device, shard: bool) -> Policy:
    """Model of random weights, of which adapters or all weights train; a model to be spread lies in the machine's
    memory, where a rank other than rank 0 needs no content.
    """
    if shard:
        made: Any = _in_memory(work, device)
        made = lora_on(made) if train == "lora" else made
    else:
        made = lora_model(work, device) if train == "lora" else random_model(work, device)
    return Policy(made, words_tokenizer(work))


def _in_memory(work: Work, device: torch.device) -> Any:
    """Model on the CPU, in the type that the device computes in; random numbers are drawn there, matrix by matrix."""
    if device.type == "cpu":
        return random_model(work, device)
    kind, generator = torch.bfloat16, torch.Generator(device).manual_seed(0)
    with torch.device("meta"):
        made: Any = AutoModelForCausalLM.from_config(model_config(work), dtype=kind, attn_implementation="sdpa")
    rotary = type(made.model.rotary_emb)(made.config)  # its buffers are functions of the settings
    made.to_empty(device="cpu")
    made.model.rotary_emb = rotary
    with torch.no_grad():
        for weight in made.parameters():
            if weight.dim() < 2:
                weight.fill_(1.0)
            else:
                weight.copy_(torch.randn(weight.shape, dtype=kind, device=device, generator=generator).mul_(0.02))
    return made


def measured(
    work: Work, policy: Policy, device: torch.device, timing: tuple[int, int], changes: Mapping[str, Any]
) -> list[Figures]:
    """The rows of the steps after the warm-up, with their seconds by this process's clock; `timing`: steps, warm-up."""
    (steps, warm_up), found = timing, list[Figures]()
    with tempfile.TemporaryDirectory() as folder:
        run = Run.create(Path(folder) / "run", our_config(work, changes))
        given: Any = {"tasks": {OBJECTIVE: Words(work)}, "rewards": {OBJECTIVE: [taste]}}
        training = grpo(run, policy=policy, steps=steps + warm_up, **given)
        began = now(device)
        for stats in training:
            ended = now(device)
            if stats.step > warm_up:
                found.append({**stats.metrics, "seconds": ended - began})
            if device.type == "cuda" and stats.step == warm_up and policy.sharding is None:
                torch.cuda.reset_peak_memory_stats()
            began = now(device)
    return found


def figures(rows: Sequence[Figures], ranks: int) -> Figures:
    """Medians over the steps."""

    def median(key: str) -> float | None:
        values = [row[key] for row in rows if row.get(key) is not None]
        return statistics.median(values) if values else None

    seconds = statistics.median(row["seconds"] for row in rows)
    tokens = statistics.median(row[keys.TOKENS] for row in rows)
    own = rows[-1][keys.MEMORY_PEAK]
    others = [rows[-1].get(keys.MEMORY_RANK.of(str(rank))) for rank in range(1, ranks)]
    return {
        "ranks": ranks,
        "step_s": seconds,
        "steps_s": [row["seconds"] for row in rows],
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
        "phases_s": {phase: median(keys.TIME.of(phase)) for phase in PHASES},
        "rank_s": [median(keys.TIME_RANK.of(str(rank))) for rank in range(ranks)] if ranks > 1 else [],
        "waited_s": median(keys.TIME_RANKS_WAITED),
        "peak_mib": [own, *others],
    }


def table(found: Figures, against: Figures | None) -> Table:
    """Table of the figures, next to those of one GPU where these are given."""
    drawn = Table(box=None, pad_edge=False)
    sides = [found] if against is None else [against, found]
    drawn.add_column("")
    for side in sides:
        drawn.add_column(f"{side['ranks']} ranks" if side["ranks"] > 1 else "1 rank", justify="right")
    drawn.add_row("step", *(f"{side['step_s']:.3f} s" for side in sides))
    for phase in PHASES:
        values = [side["phases_s"].get(phase) for side in sides]
        drawn.add_row(f"  {phase}", *("" if value is None else f"{value:.3f} s" for value in values))
    drawn.add_row("tokens a second", *(f"{side['tokens_per_s']:.0f}" for side in sides))
    drawn.add_row("waited for the slowest", *(f"{side['waited_s'] or 0:.3f} s" for side in sides))
    drawn.add_row(
        "peak memory", *(", ".join(f"{mib / 1024:.1f}" for mib in side["peak_mib"]) + " GiB" for side in sides)
    )
    if against is not None:
        scaling = found["tokens_per_s"] / against["tokens_per_s"] * against["ranks"] / found["ranks"]
        drawn.add_row("weak scaling", "", f"{scaling:.1%}")
    return drawn


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m grpo_nb.dev.ranks_bench", description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--train", choices=("lora", "full"), default="lora")
    parser.add_argument("--shard", action="store_true", help="spread the base over the GPUs: model.shard=fsdp2")
    parser.add_argument("--prompts", type=int, metavar="P", help="prompts a step on each GPU; default: of the size")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=WARM_UP, metavar="N", help="steps that do not count")
    parser.add_argument("--set", dest="changes", type=setting, action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    parser.add_argument("--against", type=Path, metavar="FILE", help="figures of one GPU, to compare with")
    arguments = parser.parse_args(argv)
    if min(arguments.steps, arguments.warm_up) < 1:
        parser.error(f"--steps {arguments.steps} --warm-up {arguments.warm_up}; both need 1 or more")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    own = joined()
    ranks = 1 if own is None else own.place.size
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    each = (
        SIZES[arguments.size]
        if arguments.prompts is None
        else replace(SIZES[arguments.size], prompts=arguments.prompts)
    )
    work = replace(each, prompts=each.prompts * ranks)
    policy = policy_of(work, arguments.train, device, arguments.shard)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if own is not None and not own.place.leads:
        follow(own, Given(policy, {OBJECTIVE: Words(work)}))
        return 0
    changes = {"model.train": arguments.train, "model.shard": "fsdp2" if arguments.shard else "none"}
    changes |= dict(arguments.changes)
    rows = measured(work, policy, device, (arguments.steps, arguments.warm_up), changes)
    found = figures(rows, ranks) | {"size": arguments.size, "train": arguments.train, "prompts_each": each.prompts}
    found["shard"] = changes["model.shard"]
    against = None if arguments.against is None else json.loads(arguments.against.read_text())
    console = Console(soft_wrap=True, highlight=False)
    console.print(table(found, against))
    trained = arguments.train + (", sharded" if arguments.shard else "")
    console.print(
        f"{each.prompts} prompts x {work.group} a rank, {work.prompt_tokens} + {work.completion_tokens} tokens, "
        f"{trained}; median of {arguments.steps} steps after {arguments.warm_up}; {machine()}"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
