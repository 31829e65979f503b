"""Rollouts for reading: ranked, coloured, escaped, small; and the browser that shows them."""

import re
from pathlib import Path
from typing import Any

import pytest

from grpo_nb.jupyter.samples import EMPTY, SampleBrowser
from grpo_nb.report import rollouts
from grpo_nb.report.rollouts import Colouring, groups, page, shade
from grpo_nb.run.run import Run
from tests.support.tiny import tiny_run
from tests.support.tokens import names


def sample(step: int = 1, reward: float | None = 0.5, **changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "step": step,
        "objective": "fairness",
        "example": "e1",
        "completion_index": 0,
        "group_size": 8,
        "prompt": "Who is it?",
        "completion": "It is B",
        "target": "B",
        "reward": reward,
        "label": "correct",
        "parts": {"task": 1.0, "brevity": -0.25},
        "cause": None,
        "advantage": 0.7,
        "stop_reason": "stop",
        "tokens": 3,
        "token_texts": ["It", " is", " B"],
        "logprobs_old": [-0.1, -2.5, -6.0],
        "logprobs_reference": [-0.1, -1.9, -7.5],
    }
    return row | changes


def one(*rows: dict[str, Any]) -> rollouts.Group:
    (group,) = groups(reversed(rows))
    return group


@pytest.mark.ux(34, at="unit")
def test_groups_are_newest_first_and_ranked_by_reward() -> None:
    rows = [sample(1, 0.1), *(sample(2, r, completion=str(r)) for r in (0.2, None, 0.9)), sample(2, 0.4, example="e2")]
    found = groups(reversed(rows))
    assert [(g.step, g.example) for g in found] == [(2, "e1"), (2, "e2"), (1, "e1")]
    assert [row["reward"] for row in found[0].rows] == [0.9, 0.2, None]


def test_only_the_newest_steps_are_read() -> None:
    taken: list[int] = []

    def log() -> Any:
        for step in range(1000, 0, -1):
            taken.append(step)
            yield sample(step)

    assert len(groups(log(), steps=20)) == 20 and len(taken) == 21


def test_page_tells_what_an_answer_earned_and_why() -> None:
    text = page(one(sample()))
    for said in ("step 1", "fairness", "e1", "1 of its 8", "Who is it?", "gold answer</span> B"):
        assert said in text
    for said in (
        "reward <b>0.5</b>",
        "task 1",
        "brevity −0.25",
        "advantage +0.7",
        "3 tokens",
        "correct",
    ):
        assert said in text
    assert page(one(sample(stop_reason="length"))).count("cap") > page(one(sample(stop_reason="eos"))).count("cap")
    assert "judge-timeout" in page(one(sample(reward=None, cause="judge-timeout")))


@pytest.mark.parametrize(
    ("value", "colouring", "name"),
    [
        (0.6, "log-ratio", "u3"),
        (-0.6, "log-ratio", "d3"),
        (0.05, "log-ratio", ""),
        (-9.0, "log-ratio", "d5"),
        (-6.0, "log-prob", "s5"),
        (-0.1, "log-prob", ""),
        (-6.0, "plain", ""),
        (None, "log-ratio", ""),
        (float("nan"), "log-prob", ""),
    ],
)
def test_shade_has_a_direction_and_a_strength(value: float | None, colouring: Colouring, name: str) -> None:
    assert shade(value, colouring) == name


def test_tokens_are_coloured_by_ratio_or_by_surprise() -> None:
    spans = r'<i class="(\w*)" title="[^"]*">([^<]*)</i>'
    assert re.findall(spans, page(one(sample()))) == [("", "It"), ("d3", " is"), ("u5", " B")]
    assert re.findall(spans, page(one(sample()), "log-prob")) == [("", "It"), ("s2", " is"), ("s5", " B")]
    assert not re.findall(spans, page(one(sample()), "plain"))
    assert 'title="-2.5, ratio -0.6"' in page(one(sample()))


def test_run_without_log_probs_still_shows_its_answers() -> None:
    bare = {key: value for key, value in sample().items() if not key.startswith(("token_", "logprobs"))}
    assert "It is B" in page(one(bare))
    unmeasured = page(one(sample(logprobs_old=None, logprobs_reference=None)))
    assert 'class="" title="not measured"> is<' in unmeasured
    assert 'class="s5"' not in page(one(sample(logprobs_reference=None)))


@pytest.mark.ux(34, at="unit")
@pytest.mark.parametrize("colouring", ["log-ratio", "log-prob", "plain"])
def test_text_of_models_is_data(colouring: Colouring) -> None:
    evil = "<script>alert('x')</script><img src=x onerror=\"y\">"
    words = {"prompt": evil, "completion": evil, "target": evil, "label": evil, "cause": evil, "example": evil}
    for more in ({}, {"token_texts": None}, {"prompt": [{"role": evil, "content": evil}]}, {"completion": evil * 30}):
        row = sample(reward=None, objective=evil, parts={evil: 1.0}, **words | {"token_texts": [evil] * 3} | more)
        assert "<script" not in page(one(row), colouring) and "<img" not in page(one(row), colouring)


@pytest.mark.ux(34, at="unit")
def test_page_stays_small_and_long_text_is_folded() -> None:
    long = {"token_texts": [" goats"] * 128, "logprobs_old": [-1.234] * 128, "logprobs_reference": [-2.234] * 128}
    rows = [
        sample(reward=i / 10, completion="goats " * 5000, tokens=5000, prompt="p " * 9000, **long) for i in range(8)
    ]
    text = page(one(*rows))
    assert len(text.encode()) < 50_000 and text.count("<details>") == 1 + 5
    assert re.findall(r"<b>#(\d)</b>", text) == ["1", "2", "3", "7", "8"] and names(text, "3 between")


# ---- the browser


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return tiny_run(tmp_path)


def test_browser_of_an_empty_run_says_so(run: Run) -> None:
    browser = SampleBrowser(run)
    browser.refresh()
    assert browser.text.value == EMPTY


def test_browser_follows_the_latest_step_until_one_is_chosen(run: Run) -> None:
    browser = SampleBrowser(run)
    for step in (1, 2):
        run.log_samples([sample(step, completion=f"answer {step}", token_texts=None)])
        browser.refresh()
        assert f"answer {step}" in browser.text.value
    browser.step.value = 1
    assert "answer 1" in browser.text.value
    run.log_samples([sample(3, completion="answer 3", token_texts=None)])
    browser.refresh()
    assert "answer 1" in browser.text.value and [v for _, v in browser.step.options] == [0, 3, 2, 1]


def test_browser_chooses_objective_group_and_colour(run: Run) -> None:
    run.log_samples([sample(1), sample(1, example="e2", token_texts=[" other"]), sample(1, objective="hallucination")])
    browser = SampleBrowser(run)
    browser.refresh()
    browser.group.value = 1
    assert " other" in browser.text.value
    browser.objective.value = "hallucination"
    assert "hallucination" in browser.text.value and len(browser.group.options) == 1
    browser.colouring.value = "log-prob"
    assert 'class="s5"' in browser.text.value


@pytest.mark.ux(22, at="unit")
def test_every_chooser_has_a_name(run: Run) -> None:
    browser = SampleBrowser(run)
    for chooser in (browser.step, browser.objective, browser.group, browser.colouring):
        assert chooser.description
