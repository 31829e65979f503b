"""A run's settings are frozen once something was trained: every checkpoint keeps a copy to hold config.json to."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_nb.config import Config, ConfigError, JudgeConfig, parse
from grpo_nb.config.guards import OFF, GuardsConfig
from grpo_nb.run import places
from grpo_nb.run.checkpoints import Checkpoint
from grpo_nb.run.places import CONFIG
from grpo_nb.storage import former_names, safe_open, schema
from grpo_nb.storage.files import RunError, clear_errors, from_json, to_json, write_atomically

_LIMITS = ("budget_tokens", "budget_usd", "concurrency", "timeout_s", "retries", "deadline_s", "max_tokens")
_OF_RUN = ("run.checkpoints_gib", "run.keep_checkpoints", "run.trackers")
ADJUSTABLE = (*(f".judge.{limit}" for limit in _LIMITS), *_OF_RUN)
"""Settings that may be edited while a run stands still: a judge's budgets and time limits, which change no verdict;
the number of checkpoints kept, and the trackers, which change no step."""

FORMER_DEFAULTS = {"algorithm.kl_weight": "ratio", "algorithm.advantage_clip": 10.0, "rollout.engine": "eager"}
"""Values that older versions wrote where the default is now "auto"; a run that has one still matches the default."""

UNWRITTEN: Mapping[str, Any] = {"rollout": {"engine": "eager"}, "guards": OFF}
"""Values of settings groups that files of older versions do not have."""

UNWRITTEN_JUDGE = {"decides_ties": True}
"""Values of judge settings that files of older versions do not have."""

Differences = Mapping[str, tuple[Any, Any]]
"""Dotted setting -> (the run's value, the value that it is compared with)."""

_FURTHER = "; to go further than run.steps, give the total to reach (steps=N, or --steps N)"


def read(path: Path) -> Config:
    """The settings of the run in folder `path`.

    Raises:
        RunError: no run exists there, or its config.json is broken; the message has the place and the error.
    """
    file = path / CONFIG
    with clear_errors("read", file):
        try:
            text = safe_open.read(file, schema.LARGEST_CONFIG)
        except (FileNotFoundError, NotADirectoryError):
            raise RunError(places.missing(path)) from None
    try:
        return restored(from_json(text))
    except ConfigError as error:
        raise RunError(f"{file} does not validate: {error}") from None
    except ValueError as error:
        raise RunError(f"{file} is not valid JSON ({error}); restore it, a run never changes it") from None


def write(folder: Path, config: Config) -> None:
    """Write the run's config.json atomically."""
    write_atomically(folder / CONFIG, to_json(plain(config), indent=2) + b"\n")


def plain(config: Config) -> dict[str, Any]:
    """The settings as JSON values: what config.json and a checkpoint's state hold."""
    return config.model_dump(mode="json")


def restored(tree: Any) -> Config:
    """The settings in a run's own files, with the names and defaults of earlier versions understood.

    Raises:
        ConfigError: they do not validate.
    """
    tree = former_names.settings(tree)
    if isinstance(tree, dict):
        tree = {**UNWRITTEN, **tree}
    objectives = tree.get("objectives") if isinstance(tree, dict) else None
    if not isinstance(objectives, dict):
        return parse(tree)
    return parse(tree | {"objectives": {name: _restored_objective(own) for name, own in objectives.items()}})


def _restored_objective(tree: Any) -> Any:
    judge = tree.get("judge") if isinstance(tree, dict) else None
    return tree | {"judge": UNWRITTEN_JUDGE | judge} if isinstance(judge, dict) else tree


def contradictions(has: Config, wanted: Config, explicit: Mapping[str, Any]) -> Differences:
    """Differences between the run's settings and `wanted`. The number of steps counts only if it is in `explicit`."""
    found = has.differences(wanted)
    spared = {"run.steps", *(key for key, values in found.items() if _outlived(key, values))}
    return {key: values for key, values in found.items() if key in explicit or key not in spared}


def _outlived(key: str, values: tuple[Any, Any]) -> bool:
    """Whether the run has the default of its time, and the request has today's default."""
    if key in FORMER_DEFAULTS:
        return values == (FORMER_DEFAULTS[key], "auto")
    group, _, setting = key.partition(".")
    if group == "guards":
        return setting in OFF and values == (OFF[setting], GuardsConfig.model_fields[setting].default)
    setting = key.rpartition(".judge.")[2]
    return setting in UNWRITTEN_JUDGE and values == (
        UNWRITTEN_JUDGE[setting],
        JudgeConfig.model_fields[setting].default,
    )


def refuse_contradiction(folder: Path, differences: Differences) -> None:
    """Refuse settings that the run does not have.

    Raises:
        RunError: there are differences; each is listed with both values.
    """
    if differences:
        raise RunError(
            f"run {folder} was made with other settings, which never change:\n"
            f"{listed(differences, 'the run has', 'requested')}\n"
            "leave them out to continue the run as it is, or choose another run folder" + _further(differences)
        )


def edits(config: Config, checkpoint: Checkpoint) -> Differences:
    """Settings that differ from those `checkpoint` was made with, with (the checkpoint's, today's)."""
    saved = checkpoint.state().get("config")  # checkpoints of the first versions kept none
    found = {} if saved is None else restored(saved).differences(config)
    return {key: both for key, both in found.items() if not key.endswith(ADJUSTABLE)}


def refuse_edited(folder: Path, config: Config, checkpoint: Checkpoint) -> None:
    """Refuse to resume from a checkpoint that was made with other settings than the run has now.

    Raises:
        RunError: config.json was edited by hand; each setting is listed with both values.
    """
    if differences := edits(config, checkpoint):
        raise RunError(
            f"{folder / CONFIG} was edited after checkpoint {checkpoint.path.name} of {checkpoint.path.parent.name}/ "
            f"was made, and a run's settings never change:\n{listed(differences, 'the checkpoint has', 'now')}\n"
            "put the checkpoint's values back, or begin a new run folder with the new ones" + _further(differences)
        )


def refuse_stale(folder: Path, differences: Differences) -> None:
    """Refuse to train with settings that were opened before config.json was changed.

    Raises:
        RunError: there are differences; each is listed with both values.
    """
    if differences:
        raise RunError(
            f"{folder / CONFIG} was changed since the run was opened here:\n"
            f"{listed(differences, 'opened with', 'now')}\nopen the run again, then start it"
        )


def listed(differences: Differences, before: str = "was", after: str = "now") -> str:
    """A line a setting, with both values."""
    return "\n".join(f"  {name}: {before} {has!r}, {after} {other!r}" for name, (has, other) in differences.items())


def _further(differences: Differences) -> str:
    return _FURTHER if "run.steps" in differences else ""
