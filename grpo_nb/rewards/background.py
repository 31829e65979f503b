"""An event loop in a thread of its own: coroutines that wait for servers run there while this thread computes."""

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")


class Arrivals(Generic[Item]):
    """Queue from other threads to `async for`, which yields items in order until `end`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._items = loop, asyncio.Queue[tuple[Item] | None]()

    def put(self, item: Item) -> None:
        """Hand an item over; never waits."""
        self._loop.call_soon_threadsafe(self._items.put_nowait, (item,))

    def end(self) -> None:
        """End the iteration after the items so far."""
        self._loop.call_soon_threadsafe(self._items.put_nowait, None)

    async def __aiter__(self) -> AsyncIterator[Item]:
        while (boxed := await self._items.get()) is not None:
            yield boxed[0]


class _Unwaited(ThreadPoolExecutor):
    """Thread pool whose blocked work, such as a host look-up, does not keep the loop from ending."""

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait=False, cancel_futures=True)


class Loop:
    """An event loop in a thread of its own, from the first time that it is needed until `close`."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop
        self._closing: asyncio.Event

    @property
    def runs(self) -> bool:
        """Whether the loop has begun and is not closed."""
        return self._thread is not None

    def running(self) -> asyncio.AbstractEventLoop:
        """The loop itself."""
        if self._thread is None:
            ready = threading.Event()
            self._thread = threading.Thread(target=self._serve, args=(ready,), name="grpo_nb waits", daemon=True)
            self._thread.start()
            ready.wait()
        return self._loop

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()
            self._thread = None

    def _serve(self, ready: threading.Event) -> None:
        with asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            self._loop.set_default_executor(_Unwaited(thread_name_prefix="grpo_nb names"))
            runner.run(self._until_closed(ready))

    async def _until_closed(self, ready: threading.Event) -> None:
        self._closing = asyncio.Event()
        ready.set()
        await self._closing.wait()


class Background:
    """Runner of coroutines, concurrently from the moment they are started; `close` cancels those that still run."""

    def __init__(self, loop: Loop | None = None) -> None:
        """`loop`: a shared loop that stays open; None: create one."""
        self._loop, self._own = loop or Loop(), loop is None
        self._running: set[asyncio.Task[Any]] = set()
        """Tasks that were started and have not ended."""

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> "Future[Any]":
        """Begin a coroutine; its result is waited for with `Future.result`."""
        return asyncio.run_coroutine_threadsafe(self._run(coroutine), self._loop.running())

    def arrivals(self) -> Arrivals[Any]:
        """Queue to a coroutine that was started here, or will be."""
        return Arrivals(self._loop.running())

    def close(self) -> None:
        """Cancel what still runs and wait for its clean-up; end the thread, where it is its own."""
        if self._loop.runs:
            asyncio.run_coroutine_threadsafe(self._cancel(), self._loop.running()).result()
        if self._own:
            self._loop.close()

    async def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            return await coroutine
        finally:
            self._running.discard(task)

    async def _cancel(self) -> None:
        """Cancel the started tasks, and let each cancel its own.

        A runner that is left cancels all tasks of its loop at once, also those of libraries that have not begun: a
        connection attempt of anyio is then a coroutine that nobody awaits.
        """
        running = [*self._running]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
