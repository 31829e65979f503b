"""Runs that score and train along flat lines: the model's own numbers, decided once for each run."""

import math
from pathlib import Path
from typing import Any

import pytest

from grpo_nb.passes import model
from grpo_nb.run.run import Run
from grpo_nb.training import gradients
from grpo_nb.training.grpo import grpo
from tests.support.tiny import REWARDS, rows, small_tasks, tiny_run


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flat passes serve a CPU too."""
    plain = model.unserved
    monkeypatch.setattr(model, "unserved", lambda policy: plain(policy, ("cpu",)))


def begun(folder: Path, name: str, **changes: Any) -> Run:
    return tiny_run(folder, name, sft__steps=0, run__checkpoint_every=1, model__train="lora", **changes)


def trained(run: Run, steps: int) -> list[dict[str, Any]]:
    return rows(list(grpo(run, steps=steps, tasks=small_tasks(), rewards=REWARDS)))


def kept(run: Run) -> str:
    newest, _ = run.checkpoints.latest()
    assert newest is not None
    return str(newest.state()["numerics"]["passes"])


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("share", ["auto", "never"])
def test_a_step_has_the_same_numbers_either_way(share: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens: list[int] = []
    plain = gradients.score

    def counted(policy, batch, temperature, **settings):  # type: ignore[no-untyped-def]
        tokens.append(batch.input_ids.numel())
        return plain(policy, batch, temperature, **settings)

    monkeypatch.setattr(gradients, "score", counted)
    settings: dict[str, Any] = {"batch__share_prompts": share, "algorithm__entropy_coef": 0.01}
    one, flat = begun(tmp_path, "flat", **settings), []
    flat = trained(one, 2)
    in_lines, tokens[:] = sum(tokens), []
    two = begun(tmp_path, "model", batch__passes="model", **settings)
    own = trained(two, 2)
    assert (kept(one), kept(two)) == ("flat", "model") and in_lines < sum(tokens)
    for a, b in zip(flat, own, strict=True):
        assert a.keys() == b.keys()
        for key, value in a.items():
            if isinstance(value, float) and not math.isnan(value):
                assert value == pytest.approx(b[key], rel=1e-3, abs=1e-5), key
    assert all(value == 0 for key, value in flat[0].items() if key.startswith("kl/") and isinstance(value, float))


def test_a_run_that_began_otherwise_goes_on_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    halted, whole = begun(tmp_path, "halted"), begun(tmp_path, "whole")
    expected = trained(whole, 2)
    trained(halted, 1)
    request.getfixturevalue("served")
    (last,) = trained(halted, 2)
    assert kept(halted) == "grouped" and last == expected[1], "bit for bit"


@pytest.mark.usefixtures("served")
def test_flat_passes_go_on_bit_for_bit_or_end_with_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, halted = begun(tmp_path, "whole"), begun(tmp_path, "halted")
    expected = trained(whole, 2)
    trained(halted, 1)
    (last,) = trained(halted, 2)
    assert kept(halted) == "flat" and last == expected[1]
    monkeypatch.setattr(model, "unserved", lambda policy: "no kernels")
    trained(halted, 3)
    (event,) = halted.stored("events").having("kind", {"passes_changed"})
    assert (event["step"], event["before"], event["now"]) == (2, "flat", "model") and kept(halted) == "model"
