"""HaluEval (Li et al. 2023): answers, replies and summaries that a source supports; abstaining where it is silent.

Files as published by RUCAIBox/HaluEval: JSON lines (whatever the ending) of a source, a question about it, a right and
a hallucinated text. The published rows are all answerable; a row of qa is unanswerable here where its right answer
is an abstention phrase ("Not stated", "The text does not say").
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from grpo_nb.printable import clean_logger
from grpo_nb.storage.file_stamps import recorded
from grpo_nb.tasks.bands import Bands
from grpo_nb.tasks.grounding.claims import forms
from grpo_nb.tasks.grounding.free import copied, judge_free, reference
from grpo_nb.tasks.grounding.items import Verdict, item
from grpo_nb.tasks.grounding.passages import passage
from grpo_nb.tasks.grounding.quotes import Subject, best_quote, grounds, made_up
from grpo_nb.tasks.grounding.short import judge_short
from grpo_nb.tasks.grounding.silence import ends_silent, names_something, refuses, says_nothing, tells_nothing
from grpo_nb.tasks.grounding.yes_no import judge_yes_no, says_yes_or_no
from grpo_nb.tasks.hub import locate, rows_of
from grpo_nb.tasks.parsed import Parsed, once
from grpo_nb.tasks.reading import abstains, cut_off, normalise, read
from grpo_nb.tasks.records import DataError, Row, check_share, held_out
from grpo_nb.types import Example, Score

logger = clean_logger(__name__)

_LOW = {"unparsed": (0.0, 0.0), "wrong": (0.1, 0.1), "abstained": (0.3, 0.3)}
_RIGHT = {"misquoted": (0.8, 0.8), "correct": (0.9, 0.9), "correct and grounded": (1.0, 1.0)}
GROUNDED = Bands({**_LOW, **_RIGHT})
"""Reward by class where the text has the answer and evidence is required. Each class is a point, so that no style
within it becomes the gradient once rewards are normalised. `misquoted`: right, with a quotation that does not hold; or
a reply or a summary that copies its source."""
BARE = Bands({**_LOW, "copied": (0.9, 0.9), "correct": (1.0, 1.0)})
"""Reward by class where the text has the answer and no evidence is required."""
UNTOLD = Bands({"unparsed": (0.0, 0.0), "invented": (0.1, 0.1), "correct": (1.0, 1.0)})
"""Reward by class where the text does not have the answer: an abstention is right, anything else is made up."""
COPIED = 25
"""Words of a source above which an answer that repeats all of it is no answer."""
UNDECIDED = "undecided"
"""Label of an answer that rules cannot tell right from wrong. It has no reward, and counts as not correct."""


@dataclass(frozen=True)
class Form:
    """One of HaluEval's files: its name, its fields, how its answers are requested and compared."""

    kind: str
    source: str
    """Field of the text that must hold the answer."""
    asked: str | None
    """Field of the question about it; None: the source alone."""
    right: str
    hallucinated: str
    ask: str
    """Object of the prompt's request, which continues `Reply with one line, 'Answer: ' and {ask}`."""
    share: float | None = None
    """Share of the words that only the right text has which a free answer must hold; None: short answers, matched."""

    @property
    def fields(self) -> dict[str, type]:
        """The file's fields and their types."""
        names = (self.source, self.asked, self.right, self.hallucinated)
        return {name: str for name in names if name is not None}

    @property
    def instruction(self) -> str:
        """The last line of a prompt that asks for evidence."""
        return (
            f"Reply with two lines: 'Answer: ' and {self.ask}; then 'Evidence: ' and, in quotation marks, the words "
            "of the text that show it. If the text does not say, reply 'Answer: Not stated' alone."
        )


QA = Form(
    "qa", "knowledge", "question", "right_answer", "hallucinated_answer", "a short answer from the text",
)  # fmt: skip
DIALOGUE = Form(
    "dialogue", "knowledge", "dialogue_history", "right_response", "hallucinated_response",
    "the assistant's next reply, which says nothing that the text does not support", share=0.5,
)  # fmt: skip
SUMMARIZATION = Form(
    "summarization", "document", None, "right_summary", "hallucinated_summary",
    "a summary of the text in two or three sentences", share=0.3,
)  # fmt: skip
FORMS = {form.kind: form for form in (QA, DIALOGUE, SUMMARIZATION)}


