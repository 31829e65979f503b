"""A proxy that spoils a share of what passes through it: 429, 500, too slow, cut off, or garbage; seeded."""

import http.client
import json
import re
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from typing import Any
from urllib.parse import urlsplit

from tests.support.judge_server import completion

FAULTS = ("429", "500", "slow", "cut", "html", "prose", "half")
"""`html`, `prose` and `half` are garbage: a page, a completion that is no JSON, a JSON body that ends too soon."""
SOON = {"retry-after-ms": "5"}


class FaultProxy(ThreadingHTTPServer):
    """Stands in front of the server at `target`; `share` of the requests meets one of `faults`.

    Faults come in a shuffled order, each once before any comes twice: a few dozen requests meet them all. Which request
    meets which hangs on their order; with `by` on what it finds in the body, and on how often it found that before.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self,
        target: str,
        share: float = 0.3,
        seed: int = 0,
        slow: float = 0.6,
        faults: tuple[str, ...] = FAULTS,
        by: re.Pattern[bytes] | None = None,
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target, self.slow = urlsplit(target), slow
        self.done: Counter[str] = Counter()
        """How often each fault happened, and `none`."""
        self._random, self._share, self._faults, self._guard = Random(seed), share, faults, threading.Lock()
        self._next: list[str] = []
        self._seed, self._by, self._found = seed, by, Counter[bytes]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}{self.target.path}"

    def draw(self, body: bytes) -> str:
        with self._guard:
            fault = self._drawn() if self._by is None else self._drawn_by(self._by, body)
            self.done[fault] += 1
            return fault

    def _drawn(self) -> str:
        self._next = self._next or self._random.sample(self._faults, len(self._faults))
        return self._next.pop() if self._random.random() < self._share else "none"

    def _drawn_by(self, pattern: re.Pattern[bytes], body: bytes) -> str:
        (found,) = set(pattern.findall(body))
        self._found[found] += 1
        random = Random(f"{self._seed}/{found!r}/{self._found[found]}")
        return random.choice(self._faults) if random.random() < self._share else "none"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up on a slow answer is what this is for."""


class _Handler(BaseHTTPRequestHandler):
    server: FaultProxy
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        fault = self.server.draw(body)
        if fault in ("429", "500"):
            self._send(int(fault), b'{"error": {"message": "not now"}}', **SOON)
        elif fault == "html":
            self._send(200, b"<html>Welcome to the hotel's wireless network, 4 stars</html>", kind="text/html")
        elif fault == "prose":
            self._send(200, json.dumps(completion('I would say "score": 4, a fine answer')).encode())
        elif fault == "half":
            self._send(200, json.dumps(completion('{"reason": "", "score": 4}')).encode()[:-40])
        elif fault == "cut":
            self._send(200, b'{"choices": [{"mess', missing=500)
            self.close_connection = True
        else:
            if fault == "slow":
                threading.Event().wait(self.server.slow)
            self._send(*self._forwarded(body))

    def _forwarded(self, body: bytes) -> tuple[int, bytes]:
        target = self.server.target
        connection = http.client.HTTPConnection(target.hostname or "", target.port)
        try:
            headers = {name: self.headers[name] for name in ("Authorization", "Content-Type")}
            connection.request("POST", self.path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def _send(self, status: int, data: bytes, kind: str = "application/json", missing: int = 0, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data) + missing))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on standard error."""
