"""This user's project file: the run that the notebooks open, and the import paths of own tasks and rewards.

    .grpo_nb/project.json    in the folder that has `runs/`

A convenience: without it, a notebook names its run. Import paths are kept here and never in a run's folder, which may
come from anybody; they are trusted only in a file that this user alone may write, and under a seal that this user's
key made for this folder: a cloned or unpacked one has none.
"""

import importlib
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from grpo_nb.config import ConfigError
from grpo_nb.printable import brief, clean_logger
from grpo_nb.rewards.foreign_code import error_text
from grpo_nb.run import places
from grpo_nb.storage import safe_open, user_cache
from grpo_nb.storage.files import RunError, write_atomically
from grpo_nb.storage.lock import exclusive

logger = clean_logger(__name__)

FOLDER, FILE = ".grpo_nb", "project.json"
ELSEWHERE = "GRPO_NB_PROJECT_DIR"
"""Environment variable: the folder of the file, instead of `.grpo_nb`."""
LARGEST = 1 << 20
Name = Annotated[str, Field(min_length=1, max_length=4096)]
Rewards = list[tuple[Name, Annotated[float, Field(allow_inf_nan=False)]]]


class OwnPaths(BaseModel):
    """Import paths of a run's own tasks and reward functions, by objective."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tasks: dict[Name, Name] = {}
    rewards: dict[Name, Rewards] = {}
    """Import paths of rewards by objective, each with its weight."""
    beside: Name | None = None
    """The folder of the notebook that named them, where their modules may lie; `remember` sets it."""

    @classmethod
    def of(cls, tasks: Mapping[str, str], rewards: Mapping[str, Sequence[str | tuple[str, float]]]) -> "OwnPaths":
        """Import paths as in a settings cell: `{"geo": "own:Capitals"}`, `{"fairness": ["own:short", ("own:f", 0.1)]}`.

        Raises:
            ConfigError: a value that is no import path.
        """
        weighed = {name: [_weighed(name, entry) for entry in _list(name, given)] for name, given in rewards.items()}
        for name, path in tasks.items():
            _check(f"TASKS[{name!r}]", path)
        try:
            return cls(tasks=dict(tasks), rewards=weighed)
        except ValidationError as error:
            found = error.errors()[0]
            raise ConfigError(f"import paths of own code: {brief(found['input'])}: {found['msg']}") from None


class Project(BaseModel):
    """Content of the project file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: Name | None = None
    """Folder of the current run: from the project's folder, or absolute where it lies elsewhere."""
    since: Annotated[str, Field(max_length=100)] = ""
    own: dict[Name, OwnPaths] = {}
    """Import paths by a run's folder, written as `run` is."""
    seal: int | None = None
    """Seal of `own`, in this folder."""


def file() -> Path:
    """Path of this project's file, existing or not."""
    own = os.environ.get(ELSEWHERE)
    return (Path(own) if own else places.root() / FOLDER) / FILE


def key(run: Path) -> str:
    """Name of a run's folder in the file."""
    path, root = run.absolute(), places.root()
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)


def read() -> Project:
    """Stored project; empty where the file is missing, damaged or not this user's alone, which is logged."""
    path = file()
    try:
        with os.fdopen(safe_open.opened(path), "rb") as opened:
            if not safe_open.is_private(opened.fileno(), 0o022):
                raise ValueError("another user owns it or may write it; chmod 644 if it is yours")
            found = Project.model_validate_json(opened.read(LARGEST))
    except (FileNotFoundError, NotADirectoryError):
        return Project()
    except (OSError, ValueError) as error:
        why = "it is damaged" if isinstance(error, ValidationError) else error
        logger.warning("%s cannot be read (%s): no current run and no import paths are known", path, why)
        return Project()
    if not found.own or (found.seal is not None and found.seal == _seal(found.own)):
        return found
    logger.warning(
        "%s has import paths that were not named here by this user: none is imported; name them in the settings cell "
        "of 01_load",
        path,
    )
    return found.model_copy(update={"own": {}})


