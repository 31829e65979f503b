"""Side by side with TRL: the same model, prompts, completions and rewards, and after each step the same weights.

Nothing is shared but the script. TRL's GRPOTrainer and `grpo()` each compare, score, differentiate and step by
themselves, in float32 on the CPU; TRL reads its reference from disk, ours is a copy of where training began.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from grpo_nb import optim, presets
from grpo_nb.config import Config
from grpo_nb.policy.model import Policy, load_policy
from grpo_nb.rollout import Request
from grpo_nb.run.run import Run
from grpo_nb.training.grpo import grpo
from grpo_nb.types import Example, Rollouts, Score
from tests.support import tiny_models

pytestmark = pytest.mark.slow

STEPS, GROUP, CAP = 3, 4, 6
PROMPTS = ("who was late", "is the young man", "the old woman was", "answer is")
ROWS = GROUP * len(PROMPTS)
LEARNING_RATE = 1e-3
TOLERANCE = 1e-5
EPSILON = 1e-4
"""Adam's, on both sides. Its default makes a full step of a gradient that is nothing but rounding, and hides a gradient
that is wrong by a factor: with this one a step is as large as its gradient where that is small.
"""


# ---- the script: what both sides are given


def completion(step: int, prompt: int, member: int) -> list[int]:
    """Random words; a third of the completions is cut off at the cap, the others end in EOS."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * prompt + member)
    cut = bool(torch.rand((), generator=generator) < 1 / 3)
    length = CAP if cut else int(torch.randint(1, CAP + 1, (), generator=generator))
    words = torch.randint(len(tiny_models.SPECIAL), tiny_models.VOCABULARY, (length,), generator=generator).tolist()
    return words if cut else [*words[:-1], tiny_models.EOS]


