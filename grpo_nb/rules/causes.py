"""Possible causes of a wrong first update, or of completions that never end, by the numbers in the log.

A finding names its causes in `evidence["causes"]` and gives advice for these alone.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from grpo_nb.config import Config
from grpo_nb.metrics import keys
from grpo_nb.rules.finding import FIRST_STEP, Row, Rows, number
from grpo_nb.rules.numeric import beyond_rounding
from grpo_nb.tasks import thinking

HALF_PRECISION = 1e-5
"""Step at 1 of a number type above which small updates are lost in rounding."""
BEYOND_REFERENCE = 3.0
"""Times the distance to the reference from which a gap cannot be that distance: the first update has a part of the
step's tokens."""
SMALLER, LARGER = 0.98, 1.02
"""Norm of a gradient over the norm it should have, outside of which it is too small or too large."""

_RATIO = {
    "reference": "see that the ratio divides by the log-probs of the policy that sampled, not of the reference",
    "earlier_step": "see that the old log-probs are measured anew in each step, before its first update",
    "optimizer_step": "see that no optimizer step comes between two micro-batches of one update",
    "eval_mode": "see that log-probs are taken in eval mode, without dropout",
    "temperature": "see that log-probs are divided by the sampling temperature on both sides",
    "weights": "see that old log-probs are taken from the weights that sampled",
}
_START = _RATIO | {
    "reference": "see that the reference is the policy that GRPO started from",
    "optimizer": "see that the optimizer holds the model's trainable parameters",
    "half_precision": "train LoRA or float32 weights: a bfloat16 weight ignores changes below 0.4% of itself",
}
_GRADIENT = {
    "smaller": "see that every backward pass adds to .grad, and that zero_grad comes once an update",
    "larger": "see that zero_grad comes before every update, and that the loss of a micro-batch is divided by the "
    "update's number of tokens once",
    "turned": "see that no optimizer step comes between two micro-batches, and that the weights of one update are the "
    "same in each",
}


def of_ratio(rows: Rows, config: Config) -> list[str]:
    """Possible causes of a ratio other than 1 before the newest step's first update; for steps after step 1."""
    row, first = rows[-1], rows[0]
    excluded = set()
    gap, distance = number(row, keys.RATIO_DIFFERENCE.mean), _distance(row, config)
    if gap is not None and distance is not None and gap > BEYOND_REFERENCE * distance:
        excluded.add("reference")
    if _agrees(row, keys.SAMPLER_DIFFERENCE):
        excluded.add("earlier_step")  # the step's old log-probs are the sampler's
    moved = (number(first, keys.GRAD_UPDATE) or 0) > 0
    if first["step"] == FIRST_STEP and moved and _agrees(first, keys.RATIO_DIFFERENCE):
        excluded.add("optimizer_step")  # it would have moved the ratio of step 1 too
    return _left(("reference", "earlier_step", "optimizer_step"), excluded)


def of_start(row: Row, wrong: Iterable[str]) -> list[str]:
    """Possible causes of a wrong metric at step 1.

    Args:
        wrong: the metrics with a wrong value.
    """
    wrong, found = set(wrong), list[str]()
    if any(key.startswith(keys.RATIO_MAX_DEVIATION.partition("/")[0] + "/") for key in wrong):
        found += _of_first_ratio(row)
    if any(keys.row_of(key) is keys.KL for key in wrong):
        found += ["reference"]
    if keys.GRAD_UPDATE in wrong:
        eps = number(row, keys.ROUNDING)
        found += ["optimizer", *(["half_precision"] if eps is None or eps > HALF_PRECISION else [])]
    return found


def _of_first_ratio(row: Row) -> list[str]:
    excluded = set()
    if number(row, keys.TEMPERATURE) == 1:
        excluded.add("temperature")
    if _agrees(row, keys.SAMPLER_DIFFERENCE):
        excluded.add("weights")
    apart = number(row, keys.GRAD_CHECK)
    if apart is not None and apart <= LARGER - 1:
        excluded.add("optimizer_step")
    return _left(("optimizer_step", "eval_mode", "temperature", "weights"), excluded)


def of_gradient(ratio: float) -> str:
    """Kind of a gradient's error, by its norm over the expected norm: smaller, larger, or turned."""
    return "smaller" if ratio < SMALLER else "larger" if ratio > LARGER else "turned"


def ratio_advice(causes: Sequence[str]) -> str:
    return "; ".join(_RATIO[cause] for cause in causes)


def start_advice(causes: Sequence[str]) -> str:
    return "; ".join(_START[cause] for cause in causes)


def gradient_advice(cause: str) -> str:
    return _GRADIENT[cause]


def ignored_stops(samples: Iterable[Mapping[str, Any]], objective: str) -> tuple[dict[str, int], int]:
    """Special tokens inside completions that were cut at the cap, with the number of completions that hold each; and
    how many such completions there are.

    A special token is one whose text the logged tokens have and the decoded completion lacks. Marks of thinking are
    none that should end a completion.
    """
    found, cut = dict[str, int](), 0
    for row in samples:
        texts, completion = row.get("token_texts"), row.get("completion")
        if row.get("objective") != objective or row.get("stop_reason") != "length":
            continue
        if not isinstance(texts, list) or not isinstance(completion, str):
            continue
        cut += 1
        for text in {text.strip() for text in texts if isinstance(text, str)}:
            if _is_special(text) and text not in completion:
                found[text] = found.get(text, 0) + 1
    return found, cut


def _is_special(text: str) -> bool:
    marked = len(text) > 2 and (text[0], text[-1]) in (("<", ">"), ("[", "]"))
    return marked and len(text.split()) == 1 and not thinking.is_mark(text)


def _distance(row: Row, config: Config) -> float | None:
    """Root mean square of the log-ratio to the reference, the largest of the objectives; None where not measured."""
    squares = [number(row, keys.KL_K2.of(name)) for name in config.objectives]
    known = [max(2 * half, 0.0) for half in squares if half is not None and math.isfinite(half)]
    return math.sqrt(max(known)) if len(known) == len(squares) else None


def _agrees(row: Row, difference: keys.Difference) -> bool:
    """Whether a difference of log-probs was measured, with its rounding, and is within it."""
    measured = number(row, difference.mean) is not None and number(row, keys.ROUNDING) is not None
    return measured and not beyond_rounding(row, difference)


def _left(causes: Sequence[str], excluded: set[str]) -> list[str]:
    """The causes that are not excluded; all of them where none is left, since then a number is wrong too."""
    return [cause for cause in causes if cause not in excluded] or [*causes]
