"""Schemas of a run's files: types, bounds and depth, checked for every row that is read.

A run folder is a document from anybody. An invalid row is left out, counted, and logged once;
rows of a diverged run keep their NaN and inf, which are its evidence.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Required

from pydantic import ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError, with_config
from pydantic_core import from_json
from typing_extensions import TypedDict

from grpo_nb.metrics import keys

Row = dict[str, Any]
Check = Callable[[Row], str | None]
"""Function that returns why a row does not belong to its log; None where it does."""

MAX_STEP = 10**9
DEEPEST = 32
"""Levels of lists and objects in a value."""
LONGEST_LINE = 16 << 20
LARGEST_CONFIG, LARGEST_KNOBS, LARGEST_MANIFEST, LARGEST_STATE = 1 << 20, 1 << 20, 16 << 20, 64 << 20
"""Bytes of the files that are read as one."""
SPARE_STEPS, BYTES_PER_ROW = 10_000, 10
"""A log of n bytes holds no step beyond SPARE_STEPS + n / BYTES_PER_ROW: no row of a step is shorter."""
MOST_KEYS, LONGEST_KEY, LONGEST_WORD = 5_000, 500, 10_000
LARGEST_INT = 2**63
LONGEST_NAME = 100
NAME_RULE = f"1 to {LONGEST_NAME} printable characters"


def shallow(value: Any) -> bool:
    """Whether a JSON value is nested at most DEEPEST levels."""
    level, depth = [value], 0
    while level and depth < DEEPEST:
        inside: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inside.extend(v for v in item.values() if isinstance(v, dict | list))
            elif isinstance(item, list):
                inside.extend(v for v in item if isinstance(v, dict | list))
        level, depth = inside, depth + 1
    return not level


def loads(data: bytes) -> Any:
    """JSON of a bounded depth.

    Raises:
        ValueError: not JSON, not UTF-8, or nested too deep.
    """
    try:
        value = from_json(data, allow_inf_nan=True, cache_strings="all")  # three times as fast as json
    except ValueError:  # also what only json reads: a byte order mark, half of a surrogate pair
        value = _loads(data)
    if data.count(b"[") + data.count(b"{") > DEEPEST and not shallow(value):
        raise ValueError(f"nested deeper than {DEEPEST} levels")
    return value


def _loads(data: bytes) -> Any:
    """Read by json; half of a surrogate pair becomes the replacement character, for no table or page can hold it."""
    try:
        text = json.dumps(json.loads(data), ensure_ascii=False)
        return json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    except RecursionError:
        raise ValueError(f"nested deeper than {DEEPEST} levels") from None


def is_step(value: object) -> bool:
    """Whether it is the number of a step: an integer from 0 to MAX_STEP."""
    return type(value) is int and 0 <= value <= MAX_STEP


def is_name(text: str) -> bool:
    """Whether a user's name (of an objective, a metric) can be part of a key; see NAME_RULE."""
    return 0 < len(text) <= LONGEST_NAME and text.isprintable()


def reachable(step: int, size: int) -> bool:
    """Whether a log whose row of `step` ends at byte `size` can have come so far, a row a step."""
    return step <= SPARE_STEPS + size // BYTES_PER_ROW


# Rows of a log


_known: dict[str, bool] = {}
"""Keys of numbers and texts met so far, and whether they may hold a text: twenty thousand rows share their keys."""


def flat(row: Row) -> str | None:
    """A step in numbers (metrics, sft): flat, numbers where numbers belong; they may be nan or inf."""
    if not is_step(row.get("step")):
        return "has no step"
    known = _known
    if not row.keys() <= known.keys():
        if why := _learn(row):
            return why
        known = _known
    for key, value in row.items():
        kind = value.__class__
        if kind is float or value is None:
            continue
        if kind is int:
            if not -LARGEST_INT <= value < LARGEST_INT:
                return "has a number beyond 64 bits"
        elif kind is str:
            if not known[key] or len(value) > LONGEST_WORD:
                return f"has a text as '{key}', which is a number"
        elif kind is not bool:
            return f"has a list or an object as '{key}'"
    return None


def _learn(row: Row) -> str | None:
    global _known
    if len(row) > MOST_KEYS:
        return f"has more than {MOST_KEYS} keys"
    if max(map(len, row)) > LONGEST_KEY:
        return f"has a key of more than {LONGEST_KEY} characters"
    kept = _known if len(_known) < 10 * MOST_KEYS else {}
    _known = kept | {key: (known := keys.row_of(key)) is None or known.unit == keys.TEXT for key in row}
    return None


