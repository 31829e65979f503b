"""An event loop in a thread of its own: coroutines that wait for servers run there while this thread computes."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any


class Background:
    """Runs coroutines side by side from the moment they are started; `close` cancels those that still run."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> "Future[Any]":
        """Begin a coroutine; its result is waited for with `Future.result`."""
        if self._thread is None:
            ready = threading.Event()
            self._thread = threading.Thread(target=self._serve, args=(ready,), name="grpo_nb waits", daemon=True)
            self._thread.start()
            ready.wait()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Cancel what still runs and end the thread."""
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._thread = None

    def _serve(self, ready: threading.Event) -> None:
        with asyncio.Runner() as runner:  # on leaving it cancels every task and waits for their clean-up
            self._loop = runner.get_loop()
            ready.set()
            self._loop.run_forever()
