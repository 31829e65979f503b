"""What the tests rely on: a call of the package with wrong types or axes fails, with and without axes in its hints."""

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support import checker

SOURCE = """
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


def double(number: int) -> int:
    return number * 2 if number else "nothing"


def add(a: Float[Tensor, "rows columns"], b: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
    return a + b


def apply(function: Callable[[Float[Tensor, "rows"]], float], to: Float[Tensor, "rows"]) -> float:
    return function(to)


def count(to: int) -> Iterator[int]:
    yield from range(to)


def local(number: int) -> int:
    def inner(text: str) -> str:
        return text

    return len(inner(number))


def counted(by: int) -> Callable[[int], int]:
    def count_down(number: int) -> int:
        return count_down(number - by) if number > 0 else number

    return count_down


@dataclass(frozen=True)
class Plain:
    number: int

    def plus(self, other: int) -> int:
        return self.number + other

    @property
    def half(self) -> int:
        return self.number / 2

    @classmethod
    def of(cls, number: int) -> "Plain":
        return Plain(number)


@dataclass(frozen=True)
class Shaped:
    a: Float[Tensor, "rows"]
    b: Float[Tensor, "rows"]
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A module that is imported as the package is."""
    folder, name = tmp_path_factory.mktemp("package"), "checked_in_tests"
    Path(folder, f"{name}.py").write_text(SOURCE)
    finders = list(sys.meta_path)
    sys.path.insert(0, str(folder))
    checker.install(name)
    module: ModuleType = __import__(name)
    yield module
    sys.path.remove(str(folder))
    sys.meta_path[:] = finders
    del sys.modules[name]


def refused(call: Any) -> bool:
    try:
        call()
    except Exception as error:
        assert type(error).__module__.split(".")[0] in ("beartype", "jaxtyping"), error
        return True
    return False


def test_right_calls_pass(made: Any) -> None:
    two = torch.zeros(2)
    assert made.double(2) == 4 and made.Plain(3).plus(4) == 7 and made.Plain.of(1).number == 1
    assert made.add(torch.ones(2, 3), torch.ones(2, 3)).sum() == 12
    assert list(made.count(2)) == [0, 1] and made.apply(lambda row: 0.5, two) == 0.5
    assert made.Shaped(two, two).a is two


def test_wrong_types_are_refused(made: Any) -> None:
    plain = made.Plain(3)
    wrong = [
        lambda: made.double("2"), lambda: made.double(0), lambda: made.local(3), lambda: made.count("2"),
        lambda: made.Plain("3"), lambda: plain.plus("4"), lambda: plain.half, lambda: made.Plain.of("1"),
    ]  # fmt: skip
    assert [refused(call) for call in wrong] == [True] * len(wrong)


def test_wrong_axes_are_refused(made: Any) -> None:
    wrong = [
        lambda: made.add(torch.ones(2, 3), torch.ones(3, 2)),
        lambda: made.apply(len, torch.ones(2, 3)),
        lambda: made.Shaped(torch.ones(2), torch.ones(3)),
    ]
    assert [refused(call) for call in wrong] == [True] * len(wrong)


def test_functions_of_one_inner_def_share_a_check_and_keep_their_own_variables(made: Any) -> None:
    by_two, by_five = made.counted(2), made.counted(5)
    assert (by_two(7), by_five(7), by_two(1)) == (-1, -3, -1)
    assert refused(lambda: by_two("7")) and refused(lambda: by_five("7"))
    assert refused(lambda: made.counted("5")(7)), "what it was made with is checked as well"


def test_the_first_calls_in_each_test_are_checked(made: Any) -> None:
    calls = [refused(lambda: made.double("2")) for _ in range(checker.CALLS + 1)]
    assert calls == [True] * checker.CALLS + [False]
    checker.begin()
    assert refused(lambda: made.double("2"))


def test_nothing_is_checked_where_a_test_asks_for_it(made: Any, unchecked: None) -> None:
    assert made.double("2") == "22" and made.double(0) == "nothing" and made.Plain("3").number == "3"
    assert made.Shaped(torch.ones(2), torch.ones(3)).b.shape == (3,)


def test_a_check_leaves_the_random_numbers_of_its_test_alone() -> None:
    @checker.check
    def total(numbers: list[int]) -> int:
        return sum(numbers)

    before = random.getstate()
    assert [total([*range(n)]) for n in range(1, 9)][-1] == 28 and random.getstate() == before
