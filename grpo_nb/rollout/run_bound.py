"""Run a command, and end it with all of its processes once standard input closes: `python run_bound.py COMMAND ...`.

The process that holds the other end of the pipe has then ended, however: also where signal 9 killed it. Where the
command ends by itself, processes of it that are left end too. A file at standard output that can also be read is cut to
its end once it is larger than LARGEST_LOG. This file is run by its path and imports nothing of the package, so that it
starts at once.
"""

import contextlib
import ctypes
import os
import select
import signal
import stat
import subprocess
import sys
import threading
import time

GRACE_SECONDS = 10.0
"""Between SIGTERM and SIGKILL."""
POLL_SECONDS = 0.05
LARGEST_LOG, KEPT_LOG = 8 << 20, 1 << 20
"""Bytes of the file at standard output from which it is cut, and of its end that stay."""
LOG_SECONDS = 1.0
"""Between two looks at its size."""
END_WITH_PARENT, ADOPT = 1, 36
"""Linux's PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER."""


def main(command: list[str]) -> int:
    """Exit status of the command."""
    control = ctypes.CDLL(None).prctl if sys.platform == "linux" else lambda *_: None
    control(ADOPT, 1, 0, 0, 0)  # without it, init reaps what is left, if it does
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        # no other thread exists yet
        preexec_fn=lambda: control(END_WITH_PARENT, signal.SIGTERM, 0, 0, 0),
    )
    threading.Thread(target=_end_with_input, args=(child,), daemon=True).start()
    status = child.wait()
    _end_rest(child.pid)
    return status


def _end_with_input(child: "subprocess.Popen[bytes]") -> None:
    # by number, not as sys.stdin: its lock, held here, would break the end of the interpreter
    while not select.select([0], [], [], LOG_SECONDS)[0] or os.read(0, 1):
        _cut_log(1)
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGTERM)
        try:
            child.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)


def _cut_log(log: int) -> None:
    """Keep the end of a file that has grown too large, while its writers go on: they share this descriptor's position.

    They wait for nothing. What they write between two of these calls is lost.
    """
    with contextlib.suppress(OSError):
        found = os.fstat(log)
        if stat.S_ISREG(found.st_mode) and found.st_size > LARGEST_LOG:
            end = os.pread(log, KEPT_LOG, found.st_size - KEPT_LOG)
            os.pwrite(log, end, 0)
            os.lseek(log, len(end), os.SEEK_SET)
            os.ftruncate(log, len(end))


def _end_rest(group: int) -> None:
    """End the processes that a command which has ended leaves in its process group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        end = time.monotonic() + GRACE_SECONDS
        if _alive(group):
            with contextlib.suppress(OSError):
                os.killpg(group, number)
        while _alive(group) and time.monotonic() < end:
            time.sleep(POLL_SECONDS)


def _alive(group: int) -> bool:
    with contextlib.suppress(OSError):
        while os.waitpid(-group, os.WNOHANG)[0]:  # adopted ones that have ended
            pass
    try:
        os.killpg(group, 0)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
