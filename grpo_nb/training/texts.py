"""Common features of completions: the same sentence for many prompts, and evasive words."""

import re
from collections import defaultdict
from collections.abc import Sequence

from grpo_nb.metrics import keys
from grpo_nb.tasks.wordings import PLAIN_ABSTENTION, folded
from grpo_nb.types import Rollouts, Score

FEWEST_WORDS = 5
"""Words of a text that is no bare choice: short answers are alike for good reasons."""
_EVASIVE = re.compile(
    r"\bas an? (?:ai|language|large language|assistant)\b|"
    r"\bi(?: am|'m) (?:sorry|just an?|only an?|not able|unable)\b|\bit depends\b|"
    r"\bi (?:cannot|will not|would rather not) (?:say|answer|help|comment|assist|provide|judge|determine)\b|"
    r"\b(?:more|further|additional) (?:information|context|details?) (?:is|are) (?:needed|required|necessary)\b|"
    r"\b(?:consult|ask|contact) (?:an?|your|the) (?:expert|professional|specialist|lawyer|doctor)\b"
)


def text_row(objective: str, rollouts: Rollouts, rows: Sequence[int], scores: Sequence[Score]) -> dict[str, float]:
    """Shares of template and of evasive completions of one objective; right ones do not count."""
    missed = [(i, s) for i, s in zip(rows, scores, strict=True) if s.value is not None and s.label != "correct"]
    texts = [(rollouts.prompt_of(i), " ".join(folded(rollouts.texts[i]).split())) for i, _ in missed]
    prompts: dict[str, set[int]] = defaultdict(set)
    for prompt, text in texts:
        prompts[text].add(prompt)
    same = sum(len(prompts[text]) > 1 and text.count(" ") + 1 >= FEWEST_WORDS for _, text in texts)
    evasive = sum(is_evasive(text) for _, text in texts)
    return {keys.TEMPLATE.of(objective): same / len(rows), keys.EVASIVE.of(objective): evasive / len(rows)}


def is_evasive(text: str) -> bool:
    """Whether a folded text refuses or evades the question."""
    return bool(_EVASIVE.search(text) or PLAIN_ABSTENTION.search(text))
