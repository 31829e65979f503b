"""One prompt over time: its answers of both logs by step, filtered, coloured, and escaped whoever wrote them."""

from pathlib import Path
from typing import Any

import pytest

from grpo_nb.jupyter.over_time import OverTime
from grpo_nb.report import over_time
from grpo_nb.report.over_time import Wanted, answers, page, watched
from grpo_nb.report.rollouts import SHADES, shade
from grpo_nb.run.run import Run
from tests.run.test_samples import sample
from tests.support.strangers_run import MARKUP
from tests.support.tiny import tiny_run
from tests.support.tokens import names


def measured(run: Run, step: int, *rows: Any, objective: str = "fairness") -> None:
    run.log_evaluation(
        {"stage": f"step {step}", "step": step, "split": "test", "mode": "quick", "objective": objective, "n": 1}
        | {"answers": list(rows)}
    )


def held(example: str = "q1", reward: float | None = 0.5, **changes: Any) -> dict[str, Any]:
    row = sample(0, reward, example=example, **changes)
    return {key: value for key, value in row.items() if key not in ("step", "objective", "advantage", "group_size")}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Prompt q1 at steps 0, 10 and 20, `e1` in training at steps 3 and 9, q2 and e2 once."""
    run = tiny_run(tmp_path)
    for step, (reward, label, count) in {
        0: (0.0, "wrong", 30),
        10: (0.5, "unknown", 20),
        20: (1.0, "correct", 3),
    }.items():
        extra = [held("q2")] if step == 0 else []
        measured(run, step, held(reward=reward, label=label, tokens=count, completion=f"said {step}"), *extra)
    run.log_samples([sample(3, 0.2, advantage=-1.0), sample(3, 0.3, example="e2"), sample(9, 0.4, advantage=2.0)])
    return run


def shown(run: Run, wanted: Wanted | None = None, example: str = "q1") -> list[int]:
    rows = answers(run, "fairness", example)
    text = page(rows, wanted)
    return [row["step"] for row in rows if f"<b>step {row['step']}</b>" in text]


def test_prompts_that_came_again(run: Run) -> None:
    assert [(w.example, w.steps) for w in watched(run)] == [("q1", 3), ("e1", 2)]
    rows = answers(run, "fairness", "q1")
    assert [(row["step"], row["origin"]) for row in rows] == [(step, over_time.HELD_OUT) for step in (0, 10, 20)]
    assert {row["origin"] for row in answers(run, "fairness", "e1")} == {over_time.TRAINED}
    assert over_time.labels(rows) == ["wrong", "unknown", "correct"]


def test_answers_stand_by_step_with_reward_parts_and_tokens(run: Run) -> None:
    text = page(answers(run, "fairness", "q1"), colouring="log-prob")
    assert text.index("step 0<") < text.index("step 10<") < text.index("step 20<")
    assert names(text, "task 1", "correct") and 'class="s5"' in text and "advantage" not in text


def test_an_answer_of_more_tokens_than_are_logged_can_be_read_in_full(run: Run) -> None:
    for step in (0, 10):
        measured(run, step, held("long", tokens=300, completion="in full"))
    assert page(answers(run, "fairness", "long")).count("<pre>in full</pre>") == 2


def test_filters(run: Run) -> None:
    assert shown(run) == [0, 10, 20]
    assert shown(run, Wanted(labels=frozenset({"wrong", "correct"}))) == [0, 20]
    assert shown(run, Wanted(length=(3, 20))) == [10, 20]
    assert shown(run, Wanted(reward=(0.4, 1.0))) == [10, 20]
    assert shown(run, Wanted(frozenset({"correct"}), (3, 20), (0.9, 1.0))) == [20]
    measured(run, 30, held(reward=None))
    assert shown(run) == [0, 10, 20, 30] and 30 not in shown(run, Wanted(reward=(-9.0, 9.0)))


def test_an_advantage_colours_all_tokens_of_its_answer(run: Run) -> None:
    text = page(answers(run, "fairness", "e1"), colouring="advantage")
    assert text.count(f'<i class="u{SHADES}" title') == 3 and text.count('<i class="d2" title') == 3
    assert (shade(2.0, "advantage"), shade(-0.8, "advantage"), shade(0.0, "advantage")) == ("u5", "d2", "")
    assert (
        "u5"
        not in page(answers(run, "fairness", "q1"), colouring="advantage").partition("answers")[2].partition("<b>")[2]
    )


@pytest.mark.parametrize("bad", [None, 3, "text", [None, 1, "x"], [{}], [{"example": 5}], {"example": "q1"}])
def test_rows_of_a_stranger_are_passed_over(run: Run, bad: Any) -> None:
    run.log_evaluation({"stage": "step 40", "step": 40, "mode": "quick", "objective": "fairness", "answers": bad})
    assert shown(run) == [0, 10, 20]


@pytest.mark.parametrize(
    "key", ["prompt", "completion", "target", "label", "parts", "token_texts", "cause", "tokens", "reward"]
)
def test_markup_is_text(run: Run, key: str) -> None:
    value = {"parts": {MARKUP: 1.0}, "token_texts": [MARKUP, MARKUP, MARKUP]}.get(key, MARKUP)
    measured(run, 50, held() | {key: value}, held("q9") | {key: value})
    measured(run, 60, held("q9") | {key: value})
    for colouring in ("log-prob", "log-ratio", "advantage", "plain"):
        for example in ("q1", "q9"):
            text = page(answers(run, "fairness", example), colouring=colouring)
            assert not any(part in text for part in ("<script", "<img", "\x1b", "\u202e"))


def test_nothing_yet(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    assert watched(run) == [] and answers(run, "fairness", "q") == [] and page([])
    view = OverTime(run)
    assert view.prompt.value is None and "quick_eval_every" in view.text.value


def test_the_view_filters_and_reads_again(run: Run) -> None:
    view = OverTime(run)
    assert view.prompt.value == ("fairness", "q1") and (view.length.min, view.length.max) == (3, 30)

    def steps() -> list[int]:
        return [step for step in (0, 3, 9, 10, 20, 30) if f"<b>step {step}</b>" in view.text.value]

    assert steps() == [0, 10, 20]
    view.labels.value = ("correct",)
    assert steps() == [20]
    view.labels.value = ()
    view.length.value = (3, 20)
    assert steps() == [10, 20]
    view.reward.value = (0.0, 0.6)
    assert steps() == [10]
    view.prompt.value = ("fairness", "e1")
    assert steps() == [3, 9] and view.wanted() == Wanted(), "another prompt begins without filters"
    measured(run, 30, held())
    view.prompt.value = ("fairness", "q1")
    view.again.click()
    assert view.prompt.value == ("fairness", "q1") and steps() == [0, 10, 20, 30]
