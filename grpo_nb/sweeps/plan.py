"""Plan of a study: arms, each settings of its own, times seeds."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from grpo_nb.config import Config, ConfigError
from grpo_nb.printable import clean_logger
from grpo_nb.run.places import CONFIG
from grpo_nb.run.run import Run, RunError
from grpo_nb.run.settings import contradictions, refuse_contradiction, restored
from grpo_nb.sweeps.shared_sft import same_sft

logger = clean_logger(__name__)

MOST_ARMS, MOST_SEEDS = 100, 100

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,59}$")]
"""Name of an arm: part of a folder's name on every system."""


class Arm(BaseModel):
    """One arm: settings that differ from the study's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    changes: dict[str, Any] = {}
    """Dotted settings, as `Config.replace` takes them."""
    grpo: bool = True
    """Whether GRPO follows SFT; False measures the result of SFT alone."""


class Plan(BaseModel):
    """Content of `sweep.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Annotated[int, Field(ge=1, le=1)] = 1
    config: dict[str, Any]
    """The settings that arms change."""
    arms: Annotated[dict[Name, Arm], Field(min_length=1, max_length=MOST_ARMS)]
    seeds: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1, max_length=MOST_SEEDS)]

    @model_validator(mode="after")
    def _seeds_differ(self) -> "Plan":
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds {list(self.seeds)} name one twice")
        return self


@dataclass(frozen=True)
class Trial:
    """One run of a study."""

    arm: str
    seed: int
    path: Path
    config: Config
    grpo: bool
    first: bool
    """Whether it is of the first arm, which measures the model before SFT too."""
    own_sft: bool
    """Whether no arm before it has the same SFT: it measures the model after SFT too."""

    @property
    def name(self) -> str:
        return self.path.name

    def run(self) -> Run | None:
        """The run, where it was begun.

        Raises:
            RunError: it cannot be read, or has other settings than this trial: its numbers are not this arm's.
        """
        if not (self.path / CONFIG).exists():
            return None
        run = Run.open(self.path)
        refuse_contradiction(self.path, contradictions(run.config, self.config, {}))
        return run

    def readable(self) -> Run | None:
        """The same, and None with a warning where it cannot be read: one such run hides no other."""
        try:
            return self.run()
        except RunError as error:
            logger.warning("%s is left out: %s", self.name, error)
            return None

    def made(self) -> Run:
        """The run, made where it is missing.

        Raises:
            RunError: it exists with other settings, or it cannot be made.
        """
        return Run.open_or_create(self.path, self.config)


def trials(folder: Path, plan: Plan) -> list[Trial]:
    """Trials seed by seed, so that all arms of the first seed are compared first."""
    base, names = restored(plan.config), [*plan.arms]
    found: list[Trial] = []
    for seed in plan.seeds:
        for name, arm in plan.arms.items():
            config = base.replace(**{**arm.changes, "run.seed": seed})
            if "run.seed" in arm.changes:
                raise ConfigError(
                    f"arm {name!r} sets run.seed, which each run takes from seeds={list(plan.seeds)}; leave it out"
                )
            if not arm.grpo and config.sft.steps == 0:
                raise ConfigError(f"arm {name!r} has neither GRPO nor SFT: set sft.steps above 0, or grpo=True")
            path = folder / f"{name}-{seed}"
            own_sft = not any(one.seed == seed and same_sft(one.config, config) for one in found)
            found.append(Trial(name, seed, path, config, arm.grpo, name == names[0], own_sft))
    return found
