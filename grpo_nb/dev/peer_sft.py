"""Compares SFT with TRL's SFTTrainer: `python -m grpo_nb.dev.peer_sft --size tiny --steps 5`.

Like `grpo_nb.dev.peer`: the same random weights, LoRA shape, pairs and batch in one process, a step of each in turn.
Completions have different lengths, as gold answers do.
"""

import argparse
import itertools
import json
import logging
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from rich.console import Console
from rich.table import Table

from grpo_nb.cli.values import setting
from grpo_nb.dev.bench import WARM_UP, machine
from grpo_nb.dev.peer import GIB, Race
from grpo_nb.dev.peer_work import RANK, RATE, SIZES, Words, Work, lora_model, our_config, words_tokenizer
from grpo_nb.policy.model import Policy
from grpo_nb.policy.roofline import now
from grpo_nb.run.run import Run
from grpo_nb.training.sft import sft


def pairs(work: Work) -> list[dict[str, str]]:
    """Eight batches of prompts with completions of an eighth to all of the work's tokens, the end token included."""
    drawn, most = random.Random(0), work.completion_tokens
    found = []
    for text in itertools.islice(itertools.cycle(Words(work).texts), 8 * work.rows):
        ids = (drawn.randrange(8, work.shape["vocab_size"]) for _ in range(drawn.randint(max(most // 8, 2), most) - 1))
        found.append({"prompt": text, "completion": " " + " ".join(f"w{i}" for i in ids)})
    return found


def trl_settings(work: Work, device: torch.device, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of SFTConfig."""
    return {
        "per_device_train_batch_size": work.micro_batch,
        "gradient_accumulation_steps": work.rows // work.micro_batch,
        "max_length": None,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch",
        "bf16": device.type == "cuda",
        "use_cpu": device.type == "cpu",
        "activation_checkpointing": False,
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
    from trl import SFTConfig, SFTTrainer

    class Turns(transformers.TrainerCallback):
        began = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began, drawn[0] = now(device), 0

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = after(now(device) - self.began, {}, drawn[0])

    class Counting(SFTTrainer):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
            drawn[0] += int((inputs["labels"] != -100).sum())
            return super().training_step(model, inputs, *rest, **named)

    drawn = [0]
    arguments = SFTConfig(output_dir=str(folder / "trl"), max_steps=10_000, **settings)
    Counting(
        model=lora_model(work, device),
        args=arguments,
        train_dataset=Dataset.from_list(pairs(work)),
        processing_class=words_tokenizer(work),
        callbacks=[Turns()],
    ).train()


def ours(work: Work, device: torch.device, changes: Mapping[str, Any], folder: Path) -> Any:
    """The generator of our steps."""
    data = folder / "pairs.jsonl"
    data.write_text("".join(json.dumps(pair) + "\n" for pair in pairs(work)))
    batch = {"sft.batch": work.rows, "sft.micro_batch": work.micro_batch, "sft.learning_rate": RATE}
    kept = {"sft.data": str(data), "sft.steps": 10_000, "sft.checkpoint_every": 10_000}
    run = Run.create(folder / "run", our_config(work, {**batch, **kept, **changes}))
    return sft(run, policy=Policy(lora_model(work, device), words_tokenizer(work)))


def table(race: Race) -> Table:
    """Both sides."""
    drawn = Table(box=None, pad_edge=False)
    for name in ("", "TRL", "grpo_nb", "ratio"):
        drawn.add_column(name, justify="left" if not name else "right")
    sides = (race.trl, race.ours)
    rates = [statistics.median(n / s for n, s in zip(side.tokens, side.steps, strict=True)) for side in sides]
    drawn.add_row("step", *(f"{side.step:.3f} s" for side in sides), f"{race.trl.step / race.ours.step:.2f}")
    drawn.add_row("completion tokens a second", *(f"{rate:.0f}" for rate in rates), f"{rates[1] / rates[0]:.2f}")
    drawn.add_row("first step", *(f"{side.first:.1f} s" for side in sides), "")
    if race.ours.peak:
        drawn.add_row("peak memory", *(f"{side.peak / GIB:.1f} GiB" for side in sides), "")
    return drawn


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m grpo_nb.dev.peer_sft", description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--set", dest="changes", type=setting, action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--peer", type=setting, action="append", default=[], metavar="KEY=VALUE", help="of SFTConfig")
    arguments = parser.parse_args(argv)
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}; needs 1 or more")
    try:
        import trl as peer
    except ImportError:
        parser.error("TRL is not installed; install this project's extra 'parity', e.g. make bench")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    work, device = SIZES[arguments.size], torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings, own = trl_settings(work, device, dict(arguments.peer)), dict(arguments.changes)
    with tempfile.TemporaryDirectory() as folder:
        race = Race(device, WARM_UP, arguments.steps, lambda: ours(work, device, own, Path(folder)))
        trl(work, device, settings, Path(folder), race.turn)
    console = Console(soft_wrap=True, highlight=False)
    console.print(table(race))
    for line in (
        f"{work.rows} pairs, {work.prompt_tokens} + {max(work.completion_tokens // 8, 2)} to {work.completion_tokens} "
        f"tokens, LoRA {RANK}; median of {arguments.steps} steps in turn after {WARM_UP} of each",
        f"{machine()}, transformers {transformers.__version__}, peft {peft.__version__}, TRL {peer.__version__}",
        "TRL: " + ", ".join(f"{key}={value}" for key, value in settings.items()),
        f"made by: python -m grpo_nb.dev.peer_sft --size {arguments.size} --steps {arguments.steps}"
        + "".join(f" --set {key}={value}" for key, value in own.items())
        + "".join(f" --peer {key}={value}" for key, value in arguments.peer),
    ):
        console.print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
