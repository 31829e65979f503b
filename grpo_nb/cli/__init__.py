"""`grpo-nb`: the package's verbs from a terminal, with one contract that scripts can rely on.

Exit status: 0 done, 1 findings or failure, 2 usage, 130 interrupted and saved. Standard output carries the
answer (pure JSON under --json); progress, notes and errors go to standard error.
"""

import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence

from grpo_nb.cli.arguments import parser
from grpo_nb.cli.options import UsageError
from grpo_nb.config import ConfigError
from grpo_nb.printable import Formatter, printable
from grpo_nb.ranks import launch

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

INTERRUPTED_AT_ONCE = "interrupted: the steps since the last checkpoint are lost; the run itself is intact"
INSTALL = "call the environment that has this package installed (.venv/bin/grpo-nb after make run), or pip install -e ."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    try:
        arguments = parser().parse_args(argv)
    except SystemExit as end:  # argparse has printed the reason
        return end.code if isinstance(end.code, int) else USAGE
    handler = logging.StreamHandler()
    handler.setFormatter(Formatter("%(levelname)s: %(message)s"))
    logging.basicConfig(level=logging.INFO if arguments.verbose else logging.WARNING, handlers=[handler])
    command: Callable[..., int] = arguments.command
    try:
        ended = command(arguments)
        return (
            DONE if ended == INTERRUPTED and launch.place() is not None else ended
        )  # torchrun takes others for crashes
    except KeyboardInterrupt:
        return _say(INTERRUPTED_AT_ONCE, INTERRUPTED)
    except BrokenPipeError:  # the reader of the answer has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except Exception as error:
        if launch.place() is not None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what torchrun sends on another rank's death: this one ends
        if (status := _explain(error)) is None:  # a bug: it keeps its traceback
            raise
        return status


def _explain(error: Exception) -> int | None:
    """Show one clear line for an error of this package, the system or a known one; None for anything else."""
    if isinstance(error, UsageError | ConfigError):
        return _say(f"error: {error}", USAGE)
    if type(error).__module__.startswith("grpo_nb") or isinstance(error, OSError | FloatingPointError):
        # the text of a finding that stops a run begins with `error: ` already
        return _say(f"error: {str(error).removeprefix('error: ')}", FAILED)
    if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("grpo_nb"):
        return _say(f"error: {error} in {sys.executable}; {INSTALL}", FAILED)
    from grpo_nb.doctor import explain

    known = explain(error)
    return None if known is None else _say(f"error: {error}\n{known}", FAILED)


def _say(text: str, status: int) -> int:
    """Standard error may be a file that others see: keys are struck out of what failed, which may quote anything."""
    if status == FAILED:
        from grpo_nb.judge.redaction import known_secrets  # slow to import; wrong usage is refused at once
        from grpo_nb.judge.secrets import strike

        text = strike(text, known_secrets())
    sys.stderr.write(f"{printable(text)}\n")
    return status
