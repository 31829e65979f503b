"""The notebooks as lessons: little prose beside the code, and exercises whose hidden answers hold."""

import re
from typing import Any

import jupytext
import pytest
import torch

from grpo_nb import losses
from tests.conftest import ROOT

TAUGHT = ["03_grpo", "05_mathematics"]
EXERCISES = ["03_grpo", "04_diagnostics", "05_mathematics"]
MOST_WORDS = 14
"""Of prose per line of code."""
FORMULA = re.compile(r"\$\$.*?\$\$", re.DOTALL)
ANSWER = re.compile(r"<details>.*?```python\n(.*?)```\n</details>", re.DOTALL)


def cells(name: str, kind: str) -> list[str]:
    book = jupytext.read(ROOT / "notebooks" / f"{name}.py")
    return [cell.source for cell in book.cells if cell.cell_type == kind]


def answers(name: str) -> list[str]:
    return [code for text in cells(name, "markdown") for code in ANSWER.findall(text)]


@pytest.mark.parametrize("name", TAUGHT)
def test_prose_is_short_beside_the_code(name: str) -> None:
    lines = sum(bool(line.strip()) for source in cells(name, "code") for line in source.splitlines())
    prose = [FORMULA.sub("", ANSWER.sub("", text)) for text in cells(name, "markdown")]
    words = sum(any(map(str.isalnum, word)) for text in prose for word in text.split())
    assert words <= MOST_WORDS * lines


@pytest.mark.parametrize("name", EXERCISES)
def test_exercises_have_hidden_answers(name: str) -> None:
    questions = [text for text in cells(name, "markdown") if text.startswith("## Exercises")]
    assert len(questions) == 1
    numbers = re.findall(r"^\*\*(\d)\.\*\* ", questions[0], re.MULTILINE)
    assert numbers == [str(i + 1) for i in range(len(numbers))] and 3 <= len(numbers) <= 5
    assert len(answers(name)) == questions[0].count("<details>") == questions[0].count("</details>") == len(numbers)
    assert all("assert" in answer for answer in answers(name))


@pytest.fixture(scope="module")
def toy_numbers() -> dict[str, Any]:
    """The names of notebook 05 after its last cell."""
    names: dict[str, Any] = {}
    for source in cells("05_mathematics", "code"):
        exec(source, names)
    return names


@pytest.mark.parametrize("answer", answers("05_mathematics"))
def test_an_answer_of_the_mathematics_holds(answer: str, toy_numbers: dict[str, Any]) -> None:
    exec(answer, dict(toy_numbers))


@pytest.mark.parametrize("answer", [*answers("03_grpo"), *answers("04_diagnostics")])
def test_an_answer_of_training_and_diagnostics_holds(answer: str) -> None:
    exec(answer, {"torch": torch, "losses": losses})


def test_the_numbers_that_the_text_of_the_mathematics_names(toy_numbers: dict[str, Any]) -> None:
    short = losses.GroupRewards(toy_numbers["rewards"], torch.full((4, 4), 9))
    moved = {
        name
        for name in losses.ADVANTAGES
        if not torch.equal(losses.advantages(short, name)[1], losses.advantages(toy_numbers["long"], name)[1])
    }
    assert moved == {"opo", "reinforce_pp", "reinforce_pp_baseline"}
    p, logp = toy_numbers["policy"].softmax(-1)[None], toy_numbers["policy"].log_softmax(-1)[None]
    logp_ref = toy_numbers["logp_ref"]
    truth = float((p * (logp - logp_ref)).sum())
    means = {name: float((p * estimate(logp, logp_ref, 20.0, None)).sum()) for name, estimate in losses.KL.items()}
    assert means["k1"] == pytest.approx(truth) and means["k3"] == pytest.approx(truth)
    assert abs(means["k2"] - truth) > 1
    assert float((p * losses.kl_clamped_exhibit(logp, logp_ref)).sum()) < 0.1 * truth
