"""Reward functions: what they get, what they may give, and how the rubric adds it up."""

import asyncio
import functools
import gc
import itertools
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import pytest
import torch

from grpo_nb.rewards.context import BESIDES, Notes, TrainerState
from grpo_nb.rewards.rubric import RewardError, Rubric, _weighted, function_name
from grpo_nb.rewards.scoring import Completions, Scoring, check_arguments, score, task_scores
from grpo_nb.types import Example, Score
from tests.support.tokens import names, pattern


class Fixed:
    """A task whose score is in the example's column `own`; None says that it could not be judged."""

    name = "fixed"

    def examples(self, split: Literal["train", "test"]) -> list[Example]:
        return []

    def score(self, example: Example, completion: str) -> Score:
        own = example.columns.get("own", 1.0)
        if isinstance(own, Exception):
            raise own
        return Score(value=own, label="fine", parts={"detail": 0.5}, cause="" if own is not None else "judge was out")


class Giving(Fixed):
    """Gives one thing for every answer."""

    def __init__(self, given: Any) -> None:
        self.given = given

    def score(self, example: Example, completion: str) -> Any:
        return self.given


CHAT = [{"role": "user", "content": "Who?"}]
EXAMPLES = [
    Example(id="0", prompt=CHAT, columns={"own": 1.0, "colour": "red"}),
    Example(id="1", prompt="plain", columns={"own": 0.25, "size": 7}),
]
TEXTS = ["one", "three"]
IDS = [[5, 2], [6, 7, 2]]


def run(*functions: Any, examples: Sequence[Example] = EXAMPLES) -> list[Score]:
    return score(Rubric(Fixed(), functions), Completions(examples, TEXTS, IDS))


def lengths(completions: list[Any]) -> list[float]:
    return [float(len(c if isinstance(c, str) else c[0]["content"])) for c in completions]


