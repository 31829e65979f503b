"""Logged rollouts for reading: groups with ranked completions, each token coloured by its probability.

All text comes from data and models, and rows may come from anybody: the template escapes every value, and a value of
another type than its field has is shown as text or as missing. What is long is folded or cut, so that a view stays
small however long the run.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from grpo_nb.report.markup import html
from grpo_nb.storage.journal import Row
from grpo_nb.storage.schema import is_step

Colouring = Literal["log-ratio", "log-prob", "advantage", "plain"]

SHOWN = 5
"""Completions of one view: the best and the worst of a larger group."""
SHORT, LONGEST = 300, 1500
"""Characters: what is longer than the first is folded, than the second cut."""
SHADES = 5
FULL_RATIO, FULL_SURPRISE, FULL_ADVANTAGE = 1.0, 5.0, 2.0
"""Values at which a colour is at its strongest: nats, of a token e times likelier than before, and of one of
probability 0.7%;
an advantage of two deviations of its group."""
_FULL = {"log-ratio": FULL_RATIO, "log-prob": FULL_SURPRISE, "advantage": FULL_ADVANTAGE}

_TINTS = {"u": "56,144,214", "d": "230,120,40", "s": "150,110,200"}
"""More likely than under the reference, less likely, surprising: apart for any colour vision, on white and on black."""
_CLASSES = [
    (f"{kind}{n}", f"{tint},{0.6 * n / SHADES:.2g}") for kind, tint in _TINTS.items() for n in range(1, SHADES + 1)
]
_ENDS = {"stop": "ended by itself", "length": "cut at the cap"}


@dataclass(frozen=True)
class Group:
    """The logged completions of one prompt in one step, best reward first."""

    step: int
    objective: str
    example: str
    rows: Sequence[Row]


@dataclass(frozen=True)
class Token:
    """A piece of a completion as it is shown."""

    text: str
    shade: str
    title: str


@dataclass(frozen=True)
class Answer:
    """A completion as it is shown."""

    place: int
    """Rank in its group; 1 is best."""
    reward: str
    facts: list[str]
    text: str
    tokens: list[Token]
    rest: str
    """Note that not all tokens were logged one by one."""
    hidden_before: int = 0


def groups(newest_first: Iterable[Row], steps: int = 20) -> list[Group]:
    """The groups of the newest `steps` logged steps, newest step first, each in the order of the log."""
    found: dict[tuple[int, str, str], list[Row]] = {}
    seen: set[int] = set()
    for row in newest_first:
        if not is_step(row.get("step")):
            continue
        seen.add(row["step"])
        if len(seen) > steps:
            break
        key = (row["step"], str(row.get("objective", "")), str(row.get("example", "")))
        found.setdefault(key, []).insert(0, row)
    ordered = sorted(reversed(found.items()), key=lambda item: -item[0][0])
    return [Group(*key, rows=sorted(rows, key=_rank)) for key, rows in ordered]


def page(group: Group, colouring: Colouring = "log-ratio") -> str:
    """One group as HTML: prompt, gold answer, and its completions with their rewards."""
    first, places = group.rows[0], _places(len(group.rows))
    hidden = len(group.rows) - len(places)
    return html(
        "group",
        step=group.step,
        objective=group.objective,
        example=group.example,
        logged=len(group.rows),
        size=first.get("group_size", len(group.rows)),
        prompt=prompt_text(first.get("prompt")),
        target=str(first["target"]) if "target" in first else None,
        key=key_of(colouring),
        answers=[
            answer_of(place, group.rows[place], colouring, hidden if n == SHOWN - 2 else 0)
            for n, place in enumerate(places)
        ],
        tints=tints(),
        short=SHORT,
        cut=cut,
    )


def tints() -> Sequence[tuple[str, str]]:
    """The classes of `shade`, each with its colour."""
    return _CLASSES


def shade(value: float | None, colouring: Colouring) -> str:
    """The CSS class of a token: its direction and one of SHADES strengths; none for next to nothing."""
    if value is None or not math.isfinite(value) or colouring == "plain":
        return ""
    strength = min(SHADES, round(abs(value) / _FULL[colouring] * SHADES))
    direction = "s" if colouring == "log-prob" else "u" if value > 0 else "d"
    return f"{direction}{strength}" if strength else ""


def answer_of(place: int, row: Row, colouring: Colouring, hidden: int = 0) -> Answer:
    """A logged completion as it is shown; `place` counts from 0."""
    reward, parts = _measure(row.get("reward")), row.get("parts")
    facts = [f"{name} {_number(value)}" for name, value in (parts.items() if isinstance(parts, Mapping) else ())]
    facts += [f"advantage {_number(row['advantage'], '+.3g')}"] if "advantage" in row else []
    facts += [_stop(row), str(row.get("label") or "")]
    if reward is None:
        facts.append(f"unscored: {row.get('cause') or 'no verdict'}")
    tokens = _tokens(row, colouring)
    count = row.get("tokens")
    left = tokens and isinstance(count, int) and count > len(tokens)
    return Answer(
        place + 1,
        _number(reward),
        [fact for fact in facts if fact],
        str(row.get("completion", "")),
        [token for token in tokens if token.text],
        f"all {count} tokens as text" if left else "",
        hidden,
    )


def _stop(row: Row) -> str:
    how = _ENDS.get(str(row.get("stop_reason")), "")
    return f"{row.get('tokens', '?')} tokens, {how}" if how else ""


def _tokens(row: Row, colouring: Colouring) -> list[Token]:
    """The completion token by token as far as that was logged; nothing where it is to be shown as it is."""
    pieces = row.get("token_texts")
    if not isinstance(pieces, list) or colouring == "plain":
        return []
    old, reference = (_measures(row.get(name), len(pieces)) for name in ("logprobs_old", "logprobs_reference"))
    advantage = _measure(row.get("advantage"))
    value = (lambda n: advantage) if colouring == "advantage" else _values(old, reference, colouring)
    return [
        Token(str(piece).replace("\n", "↵\n"), shade(value(n), colouring), _title(old, reference, n))
        for n, piece in enumerate(pieces)
    ]


def _values(
    old: Sequence[float] | None, reference: Sequence[float] | None, colouring: Colouring
) -> Callable[[int], float | None]:
    if old is None or (colouring == "log-ratio" and reference is None):
        return lambda n: None
    if colouring == "log-ratio" and reference is not None:
        return lambda n: old[n] - reference[n]
    return lambda n: old[n]


def _title(old: Sequence[float] | None, reference: Sequence[float] | None, n: int) -> str:
    if old is None:
        return "not measured"
    return f"{old[n]:.3g}" + (f", ratio {old[n] - reference[n]:+.2g}" if reference is not None else "")


def key_of(colouring: Colouring) -> dict[str, Any] | None:
    """Legend of the colours, from one end to the other."""
    if colouring == "plain":
        return None
    if colouring == "log-prob":
        shades = ["", *(f"s{n}" for n in range(1, SHADES + 1))]
        return {"shades": shades, "ends": ("expected", f"surprising, −{FULL_SURPRISE:g} nats")}
    down, up = [f"d{n}" for n in range(SHADES, 0, -1)], [f"u{n}" for n in range(1, SHADES + 1)]
    ends = (f"less likely than under the reference, −{FULL_RATIO:g} nat", f"more likely, +{FULL_RATIO:g}")
    if colouring == "advantage":
        ends = (f"advantage −{FULL_ADVANTAGE:g}: made less likely", f"+{FULL_ADVANTAGE:g}: made more likely")
    return {"shades": [*down, "", *up], "ends": ends}


def _places(count: int) -> list[int]:
    return list(range(count)) if count <= SHOWN else [*range(SHOWN - 2), count - 2, count - 1]


def _rank(row: Row) -> tuple[bool, float, int]:
    reward, index = _measure(row.get("reward")), row.get("completion_index", 0)
    return reward is None, -(reward or 0.0), index if isinstance(index, int) else 0


def cut(text: str) -> str:
    """The text, at most LONGEST characters, and the number of further ones."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} … ({len(text) - LONGEST} more characters)"


def prompt_text(prompt: object) -> str:
    """A logged prompt as text, chat turns with their roles."""
    if isinstance(prompt, list) and all(isinstance(turn, Mapping) for turn in prompt):
        return "\n".join(f"{turn.get('role')}: {turn.get('content')}" for turn in prompt)
    return str(prompt or "")


def _measure(value: object) -> float | None:
    """A number of the log; None for anything else."""
    return float(value) if type(value) is float or (type(value) is int and abs(value) < 2**63) else None


def _measures(values: object, count: int) -> list[float] | None:
    """A number for each token; None where there are fewer, or something else."""
    if not isinstance(values, list) or len(values) < count:
        return None
    numbers = [_measure(value) for value in values]
    return None if None in numbers else [number for number in numbers if number is not None]


def _number(value: object, form: str = ".3g") -> str:
    number = _measure(value)
    return "none" if number is None else format(number, form).replace("-", "−")
