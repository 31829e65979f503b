"""A run that an earlier version began goes on to the bits that it would have had, and its curves have no seam."""

import json
from pathlib import Path

import pytest
import torch

from grpo_nb.run import settings
from grpo_nb.run.run import Run
from grpo_nb.training.grpo import grpo
from tests.support import former
from tests.support.tiny import REWARDS, rows, small_tasks, tiny_run

SHORT = {"run__steps": 3, "run__checkpoint_every": 1, "batch__group_size": 2, "sampling__max_completion_length": 8}
OFF_POLICY = {"batch__mini_batch": 8, "batch__micro_batch": 8, "batch__num_iterations": 2}


def test_a_run_of_an_earlier_version_resumes_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straight = tiny_run(tmp_path, "straight", **SHORT, **OFF_POLICY)
    expected = rows(list(grpo(straight, tasks=small_tasks(), rewards=REWARDS)))
    with monkeypatch.context() as earlier:
        plain = settings.plain
        earlier.setattr(settings, "plain", lambda config: former.settings(plain(config)))
        run = tiny_run(tmp_path, "earlier", **SHORT, **OFF_POLICY)
        steps = grpo(run, tasks=small_tasks(), rewards=REWARDS)
        begun = rows([next(steps)])
        steps.close()
    log = run.path / "metrics.jsonl"
    log.write_text("".join(json.dumps(former.row(row)) + "\n" for row in run.metric_rows()))
    assert "system_prompt" not in (run.path / "config.json").read_text()
    assert "inner_epochs" in (run.path / "config.json").read_text() and '"reward/fairness"' in log.read_text()
    assert "inner_epochs" in run.checkpoints.load(1).state()["config"]["batch"]
    again = Run.open(run.path)
    assert again.config == straight.config
    assert begun + rows(list(grpo(again, tasks=small_tasks(), rewards=REWARDS))) == expected
    assert '"reward/fairness"' in log.read_text().splitlines()[0]
    assert [row.keys() for row in again.metric_rows()] == [row.keys() for row in straight.metric_rows()]
    ended, wanted = (made.checkpoints.load(3).tensors("policy") for made in (again, straight))
    assert ended.keys() == wanted.keys() and all(torch.equal(ended[key], wanted[key]) for key in wanted)
