"""A base that is spread over ranks trains as one that each holds: the same tokens, the same numbers to rounding."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from grpo_nb.config import ConfigError
from grpo_nb.metrics import keys
from grpo_nb.policy.loading import quietly
from grpo_nb.policy.model import load_policy
from grpo_nb.run.run import Run
from grpo_nb.tasks import demo
from grpo_nb.training import spread
from grpo_nb.training.grpo import grpo
from tests.ranks.test_training import CLOSE, STEPS, alone, apart, run_of, texts, together
from tests.support import ranks, spread_process
from tests.support.spread_process import PROMPTS

LORA = {"model__train": "lora", "rollout__engine": "eager", "batch__passes": "model"}
SHARDED = {"model__shard": "fsdp2"}


UNKNOWN = (keys.GRAD_CHECK, keys.GRAD_CHECK_RATIO)
"""What a rank that has its rows of all weights does not compare."""


def known(run: Run) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in UNKNOWN} for row in run.rows("metrics")]


def saved_model(folder: Path, tied: bool) -> Path:
    """The demo's model in a folder, its output head a matrix of its own where it is not `tied`."""
    model = demo.build_model(0)
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(2 * model.model.embed_tokens.weight.detach())
    model.save_pretrained(folder)
    demo.build_tokenizer().save_pretrained(folder)
    return folder


def parts_of(size: int, run: Run, out: Path) -> list[dict[str, Any]]:
    """What each rank of `spread_process` reports."""
    ended = ranks.train(size, run.path, program="tests.support.spread_process", arguments=[str(out)])
    assert [rank.status for rank in ended] == [0] * size, [rank.errors for rank in ended]
    return [json.loads(Path(f"{out}-{rank}.json").read_text()) for rank in range(size)]


@pytest.mark.parametrize(("size", "tied"), [pytest.param(2, True, marks=pytest.mark.slow), (3, False)])
def test_each_rank_holds_a_part_and_passes_of_unequal_number_give_one_models_numbers(
    tmp_path: Path, size: int, tied: bool
) -> None:
    run = run_of(tmp_path, "run", model__name=str(saved_model(tmp_path / "model", tied)), **LORA, **SHARDED)
    found, policy = parts_of(size, run, tmp_path / "out"), load_policy(run.config.model, 0)
    base = [p for p in policy.model.parameters() if not p.requires_grad]
    whole = sum(p.numel() for p in base)
    assert sum(rank["held"] for rank in found) == whole
    for n, rank in enumerate(found):
        own = PROMPTS[: size - n]
        assert rank["whole"] == whole and rank["held"] < 1.1 * whole / size
        assert rank["adapters"] == rank["trained"] == sum(p.numel() for p in policy.parameters_by_name().values())
        expected = spread_process.measured(policy, own)
        assert rank["drawn"] == expected["drawn"]
        assert rank["scores"] == pytest.approx(expected["scores"], abs=1e-6) == rank["after"]
        assert rank["gradient"] == pytest.approx(expected["gradient"], rel=1e-5)
        policy.model.zero_grad()


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return alone(run_of(tmp_path_factory.mktemp("one"), "one", **LORA), steps=STEPS)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return together(2, run_of(tmp_path_factory.mktemp("two"), "two", **LORA, **SHARDED))


def test_two_ranks_have_the_numbers_of_one(one: Run, two: Run) -> None:
    assert apart(one.rows("metrics"), two.rows("metrics")) < CLOSE
    assert apart(one.rows("sft"), two.rows("sft")) < CLOSE
    assert texts(one) == texts(two)


def test_the_adapter_of_a_checkpoint_opens_in_peft(two: Run, tmp_path: Path) -> None:
    policy = load_policy(two.config.model, two.config.run.seed)
    newest, _ = two.checkpoints.latest()
    assert newest is not None
    policy.model.to(torch.float64)  # type: ignore[arg-type]
    policy.load_state(newest.tensors("policy"))
    policy.save(tmp_path / "adapter")
    with quietly():
        plain = peft.PeftModel.from_pretrained(demo.build_model(0).to(torch.float64), tmp_path / "adapter")
    ids = torch.tensor(PROMPTS[:1])
    with torch.no_grad():
        assert torch.allclose(plain(input_ids=ids).logits, policy.model(input_ids=ids).logits, atol=1e-5)


@pytest.mark.slow
def test_one_rank_resumes_unsharded_what_two_began(
    one: Run, two: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = alone(run_of(tmp_path, "straight", **LORA), steps=STEPS + 1)
    with pytest.raises(ConfigError, match="GRPO_NB_SHARD"):
        next(iter(grpo(two)))
    monkeypatch.setenv(spread.SHARD, "none")
    alone(two, steps=STEPS + 1)
    assert apart(straight.rows("metrics"), two.rows("metrics")) < CLOSE


def test_an_unknown_way_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(spread.SHARD, "zero3")
    with pytest.raises(ConfigError, match="zero3"):
        next(iter(grpo(run_of(tmp_path, "run"))))


@pytest.mark.slow
@pytest.mark.parametrize("train", ["lora", "full"])
def test_layers_are_gathered_again_where_activations_are_recomputed(tmp_path: Path, train: str) -> None:
    changes = {**LORA, "model__train": train, "model__gradient_checkpointing": True, "sft__steps": 0, "run__steps": 2}
    expected = alone(run_of(tmp_path, "one", **changes))
    found = together(2, run_of(tmp_path, "two", **changes, **SHARDED), sft=False)
    unknown = (keys.GRAD_CHECK, keys.GRAD_CHECK_RATIO)
    rows = [
        [{k: v for k, v in row.items() if k not in unknown} for row in run.rows("metrics")] for run in (expected, found)
    ]
    assert apart(*rows) < CLOSE and texts(expected) == texts(found)


@pytest.mark.slow
def test_ranks_shard_what_one_began_and_hand_it_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straight, run = (run_of(tmp_path, name, **LORA) for name in ("straight", "run"))
    alone(straight)
    alone(run, steps=1)
    monkeypatch.setenv(spread.SHARD, "fsdp2")
    together(2, run, steps=2, sft=False)
    together(3, run, steps=3, sft=False)
    monkeypatch.setenv(spread.SHARD, "none")
    together(2, run, steps=4, sft=False)
    assert apart(straight.rows("metrics"), run.rows("metrics")) < CLOSE
    assert texts(straight) == texts(run)
