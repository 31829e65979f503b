"""A real server in the OpenAI format that grades by fixed rules: what it gave to which text is written down.

It reads the request as an ideal judge would: the parts between the fence's lines are data, the rest is its order.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]
Grade = Callable[[dict[str, str]], int]
_PART = re.compile(
    r"^(?P<title>[A-Z ]+) begins (?P<code>[0-9a-f]{16})\n(?P<text>.*?)\n(?P=title) ends (?P=code)$", re.M | re.S
)


def parts_of(body: Body) -> dict[str, str]:
    """Title -> text of every fenced part of a request, with whatever lies outside under the empty title."""
    content = body["messages"][-1]["content"]
    found = {match["title"]: match["text"] for match in _PART.finditer(content)}
    return {**found, "": _PART.sub("", content)}


def by_text(parts: dict[str, str]) -> int:
    """A grade that differs between texts and is always the same for one."""
    return sum(parts["ANSWER"].encode()) % 5


def by_reference(parts: dict[str, str]) -> int:
    """4 where the answer holds the right one, else 1; whoever gives orders outside the fence is obeyed."""
    if "give 10" in parts[""] or "score 4" in parts[""].replace('"', ""):
        return 4
    right = parts.get("RIGHT ANSWER") or parts["RIGHT OPTION"].partition(". ")[2]
    return 4 if right.lower().rstrip(".") in parts["ANSWER"].lower() else 1


class JudgeServer(ThreadingHTTPServer):
    """`grade` decides; `key` is what it wants as bearer token; what it refuses is answered with 400."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, grade: Grade = by_text, key: str | None = None, refuses: tuple[str, ...] = ()) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.grade, self.key, self.refuses = grade, key, refuses
        self.says: Callable[[Body], str] | None = None
        """What it writes in place of a verdict."""
        self.reply: Any = None
        """What it sends in place of a completion; bytes as they are."""
        self.headers: dict[str, str] = {}
        """Sent with every reply besides its type and length."""
        self.script: Callable[[Body], tuple[int, Any] | None] | None = None
        """Status and body in place of everything else, where it gives any."""
        self.drip = 0.0
        """Seconds after each byte of a body."""
        self.delay = 0.0
        self.bodies: list[Body] = []
        """Every request that reached it."""
        self.given: list[tuple[str, int]] = []
        """(answer, score) of every verdict that it sent."""
        self.busy = self.busiest = 0
        self.guard = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that did not wait is no news."""


@contextmanager
def serving(server: Any) -> Iterator[Any]:
    """The server at work in a thread of its own."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: JudgeServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.guard:
            server.bodies.append(body)
            server.busy += 1
            server.busiest = max(server.busiest, server.busy)
        try:
            self._answer(body)
        finally:
            with server.guard:
                server.busy -= 1

    def _answer(self, body: Body) -> None:
        server = self.server
        if server.delay:
            threading.Event().wait(server.delay)
        if server.key is not None and self.headers["Authorization"] != f"Bearer {server.key}":
            return self._send(401, {"error": {"message": f"bad key in {self.headers['Authorization']}"}})
        if server.script is not None and (scripted := server.script(body)) is not None:
            return self._send(*scripted)
        if refused := [name for name in server.refuses if name in body]:
            return self._send(400, {"error": {"message": f"unsupported parameter: {refused[0]}"}})
        if server.reply is not None:
            return self._send(200, server.reply)
        if server.says is not None:
            return self._send(200, completion(server.says(body)))
        parts = parts_of(body)
        score = server.grade(parts)
        with server.guard:
            server.given.append((parts["ANSWER"], score))
        return self._send(200, completion(json.dumps({"reason": "by the rules", "score": score})))

    def _send(self, status: int, value: Any) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in self.server.headers.items():  # type: ignore[attr-defined]
            self.send_header(name, value)
        self.end_headers()
        if not self.server.drip:
            self.wfile.write(data)
        for i in range(len(data) if self.server.drip else 0):
            self.wfile.write(data[i : i + 1])
            threading.Event().wait(self.server.drip)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on standard error."""


def completion(text: str, ended: str = "stop") -> Body:
    return {
        "id": "x",
        "object": "chat.completion",
        "created": 0,
        "model": "rules",
        "choices": [{"index": 0, "finish_reason": ended, "message": {"role": "assistant", "content": text}}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110},
    }
