"""Python processes for tests, without the seconds that their imports take.

`command(...)` is the command line of a Python process that is a fork of one that has imported torch, transformers and
other slow packages (`fork_server.py`), but nothing of grpo_nb: the fork imports that itself. Where a test proves
something about those imports, or about the process itself (its id, its memory), it starts `sys.executable`.
All processes of one run of the tests share a server, which the first of them starts and which ends with the last.
"""

import functools
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PATIENCE = 240.0


def command(*arguments: str) -> list[str]:
    """For `python ARGUMENTS`, which begin with -c or -m (or for `python` alone, to be followed by them)."""
    if sys.platform != "linux":  # elsewhere there are no abstract addresses, or a fork is not safe
        return [sys.executable, *arguments]
    return [sys.executable, "-I", "-S", str(HERE / "fork_client.py"), _server(), *arguments]


@contextmanager
def kernels() -> Iterator[None]:
    """Kernels that start meanwhile are such processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", _specifications().name)
        yield


@functools.cache
def _specifications() -> "tempfile.TemporaryDirectory[str]":
    """A folder in which Jupyter finds such a `python3`, before the environment's own."""
    folder = tempfile.TemporaryDirectory()
    spec = Path(folder.name) / "kernels" / "python3"
    spec.mkdir(parents=True)
    argv = command("-m", "ipykernel_launcher", "-f", "{connection_file}")
    described = {"argv": argv, "display_name": "Python 3 (ipykernel)", "language": "python"}
    (spec / "kernel.json").write_text(json.dumps(described))
    return folder


@functools.cache
def _server() -> str:
    """The server's name; it serves while this process holds a connection."""
    name = f"grpo_nb-tests-{os.environ.get('PYTEST_XDIST_TESTRUNUID') or secrets.token_hex(16)}"
    end = time.monotonic() + PATIENCE
    with tempfile.TemporaryFile() as log:
        server = None
        while not _connected(name):
            assert time.monotonic() < end, "the fork server does not answer"
            if server is None or server.poll() == 0:  # another process's server had the name, and has ended
                command = [sys.executable, str(HERE / "fork_server.py"), name]
                server = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
            elif server.returncode is not None:
                log.seek(0)
                raise AssertionError(log.read().decode())
            time.sleep(0.05)
        _open.append(server)
    return name


_open: list[object] = []
"""Closed as this process ends."""


def _connected(name: str) -> bool:
    """Whether there is such a server and it is ready; it then stays while this process does."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(f"\0{name}")
        connection.settimeout(PATIENCE)
        if connection.recv(1):
            _open.append(connection)
            return True
    except ConnectionError:
        pass
    connection.close()
    return False
