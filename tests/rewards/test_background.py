"""The loop that waits for servers ends when it is told to."""

import asyncio
import threading

from grpo_nb.rewards.background import Background


def test_a_look_up_that_hangs_does_not_keep_it_from_ending() -> None:
    began, go_on = threading.Event(), threading.Event()

    def look_up() -> None:
        began.set()
        go_on.wait(60)

    async def ask() -> None:
        await asyncio.get_running_loop().run_in_executor(None, look_up)

    background = Background()
    asked = background.start(ask())
    assert began.wait(60)
    closing = threading.Thread(target=background.close)
    closing.start()
    closing.join(30)
    ended = not closing.is_alive()
    go_on.set()
    assert ended and asked.cancelled()
