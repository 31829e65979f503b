"""HaluEval's own task: is this text hallucinated, yes or no? For evaluation, compared with a length-only baseline.

The baseline answers "hallucinated" for every text longer than one threshold, the best one for the texts. In
published HaluEval QA made-up answers are longer, so a model that only counts letters looks good: an accuracy means
something where it is above `length_accuracy`.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, Literal

from grpo_nb.storage.file_stamps import recorded
from grpo_nb.tasks.halueval import FORMS, Form, check, cluster
from grpo_nb.tasks.hub import load_rows
from grpo_nb.tasks.reading import yes_or_no
from grpo_nb.tasks.records import DataError, Row
from grpo_nb.types import Example, Score

NOT_FOR_TRAINING = (
    "'halueval_general' is for evaluation only: its rows are people's marks on what ChatGPT wrote, four of five say "
    "'no hallucination' and none has a right answer to learn from, so the most that a reward could teach is to say no; "
    "train on halueval_qa, halueval_dialogue or halueval_summarization, and pass HaluEvalGeneral(path) to "
    "evaluate(run, tasks={...})"
)
_PAIRS_NOT_FOR_TRAINING = (
    "'halueval_recognition' is for evaluation only: a policy rewarded for it learns the length of hallucinated texts; "
    "train on halueval_qa, halueval_dialogue or halueval_summarization, and pass HaluEvalRecognition(path) to "
    "evaluate(run, tasks={...})"
)
EVALUATION_ONLY = {"halueval_general": NOT_FOR_TRAINING, "halueval_recognition": _PAIRS_NOT_FOR_TRAINING}

MATCHED = 1.2
"""Two texts whose lengths are within this factor of each other count as equally long."""

GENERAL_FIELDS: Mapping[str, type] = {"ID": str, "user_query": str, "chatgpt_response": str, "hallucination": str}

_INSTRUCTION = (
    "Does the {what} hold anything that is made up, wrong, or not supported{by}? "
    "Reply with one line, 'Answer: Yes' or 'Answer: No'."
)
_TITLES = {"qa": ("Question", "answer"), "dialogue": ("Conversation", "reply"), "summarization": ("", "summary")}


class _Recognition:
    """Is this text hallucinated? Every example is for evaluation, in a seeded order."""

    name: str

    def __init__(self, examples: list[Example], seed: int) -> None:
        self._examples = examples
        Random(f"recognition {seed}").shuffle(self._examples)

    def examples(self, split: Literal["train", "test"]) -> list[Example]:
        """All items as `test`.

        Raises:
            DataError: for `train`, with the reason.
        """
        if split == "train":
            raise DataError(EVALUATION_ONLY[self.name])
        return list(self._examples)

    def score(self, example: Example, completion: str) -> Score:
        """1 right, 0 wrong or failed (neither yes nor no, or both)."""
        return judge(example.columns, completion)

    def summary(self, examples: Sequence[Example], scores: Sequence[Score]) -> dict[str, float]:
        """Accuracy, pair accuracy, failed rate, and what length alone would reach; see `measures`."""
        return measures([e.columns for e in examples], scores)

    def support(self, examples: Sequence[Example], scores: Sequence[Score]) -> dict[str, list[bool]]:
        """The items, or for pairs the pairs, that each measure of a part is over; see `over`."""
        return over([e.columns for e in examples], scores)

    def selfcheck(self) -> None:
        """Gold answers are right, their opposites and nothing are not.

        Raises:
            DataError: an item where that fails, by id.
        """
        selfcheck(self._examples)


class HaluEvalRecognition(_Recognition):
    """Both members of every pair, one question each, in a seeded order.

    Args:
        path: a file of the kind, a folder that has it, a glob, or a hub id.
        kind: `qa`, `dialogue` or `summarization`.
        knowledge: whether the prompt holds the source; the official prompts of qa and dialogue do not.

    Raises:
        DataError: one message with file and line.
    """

    name = "halueval_recognition"

    def __init__(self, path: str | Path, seed: int = 0, *, kind: str = "qa", knowledge: bool = True) -> None:
        if kind not in FORMS:
            raise DataError(f"kind={kind!r}; needs {', '.join(FORMS)} (general is HaluEvalGeneral)")
        form = FORMS[kind]
        with recorded() as self.reads:
            rows = load_rows(path, (f"{kind}_data.json*", "*.json*"), form.fields)
        for row in rows:
            check(row, form)
        super().__init__([e for n, row in enumerate(rows) for e in _pair(n, row.data, form, knowledge)], seed)


class HaluEvalGeneral(_Recognition):
    """People's marks on what ChatGPT answered: user_query, chatgpt_response, hallucination (yes or no).

    Raises:
        DataError: one message with file and line.
    """

    name = "halueval_general"

    def __init__(self, path: str | Path, seed: int = 0) -> None:
        with recorded() as self.reads:
            rows = load_rows(path, ("general_data.json*", "*.json*"), GENERAL_FIELDS)
        _refuse_copies(rows)
        super().__init__([_general(name, row) for name, row in zip(general_names(rows), rows, strict=True)], seed)


def general_names(rows: Sequence[Row]) -> list[str]:
    """`general/ID` of each row; `general/ID#place`, the row's place from 0, where the ID is blank or not its own alone.

    The published file has two rows of the ID `ID` and one of none.
    """
    count = Counter(row.data["ID"].strip() for row in rows)
    return [
        f"general/{name}" if count[name] == 1 and name else f"general/{name}#{place}"
        for place, name in enumerate(row.data["ID"].strip() for row in rows)
    ]


def judge(columns: Mapping[str, Any], completion: str) -> Score:
    """1 right, 0 wrong or failed. The part `said_yes` does not enter the reward; a failed answer has none."""
    said = yes_or_no(completion)
    if said is None:
        return Score(value=0.0, label="unparsed")
    right = said == columns["hallucinated"]
    return Score(value=float(right), label="correct" if right else "wrong", parts={"said_yes": float(said)})


def measures(columns: Sequence[Mapping[str, Any]], scores: Sequence[Score]) -> dict[str, float]:
    """accuracy = right answers / all, where a failed answer is no right one; pair accuracy = both members right.

    In addition, of the same items: `length_accuracy`, the best that one threshold on length reaches;
    `length_pair_accuracy`, the share of pairs whose longer text is the hallucinated one (equal ones count half); and
    `accuracy_equal_length`, the accuracy on pairs whose texts are about equally long. NaN without such items.
    """
    right = [s.label == "correct" for s in scores]
    said = [s.parts.get("said_yes") == 1 for s in scores]
    truth = [bool(c["hallucinated"]) for c in columns]
    result = {
        "accuracy": _mean(right),
        "failed_rate": _mean([s.label == "unparsed" for s in scores]),
        "precision_yes": _mean([t for t, yes in zip(truth, said, strict=True) if yes]),
        "recall_yes": _mean([yes for t, yes in zip(truth, said, strict=True) if t]),
        "length_accuracy": length_accuracy([(c["length"], t) for c, t in zip(columns, truth, strict=True)]),
    }
    return result | (_of_pairs(columns, right) if any("pair" in c for c in columns) else {})


def over(columns: Sequence[Mapping[str, Any]], scores: Sequence[Score]) -> dict[str, list[bool]]:
    """For each measure of a part of the items, whether each is in it; a pair is in the place of its right member."""
    lengths = _lengths(columns)
    whole = [{(c.get("pair"), True), (c.get("pair"), False)} <= lengths.keys() for c in columns]
    pairs = [there and not c["hallucinated"] for c, there in zip(columns, whole, strict=True)]
    return {
        "precision_yes": [s.parts.get("said_yes") == 1 for s in scores],
        "recall_yes": [bool(c["hallucinated"]) for c in columns],
        "pair_accuracy": pairs,
        "length_pair_accuracy": pairs,
        "accuracy_equal_length": [
            there and _alike(lengths[c["pair"], False], lengths[c["pair"], True])
            for c, there in zip(columns, whole, strict=True)
        ],
    }


def length_accuracy(items: Sequence[tuple[int, bool]]) -> float:
    """Share right of "longer than t is hallucinated", for the best threshold t. Items: length, whether hallucinated.

    >>> length_accuracy([(3, False), (5, False), (9, True), (4, True)])
    0.75
    """
    if not items:
        return math.nan
    ordered = sorted(items)
    right = best = sum(truth for _, truth in ordered)  # t below all: everything is called hallucinated
    for place, (length, truth) in enumerate(ordered):
        right += -1 if truth else 1
        if place + 1 == len(ordered) or ordered[place + 1][0] != length:
            best = max(best, right)
    return best / len(ordered)


def selfcheck(examples: Sequence[Example]) -> None:
    """Raises DataError unless gold answers are right, and their opposites and nothing are not."""
    for example in examples:
        no, yes = ("Answer: No", "Answer: Yes")
        opposite = no if example.columns["hallucinated"] else yes
        labels = [judge(example.columns, text).label for text in (example.target or "", opposite, "", f"{yes}, no")]
        if labels != ["correct", "wrong", "unparsed", "unparsed"]:
            raise DataError(f"{example.id}: gold, its opposite, nothing and both are judged {labels}")


def _of_pairs(columns: Sequence[Mapping[str, Any]], right: Sequence[bool]) -> dict[str, float]:
    # By the pair's right member, as often as it was drawn: a bootstrap draws complete pairs.
    verdicts = {(c["pair"], c["hallucinated"]): r for c, r in zip(columns, right, strict=True)}
    lengths = _lengths(columns)
    pairs = [c["pair"] for c in columns if not c["hallucinated"] and (c["pair"], True) in verdicts]
    both = [(verdicts[pair, False], verdicts[pair, True]) for pair in pairs]
    sizes = [(lengths[pair, False], lengths[pair, True]) for pair in pairs]
    equal = [r for members, (a, b) in zip(both, sizes, strict=True) if _alike(a, b) for r in members]
    return {
        "pair_accuracy": _mean([all(members) for members in both]),
        "length_pair_accuracy": _mean([0.5 * (bad > good) + 0.5 * (bad >= good) for good, bad in sizes]),
        "accuracy_equal_length": _mean(equal),
    }


def _lengths(columns: Sequence[Mapping[str, Any]]) -> dict[tuple[str, bool], int]:
    """Length of each text by its pair and by whether it is the hallucinated one."""
    return {(c["pair"], c["hallucinated"]): c["length"] for c in columns if "pair" in c}


def _alike(one: int, other: int) -> bool:
    return max(one, other) <= MATCHED * min(one, other)


def _pair(number: int, row: Mapping[str, Any], form: Form, knowledge: bool) -> list[Example]:
    title, what = _TITLES[form.kind]
    shown = [row[form.source].strip()] if knowledge or form.asked is None else []
    shown += [f"{title}: {row[form.asked].strip()}"] if form.asked else []
    by = " by the text" if knowledge or form.asked is None else ""
    asked = _INSTRUCTION.format(what=what, by=by)
    columns = {"cluster": cluster(row, form), "pair": f"{form.kind}/{number}"}
    return [
        _asked(f"{form.kind}/{number}/{name}", [*shown, f"{what.capitalize()}: {text}", asked], bad, text, columns)
        for name, bad, text in (
            ("right", False, row[form.right].strip()),
            ("hallucinated", True, row[form.hallucinated].strip()),
        )
    ]


def _refuse_copies(rows: Sequence[Row]) -> None:
    seen: dict[str, str] = {}
    for row in rows:
        content = json.dumps(row.data, sort_keys=True, default=str)
        if content in seen:
            raise DataError(f"{row.where}: the same row stands at {seen[content]} already; remove one copy")
        seen[content] = row.where


def _general(name: str, row: Row) -> Example:
    mark = row.data["hallucination"].strip().lower()
    if mark not in ("yes", "no"):
        raise DataError(f"{row.where}: hallucination is {row.data['hallucination']!r}, needs yes or no")
    answer = row.data["chatgpt_response"].strip()
    asked = _INSTRUCTION.format(what="answer", by="")
    shown = [f"Request: {row.data['user_query'].strip()}", f"Answer: {answer}", asked]
    return _asked(name, shown, mark == "yes", answer, {"cluster": name})


def _asked(name: str, lines: Sequence[str], hallucinated: bool, text: str, columns: Mapping[str, Any]) -> Example:
    return Example(
        id=name,
        prompt=[{"role": "user", "content": "\n".join(lines)}],
        target=f"Answer: {'Yes' if hallucinated else 'No'}",
        columns={**columns, "hallucinated": hallucinated, "length": len(text)},
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
