"""`grpo-nb score`: any model's answers to a benchmark, measured from files alone."""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict

from grpo_nb.cli.output import say, show, show_json
from grpo_nb.evaluation.intervals import TOO_FEW
from grpo_nb.evaluation.predictions import Scored, score_bbq, score_halueval

DONE = 0
SCORERS = {"bbq": score_bbq, "halueval": score_halueval}


def score_command(arguments: Namespace) -> int:
    """Measures of a file of answers, by group."""
    scored = SCORERS[arguments.benchmark](arguments.data, arguments.predictions, arguments.field)
    if arguments.json:
        asked = {name: getattr(arguments, name) for name in ("benchmark", "data", "predictions", "field")}
        groups = {group: asdict(measured) for group, measured in scored.groups.items()}
        show_json({**asked, "notes": scored.notes, "groups": groups})
    else:
        _table(scored)
    return DONE


def _table(scored: Scored) -> None:
    say("shares and scores x 100, with 95% intervals over clusters (templates, or texts)")
    show(
        [
            {"group": group, "metric": metric, **_cells(numbers), "items": numbers["n"]}
            | {"clusters": numbers["clusters"]}
            for group, measured in scored.groups.items()
            for metric, numbers in measured.metrics.items()
        ]
    )
    for note in scored.notes:
        say(note)


def _cells(numbers: Mapping[str, float]) -> dict[str, str]:
    value, low, high = (_percent(numbers[name]) for name in ("value", "low", "high"))
    limits = f"[{low}, {high}]" if low != "-" else "-" if value == "-" else TOO_FEW
    return {"value": value, "95% interval": limits}


def _percent(value: float) -> str:
    return "-" if value != value else f"{100 * value:.1f}"
