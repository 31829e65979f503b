"""The part of a long call that runs now is shown with its time, where a notebook waits for it."""

import sys
import threading
import time
from collections.abc import Callable

import pytest

from grpo_nb.metrics import phases
from grpo_nb.metrics.phases import timed
from tests.support.tokens import names


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the line has shown, in what counts as a notebook's kernel."""
    shown: list[str] = []
    monkeypatch.setattr(phases, "_show", shown.append)
    monkeypatch.setattr(phases, "SECONDS", 0.01)
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    monkeypatch.setattr("IPython.core.getipython.get_ipython", lambda: shown)
    return shown


def until(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.01)


def test_a_part_is_named_with_how_far_it_is_and_its_time(shown: list[str]) -> None:
    with timed("answering") as say:
        until(lambda: shown)
        say("3 of 7")
        until(lambda: "3 of 7" in shown[-1])
    assert names(shown[0], "answering", "0 s") and names(shown[-2], "answering, 3 of 7")
    assert shown[-1] == "", "nothing is left"


def test_of_two_parts_the_inner_one_is_shown(shown: list[str]) -> None:
    with timed("outer"):
        until(lambda: shown)
        with timed("inner"):
            until(lambda: "inner" in shown[-1])
            so_far = len(shown)
            until(lambda: len(shown) > so_far + 2)
            assert not [text for text in shown[so_far:] if "outer" in text]
        until(lambda: "outer" in shown[-1])


def test_a_part_that_fails_leaves_nothing(shown: list[str]) -> None:
    with pytest.raises(ZeroDivisionError), timed("fails"):
        until(lambda: shown)
        _ = 1 / 0
    assert shown[-1] == "" and not [t for t in threading.enumerate() if t.name == "grpo_nb phase"]


def test_threads_and_scripts_show_no_line(shown: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def part() -> None:
        with timed("in a worker") as say:
            say("on")
            time.sleep(0.05)

    worker = threading.Thread(target=part)
    worker.start()
    worker.join()
    monkeypatch.delitem(sys.modules, "ipykernel")
    part()
    assert shown == []


def test_ipykernel_without_a_kernel_shows_no_line(shown: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("IPython.core.getipython.get_ipython", lambda: None)
    with timed("in a script"):
        time.sleep(5 * phases.SECONDS)
    assert not shown
