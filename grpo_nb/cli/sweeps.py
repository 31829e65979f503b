"""`grpo-nb sweep`: a study from the command line."""

import signal
import threading
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager

from grpo_nb.cli.options import UsageError, changes, preset
from grpo_nb.cli.output import rows_of, say, show_json
from grpo_nb.cli.study_progress import followed
from grpo_nb.report.tables import Table
from grpo_nb.sweeps import Arm, Study, sweep

DONE, FAILED, INTERRUPTED = 0, 1, 130


def sweep_command(arguments: Namespace) -> int:
    """Make or open a study, do the remaining work, and show the results."""
    study = _study(arguments)
    study.check_arms(arguments.only)
    if arguments.yes:
        study.confirm()
    try:
        with _terminated():
            status = study.status() if arguments.show else _trained(study, arguments)
    except KeyboardInterrupt:
        say(f"interrupted: finished runs are saved; continue with: grpo-nb sweep {arguments.folder}")
        return INTERRUPTED
    if arguments.json:
        show_json({"folder": str(study.folder), "runs": rows_of(status.frame), "results": rows_of(study.results())})
    else:
        say(f"{status}\n\n{study.table()}")
    asked = status.frame["arm"].isin(arguments.only or study.plan.arms)
    return DONE if arguments.show or not any(status.frame["left"][asked]) else FAILED


def _trained(study: Study, arguments: Namespace) -> Table:
    with followed(study.trials):
        return study.train(arguments.jobs, arguments.devices, arguments.only)


@contextmanager
def _terminated() -> Iterator[None]:
    """Treat SIGTERM inside the block as Ctrl-C: its default would leave the runs' processes running."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _study(arguments: Namespace) -> Study:
    arms, made = dict(arguments.arm or []), arguments.preset or changes(arguments)
    if not arms:
        if made or arguments.seeds or arguments.sft_only:
            raise UsageError("settings and seeds make a study of arms; give --arm, or leave them out to open FOLDER")
        return Study.open(arguments.folder)
    if arguments.seed is not None:
        raise UsageError(f"--seed {arguments.seed} is of one run; give --seeds {arguments.seed}")
    if unknown := [name for name in arguments.sft_only if name not in arms]:
        raise UsageError(f"--sft-only {unknown[0]}: no --arm has that name; there are {', '.join(arms)}")
    given = {name: Arm(changes=own, grpo=name not in arguments.sft_only) for name, own in arms.items()}
    config = preset(arguments.preset or "demo").replace(**changes(arguments))
    return sweep(arguments.folder, config, given, arguments.seeds or (0, 1, 2))