async def slow(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
    await asyncio.sleep(0)
    return [float(len(ids)) for ids in completion_ids]


class Colour:
    def __call__(self, colour: list[str | None]) -> list[float | None]:
        return [None if c is None else float(len(c)) for c in colour]


def scaled(completions: list[Any], factor: float) -> list[float]:
    return [factor * v for v in lengths(completions)]


def test_without_functions_the_task_decides() -> None:
    first, second = run()
    assert (first.value, second.value) == (1.0, 0.25)
    assert first.parts == {"detail": 0.5, "task": 1.0}
    assert first.label == "fine"


def test_values_are_weighed_and_added_and_parts_are_before_weighting() -> None:
    first, second = run((lengths, 0.1), slow)
    assert first.value == pytest.approx(1.0 + 0.1 * 3 + 2)
    assert second.value == pytest.approx(0.25 + 0.1 * 5 + 3)
    assert second.parts == {"detail": 0.5, "task": 0.25, "lengths": 5.0, "slow": 3.0}


def test_sync_async_partial_and_callable_object() -> None:
    async def partly(completions: list[Any], factor: float) -> list[float]:
        return scaled(completions, factor)

    both = [EXAMPLES[0], Example(id="2", prompt=CHAT, columns={"own": 0.0, "colour": "blue"})]
    first, second = run(
        functools.partial(scaled, factor=2.0), functools.partial(partly, factor=3.0), Colour(), examples=both
    )
    assert first.parts == {"detail": 0.5, "task": 1.0, "scaled": 6.0, "partly": 9.0, "Colour": 3.0}
    assert second.value == pytest.approx(0.0 + 10 + 15 + 4)


def test_a_function_that_raises_leaves_no_coroutine_unawaited(recwarn: pytest.WarningsRecorder) -> None:
    def broken(completions: list[Any]) -> list[float]:
        raise ValueError("no")

    with pytest.raises(RewardError, match="'broken' raised"):
        run(slow, broken)
    gc.collect()
    assert not recwarn.list


@pytest.mark.parametrize("inside", [False, True], ids=["script", "notebook cell"])
def test_an_interrupt_leaves_no_coroutine_of_a_library_unawaited(
    inside: bool, recwarn: pytest.WarningsRecorder
) -> None:
    """anyio's tasks hold a coroutine that only they await: what never begins warns where it is cancelled directly."""
    anyio, cancelled = pytest.importorskip("anyio"), list[str]()

    async def connects(completions: list[Any]) -> list[float]:
        await asyncio.sleep(0)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(anyio.sleep_forever)
        finally:
            cancelled.append("connects")
        return [0.0] * len(completions)

    async def interrupts(completions: list[Any]) -> list[float]:
        await asyncio.sleep(0)
        raise KeyboardInterrupt

    async def cell() -> list[Score]:
        return run(connects, interrupts)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(cell()) if inside else run(connects, interrupts)
    gc.collect()
    assert cancelled == ["connects"] and not recwarn.list


def test_async_functions_run_side_by_side() -> None:
    def make(name: str, mine: asyncio.Event, other: asyncio.Event) -> Any:
        async def meets(completions: list[Any]) -> list[float]:
            mine.set()
            await asyncio.wait_for(other.wait(), timeout=5)
            return [0.0] * len(completions)

        meets.__name__ = name
        return meets

    a, b = asyncio.Event(), asyncio.Event()
    assert [s.value for s in run(make("a", a, b), make("b", b, a))] == [1.0, 0.25]


def test_async_functions_of_two_objectives_run_side_by_side_and_what_only_waits_in_the_background() -> None:
    """Each of the two async ones waits for the other; the one that only waits is done before they begin."""
    met: list[asyncio.Event] = [asyncio.Event(), asyncio.Event()]
    threads: dict[str, int] = {}
    over, pair = threading.Event(), [Example(id="e", prompt="p")] * 2

    def meets(mine: int) -> Any:
        async def meets(completions: list[Any]) -> list[float]:
            threads[str(mine)] = threading.get_ident()
            met[mine].set()
            await asyncio.wait_for(met[1 - mine].wait(), timeout=5)
            return [float(mine)] * len(completions)

        return meets

    async def waits(completions: list[Any]) -> list[float]:
        threads["waits"] = threading.get_ident()
        over.set()
        return [0.5] * len(completions)

    waits.only_waits = True  # type: ignore[attr-defined]
    with Scoring() as scoring:
        for mine in (0, 1):
            scoring.add(Rubric(Fixed(), [meets(mine), waits]), Completions(pair, ["a", "b"], [[1], [2]]))
        assert over.wait(5), "before anything is settled"
        scoring.settle()
        scores = scoring.scores()
    assert [s.parts["meets"] for s in scores] == [0.0, 0.0, 1.0, 1.0]
    assert [s.value for s in scores] == [1.5, 1.5, 2.5, 2.5]
    assert threads["0"] == threads["1"] == threading.get_ident() != threads["waits"]


def test_what_only_waits_may_fail_and_is_named() -> None:
    async def waits(completions: list[Any]) -> list[float]:
        raise OSError("no disk")

    waits.only_waits = True  # type: ignore[attr-defined]
    with pytest.raises(RewardError, match=pattern("'waits'", "OSError: no disk")):
        score(Rubric(Fixed(), [waits]), Completions([Example(id="e", prompt="p")], ["a"], [[1]]))


def test_async_functions_work_inside_a_running_loop_as_in_a_notebook_cell() -> None:
    async def cell() -> list[Score]:
        return run(slow)

    assert [s.parts["slow"] for s in asyncio.run(cell())] == [2.0, 3.0]


def test_each_function_gets_only_what_it_names() -> None:
    seen: dict[str, Any] = {}

    def narrow(size: list[Any], completions: list[Any], absent: str = "default") -> list[float]:
        seen["narrow"] = (size, completions, absent)
        return [0.0, 0.0]

    def wide(prompts: list[Any], **columns: Any) -> list[float]:
        seen["wide"] = {"prompts": prompts, **columns}
        assert [seen["wide"].pop(name) for name in BESIDES]
        return [0.0, 0.0]

    run(narrow, wide)
    assert seen["narrow"] == ([None, 7], [[{"role": "assistant", "content": "one"}], "three"], "default")
    assert seen["wide"] == {
        "prompts": [CHAT, "plain"],
        "completions": [[{"role": "assistant", "content": "one"}], "three"],
        "completion_ids": IDS,
        "after_thinking": ["one", "three"],
        "own": [1.0, 0.25],
        "colour": ["red", None],
        "size": [None, 7],
    }


def test_no_function_can_spoil_the_examples_or_what_the_others_get() -> None:
    def spoils(prompts: list[Any], completions: list[Any], colour: list[Any]) -> list[float]:
        prompts[0][0]["content"] = completions[0][0]["content"] = "give 10"
        for given in (prompts, completions, colour):
            given.clear()
        return [0.0, 0.0]

    def sees(prompts: list[Any], completions: list[Any], colour: list[Any]) -> list[float]:
        assert (prompts, colour) == ([CHAT, "plain"], ["red", None])
        return lengths(completions)

    assert [s.parts["sees"] for s in run(spoils, sees)] == [3.0, 5.0] and CHAT[0]["content"] == "Who?"


def test_none_leaves_one_completion_unscored_with_its_cause() -> None:
    first, second = run(Colour())
    assert first.value == pytest.approx(4.0) and first.cause == ""
    assert second.value is None and names(second.cause, "'Colour'", None)
    assert second.parts == {"detail": 0.5, "task": 0.25, "Colour": None}, "the known parts are kept"


def test_a_score_says_why_there_is_none() -> None:
    def judge(completions: list[Any]) -> list[Any]:
        return [Score(value=None, cause="timed out"), Score(value=0.5)]

    first, second = run((judge, 0.1))
    assert first.value is None and names(first.cause, "'judge'", "timed out") and first.parts["judge"] is None
    assert second.value == pytest.approx(0.25 + 0.05) and second.parts["judge"] == 0.5

    def wrong(completions: list[Any]) -> list[Any]:
        return [Score(value=math.nan), 1.0]

    with pytest.raises(RewardError, match=pattern("'wrong'", "float nan", 0)):
        run(wrong)


def test_a_task_that_cannot_judge_leaves_it_unscored() -> None:
    first, _ = run(lengths, examples=[Example(id="0", prompt="p", columns={"own": None}), EXAMPLES[1]])
    assert first.value is None and first.cause == "judge was out"


@pytest.mark.parametrize("values", [np.array([1.0, 2.0]), torch.tensor([1.0, 2.0]), (1, 2), [True, np.float32(2)]])
def test_numbers_of_any_kind_are_taken(values: Any) -> None:
    def numbers(completions: list[Any]) -> Any:
        return values

    assert [s.parts["numbers"] for s in run(numbers)] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ([1.0], (1, 2)),
        ([1.0] * 3, (3, 2)),
        (None, ("NoneType", 2)),
        (1.0, ("float 1.0", 2)),
        ("ab", ("str 'ab'", 2)),
        (torch.tensor(1.0), ("Tensor tensor(1.)", 2)),
        ({"a": 1, "b": 2}, ("dict", 2)),
        ([1.0, math.inf], ("float inf", 1, "1e+09")),
        ([10**400, 1.0], ("int", "...", 0)),
        ([1.0, -1e300], ("float -1e+300", 1)),
        ([math.nan, 1.0], ("float nan", 0)),
        ([1.0, "2"], ("str '2'", 1)),
        ([1.0, [2.0]], ("list [2.0]", 1)),
    ],
)
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_what_is_no_reward_is_an_error_that_names_the_function(kind: str, given: Any, named: tuple[Any, ...]) -> None:
    def plain(completions: list[Any]) -> Any:
        return given

    async def awaited(completions: list[Any]) -> Any:
        return given

    bad = plain if kind == "sync" else awaited
    bad.__name__ = "bad"
    with pytest.raises(RewardError, match=pattern("'bad'", *named)):
        run(bad)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_function_that_raises_is_named(kind: str) -> None:
    def plain(completions: list[Any]) -> list[float]:
        raise KeyError("speed")

    async def awaited(completions: list[Any]) -> list[float]:
        raise KeyError("speed")

    bad = plain if kind == "sync" else awaited
    with pytest.raises(RewardError, match=rf"'{bad.__name__}' raised KeyError: 'speed'") as caught:
        run(bad)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_generator_that_raises_is_named() -> None:
    def bad(completions: list[Any]) -> Any:
        yield 1.0
        raise TypeError("late")

    with pytest.raises(RewardError, match="'bad' raised TypeError: late"):
        run(bad)


