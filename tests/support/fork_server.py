"""Runs Python command lines in forks of a process that has imported the slow packages.

A script, not a module of the tests: it must import nothing of theirs, and nothing of grpo_nb, which each fork imports
afresh from wherever its PYTHONPATH says. `fork_client.py` asks for one process a connection; see `forked.py`.
"""

import atexit
import errno
import gc
import importlib
import io
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "transformers.modeling_utils",
    "transformers.models.llama.modeling_llama",
    "peft",
    "pandas",
    "safetensors.torch",
    "pydantic",
    "jinja2",
    "psutil",
    "jaxtyping",
    "PIL.Image",
)
"""What takes a trainer or a kernel seconds to import. Not what reads at its import whether a kernel is near:
matplotlib takes the backend from the environment, and the package looks for IPython and ipykernel among the modules."""
AFRESH = ("tqdm.auto", "tqdm.autonotebook")
"""The packages import these as well; they choose a bar at their import, by whether a kernel is near."""
READ_AT_IMPORT = ("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TORCH", "PYTORCH_", "OMP_", "MKL_", "CUDA_", "PYTHON", "LC_")
"""Environment variables that the packages, or Python as it starts, have read: a fork must have the server's."""
SET_LATER = ("PYTHONPATH", "PYTHONUNBUFFERED")
"""Those of them that a fork can take on."""
LENGTH = struct.Struct("!q")
Request = dict[str, Any]


def packages() -> None:
    """Import them in one thread: a fork has no other."""
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # of pyarrow's allocator, as it loads
    for name in PACKAGES:
        with suppress(ModuleNotFoundError):  # an optional one
            importlib.import_module(name)
    del os.environ["JE_ARROW_MALLOC_CONF"]
    for name in AFRESH:
        sys.modules.pop(name, None)
    threads = [Path(f"/proc/self/task/{thread}/comm").read_text() for thread in os.listdir("/proc/self/task")]
    if len(threads) != 1:
        sys.exit(f"a package starts a thread as it is imported, which no fork would have: {threads}")
    gc.collect()
    gc.freeze()  # else the first collection of each fork would copy all of it


def keep(modules: list[str]) -> None:
    """At a fork's end Python takes each module apart, in a third of a second: it does not see those of the packages."""
    kept: list[Any] = [sys.modules.pop(name, None) for name in modules]
    kept.append(kept)
    gc.freeze()


class Server:
    """Connections, and the process of each that asked for one; it ends with the last connection."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.selector = selectors.DefaultSelector()
        self.children: dict[int, socket.socket] = {}
        self.wake, self.waker = os.pipe()
        os.set_blocking(self.waker, False)
        signal.set_wakeup_fd(self.waker)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector.register(listener, selectors.EVENT_READ)
        self.selector.register(self.wake, selectors.EVENT_READ)
        self.environment = {name: value for name, value in os.environ.items() if read_at_import(name)}

    def serve(self) -> Request:
        """Returns in the forks alone, with what to run."""
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is self.listener:
                    self.accept()
                elif key.fd == self.wake:
                    os.read(self.wake, 64)
                    self.reap()
                elif isinstance(key.fileobj, socket.socket) and (request := self.hear(key.fileobj)) is not None:
                    return request

    def accept(self) -> None:
        connection, _ = self.listener.accept()
        _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.getuid():
            connection.close()
            return
        connection.sendall(b"+")
        self.selector.register(connection, selectors.EVENT_READ)

    def hear(self, connection: socket.socket) -> Request | None:
        """Fork for a request, whose text the fork returns. At the end of a connection its process is killed."""
        try:
            head, files, _, _ = socket.recv_fds(connection, LENGTH.size, 3)
        except ConnectionError:
            head, files = b"", []
        if not head:
            self.end(connection)
            return None
        (length,) = LENGTH.unpack(head)
        request: Request = json.loads(connection.recv(length, socket.MSG_WAITALL))
        new = {name: value for name, value in request["environment"].items() if read_at_import(name)}
        if differing := sorted(name for name, _ in new.items() ^ self.environment.items()):
            os.write(files[2], f"the fork server has another {', '.join(differing)}: use sys.executable\n".encode())
            self.answer(connection, 0, LENGTH.pack(2 << 8))
            pid = 0
        elif pid := os.fork():
            self.children[pid] = connection
            self.answer(connection, pid)
        else:
            self.forget()
            return request | {"files": files}
        for file in files:
            os.close(file)
        return None

    def forget(self) -> None:
        """In a fork: nothing of the server is left open, and signals do what they do in a new process."""
        signal.set_wakeup_fd(-1)
        for key in list(self.selector.get_map().values()):
            os.close(key.fd) if isinstance(key.fileobj, int) else key.fileobj.close()  # type: ignore[union-attr]
        self.selector.close()
        os.close(self.waker)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def reap(self) -> None:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                self.answer(self.children.pop(pid), LENGTH.pack(status))

    def answer(self, connection: socket.socket, pid_or_status: int | bytes, more: bytes = b"") -> None:
        text = LENGTH.pack(pid_or_status) if isinstance(pid_or_status, int) else pid_or_status
        with suppress(OSError):
            connection.sendall(text + more)

    def end(self, connection: socket.socket) -> None:
        self.selector.unregister(connection)
        for pid, of in self.children.items():
            if of is connection:
                for kill in (os.killpg, os.kill):  # its client was killed, perhaps before it had a group of its own
                    with suppress(ProcessLookupError):
                        kill(pid, signal.SIGKILL)
        connection.close()
        if len(self.selector.get_map()) == 2:
            sys.exit()


def read_at_import(name: str) -> bool:
    return name.startswith(READ_AT_IMPORT) and name not in SET_LATER


def become(request: Request, found: list[str]) -> None:
    """Take on the working directory, environment, files and arguments of a new Python process, and run its code."""
    os.setsid()
    for number, file in enumerate(request["files"]):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    streams()
    option, code, *arguments = request["arguments"]
    sys.orig_argv = [sys.executable, *request["arguments"]]
    sys.argv = [option, *arguments]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = ["" if option == "-c" else os.getcwd(), *paths, *found]
    importlib.invalidate_caches()
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    if option == "-c":
        exec(compile(code, "<string>", "exec"), main.__dict__)
    else:
        runpy._run_module_as_main(code)  # type: ignore[attr-defined]  # what the interpreter calls for -m


def streams() -> None:
    """Standard streams as Python makes them when it starts."""
    at_once = bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        raw = io.FileIO(number, "w" if number else "r", closefd=False)
        raw.name = f"<{name}>"
        buffer: Any = io.BufferedReader(raw) if not number else raw if at_once else io.BufferedWriter(raw)
        stream = io.TextIOWrapper(
            buffer,
            encoding=sys.stdout.encoding if sys.stdout else "utf-8",
            errors="backslashreplace" if number == 2 else "strict",
            line_buffering=number == 2 or raw.isatty(),
            write_through=at_once,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def listen(name: str) -> socket.socket:
    """An abstract address, which ends with the process: a second server of that name ends here."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(f"\0{name}")
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        sys.exit(0)
    listener.listen(64)
    return listener


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server, ours = Server(listen(sys.argv[1])), []
    atexit.register(keep, ours)  # before any package's, so that it comes after them
    packages()
    ours += [name for name in sys.modules if name.partition(".")[0] not in sys.stdlib_module_names]
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    found = [path for path in sys.path[1:] if path not in own]
    become(server.serve(), found)