def taste(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """A reward that tells most answers apart."""
    return [sum(ids) % 7 / 7 + 0.1 * len(ids) for ids in completion_ids]


@dataclass
class Trace:
    """What one side did: weights and mean loss after each rollout's updates, clipped shares as it reports them."""

    weights: list[dict[str, Tensor]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    clipped: list[float] = field(default_factory=list)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.folder(tmp_path_factory.mktemp("model"), "llama", tiny_models.tokenizer(template=None))


# ---- TRL's side


def trl_trace(model: Path, out: Path, *, updates: int = 1, micro_batches: int = 2, **settings: Any) -> Trace:
    """`updates` optimizer updates a rollout, each over all of it."""
    trl = pytest.importorskip("trl", reason="no TRL here; pip install '.[parity]', or make test-all")
    with warnings.catch_warnings():
        # the peer's own affair: a setting's old name, and that `rollout_func` may change
        warnings.filterwarnings("ignore", ".*gradient_checkpointing. is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", "You are using 'rollout_func'", UserWarning)
        arguments = trl.GRPOConfig(
            output_dir=str(out),
            num_generations=GROUP,
            per_device_train_batch_size=ROWS // micro_batches,
            gradient_accumulation_steps=micro_batches,
            max_completion_length=CAP,
            max_steps=STEPS * updates,
            num_iterations=updates,
            learning_rate=LEARNING_RATE,
            optim="adamw_torch",
            adam_epsilon=EPSILON,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            disable_dropout=True,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            **settings,
        )
        return _trained_by_trl(trl, model, arguments, updates)


def _trained_by_trl(trl: Any, model: Path, arguments: Any, updates: int) -> Trace:
    from datasets import Dataset
    from transformers import TrainerCallback

    trace = Trace()

    class Keep(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if state.global_step % updates == 0:
                trace.weights.append({name: weight.detach().clone() for name, weight in model.named_parameters()})

    trainer = trl.GRPOTrainer(
        model=str(model),
        reward_funcs=taste,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": list(PROMPTS)}),
        rollout_func=scripted_rollouts(),
        callbacks=[Keep()],
    )
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    for first in range(0, len(rows), updates):
        own = rows[first : first + updates]
        trace.losses.append(sum(row["loss"] for row in own) / updates)
        trace.clipped.append(sum(row.get("clip_ratio/region_mean", 0.0) for row in own) / updates)  # PPO's losses only
    return trace


def scripted_rollouts() -> Callable[[list[str], Any], dict[str, Any]]:
    """A rollout function of TRL's; each call is a step, each repetition of a prompt a member of its group."""
    step = 0

    def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
        nonlocal step
        step += 1
        seen: Counter[str] = Counter()
        completions = []
        for prompt in prompts:
            completions.append(completion(step, PROMPTS.index(prompt), seen[prompt]))
            seen[prompt] += 1
        prompt_ids = [tiny_models.ids(prompt) for prompt in prompts]
        return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None}

    return rollouts


# ---- our side


class Words:
    """A task whose prompts are the script's; it has no opinion of its own."""

    name = "words"

    def examples(self, split: Literal["train", "test"]) -> list[Example]:
        return [Example(id=str(i), prompt=prompt) for i, prompt in enumerate(PROMPTS)]

    def score(self, example: Example, completion: str) -> Score:
        return Score(value=0.0)


class ScriptedEngine:
    """An engine that recites; the log-probs are those of the policy that it recites for."""

    def __init__(self) -> None:
        self.step = 0

    def generate(self, policy: Policy, request: Request) -> Rollouts:
        self.step += 1
        known = [tiny_models.ids(prompt) for prompt in PROMPTS]
        completions = [
            completion(self.step, known.index(list(ids)), member)
            for ids in request.prompt_ids
            for member in range(request.group_size)
        ]
        batch = policy.collate([ids for ids in request.prompt_ids for _ in range(request.group_size)], completions)
        with policy.eval_mode():
            logprobs = policy.logprobs(batch, request.sampling.temperature).logprobs
        return Rollouts(
            prompt_ids=request.prompt_ids,
            completion_ids=completions,
            logprobs=[row[: len(ids)].tolist() for row, ids in zip(logprobs, completions, strict=True)],
            stop_reasons=["stop" if ids[-1] == tiny_models.EOS else "length" for ids in completions],
            texts=[policy.decode(ids) for ids in completions],
            group_size=request.group_size,
        )


def our_config(model: Path, beta: float, **changes: Any) -> Config:
    """The demo's settings with the peer's in their place; dotted names with `__` for the dot."""
    settings = {
        "objectives": {"words": {"task": "words", "beta": beta, "kl_band": None}},
        "model.name": str(model),
        "model.train": "full",
        "model.device": "cpu",
        "batch.prompts": len(PROMPTS),
        "batch.group_size": GROUP,
        "batch.micro_batch": 4,
        "sampling.max_completion_length": CAP,
        "sft.steps": 0,
        "algorithm.learning_rate": LEARNING_RATE,
        "algorithm.weight_decay": 0.0,
        "algorithm.max_grad_norm": 1.0,
        "algorithm.warmup_steps": 0,
        "run.steps": STEPS,
        "run.checkpoint_every": 100,
        "run.quick_eval_every": 0,  # the engine recites training's script and nothing else
    }
    return presets.demo().replace(**settings | {key.replace("__", "."): value for key, value in changes.items()})


def our_trace(model: Path, folder: Path, beta: float, **changes: Any) -> Trace:
    run = Run.create(folder / "ours", our_config(model, beta, **changes))
    policy, trace = load_policy(run.config.model), Trace()
    options: dict[str, Any] = {"tasks": {"words": Words()}, "rewards": {"words": [taste]}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optim, "adamw", _adamw)
        for step in grpo(run, policy=policy, engine=ScriptedEngine(), **options):
            trace.weights.append(policy.state())
            trace.losses.append(float(step["loss"]))  # type: ignore[arg-type]
            clipped = float(step["clip_ratio/low"]) + float(step["clip_ratio/high"])  # type: ignore[arg-type]
            trace.clipped.append(clipped)
    return trace


def _adamw(*args: Any, **kwargs: Any) -> torch.optim.AdamW:
    made = _plain_adamw(*args, **kwargs)
    for group in made.param_groups:
        group["eps"] = EPSILON
    return made


_plain_adamw = optim.adamw


# ---- the comparison


def assert_equal(ours: Trace, theirs: Trace) -> None:
    assert len(ours.weights) == len(theirs.weights) == STEPS
    for mine, other in zip(ours.weights, theirs.weights, strict=True):
        assert mine.keys() == other.keys()
        for name, weight in mine.items():
            torch.testing.assert_close(weight, other[name], rtol=0, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")
    assert ours.losses == pytest.approx(theirs.losses, abs=TOLERANCE)


ALGORITHMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"algorithm__name": "grpo"}, {"loss_type": "grpo"}),
    "dr_grpo": ({"algorithm__name": "dr_grpo"}, {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "dapo": ({"algorithm__name": "dapo"}, {"loss_type": "dapo"}),
    "bnpo, which is dapo in one piece": ({"algorithm__name": "bnpo"}, {"loss_type": "bnpo", "micro_batches": 1}),
}
"""Our settings and the peer's that name the same algorithm."""

SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "cispo with its cap": (
        {"algorithm__name": "cispo_cap", "algorithm__clip_high": 1.05},
        {"loss_type": "cispo", "epsilon_high": 1.05},
    ),
    "sapo": ({"algorithm__name": "sapo"}, {"loss_type": "sapo"}),
    "a completion's ratio": (
        # TRL would weigh a token's KL by the completion's ratio, we do by the token's
        {
            "algorithm__name": "gspo",
            "algorithm__clip_low": 0.02,
            "algorithm__clip_high": 0.03,
            "algorithm__kl_weight": "none",
        },
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 0.02,
            "epsilon_high": 0.03,
            "use_bias_correction_kl": False,
        },
    ),
    "KL of weight 1": (
        {"algorithm__name": "grpo", "algorithm__kl_weight": "none"},
        {"loss_type": "grpo", "use_bias_correction_kl": False},
    ),
    "dual clip": (
        {"algorithm__name": "bnpo", "algorithm__clip_high": 0.02, "algorithm__dual_clip": 1.05},
        {"loss_type": "bnpo", "epsilon_high": 0.02, "delta": 1.05},
    ),
    "std of the batch": (
        {"algorithm__name": "grpo", "algorithm__advantage": "batch_std"},
        {"loss_type": "grpo", "scale_rewards": "batch"},
    ),
    "entropy bonus": (
        {"algorithm__name": "bnpo", "algorithm__entropy_coef": 0.05},
        {"loss_type": "bnpo", "entropy_coef": 0.05},
    ),
}
"""The same for single settings."""


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_one_update_a_rollout(model: Path, tmp_path: Path, name: str, beta: float) -> None:
    mine, other = ALGORITHMS[name]
    theirs = trl_trace(model, tmp_path, beta=beta, **other)
    assert_equal(our_trace(model, tmp_path, beta, **mine), theirs)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