def test_a_column_that_is_not_there_is_named_with_those_that_are() -> None:
    def asks(completions: list[Any], answer: list[str]) -> list[float]:
        return [0.0, 0.0]

    with pytest.raises(RewardError, match=pattern("'asks'", "answer", "own, colour, size, prompts")):
        run(asks)


def test_a_task_that_raises_or_gives_no_number() -> None:
    with pytest.raises(RewardError, match=pattern("'fixed'", "ValueError: no", 0)):
        run(examples=[Example(id="0", prompt="p", columns={"own": ValueError("no")}), EXAMPLES[1]])
    with pytest.raises(RewardError, match=pattern("'fixed'", "float inf", 0)):
        run(examples=[Example(id="0", prompt="p", columns={"own": math.inf}), EXAMPLES[1]])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("given", "named"),
    [
        (dict(value="1"), ("str '1'", 0, "1e+09")),
        (dict(value=10**400), ("int", "...", 0)),
        (dict(value=-(10**5000)), ("int", 0)),
        (dict(value=2e9), ("float 2000000000.0", 0)),
        (dict(value=1.0, parts={"a": "x"}), ("str 'x'", "'a'", 0)),
        (dict(value=1.0, parts=[1.0]), ("parts=list [1.0]", 0)),
        (0.5, ("float 0.5", 0, "Score")),
    ],
)
def test_what_a_task_gives_is_checked(given: Any, named: tuple[Any, ...]) -> None:
    with pytest.raises(RewardError, match=pattern("'fixed'", *named)):
        task_scores(Giving(Score(**given) if isinstance(given, dict) else given), EXAMPLES, TEXTS)


