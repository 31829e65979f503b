"""A run's model for use elsewhere: an adapter, a merged model or a GGUF file with a model card, on disk or a hub."""

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from peft import PeftModel

from grpo_nb import plots
from grpo_nb.evaluation.compare import Stage
from grpo_nb.evaluation.evaluate import restore_policy, stage_checkpoint
from grpo_nb.evaluation.pareto import best, knee
from grpo_nb.exports import hub
from grpo_nb.exports.card import PICTURE, Contents, card, is_local, last_name
from grpo_nb.exports.errors import ExportError as ExportError
from grpo_nb.metrics.phases import timed
from grpo_nb.policy import adapter_files, gguf_files
from grpo_nb.policy.merged import merged
from grpo_nb.policy.model import Policy
from grpo_nb.policy.source import ADAPTER_CONFIG, Source
from grpo_nb.printable import brief, clean_logger, one_line
from grpo_nb.report.report import picture
from grpo_nb.run.run import Run
from grpo_nb.storage.files import flock, flocked

logger = clean_logger(__name__)

Format = Literal["adapter", "merged", "gguf"]
FORMATS: tuple[str, ...] = get_args(Format)
README = "README.md"
WEIGHTS = {"adapter": adapter_files.WEIGHTS, "merged": "model.safetensors", "gguf": "model.gguf"}
_DRAFT = re.compile(r"\.grpo_nb-export\.\d+-[0-9a-f]{8}\.tmp")
"""Names of the hidden folders that exports are written to first."""


@dataclass(frozen=True)
class Export:
    """Result of an export: its folder, format, stage and files."""

    folder: Path
    format: str
    stage: Stage
    """`sft`, or the step of the GRPO checkpoint."""
    files: tuple[str, ...]
    address: str = ""
    """Address of the repository that it was pushed to."""

    def __str__(self) -> str:
        stage = "SFT" if self.stage == "sft" else f"step {self.stage}"
        pushed = f", pushed to {self.address}" if self.address else ""
        return f"{self.folder}: {self.format} of {stage}{pushed}"


def export(
    run: Run | str | Path,
    folder: str | Path,
    *,
    format: Format | None = None,
    stage: Stage | str = "latest",
    push: str | None = None,
    public: bool = False,
) -> Export:
    """Write the model of one stage of a run to a new folder, with a model card; optionally push it to a hub.

    Args:
        run: a Run, its name or its path.
        folder: where to write; must be missing or empty. An empty folder may be a link or a mounted disk.
        format: `adapter` (PEFT), `merged` (a transformers model, the adapter added to its weights), or `gguf` (one
            file, for the architectures of `gguf_files`). None: `adapter` where LoRA trains, else `merged`.
        stage: `latest`, a step, `sft`, `best` (`pareto.knee`: the stage that gives up least of any objective), or
            `best/OBJECTIVE` (`pareto.best`).
        push: `owner/name` of a repository; the token is HF_TOKEN's in the environment. Made if missing, private.
            What is pushed has the last names of local paths only; the folder has the paths.
        public: a repository that is made can be read by anyone.

    Raises:
        ExportError: the folder is not empty, it cannot be written, the format does not fit the run, or the hub
            refused.
        ModelError: the weights cannot be written in this format; the message names a format that works.
        RunError: the stage has no checkpoint.
        DependencyChanged: as `restore_policy`.
    """
    run, folder = Run.of(run), Path(folder).expanduser().absolute()
    _check(format, folder)
    token = None if push is None else hub.check(push)
    chosen = resolved(run, stage)
    with _appearing(folder) as draft:  # before the model is loaded: a place that cannot be written is refused at once
        policy = restore_policy(run, chosen)
        kind = _fitting(policy, format)
        with timed(f"writing {kind} of {run.name}"), _clearly(folder):
            source = _source(policy)
            _write(policy, kind, draft, run.name)
            drawn = _draw(run, draft)
            contents = Contents(kind, chosen, source, WEIGHTS[kind], drawn)
            (draft / README).write_text(card(run, contents), encoding="utf-8")
    files = tuple(sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()))
    address = ""
    if push is not None and token is not None:
        shared = {README: card(run, replace(contents, pushed=True)).encode()}
        shared |= _without_local_base(folder, source) if kind == "adapter" else {}
        with timed(f"pushing to {push}"):
            address = hub.push(folder, push, token, shared=shared, public=public)
    return Export(folder, kind, chosen, files, address)


def resolved(run: Run, stage: Stage | str) -> Stage:
    """The stage that a word means: `sft`, or the step of a checkpoint that verifies.

    Raises:
        ExportError: no such word, or the stage holds the base model as it was loaded.
        RunError: the stage has no checkpoint, or nothing was evaluated to find the best by.
    """
    objectives = list(run.config.objectives)
    wanted: Stage
    if stage == "best":
        wanted = best(run, objectives[0]) if len(objectives) == 1 else knee(run)
    elif isinstance(stage, str) and stage.startswith("best/") and stage.removeprefix("best/") in objectives:
        wanted = best(run, stage.removeprefix("best/"))
    elif type(stage) is int or stage in ("sft", "latest", "base"):
        wanted = stage  # type: ignore[assignment]
    else:
        raise ExportError(
            f"stage={brief(stage)} is no stage; needs latest, sft, a step, best, or best/OBJECTIVE, with one of "
            f"{', '.join(objectives)}"
        )
    checkpoint = stage_checkpoint(run, wanted)
    if checkpoint is None:
        raise ExportError(
            f"stage {wanted!r} of {run.name} is the base model as it was loaded, so there is nothing to export. Choose "
            "the step of a checkpoint, or 'latest'"
        )
    return "sft" if wanted == "sft" else checkpoint.step


