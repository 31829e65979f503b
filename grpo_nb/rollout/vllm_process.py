"""A vLLM server that the trainer starts and ends, from the environment that vLLM is installed in."""

import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from grpo_nb.config import ConfigError, RolloutConfig
from grpo_nb.judge.redaction import known_secrets, redacted
from grpo_nb.printable import clean_logger, one_line
from grpo_nb.rollout import run_bound
from grpo_nb.rollout.vllm_server import PROGRAM, RUNTIME_LORA, URL, ServerError

logger = clean_logger(__name__)

ARGUMENTS = "GRPO_NB_VLLM_ARGS"
"""Environment variable: further arguments of `vllm serve`."""
START_SECONDS = 900.0
"""Within which it must answer: it loads the model and may compile it."""
RESTARTS = 3
"""Times that a server that ended by itself is started again, in one run."""
LOG_BYTES, LOG_LINES = 20_000, 8
"""Of the end of its log, in an error."""
LEFT_OUT = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "VLLM_API_KEY")
"""Variables of this process that would lead the other environment astray, or ask for a key."""


class OwnServer:
    """A server at a free port of this machine.

    Raises:
        ConfigError: the program is not there, or the further arguments cannot be read.
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
        self._program, self._port = found, _free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.ready = False
        """Whether it has answered since it was started by `start`."""
        self._arguments: list[str] = []
        self._restarts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    def start(self, arguments: Sequence[str]) -> None:
        """Start `vllm serve` with these arguments, unless it runs."""
        if self._process is not None and self._process.poll() is None:
            return
        self._arguments, self._restarts, self.ready = [*arguments], 0, False
        self._launch()

    def check_alive(self) -> None:
        """Raise where the process has ended while it starts.

        Raises:
            ServerError: with the end of its log.
        """
        if self._process is not None and (status := self._process.poll()) is not None:
            raise ServerError(f"vLLM ended with status {status} while it started. {self._end_of_log()}")

    def revive(self) -> None:
        """Start a server again that has answered and then ended by itself.

        Raises:
            ServerError: it has ended more than RESTARTS times.
        """
        if not self.ready or self._process is None or (status := self._process.poll()) is None:
            return
        if self._restarts == RESTARTS:
            raise ServerError(f"vLLM ended {RESTARTS + 1} times, now with status {status}. {self._end_of_log()}")
        self._restarts += 1
        logger.warning("vLLM ended with status %d; it is started again. %s", status, self._end_of_log())
        self._launch()

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
        logger.info("starting %s", shlex.join(command))
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the server
        name, _, value = RUNTIME_LORA.partition("=")
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(Path(run_bound.__file__)), *command],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={k: v for k, v in os.environ.items() if k not in LEFT_OUT} | {name: value},
            start_new_session=True,  # an interrupt is for the trainer, which ends the server when it has saved
        )

    def _end_of_log(self) -> str:
        assert self._log is not None
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - LOG_BYTES))
        lines = [line for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        secrets = known_secrets()
        shown = [one_line(redacted(line, secrets)) for line in lines[-LOG_LINES:]]
        return "Its log ends with: " + (" | ".join(shown) or "nothing")


def own_server(rollout: RolloutConfig) -> OwnServer | None:
    """The server that the trainer is to start: where PROGRAM is set, and no address of a running one.

    Raises:
        ConfigError: as `OwnServer`.
    """
    program = os.environ.get(PROGRAM, "").strip()
    return OwnServer(program) if program and rollout.url is None and not os.environ.get(URL, "").strip() else None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