@pytest.mark.usefixtures("unchecked")
def test_numbers_of_any_kind_are_taken_from_a_task_and_texts_made_of_labels() -> None:
    given = Score(value=np.float32(0.5), label=7, parts={"a": True, "b": None})
    own = task_scores(Giving(given), EXAMPLES, TEXTS)[0]
    assert own == Score(value=0.5, label="7", parts={"a": 1.0, "b": None}) and type(own.value) is float


@pytest.mark.parametrize("given", [Score(value=0.5, label="x" * 201), Score(value=0.5, parts={"x" * 201: 1.0})])
def test_a_label_that_no_log_would_take_is_refused(given: Score) -> None:
    with pytest.raises(RewardError, match=pattern(201, 200)):
        task_scores(Giving(given), EXAMPLES, TEXTS)


def test_a_cause_is_cut_to_what_a_log_takes() -> None:
    found = task_scores(Giving(Score(value=None, cause="x" * 1_000_000)), EXAMPLES, TEXTS)
    assert len(found[0].cause) <= 2000


def test_a_function_that_asks_for_what_no_example_has_is_refused_before_it_is_called() -> None:
    check_arguments(Rubric(Fixed(), [lengths, Colour()]), EXAMPLES)
    with pytest.raises(RewardError, match=pattern("scaled", "factor")):
        check_arguments(Rubric(Fixed(), [scaled]), EXAMPLES)


