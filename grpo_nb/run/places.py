"""Folders of a project's runs, and the run that a name or a path means."""

import os
from collections.abc import Iterator
from pathlib import Path

from grpo_nb.storage.safe_open import RunError
from grpo_nb.suggest import close_matches

CONFIG = "config.json"
"""The file that makes a folder a run."""
SETTINGS_FILES = (".ipynb", ".py", ".json")
"""Endings of files that hold settings."""
LONGEST_NAME, LONGEST_PATH, SHOWN = 255, 4096, 60
"""Bytes of a name and of a path, at most, on Linux and macOS; characters of a name that an error shows."""
MOST_NAMED = 8
"""Runs that an error lists."""


def root(here: Path | None = None) -> Path:
    """The nearest folder at or above `here` (the working directory) that has a pyproject.toml, else `here`."""
    here = (here or Path.cwd()).resolve()
    return next((folder for folder in (here, *here.parents) if (folder / "pyproject.toml").is_file()), here)


def run_folders(root: str | Path) -> list[Path]:
    """The folders in `root` that hold a run, or links to one; none where it cannot be read."""
    try:
        folders = [Path(entry.path) for entry in os.scandir(root) if _is_folder(entry)]
    except OSError:
        return []
    return [folder for folder in folders if _holds_run(folder)]


def as_path(name: str | Path) -> Path:
    """A name or a path as a path, `~` put in full.

    Raises:
        RunError: no file system has such a name.
    """
    if (why := _unfit(os.fspath(name))) is not None:
        raise RunError(
            f"'{os.fspath(name)[:SHOWN]}' cannot be a run's path: it {why}. A name needs at most {LONGEST_NAME} bytes "
            f"of UTF-8 without NUL, a path at most {LONGEST_PATH:,}. Choose a shorter or plainer one"
        )
    return Path(os.path.expanduser(name))


def _unfit(path: str) -> str | None:
    """Reason why no file system accepts a path; None if one does."""
    if "\0" in path:
        return "holds a NUL character"
    try:
        names = os.fsencode(path).split(os.fsencode(os.sep))
    except UnicodeEncodeError:
        return "holds characters that have no UTF-8"
    if (longest := max(map(len, names))) > LONGEST_NAME:
        return f"has a name of {longest:,} bytes"
    if (size := sum(map(len, names)) + len(names) - 1) > LONGEST_PATH:
        return f"has {size:,} bytes"
    return None


def locate(name: str | Path) -> Path | None:
    """The folder of the run that a name or a path means; None if it does not exist.

    A path means itself: absolute, with `~`, or relative to the working directory or else to the project. A name alone
    (a string without a separator) also means `runs/<name>` of the project.

    Raises:
        RunError: the working directory and the project's runs each hold a run of that name.
    """
    given = as_path(name)
    alone = isinstance(name, str) and given.name == name
    if not alone and _holds_run(given):
        return given
    if given.is_absolute():
        return None
    project = root()
    named = project / "runs" / given
    found = [folder for folder in (given, named, *(() if alone else (project / given,))) if _holds_run(folder)]
    if alone and len({os.path.realpath(folder) for folder in found}) > 1:
        raise RunError(
            f"'{name}' names two runs, {Path.cwd() / given} and {named}; give the path of one, e.g. "
            f"{os.path.join(os.curdir, name)} or {os.path.relpath(named)}"
        )
    return found[0] if found else None


def missing(name: str | Path) -> str:
    """Error text for a run that does not exist: the content of the path, and runs with similar names."""
    path = as_path(name)
    whole = next((folder for folder in list(path.parents)[:2] if _holds_run(folder)), None)
    if whole is not None and path.exists():
        return f"no run in {path}: it is a part of the run {whole}; give that folder"
    inside = [folder.name for folder in run_folders(path)]
    if inside:
        return f"no run in {path}: it has no {CONFIG}, but holds runs; give one of them: {_listed(inside)}"
    what = "is missing" if not path.exists() else f"has no {CONFIG}" if path.is_dir() else "is a file, not a folder"
    return f"no run in {path}: it {what}{_hint(path)}"


def missing_file(name: str | Path) -> str | None:
    """Error text for a missing file whose name ends as a settings file's does; None for any other name."""
    path = as_path(name)
    if path.suffix not in SETTINGS_FILES or path.exists():
        return None
    return f"no file {path}; give a notebook, a Python script, a config.json or a run"


def _hint(path: Path) -> str:
    near = {folder.name: folder for place in _neighbourhood(path) for folder in run_folders(place)}
    if close := close_matches(path.name, near, count=1, cutoff=0.6):
        return f"; did you mean '{near[close[0]]}'?"
    if there := [folder.name for folder in run_folders(path.parent)]:
        return f"; runs there: {_listed(there)}"
    return f"; runs in {os.path.relpath(root() / 'runs')}: {_listed(list(near))}" if near else "; runs there: none"


def _neighbourhood(path: Path) -> Iterator[Path]:
    """Folders whose runs may be meant, the likeliest last."""
    if not path.is_absolute():
        yield root() / "runs"
    yield path.parent


def _listed(names: list[str]) -> str:
    return ", ".join(sorted(names)[:MOST_NAMED]) + (f" and {len(names) - MOST_NAMED} more" * (len(names) > MOST_NAMED))


def _holds_run(folder: Path) -> bool:
    return os.path.lexists(folder / CONFIG)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder or a link to one, since a run may lie elsewhere."""
    try:
        return entry.is_dir()
    except OSError:
        return False
