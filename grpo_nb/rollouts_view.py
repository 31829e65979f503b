"""Logged rollouts for reading: groups with their completions ranked, and each token coloured by what the policy says.

All text comes from data and models, so all of it is escaped; what is long is folded or cut, so that a view stays
small however long the run.
"""

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from grpo_nb.journal import Row

Colouring = Literal["log-ratio", "log-prob", "plain"]

SHOWN = 5
"""Completions of one view: the best and the worst of a larger group."""
SHORT, LONGEST = 300, 1500
"""Characters: what is longer than the first is folded, than the second cut."""
SHADES = 5
FULL_RATIO, FULL_SURPRISE = 1.0, 5.0
"""Nats at which a colour is at its strongest: a token e times likelier than before; one of probability 0.7%."""

_TINTS = {"u": "56,144,214", "d": "230,120,40", "s": "150,110,200"}
"""More likely than under the reference, less likely, surprising: apart for any colour vision, on white and on black."""
_STYLE = (
    "<style>.gnb{line-height:1.55;max-width:1100px;overflow-wrap:anywhere;unicode-bidi:isolate}"
    ".gnb i{font-style:normal;border-radius:2px}.gnb pre,.gnb .t{white-space:pre-wrap;margin:2px 0 10px;"
    "font-family:var(--jp-code-font-family,monospace);font-size:13px;line-height:1.7}.gnb .m{opacity:.75}"
    + "".join(
        f".gnb .{kind}{n}{{background:rgba({tint},{0.6 * n / SHADES:.2g})}}"
        for kind, tint in _TINTS.items()
        for n in range(1, SHADES + 1)
    )
    + "</style>"
)


@dataclass(frozen=True)
class Group:
    """The logged completions of one prompt in one step, best reward first."""

    step: int
    objective: str
    example: str
    rows: Sequence[Row]


def groups(newest_first: Iterable[Row], steps: int = 20) -> list[Group]:
    """The groups of the newest `steps` logged steps, newest step first, each in the order of the log."""
    found: dict[tuple[int, str, str], list[Row]] = {}
    seen: set[int] = set()
    for row in newest_first:
        if not isinstance(row.get("step"), int):
            continue
        seen.add(row["step"])
        if len(seen) > steps:
            break
        key = (row["step"], str(row.get("objective", "")), str(row.get("example", "")))
        found.setdefault(key, []).insert(0, row)
    ordered = sorted(reversed(found.items()), key=lambda item: -item[0][0])
    return [Group(*key, rows=sorted(rows, key=_rank)) for key, rows in ordered]


def page(group: Group, colouring: Colouring = "log-ratio") -> str:
    """One group as HTML: prompt, gold answer, and its completions with what they earned."""
    first = group.rows[0]
    size = first.get("group_size", len(group.rows))
    logged = f"{len(group.rows)} of its {size} answers are logged"
    head = f"<b>step {group.step}</b> · {_safe(group.objective)} · {_safe(group.example)} · {logged}"
    gold = (
        f"<div><span class=m>gold answer</span> {_safe(_cut(str(first['target'])))}</div>" if "target" in first else ""
    )
    places = _places(len(group.rows))
    parts = [_answer(place + 1, group.rows[place], colouring) for place in places]
    if hidden := len(group.rows) - len(places):
        parts.insert(SHOWN - 2, f"<div class=m>… {hidden} between them not shown …</div>")
    prompt = _folded("prompt", _plain(first.get("prompt")))
    return f"{_STYLE}<div class=gnb>{head}{prompt}{gold}{_key(colouring)}{''.join(parts)}</div>"


def shade(value: float | None, colouring: Colouring) -> str:
    """The CSS class of a token: its direction and one of SHADES strengths; none for next to nothing."""
    if value is None or not math.isfinite(value) or colouring == "plain":
        return ""
    full = FULL_RATIO if colouring == "log-ratio" else FULL_SURPRISE
    strength = min(SHADES, round(abs(value) / full * SHADES))
    direction = "s" if colouring == "log-prob" else "u" if value > 0 else "d"
    return f"{direction}{strength}" if strength else ""


