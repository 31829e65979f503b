"""Choices that change bits: made when a run starts, kept in its checkpoints, used again when it goes on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_nb.policy.model import Policy
from grpo_nb.rollout import ChosenEngine, EagerEngine
from grpo_nb.run.checkpoints import Checkpoints
from grpo_nb.run.run import Run, RunError
from grpo_nb.training import numerics, samples, switches
from grpo_nb.training.grpo import grpo
from grpo_nb.training.numerics import STREAM, Numerics
from grpo_nb.training.sft import sft
from grpo_nb.training.spread import loaded
from tests.support.tiny import given, rows, small_tasks, tiny_config, tiny_run, weights
from tests.support.tokens import pattern


def trained(run: Run, steps: int, **more: Any) -> list[dict[str, Any]]:
    return rows(list(grpo(run, steps=steps, **given(), **more)))


def begun(folder: Path, name: str, **changes: Any) -> Run:
    plain = {"rollout__engine": "eager", "batch__passes": "model"}
    return tiny_run(folder, name, sft__steps=0, run__checkpoint_every=1, **plain | changes)


def event(run: Run, kind: str) -> Any:
    (found,) = run.stored("events").having("kind", {kind})
    return found


def kept(run: Run) -> Any:
    newest, _ = run.checkpoints.latest()
    assert newest is not None
    return newest.state()["numerics"]


def test_a_run_starts_with_the_newest_stream_and_says_so(tmp_path: Path) -> None:
    run = begun(tmp_path, "new")
    (row,) = trained(run, 1)
    assert event(run, "start")["random_stream"] == STREAM == kept(run)["random_stream"]
    assert event(run, "start")["engine"] == row["engine"] == kept(run)["engine"] == "eager"


@pytest.mark.parametrize("stream", [1, 2])
def test_numbers_of_a_row_hang_on_nothing_beside_it(stream: int) -> None:
    made = Numerics(random_stream=stream)
    size, device = (4, 6), torch.device("cpu")
    first = made.uniforms(0, 3, size, device)
    assert first.shape == size and first.dtype == torch.float64 and first.min() >= 0 and first.max() < 1
    assert torch.equal(first, made.uniforms(0, 3, size, device))
    for other in (made.uniforms(1, 3, size, device), made.uniforms(0, 4, size, device)):
        assert not torch.equal(first, other)
    wider = made.uniforms(0, 3, (8, 9), device)[:4, :6]
    assert torch.equal(first, wider) == (stream == 2)


def as_an_older_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stream, and checkpoints that keep none of the choices but for one."""
    plain = Checkpoints.save

    def save(self: Checkpoints, step: int, tensors: Any, state: dict[str, Any]) -> Path:
        before = {key: value for key, value in state.items() if key != "numerics"}
        return plain(self, step, tensors, before | {"shares_prompts": state["numerics"]["shares_prompts"]})

    monkeypatch.setattr(Checkpoints, "save", save)
    monkeypatch.setattr(numerics, "STREAM", 1)


def test_a_run_of_a_version_without_them_goes_on_as_it_was(tmp_path: Path) -> None:
    whole, halted = begun(tmp_path, "whole"), begun(tmp_path, "halted")
    with pytest.MonkeyPatch.context() as earlier:
        as_an_older_version(earlier)
        expected = trained(whole, 2)
        trained(halted, 1)
    (last,) = trained(halted, 2)
    assert last == expected[1] and kept(halted)["random_stream"] == 1
    assert all(torch.equal(weight, weights(whole)[name]) for name, weight in weights(halted).items())
    (other,) = trained(begun(tmp_path, "new"), 1)
    assert other != expected[0], "the newest stream draws something else"


def test_an_older_file_of_settings_draws_by_the_eager_engine(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, "older")
    assert run.config.rollout.engine == "auto"
    tree = run.config.model_dump(mode="json")
    del tree["rollout"]
    from grpo_nb.run import settings

    assert settings.restored(tree).rollout.engine == "eager"
    older = tiny_config(rollout__engine="eager")
    assert not settings.contradictions(older, tiny_config(), {}), "asked for nothing else"
    assert settings.contradictions(older, tiny_config(rollout__engine="graph"), {})


