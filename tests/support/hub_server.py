"""A hub behind HTTP: repositories are made, files arrive in a commit or by LFS, and every request is kept."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class HubServer(ThreadingHTTPServer):
    """`token` is the one that may write; `lfs` are endings of files that do not travel in the commit."""

    daemon_threads = True

    def __init__(self, token: str, lfs: tuple[str, ...] = (".safetensors", ".gguf")) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.token, self.lfs = token, lfs
        self.repositories: dict[str, dict[str, Any]] = {}
        """What each was made with."""
        self.files: dict[str, bytes] = {}
        """Of the newest commit, by path."""
        self.objects: dict[str, bytes] = {}
        self.paths: list[str] = []
        self.refuses = 0
        """Status of every answer, where it is not 0; the body repeats what was sent."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: HubServer

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self._answer(404, {"error": "not found"})

    def do_PUT(self) -> None:
        self.server.objects[self.path.rpartition("/")[2]] = self._body()
        self._answer(200, {})

    def do_POST(self) -> None:
        body = self._body()
        self.server.paths.append(self.path)
        sent = self.headers.get("authorization", "")
        if self.server.refuses:
            return self._answer(self.server.refuses, {"error": f"refused {sent}"})
        if sent != f"Bearer {self.server.token}":
            return self._answer(401, {"error": "who are you"})
        if self.path == "/api/validate-yaml":
            return self._answer(200, {"errors": [], "warnings": []})
        if self.path == "/api/repos/create":
            return self._create(json.loads(body))
        if "/preupload/" in self.path:
            files = [{"path": f["path"], "uploadMode": self._mode(f["path"])} for f in json.loads(body)["files"]]
            return self._answer(200, {"files": [f | {"shouldIgnore": False} for f in files]})
        if self.path.endswith("/info/lfs/objects/batch"):
            return self._batch(json.loads(body)["objects"])
        if "/commit/" in self.path:
            return self._commit(body)
        return self._answer(404, {"error": self.path})

    def _mode(self, path: str) -> str:
        return "lfs" if path.endswith(self.server.lfs) else "regular"

    def _create(self, asked: dict[str, Any]) -> None:
        name = "/".join(part for part in (asked.get("organization"), asked["name"]) if part)
        self.server.repositories.setdefault(name, asked)
        self._answer(200, {"url": f"{self.server.url}/{name}", "name": name})

    def _batch(self, objects: list[dict[str, Any]]) -> None:
        found = [o | {"actions": {"upload": {"href": f"{self.server.url}/put/{o['oid']}"}}} for o in objects]
        self._answer(200, {"transfer": "basic", "objects": found})

    def _commit(self, body: bytes) -> None:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                self.server.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.server.files[value["path"]] = self.server.objects[value["oid"]]
        self._answer(200, {"commitUrl": f"{self.server.url}/a/b/commit/{'0' * 40}", "commitOid": "0" * 40})

    def _body(self) -> bytes:
        if "chunked" in self.headers.get("transfer-encoding", ""):
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("content-length", 0)))

    def _answer(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serving(server: HubServer) -> Iterator[HubServer]:
    """The server, running in a thread of its own."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