def _answer(place: int, row: Row, colouring: Colouring) -> str:
    facts = [f"<b>#{place}</b>", f"reward <b>{_number(row.get('reward'))}</b>"]
    facts += [f"{_safe(name)} {_number(value)}" for name, value in (row.get("parts") or {}).items()]
    facts += [f"advantage {_number(row.get('advantage'), '+.3g')}", _stop(row), _safe(row.get("label") or "")]
    if row.get("reward") is None:
        facts.append(f"unscored: {_safe(row.get('cause') or 'no verdict')}")
    return f"<div>{' · '.join(fact for fact in facts if fact)}</div>{_text(row, colouring)}"


def _stop(row: Row) -> str:
    how = {"stop": "ended by itself", "length": "cut at the cap"}.get(str(row.get("stop_reason")), "")
    return f"{row.get('tokens', '?')} tokens, {how}" if how else ""


def _text(row: Row, colouring: Colouring) -> str:
    """The completion token by token as far as that was logged, else as it is."""
    pieces, whole = row.get("token_texts"), str(row.get("completion", ""))
    if not pieces or colouring == "plain":
        return _folded("answer", whole) if len(whole) > SHORT else f"<div class=t>{_safe(whole)}</div>"
    old, reference = row.get("logprobs_old"), row.get("logprobs_reference")
    value = _values(old, reference, colouring)
    spans = "".join(
        f'<i class="{shade(value(n), colouring)}" title="{_title(old, reference, n)}">{_visible(piece)}</i>'
        for n, piece in enumerate(pieces)
        if piece
    )
    rest = row.get("tokens", 0) - len(pieces)
    more = _folded(f"all {row['tokens']} tokens as text", whole, always=True) if rest > 0 else ""
    return f"<div class=t>{spans}{'<span class=m> …</span>' if rest > 0 else ''}</div>{more}"


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


def _key(colouring: Colouring) -> str:
    if colouring == "plain":
        return ""
    if colouring == "log-prob":
        shades, ends = (
            ["", *(f"s{n}" for n in range(1, SHADES + 1))],
            ("expected", f"surprising, −{FULL_SURPRISE:g} nats"),
        )
    else:
        down = [f"d{n}" for n in range(SHADES, 0, -1)]
        shades = [*down, "", *(f"u{n}" for n in range(1, SHADES + 1))]
        ends = (f"less likely than under the reference, −{FULL_RATIO:g} nat", f"more likely, +{FULL_RATIO:g}")
    scale = "".join(f'<i class="{name}">&nbsp;&nbsp;</i>' for name in shades)
    return f"<div class=m style='margin:6px 0'>{ends[0]} {scale} {ends[1]}</div>"


def _folded(name: str, text: str, always: bool = False) -> str:
    if len(text) <= SHORT and not always:
        return f"<div><span class=m>{_safe(name)}</span> <span class=t>{_safe(text)}</span></div>"
    start = "" if always else f": {_safe(text[: SHORT // 2])} …"
    return f"<details><summary>{_safe(name)}{start}</summary><pre>{_safe(_cut(text))}</pre></details>"


def _places(count: int) -> list[int]:
    return list(range(count)) if count <= SHOWN else [*range(SHOWN - 2), count - 2, count - 1]


def _rank(row: Row) -> tuple[bool, float, int]:
    reward = row.get("reward")
    return reward is None, -(reward or 0.0), row.get("completion_index", 0)


def _visible(piece: str) -> str:
    return _safe(piece.replace("\n", "↵\n"))


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} … ({len(text) - LONGEST} more characters)"


def _plain(prompt: object) -> str:
    if isinstance(prompt, list):
        return "\n".join(f"{turn.get('role')}: {turn.get('content')}" for turn in prompt)
    return str(prompt or "")


def _safe(text: object) -> str:
    return html.escape(str(text), quote=True)


def _number(value: object, form: str = ".3g") -> str:
    return format(value, form).replace("-", "−") if isinstance(value, int | float) else "none"
