"""A run folder that a stranger made: markup in every field of every file, and where a number belongs too."""

import json
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

from grpo_nb import presets
from grpo_nb.config import Config
from grpo_nb.run.run import Run
from tests.run.test_samples import sample
from tests.support.made_rows import healthy

MARKUP = "<img src=x onerror=\"window.struck='yes'\"><script>window.struck='yes'<&>$\\frac{$\x1b[31m\u202e"
"""Script two ways, an entity, broken mathtext, and what would colour or turn a terminal; no file name has a slash."""


def name(kind: str) -> str:
    return f"{kind} {MARKUP}"


def config() -> Config:
    """Names and texts of the settings are markup; numbers are as of the demo."""
    tree = presets.demo().model_dump(mode="json")
    tree["objectives"] = {name(key): value for key, value in tree["objectives"].items()}
    tree["model"] |= {"name": name("model"), "device": name("device"), "lora_targets": [name("target")]}
    tree["sft"]["data"] = name("sft data")
    for objective in tree["objectives"].values():
        objective["data"] = name("data")
    provider = {"model": name("judge"), "base_url": "http://localhost:1/v1", "api_key_env": None}
    next(iter(tree["objectives"].values()))["judge"] = {"providers": [provider]}
    return Config.model_validate(tree)


def marked(value: Any) -> Any:
    """Every text, and every key of what is inside, with the markup."""
    if isinstance(value, dict):
        return {name(key): marked(item) for key, item in value.items()}
    if isinstance(value, list):
        return [marked(item) for item in value]
    return name(value) if isinstance(value, str) else value


def variants(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The row with its texts marked, and for each of its fields one where the markup is all that stands there."""
    kept = {"step", "kind", "severity", "stop_reason", "split", "mode", "stage", "objective", "time"}
    whole = {key: value if key in kept else marked(value) for key, value in row.items()}
    return [whole, *(whole | {key: MARKUP} for key in row), *(whole | {key: [{MARKUP: MARKUP}]} for key in row)]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def strangers_run(folder: Path) -> Run:
    """The run, as it came out of an archive: nothing of it went through this package."""
    path = folder / name("run")
    settings = config()
    path.mkdir()
    (path / "config.json").write_text(json.dumps(settings.model_dump(mode="json")))
    first, second = settings.objectives
    metrics = [_renamed(row, first, second) for row in healthy(6)]
    metrics += variants(metrics[-1] | {"step": 7, f"label/{first}/{MARKUP}": 0.5, f"reward/{first}/part/{MARKUP}": 0.1})
    write(path / "metrics.jsonl", metrics)
    write(
        path / "sft.jsonl", [{"step": 1, "loss": 2.0}, *variants({"step": 2, "loss": 2.0, "lr": 1e-4, "status": "ok"})]
    )
    samples = [sample(7, 0.1 * n, objective=objective) for objective in (first, second) for n in range(6)]
    write(path / "samples.jsonl", [row for one in samples for row in [one, *variants(one)]])
    write(path / "events.jsonl", [row for one in _events(first) for row in variants(one)])
    write(path / "evaluations.jsonl", [row for one in _evaluations(first, second) for row in [one, *variants(one)]])
    write(path / "judge.jsonl", variants({"objective": first, "key": "k", "score": 3, "reason": "r", "tokens_in": 1}))
    write(path / f"{name('log')}.jsonl", variants({"step": 1}))
    (path / "lock").write_text(json.dumps(_owner()))
    Run(path, settings).knobs.create()
    knobs = json.loads((path / "knobs.json").read_text())
    for record in knobs["knobs"].values():
        record["by"] = MARKUP
    (path / "knobs.json").write_text(json.dumps(knobs))
    _checkpoint(path / "checkpoints" / "000006")
    (path / "worker.log").write_text(MARKUP)
    return Run.open(path)


def _renamed(row: dict[str, Any], first: str, second: str) -> dict[str, Any]:
    return {key.replace("fairness", first).replace("hallucination", second): value for key, value in row.items()}


def _events(objective: str) -> list[dict[str, Any]]:
    at = {"time": time.time(), "step": 3}
    return [
        at | {"kind": "start", "goal": 9, "fingerprint": "f"},
        at | {"kind": "resume", "goal": 9, "fingerprint": "g"},
        at | {"kind": "knob", "key": f"beta/{objective}", "old": "auto", "new": 0.1, "by": "dashboard"},
        at | {"kind": "sft_eval", "loss": 1.0, "n": 3},
        at
        | {
            "kind": "finding",
            "severity": "error",
            "rule": "r",
            "message": "m",
            "advice": "a",
            "evidence": {"e": ["x"]},
        },
        at | {"kind": "finding", "severity": "warning", "rule": "r", "message": "m", "advice": "a"},
        at | {"kind": "checkpoint_damaged", "path": "p", "reason": "r"},
        at | {"kind": "failed", "error": "E: e", "goal": 9},
    ]


def _evaluations(first: str, second: str) -> list[dict[str, Any]]:
    def row(stage: str, step: int, mode: str, objective: str) -> dict[str, Any]:
        metrics = {"accuracy": {"value": 0.5, "low": 0.4, "high": 0.6, "n": 8}}
        kept = {"stage": stage, "step": step, "split": "test", "mode": mode, "objective": objective}
        return kept | {
            "pool": "p",
            "n": 8,
            "clusters": 8,
            "metrics": deepcopy(metrics),
            "resamples": {"accuracy": [0.4, 0.6]},
        }

    stages = [("base", 0, "greedy"), ("sft", 0, "greedy"), ("latest", 6, "greedy"), ("step 6", 6, "quick")]
    return [row(*stage, objective) for stage in stages for objective in (first, second)]


def _owner() -> dict[str, Any]:
    now = time.time()
    who = {"host": MARKUP, "boot": MARKUP, "user": MARKUP, "token": MARKUP}
    return who | {"pid": 7, "started": now, "since": now, "heartbeat": now}


def _checkpoint(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / name("file")).write_text(MARKUP)
    files = {name("file"): {"bytes": 7, "sha256": "0" * 64}}
    manifest = {"format": 1, "step": 6, "created": 1.0, "files": files, MARKUP: MARKUP}
    (folder / "manifest.json").write_text(json.dumps(manifest))
