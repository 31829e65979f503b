"""Any model's answers to BBQ or HaluEval, read from files, joined to their items, and measured with 95% intervals."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from grpo_nb.evaluation.intervals import bootstrap, bootstrap_counts, with_intervals
from grpo_nb.tasks import (
    BBQ,
    HaluEvalDialogue,
    HaluEvalGeneral,
    HaluEvalQA,
    HaluEvalRecognition,
    HaluEvalSummarization,
    Task,
    bbq,
    bias,
    halueval,
    recognition,
    summarise,
    supported,
)
from grpo_nb.tasks.hub import load_rows
from grpo_nb.tasks.reading import read
from grpo_nb.tasks.records import DataError, Row
from grpo_nb.types import Example, Score

SEED = 0
"""Seed of the bootstrap's draws."""

_JSON = ("*.jsonl", "*.json")
_TASKS = {task.form.kind: task for task in (HaluEvalQA, HaluEvalDialogue, HaluEvalSummarization)}
_MEMBERS = ("right", "hallucinated")


@dataclass(frozen=True)
class Measured:
    """The measures of one group of items: a category of BBQ, a file of HaluEval, or `all`."""

    n: int
    clusters: int
    metrics: Mapping[str, Mapping[str, float]]
    """value, low, high and n, the items that it is over, by metric."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Counts that BBQ's measures are computed from (bias.COUNTED)."""


@dataclass(frozen=True)
class Scored:
    """Measures by group, and notes on items that are not in them."""

    groups: Mapping[str, Measured]
    notes: Sequence[str] = ()


def score_bbq(data: str, predictions: str | None, name: str, *, part: bool = False) -> Scored:
    """Accuracies and bias scores by category, and of all.

    An answer is read as in training (tasks/reading.py): plain option texts and letters do.

    Args:
        data: BBQ's files, as the task reads them.
        predictions: rows of `example_id`, `category` and the answer; None: the answer lies in the data's own rows.
        name: the field of the answer.
        part: whether a category may be answered in part, e.g. the items that were held out.

    Raises:
        DataError: a field is missing, ids do not join or come twice, or a category is answered in part.
    """
    examples = {e.id: e for e in _all(BBQ(data))}
    categories = Counter(e.columns["category"] for e in examples.values())
    rows = load_rows(predictions or data, _JSON, {"example_id": int})
    keys = [f"{_category(row, categories)}/{row.data['example_id']}" for row in rows]
    answers = {i: _text(row, name) for i, row in _joined(examples, rows, keys, name).items()}
    there = {examples[i].columns["category"] for i in answers}
    notes = _gaps([i for i, e in examples.items() if e.columns["category"] in there], answers, part)
    given_answers = [(examples[i].columns, bbq.judge(examples[i].columns, text)[1]) for i, text in answers.items()]
    parts = {category: [a for a in given_answers if a[0]["category"] == category] for category in sorted(there)}
    parts |= {"all": given_answers} if len(there) > 1 else {}
    notes += _bbq_notes(categories, there, given_answers)
    return Scored({group: _biases(members) for group, members in parts.items()}, notes)


def score_halueval(data: str, predictions: str | None, name: str, *, part: bool = False) -> Scored:
    """Measures of answers; or of recognition, where an answer is {"right": ..., "hallucinated": ...}, a yes or no each.

    The fields of the data show which of HaluEval's files it is. The answers to `general` are one yes or no each.

    Args:
        data: a HaluEval file.
        predictions: rows of `example_id` (the row's place in the data, from 0; general: its ID, and `ID#place` where
            the ID is blank or another row's, too) and the answer; None: the answer lies in the data's own rows.
        name: the field of the answer.
        part: whether answers may be missing: the others are measured.

    Raises:
        DataError: a field is missing, ids do not join or come twice, or answers are missing.
    """
    own = load_rows(data, _JSON, {})
    kind = _kind(own[0])
    items = recognition.general_names(own) if kind == "general" else [f"{kind}/{place}" for place in range(len(own))]
    rows = load_rows(predictions, _JSON, {"example_id": object}) if predictions else own
    keys = [f"{kind}/{str(row.data['example_id']).removeprefix(f'{kind}/')}" for row in rows] if predictions else items
    found = _joined(dict.fromkeys(items), rows, keys, name)
    if kind == "general":
        texts = {item: _text(row, name) for item, row in found.items()}
        return _measured_task("general", HaluEvalGeneral(data), texts, part)
    if any(isinstance(row.data[name], Mapping) for row in found.values()):
        texts = {f"{item}/{member}": _member(row, name, member) for item, row in found.items() for member in _MEMBERS}
        return _measured_task(f"{kind} recognition", HaluEvalRecognition(data, kind=kind), texts, part)
    texts = {item: _text(row, name) for item, row in found.items()}
    quoted = any(read(text).evidence for text in texts.values())
    return _measured_task(kind, _TASKS[kind](data, evidence=quoted), texts, part)


