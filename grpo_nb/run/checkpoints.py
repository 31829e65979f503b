"""Checkpoints: folders that appear complete or not at all, and are verified by sizes and hashes.

    checkpoints/000040/  policy.safetensors  optimizer.safetensors  state.json  manifest.json

Everything is written into a hidden folder and synced, the manifest last; one rename makes it a checkpoint.
A folder without a manifest that verifies is not a checkpoint. No pickle.
"""

import errno
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_nb.printable import clean_logger
from grpo_nb.storage import documents, safe_open, schema
from grpo_nb.storage.files import KEEP_FEWER, RunError, clear_errors, from_json, sync, to_json
from grpo_nb.storage.safe_open import Irregular

if TYPE_CHECKING:
    from torch import Tensor
else:  # torch takes a second to import, and listing or watching runs loads no tensor
    Tensor = Any

logger = clean_logger(__name__)

FORMAT = 1
MANIFEST, STATE, SUFFIX = "manifest.json", "state.json", ".safetensors"
SPARE_BYTES = 16 << 20
"""Free disk required in addition to the checkpoint itself: the logs keep growing."""
_RESTORE = "restore the checkpoint from a copy, or remove it: the run then continues from the one before"
_STEP = re.compile(r"[0-9]{6,9}")
_REPLACED = re.compile(r"\.old-([0-9]{6,9})")
_DISCARDED = re.compile(r"discarded-([0-9]{6,9})")


class NotFinite(RunError):
    """Raised when numbers of a checkpoint are NaN or infinite, so that it is refused. Names the first such tensor."""


class Damaged(NamedTuple):
    """A damaged checkpoint: a folder with a checkpoint's name that does not verify."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Checkpoint:
    """One saved step, read from its folder on demand."""

    step: int
    path: Path

    def names(self) -> list[str]:
        """The sets of tensors in it, e.g. `["optimizer", "policy"]`."""
        return sorted(file.name.removesuffix(SUFFIX) for file in self.path.glob(f"*{SUFFIX}"))

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors saved under `name`, on the CPU.

        Raises:
            RunError: the checkpoint has no such set; the message lists those it has.
        """
        from safetensors.torch import load_file

        return dict(load_file(self.file(name)))

    def file(self, name: str) -> Path:
        """The file of a set of tensors; raises as `tensors`."""
        file = self.path / f"{name}{SUFFIX}"
        safe_open.refuse_linked(self.path)
        if not os.path.lexists(file):
            raise RunError(f"checkpoint {self.path} has no '{name}{SUFFIX}'; it has {self.names()}")
        safe_open.refuse_irregular(file)
        return file

    def state(self, *needed: str) -> documents.State:
        """The JSON state saved with it, which has the `needed` fields; tuples are lists by now and keys are strings.

        Raises:
            RunError: it cannot be read, lacks a field, or has a wrong one.
        """
        file = self.path / STATE
        with clear_errors("read", file):
            safe_open.refuse_linked(self.path)
            data = safe_open.read(file, schema.LARGEST_STATE)
        try:
            state = documents.state(from_json(data))
        except ValueError as error:
            raise RunError(f"{file} is broken: it {error}; {_RESTORE}") from None
        if missing := [name for name in needed if name not in state]:
            raise RunError(f"{file} is broken: it lacks {', '.join(missing)}; {_RESTORE}")
        if (step := state.get("step", self.step)) != self.step:
            raise RunError(f"{file} is broken: it is of step {step}, its checkpoint of {self.step}; {_RESTORE}")
        return state

    def not_finite(self) -> str | None:
        """The first tensor that holds a NaN or an infinity, and how many; None where all are finite."""
        return next((found for name in self.names() if (found := _not_finite(name, self.tensors(name)))), None)

    def problem(self, *, hashes: bool = True, dispensable: Collection[str] = ()) -> str | None:
        """Reason why it is damaged; None if every file of the manifest exists with its size and its SHA-256.

        Args:
            dispensable: sets of tensors whose file may be missing, e.g. `{"optimizer"}`.
        """
        try:
            safe_open.refuse_linked(self.path)
            manifest = documents.manifest(safe_open.read(self.path / MANIFEST, schema.LARGEST_MANIFEST))
            if (found := (manifest["format"], manifest["step"])) != (FORMAT, self.step):
                return f"its manifest has format and step {found}, needs {(FORMAT, self.step)}"
            spared = {name for name in map(_file_of, dispensable) if not os.path.lexists(self.path / name)}
            files = [(name, entry) for name, entry in manifest["files"].items() if name not in spared]
            problems = (_mismatch(self.path, name, entry["bytes"], entry["sha256"], hashes) for name, entry in files)
            return next((problem for problem in problems if problem), None)
        except FileNotFoundError as error:
            return f"{Path(error.filename).name} is missing"
        except OSError as error:
            return f"{Path(error.filename or self.path).name} cannot be read ({(error.strerror or str(error)).lower()})"
        except Irregular as error:
            return str(error)
        except ValueError:
            return f"its {MANIFEST} is broken"