def patched_state(run: Run, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """The newest checkpoint as if it had been made with these choices."""
    before = numerics.stored
    monkeypatch.setattr(
        numerics, "stored", lambda of, state: before(of, state | {"numerics": state["numerics"] | changes})
    )


@pytest.mark.parametrize("changes", [{"random_stream": STREAM + 1}, {"unheard_of": 1}, {"micro_batch": 0}])
def test_choices_of_a_newer_version_are_refused_by_name(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begun(tmp_path, "newer")
    trained(run, 1)
    patched_state(run, monkeypatch, **changes)
    with pytest.raises(RunError) as caught:
        trained(run, 2)
    named = str(STREAM + 1) if "random_stream" in changes else next(iter(changes))
    assert named in str(caught.value)
    assert run.last_step() == 1


class OwnEngine(EagerEngine):
    """A caller's."""


def test_the_engine_that_drew_draws_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, asked = begun(tmp_path, "kept", rollout__engine="auto"), []

    def choose(wanted: Any, policy: Any, rollout: Any) -> ChosenEngine:
        asked.append(wanted)
        return ChosenEngine(EagerEngine(), "eager")

    trained(run, 1, engine="eager")
    monkeypatch.setattr(numerics, "choose", choose)
    trained(run, 2)
    trained(run, 3, engine="graph")
    assert asked == ["eager", "graph"], "not what the settings have"
    assert not [*run.stored("events").having("kind", {"engine_changed"})]


def test_another_engine_than_before_is_logged(tmp_path: Path) -> None:
    run = begun(tmp_path, "own")
    trained(run, 1, engine=OwnEngine())
    assert kept(run)["engine"] == "OwnEngine"
    trained(run, 2)
    changed = event(run, "engine_changed")
    assert (changed["step"], changed["before"], changed["now"]) == (1, "OwnEngine", "eager")
    assert kept(run)["engine"] == "eager"


def test_an_engine_that_cannot_serve_the_model_says_why_in_the_log(tmp_path: Path) -> None:
    run = begun(tmp_path, "fallback", rollout__engine="graph")
    trained(run, 1)
    start = event(run, "start")
    assert start["engine"] == "eager" and "cpu" in start["engine_reason"]


@pytest.mark.parametrize("kept", [None, [], "eager"])
def test_choices_that_are_none_are_a_broken_checkpoint(kept: Any, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=pattern("numerics")):
        numerics.stored(begun(tmp_path, "broken"), {"numerics": kept})  # type: ignore[typeddict-unknown-key]


@pytest.mark.parametrize("changes", [{}, {"batch__passes": "model", "rollout__engine": "eager"}])
def test_nothing_reads_memory_that_nobody_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    def found(name: str) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
        run = tiny_run(tmp_path, name, **changes, run__steps=2)
        return rows([*sft(run, tasks=small_tasks()), *grpo(run, **given())]), weights(run)

    left = found("left")
    filling = switches.Switch(switches._exactness, switches._set_exactness, (True, True))
    monkeypatch.setattr(switches, "EXACT", filling)
    filled = found("filled")
    assert left[0] == filled[0] and all(torch.equal(left[1][name], filled[1][name]) for name in left[1])


@pytest.mark.parametrize(
    ("device", "dtype", "full", "setting", "chosen"),
    [
        ("cuda", torch.float32, True, "auto", True),
        ("cuda", torch.float32, True, False, False),
        ("cuda", torch.float32, False, "auto", False),
        ("cuda", torch.float32, False, True, True),
        ("cuda", torch.bfloat16, False, True, False),
        ("cpu", torch.float32, True, True, False),
    ],
)
def test_tf32_is_chosen_for_float32_on_a_gpu(
    device: str,
    dtype: torch.dtype,
    full: bool,
    setting: bool | str,
    chosen: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    policy = loaded(begun(tmp_path, "any"))
    monkeypatch.setattr(Policy, "device", torch.device(device))
    monkeypatch.setattr(Policy, "dtype", dtype)
    monkeypatch.setattr(policy, "full", full)
    assert numerics._rounds(tiny_config(model__tf32=setting), policy) is chosen


def test_a_run_that_chose_tf32_computes_with_it_to_its_end_and_when_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(numerics, "_rounds", lambda config, policy: True)
    monkeypatch.setattr(samples, "sample_rows", lambda *_: [seen.append(switches._rounds())][:0])
    run = begun(tmp_path, "rounded")
    trained(run, 1)
    monkeypatch.setattr(numerics, "_rounds", lambda config, policy: False)
    trained(run, 2)
    assert seen == [True, True] and not switches._rounds()
    assert event(run, "start")["tf32"] is True


def test_a_switch_is_on_until_the_last_block_ends() -> None:
    held = [False]
    switch = switches.Switch(lambda: held[0], lambda value: held.__setitem__(0, value), True)
    one, two = switch.on(), switch.on()
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    assert held == [True]
    two.__exit__(None, None, None)
    assert held == [False]
