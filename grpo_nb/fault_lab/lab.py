"""The lab: one SFT result, and short runs of the demo that begin from it, each with a fault."""

import hashlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from grpo_nb.doctor import diagnose
from grpo_nb.fault_lab.records import Fault, Outcome
from grpo_nb.fault_lab.scoring import Altered
from grpo_nb.policy.model import load_policy
from grpo_nb.rewards.rubric import RewardFunction
from grpo_nb.rules.finding import Finding
from grpo_nb.run.checkpoints import MANIFEST, Checkpoint
from grpo_nb.run.run import Run, RunError
from grpo_nb.tasks import Task, load_tasks
from grpo_nb.training.grpo import grpo
from grpo_nb.training.sft import sft
from grpo_nb.types import Example, Steps

SIZE: Mapping[str, Any] = {
    "batch.micro_batch": 32,
    "run.quick_eval_every": 0,
    "run.checkpoint_every": 100,
    "sft.steps": 0,
}
"""Settings that make a trial of the demo short, by dotted names; an update has four micro-batches."""
EVERY = 7
"""One training example of so many is used: a few steps need no more, and all are encoded at every start. Odd, since
BBQ's examples come in pairs of one condition each."""


class Lab:
    """A lab for trials: a folder for the runs, the model after SFT as a folder, and the tasks."""

    def __init__(self, run: Run, folder: Path, model: Path, tasks: Mapping[str, Task]) -> None:
        self.run, self.folder, self.model, self.tasks = run, folder, model, tasks

    @classmethod
    def of(cls, run: Run, folder: Path | None = None) -> "Lab":
        """A lab on the SFT result of `run`; its own runs go into `folder`, by default next to the run.

        Raises:
            RunError: SFT has no result.
        """
        folder = folder or run.path.with_name(f"{run.name}-lab")
        newest, _ = run.sft_checkpoints.latest(finite=True)
        if newest is None:
            raise RunError(f"{run.path} has no SFT result; the lab starts from one: run sft(run) first")
        tasks = {name: Fewer(task) for name, task in load_tasks(run.config, run.path).items()}
        return cls(run, folder, _model(run, newest, folder), tasks)

    def trial(self, fault: Fault, seed: int = 0) -> "Trial":
        """A new run for the fault, in place of an earlier one of the same seed."""
        path = self.folder / f"{fault.id}-{seed}"
        shutil.rmtree(path, ignore_errors=True)
        own = {"model.name": str(self.model), "run.seed": seed, "run.steps": fault.steps}
        return Trial(fault, Run.create(path, self.run.config.replace(**{**SIZE, **own, **fault.settings})), self.tasks)


def _model(run: Run, warm: Checkpoint, folder: Path) -> Path:
    """The policy of a checkpoint as a model's folder, under a name of its own: SFT may be done anew."""
    digest = hashlib.sha256((warm.path / MANIFEST).read_bytes()).hexdigest()
    model = folder / f"model-{digest[:12]}"
    if not model.is_dir():
        policy = load_policy(run.config.model, run.config.run.seed)
        policy.load_state(warm.tensors("policy"))
        policy.save(half := folder / f".{model.name}")
        half.rename(model)
    return model


class Trial:
    """One run with one fault in it."""

    def __init__(self, fault: Fault, run: Run, tasks: Mapping[str, Task]) -> None:
        self.fault, self.run, self.tasks = fault, run, tasks
        self.rewards: Mapping[str, Sequence[RewardFunction]] = {}
        self.error: Exception | None = None

    def train(self, steps: int | None = None) -> None:
        """Train up to `steps` in total, by default to the run's own number; an error that ends it is raised."""
        for _ in self._steps(steps):
            pass

    def change(self, **settings: Any) -> None:
        """Make the run anew with other settings, before it has begun."""
        config = self.run.config.replace(**{name.replace("__", "."): value for name, value in settings.items()})
        shutil.rmtree(self.run.path)
        self.run = Run.create(self.run.path, config)

    @contextmanager
    def injected(self) -> Iterator[None]:
        """The fault is in the package inside the block."""
        with self.fault.inject(self):
            yield

    def execute(self) -> Outcome:
        """Train with the fault in place; returns the outcome."""
        try:
            with self.injected():
                self.train()
        except Exception as error:
            self.error = error
        return self.outcome()

    def findings(self) -> list[Finding]:
        """Findings of the doctor on the run as it is."""
        return diagnose(self.run)

    def outcome(self) -> Outcome:
        """Findings so far, each with the steps done when it came first."""
        found: dict[str, int] = {}
        severities: dict[str, str] = {}
        for event in self.run.stored("events"):
            if event["kind"] in ("finding", "checkpoint_damaged"):
                name = str(event.get("rule", event["kind"]))
                found.setdefault(name, int(event.get("step") or 0))
                severities.setdefault(name, str(event.get("severity", "error")))
        done = self.run.last_step() or 0
        for finding in self.findings():
            found.setdefault(finding.rule, done)
            severities.setdefault(finding.rule, finding.severity)
        if self.error is not None:
            name = type(self.error).__name__
            found[name], severities[name] = done, "error"
        return Outcome(self.fault.id, self.run.config.run.seed, found, severities, done, str(self.error or ""))

    def _steps(self, steps: int | None) -> Steps:
        if self.fault.stage == "sft":
            return sft(self.run, tasks=self.tasks)
        return grpo(self.run, tasks=self.tasks, rewards=self.rewards, steps=steps)


class Fewer(Altered):
    """A task with a part of its training examples; all else is its own."""

    def __init__(self, task: Task) -> None:
        super().__init__(task, lambda split: _every(task, split))

    def __getattr__(self, name: str) -> Any:
        if name == "reads":  # its files speak for all of their examples
            raise AttributeError(name)
        return super().__getattr__(name)


def _every(task: Task, split: Literal["train", "test"]) -> list[Example]:
    return task.examples(split)[:: EVERY if split == "train" else 1]