class HaluEval:
    """Grounded answers: right where the source has the answer, an abstention where it does not. One class per file.

    Splits by source text, so that no passage is on both sides. Rows whose right and hallucinated texts the score cannot
    separate teach nothing: they are set aside, counted and logged.

    Args:
        path: a file, a folder (its <kind>_data.json, else every .json and .jsonl in it), a glob, or a hub id.
        seed: seed of the split.
        test_share: share of the source texts that is held out.
        instruction: the last line of every prompt; parsing and scoring do not depend on it.
        evidence: whether a quotation from the source belongs to a full answer.

    Raises:
        DataError: one message with file and line.
    """

    form: Form
    name: str
    rules = 3
    """Version of how answers are judged; runs keep it with what they depend on."""

    def __init__(
        self,
        path: str | Path,
        seed: int = 0,
        test_share: float = 0.2,
        *,
        instruction: str | None = None,
        evidence: bool = True,
    ) -> None:
        check_share(test_share)
        self._evidence = evidence
        self._instruction = instruction or self.form.instruction
        with recorded() as self.reads:
            files = locate(path, (f"{self.form.kind}_data.json*", "*.json*"))
            self._parsed = once(
                (type(self), seed, test_share, self._instruction, evidence),
                files,
                lambda: self._parse(rows_of(path, files, self.form.fields), test_share, seed),
            )
        self._report()

    def examples(self, split: Literal["train", "test"]) -> list[Example]:
        """The examples of a split, in the order of the files."""
        return list(self._parsed.examples[split])

    @property
    def set_aside(self) -> list[str]:
        """Places of the rows that cannot be scored."""
        return self._parsed.set_aside

    def score(self, example: Example, completion: str) -> Score:
        """Unparsed < wrong < abstained < misquoted < correct < grounded; unanswerable: unparsed < invented < correct.

        Each class is one value. An answer that rules cannot tell right from wrong is `undecided`: it has no value.

        The label of an abstention where the source does not have the answer is `correct`. The part `grounded` does not
        enter the reward by itself: 1 where a right answer quotes its source, 0 where it does not, absent otherwise.
        """
        return judge(example.columns, completion)

    def summary(self, examples: Sequence[Example], scores: Sequence[Score]) -> dict[str, float]:
        """Accuracy by answerability; hallucinated, abstention, unparsed and undecided rates. NaN where no item has one.

        Where evidence is required also `grounded_rate`: answers to answerable items that are right and quote the
        source.
        """
        answers = [(e.columns["answerable"], s.label) for e, s in zip(examples, scores, strict=True)]
        labels = [label for _, label in answers]
        abstained = [label == "abstained" or (label == "correct" and not told) for told, label in answers]
        return {
            "accuracy": _mean([label == "correct" for label in labels]),
            "accuracy_answerable": _mean([label == "correct" for answerable, label in answers if answerable]),
            "accuracy_unanswerable": _mean([label == "correct" for answerable, label in answers if not answerable]),
            "hallucinated_rate": _mean([label in ("wrong", "invented") for label in labels]),
            "abstention_rate": _mean(abstained),
            "unparsed_rate": _mean([label == "unparsed" for label in labels]),
            "undecided_rate": _mean([label == UNDECIDED for label in labels]),
        } | self._quoted(examples, scores)

    def _quoted(self, examples: Sequence[Example], scores: Sequence[Score]) -> dict[str, float]:
        if not self._evidence:
            return {}
        pairs = zip(examples, scores, strict=True)
        return {"grounded_rate": _mean([s.parts.get("grounded") == 1 for e, s in pairs if e.columns["answerable"]])}

    def support(self, examples: Sequence[Example], scores: Sequence[Score]) -> dict[str, list[bool]]:
        """The items that each measure under a condition is over."""
        told = [bool(example.columns["answerable"]) for example in examples]
        untold = [not answerable for answerable in told]
        return {"accuracy_answerable": told, "accuracy_unanswerable": untold, "grounded_rate": told}

    def selfcheck(self) -> None:
        """Gold is correct; the hallucinated text, both texts, an abstention that is not gold and nothing score less.

        Raises:
            DataError: an item where that fails, by id.
        """
        for example in (*self.examples("train"), *self.examples("test")):
            gold = judge(example.columns, example.target or "")
            bad = {text: judge(example.columns, text).value for text in known_bad(example.columns)}
            if gold.label != "correct" or any(value is None or value >= (gold.value or 0) for value in bad.values()):
                raise DataError(
                    f"{example.id}: the right text {right_of(example.columns)!r} is {gold.label} ({gold.value}), and "
                    f"the known bad ones score {bad}; needs 'correct', and less for each of them"
                )

    def _parse(self, rows: Sequence[Row], share: float, seed: int) -> Parsed:
        for row in rows:
            check(row, self.form)
        test = held_out((cluster(row.data, self.form) for row in rows), share, seed)
        parsed = Parsed({"train": [], "test": []}, len(rows))
        for number, row in enumerate(rows):
            example = self._example(number, row.data)
            if _told_apart(example.columns):
                parsed.examples["test" if example.columns["cluster"] in test else "train"].append(example)
            else:
                parsed.set_aside.append(row.where)
        return parsed

    def _example(self, number: int, row: Mapping[str, Any]) -> Example:
        texts = {field: row[field].strip() for field in self.form.fields}
        asked = [texts[self.form.asked]] if self.form.asked else []
        content = "\n".join([texts[self.form.source], *asked, self._instruction])
        told = self.form.share is not None or not abstains(texts[self.form.right])
        marks = {"kind": self.form.kind, "answerable": told, "evidence": self._evidence}
        columns = {**texts, **marks, "cluster": cluster(row, self.form)}
        return Example(
            id=f"{self.form.kind}/{number}",
            prompt=[{"role": "user", "content": content}],
            target=_target(columns),
            columns=columns,
        )

    def _report(self) -> None:
        count = self._parsed.rows
        if not self.set_aside:
            return
        found = (
            f"{len(self.set_aside)} of {count} rows have right and hallucinated texts that the score cannot tell apart"
        )
        if len(self.set_aside) == count:
            raise DataError(f"{found}, the first is {self.set_aside[0]}; needs rows whose two texts differ")
        logger.warning("%s; they are set aside, the first is %s", found, self.set_aside[0])


