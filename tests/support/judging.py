"""A judge as tests make and ask one: its key, its providers, the tiny demo's questions."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_nb.config import JudgeConfig
from grpo_nb.judge import FILE, Judge
from grpo_nb.rewards.rubric import Rubric
from grpo_nb.rewards.scoring import Completions, score
from grpo_nb.storage.journal import Journal
from grpo_nb.types import Example, Score
from tests.support.judge_server import JudgeServer
from tests.support.tiny import small_tasks

KEY, VARIABLE = "sk-never-to-be-seen-4711", "GRPO_NB_TEST_KEY"
H, F = "hallucination", "fairness"
TASK = {H: "halueval_qa", F: "bbq"}
TEXTS = ["Answer: geese", "Answer: bees", "no idea", "Answer: it does not say"]


def provider(url: str, model: str = "rules") -> dict[str, Any]:
    return {"model": model, "base_url": url, "api_key_env": VARIABLE}


def judge(folder: Path, *urls: str, objective: str = H, **changes: Any) -> Judge:
    given = {"providers": [provider(url) for url in urls], "timeout_s": 30, "retries": 0, **changes}
    return Judge(objective, TASK[objective], JudgeConfig.model_validate(given), Journal(folder / FILE))


def example(index: int = 0, objective: str = H) -> Example:
    return small_tasks()[objective].examples("train")[index]


def ask(function: Judge, examples: Sequence[Example], texts: Sequence[str]) -> list[Score]:
    """What the judge says of each text, through the rubric, as training asks it."""
    objective = function._objective
    rubric = Rubric(small_tasks()[objective], [(function, function.config.weight)])
    return score(rubric, Completions(examples, texts, [[1]] * len(texts)))


def given_by(server: JudgeServer) -> dict[str, float]:
    return {text: grade / 4 for text, grade in server.given}
