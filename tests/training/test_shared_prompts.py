"""Passes that share prompts: the numbers of passes that do not, decided once for each run."""

import math
from pathlib import Path

import pytest

from grpo_nb.rollout import selfcheck
from grpo_nb.run.run import Run
from grpo_nb.training import gradients
from grpo_nb.training.grpo import grpo
from tests.support.tiny import REWARDS, small_tasks, stable, tiny_run


def trained(run: Run, steps: int = 2) -> list[dict[str, object]]:
    list(grpo(run, tasks=small_tasks(), rewards=REWARDS, steps=steps))
    return [stable(row) for row in run.metric_rows()]


def started(run: Run) -> bool:
    (event,) = run.stored("events").having("kind", {"start"})
    return bool(event["shares_prompts"])


@pytest.fixture
def shared(tmp_path: Path) -> Run:
    return tiny_run(tmp_path, "shared", sft__steps=0)


def test_a_step_has_the_same_numbers_either_way(shared: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens: dict[bool, int] = {True: 0, False: 0}
    plain = gradients.collate

    def counted(policy, rollouts, rows, plan):  # type: ignore[no-untyped-def]
        batch = plain(policy, rollouts, rows, plan)
        tokens[plan.numerics.shares_prompts] += batch.input_ids.numel()
        return batch

    monkeypatch.setattr(gradients, "collate", counted)
    one = trained(shared)
    two = trained(tiny_run(tmp_path, "alone", sft__steps=0, batch__share_prompts="never"))
    assert started(shared) and 2 * tokens[True] < tokens[False], "fewer tokens went through the model"
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        for key, value in a.items():
            if isinstance(value, float) and not math.isnan(value):
                assert value == pytest.approx(b[key], rel=1e-3, abs=1e-5), key


def test_what_a_run_began_with_it_keeps(shared: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_nb.training.numerics.shares_prompts", lambda policy: False)
    run = tiny_run(tmp_path, "older", sft__steps=0)
    trained(run, 1)
    monkeypatch.undo()
    assert not started(run)
    trained(run, 2)
    newest, _ = run.checkpoints.latest()
    assert newest is not None and newest.state()["numerics"]["shares_prompts"] is False
    alone = tiny_run(tmp_path, "alone", sft__steps=0, batch__share_prompts="never")
    assert [stable(row) for row in run.metric_rows()] == trained(alone, 2), "bit for bit"


def test_a_model_that_bears_it_no_more_is_logged(shared: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(shared, 1)
    monkeypatch.setattr("grpo_nb.training.numerics.shares_prompts", lambda policy: False)
    trained(shared, 2)
    assert [event["step"] for event in shared.stored("events").having("kind", {"prompts_not_shared"})] == [1]


@pytest.mark.parametrize("fault", [RuntimeError("no such mask"), None])
def test_a_model_that_takes_no_tree_mask_is_given_none(
    fault: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support import tiny_models as tiny

    learner = tiny.policy("llama")
    plain = type(learner).pack

    def wrong(self, prompts, completions, prompt_of):  # type: ignore[no-untyped-def]
        if fault:
            raise fault
        batch = plain(self, prompts, completions, prompt_of)
        batch.segments[batch.segments > 0] = 1  # completions see each other
        return batch

    assert selfcheck.shares_prompts(tiny.policy("llama"))
    monkeypatch.setattr(type(learner), "pack", wrong)
    assert not selfcheck.shares_prompts(learner)