class HaluEvalQA(HaluEval):
    """Short answers to questions about a passage (HotpotQA): knowledge, question, right_answer, hallucinated_answer."""

    form, name = QA, "halueval_qa"


class HaluEvalDialogue(HaluEval):
    """Replies in a conversation (OpenDialKG): knowledge, dialogue_history, right_response, hallucinated_response."""

    form, name = DIALOGUE, "halueval_dialogue"


class HaluEvalSummarization(HaluEval):
    """Summaries of news (CNN/DailyMail): document, right_summary, hallucinated_summary."""

    form, name = SUMMARIZATION, "halueval_summarization"


def judge(columns: Mapping[str, Any], completion: str) -> Score:
    """The verdict on a completion: on its answer (the line, or all lines of a free one), and on its evidence."""
    reading = read(completion)
    short = FORMS[columns["kind"]].share is None
    return verdict(columns, reading.answer if short else reading.block, reading.evidence)


def verdict(columns: Mapping[str, Any], answer: str, quote: str | None = None) -> Score:
    """Verdict on an answer without its `Answer:`, and on its quotation."""
    if not normalise(answer):
        return Score(value=0.0, label="unparsed")
    found = _verdict(columns, answer)
    if found.label == UNDECIDED and columns["answerable"]:
        return Score(value=None, label=UNDECIDED, cause=found.cause)
    if not columns["answerable"]:
        label = found.label if found.label in ("correct", "unparsed") else "invented"
        return Score(value=UNTOLD.value(label), label=label, cause=found.cause)
    if found.label != "correct":
        bands = GROUNDED if columns["evidence"] else BARE
        return Score(value=bands.value(found.label), label=found.label, cause=found.cause)
    whole = FORMS[columns["kind"]].share is None
    return _quoting(columns, quote, copied(answer, _source(columns), whole))


def _quoting(columns: Mapping[str, Any], quote: str | None, copies: bool) -> Score:
    """Verdict on a right answer by its quotation."""
    if not columns["evidence"]:
        return Score(value=BARE.value("copied" if copies else "correct"), label="correct")
    if quote is not None and grounds(quote, passage(_source(columns)), _subject(columns)):
        found = "misquoted" if copies else "correct and grounded"
        return Score(value=GROUNDED.value(found), label="correct", parts={"grounded": 1.0})
    asked = forms(f"{right_of(columns)} {_asked(columns)}")
    if quote is not None and columns["kind"] == "qa" and made_up(quote, passage(_source(columns)), asked):
        return Score(value=GROUNDED.value("wrong"), label="wrong", cause="its quotation is made up")
    found = "misquoted" if copies or quote is not None else "correct"
    return Score(value=GROUNDED.value(found), label="correct", parts={"grounded": 0.0})


