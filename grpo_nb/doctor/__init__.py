"""The doctor: findings about a run (`diagnose`), checks of this machine (`environment`), causes of an error
(`explain`).

A diagnosis reads files only, so it can be made of a run that trains elsewhere, died, or ended last week.
"""

import os
from collections.abc import Iterator, Set
from importlib import import_module
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from grpo_nb import rules
from grpo_nb.doctor import resumes, settings_lint
from grpo_nb.doctor.debugging import debug_mode
from grpo_nb.doctor.errors import explain, explain_text
from grpo_nb.doctor.machine import Check, environment
from grpo_nb.evaluation.compare import measurements
from grpo_nb.rules import clock, hindsight, learning, regressions, sft, updates
from grpo_nb.rules.finding import FIRST_STEP, FURTHEST, Finding, Rows, named_in, spans
from grpo_nb.rules.rewards import evaluation_leaked
from grpo_nb.run import settings
from grpo_nb.run.checkpoints import Checkpoints
from grpo_nb.run.run import Run, RunError, RunStatus
from grpo_nb.run.sft_result import without_sft
from grpo_nb.storage.index import LogRows
from grpo_nb.storage.index.packing import Floats
from grpo_nb.storage.journal import Journal
from grpo_nb.storage.safe_open import Irregular, opened
from grpo_nb.storage.schema import LONGEST_LINE
from grpo_nb.storage.vocabulary import RunState

__all__ = [
    "Check",
    "Finding",
    "bundle",
    "check_loss",
    "debug_mode",
    "diagnose",
    "environment",
    "explain",
    "lint",
    "memory_snapshot",
    "profile",
]


if TYPE_CHECKING:
    from grpo_nb.doctor.bug_report import bundle as bundle
    from grpo_nb.doctor.loss_check import check_loss as check_loss
    from grpo_nb.doctor.profiling import memory_snapshot as memory_snapshot
    from grpo_nb.doctor.profiling import profile as profile
    from grpo_nb.doctor.settings_lint import lint as lint

_LATER = {
    "bundle": "bug_report",
    "check_loss": "loss_check",
    "lint": "settings_lint",
    "memory_snapshot": "profiling",
    "profile": "profiling",
}
"""Submodules that train or pack, loaded on first use: a diagnosis needs none of them."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'grpo_nb.doctor' has no attribute {name!r}")
    return getattr(import_module(f"grpo_nb.doctor.{_LATER[name]}"), name)


_BOUNDARIES = {"start", "resume", "checkpoint", "finding", "stopped", "done", "failed"}
"""Kinds of events that every training has."""
NEWEST = 32
"""Number of the newest events of these kinds that are read, whatever the length of the log."""
NEWEST_SAMPLES = 200
"""Rows of samples.jsonl that are searched for the cause of a finding."""
UNREAD = 32 << 20
"""Bytes of a log without an index that a quick diagnosis reads: a fraction of a second."""


def diagnose(run: Run | str | Path, *, quick: bool = False) -> list[Finding]:
    """Return all findings of the rules on a run's log, and the faults of its files, worst first.

    Args:
        run: a Run, or its name or path.
        quick: leave out the search for damaged lines in a log whose index lacks more than UNREAD bytes, which a
            finding of its own names.
    """
    run = Run.of(run)
    rows, events, status = run.stored("metrics"), run.stored("events"), run.status()
    found = hindsight.post_mortem(rows, run.config, without_sft=without_sft(run))
    found = [_with_samples(run, finding) for finding in found]
    found += _measured(run, rows)
    losses = {event.get("step"): event for event in events.having("kind", {"sft_eval"})}  # the newest of each step
    found += sft.check(run.stored("sft"), [*losses.values()], run.config)
    found += _ending(run, status, events, {finding.rule for finding in found})
    found += _checkpoints(run, status)
    found += _settings(run)
    found += settings_lint.idle(run.config, "info")
    found += _logs(run, status, quick)
    found += _holes(run)
    found += _knobs(run)
    found += _code(events)
    found += _leaks(events)
    found += _clock(events)
    found += resumes.inexact(run)
    found += resumes.new_moments(run)
    return rules.worst_first(found)


def _with_samples(run: Run, finding: Finding) -> Finding:
    """The finding with its cause from the newest samples."""
    look = _LOOK.get(finding.rule)
    return finding if look is None else look(finding, islice(run.newest_first("samples"), NEWEST_SAMPLES))


_LOOK = {
    learning.truncation.__name__: learning.with_ignored_stop,
    learning.unscored.__name__: learning.with_commonest_cause,
    updates.repeated_skips.__name__: learning.with_commonest_cause,
}
"""Functions that add evidence from the samples, by rule."""


def _measured(run: Run, rows: Rows) -> list[Finding]:
    """Findings from the evaluations."""
    evaluations = measurements(run)
    asked, names = [learning.forgetting(evaluations)], run.config.objectives
    asked += [regressions.accuracy_fell(rows, run.config, name, evaluations) for name in names]
    if rows:
        asked += [regressions.reward_without_accuracy(rows, run.config, name, evaluations) for name in names]
    return [finding for finding in asked if finding]


def _ending(run: Run, status: RunStatus, events: LogRows, known: Set[str]) -> Iterator[Finding]:
    """Findings about a training that did not end well; without the words of findings in `known`."""
    where, newest = _progress(run, status)
    if status.state is RunState.DEAD:
        yield Finding(
            "dead_owner",
            "warning",
            status.step,
            f"its trainer ({status.owner}) died without an error, as a killed kernel does, {where}.",
            {"owner": str(status.owner), "checkpoint": newest},
            "start it again: it takes over the lock and continues from the checkpoint. If it keeps dying, look at the "
            "machine's memory",
        )
    failures = events.places("kind", {"failed"})
    if status.state is RunState.FAILED and len(failures):
        failure = events[int(failures[-1])]
        text = str(failure.get("error", "an error that was not recorded"))
        if (named := named_in(text)) and known >= {*named}:
            told, advice = f"because of {' and '.join(named)}", f"read {' and '.join(named)} in this list"
        else:
            told, advice = f"with {text.rstrip('.')}", explain_text(text) or _CHANGE
        yield Finding(
            "failed",
            "error",
            status.step,
            f"training ended {told}, {where}.",
            {"error": text, "checkpoint": newest, "rules": named},
            advice.rstrip("."),
        )


_CHANGE = "change what the message names, then start it again: it resumes"


def _progress(run: Run, status: RunStatus) -> tuple[str, int]:
    """Progress and point of resumption as a sentence, and the step of that checkpoint; SFT's before GRPO began."""
    warm = status.step == 0 and not run.checkpoints.steps()
    rows = run.stored("sft") if warm else []
    step, total = (len(rows), run.config.sft.steps) if warm else (status.step, status.steps)
    whole, _ = (run.sft_checkpoints if warm else run.checkpoints).latest()
    newest = whole.step if whole else 0
    again = max(step - newest, 0)
    verb = "SFT" if warm else "GRPO"
    return f"at step {step} of {total} of {verb}; a resume continues from step {newest} and repeats {again}", newest


