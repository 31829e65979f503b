"""Waits for a coroutine in synchronous code, in a thread with an event loop or without."""

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")


def wait_for(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Wait for a coroutine. A notebook cell already runs a loop in its thread, so there it gets a thread of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _complete(coroutine)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_complete, coroutine).result()


def _complete(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine in a loop of its own. An interrupt within it cancels it, and it cancels the tasks that it started
    itself.

    `asyncio.run` cancels all tasks at once, also those of libraries that have not begun; see `Background`.
    """
    with asyncio.Runner() as runner:
        task = runner.get_loop().create_task(coroutine)
        try:
            return runner.run(_result(task))
        finally:
            if not task.done():
                task.cancel()
                runner.run(_ended(task))


async def _result(task: "asyncio.Task[Result]") -> Result:
    return await task


async def _ended(task: "asyncio.Task[Any]") -> None:
    await asyncio.wait([task])
