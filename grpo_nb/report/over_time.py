"""One prompt over time: the model's answers to it at each step, token by token, with their rewards.

Quick evaluation uses the same held-out prompts every so many steps and logs a few of the answers; a training prompt
comes again once its epoch is over. Rows may come from anybody: the template escapes every value.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from grpo_nb.report.markup import html
from grpo_nb.report.rollouts import Answer, Colouring, answer_of, cut, key_of, prompt_text, tints
from grpo_nb.run.run import Run
from grpo_nb.storage.journal import Row
from grpo_nb.storage.schema import is_step

MOST_EVALUATIONS, MOST_SAMPLES = 400, 5_000
"""Newest rows of the logs that are looked through."""
MOST_SHOWN = 60
"""Answers of one view, the newest."""
HELD_OUT, TRAINED = "held out, greedy", "training"


@dataclass(frozen=True)
class Watched:
    """A prompt with answers of more than one step."""

    objective: str
    example: str
    steps: int

    def __str__(self) -> str:
        return f"{self.objective}: {self.example} ({self.steps} steps)"


@dataclass(frozen=True)
class Wanted:
    """Which answers to show; None: any."""

    labels: frozenset[str] | None = None
    length: tuple[int, int] | None = None
    """Fewest and most tokens."""
    reward: tuple[float, float] | None = None
    """Lowest and highest; answers without a reward are left out."""

    def takes(self, row: Row) -> bool:
        return (
            (self.labels is None or str(row.get("label") or "") in self.labels)
            and (self.length is None or _within(row.get("tokens"), self.length))
            and (self.reward is None or _within(row.get("reward"), self.reward))
        )


@dataclass(frozen=True)
class Shown:
    """An answer in the view."""

    step: int
    origin: str
    answer: Answer


def watched(run: Run) -> list[Watched]:
    """Prompts that were answered at more than one step, those of most steps first."""
    steps: dict[tuple[str, str], set[int]] = {}
    for row in _rows(run):
        steps.setdefault((row["objective"], row["example"]), set()).add(row["step"])
    found = [Watched(objective, example, len(at)) for (objective, example), at in steps.items() if len(at) > 1]
    return sorted(found, key=lambda one: -one.steps)


def answers(run: Run, objective: str, example: str) -> list[Row]:
    """Every logged answer to a prompt as a row of samples.jsonl, with its `origin`, by step."""
    own = [row for row in _rows(run) if (row["objective"], row["example"]) == (objective, example)]
    return sorted(own, key=lambda row: row["step"])


def labels(rows: Sequence[Row]) -> list[str]:
    """The labels of these answers, the most frequent first."""
    return [label for label, _ in Counter(str(row.get("label") or "") for row in rows).most_common()]


def page(rows: Sequence[Row], wanted: Wanted | None = None, colouring: Colouring = "log-prob") -> str:
    """The answers to one prompt as HTML, oldest first: step, reward with its parts, and tokens coloured."""
    chosen = [row for row in rows if (wanted or Wanted()).takes(row)]
    first = rows[0] if rows else {}
    shown = [
        Shown(row["step"], str(row.get("origin", "")), answer_of(n, row, colouring))
        for n, row in enumerate(chosen[-MOST_SHOWN:])
    ]
    return html(
        "over_time",
        title=f"{first.get('objective', '')} · {first.get('example', '')}" if rows else "no answers",
        counted=f"{len(shown)} of {len(rows)} answers",
        prompt=cut(prompt_text(first.get("prompt"))),
        target=None if first.get("target") is None else cut(str(first["target"])),
        key=key_of(colouring),
        shown=shown,
        tints=tints(),
        cut=cut,
    )


def _rows(run: Run) -> Iterator[Row]:
    """Answers of both logs, newest first, each with text for its objective and example, and a step."""
    for row in islice(run.newest_first("evaluations"), MOST_EVALUATIONS):
        listed = row.get("answers")
        for answer in listed if isinstance(listed, list) else []:
            if isinstance(answer, Mapping):
                yield from _known({**answer, "step": row.get("step"), "objective": row.get("objective")}, HELD_OUT)
    for row in islice(run.newest_first("samples"), MOST_SAMPLES):
        yield from _known(row, TRAINED)


def _known(row: Mapping[str, Any], origin: str) -> Iterator[Row]:
    if is_step(row.get("step")) and isinstance(row.get("objective"), str) and isinstance(row.get("example"), str):
        yield {**row, "origin": origin}


def _within(value: object, ends: tuple[float, float]) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and ends[0] <= value <= ends[1]