class Checkpoints:
    """The checkpoints in one folder. One process writes (whoever holds the run's lock), any number read."""

    def __init__(
        self,
        folder: Path,
        *,
        before_save: Callable[[], None] | None = None,
        fence: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder = folder
        self._before_save = before_save
        """Syncs the rows of a checkpoint (the logs up to its step) to disk, before it exists itself."""
        self._fence = fence
        """Raises where the lock of the run has another owner; called before every change of the folder."""
        self._told_too_large = False

    def steps(self) -> list[int]:
        """Steps of the folders that are named like a checkpoint, ascending; verified or not."""
        return sorted(self._folders())

    def latest(
        self, *, finite: bool = False, dispensable: Collection[str] = ()
    ) -> tuple[Checkpoint | None, list[Damaged]]:
        """The newest checkpoint that verifies, and the newer ones that do not, with the reason.

        With `finite`, one whose numbers are not finite counts as damaged; that reads every tensor. The files of the
        sets in `dispensable` may be missing.
        """
        damaged: list[Damaged] = []
        for step, path in sorted(self._folders().items(), reverse=True):
            checkpoint = Checkpoint(step, path)
            reason = checkpoint.problem(dispensable=dispensable) or (checkpoint.not_finite() if finite else None)
            if reason is None:
                return checkpoint, damaged
            damaged.append(Damaged(path, reason))
        return None, damaged

    def holds(self, step: int) -> bool:
        """Whether the checkpoint of `step` exists with all its files; their content is not read."""
        path = self._folders().get(step)
        return path is not None and Checkpoint(step, path).problem(hashes=False) is None

    def load(self, step: int, *, dispensable: Collection[str] = ()) -> Checkpoint:
        """The checkpoint of `step`, verified; the files of the sets in `dispensable` may be missing.

        Raises:
            RunError: it does not exist, or it is damaged.
        """
        path = self._folders().get(step)
        if path is None:
            raise RunError(f"no checkpoint of step {step} in {self.folder}; there are {self.steps() or 'none'}")
        checkpoint = Checkpoint(step, path)
        if (reason := checkpoint.problem(dispensable=dispensable)) is not None:
            raise RunError(f"checkpoint {path} is damaged: {reason}; take another of {self.steps()}")
        return checkpoint

    def save(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, Any],
        files: Callable[[Path], None] | None = None,
    ) -> Path:
        """Write the checkpoint of `step`; the older ones stay valid at every moment, even if the process is killed.

        Args:
            step: a step boundary; a checkpoint of the same step is replaced.
            tensors: file name (without ending) -> tensors by name.
            state: JSON values, in `state.json`.
            files: writes further files of the checkpoint into the folder that it gets.

        Raises:
            NotFinite: a tensor holds a NaN or an infinity; nothing was written.
            RunError: read-only folder, or less free space than it takes (checked before anything is written).
        """
        self._fence()
        if found := next((found for name, group in tensors.items() if (found := _not_finite(name, group))), None):
            raise NotFinite(f"step {step} was not saved in {self.folder}: {found}; the newest checkpoint stays")
        with clear_errors("write a checkpoint into", self.folder):
            safe_open.refuse_linked(self.folder)
            self.folder.mkdir(exist_ok=True)  # without parents: a run that was moved away is not made anew
            self._tidy()
            self._check_space(tensors)
            if self._before_save:
                self._before_save()
            with self._staging(step) as staging:
                _fill(staging, tensors, state, files)
                _seal(staging, step)
                return self._publish(staging, step)

    def prune(self, keep: int, always: tuple[int, ...] = (0,), most_gib: float | None = None) -> list[int]:
        """Delete all but the newest `keep`, less if they take more disk; returns the deleted steps.

        Never deleted: the newest that verifies, and the steps in `always` (0 is where a run started from:
        its reference). Incomplete folders do not count, and go once a newer one verifies; so do folders that
        `discard_after` set aside, once the run has passed their step again.
        """
        self.sweep()
        newest, _ = self.latest()
        if newest is None:
            return []
        older = [Checkpoint(s, p) for s, p in sorted(self._folders().items(), reverse=True) if s < newest.step]
        whole = [c for c in older if c.problem(hashes=False) is None and c.step not in always]
        kept = {c.step for c in whole[: max(keep - 1, 0)]} | {*always}
        if most_gib is not None:
            kept = self._fitting(newest, [c for c in older if c.step in kept], always, most_gib * 2**30)
        gone = [c for c in older if c.step not in kept]
        for path in [c.path for c in gone] + self._discarded_up_to(newest.step):
            self._remove(path)
        return sorted(c.step for c in gone)

    def _fitting(self, newest: Checkpoint, older: list[Checkpoint], always: tuple[int, ...], most: float) -> set[int]:
        """Steps that stay of `older`, newest first: those in `always`, and others while all fit in `most` bytes."""
        taken = _size(newest.path) + sum(_size(c.path) for c in older if c.step in always)
        if taken > most and not self._told_too_large:
            self._told_too_large = True
            logger.warning(
                "the checkpoints that always stay take %.2f GiB in %s, run.checkpoints_gib allows %.2f; raise it",
                taken / 2**30, self.folder, most / 2**30,
            )  # fmt: skip
        kept = {*always}
        for checkpoint in older:
            if checkpoint.step not in always:
                taken += _size(checkpoint.path)
                if taken > most:
                    break
                kept.add(checkpoint.step)
        return kept

    def discard_after(self, step: int) -> list[int]:
        """Set the checkpoints past `step` aside, as `discarded-000060`, when a run goes back to `step`.

        Otherwise a later resume would jump to a step that the run has left.
        """
        self._fence()
        passed = {s: path for s, path in self._folders().items() if s > step}
        with clear_errors("set checkpoints aside in", self.folder):
            for s, path in sorted(passed.items(), reverse=True):  # newest first: a kill in between leaves no jump
                aside = self.folder / f"discarded-{s:06d}"
                if os.path.lexists(aside):
                    self._remove(aside)
                path.rename(aside)
            if passed:
                sync(self.folder)
        return sorted(passed)

    def sweep(self) -> None:
        """Remove the leftovers of a killed `save` or `prune`. Needs the lock."""
        self._fence()
        with clear_errors("tidy", self.folder):
            self._tidy()

    def _folders(self) -> dict[int, Path]:
        """Folders by step. A folder that was being replaced when its writer was killed counts under its old name."""
        safe_open.refuse_linked(self.folder)
        if not self.folder.is_dir():
            return {}
        with clear_errors("list", self.folder):
            names = os.listdir(self.folder)
        current = {int(name): self.folder / name for name in names if _STEP.fullmatch(name)}
        replaced = {int(m[1]): self.folder / name for name in names if (m := _REPLACED.fullmatch(name))}
        return replaced | current

    def _discarded_up_to(self, step: int) -> list[Path]:
        names = os.listdir(self.folder)
        return [self.folder / name for name in names if (m := _DISCARDED.fullmatch(name)) and int(m[1]) <= step]

    def _tidy(self) -> None:
        """Remove the leftovers of killed writers: the run has one writer, which saves and prunes."""
        safe_open.refuse_linked(self.folder)
        if not self.folder.is_dir():
            return
        for path in self.folder.iterdir():
            if path.name.startswith(".tmp-"):
                logger.info("removing %s, left by a killed writer", path)
                _delete(path)
            elif match := _REPLACED.fullmatch(path.name):
                current = self.folder / match[1]
                if os.path.lexists(current):
                    self._remove(path)
                else:
                    path.rename(current)

    def _check_space(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        size = sum(t.numel() * t.element_size() for group in tensors.values() for t in group.values())
        need = max(size, self._size_of_newest()) + SPARE_BYTES
        free = shutil.disk_usage(self.folder).free
        if free < need:
            raise RunError(
                f"a checkpoint in {self.folder} takes about {need / 2**20:,.0f} MiB and {free / 2**20:,.0f} MiB are "
                f"free; {KEEP_FEWER}"
            )

    def _size_of_newest(self) -> int:
        """Bytes of the newest checkpoint, including files of its `files` callback; 0 without one."""
        newest = max(self._folders().items(), default=None)
        return 0 if newest is None else _size(newest[1])

    @contextmanager
    def _staging(self, step: int) -> Iterator[Path]:
        staging = self.folder / f".tmp-{step:06d}-{os.getpid()}-{secrets.token_hex(4)}"
        staging.mkdir()
        try:
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)  # once published it is not there any more

    def _publish(self, staging: Path, step: int) -> Path:
        self._fence()
        final, old = self.folder / f"{step:06d}", self.folder / f".old-{step:06d}"
        if os.path.lexists(final):
            final.rename(old)  # a folder cannot be renamed over another; `_folders` accepts this name
        staging.rename(final)
        sync(self.folder)
        if os.path.lexists(old):
            self._remove(old)
        return final

    def _remove(self, path: Path) -> None:
        """Delete a folder under a temporary name: if killed half-way, it never looks like a damaged checkpoint."""
        doomed = self.folder / f".tmp-gone-{os.getpid()}-{secrets.token_hex(4)}"
        with clear_errors("delete", path):
            path.rename(doomed)
            _delete(doomed)


