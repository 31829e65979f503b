"""One zip for a bug report: versions, hardware, settings, last metrics, events, findings, traceback; no secret in it.

Prompts, completions and weights stay where they are. Every file goes through `redaction`.
"""

import io
import json
import os
import platform
import re
import sys
import traceback
import zipfile
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from grpo_nb import __version__, fingerprint, presets
from grpo_nb.config import Config
from grpo_nb.doctor import diagnose
from grpo_nb.doctor.errors import explain
from grpo_nb.doctor.machine import environment, installed_version
from grpo_nb.judge.host_trust import pairs_of
from grpo_nb.judge.redaction import SECRET_NAME, known_secrets, redacted
from grpo_nb.run.run import Log, Run, RunError
from grpo_nb.storage.files import write_atomically
from grpo_nb.storage.safe_open import opened

LAST_ROWS: Mapping[Log, int] = {"metrics": 50, "sft": 20, "events": 200, "evaluations": 10}
"""Newest rows of a log that go into the zip."""
LONGEST_TEXT = 4_000
"""Characters kept of one text of a row; a longer text keeps its end, where a traceback has its error."""
LAST_WORDS = 40_000
"""Bytes at the end of a worker's output."""
LONGEST_KEY = 8_000
"""Bytes before them that are read too, so that a key at the cut is recognised."""
PACKAGES = (
    *("torch", "transformers", "peft", "numpy", "pandas", "tokenizers", "safetensors", "pydantic", "matplotlib"),
    *("ipykernel", "ipywidgets", "jupyterlab", "triton", "openai", "vllm"),
)
LEFT_OUT = frozenset({"answers", "items", "labels", "values", "resamples", "samples"})
"""Fields of rows with a value for each item of the data."""
SHOWN = (
    *("CUDA_", "NCCL_", "PYTORCH_", "TORCH", "OMP_", "MKL_", "CUBLAS_", "TRANSFORMERS_", "TOKENIZERS_", "GRPO_NB_"),
    *("VLLM_", "HF_HOME", "HF_HUB_OFFLINE", "XDG_CACHE_HOME", "MASTER_", "WORLD_SIZE", "RANK", "LOCAL_RANK"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "PYTHON", "JUPYTER", "COLAB_", "LD_LIBRARY_PATH", "SLURM_"),
)
"""Beginnings of the names of environment variables that are shown."""
README = """\
# Bug report of {run}

{state}

| file | size |
|---|---|
{files}

Keys are struck out (`***`), home folders are `~`. Prompts, completions and weights are not in this zip. Look through it
before you send it.

## Please add
- what you did, and what you expected:
- what you have tried already:
- whether it happens again with `repro.py`:
"""
REPRO = """\
# The run's settings in a new run. Data and models that are files have to be here too.
import json
from pathlib import Path

from grpo_nb import Run, grpo
from grpo_nb.config import parse

run = Run.open_or_create("runs/repro", parse(json.loads(Path("settings.json").read_text())))
for step in grpo(run, steps=3):
    print(step)
"""


def bundle(run: Run | str | Path, out: str | Path | None = None, error: BaseException | None = None) -> Path:
    """Write the zip of a bug report about `run`; it may be training meanwhile.

    Args:
        out: the file; default: `bug-report.zip` in the run's folder.
        error: an exception to show in place of the last one that the run's log has.

    Returns:
        The file.
    """
    run = Run.of(run)
    path = Path(out or run.path / "bug-report.zip")
    write_atomically(path, _zipped(members(run, error)))
    return path


def members(run: Run, error: BaseException | None = None) -> dict[str, str]:
    """The files of the zip by name, without secrets."""
    secrets, knobs = known_secrets(_key_names(run.config)), run.knobs.snapshot()
    makers: dict[str, Callable[[], str]] = {
        "environment.json": lambda: _json(_machine()),
        "settings.json": lambda: _json(run.config.model_dump(mode="json")),
        "changed-settings.json": lambda: _json(_changed(run.config)),
        "knobs.json": lambda: _json({"values": knobs.values, "modes": knobs.modes, "problem": knobs.problem}),
        "findings.json": lambda: _json([asdict(finding) for finding in diagnose(run, quick=True)]),
        **{f"{log}.jsonl": partial(_rows, run, log, most, secrets) for log, most in LAST_ROWS.items()},
        "traceback.txt": lambda: _failure(run, error),
        "worker.log": lambda: _end_of(run.path / "worker.log", secrets),
        "command.txt": lambda: " ".join(sys.argv),
        "repro.py": lambda: REPRO,
    }
    files = {name: _made(make) for name, make in makers.items()}
    status = run.status()
    table = "\n".join(f"| {name} | {len(text):,} characters |" for name, text in files.items() if text)
    state = f"{status}; grpo_nb {__version__}"
    files = {"README.md": README.format(run=run.name, state=state, files=table)} | files
    return {name: redacted(text, secrets) for name, text in files.items() if text}


