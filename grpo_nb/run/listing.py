"""The runs of a folder, each with its state."""

from pathlib import Path

from grpo_nb.printable import clean_logger
from grpo_nb.run.places import CONFIG, run_folders
from grpo_nb.run.run import Run, RunError
from grpo_nb.run.status import RunStatus, RunSummary, modified
from grpo_nb.storage.vocabulary import RunState

logger = clean_logger(__name__)

LONGEST_PROBLEM = 500
"""Characters of the reason why a run cannot be read, or ended as dead or failed."""


def list_runs(root: str | Path) -> list[RunSummary]:
    """The runs in folder `root`, last changed first; folders that are no runs are passed over.

    A run that cannot be read, for whatever reason, is listed as `unreadable`: it hides no other.
    """
    found = [_summary(folder) for folder in run_folders(root)]
    return sorted(found, key=lambda run: (-(run.updated or 0.0), run.name))


def _summary(path: Path) -> RunSummary:
    try:
        run = Run.open(path)
        status = run.status()
        problem = _problem(run, status)
    except Exception as error:  # whatever one folder contains, the others are listed
        if not isinstance(error, RunError):
            logger.info("%s cannot be read", path, exc_info=True)
        problem = str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
        return RunSummary(
            path.name, path, RunState.UNREADABLE, updated=modified(path / CONFIG), problem=problem[:LONGEST_PROBLEM]
        )
    updated = status.updated or modified(path / CONFIG)
    return RunSummary(path.name, path, status.state, status.step, status.steps, updated, problem, status.sft)


def _problem(run: Run, status: RunStatus) -> str | None:
    """Error of a run that did not end in good order; None for any other."""
    if status.state is RunState.DEAD:
        return f"its process died: {status.owner}"[:LONGEST_PROBLEM]
    if status.state is RunState.FAILED:
        return str(run.milestone().get("error") or "the error was not logged")[:LONGEST_PROBLEM]
    return None
