"""A study in a folder: its plan, its progress, and its results.

The folder holds `sweep.json`, the plan, and a run `<arm>-<seed>` of each pair. All else is in the runs: training and
measurements are read from them, so a study continues after any interruption, on any number of GPUs.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import ValidationError

from grpo_nb.config import Config, ConfigError
from grpo_nb.judge import host_trust
from grpo_nb.plots.canvas import Picture
from grpo_nb.plots.spread import spread
from grpo_nb.report.tables import Table
from grpo_nb.run import places
from grpo_nb.run.run import RunError
from grpo_nb.run.settings import plain
from grpo_nb.storage import safe_open, schema
from grpo_nb.storage.files import clear_errors, to_json, write_atomically
from grpo_nb.storage.lock import exclusive
from grpo_nb.suggest import did_you_mean
from grpo_nb.sweeps import results, work
from grpo_nb.sweeps.plan import Arm, Plan, Trial, trials

FILE = "sweep.json"


class Study:
    """A folder of runs that differ by arm and seed; `sweep` makes or opens one."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder, self.plan = folder, plan
        self.trials: list[Trial] = trials(folder, plan)

    @classmethod
    def open(cls, folder: str | Path) -> "Study":
        """The study in `folder`.

        Raises:
            RunError: it does not exist, or its file is broken.
            ConfigError: an arm's settings do not validate here.
        """
        path = places.as_path(folder).absolute()
        try:
            text = safe_open.read(path / FILE, schema.LARGEST_CONFIG)
        except FileNotFoundError:
            raise RunError(f"{path} holds no {FILE}; make a study with sweep(folder, config, arms, seeds)") from None
        try:
            return cls(path, Plan.model_validate(schema.loads(text)))
        except ValidationError as error:
            raise RunError(f"{path / FILE} is broken:\n{_listed(error)}\nrestore it from a copy") from None
        except ValueError as error:
            if isinstance(error, ConfigError | RunError):
                raise
            raise RunError(f"{path / FILE} is no JSON: {error}; restore it from a copy") from None

    def train(self, jobs: int = 1, gpus: Sequence[int] = (), arms: Collection[str] = ()) -> Table:
        """Train and evaluate what is not done yet, each run in a process of its own; `status()` once all have ended.

        After a failed run the others continue; its `sweep.log` has the error. An interrupt stops those that train,
        saved, and starts no more.

        Args:
            jobs: runs at a time, on each of `gpus` where these are given.
            gpus: numbers of the GPUs that runs are shared out among.
            arms: only these, e.g. those that matter most before the machine is taken; none named: all.

        Raises:
            ConfigError: no arm has that name.
        """
        self.check_arms(arms)
        work.train(self.trials, jobs, gpus, arms or self.plan.arms)
        return self.status()

    def check_arms(self, names: Collection[str]) -> None:
        """Refuse names of arms that the study does not have.

        Raises:
            ConfigError: the first of them.
        """
        if unknown := [name for name in names if name not in self.plan.arms]:
            raise ConfigError(
                f"the study has no arm {unknown[0]!r}{did_you_mean(unknown[0], self.plan.arms)}; it has "
                f"{', '.join(self.plan.arms)}"
            )

    def status(self) -> Table:
        """Table with one row per run: arm, seed, state, step, of, and the work left."""
        rows = [work.standing(trial) for trial in self.trials]
        done = sum(not row["left"] for row in rows)
        return Table(pd.DataFrame(rows), f"{self.folder.name}: {done} of {len(rows)} runs are done")

    def confirm(self) -> None:
        """Confirm, for this user on this machine, that the servers of its arms may be sent their keys and prompts."""
        host_trust.confirm({pair for trial in self.trials for pair in host_trust.pairs_of(trial.config)})

    def results(self) -> pd.DataFrame:
        """Table with one row for each arm, objective and metric; see `results.table`."""
        return results.table(self.trials)

    def table(self) -> Table:
        """The results for reading: one row an arm, one column a metric, with 95% intervals over seeds."""
        return results.shown(self.results(), self.folder.name)

    def plot(self, *metrics: str) -> Picture:
        """Plot curves of the arms over the steps, for keys of metrics.jsonl (default: each objective's mean reward)."""
        return spread(results.curves(self.trials, metrics), len(self.plan.seeds))

    def __repr__(self) -> str:
        return f"Study({str(self.folder)!r}, arms={[*self.plan.arms]}, seeds={[*self.plan.seeds]})"


def sweep(
    folder: str | Path,
    config: Config | None = None,
    arms: Mapping[str, Mapping[str, Any] | Arm] | None = None,
    seeds: Sequence[int] = (0, 1, 2),
) -> Study:
    """Open the study in `folder`, or create it; this trains nothing yet.

        study = sweep("sweeps/kl", presets.demo(), {"usual": {}, "no-kl": {"objectives.fairness.beta": 0.0}})
        study.train(gpus=[0, 1])
        study.table()

    Args:
        config: the settings that arms change; None, as `arms`: open the existing study.
        arms: by name, dotted settings, or an `Arm` where GRPO is left out. The others are compared with the first.
        seeds: the seeds of every arm. Runs of one seed have the same SFT, prompts and questions, so arms are compared
        in pairs.

    Raises:
        ConfigError: settings of an arm are unknown or do not validate; nothing is written.
        RunError: the folder holds another study, or none and no settings are given.
    """
    path = places.as_path(folder).absolute()
    if config is None or not arms:
        return Study.open(path)
    given = {name: arm if isinstance(arm, Arm) else Arm(changes=dict(arm)) for name, arm in arms.items()}
    try:
        study = Study(path, Plan(config=plain(config), arms=given, seeds=tuple(seeds)))
    except ValidationError as error:
        raise ConfigError(_listed(error)) from None
    if not (path / FILE).exists():
        with clear_errors("create the study", path):
            path.mkdir(parents=True, exist_ok=True)
        with exclusive(path / FILE):
            if not (path / FILE).exists():  # else another process made it meanwhile
                write_atomically(path / FILE, to_json(study.plan.model_dump(mode="json"), indent=1))
    if (there := Study.open(path)).plan != study.plan:
        raise RunError(f"{path} holds another study, {there}; open it with sweep({str(folder)!r}), or take another")
    there.confirm()
    return there


def _listed(error: ValidationError) -> str:
    return "\n".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