def _check(format: str | None, folder: Path) -> None:
    if format not in (None, *FORMATS):
        raise ExportError(f"format={brief(format)} is unknown; needs one of {', '.join(FORMATS)}")
    if "\0" in str(folder) or str(folder).encode(errors="ignore").decode() != str(folder):
        raise ExportError(f"{str(folder)!r} is no path in UTF-8, as weights are written to; name another folder")
    with _clearly(folder):
        _refuse_full(folder)
        if not folder.parent.is_dir():
            raise ExportError(f"the folder {folder.parent} is missing; make it, or name another place")


def _refuse_full(folder: Path) -> None:
    if os.path.lexists(folder) and not (folder.is_dir() and not any(_lasting(folder))):
        raise ExportError(f"{folder} is not an empty folder; an export needs a new one. Name another, or remove it")


def _lasting(folder: Path) -> Iterator[Path]:
    """What is in a folder but exports that are being written, or that were killed."""
    return (path for path in folder.iterdir() if _DRAFT.fullmatch(path.name) is None)


def _fitting(policy: Policy, format: str | None) -> str:
    """The export format.

    Raises:
        ExportError, ModelError: the model has no such form.
    """
    lora = isinstance(policy.model, PeftModel)
    kind = format or ("adapter" if lora else "merged")
    if kind == "adapter" and not lora:
        raise ExportError(
            f"all weights of '{policy.name}' were trained, so there is no adapter; export it with format='merged'"
        )
    if kind == "gguf":
        base: Any = policy.model.get_base_model() if isinstance(policy.model, PeftModel) else policy.model
        gguf_files.refuse(base)
    return kind


def _write(policy: Policy, kind: str, folder: Path, name: str) -> None:
    if kind == "adapter":
        policy.save(folder)
    elif kind == "merged":
        merged(policy).save(folder)
    else:
        gguf_files.save(merged(policy), folder / WEIGHTS["gguf"], one_line(name))


def _draw(run: Run, folder: Path) -> bool:
    """Draw the curves; returns whether there were any."""
    if run.last_step() is None:
        return False
    (folder / PICTURE).write_bytes(plots.to_kept_png(picture(run)))
    return True


def _source(policy: Policy) -> Source:
    source = policy.origin.source
    assert source is not None, "a policy of a run was loaded from files"
    return source


def _without_local_base(folder: Path, source: Source) -> dict[str, bytes]:
    """Content of the adapter's settings for a hub: of a base on this machine they have the last name of its path."""
    base = source.base or source
    if not is_local(base):
        return {}
    name = last_name(base.name)
    logger.warning(
        "the pushed %s names the base model '%s', without its place on this machine: to open the adapter, others load "
        "that model themselves. An export in the format 'merged' needs no base model",
        ADAPTER_CONFIG,
        name,
    )
    settings = json.loads((folder / ADAPTER_CONFIG).read_bytes()) | {"base_model_name_or_path": name}
    return {ADAPTER_CONFIG: json.dumps(settings, indent=2).encode()}


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """A hidden folder whose content is that of `folder` once the block ends; nothing is left where the block fails.

    It lies next to a folder that is missing, and takes its name. It lies inside one that exists, which may be a link, a
    mounted disk or somebody's working folder, and its files are moved out.
    """
    place = folder if os.path.isdir(folder) else folder.parent
    draft = place / f".grpo_nb-export.{os.getpid()}-{secrets.token_hex(4)}.tmp"
    held = None
    try:
        with _clearly(folder):
            _sweep(place)
            draft.mkdir()
            held = os.open(draft, os.O_RDONLY)
            flock(held)
            with suppress(FileNotFoundError):
                folder.lstat()  # fails for a name that the disk does not accept, e.g. a name that is too long
        yield draft
        with _clearly(folder):
            _refuse_full(folder)
            if place != folder and not folder.exists():
                draft.rename(folder)
            else:
                for path in sorted(draft.iterdir(), key=lambda path: path.name == README):  # which is last
                    path.rename(folder / path.name)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        if held is not None:
            os.close(held)


def _sweep(place: Path) -> None:
    """Remove what killed exports left: nobody holds the lock of such a folder."""
    for left in place.iterdir():
        if _DRAFT.fullmatch(left.name) is None or not left.is_dir() or left.is_symlink():
            continue
        fd = os.open(left, os.O_RDONLY)
        try:
            if flocked(fd) == "free":
                shutil.rmtree(left, ignore_errors=True)
        finally:
            os.close(fd)


@contextmanager
def _clearly(folder: Path) -> Iterator[None]:
    """Name the folder in an error of the disk, also in those that the writers of weights and tokenizers wrap.

    Raises:
        ExportError: in place of such an error.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, OSError) and not _OF_THE_DISK.search(str(error)):
            raise
        raise ExportError(f"cannot write {folder}: {error}; choose a folder that can be written") from error


_OF_THE_DISK = re.compile(r"\(os error \d+\)")
"""How libraries in Rust end an error of the operating system, whatever its class in Python."""