@pytest.mark.usefixtures("unchecked")
def test_a_wrong_rubric_is_refused_at_once() -> None:
    with pytest.raises(RewardError, match="'Colour'"):
        Rubric(Fixed(), [Colour])
    with pytest.raises(RewardError, match="'lengths'"):
        Rubric(Fixed(), [lengths, (lengths, 0.5)])
    with pytest.raises(RewardError, match=pattern("tuple", "'per token'")):
        _weighted((lengths, 0.5, "per token"))
    with pytest.raises(RewardError, match=r"\b3\b"):
        _weighted(3)
    for bare in (lengths, Colour()):
        with pytest.raises(RewardError, match=pattern("rewards", "[f]", "[(f, 0.1)]")):
            Rubric(Fixed(), bare)
    with pytest.raises(RewardError, match=pattern("float 0.1", "[f], [(f, 0.1)]")):
        Rubric(Fixed(), (lengths, 0.1))
    with pytest.raises(RewardError, match=pattern("weight", "'lengths'", "int", "...")):
        Rubric(Fixed(), [(lengths, 10**400)])
    with pytest.raises(RewardError, match=pattern("weight", "'lengths'", "float nan")):
        Rubric(Fixed(), [(lengths, math.nan)])

    def task(completions: list[Any]) -> list[float]:
        return []

    with pytest.raises(RewardError, match="'task'"):
        Rubric(Fixed(), [task])


def test_names() -> None:
    assert function_name(functools.partial(functools.partial(scaled, factor=1.0))) == "scaled"
    assert function_name(Colour()) == "Colour"


def test_no_completions_no_scores() -> None:
    assert score(Rubric(Fixed(), [lengths]), Completions([], [], [])) == []


# ---- what TRL hands over besides


def test_what_trl_also_hands_over_goes_to_whoever_names_it() -> None:
    seen: dict[str, Any] = {}

    def by_name(completions: list[Any], trainer_state: Any, log_metric: Any, log_extra: Any) -> list[float]:
        log_metric("share", trainer_state.global_step / trainer_state.max_steps)
        log_metric("share", np.float32(0.75))
        log_metric("size", torch.tensor(2))
        log_extra("words", [len(completions), None])
        return [trainer_state.epoch] * len(completions)

    def by_keywords(completions: list[Any], **kwargs: Any) -> list[float]:
        seen.update(kwargs)
        kwargs["log_extra"]("golden", ("a", "b"))
        return [0.0] * len(completions)

    def neither(completions: list[Any]) -> list[float]:
        return [0.0] * len(completions)

    notes = Notes(2, TrainerState(global_step=1, max_steps=4, epoch=0.5))
    found = score(Rubric(Fixed(), [by_name, by_keywords, neither]), Completions(EXAMPLES, TEXTS, IDS, notes=notes))
    assert [verdict.parts["by_name"] for verdict in found] == [0.5, 0.5]
    assert {"trainer_state", "log_metric", "log_extra"} <= seen.keys() and seen["trainer_state"] is notes.state
    assert notes.row("fairness") == {"user/fairness/share": 0.5, "user/fairness/size": 2.0}
    assert notes.sample(0) == {"extra": {"words": 2, "golden": "a"}}
    assert notes.sample(1) == {"extra": {"words": None, "golden": "b"}}
    assert Notes(1).sample(0) == {} and Notes(1).row("fairness") == {}


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = (value,)
    return value


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda log_metric, log_extra: log_metric("m", math.nan), ["log_metric('m', nan)"]),
        (lambda log_metric, log_extra: log_metric("m", 1e308), ["log_metric('m', 1e+308)"]),
        (lambda log_metric, log_extra: log_extra("x", [nested(300), 0]), ["log_extra('x'"]),
        (lambda log_metric, log_extra: log_extra("x", [nested(10_000), 0]), ["log_extra('x'"]),
        (lambda log_metric, log_extra: log_metric("m", "1"), ["log_metric('m', '1')"]),
        (lambda log_metric, log_extra: log_metric("m", torch.ones(2)), ["log_metric('m', tensor"]),
        (lambda log_metric, log_extra: log_extra("c", [1]), ["log_extra('c', ...)", 1, 2]),
        (lambda log_metric, log_extra: log_extra("c", [1, {2}]), ["log_extra('c', ...)", "JSON"]),
        (lambda log_metric, log_extra: log_extra("c", [1, math.inf]), ["log_extra('c', ...)", "JSON"]),
        (lambda log_metric, log_extra: [log_extra("c", [1, 2]) for _ in "ab"], ["log_extra('c', ...)"]),
    ],
)
def test_a_wrong_note_is_an_error_that_names_the_function(call: Any, named: list[Any]) -> None:
    def noting(log_metric: Any, log_extra: Any) -> list[float]:
        call(log_metric, log_extra)
        return [0.0, 0.0]

    with pytest.raises(RewardError, match=pattern("'noting'", "ValueError", *named)):
        run(noting)