def test_the_models_own_passes(model: Path, tmp_path: Path, name: str) -> None:
    mine, other = ALGORITHMS[name]
    theirs = trl_trace(model, tmp_path, beta=0.04, **other)
    assert_equal(our_trace(model, tmp_path, 0.04, batch__passes="model", **mine), theirs)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo"])
def test_several_updates_a_rollout(model: Path, tmp_path: Path, name: str, beta: float, micro_batches: int) -> None:
    mine, other = ALGORITHMS[name]
    geometry = {"updates": 2, "micro_batches": micro_batches}
    theirs = trl_trace(model, tmp_path, beta=beta, epsilon=0.1, epsilon_high=0.15, **geometry, **other)
    clipping = {"algorithm__clip_low": 0.1, "algorithm__clip_high": 0.15}
    ours = our_trace(model, tmp_path, beta, batch__num_iterations=2, **clipping, **mine)
    assert_equal(ours, theirs)
    assert min(ours.clipped) > 0.05
    if micro_batches == 1:  # TRL reports the mean over micro-batches, however many tokens each has
        assert ours.clipped == pytest.approx(theirs.clipped, abs=TOLERANCE)


@pytest.mark.parametrize("name", SETTINGS)
def test_single_settings(model: Path, tmp_path: Path, name: str) -> None:
    """Two updates a rollout, so that the ratio has left 1; in one piece, as TRL's own means are of a micro-batch."""
    mine, other = SETTINGS[name]
    theirs = trl_trace(model, tmp_path, beta=0.04, updates=2, micro_batches=1, **other)
    assert_equal(our_trace(model, tmp_path, 0.04, batch__num_iterations=2, **mine), theirs)


def test_temperature(model: Path, tmp_path: Path) -> None:
    theirs = trl_trace(model, tmp_path, beta=0.04, loss_type="dapo", temperature=0.7)
    assert_equal(our_trace(model, tmp_path, 0.04, algorithm__name="dapo", sampling__temperature=0.7), theirs)


def test_truncated_answers_left_out(model: Path, tmp_path: Path) -> None:
    theirs = trl_trace(model, tmp_path, beta=0.04, loss_type="dapo", mask_truncated_completions=True)
    assert_equal(our_trace(model, tmp_path, 0.04, algorithm__name="dapo", algorithm__mask_truncated=True), theirs)
