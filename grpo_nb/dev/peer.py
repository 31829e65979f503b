"""Compares this trainer with TRL's GRPOTrainer: `python -m grpo_nb.dev.peer --size tiny --steps 5`.

Both get the same random weights, LoRA shape, prompts, completion cap, reward and batch, in one process on one device,
and take turns: a step of TRL, a step of ours. No server and no vLLM on either side. Random weights seldom end an
answer, so completions run to the cap. TRL's settings are in the table's last lines; `--peer KEY=VALUE` sets another.
"""

import argparse
import gc
import json
import logging
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from rich.console import Console
from rich.table import Table

from grpo_nb.cli.values import setting
from grpo_nb.dev.bench import WARM_UP, machine
from grpo_nb.dev.peer_work import BETA, RANK, RATE, SIZES, Words, Work, lora_model, ours, taste, words_tokenizer
from grpo_nb.metrics import keys
from grpo_nb.policy.roofline import copy_bandwidth, decode_bytes, now

GIB = 2**30


@dataclass
class Side:
    """Measurements of one trainer."""

    steps: list[float] = field(default_factory=list)
    """Seconds of each measured step."""
    parts: dict[str, list[float]] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    """Completion tokens of each measured step."""
    peak: int = 0
    """Peak bytes on the device, without the other trainer's; 0 on the CPU."""
    first: float = 0.0
    """Seconds of the first step, with its compilation and capture."""

    def add(self, seconds: float, parts: Mapping[str, float], tokens: int) -> None:
        """Add one measured step."""
        self.steps.append(seconds)
        self.tokens.append(tokens)
        for name, value in parts.items():
            self.parts.setdefault(name, []).append(value)

    @property
    def step(self) -> float:
        return statistics.median(self.steps)

    def part(self, name: str) -> float | None:
        """Median seconds of a part of the step."""
        return statistics.median(self.parts[name]) if name in self.parts else None