def references(columns: Mapping[str, Any]) -> tuple[str, str]:
    """The right and the hallucinated text of an item."""
    form = FORMS[columns["kind"]]
    return columns[form.right], columns[form.hallucinated]


def right_of(columns: Mapping[str, Any]) -> str:
    """The right text of an item."""
    return references(columns)[0]


def known_bad(columns: Mapping[str, Any]) -> list[str]:
    """Completions that must score less than gold, whatever the item."""
    right, hallucinated = references(columns)
    both = [f"Answer: {hallucinated} {right}", f"Answer: {right} or {hallucinated}"]
    return [f"Answer: {hallucinated}", *both, *(["Answer: Not stated"] if columns["answerable"] else []), ""]


def check(row: Row, form: Form) -> None:
    """Raises DataError where a field of a HaluEval row is blank."""
    for field in form.fields:
        if not row.data[field].strip():
            raise DataError(f"{row.where}: field '{field}' is blank, needs text")


def cluster(row: Mapping[str, Any], form: Form) -> str:
    """A digest of the source: rows of one text are sampled and held out together."""
    return hashlib.blake2b(row[form.source].strip().encode(), digest_size=8).hexdigest()


def _verdict(columns: Mapping[str, Any], answer: str) -> Verdict:
    """Label of an answer that is not blank."""
    (right, hallucinated), form = references(columns), FORMS[columns["kind"]]
    if form.share is not None:
        found = judge_free(answer, form.share, reference(right, hallucinated, _asked(columns), _source(columns)))
        return Verdict("abstained", found.cause) if found.label == "wrong" and abstains(answer) else found
    about = item(right, hallucinated, _asked(columns), _source(columns))
    refused = refuses(answer) and not tells_nothing(answer)
    silent = not refused and (abstains(answer) or tells_nothing(answer))
    if not columns["answerable"]:
        if answer == right or (silent and not names_something(answer, about)):
            return Verdict("correct")
        return Verdict("unparsed" if refused or (not silent and says_nothing(answer, about)) else "invented")
    if about.yes_no and abstains(answer) and not says_yes_or_no(answer):
        return Verdict("abstained")
    if copied(answer, about.source, whole=True) and len(about.source.split()) > COPIED:
        return Verdict("wrong", "it repeats the source")
    found = judge_yes_no(answer, about) if about.yes_no else judge_short(answer, about)
    if found.label == "correct" and not about.yes_no and ends_silent(answer, about):
        return Verdict("abstained", "it says, too, that the text does not tell")
    if found.label in ("absent", "wrong") and silent and not names_something(answer, about):
        return Verdict("abstained", found.cause)
    if found.label == "absent":
        empty = refused or cut_off(answer) or says_nothing(answer, about)
        return Verdict("unparsed" if empty else "wrong", found.cause)
    return found


def _source(columns: Mapping[str, Any]) -> str:
    return str(columns[FORMS[columns["kind"]].source])


def _asked(columns: Mapping[str, Any]) -> str:
    field = FORMS[columns["kind"]].asked
    return str(columns[field]) if field else ""


def _subject(columns: Mapping[str, Any]) -> Subject:
    """Subject that the evidence of an item must be about."""
    (right, hallucinated), asked, source = references(columns), _asked(columns), _source(columns)
    if FORMS[columns["kind"]].share is not None:
        about = reference(right, hallucinated, asked, source)
        return Subject(about.evidence, (), (), tuple(sorted(set(forms(right)))))
    short = item(right, hallucinated, asked, source)
    if short.yes_no:
        return Subject(short.evidence, (), *short.subject)
    return Subject(short.holding, short.essential, (), ())


def _target(columns: Mapping[str, Any]) -> str:
    answer = f"Answer: {' '.join(right_of(columns).split())}"
    if not (columns["evidence"] and columns["answerable"]):
        return answer
    near = forms(f"{right_of(columns)} {_asked(columns)}")
    quote = best_quote(passage(_source(columns)), _subject(columns), near)
    return answer if quote is None else f'{answer}\nEvidence: "{quote}"'


def _told_apart(columns: Mapping[str, Any]) -> bool:
    right, hallucinated = references(columns)
    return bool(normalise(right)) and [
        _verdict(columns, text).label == "correct" for text in (right, hallucinated)
    ] == [
        True,
        False,
    ]


def _mean(values: Sequence[bool]) -> float:
    return sum(values) / len(values) if values else math.nan
