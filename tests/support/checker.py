"""The type checkers that tests run under: beartype, hints read as mypy does, and jaxtyping where there are axes."""

import functools
import inspect
import random
import threading
import typing
from collections.abc import Callable
from dataclasses import is_dataclass
from types import CodeType
from typing import Any

import jaxtyping
from beartype import BeartypeConf, FrozenDict, beartype
from beartype._check.code import codemain

# Which item of a list is looked at is drawn: not from the generator that tests use and hypothesis watches, since a
# check may run at any moment, in another thread or when a generator is collected.
codemain.getrandbits = random.Random(0).getrandbits

CALLS = 16
"""Calls of a function that are checked in one test: a loop's later ones are like its first ones."""
_tests = 0
_shared: dict[CodeType, Callable[..., Any]] = {}
"""What checks the functions made by each inner `def`: written for each of them anew, it takes longer than they do."""
_turn = threading.local()
"""`function`: that of them which is called now."""

check = beartype(
    conf=BeartypeConf(
        is_pep484_tower=True,  # an int is a fine float
        hint_overrides=FrozenDict({typing.Self: typing.Any}),  # Self needs a whole class, hooks see methods
    )
)
shaped = jaxtyping.jaxtyped


def install(package: str) -> None:
    """Check every call of the package, of the modules that are imported from now on.

    jaxtyping's hook decorates each function with `jaxtyping.jaxtyped`, which binds the arguments to names in Python
    at every call, to have the sizes of their axes. That was half of the suite's time, so `jaxtyped` here does it for
    the functions that have axes only; `check` is told the hints of the others as they are.
    """
    jaxtyping.install_import_hook(package, f"{__name__}.check")
    jaxtyping.jaxtyped = jaxtyped


def begin() -> None:
    """A test begins: the first calls of every function are checked again."""
    global _tests
    _tests += 1


def jaxtyped(target: Any = None, *, typechecker: Callable[[Any], Any]) -> Any:
    """Takes the place of `jaxtyping.jaxtyped` in the hook: a decorator of functions and, by `__init__`, dataclasses."""
    if target is None:
        return functools.partial(jaxtyped, typechecker=typechecker)
    if target.__module__.endswith("_triton"):
        return target  # Triton compiles the function itself, with the names of its module
    if not inspect.isclass(target):
        if "<locals>" in target.__qualname__ and not _runs_in_parts(target):
            return _checked_inner(target, typechecker)
        return _checked(target, _checker(target, typechecker))
    if is_dataclass(target):
        target.__init__ = jaxtyped(target.__init__, typechecker=typechecker)
    return target


def _checker(function: Callable[..., Any], typechecker: Callable[[Any], Any]) -> Callable[..., Any]:
    return functools.partial(shaped, typechecker=typechecker) if _needs_jaxtyping(function) else typechecker


def _checked_inner(function: Callable[..., Any], typechecker: Callable[[Any], Any]) -> Callable[..., Any]:
    shared = _shared.get(function.__code__)
    if shared is None:

        @functools.wraps(function)
        def current(*args: Any, **kwargs: Any) -> Any:
            return _turn.function(*args, **kwargs)

        shared = _shared[function.__code__] = _checked(current, _checker(function, typechecker))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _turn.function = function
        return shared(*args, **kwargs)

    return call


def _checked(function: Callable[..., Any], checker: Callable[[Any], Any]) -> Callable[..., Any]:
    """The check is written at the first call: most functions are never called in one process of tests."""
    checked: Callable[..., Any] | None = None
    test, left = 0, CALLS

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal checked, test, left
        if test != _tests:
            test, left = _tests, CALLS
        if left <= 0 or jaxtyping.config.jaxtyping_disable:
            return function(*args, **kwargs)
        left -= 1
        checked = checked or checker(function)
        return checked(*args, **kwargs)

    return call


def _needs_jaxtyping(function: Callable[..., Any]) -> bool:
    """A hint has axes, or cannot be read (jaxtyping then passes over it alone), or the call runs in parts."""
    if _runs_in_parts(function):
        return True
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception:
        return True
    return any(map(_has_axes, hints.values()))


def _runs_in_parts(function: Callable[..., Any]) -> bool:
    return inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function)


def _has_axes(hint: Any) -> bool:
    if isinstance(hint, list):  # the parameters of a Callable
        return any(map(_has_axes, hint))
    if inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(map(_has_axes, typing.get_args(hint)))
