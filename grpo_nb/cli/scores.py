"""`grpo-nb answer` and `grpo-nb score`: a model's answers as a file, and any model's answers measured from files."""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from grpo_nb.cli.opening import accepted, existing_run, newest_stage, own_code
from grpo_nb.cli.output import check_out, say, show, show_json
from grpo_nb.evaluation.answers import answers
from grpo_nb.evaluation.intervals import TOO_FEW
from grpo_nb.evaluation.predictions import Scored, score_bbq, score_halueval
from grpo_nb.run.run import Run
from grpo_nb.storage.files import to_json, write_atomically
from grpo_nb.tasks import BUILT_IN, demo

DONE = 0
SCORERS = {"bbq": score_bbq, "halueval": score_halueval}


def answer_command(arguments: Namespace) -> int:
    """The model's answers to an objective's items, written as JSON lines."""
    check_out(arguments.out, "answers")
    run, path = existing_run(arguments.run), Path(arguments.out)
    stage = newest_stage(run) if arguments.stage is None else arguments.stage
    given = own_code(run).given("tasks") | accepted(arguments)
    rows = answers(run, arguments.objective, arguments.data, stage=stage, **given)
    write_atomically(path, [to_json(row) + b"\n" for row in rows])
    say(f"{path}: {len(rows)} answers of {run.shown}, stage {stage}{_score_line(run, arguments)}")
    return DONE


def _score_line(run: Run, arguments: Namespace) -> str:
    """Line with the command that scores answers, for a built-in task."""
    objective = run.config.objectives[arguments.objective]
    if objective.task not in BUILT_IN:
        return ""
    demo_files = demo.paths_in(run.path / "data")
    own = str(demo_files.bbq if objective.task == "bbq" else demo_files.halueval)
    data = arguments.data or (own if objective.data == "demo" else objective.data)
    part = "" if arguments.data else " --part"
    benchmark = "bbq" if objective.task == "bbq" else "halueval"
    return f"\nmeasure them: grpo-nb score {benchmark} --data {data} --predictions {arguments.out} --field answer{part}"


def score_command(arguments: Namespace) -> int:
    """Measures of a file of answers, by group."""
    scored = SCORERS[arguments.benchmark](arguments.data, arguments.predictions, arguments.field, part=arguments.part)
    if arguments.json:
        asked = {name: getattr(arguments, name) for name in ("benchmark", "data", "predictions", "field", "part")}
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