def _made(make: Callable[[], str]) -> str:
    """Text of a file, or the reason why it is unreadable: a damaged run needs its report most."""
    try:
        return make()
    except (OSError, RunError, ValueError) as problem:
        return f"not readable: {type(problem).__name__}: {problem}\n"


def _zipped(files: Mapping[str, str]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name), text.encode("utf-8", "replace"), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def _machine() -> dict[str, Any]:
    """Versions, hardware, and the environment variables that matter."""
    shown = {name: value for name, value in sorted(os.environ.items()) if name.startswith(SHOWN)}
    hidden = sorted(name for name in os.environ if SECRET_NAME.search(name))
    return {
        "grpo_nb": __version__,
        "fingerprint": fingerprint.fingerprint(),
        "python": sys.version,
        "system": platform.platform(),
        "packages": {name: installed_version(name) for name in PACKAGES},
        "gpus": _gpus(),
        "checks": [asdict(check) for check in environment()],
        "variables": {name: value for name, value in shown.items() if name not in hidden},
        "variables that are set and not shown": hidden,
    }


def _gpus() -> list[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [
        {"name": p.name, "memory_gib": round(p.total_memory / 2**30, 1), "capability": f"{p.major}.{p.minor}"}
        for p in found
    ]


def _key_names(config: Config) -> set[str]:
    """Environment variables that hold the keys of the run's judges and of its rollout server."""
    return {pair.variable for pair in pairs_of(config) if pair.variable}


def _changed(config: Config) -> dict[str, Any]:
    """Nearest preset by name, and the differences from it: (here, there) by setting."""
    differences = {name: config.differences(make()) for name, make in presets.PRESETS.items()}
    nearest = min(differences, key=lambda name: len(differences[name]))
    return {"preset": nearest, "changed": differences[nearest]}


def _rows(run: Run, log: Log, most: int, secrets: Collection[str]) -> str:
    rows = [*islice(run.newest_first(log), most)][::-1]
    return "".join(json.dumps(_cut(row, secrets), ensure_ascii=False, default=str) + "\n" for row in rows)


def _cut(value: Any, secrets: Collection[str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _cut(item, secrets) for key, item in value.items() if key not in LEFT_OUT}
    if isinstance(value, list | tuple):
        return [_cut(item, secrets) for item in value]
    if isinstance(value, str) and len(value) > LONGEST_TEXT:
        return redacted(value, secrets)[-LONGEST_TEXT:]  # cut first, a key would lose the prefix that identifies it
    return value


def _failure(run: Run, error: BaseException | None) -> str:
    """Traceback of the exception, else the newest in the run's log, with the doctor's explanation."""
    if error is not None:
        return "".join([*traceback.format_exception(error), f"\n{explain(error) or ''}"])
    events: Iterable[Mapping[str, Any]] = islice(run.newest_first("events"), 1000)
    failed = [e for e in events if e.get("kind") in ("failed", "sft_failed", "traceback")]
    words = [str(e.get("traceback") or e.get("error") or "") for e in failed[:2]]
    return "\n\n".join(words)


def _end_of(path: Path, secrets: Collection[str]) -> str:
    if not os.path.lexists(path):
        return ""
    with os.fdopen(opened(path), "rb") as file:
        start = max(file.seek(0, os.SEEK_END) - LAST_WORDS - LONGEST_KEY, 0)
        file.seek(start)
        text = file.read(LAST_WORDS + LONGEST_KEY).decode("utf-8", "replace")
    return redacted(text if start == 0 else re.sub(r"^\S+", "", text), secrets)[-LAST_WORDS:]


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False, default=str) + "\n"
