"""A probe of general ability: forty small questions of no training task, to measure what a model forgets in training.

Eight of each kind: sums, copying, completing a sentence, common facts, following instructions. The absolute score means
little; the change against the model as it was loaded counts, question by question
(`evaluation/forgetting.py`).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from grpo_nb.tasks.reading import normalise
from grpo_nb.tasks.records import DataError
from grpo_nb.types import Example, Score


@dataclass(frozen=True)
class Item:
    """One question; the first right answer is the gold one."""

    kind: str
    question: str
    right: tuple[str, ...]
    others: tuple[str, ...] = ()
    """The wrong options of a choice."""
    exact: bool = False
    """Whether the complete reply must be a right answer, letter by letter; else the first option it names counts."""


def _sum(question: str, *right: str) -> Item:
    return Item("arithmetic", f"{question} Reply with the number only.", right)


def _copy(text: str) -> Item:
    return Item("copying", f"Repeat the following line exactly, and write nothing else.\n{text}", (text,), exact=True)


def _completion(sentence: str, right: str, *others: str) -> Item:
    options = ", ".join((others[0], right, *others[1:]))
    question = f'Which word completes the sentence "{sentence} ..."? Choose one of: {options}. Reply with one word.'
    return Item("completion", question, (right,), others)


def _fact(question: str, *right: str) -> Item:
    return Item("facts", f"{question} Reply in a word or two.", right)


def _told(order: str, *right: str, others: tuple[str, ...] = (), exact: bool = True) -> Item:
    return Item("instructions", order, right, others, exact)


ITEMS = (
    _sum("What is 7 plus 5?", "12", "twelve"),
    _sum("What is 20 minus 6?", "14", "fourteen"),
    _sum("What is 6 times 3?", "18", "eighteen"),
    _sum("What is half of 16?", "8", "eight"),
    _sum("Mia has 3 apples and picks 6 more. How many does she have now?", "9", "nine"),
    _sum("Which number comes next: 2, 4, 6, 8?", "10", "ten"),
    _sum("How many days are there in three weeks?", "21", "twenty one"),
    _sum("A box holds 4 cups. How many cups are in 5 boxes?", "20", "twenty"),
    _copy("blue lamps hum at night"),
    _copy("4071 8832 65"),
    _copy("The Green door, not the Red one"),
    _copy("one two two three three three"),
    _copy("Ossian Vell, 19 Harbour Row"),
    _copy("yes; no; perhaps"),
    _copy("QX-17 to platform 9"),
    _copy("salt pepper salt sugar"),
    _completion("She opened her umbrella because it began to", "rain", "sing", "burn", "sleep"),
    _completion("He was thirsty, so he drank a glass of", "water", "sand", "bread", "glue"),
    _completion("The baby was tired and soon fell", "asleep", "upward", "empty", "purple"),
    _completion("To cut the paper she took the", "scissors", "pillow", "spoon", "river"),
    _completion("The snow melted because the sun was", "warm", "silent", "square", "hungry"),
    _completion("He could not read in the dark, so he switched on the", "light", "soup", "carpet", "horse"),
    _completion("The dog wagged its", "tail", "window", "ticket", "cloud"),
    _completion("After the last lesson the pupils went", "home", "liquid", "seven", "loudly"),
    _fact("What is the capital of France?", "Paris"),
    _fact("How many legs does a spider have?", "8", "eight"),
    _fact("On which planet do people live?", "Earth"),
    _fact("Which colour do blue and yellow paint make together?", "green"),
    _fact("What do bees make that people eat?", "honey"),
    _fact("On which continent is Egypt?", "Africa"),
    _fact("What is frozen water called?", "ice"),
    _fact("Which day comes after Monday?", "Tuesday"),
    _told("Reply with the word OK and nothing else.", "OK"),
    _told("Write the word river in capital letters, and nothing else.", "RIVER"),
    _told("Write the numbers from 1 to 5 with commas between them, and nothing else.", "1, 2, 3, 4, 5", "1,2,3,4,5"),
    _told("Write the word hello three times with spaces between, and nothing else.", "hello hello hello"),
    _told("Answer with yes or no: is fire cold?", "no", others=("yes",), exact=False),
    _told("Reply with the last word of this line and nothing else: the cat slept under the old table", "table"),
    _told("Reply with the first letter of the word mountain and nothing else.", "m", "M"),
    _told("Name the animal in this list: chair, horse, bottle.", "horse", others=("chair", "bottle"), exact=False),
)  # fmt: skip


class Probe:
    """The forty questions as a task for evaluation; it has nothing to train on."""

    name = "probe"

    def examples(self, split: Literal["train", "test"]) -> list[Example]:
        """All items for `test`, none for `train`."""
        return [_example(number, item) for number, item in enumerate(ITEMS)] if split == "test" else []

    def score(self, example: Example, completion: str) -> Score:
        """1 for a right answer, 0 for any other; an `Answer:` before it, quotes and a full stop are no matter."""
        right = _right(ITEMS[example.columns["item"]], completion)
        return Score(value=float(right), label="correct" if right else "wrong")

    def summary(self, examples: Sequence[Example], scores: Sequence[Score]) -> dict[str, float]:
        """Accuracy, over all and by kind."""
        right: dict[str, list[bool]] = {"accuracy": [s.label == "correct" for s in scores]}
        for example, verdict in zip(examples, scores, strict=True):
            right.setdefault(f"accuracy_{example.columns['kind']}", []).append(verdict.label == "correct")
        empty = {"accuracy": float("nan")} | {f"accuracy_{item.kind}": float("nan") for item in ITEMS}
        return empty | {name: sum(values) / len(values) for name, values in right.items() if values}

    def support(self, examples: Sequence[Example], scores: Sequence[Score]) -> dict[str, list[bool]]:
        """The questions of each kind."""
        kinds = dict.fromkeys(item.kind for item in ITEMS)
        return {f"accuracy_{kind}": [example.columns["kind"] == kind for example in examples] for kind in kinds}

    def selfcheck(self) -> None:
        """Check that every right answer scores 1, also as a sentence where allowed; wrong options and an empty reply 0.

        Raises:
            DataError: an item where that fails.
        """
        for item in ITEMS:
            bad = [reply for reply in ("", "?", item.question, *item.others) if _right(item, reply)]
            if bad or not all(_right(item, f"Answer: {text}.") for text in item.right):
                raise DataError(f"probe question {item.question!r}: {bad or item.right} is judged wrongly")


def _example(number: int, item: Item) -> Example:
    return Example(
        id=f"{item.kind}/{number}",
        prompt=[{"role": "user", "content": item.question}],
        target=item.right[0],
        columns={"kind": item.kind, "item": number},
    )


def _right(item: Item, reply: str) -> bool:
    if item.exact:
        return _bare(reply) in item.right
    words = f" {normalise(reply)} "
    places = {option: words.find(f" {normalise(option)} ") for option in (*item.right, *item.others)}
    named = {option: place for option, place in places.items() if place >= 0}
    return bool(named) and min(named, key=lambda option: named[option]) in item.right


def _bare(reply: str) -> str:
    """The reply without an `Answer:` before it, marks around it and a full stop after it; single spaces."""
    text = re.sub(r"^\W*answer\W*:", "", reply.strip(), flags=re.IGNORECASE)
    return " ".join(text.strip().strip("\"'`*_").removesuffix(".").strip("\"'`*_").split())
