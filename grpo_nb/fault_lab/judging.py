"""A judge for the lab: a server on this machine whose replies a fault decides."""

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any

from grpo_nb.fault_lab.records import Patient

Answers = Callable[[int, Mapping[str, str]], tuple[int, str]]
"""Number of the request and the parts of its material -> status and the judge's text."""

_PART = re.compile(
    r"^(?P<title>[A-Z ]+) begins (?P<code>\w{16})\n(?P<text>.*?)\n(?P=title) ends (?P=code)$", re.M | re.S
)


def verdict(score: int) -> str:
    """Verdict in the form that the judge's prompt requests."""
    return json.dumps({"reason": "as the text says", "score": score})


@contextmanager
def judged(patient: Patient, answers: Answers) -> Iterator[None]:
    """The last objective has a judge, which is at work inside the block."""
    with _serving(answers) as url:
        name = [*patient.run.config.objectives][-1]
        provider = {"model": "lab", "base_url": url, "api_key_env": None}
        how = {"providers": [provider], "retries": 0, "cache": False, "concurrency": 4}
        patient.change(**{f"objectives__{name}__judge": how})
        yield


@contextmanager
def _serving(answers: Answers) -> Iterator[str]:
    server = _Server(answers)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, answers: Answers) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers, self.numbers = answers, count(1)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that did not wait."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        parts = {m["title"]: m["text"] for m in _PART.finditer(body["messages"][-1]["content"])}
        status, text = self.server.answers(next(self.server.numbers), parts)
        message = {"role": "assistant", "content": text}
        data = json.dumps({
            "id": "x", "object": "chat.completion", "created": 0, "model": "lab",
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
            "usage": {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110},
        }).encode()  # fmt: skip
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing on standard error."""