def _checkpoints(run: Run, status: RunStatus) -> Iterator[Finding]:
    """Checkpoints that do not verify, and a run that has none to resume from."""
    whole = 0
    for folder, label in ((run.checkpoints, "GRPO"), (run.sft_checkpoints, "SFT")):
        for step in folder.steps():
            try:
                folder.load(step)
                whole += label == "GRPO"
            except RunError as error:
                yield Finding(
                    "checkpoint_damaged",
                    "error",
                    step,
                    f"a {label} checkpoint cannot be used: {str(error).partition(';')[0]}.",
                    {"folder": label, "step": step},
                    "it is the reference that KL is measured against, and no other can stand in for it: restore it "
                    "from a copy, or begin a new run folder"
                    if label == "GRPO" and step == 0 and folder.latest()[0]
                    else "a resume takes the newest valid checkpoint; check the disk, and delete the damaged folder",
                )
    if status.step > 0 and not whole:
        yield Finding(
            "no_checkpoint",
            "error",
            status.step,
            f"the log has {status.step} steps, but no valid checkpoint: the run cannot continue.",
            {},
            "restore its checkpoints folder from a copy, or begin a new run",
        )


def _settings(run: Run) -> Iterator[Finding]:
    """Finding if config.json has changed since the newest checkpoint."""
    newest = run.checkpoints.latest()[0] or run.sft_checkpoints.latest()[0]
    differences = settings.edits(run.config, newest) if newest else {}
    if newest and differences:
        yield Finding(
            "config_edited",
            "error",
            newest.step,
            f"config.json was edited after checkpoint {newest.path.name} was made: "
            + "; ".join(f"{name} was {was!r} and is {now!r}" for name, (was, now) in differences.items())
            + ". The run cannot continue with it.",
            {"differences": {name: list(pair) for name, pair in differences.items()}},
            "put the old values back, or begin a new run folder with the new ones",
        )


