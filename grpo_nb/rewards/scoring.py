"""The scores of completions by a rubric: reward functions are called, waited for, checked, and added up."""

import asyncio
import inspect
import itertools
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_nb.rewards.background import Arrivals, Background, Loop
from grpo_nb.rewards.context import Notes
from grpo_nb.rewards.foreign_code import LONGEST_ERROR, RewardError, calling, error_text, kind
from grpo_nb.rewards.rubric import AFTER_THINKING, FINITE, LARGEST, TASK, Rubric, Weighted
from grpo_nb.rewards.waiting import wait_for
from grpo_nb.tasks import Task
from grpo_nb.tasks.thinking import after_thinking
from grpo_nb.types import Example, Score

LONGEST_LABEL = 200
"""Characters of a label, which is a key of the log."""


@dataclass(frozen=True)
class Completions:
    """B completions to score."""

    examples: Sequence[Example]
    """[B] the example of each completion."""
    texts: Sequence[str]
    """[B] texts for reward functions."""
    ids: Sequence[Sequence[int]]
    """[B] token ids."""
    marked: Sequence[str] | None = None
    """[B] texts for the task (`Rollouts.scored_texts`); None: `texts`."""
    notes: Notes | None = None
    """Receives what reward functions log; None: the values are checked and discarded."""


def score(rubric: Rubric, completions: Completions) -> list[Score]:
    """Scores of completions, in order.

    Raises:
        RewardError: a reward function, or the task, raised or returned an invalid reward.
    """
    with Scoring() as scoring:
        scoring.add(rubric, completions)
        return scoring.scores()


@dataclass
class _Early:
    """Functions of a rubric that take completions as they end, while they run."""

    arrivals: list[Arrivals[tuple[int, str]]] = field(default_factory=list)
    waiting: "dict[str, Future[Any]]" = field(default_factory=dict)
    taken: dict[int, str] = field(default_factory=dict)
    """Texts that were passed on, by place."""

    def take(self, place: int, answer: str) -> None:
        if self.taken.get(place) != answer:
            self.taken[place] = answer
            for arrivals in self.arrivals:
                arrivals.put((place, answer))

    def end(self, answers: Sequence[str]) -> None:
        """Take all answers; those not passed on yet are passed on now."""
        for place, answer in enumerate(answers):
            self.take(place, answer)
        for arrivals in self.arrivals:
            arrivals.end()


@dataclass
class _Part:
    """The completions of one objective and their scores so far."""

    rubric: Rubric
    examples: Sequence[Example]
    texts: Sequence[str]
    """Texts that the task reads."""
    arguments: Callable[[], dict[str, Any]]
    waiting: "dict[str, Future[Any]]" = field(default_factory=dict)
    """Pending results of functions that only wait."""
    results: dict[str, Any] = field(default_factory=dict)
    own: list[Score] = field(default_factory=list)