def trl_settings(work: Work, device: torch.device, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of GRPOConfig: the same step, without work that is not part of it."""
    accumulation = work.rows // work.micro_batch
    return {
        "num_generations": work.group,
        "per_device_train_batch_size": work.micro_batch,
        "gradient_accumulation_steps": accumulation,
        "max_completion_length": work.completion_tokens,
        "beta": BETA,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch",
        "bf16": device.type == "cuda",
        "use_cpu": device.type == "cpu",
        "activation_checkpointing": False,
        "disable_dropout": True,
        "logging_steps": 10_000,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **changes,
    }


def trl(
    work: Work, device: torch.device, settings: Mapping[str, Any], folder: Path, after: Callable[..., bool]
) -> None:
    """Train by TRL; `after(seconds, parts, tokens)` is called after each step, and ends the training by True."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    class Turns(transformers.TrainerCallback):
        began = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began = now(device)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seconds = now(device) - self.began
            control.should_training_stop = after(seconds, dict(spent), int(drawn[0]))
            spent.clear()

    spent: dict[str, float] = {}
    drawn = [0]
    arguments = GRPOConfig(output_dir=str(folder / "trl"), max_steps=10_000, **settings)
    trainer = GRPOTrainer(
        model=lora_model(work, device),
        reward_funcs=taste,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": Words(work).texts}),
        processing_class=words_tokenizer(work),
        callbacks=[Turns()],
    )
    generate = trainer._generate

    def timed(prompts: Any) -> Any:
        began = now(device)
        found = generate(prompts)
        spent["rollout"] = spent.get("rollout", 0.0) + now(device) - began
        drawn[0] = sum(map(len, found[1]))
        return found

    trainer._generate = timed
    trainer.train()


class Race:
    """Takes turns: TRL alone until it is warm, then ours until it is warm, then a step each."""

    def __init__(self, device: torch.device, warm_up: int, steps: int, start: Callable[[], Any]) -> None:
        self.device, self.warm_up, self.left, self.start = device, warm_up, steps, start
        self.trl, self.ours = Side(), Side()
        self._warmed, self._held = 0, 0
        self._mine: Any = None
        self._reset()

    def turn(self, seconds: float, parts: Mapping[str, float], tokens: int) -> bool:
        """Run what follows a step of TRL; returns whether that step was the last."""
        if self._warmed <= self.warm_up:
            self.trl.first = self.trl.first or seconds
            self._warmed += 1
            if self._warmed <= self.warm_up:
                return False
            self.trl.peak, self._held = self._peak(), self._resident()
            self._mine = self.start()
            for _ in range(self.warm_up):
                took, _, _ = self._step()
                self.ours.first = self.ours.first or took
        else:
            self.trl.add(seconds, parts, tokens)
            self._reset()
            self.ours.add(*self._step())
            self.ours.peak = max(self.ours.peak, self._peak() - self._held)
            self.left -= 1
        self._reset()
        if self.left == 0:
            self._mine.close()
        return self.left == 0

    _exact = False
    """Whether our steps allow only algorithms that give the same bits each time; set by the first."""

    def _step(self) -> tuple[float, dict[str, float], int]:
        torch.use_deterministic_algorithms(self._exact)
        began = now(self.device)
        row = next(self._mine).metrics
        seconds = now(self.device) - began
        self._exact = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(False)  # ours alone: between two of our steps it would slow the peer
        phases = {name: row.get(keys.TIME.of(name)) for name in ("rollout", "score", "reference", "train")}
        return seconds, {name: float(took) for name, took in phases.items() if took is not None}, int(row[keys.TOKENS])

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0

    def _resident(self) -> int:
        gc.collect()
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0

    def _reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()


def decode_floor(work: Work, model_bytes: int, bandwidth: float, item: int) -> float:
    """Seconds in which the weights, once a token, and each row's keys and values can be read at that bandwidth."""
    shape = work.shape
    cached = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"] * item
    return decode_bytes(model_bytes, cached, work.rows, work.prompt_tokens, work.completion_tokens) / bandwidth


def weight_bytes(work: Work, item: int) -> int:
    """Bytes of the base's matrices that a token reads; of the input embedding only its rows."""
    s = work.shape
    heads = s["num_attention_heads"] + 2 * s["num_key_value_heads"]
    layer = s["hidden_size"] * (s["head_dim"] * (heads + s["num_attention_heads"]) + 3 * s["intermediate_size"])
    size: int = item * (s["num_hidden_layers"] * layer + s["vocab_size"] * s["hidden_size"])
    return size


def table(race: Race, floor: float) -> Table:
    """Both sides, part by part."""
    drawn = Table(box=None, pad_edge=False)
    for name in ("", "TRL", "grpo_nb", "ratio"):
        drawn.add_column(name, justify="left" if not name else "right")
    for name in ("step", "rollout"):
        theirs, own = (side.step if name == "step" else side.part(name) for side in (race.trl, race.ours))
        assert theirs and own
        drawn.add_row(name, f"{theirs:.3f} s", f"{own:.3f} s", f"{theirs / own:.2f}")
    rest = race.trl.step - (race.trl.part("rollout") or 0.0), race.ours.step - (race.ours.part("rollout") or 0.0)
    drawn.add_row("all but the rollout", *(f"{value:.3f} s" for value in rest), f"{rest[0] / rest[1]:.2f}")
    for name in ("reference", "train"):
        drawn.add_row(f"  {name}", "", f"{race.ours.part(name):.3f} s", "")
    rates = [statistics.median(side.tokens) / side.step for side in (race.trl, race.ours)]
    drawn.add_row("tokens a second", *(f"{rate:.0f}" for rate in rates), f"{rates[1] / rates[0]:.2f}")
    drawn.add_row("first step", f"{race.trl.first:.1f} s", f"{race.ours.first:.1f} s", "")
    if race.ours.peak:
        drawn.add_row("peak memory", *(f"{side.peak / GIB:.1f} GiB" for side in (race.trl, race.ours)), "")
    drawn.add_row("rollout / floor", *(f"{(s.part('rollout') or 0) / floor:.1f}" for s in (race.trl, race.ours)), "")
    return drawn


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m grpo_nb.dev.peer", description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=WARM_UP, metavar="N", help="steps of each that do not count")
    parser.add_argument("--set", dest="changes", type=setting, action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--peer", type=setting, action="append", default=[], metavar="KEY=VALUE", help="of GRPOConfig")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    arguments = parser.parse_args(argv)
    if min(arguments.steps, arguments.warm_up) < 1:
        parser.error(f"--steps {arguments.steps} --warm-up {arguments.warm_up}; both need 1 or more")
    try:
        import trl as peer
    except ImportError:
        parser.error("TRL is not installed; install this project's extra 'parity', e.g. make bench")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    work, device = SIZES[arguments.size], torch.device("cuda" if torch.cuda.is_available() else "cpu")
    item = 2 if device.type == "cuda" else 4
    bandwidth = copy_bandwidth(device)
    floor = decode_floor(work, weight_bytes(work, item), bandwidth, item)
    settings = trl_settings(work, device, dict(arguments.peer))
    with tempfile.TemporaryDirectory() as folder:
        own = dict(arguments.changes)
        race = Race(device, arguments.warm_up, arguments.steps, lambda: ours(work, device, own, Path(folder)))
        trl(work, device, settings, Path(folder), race.turn)
    console = Console(soft_wrap=True, highlight=False)
    console.print(table(race, floor))
    for line in (
        f"{work.prompts} prompts x {work.group}, {work.prompt_tokens} + {work.completion_tokens} tokens, LoRA {RANK}, "
        f"beta {BETA}; median of {arguments.steps} steps in turn after {arguments.warm_up} of each; without vLLM",
        f"decode floor {floor:.3f} s: weights and KV over {bandwidth / 1e9:.0f} GB/s, a copy's bandwidth in this run",
        f"{machine()}, transformers {transformers.__version__}, peft {peft.__version__}, TRL {peer.__version__}",
        "TRL: " + ", ".join(f"{key}={value}" for key, value in settings.items()),
        "ours: " + ", ".join(f"{key}={value}" for key, value in own.items()) if own else "ours: as it comes",
        f"made by: python -m grpo_nb.dev.peer --size {arguments.size} --steps {arguments.steps}"
        + "".join(f" --set {key}={value}" for key, value in own.items())
        + "".join(f" --peer {key}={value}" for key, value in arguments.peer),
    ):
        console.print(line)
    if arguments.json:
        figures = {"size": arguments.size, "floor": floor, "bandwidth": bandwidth, "settings": settings}
        figures |= {"trl": asdict(race.trl), "ours": asdict(race.ours)}
        arguments.json.write_text(json.dumps(figures, indent=2, default=str) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
