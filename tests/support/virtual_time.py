"""An event loop whose clock jumps to the next thing that is due: seconds of waiting pass at once, always the same."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class _Jump(selectors.SelectSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "everything waits for something that never happens"
        self.now += timeout
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now


def run(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """The result of a coroutine that waits for nothing but its own loop's clock."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(coroutine)
