"""A server in the OpenAI format that gives any answer a score: `python -m grpo_nb.dev.judge_server --latency 3`.

Each reply comes after the latency; beyond the rate, a 429 comes at once. The port is the first line of its output.
"""

import argparse
import json
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class JudgeServer(ThreadingHTTPServer):
    """Scores by a checksum of the request."""

    daemon_threads = True
    request_queue_size = 512

    def __init__(self, latency: float, rate: float | None, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.latency, self.rate = latency, rate
        self._left, self._at, self._guard = rate or 0.0, time.monotonic(), threading.Lock()

    def admits(self) -> bool:
        """Whether the rate allows one more request; a second's worth may come at once."""
        if self.rate is None:
            return True
        with self._guard:
            now = time.monotonic()
            self._left, self._at = min(self.rate, self._left + (now - self._at) * self.rate), now
            if self._left < 1:
                return False
            self._left -= 1
            return True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that did not wait."""


class _Handler(BaseHTTPRequestHandler):
    server: JudgeServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if not self.server.admits():
            return self._send(429, {"error": {"message": f"more than {self.server.rate:g} requests a second"}})
        time.sleep(self.server.latency)
        verdict = json.dumps({"reason": "by its checksum", "score": zlib.crc32(body) % 5})
        message = {"role": "assistant", "content": verdict}
        return self._send(
            200,
            {
                "id": "verdict",
                "object": "chat.completion",
                "created": 0,
                "model": "checksum",
                "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
                "usage": {
                    "prompt_tokens": len(body) // 4,
                    "completion_tokens": 12,
                    "total_tokens": len(body) // 4 + 12,
                },
            },
        )

    def _send(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Type": "application/json", "Content-Length": str(len(data))}.items():
            self.send_header(name, text)
        if status == 429:
            self.send_header("Retry-After", "1")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing on standard error."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m grpo_nb.dev.judge_server", description=__doc__)
    parser.add_argument("--latency", type=float, default=0.0, help="seconds")
    parser.add_argument("--rate", type=float, help="requests a second")
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args(argv)
    with JudgeServer(arguments.latency, arguments.rate, arguments.port) as server:
        sys.stdout.write(f"{server.server_address[1]}\n")
        sys.stdout.flush()
        server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
