"""A real vLLM server (its CPU build) for the slow tests, where GRPO_NB_TEST_VLLM names its `vllm` command."""

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

VARIABLE = "GRPO_NB_TEST_VLLM"
PATIENCE_SECONDS = 300.0
LORA = ("--enable-lora", "--max-lora-rank", "8")
PROCESSED = ("--logprobs-mode", "processed_logprobs")
SETTINGS = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",
}


class VLLMProcess:
    """A server of the model in `folder`; `start` returns at once."""

    def __init__(self, folder: Path, port: int, *flags: str, runtime_lora: bool = True) -> None:
        command = os.environ.get(VARIABLE)
        if not command:
            pytest.skip(f"{VARIABLE} does not name the vllm command of an environment with vLLM 0.32's CPU build")
        self.url, self._log = f"http://127.0.0.1:{port}", folder.parent / f"vllm-{port}.log"
        self._command = [command, "serve", str(folder), "--host", "127.0.0.1", "--port", str(port)]
        # a seeded request whose prompt is cut into chunks ends the CPU build
        self._command += ["--dtype", "float32", "--max-model-len", "128", "--max-num-batched-tokens", "16384"]
        self._command += ["--enforce-eager", "--generation-config", "vllm", *flags]
        lora = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"} if runtime_lora else {}
        path = f"{Path(command).parent}{os.pathsep}{os.environ['PATH']}"
        self._environment = (
            {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | SETTINGS | lora | {"PATH": path}
        )

    def start(self) -> None:
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )

    def wait(self) -> None:
        """Until it answers."""
        until = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < until and self._process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.url}/version", timeout=5).close()
                return
            except OSError:
                time.sleep(0.5)
        pytest.fail(f"vLLM did not start: {self._log.read_text()[-3000:]}")

    def ask(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Status and body, read as JSON where it is any."""
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                status, text = reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode()
        return status, json.loads(text) if text.startswith("{") else text

    def adapters(self) -> list[str]:
        return [card["id"] for card in self.ask("/v1/models")[1]["data"] if card["parent"] is not None]

    def kill(self) -> None:
        """With all its processes, at once."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
