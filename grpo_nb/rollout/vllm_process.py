"""A vLLM server that the trainer starts and ends, from the environment that vLLM is installed in."""

import os
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import IO

from grpo_nb.config import ConfigError, RolloutConfig
from grpo_nb.judge.redaction import SECRET_NAME, SHORTEST_SECRET, known_secrets, redacted
from grpo_nb.printable import clean_logger, one_line
from grpo_nb.rollout import run_bound
from grpo_nb.rollout.vllm_server import PROGRAM, RUNTIME_LORA, URL, ServerError

logger = clean_logger(__name__)

ARGUMENTS = "GRPO_NB_VLLM_ARGS"
"""Environment variable: further arguments of `vllm serve`."""
START_SECONDS = 900.0
"""Within which it must answer after each start: it loads the model and may compile it."""
RESTARTS = 3
"""Times that a server that ended by itself is started again, in one run."""
LOG_BYTES, LOG_LINES, LOG_LETTERS = 20_000, 8, 500
"""Of the end of its log, and of each line, in an error."""
SET_HERE = ("--host", "--port", "--uds", "--api-key", "--ssl-keyfile", "--ssl-certfile")
"""Arguments under which the trainer would not reach the server that it starts."""
LEFT_OUT = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Variables of this process that would lead the other environment astray."""
KEY = "VLLM_API_KEY"
"""Variable of the server's process that holds its key: only its user can read it, unlike the command line."""
KEY_BYTES = 32


class OwnServer:
    """A server at a free port of this machine.

    Raises:
        ConfigError: the program is not there, or the further arguments cannot be read or are the trainer's own.
    """

    def __init__(self, program: str) -> None:
        found = shutil.which(program)
        if found is None:
            raise ConfigError(
                f"{PROGRAM} is {program!r}, which is no program. Set it to the `vllm` command of the environment that "
                "vLLM is installed in, e.g. /opt/vllm/bin/vllm"
            )
        try:
            self._further = shlex.split(os.environ.get(ARGUMENTS, ""))
        except ValueError as error:
            raise ConfigError(f"{ARGUMENTS} cannot be read: {error}. Write it as on a command line") from None
        if taken := sorted({name for name in map(_name, self._further) if name in SET_HERE}):
            raise ConfigError(
                f"{ARGUMENTS} has {', '.join(taken)}, which the trainer sets itself: it starts the server at a free "
                "port of this machine, with a random key. Remove that"
            )
        self._program, self._port = found, _free_port()
        self.key = ""
        """The key that `start` made. It is in the server's environment, and in no file, log or command line."""
        self.ready = False
        """Whether it has answered since it was started by `start`."""
        self._arguments: list[str] = []
        self._restarts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    @property
    def url(self) -> str:
        """Its address, which `start` changes where another program has taken the port."""
        return f"http://127.0.0.1:{self._port}"

    def start(self, arguments: Sequence[str]) -> None:
        """Start `vllm serve` with these arguments, unless it runs."""
        if self._process is not None and self._process.poll() is None:
            return
        self._port, self.key = _free_port(self._port), secrets.token_urlsafe(KEY_BYTES)
        self._arguments, self._restarts, self.ready = [*arguments], 0, False
        self._launch()

    def check_alive(self) -> None:
        """Raise where the process has ended while it starts.

        Raises:
            ServerError: with the end of its log.
        """
        if self._process is not None and (status := self._process.poll()) is not None:
            raise ServerError(f"vLLM ended with status {status} while it started. {self.end_of_log()}")

    def revive(self) -> float:
        """Start a server again that has answered and then ended by itself.

        Returns:
            Seconds within which it must answer if this call started it; else 0.

        Raises:
            ServerError: it has ended more than RESTARTS times.
        """
        if not self.ready or self._process is None or (status := self._process.poll()) is None:
            return 0.0
        if self._restarts == RESTARTS:
            raise ServerError(f"vLLM ended {RESTARTS + 1} times, now with status {status}. {self.end_of_log()}")
        self._restarts += 1
        logger.warning("vLLM ended with status %d; it is started again. %s", status, self.end_of_log())
        self._launch()
        return START_SECONDS

    def stop(self) -> None:
        """End the server and all of its processes."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()
            self._process = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def _launch(self) -> None:
        self.stop()
        command = [self._program, "serve", *self._arguments, "--port", str(self._port), *self._further]
        logger.info("starting %s", self._redacted(shlex.join(command)))
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the server, and run_bound bounds it
        name, _, value = RUNTIME_LORA.partition("=")
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(Path(run_bound.__file__)), *command],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={k: v for k, v in os.environ.items() if k not in LEFT_OUT} | {name: value, KEY: self.key},
            start_new_session=True,  # an interrupt is for the trainer, which ends the server when it has saved
        )

    def end_of_log(self) -> str:
        """The last lines of its log, without secrets."""
        if self._log is None:
            return "It has no log"
        log = self._log.fileno()
        end = os.pread(log, LOG_BYTES, max(0, os.fstat(log).st_size - LOG_BYTES))  # the server's position stays
        lines = [line for line in end.decode(errors="replace").splitlines() if line.strip()]
        shown = [one_line(self._redacted(line))[:LOG_LETTERS] for line in lines[-LOG_LINES:]]
        return "Its log ends with: " + (" | ".join(shown) or "nothing")

    def _redacted(self, text: str) -> str:
        return redacted(text, [*known_secrets(), *_secrets_of(self._further), *filter(None, [self.key])])


def own_server(rollout: RolloutConfig) -> OwnServer | None:
    """The server that the trainer is to start: where PROGRAM is set, and no address of a running one.

    Raises:
        ConfigError: as `OwnServer`.
    """
    program = os.environ.get(PROGRAM, "").strip()
    return OwnServer(program) if program and rollout.url is None and not os.environ.get(URL, "").strip() else None


def _name(argument: str) -> str:
    """Name of an argument, as vLLM reads it: `--api_key=x` and `--api-key x` are one."""
    return argument.partition("=")[0].replace("_", "-")


def _secrets_of(arguments: Sequence[str]) -> list[str]:
    """Values of arguments whose names say that they are secret, such as `--hf-token`."""
    pairs = pairwise([*arguments, ""])
    values = [argument.partition("=")[2] or following for argument, following in pairs if _is_secret(argument)]
    return [value for value in values if len(value) >= SHORTEST_SECRET and not value.startswith("--")]


def _is_secret(argument: str) -> bool:
    return argument.startswith("--") and bool(SECRET_NAME.search(_name(argument).strip("-").replace("-", "_")))


def _free_port(first: int = 0) -> int:
    """A free port of this machine: the given one, if it is free."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", first))
        except OSError:
            probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
