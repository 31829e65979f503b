"""However a study's process is ended, the processes of its runs are asked to stop."""

import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_nb.cli import main
from grpo_nb.preflight.dependencies import DependencyChanged, check
from grpo_nb.run import dependencies_file
from grpo_nb.run.run import Run
from grpo_nb.run.settings import plain
from grpo_nb.storage import digests
from grpo_nb.sweeps import sweep, work
from grpo_nb.sweeps.shared_sft import adopt
from tests.sweeps.test_sweeps import NO_KL, STARTED, Pretended, tiny


class Endless(Pretended):
    """A process that ends when it is asked to."""

    def __init__(self, command: list[str], **given: Any) -> None:
        super().__init__(command, **given)
        self.asked = threading.Event()

    def wait(self, timeout: float | None = None) -> int:
        assert self.asked.wait(20)
        return 130

    def send_signal(self, number: int) -> None:
        super().send_signal(number)
        self.asked.set()


def test_sigterm_stops_what_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", Endless)
    STARTED.clear()
    sweep(tmp_path / "kl", tiny(), {"usual": {}, "no-kl": NO_KL}, seeds=[0])
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # the test's own process stays, whatever happens
    real = work.wait

    def terminated(futures: list[Any]) -> Any:
        assert any(STARTED or threading.Event().wait(0.01) for _ in range(2000))
        threading.Timer(5, lambda: STARTED[0].send_signal(0)).start()
        os.kill(os.getpid(), signal.SIGTERM)
        return real(futures)

    monkeypatch.setattr(work, "wait", terminated)
    try:
        assert main(["sweep", str(tmp_path / "kl")]) == 130
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [process.signals[0] for process in STARTED] == [signal.SIGINT]


def test_a_process_that_starts_while_the_study_is_stopped_is_stopped_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots, stopping = work.Slots([None]), threading.Event()

    class Slow(Endless):
        """The study is stopped after it was asked for, and before it is known."""

        def __init__(self, command: list[str], **given: Any) -> None:
            stopping.set()
            threading.Event().wait(0.3)
            super().__init__(command, **given)

    monkeypatch.setattr(subprocess, "Popen", Slow)
    STARTED.clear()
    (trial,) = sweep(tmp_path / "kl", tiny(), {"usual": {}}, seeds=[0]).trials
    starter = threading.Thread(target=slots.call, args=(trial, ["sft", str(trial.path)]))
    starter.start()
    assert stopping.wait(20)
    slots._stop()
    asked = [[*process.signals] for process in STARTED]
    for process in STARTED:
        process.send_signal(0)
    starter.join()
    assert asked == [[signal.SIGINT]]


def test_a_run_that_takes_an_sft_over_stands_on_its_content(tmp_path: Path) -> None:
    base, other = Run.create(tmp_path / "base", tiny()), Run.create(tmp_path / "other", tiny())
    content = {"weights/base": digests.entry([digests.of_json("w", 1)]), "data/fairness": digests.entry([])}
    check(base, content, (), "sft")
    state = {"step": 1, "config": plain(base.config)}
    base.sft_checkpoints.save(1, {"policy": {"w": torch.ones(1)}}, state)
    assert adopt(other, [base]) is base
    kept = dependencies_file.read(other.path)
    assert kept is not None and {*kept.entries} == {"weights/base"}
    with pytest.raises(DependencyChanged):
        check(other, {"weights/base": digests.entry([digests.of_json("w", 2)])}, (), "train")
