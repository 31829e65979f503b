"""A stand-in for a vLLM server, by the contract that a real one was recorded with (tests/rollout/vllm_0_32.json).

Its model is a policy in this process, and each loaded adapter is opened from the folder that it was given.
"""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from grpo_nb.config import ModelConfig, SamplingConfig
from grpo_nb.policy.model import Policy, load_policy
from grpo_nb.rollout import EagerEngine, Request

Body = dict[str, Any]
Answer = tuple[int, Any]


class StandIn(ThreadingHTTPServer):
    """Serves the model in `folder`; what it lacks is a keyword."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, folder: Path, *, runtime_lora: bool = True, context: int = 128, lora_rank: int = 8) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.runtime_lora, self.context, self.lora_rank = folder, runtime_lora, context, lora_rank
        self.adapters: dict[str, Policy] = {}
        self.asked: list[tuple[str, Body]] = []
        """Every request that reached it, with its body."""
        self.key: str | None = None
        self.script: Callable[[str, Body], Answer | None] | None = None
        """Status and body in place of everything else, where it gives any."""
        self.alter: Callable[[Body], object] | None = None
        """Changes a reply to /v1/completions."""
        self.raw_logprobs = False
        """Log-probs of before the temperature, as without --logprobs-mode processed_logprobs."""
        self.guard = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def bodies(self, path: str) -> list[Body]:
        return [body for asked, body in self.asked if asked == path]

    def restart(self) -> None:
        """What a new process has: no adapter."""
        self.adapters.clear()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that did not wait is no news."""

    def answer(self, path: str, body: Body) -> Answer:
        work = {"/v1/models": self._models, "/version": lambda _: (200, {"version": "0.32.0"})}
        work |= {"/v1/completions": self._complete}
        if self.runtime_lora:
            work |= {"/v1/load_lora_adapter": self._load, "/v1/unload_lora_adapter": self._unload}
        return work[path](body) if path in work else (404, {"detail": "Not Found"})

    def _models(self, body: Body) -> Answer:
        base = {"id": "base", "object": "model", "parent": None, "root": "base", "max_model_len": self.context}
        loaded = [{"id": name, "parent": "base", "root": name, "max_model_len": None} for name in self.adapters]
        return 200, {"object": "list", "data": [base, *loaded]}

    def _load(self, body: Body) -> Answer:
        name, folder = body["lora_name"], Path(body["lora_path"])
        if name in self.adapters:
            return _error(400, f"The lora adapter '{name}' has already been loaded.", "InvalidUserInput")
        if not folder.is_dir():
            return _error(404, f"Loading lora {name} failed: No adapter found for {folder}", "NotFoundError")
        if (rank := json.loads((folder / "adapter_config.json").read_text())["r"]) > self.lora_rank:
            return _error(500, f"LoRA rank {rank} is greater than max_lora_rank {self.lora_rank}.", "ServerError")
        opened = load_policy(ModelConfig(name=str(folder), train="lora", device="cpu"))
        base = load_policy(ModelConfig(name=str(self.folder), train="full", device="cpu")).model.state_dict()
        for key, weight in opened.model.named_parameters():  # the server's own base, whatever the adapter's file names
            plain = key.removeprefix("base_model.model.").replace(".base_layer", "")
            if plain in base:
                weight.data = base[plain].clone()
        self.adapters[name] = opened
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def _unload(self, body: Body) -> Answer:
        if self.adapters.pop(body["lora_name"], None) is None:
            return _error(404, f"The lora adapter '{body['lora_name']}' cannot be found.", "NotFoundError")
        return 200, f"Success: LoRA adapter '{body['lora_name']}' removed successfully."

    def _complete(self, body: Body) -> Answer:
        policy = self.adapters.get(body["model"])
        if policy is None:
            return _error(404, f"The model `{body['model']}` does not exist.", "NotFoundError")
        if beyond := [token for token in body["prompt"] if token >= policy.tokenization.rows]:
            return _error(400, f"Token id {beyond[0]} is out of vocabulary", "BadRequestError")
        cap, rows, greedy = body["max_tokens"], body["n"], body["temperature"] == 0
        shape = {name: body[name] for name in ("top_p", "top_k", "min_p", "repetition_penalty")}
        sampling = SamplingConfig(max_completion_length=cap, temperature=body["temperature"] or 1.0, **shape)
        drawn = EagerEngine().generate(
            policy,
            Request([body["prompt"]], rows, sampling, None if greedy else _uniforms(body["seed"], rows, cap), greedy),
        )
        if self.raw_logprobs:
            with torch.no_grad():
                batch = policy.collate([body["prompt"]] * rows, drawn.completion_ids)
                table = policy.logprobs(batch).logprobs
        choices = [
            {
                "index": row,
                "text": drawn.texts[row],
                "logprobs": {
                    "token_logprobs": table[row, : len(ids)].tolist()
                    if self.raw_logprobs
                    else list(drawn.logprobs[row])
                },
                "finish_reason": drawn.stop_reasons[row],
                "token_ids": list(ids),
                "prompt_token_ids": body["prompt"],
            }
            for row, ids in enumerate(drawn.completion_ids)
        ]
        reply = {"object": "text_completion", "model": body["model"], "choices": choices}
        if self.alter is not None:
            self.alter(reply)
        return 200, reply


def _uniforms(seed: int, rows: int, cap: int) -> torch.Tensor:
    """Row k has a generator of its own, seeded with seed + k."""
    seeds = (torch.Generator().manual_seed(seed + row) for row in range(rows))
    return torch.stack([torch.rand(cap, dtype=torch.float64, generator=generator) for generator in seeds])


def _error(status: int, message: str, kind: str) -> Answer:
    return status, {"error": {"message": message, "type": kind, "param": None, "code": status}}


class _Handler(BaseHTTPRequestHandler):
    server: StandIn
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._reply({})

    def do_POST(self) -> None:
        self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _reply(self, body: Body) -> None:
        server = self.server
        with server.guard:
            server.asked.append((self.path, body))
        scripted = server.script(self.path, body) if server.script is not None else None
        if server.key is not None and self.headers["Authorization"] != f"Bearer {server.key}":
            scripted = _error(401, f"bad key {self.headers['Authorization']}", "Unauthorized")
        with server.guard:
            status, value = scripted or server.answer(self.path, body)
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on standard error."""