class Scoring:
    """Scoring of several objectives: servers are waited for all at once, and in the background.

    A reward function with a coroutine method `as_they_end(arrivals, **columns)`, as a judge's, runs in the background
    from `expect` on: `arrivals` gives (place, what follows the thinking of the completion), asynchronously and in any
    order, the columns are lists by place, and it returns what a function does. One whose `only_waits` is true runs
    there from `add` on. The tasks and all other functions run in `settle`, in this thread and in order, after the
    drawing, which they would slow; their async ones side by side at its end. Leaving the block cancels what still runs.
    """

    def __init__(self, by: "TaskScores | None" = None, loop: Loop | None = None) -> None:
        """`by`: function for the tasks' own scores; None: `task_scores`. `loop`: event loop that waits for servers,
        shared with other steps; None: one of its own.
        """
        self._task_scores = by or task_scores
        self._early: dict[Rubric, _Early] = {}
        self._parts: list[_Part] = []
        self._settled = False
        self._background = Background(loop)

    def __enter__(self) -> "Scoring":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what still runs."""
        self._background.close()
        for unwanted in (result for part in self._parts for result in part.results.values()):
            if inspect.iscoroutine(unwanted):
                unwanted.close()  # else Python warns that it was never awaited, above the error that counts

    def expect(self, rubric: Rubric, examples: Sequence[Example]) -> bool:
        """Start the functions that take completions as they end, by the examples alone; return whether any exist."""
        early = self._early[rubric] = _Early()
        for entry in rubric.functions if examples else ():
            if begin := getattr(entry.function, "as_they_end", None):
                arrivals = self._background.arrivals()
                early.arrivals.append(arrivals)
                early.waiting[entry.name] = self._background.start(begin(arrivals, **_columns(examples)))
        return bool(early.arrivals)

    def take(self, rubric: Rubric, place: int, text: str) -> None:
        """Pass on a completion while others are sampled; `text` is what the task reads."""
        self._early[rubric].take(place, after_thinking(text))

    def add(self, rubric: Rubric, completions: Completions) -> None:
        """Take all completions of an objective, and start the functions that only wait.

        Raises:
            RewardError: such a function cannot be called.
        """
        examples, texts, read = completions.examples, completions.texts, completions.marked or completions.texts
        notes = (completions.notes or Notes(len(texts))).arguments()
        notes[AFTER_THINKING] = [after_thinking(text) for text in read]
        part = _Part(rubric, examples, read, lambda: _arguments(examples, texts, completions.ids) | notes)
        self._parts.append(part)
        if rubric not in self._early:
            self.expect(rubric, examples)
        early = self._early.pop(rubric)
        early.end(notes[AFTER_THINKING])
        part.waiting |= early.waiting
        for entry in rubric.functions if texts else ():
            if entry.name not in part.waiting and getattr(entry.function, "only_waits", False):
                part.waiting[entry.name] = self._background.start(_call(entry, part.arguments()))

    def settle(self) -> None:
        """Score all that needs this thread.

        Raises:
            RewardError: as `score`.
        """
        self._settled = True
        for part in self._parts:
            part.own = self._task_scores(part.rubric.task, part.examples, part.texts)
            for entry in part.rubric.functions if part.texts else ():
                if entry.name not in part.waiting:
                    part.results[entry.name] = _call(entry, part.arguments())
        pending = {
            (place, name): result
            for place, part in enumerate(self._parts)
            for name, result in part.results.items()
            if inspect.isawaitable(result)
        }
        for (place, name), result in (wait_for(_gather(pending)) if pending else {}).items():
            self._parts[place].results[name] = result

    def scores(self) -> list[Score]:
        """Every score, in the order of `add`, once the last is complete.

        Raises:
            RewardError: as `score`.
        """
        if not self._settled:
            self.settle()
        return [verdict for part in self._parts for verdict in _totals(part)]


def _totals(part: _Part) -> list[Score]:
    results = part.results | {name: _awaited(name, future) for name, future in part.waiting.items()}
    values = {name: _checked(name, result, len(part.texts)) for name, result in results.items()}
    functions = part.rubric.functions if part.texts else ()
    return [_total(own, [(entry, values[entry.name][i]) for entry in functions]) for i, own in enumerate(part.own)]


def _awaited(name: str, future: "Future[Any]") -> Any:
    try:
        return future.result()
    except Exception as error:
        raise RewardError(f"reward function '{name}' raised {error_text(error)}") from error


def task_scores(task: Task, examples_B: Sequence[Example], texts_B: Sequence[str]) -> list[Score]:
    """The task's own scores of B completions, checked.

    Raises:
        RewardError: it raised, or returned something other than a Score of numbers.
    """
    return [_verdict(task, example, text) for example, text in zip(examples_B, texts_B, strict=True)]


TaskScores = Callable[[Task, Sequence[Example], Sequence[str]], list[Score]]


def _verdict(task: Task, example: Example, text: str) -> Score:
    with calling(f"task '{task.name}'", f" on example {example.id}"):
        verdict = task.score(example, text)
    who, where = f"task '{task.name}'", f"example {example.id}"
    if not isinstance(verdict, Score):
        raise RewardError(f"{who} gave {kind(verdict)} for {where}; needs a Score")
    if not isinstance(verdict.parts, Mapping):
        raise RewardError(f"{who} gave parts={kind(verdict.parts)} for {where}; needs a mapping from name to number")
    value = _number(who, where, verdict.value)
    parts = {_key(who, where, k): _number(who, f"part '{k}' of {where}", v) for k, v in verdict.parts.items()}
    label, cause = _key(who, where, verdict.label), str(verdict.cause)[:LONGEST_ERROR]
    return replace(verdict, value=value, parts=parts, label=label, cause=cause)


def _key(who: str, where: str, name: object) -> str:
    """A label, or the name of a part: it becomes a part of keys of the log."""
    if len(text := str(name)) > LONGEST_LABEL:
        raise RewardError(
            f"{who} gave the label {kind(text)} of {len(text):,} characters for {where}; needs at most {LONGEST_LABEL}"
        )
    return text


def _arguments(
    examples_B: Sequence[Example], texts_B: Sequence[str], completion_ids_B: Sequence[Sequence[int]]
) -> dict[str, list[Any]]:
    """Arguments for functions: lists, prompts and messages are copies, so that no function can change the examples."""
    return {
        **_columns(examples_B),
        "prompts": [e.prompt if isinstance(e.prompt, str) else [dict(turn) for turn in e.prompt] for e in examples_B],
        "completions": [_completion(e, text) for e, text in zip(examples_B, texts_B, strict=True)],
        "completion_ids": [list(ids) for ids in completion_ids_B],
    }


def _columns(examples_B: Sequence[Example]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for example in examples_B for name in example.columns)
    return {name: [example.columns.get(name) for example in examples_B] for name in names}


def _completion(example: Example, text: str) -> str | list[dict[str, str]]:
    return text if isinstance(example.prompt, str) else [{"role": "assistant", "content": text}]


def check_arguments(rubric: Rubric, examples: Sequence[Example]) -> None:
    """Refuse functions that ask for what no example has, before any work.

    Raises:
        RewardError: names the function and what it asks for.
    """
    notes = Notes(0).arguments() | {AFTER_THINKING: []}
    known = dict.fromkeys([*_columns(examples), *_arguments([], [], []), *notes])
    for entry in rubric.functions:
        if not hasattr(entry.function, "as_they_end"):
            _named(entry, known)


def _call(entry: Weighted, arguments: Mapping[str, Any]) -> Any:
    named = _named(entry, arguments)
    with calling(f"reward function '{entry.name}'"):
        return entry.function(**named)


def _named(entry: Weighted, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a function names; all of them where it takes `**kwargs`."""
    try:
        parameters = inspect.signature(entry.function).parameters.values()
    except ValueError:
        raise RewardError(
            f"reward function '{entry.name}' does not say which arguments it takes; wrap it in a Python function"
        ) from None
    if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
        raise RewardError(f"reward function '{entry.name}' has positional-only arguments; they are passed by name")
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(arguments)
    named = [p for p in parameters if p.kind is not p.VAR_POSITIONAL]
    if missing := [p.name for p in named if p.name not in arguments and p.default is p.empty]:
        raise RewardError(
            f"reward function '{entry.name}' asks for {', '.join(missing)}; these examples have {', '.join(arguments)}"
        )
    return {p.name: arguments[p.name] for p in named if p.name in arguments}


