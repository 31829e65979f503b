"""Runs of small models on the CPU: the numbers of the model's own passes, decided once for each run."""

import math
from pathlib import Path
from typing import Any

import pytest

from grpo_nb.run.run import Run
from grpo_nb.training import gradients
from grpo_nb.training.grpo import grpo
from tests.support.tiny import REWARDS, rows, small_tasks, tiny_run


def begun(folder: Path, name: str, **changes: Any) -> Run:
    return tiny_run(folder, name, sft__steps=0, run__checkpoint_every=1, **changes)


def trained(run: Run, steps: int) -> list[dict[str, Any]]:
    return rows(list(grpo(run, steps=steps, tasks=small_tasks(), rewards=REWARDS)))


def kept(run: Run) -> tuple[str, str]:
    newest, _ = run.checkpoints.latest()
    assert newest is not None
    numerics = newest.state()["numerics"]
    return numerics["passes"], numerics["engine"]


@pytest.mark.parametrize(
    "settings",
    [
        {"model__train": "lora", "algorithm__entropy_coef": 0.01},
        {"batch__share_prompts": "never"},
        {"batch__mini_batch": 8, "batch__micro_batch": 8},
    ],
)
def test_a_step_has_the_same_numbers_either_way(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens: list[int] = []
    plain = gradients.score

    def counted(policy, batch, temperature, **options):  # type: ignore[no-untyped-def]
        tokens.append(batch.input_ids.numel())
        return plain(policy, batch, temperature, **options)

    monkeypatch.setattr(gradients, "score", counted)
    one = begun(tmp_path, "grouped", **settings)
    found = trained(one, 2)
    grouped, tokens[:] = sum(tokens), []
    two = begun(tmp_path, "model", batch__passes="model", rollout__engine="eager", **settings)
    expected = trained(two, 2)
    assert (kept(one), kept(two)) == (("grouped", "grouped"), ("model", "eager")) and grouped < sum(tokens)
    for a, b in zip(found, expected, strict=True):
        assert a.keys() == b.keys()
        for key, value in a.items():
            if isinstance(value, float) and not math.isnan(value):
                assert value == pytest.approx(b[key], rel=2e-3, abs=1e-5), key
    assert all(value == 0 for key, value in found[0].items() if key.startswith("kl/") and isinstance(value, float))


@pytest.mark.parametrize("train", ["lora", "full"])
def test_grouped_passes_go_on_bit_for_bit_or_end_with_events(
    train: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, halted = (begun(tmp_path, name, model__train=train) for name in ("whole", "halted"))
    expected = trained(whole, 2)
    trained(halted, 1)
    (last,) = trained(halted, 2)
    assert kept(halted) == ("grouped", "grouped") and last == expected[1]
    for place in ("grpo_nb.policy.llama_layers.unserved", "grpo_nb.rollout.grouped.unserved"):
        monkeypatch.setattr(place, lambda model: "others")
    trained(halted, 3)
    assert kept(halted) == ("model", "eager")
    for kind in ("passes_changed", "engine_changed"):
        (event,) = halted.stored("events").having("kind", {kind})
        assert event["step"] == 2 and event["before"] == "grouped"


def test_a_run_that_began_otherwise_goes_on_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, halted = begun(tmp_path, "whole"), begun(tmp_path, "halted")
    for place in ("grpo_nb.policy.llama_layers.unserved", "grpo_nb.rollout.grouped.unserved"):
        monkeypatch.setattr(place, lambda model: "not known yet")
    expected = trained(whole, 2)
    trained(halted, 1)
    monkeypatch.undo()
    (last,) = trained(halted, 2)
    assert kept(halted) == ("model", "eager") and last == expected[1], "bit for bit"