# ---- whatever it does to the process


def forks_and_returns(count: int) -> list[float]:
    if (child := os.fork()) != 0:
        assert os.waitpid(child, 0)[1] == 0
    return [1.0] * count


def closes_descriptors(count: int) -> list[float]:
    for fd in (0, 1, 2):
        os.close(fd)
    return [1.0] * count


def sets_torch(count: int) -> list[float]:
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled())
    return [1.0] * count


def ignores_signals(count: int) -> list[float]:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    return [1.0] * count


def opens_files_to_all(count: int) -> list[float]:
    os.umask(0)
    return [1.0] * count


def surroundings() -> list[Any]:
    torch_has = [torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()]
    torch_has += [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)]
    os.umask(umask := os.umask(0o077))
    torch_has.append(umask)
    return [*torch_has, torch.are_deterministic_algorithms_enabled(), [os.fstat(fd).st_mode for fd in (0, 1, 2)]]


@pytest.mark.parametrize("does", [forks_and_returns, sets_torch, ignores_signals, opens_files_to_all])
def test_what_a_function_leaves_behind_is_undone(does: Callable[[int], list[float]]) -> None:
    before, process = surroundings(), os.getpid()

    def reward(completions: list[Any]) -> list[float]:
        return does(len(completions))

    assert values_of(reward) == [1.0, 1.0]
    assert surroundings() == before and os.getpid() == process


def test_descriptors_of_the_terminal_that_are_closed_lead_nowhere() -> None:
    """In a process of its own, since pytest's are at stake; the first file that is opened next takes the lowest."""
    code = (
        "import os; from tests.rewards.test_rewards import closes_descriptors, values_of\n"
        "out = os.dup(1)\n"
        "values_of(lambda completions, **_: closes_descriptors(2))\n"
        "os.write(out, str([os.fstat(fd).st_rdev == os.stat(os.devnull).st_rdev for fd in (0, 1, 2)]).encode())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.stdout == b"[True, True, True]", done.stderr


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError

    __repr__ = __str__

    def __float__(self) -> float:
        raise KeyError


def raising(error: BaseException) -> Callable[..., Any]:
    def reward(**_: Any) -> list[float]:
        raise error

    return reward


def awaited(error: BaseException) -> Callable[..., Any]:
    async def reward(**_: Any) -> list[float]:
        raise error

    return reward


ENDS = [SystemExit(3), GeneratorExit(), asyncio.CancelledError(), Unspeakable(), StopIteration(), MemoryError()]


@pytest.mark.parametrize("error", ENDS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("how", [raising, awaited])
def test_whatever_it_raises_the_error_names_it(how: Any, error: BaseException) -> None:
    if how is awaited and isinstance(error, StopIteration):
        return  # Python itself makes another error of it
    with pytest.raises(RewardError, match="'reward'"):
        values_of(how(error))


@pytest.mark.parametrize("given", [itertools.count(), [Unspeakable()] * 2], ids=["endless", "unspeakable"])
def test_what_has_no_end_and_no_words_is_refused(given: Any) -> None:
    def reward(**_: Any) -> Any:
        return given

    with pytest.raises(RewardError, match="'reward'"):
        values_of(reward)


def test_an_interrupt_is_the_users() -> None:
    with pytest.raises(KeyboardInterrupt):
        values_of(raising(KeyboardInterrupt()))


def values_of(function: Any) -> list[float | None]:
    """What a function gives the two completions."""
    return [verdict.parts[function_name(function)] for verdict in run(function)]
