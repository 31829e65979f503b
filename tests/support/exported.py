"""A run of a tiny model with checkpoints, logs and evaluations, made without training."""

from pathlib import Path
from typing import Any

import torch

from grpo_nb.policy.model import Policy, load_policy
from grpo_nb.run.run import Run
from tests.support import bpe
from tests.support import tiny_models as tiny
from tests.support.tiny import tiny_config

ROWS = 336
STEPS = (2, 4)


def a_run(folder: Path, kind: str = "llama", **changes: Any) -> Run:
    """LoRA on a model folder, unless `changes` say otherwise; checkpoints of steps 2 and 4, SFT's of step 3."""
    base = tiny.folder(
        folder / "base", kind, tokens=bpe.tokenizer(), vocab_size=ROWS, eos=4, pad_token_id=0, bos_token_id=1
    )
    asked = {"model__name": str(base), "model__train": "lora", "model__lora_rank": 4, "model__device": "cpu"} | changes
    run = Run.create(folder / "runs" / "mine", tiny_config(**asked))
    made = policy(run)
    for step, checkpoints in ((3, run.sft_checkpoints), *((step, run.checkpoints) for step in STEPS)):
        with torch.no_grad():
            for number, weight in enumerate(made.parameters_by_name().values()):
                weight += 0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(100 * step + number))
        checkpoints.save(step, {"policy": made.state()}, {"step": step})
    for step in range(1, 5):
        run.log_metrics({"step": step, "status": "ok", "reward/fairness/mean": step / 10, "kl/fairness": 0.01})
    return run


def policy(run: Run) -> Policy:
    return load_policy(run.config.model, run.config.run.seed)


def evaluated(run: Run, stage: str, step: int, value: float, mode: str = "greedy") -> None:
    """One evaluation of each objective, without intervals' draws of any use."""
    for objective in run.config.objectives:
        numbers = {"value": value, "low": value - 0.1, "high": value + 0.1, "n": 8, "clusters": 8, "effective": 8.0}
        run.log_evaluation(
            {
                **{"stage": stage, "step": step, "split": "test", "mode": mode, "objective": objective, "n": 8},
                **{"clusters": 8, "pool": "p", "asked": "a", "metrics": {"accuracy": numbers}, "pools_apart": True},
                **{
                    "labels": {},
                    "values": {},
                    "items": {},
                    "resamples": {"accuracy": [value - 0.1, value, value + 0.1]},
                },
            }
        )