def _seal(own: Mapping[str, OwnPaths]) -> int | None:
    """Seal of import paths in this folder, which only this user can make; None without a key."""
    plain = {name: paths.model_dump(exclude_none=True) for name, paths in own.items()}
    content = json.dumps(plain, sort_keys=True)
    try:
        return user_cache.seal(user_cache.key(), content.encode(), "project", str(file().resolve()))
    except (OSError, RunError) as error:
        logger.warning("%s; import paths are not remembered", error)
        return None


def remember(run: Path, since: str, own: OwnPaths | None) -> None:
    """Make a run the current one, with its import paths; None leaves those that are kept.

    Where the file cannot be written, that is logged: a notebook then names its run.
    """
    _write({"run": key(run), "since": since}, {} if own is None else {key(run): own})


def name(run: Path, own: OwnPaths) -> None:
    """Keep the import paths of a run, whichever run is the current one. Where that fails, it is logged."""
    _write({}, {key(run): own})


def _write(current: Mapping[str, str], named: Mapping[str, OwnPaths]) -> None:
    path, beside = file(), os.getcwd()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with exclusive(path):
            before = read()
            kept = {name: paths for name, paths in before.own.items() if (places.root() / name).exists()}
            kept |= {name: _placed(paths, beside) for name, paths in named.items()}
            now = before.model_copy(update={**current, "own": kept, "seal": _seal(kept) if kept else None})
            write_atomically(path, json.dumps(now.model_dump(exclude_none=True), indent=1).encode(), mode=0o644)
    except (OSError, RunError) as error:
        logger.warning("%s: the current run is not remembered; name it as RUN in each notebook", error)


def _placed(own: OwnPaths, beside: str) -> OwnPaths:
    return own.model_copy(update={"beside": beside}) if own.tasks or own.rewards else own


def load(path: str, beside: str | None = None) -> Any:
    """The object that an import path `module:name` means; modules are next to the notebook or in the project's folder.

    Args:
        beside: the notebook's folder, for a process that was started elsewhere.

    Raises:
        ConfigError: it is no import path, or cannot be imported.
    """
    _check("an import path", path)
    module, _, name = path.partition(":")
    sys.path += [
        folder for folder in filter(None, dict.fromkeys([beside, str(places.root())])) if folder not in sys.path
    ]
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:  # a module runs anything
        raise ConfigError(
            f"{path!r} cannot be imported ({error_text(error)}). It needs {module}.py in "
            f"the notebook's folder or in {places.root()}, with {name} in it; after an edit, restart the kernel"
        ) from error
    return found


def made(path: str, kind: Any) -> Any:
    """An object of the class that an import path means; what is no class, as it is.

    Raises:
        ConfigError: the class cannot make one by itself.
    """
    if not isinstance(kind, type):
        return kind
    try:
        return kind()
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{path!r} is a class, and {kind.__name__}() raised {error_text(error)}. Make it work without "
            "arguments, or name an object of it, e.g. one that own.py assigns"
        ) from error


def _check(where: str, path: object) -> None:
    module, _, name = path.partition(":") if isinstance(path, str) else ("", "", "")
    if not all(part.isidentifier() for part in [*module.split("."), *name.split(".")]):
        raise ConfigError(
            f"{where} is {path!r:.80}, which no other kernel can find. Put it into a file, e.g. own.py in the "
            "notebook's folder, and give 'own:Name'"
        )


def _list(objective: str, given: object) -> list[Any]:
    if not isinstance(given, list):
        raise ConfigError(
            f"REWARDS[{objective!r}] is {given!r:.80}; needs a list of import paths, each alone or with its weight: "
            "['own:short'], [('own:short', 0.1)]"
        )
    return given


def _weighed(objective: str, entry: Any) -> tuple[str, float]:
    path, weight = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, 1.0)
    _check(f"REWARDS[{objective!r}]", path)
    if not isinstance(weight, int | float) or not math.isfinite(weight):
        raise ConfigError(f"REWARDS[{objective!r}] weighs {path} by {weight!r:.80}; needs a finite number")
    return path, float(weight)