def narrow(rows: Sequence[Row]) -> tuple[list[Row], int]:
    """All rows, with the MOST_KEYS keys that most of them have; and the number of dropped keys.

    A table has a cell for each row and key, and names of metrics may change with each step.
    """
    names: set[str] = set()
    for row in rows:
        if not row.keys() <= names:
            names |= row.keys()
    if len(names) <= MOST_KEYS:
        return list(rows), 0
    counts = Counter(key for row in rows for key in row)
    kept = {*sorted(counts, key=counts.__getitem__, reverse=True)[:MOST_KEYS]}
    return [{key: value for key, value in row.items() if key in kept} for row in rows], len(names) - MOST_KEYS


Step = Annotated[int, Field(ge=0, le=MAX_STEP)]
Count = Annotated[int, Field(ge=0, lt=LARGEST_INT)]
Seconds = Annotated[float, Field(ge=0, le=1e11)]
Name = Annotated[str, StringConstraints(max_length=LONGEST_KEY)]
Words = Annotated[str, StringConstraints(max_length=LONGEST_WORD)]
Number = float
"""May be nan or inf."""

OPEN = ConfigDict(strict=True, extra="allow")


@with_config(OPEN)
class _Turn(TypedDict, total=False):
    role: Required[str]
    content: Required[str | None]


@with_config(OPEN)
class _Sample(TypedDict, total=False):
    """A row of samples.jsonl."""

    step: Required[Step]
    objective: Name
    example: Words
    completion_index: Count
    group_size: Count
    prompt: str | list[_Turn]
    completion: str
    target: str | None
    reward: Number | None
    label: Words | None
    parts: dict[Name, Number | None] | None
    cause: str | None
    advantage: Number | None
    stop_reason: Name | None
    tokens: Count
    token_texts: list[str] | None
    logprobs_old: list[Number] | None
    logprobs_reference: list[Number] | None


@with_config(OPEN)
class _Event(TypedDict, total=False):
    """A row of events.jsonl: what every kind shares, and the rest as it is."""

    time: Seconds
    kind: Name
    step: Step | None
    goal: Step | None
    message: str | None
    severity: Name | None
    advice: str | None
    rule: Name | None
    key: Name | None
    by: Name | None
    error: str | None
    fingerprint: Name | None
    loss: Number | None
    n: Count | None


@with_config(OPEN)
class _Metric(TypedDict, total=False):
    value: Required[Number]
    low: Number | None
    high: Number | None
    n: Count
    clusters: Count


@with_config(OPEN)
class _Evaluation(TypedDict, total=False):
    """A row of evaluations.jsonl."""

    stage: Required[Name]
    step: Step
    split: Name
    mode: Name
    objective: Name
    pool: Name
    asked: Name
    items: dict[str, Name]
    n: Count
    clusters: Count
    metrics: dict[Name, _Metric]
    resamples: dict[Name, Annotated[list[Number | None], Field(max_length=100_000)]]


@with_config(OPEN)
class _Judged(TypedDict, total=False):
    """A row of judge.jsonl. The amount spent is checked by the ledger, which refuses to continue without it."""

    objective: Name
    key: Name
    provider: Words
    answer: str
    reason: str | None
    cause: str | None


def _typed(kind: Any) -> Check:
    adapter = TypeAdapter(kind)

    def check(row: Row) -> str | None:
        try:
            adapter.validate_python(row)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            return f"has a wrong '{first['loc'][0] if first['loc'] else '?'}' ({first['msg'].lower()})"
        return None if max(map(len, row), default=0) <= LONGEST_KEY else "has a key that is too long"

    return check


def comparable(evaluation: Row) -> bool:
    """Whether an evaluation has all fields that a comparison needs."""
    if not {"stage", "step", "objective", "pool", "n", "metrics", "resamples"} <= evaluation.keys():
        return False
    metrics, resamples = evaluation["metrics"], evaluation["resamples"]
    return metrics.keys() <= resamples.keys() and len({len(values) for values in resamples.values()}) <= 1


CHECKS: Mapping[str, Check] = {
    "metrics": flat,
    "sft": flat,
    "samples": _typed(_Sample),
    "events": _typed(_Event),
    "evaluations": _typed(_Evaluation),
    "judge": _typed(_Judged),
}
"""Checks by the name of the log."""
STEPWISE = frozenset({"metrics", "sft"})
"""Logs of one row a step."""


def problem(file: str, row: Row, end: int) -> str | None:
    """Reason why a row that ends at byte `end` of the log `file` is left out; None for a valid one."""
    log = file.partition(".")[0]
    why = CHECKS[log](row) if log in CHECKS else None
    if why is None and log in STEPWISE and not reachable(row["step"], end):
        return "is of a step far beyond the rows before it"
    return why