Pending = tuple[int, str]
"""The part and the name of a function."""


async def _gather(pending: Mapping[Pending, Awaitable[Any]]) -> dict[Pending, Any]:
    awaited = (_named_await(name, result) for (_, name), result in pending.items())
    results = await asyncio.gather(*awaited, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return dict(zip(pending, results, strict=True))


async def _named_await(name: str, result: Awaitable[Any]) -> Any:
    with calling(f"reward function '{name}'"):
        return await result


def _checked(name: str, result: Any, count: int) -> list[Score]:
    needed = f"needs a list of {count} numbers (or None), one for each completion"
    scalar = getattr(result, "ndim", 1) == 0  # a tensor without dimensions claims to be iterable
    if scalar or isinstance(result, str | bytes | Mapping) or not isinstance(result, Iterable):
        raise RewardError(f"reward function '{name}' returned {kind(result)}; {needed}")
    with calling(f"reward function '{name}'"):  # a generator runs only now, and may have no end
        values = list(itertools.islice(result, count + 1))
    if len(values) != count:
        found = f"{len(values)} values" if hasattr(result, "__len__") or len(values) < count else "more values"
        raise RewardError(f"reward function '{name}' returned {found}; {needed}")
    return [_given(name, f"completion {i}", value) for i, value in enumerate(values)]


def _given(name: str, where: str, value: Any) -> Score:
    who = f"reward function '{name}'"
    if isinstance(value, Score):
        return Score(value=_number(who, where, value.value), cause=value.cause)
    return Score(value=_number(who, where, value))


def _number(who: str, where: str, value: Any) -> float | None:
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except Exception:  # also what a number of one's own raises, or a tensor of several
        number = math.nan
    if not abs(number) <= LARGEST:
        raise RewardError(f"{who} gave {kind(value)} for {where}; {FINITE}, or None where it cannot be scored")
    return number


def _total(own: Score, others: Sequence[tuple[Weighted, Score]]) -> Score:
    parts = {**own.parts, TASK: own.value, **{entry.name: verdict.value for entry, verdict in others}}
    causes = [own.cause or f"'{TASK}' gave None"] if own.value is None else []
    causes += [_cause(entry.name, verdict) for entry, verdict in others if verdict.value is None]
    if own.value is None or causes:
        return Score(value=None, label=own.label, parts=parts, cause="; ".join(causes))
    terms = [own.value, *(entry.weight * verdict.value for entry, verdict in others if verdict.value is not None)]
    return Score(value=sum(terms), label=own.label, parts=parts, scale=sum(map(abs, terms)))


def _cause(name: str, verdict: Score) -> str:
    return f"'{name}' gave None: {verdict.cause}" if verdict.cause else f"'{name}' gave None"