def _file_of(name: str) -> str:
    return f"{name}{SUFFIX}"


def _size(folder: Path) -> int:
    """Bytes of all files in it."""
    return sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file())


def _delete(path: Path) -> None:
    """Delete a folder with all that is in it; of a link only the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _fill(
    staging: Path,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    files: Callable[[Path], None] | None,
) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    for name, group in tensors.items():
        try:
            save_file(_plain(group), staging / f"{name}{SUFFIX}")
        except SafetensorError as error:  # its own class, even for a full disk
            if f"os error {errno.ENOSPC}" in str(error):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
            raise RunError(f"cannot write {name}{SUFFIX} into {staging.parent}: {error}") from error
    (staging / STATE).write_bytes(to_json(state, indent=1))
    if files:
        files(staging)


def _not_finite(name: str, group: Mapping[str, Tensor]) -> str | None:
    for key, tensor in group.items():
        if tensor.is_floating_point() and (count := int((~tensor.isfinite()).sum())):
            return f"{count} of {tensor.numel()} numbers of {name}/{key} are not finite"
    return None


def _plain(group: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors on the CPU, contiguous, without shared memory, as safetensors needs them and `load` returns them."""
    seen: set[int] = set()
    plain = {}
    for name, tensor in group.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        plain[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return plain


def _seal(staging: Path, step: int) -> None:
    """Sync every file, then write the manifest that makes the folder a checkpoint."""
    inside = sorted(staging.rglob("*"))
    files = {file.relative_to(staging).as_posix(): _entry(file) for file in inside if file.is_file()}
    manifest = {"format": FORMAT, "step": step, "created": time.time(), "files": files}
    path = staging / MANIFEST
    path.write_bytes(to_json(manifest, indent=1))
    for file in (*inside, path, staging):
        sync(file)


def _entry(file: Path) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "sha256": _sha256(file)}


def _mismatch(folder: Path, name: str, size: int, digest: str, hashes: bool) -> str | None:
    """Error of a file of the manifest, or None; folders on the way to it must be the checkpoint's own."""
    file = folder / name
    for between in list(file.relative_to(folder).parents)[:-1]:
        safe_open.refuse_linked(folder / between)
    safe_open.refuse_irregular(file)
    if (found := file.stat().st_size) != size:
        return f"{file.name} has {found} bytes, its manifest has {size}"
    if hashes and _sha256(file) != digest:
        return f"{file.name} has a SHA-256 other than its manifest's"
    return None


def _sha256(file: Path) -> str:
    with os.fdopen(safe_open.opened(file), "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