def _logs(run: Run, status: RunStatus, quick: bool) -> Iterator[Finding]:
    """Lines of the logs that cannot be read."""
    for path in sorted(run.path.glob("*.jsonl")):
        journal = Journal(path)
        try:
            unread = journal.unindexed() if quick else 0
            if unread <= UNREAD:
                journal.stored()
            else:
                yield _unread(path, unread)
        except Irregular as error:
            yield Finding("log_damaged", "error", None, f"{error}.", {"file": path.name}, "see above: nothing reads it")
            continue
        if journal.bad_lines:
            yield Finding(
                "log_damaged",
                "warning",
                None,
                f"{path.name} has {journal.bad_lines} line(s) that are left out everywhere; the first "
                f"{journal.bad_because}.",
                {"file": path.name, "lines": journal.bad_lines},
                "only an editor writes such lines, or two trainers on a disk without file locks; restore them from a "
                "copy if they matter",
            )
        if not status.state.is_live and _torn(path):
            yield Finding(
                "log_torn",
                "info",
                None,
                f"the last line of {path.name} is cut off, as a kill in the middle of a write leaves it.",
                {"file": path.name},
                "nothing: readers pass over it and the next write removes it",
                "none",
            )


def _unread(path: Path, size: int) -> Finding:
    return Finding(
        "log_unread",
        "info",
        None,
        f"{path.name} has {size >> 20:,} MiB that were not searched for damaged lines, which takes a while the first "
        "time.",
        {"file": path.name, "bytes": size},
        "run diagnose(run), or grpo-nb diagnose, which search them",
        "none",
    )


def _holes(run: Run) -> Iterator[Finding]:
    """Finding about trained steps without a row; rows may be fewer than the saved steps, never more."""
    stages: tuple[tuple[Literal["metrics", "sft"], Checkpoints], ...]
    stages = (("metrics", run.checkpoints), ("sft", run.sft_checkpoints))
    for log, folder in stages:
        rows = run.stored(log)
        steps = rows.numbers("step").values
        last = max([int(np.max(steps, initial=0)), *folder.steps()])
        if missing := _missing(steps, last):
            yield Finding(
                "log_hole",
                "warning",
                missing[0],
                f"{log}.jsonl lacks {len(missing)} of {last} steps: {spans(missing)}. Curves and findings leave them "
                "out.",
                {"file": f"{log}.jsonl", "missing": missing, "steps": last},
                "only an editor or a damaged disk takes rows out; restore the file from a copy if they matter",
            )


def _missing(steps: Floats, last: int) -> list[int]:
    """Steps from the first to `last` that are not among `steps`; of a `last` far beyond all rows only those near."""
    near = min(last, FURTHEST + 10 * len(steps))
    absent = np.ones(near + 1, bool)
    absent[steps[steps <= near].astype(np.int64)] = False
    found: list[int] = (np.flatnonzero(absent[FIRST_STEP:]) + FIRST_STEP).tolist()
    return found


def _torn(path: Path) -> bool:
    """Whether the last line is incomplete."""
    with os.fdopen(opened(path), "rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - LONGEST_LINE, 0))
        tail = file.read().rpartition(b"\n")[2].strip()
    return bool(tail) and not tail.endswith(b"}")


def _knobs(run: Run) -> Iterator[Finding]:
    problem = run.knobs.snapshot().problem
    if problem:
        yield Finding(
            "knobs_unreadable",
            "warning",
            None,
            f"{problem.rstrip('.')}.",
            {"file": "knobs.json"},
            "correct it, or write it anew with run.knobs.reset(). Until then the last valid values stay active",
        )


def _clock(events: LogRows) -> Iterator[Finding]:
    """Finding if the machine's clock went back, as far as the newest boundaries of the log show it."""
    newest = events.places("kind", _BOUNDARIES)[-NEWEST:].tolist()
    if finding := clock.clock_set_back([t for place in newest if (t := events[place].get("time")) is not None]):
        yield finding


def _leaks(events: LogRows) -> Iterator[Finding]:
    """Finding about held-out prompts that are trained on; only a training searches for them, since it has both."""
    logged = [e.get("evidence") for e in events.having("kind", {"finding"}) if e.get("rule") == "evaluation_leaked"]
    newest = {str(seen.get("objective")): seen for seen in logged if isinstance(seen, dict)}
    for name, seen in newest.items():
        leaked, of = seen.get("leaked"), seen.get("of")
        if isinstance(leaked, int) and isinstance(of, int) and (finding := evaluation_leaked(name, leaked, of)):
            yield finding


def _code(events: LogRows) -> Iterator[Finding]:
    """Finding if the package's sources changed between two starts of the run."""
    starts = [e for e in events.having("kind", {"start", "resume"}) if e.get("fingerprint")]
    changed = [e for before, e in pairwise(starts) if before["fingerprint"] != e["fingerprint"]]
    if changed:
        steps = [e.get("step") for e in changed]
        yield Finding(
            "code_changed",
            "info",
            steps[-1],
            f"the code of the project changed after step {', '.join(map(str, steps))}: a curve that bends "
            "there may bend for that reason.",
            {"fingerprints": [e["fingerprint"] for e in starts]},
            "nothing, if that was meant; a comparison needs runs of one fingerprint",
            "none",
        )
