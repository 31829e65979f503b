"""Fingerprint of the package's loaded sources, and the files that were edited since.

Each module is noted as it is loaded (the package's `__init__` calls `note`), because a first look when training starts
would miss earlier edits.
"""

import functools
import hashlib
import os
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path

ROOT = Path(__file__).parent
PACKAGE = __name__.rpartition(".")[0]
NAMED = 4


@dataclass(frozen=True)
class _Loaded:
    spec: ModuleSpec
    """Module spec; another one once the module was loaded again."""
    stamp: tuple[int, int]
    digest: bytes


_Module = tuple[str, ModuleSpec, Path]
_loaded: dict[str, _Loaded] = {}


def note(package: str = PACKAGE) -> None:
    """Remember the sources of the loaded modules at and below `package` that are not remembered yet."""
    _note(_modules(package))


def changed() -> list[str]:
    """Files whose text on disk is no longer what this process loaded, e.g. `train.py`, `losses/kl.py`."""
    return sorted(
        path.relative_to(ROOT).as_posix()
        for path, loaded in _noted()
        if _stamp(path) != loaded.stamp and _digest(path) != loaded.digest
    )


def sentence(files: list[str]) -> str:
    """Sentence about edited files; the first few by name where there are many."""
    more = f" and {len(files) - NAMED} more" if len(files) > NAMED else ""
    return f"{', '.join(files[:NAMED])}{more} changed on disk after import; this run uses the old code"


def fingerprint() -> str:
    """Hash of the package's sources: loaded modules as loaded, the rest as on disk."""
    loaded = {path: noted.digest for path, noted in _noted()}
    total = hashlib.sha256()
    for name in sorted(_sources(), key=lambda name: name.split("/")):
        path = _path(f"{ROOT}/{name}")
        total.update(name.encode() + b"\0" + (loaded.get(path) or _kept_digest(path, _stamp(path))))
    return total.hexdigest()[:16]


def _sources() -> list[str]:
    """The package's files of Python, as paths below it."""
    found = []
    for folder, _, names in os.walk(ROOT):
        below = os.path.relpath(folder, ROOT).replace(os.sep, "/")
        found += [name if below == "." else f"{below}/{name}" for name in names if name.endswith(".py")]
    return found


def _noted() -> list[tuple[Path, _Loaded]]:
    """Modules loaded by now; one that another thread imports meanwhile is included the next time."""
    modules = _modules()
    _note(modules)
    return [(path, _loaded[name]) for name, _, path in modules]


def _note(modules: list[_Module]) -> None:
    for name, spec, path in modules:
        known = _loaded.get(name)
        if known is None or known.spec is not spec:
            _loaded[name] = _Loaded(spec, _stamp(path), _digest(path))


def _modules(package: str = PACKAGE) -> list[_Module]:
    """The loaded modules at and below `package`."""
    found, below = list[_Module](), f"{package}."
    for name in [name for name in list(sys.modules) if name.startswith(package)]:
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if (name == package or name.startswith(below)) and spec is not None and spec.origin:
            found.append((name, spec, _path(spec.origin)))
    return found


_path = functools.cache(Path)


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = os.stat(path)  # at every step of all files: pathlib's own takes twice as long
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


def _digest(path: Path) -> bytes:
    try:
        return hashlib.sha256(path.read_bytes()).digest()
    except OSError:  # deleted, or moved away
        return b""


@functools.lru_cache(maxsize=1024)
def _kept_digest(path: Path, stamp: tuple[int, int]) -> bytes:
    return _digest(path)