def _measured_task(group: str, task: Task, texts: Mapping[str, str], part: bool) -> Scored:
    """The task's summary of these answers, by example id; rows that the task sets aside need none and are noted."""
    everything = _all(task)
    notes = _gaps([example.id for example in everything], texts, part)
    examples = [example for example in everything if example.id in texts]
    scores = [_score(example, texts[example.id]) for example in examples]

    def measure(rows: Sequence[int]) -> dict[str, float]:
        return summarise(task, [examples[i] for i in rows], [scores[i] for i in rows])

    clusters = [str(example.columns["cluster"]) for example in examples]
    values = measure(range(len(examples)))
    drawn = bootstrap(measure, clusters, SEED)
    if aside := getattr(task, "set_aside", ()):
        share = f"{len(aside)} of {len(aside) + len(everything)} rows"
        notes.append(f"{share} are not in: the score gives both of their texts the same value; the first is {aside[0]}")
    measures = with_intervals(values, drawn, clusters, supported(task, examples, scores))
    return Scored({group: Measured(len(examples), len(set(clusters)), measures)}, notes)


def _score(example: Example, text: str) -> Score:
    if "hallucinated" in example.columns:
        return recognition.judge(example.columns, text)
    return halueval.judge(example.columns, text)


def _biases(answers: Sequence[bias.Answer]) -> Measured:
    answers = bias.reported(answers, bias.measured(columns for columns, _ in answers))
    rows, clusters = bias.counts(answers), [str(columns["cluster"]) for columns, _ in answers]
    totals = rows.sum(axis=0, keepdims=True)
    values = {name: float(value[0]) for name, value in bias.measures(totals).items()}
    drawn = bias.measures(bootstrap_counts(rows, clusters, SEED))
    counts = dict(zip(bias.COUNTED, totals[0].astype(int).tolist(), strict=True))
    measures = with_intervals(values, drawn, clusters, bias.over(rows))
    return Measured(len(answers), len(set(clusters)), measures, counts)


def _bbq_notes(categories: Mapping[str, int], there: Collection[str], answers: Sequence[bias.Answer]) -> list[str]:
    notes = []
    if absent := sorted(categories.keys() - there):
        notes.append(f"not in, since no answer is theirs: {', '.join(absent)}")
    if note := bbq.untold([columns for columns, _ in answers]):
        notes.append(note)
    return notes


def _joined(items: Collection[str], rows: Sequence[Row], keys: Sequence[str], name: str) -> dict[str, Row]:
    """The row of each item that has one."""
    found: dict[str, Row] = {}
    for key, row in zip(keys, rows, strict=True):
        if name not in row.data:
            raise DataError(
                f"{row.where}: field '{name}' is missing; found {', '.join(row.data)}; give the name of the field "
                "that holds the answers"
            )
        if key in found:
            raise DataError(f"{row.where}: {key} has an answer already ({found[key].where}); keep one of the two")
        found[key] = row
    if strangers := [key for key in found if key not in items]:
        raise DataError(
            f"{len(strangers)} of {len(found)} answers belong to no item of the data, the first is {strangers[0]} "
            f"({found[strangers[0]].where}); the data begins with {next(iter(items))}: give the data that was asked"
        )
    return found


def _gaps(items: Sequence[str], answers: Collection[str], part: bool) -> list[str]:
    """Notes on items without an answer.

    Raises:
        DataError: there are some, and `part` does not allow it.
    """
    absent = [item for item in items if item not in answers]
    if absent and not part:
        raise DataError(
            f"{len(absent)} of {len(items)} items have no answer, the first is {absent[0]}; a score of some is no "
            "score of all: answer them, or say with --part that those with an answer are to be measured alone"
        )
    return [f"of {len(items) - len(absent)} of {len(items)} items: the others have no answer"] if absent else []


def _text(row: Row, name: str) -> str:
    value = row.data[name]
    if not isinstance(value, str):
        raise DataError(f"{row.where}: field '{name}' is {value!r:.60}, needs a text, '' for a missing answer")
    return value


def _member(row: Row, name: str, member: str) -> str:
    value = row.data[name]
    if not isinstance(value, Mapping) or not isinstance(value.get(member), str):
        raise DataError(
            f"{row.where}: field '{name}' is {value!r:.60}; needs an object with a text for each of 'right' and "
            "'hallucinated', as in other rows"
        )
    return str(value[member])


def _category(row: Row, categories: Collection[str]) -> str:
    if isinstance(category := row.data.get("category"), str):
        return category
    if len(categories) == 1 and category is None:
        return next(iter(categories))
    raise DataError(
        f"{row.where}: field 'category' is {category!r}; example_id counts from 0 in each of {', '.join(categories)}, "
        "so each row needs its category"
    )


def _kind(row: Row) -> str:
    known = {kind: form.fields for kind, form in halueval.FORMS.items()} | {"general": recognition.GENERAL_FIELDS}
    for kind, fields in known.items():
        if fields.keys() <= row.data.keys():
            return kind
    wanted = "; ".join(f"{kind} has {', '.join(fields)}" for kind, fields in known.items())
    raise DataError(f"{row.where}: these are no fields of a HaluEval file ({wanted}); found {', '.join(row.data)}")


def _all(task: Task) -> list[Example]:
    if isinstance(task, HaluEvalGeneral | HaluEvalRecognition):
        return task.examples("test")
    return [*task.examples("train"), *task.examples("test")]
