"""The package's sources as this process runs them, and which of them were edited since.

Each module is noted as it is loaded (the package's `__init__` calls `note`), because whoever looks first only
when something trains cannot know what was edited in between.
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
    """Another one once the module was loaded again."""
    stamp: tuple[int, int]
    digest: bytes


_loaded: dict[str, _Loaded] = {}


def note(package: str = PACKAGE) -> None:
    """Remember the sources of the loaded modules at and below `package` that are not remembered yet."""
    for name, spec, path in _modules():
        known = _loaded.get(name)
        if f"{name}.".startswith(f"{package}.") and (known is None or known.spec is not spec):
            _loaded[name] = _Loaded(spec, _stamp(path), _digest(path))


def changed() -> list[str]:
    """Files whose text on disk is no longer what this process loaded, e.g. `train.py`, `losses/kl.py`."""
    return sorted(
        path.relative_to(ROOT).as_posix()
        for path, loaded in _noted()
        if _stamp(path) != loaded.stamp and _digest(path) != loaded.digest
    )


def sentence(files: list[str]) -> str:
    """What there is to say about edited files; of many, the first few by name."""
    more = f" and {len(files) - NAMED} more" if len(files) > NAMED else ""
    return f"{', '.join(files[:NAMED])}{more} changed on disk after import; this run uses the old code"


def fingerprint() -> str:
    """Hash of the package's sources: of what is loaded as it was loaded, of the rest as it is on disk."""
    loaded = {path: noted.digest for path, noted in _noted()}
    total = hashlib.sha256()
    for path in sorted(ROOT.rglob("*.py")):
        total.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + (loaded.get(path) or _digest(path)))
    return total.hexdigest()[:16]


def _noted() -> list[tuple[Path, _Loaded]]:
    """Those loaded by now; what another thread imports meanwhile comes the next time."""
    note()
    return [(path, _loaded[name]) for name, _, path in _modules() if name in _loaded]


def _modules() -> list[tuple[str, ModuleSpec, Path]]:
    found = []
    for name in [name for name in list(sys.modules) if name.startswith(PACKAGE)]:
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if f"{name}.".startswith(f"{PACKAGE}.") and spec is not None and spec.origin:
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
