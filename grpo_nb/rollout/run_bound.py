"""Run a command, and end it with all of its processes once standard input closes: `python run_bound.py COMMAND ...`.

The process that holds the other end of the pipe has then ended, however: also where signal 9 killed it. The file is run
by its path and imports nothing of the package, so that it starts at once.
"""

import os
import signal
import subprocess
import sys
import threading

GRACE_SECONDS = 10.0
"""Between SIGTERM and SIGKILL."""


def main(command: list[str]) -> int:
    """Exit status of the command."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=_end_with_input, args=(child,), daemon=True).start()
    return child.wait()


def _end_with_input(child: "subprocess.Popen[bytes]") -> None:
    while os.read(0, 1):  # not sys.stdin: its lock, held here, would break the end of the interpreter
        pass
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGTERM)
        try:
            child.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
