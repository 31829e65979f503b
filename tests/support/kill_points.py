"""Kill a process (SIGKILL) just before each of the file-system calls it makes, one after the other.

`survives(action, check, folder)`: for every n, in a copy of `folder`, `action(copy)` runs in a process of its
own that dies before its n-th call; then `check(copy)` must hold. Both are module-level functions of a test
module, whose `prepare()`, if it has one, is called once before. This meets every state that a kill can leave between
two calls, where random kills meet a few.
"""

import importlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.support import forked

CALLS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink"}
ROOT = Path(__file__).resolve().parents[2]
Step = Callable[[Path], None]


def survives(action: Step, check: Step, folder: Path, every: int = 1) -> int:
    """How many kill points were tried, each `every`-th call; fails with the child's words where `check` failed."""
    names = [action.__module__, action.__name__, check.__name__, str(folder), str(every)]
    command = forked.command("-m", "tests.support.kill_points", *names)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def in_child(step: Step, folder: Path, die_before: int = 0) -> int:
    """Run `step(folder)` in a fork and return its exit code; it dies before its `die_before`-th call in `folder`."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    left = die_before

    def hook(event: str, args: tuple[object, ...]) -> None:
        nonlocal left
        if event in CALLS and str(folder) in str(args[0]):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    if die_before:
        sys.addaudithook(hook)
    try:
        step(folder)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


def main(module: str, action: str, check: str, folder: str, every: str) -> int:
    loaded = importlib.import_module(module)
    getattr(loaded, "prepare", lambda: None)()
    point, tried, killed = 1 - int(every), -1, True
    while killed:
        point, tried = point + int(every), tried + 1
        copy = Path(f"{folder}-{point}")
        shutil.copytree(folder, copy)
        killed = in_child(getattr(loaded, action), copy, point) == -signal.SIGKILL
        if in_child(getattr(loaded, check), copy) != 0:
            sys.exit(f"{check} failed after a kill before call {point} of {action}")
        shutil.rmtree(copy)
    return tried


if __name__ == "__main__":
    sys.stdout.write(str(main(*sys.argv[1:])))
