"""The matrix of faults and rules: `python -m grpo_nb.fault_lab.matrix --out grpo_nb/fault_lab/matrix.json` measures it.

Every fault is trained once a seed from one SFT result, and so is the clean run. What is printed by `make docs` and
shown in notebook 06 is the recorded result.
"""

import argparse
import json
import logging
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from grpo_nb import presets
from grpo_nb.fault_lab.catalogue import ALL, FAULTS
from grpo_nb.fault_lab.lab import Lab
from grpo_nb.fault_lab.records import CLEAN, Fault, Outcome
from grpo_nb.report.tables import Table
from grpo_nb.run.run import Run
from grpo_nb.training.sft import sft

RECORD = Path(__file__).with_name("matrix.json")
COMMAND = "python -m grpo_nb.fault_lab.matrix --out grpo_nb/fault_lab/matrix.json"
SEEDS = (0, 1, 2)


def warmed_up(folder: Path) -> Run:
    """The demo after its SFT, made in `folder` where it is missing."""
    run = Run.open_or_create(folder / "demo", presets.demo())
    for _ in sft(run) if run.sft_checkpoints.latest()[0] is None else ():
        pass
    return run


def measure(lab: Lab, faults: Iterable[Fault], seeds: Sequence[int]) -> list[Outcome]:
    """Measure one outcome per fault and seed."""
    return [lab.trial(fault, seed).execute() for fault in faults for seed in seeds]


def recorded() -> list[Outcome]:
    """The outcomes of the last measurement that is kept."""
    return [Outcome(**row) for row in json.loads(RECORD.read_text(encoding="utf-8"))["outcomes"]]


def caught(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """Table with one row per fault: the rules that claim it, the bound, and the steps that it took with each seed."""
    rows = []
    for fault in (FAULTS[name] for name in _ids(outcomes) if name in FAULTS):
        own = [outcome for outcome in outcomes if outcome.fault == fault.id]
        others = {name for outcome in own for name in outcome.alarms} - {*fault.caught_by, *ENDS}
        rows.append({
            "fault": fault.id,
            "what is wrong": fault.what,
            "claimed by": ", ".join(fault.caught_by),
            "at most": fault.within,
            "steps by seed": ", ".join(map(_steps, (outcome.caught(fault) for outcome in own))),
            "also found": ", ".join(sorted(others)),
        })  # fmt: skip
    return pd.DataFrame(rows)


def confusion(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """Fault x rule: in how many of its runs the rule gave a warning or an error, empty where in none."""
    names = dict.fromkeys(name for fault in FAULTS.values() for name in fault.caught_by)
    names |= dict.fromkeys(name for o in outcomes for name in o.alarms if name not in ENDS)
    counts = {
        fault: {name: sum(name in o.found and _counts(o, name) for o in outcomes if o.fault == fault) for name in names}
        for fault in _ids(outcomes)
    }
    frame = pd.DataFrame.from_dict(counts, orient="index", columns=[*names])
    return frame.astype(object).where(frame > 0, "").rename_axis("fault").reset_index()


ENDS = ("failed",)
"""Findings that a training ended with an error, without naming it."""


def _counts(outcome: Outcome, name: str) -> bool:
    """Notes count only for the fault that they claim."""
    fault = ALL.get(outcome.fault)
    return name in outcome.alarms or (fault is not None and name in fault.caught_by)


def tables() -> tuple[Table, Table]:
    """Recorded outcomes, for a notebook: fault by fault, and fault by rule."""
    outcomes = recorded()
    seeds = len({outcome.seed for outcome in outcomes})
    return (
        Table(caught(outcomes), f"steps to detection, {seeds} seeds; measured by {COMMAND}"),
        Table(confusion(outcomes), f"runs of {seeds} in which each rule fired"),
    )


def markdown() -> str:
    """Recorded outcomes, as a page of the documentation."""
    outcomes = recorded()
    seeds = len({outcome.seed for outcome in outcomes})
    parts = [
        "# Faults",
        "Historic bugs, each put into a short run of the demo, and what catches them (`grpo_nb.fault_lab`, notebook "
        f"06). Measured by `{COMMAND}`: steps to detection for each of {seeds} seeds; what is refused before a step "
        "counts as 0.",
        _lines(caught(outcomes)),
        f"## Fault by rule\n\nIn how many of {seeds} runs each rule fired; notes of severity info are left out unless "
        "they claim the fault.",
        _lines(confusion(outcomes)),
    ]
    return "\n\n".join(parts)


def catalogue() -> Table:
    """Table of every fault with the rules that catch it."""
    rows = [(f.id, f.what, f.claim, ", ".join(f.caught_by), f.within) for f in FAULTS.values()]
    frame = pd.DataFrame(rows, columns=["fault", "what is wrong", "caught by a", "named", "within steps"])
    return Table(frame, f"{len(rows)} faults")


def _steps(steps: int | None) -> str:
    return "not caught" if steps is None else str(steps)


def _ids(outcomes: Sequence[Outcome]) -> list[str]:
    present = {outcome.fault for outcome in outcomes}
    return [name for name in ALL if name in present]


def _lines(frame: pd.DataFrame) -> str:
    rows = [[*frame.columns], ["---"] * len(frame.columns), *frame.astype(str).to_numpy().tolist()]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows)


def write(path: Path, outcomes: Sequence[Outcome], seconds: float) -> None:
    """Keep a measurement."""
    rows: list[dict[str, Any]] = [asdict(outcome) | {"error": _error(outcome.error)} for outcome in outcomes]
    path.write_text(json.dumps({"command": COMMAND, "seconds": round(seconds), "outcomes": rows}, indent=1) + "\n")


def _error(text: str) -> str:
    """Beginning of an error, without the folder of the measurement, which differs each time."""
    return re.sub(r"\S*/(?=demo-lab/)", "", text.partition(":")[0])


def main(argv: Sequence[str] | None = None) -> int:
    """0: every fault was caught in time and the clean run raised nothing; 1: not so."""
    parser = argparse.ArgumentParser(prog="python -m grpo_nb.fault_lab.matrix", description=(__doc__ or "")[:60])
    parser.add_argument("--seeds", type=int, nargs="+", default=[*SEEDS])
    parser.add_argument("--faults", nargs="+", default=[*ALL], choices=[*ALL], metavar="FAULT")
    parser.add_argument("--folder", type=Path, help="keep the runs here (default: a temporary folder)")
    parser.add_argument("--out", type=Path, help="write the result here")
    options = parser.parse_args(argv)
    logging.disable(logging.WARNING)  # each fault gives some
    with tempfile.TemporaryDirectory() as temporary:
        run = warmed_up(options.folder or Path(temporary))
        began = time.monotonic()
        outcomes = measure(Lab.of(run), [ALL[name] for name in options.faults], options.seeds)
    sys.stdout.write(f"{caught(outcomes).to_string()}\n{confusion(outcomes).to_string()}\n")
    if options.out:
        write(options.out, outcomes, time.monotonic() - began)
    late = [o for o in outcomes if (steps := o.caught(ALL[o.fault])) is None or steps > ALL[o.fault].within]
    return int(any(o.fault != CLEAN.id for o in late) or any(o.alarms for o in outcomes if o.fault == CLEAN.id))


if __name__ == "__main__":
    sys.exit(main())
