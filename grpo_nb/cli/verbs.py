"""The commands that train and measure: thin calls into the package, an answer in a line or a table."""

from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from grpo_nb.cli.opening import accepted, newest_stage, open_run, own_code
from grpo_nb.cli.options import UsageError
from grpo_nb.cli.output import rows_of, say, show, show_json
from grpo_nb.cli.progress import follow
from grpo_nb.cli.several import followed, started
from grpo_nb.doctor.debugging import debug_mode
from grpo_nb.evaluation.compare import STAGES, Stage, comparison, three
from grpo_nb.evaluation.evaluate import evaluate
from grpo_nb.evaluation.forgetting import probe
from grpo_nb.evaluation.intervals import FEWEST, TOO_FEW
from grpo_nb.preflight.requirements import check_judges
from grpo_nb.rewards.rubric import Rubric
from grpo_nb.rewards.scoring import check_arguments
from grpo_nb.run.run import Run, RunError
from grpo_nb.tasks import load_tasks, read_examples
from grpo_nb.training.grpo import grpo
from grpo_nb.training.sft import finished, sft
from grpo_nb.types import Steps

if TYPE_CHECKING:
    from grpo_nb.jupyter.project import Own

DONE, INTERRUPTED = 0, 130
STAGE_KEYS = ("stage", "step", "split", "mode")


def sft_command(arguments: Namespace) -> int:
    """Run SFT to its last step."""
    if (status := followed()) is not None:
        return status
    with open_run(arguments) as run:
        run.lock().refuse_if_taken()  # before a word of what is going to be done
        return _warm_up(run, arguments, f"; next: grpo-nb train {run.shown}", own=own_code(run, arguments))


def train_command(arguments: Namespace) -> int:
    """Train GRPO to a total number of steps; SFT first if the run has not had it."""
    if (status := started(arguments)) is not None:
        return status
    if arguments.debug:
        say(str(debug_mode()))
    if (status := followed()) is not None:
        return status
    with open_run(arguments, steps=arguments.steps) as run:
        run.lock().refuse_if_taken()  # before a word of what is going to be done
        return _train(run, arguments)


def _train(run: Run, arguments: Namespace) -> int:
    own = own_code(run, arguments, trains=True)
    goal = run.config.run.steps if arguments.steps is None else arguments.steps
    newest, _ = run.checkpoints.latest()
    if newest is None:
        # Data that cannot be used is reported before SFT, not after it; kept alive, it is not parsed again.
        in_use = load_tasks(run.config, run.path, own.tasks)
        for name, functions in own.rewards.items():
            check_arguments(Rubric(in_use[name], functions), read_examples(in_use[name], "train"))
        check_judges(run.config)
    if newest is None and not arguments.no_sft and not finished(run):
        say("SFT comes first, since this run has not finished it (--set sft.steps=0 makes a run without)")
        if status := _warm_up(run, arguments, own=own):
            return status
    start = newest.step if newest else 0
    if newest and start >= goal:
        say(f"{run.shown}: already at step {start} of {max(start, run.goal())}; --steps sets a higher total")
        return DONE
    line = f"{run.shown}: " + (f"resumed at step {start} of {goal}" if newest else f"GRPO, {goal} steps")
    given = own.given("tasks", "rewards")
    steps = _announced(grpo(run, steps=goal, **given, **accepted(arguments)), line)
    last, interrupted = follow(steps, "GRPO", start, goal)
    advice = f"; next: grpo-nb eval {run.shown}, grpo-nb diagnose {run.shown}"
    flag = "" if goal == run.config.run.steps else f" --steps {goal}"
    return _ended(run, f"grpo-nb train {run.shown}{flag}", (last, goal), interrupted, advice)


def eval_command(arguments: Namespace) -> int:
    """Show task measures of one stage, or of all stages side by side."""
    if arguments.probe:
        _refuse_other_flags(arguments)
    with open_run(arguments) as run:
        if arguments.probe:
            return _probe(run, arguments)
        return _compare(run, arguments) if arguments.compare else _evaluate(run, arguments)


def _evaluate(run: Run, arguments: Namespace) -> int:
    stage: Stage = newest_stage(run) if arguments.stage is None else arguments.stage
    table = evaluate(
        run,
        split=arguments.split,
        mode=arguments.mode,
        stage=stage,
        limit=arguments.limit,
        **own_code(run, arguments).given("tasks"),
        **accepted(arguments),
    )
    rows = rows_of(table)
    shared = {key: rows[0][key] for key in STAGE_KEYS}
    measures = [_without(row, STAGE_KEYS) for row in rows]
    if arguments.json:
        show_json({"run": str(run.path), **shared, "metrics": measures})
    else:
        say(f"{run.shown}: " + ", ".join(f"{key} {value}" for key, value in shared.items()))
        show(measures)
        if any(row["low"] is None and row["clusters"] < FEWEST for row in rows):
            say(f"no interval where items are of fewer than {FEWEST} clusters (templates, or texts)")
    return DONE


def _warm_up(run: Run, arguments: Namespace, advice: str = "", *, own: "Own") -> int:
    total = run.config.sft.steps
    if finished(run):
        say(f"{run.shown}: SFT is done, {total} steps" if total else f"{run.shown}: sft.steps is 0, nothing to do")
        return DONE
    newest, _ = run.sft_checkpoints.latest()
    start = newest.step if newest else 0
    line = f"{run.shown}: SFT, " + (f"resumed at step {start} of {total}" if newest else f"{total} steps")
    steps = _announced(sft(run, **own.given("tasks"), **accepted(arguments)), line)
    last, interrupted = follow(steps, "SFT", start, total)
    return _ended(run, f"grpo-nb sft {run.shown}", (last, total), interrupted, advice)


def _announced(steps: Steps, line: str) -> Steps:
    """Yield the steps; the line is printed with the first, which shows that the training was not refused."""
    with closing(steps):
        for count, stats in enumerate(steps):
            if count == 0:
                say(line)
            yield stats


def _ended(run: Run, command: str, reached: tuple[int, int], interrupted: bool, advice: str) -> int:
    last, total = reached
    if last >= total:
        say(f"{run.shown}: done, step {last} of {total}{advice}")
        return DONE
    why = "interrupted" if interrupted else "stopped by a request in its knobs"
    say(f"{run.shown}: {why} and saved at step {last} of {total}; continue with: {command}")
    return INTERRUPTED


def _compare(run: Run, arguments: Namespace) -> int:
    table = comparison(run, split=arguments.split, mode=arguments.mode)
    if table.empty:
        raise RunError(
            f"{run.shown} has no evaluation of the {arguments.split} split in mode {arguments.mode} to compare; run "
            "these first:\n" + _evaluations(run, arguments, [str(stage) for stage in STAGES])
        )
    rows = rows_of(table)
    if arguments.json:
        show_json({"run": str(run.path), "split": arguments.split, "mode": arguments.mode, "comparison": rows})
    else:
        show([_with_interval(row, ("base", "sft", "latest", "difference")) for row in rows])
        if missing := [name for name in map(str, STAGES) if all(row.get(name) is None for row in rows)]:
            say("not measured yet:\n" + _evaluations(run, arguments, missing))
    return DONE


def _evaluations(run: Run, arguments: Namespace, stages: Sequence[str]) -> str:
    return "\n".join(f"  grpo-nb eval {run.shown} --stage {stage}{_asked(arguments)}" for stage in stages)


def _asked(arguments: Namespace) -> str:
    """Flags of an evaluation that differ from the defaults."""
    asked = (("split", arguments.split, "test"), ("mode", arguments.mode, "greedy"))
    return "".join(f" --{name} {value}" for name, value, usual in asked if value != usual)


def _refuse_other_flags(arguments: Namespace) -> None:
    other = {"--compare": arguments.compare, "--limit": arguments.limit, "--mode": arguments.mode != "greedy"}
    if given := [flag for flag, value in (other | {"--split": arguments.split != "test"}).items() if value]:
        raise UsageError(f"--probe asks its own 40 questions, greedily; leave out {', '.join(given)}")


def _probe(run: Run, arguments: Namespace) -> int:
    stage: Stage = newest_stage(run) if arguments.stage is None else arguments.stage
    rows = [_without(row, ("objective",)) for row in rows_of(probe(run, stage, **accepted(arguments)))]
    if arguments.json:
        show_json({"run": str(run.path), "stage": stage, "mode": "probe", "comparison": rows})
    else:
        say(f"{run.shown}: 40 general questions, before: base, after: {stage}")
        show([_with_interval(row, ("before", "after", "difference")) for row in rows])
    return DONE


def _with_interval(row: Mapping[str, Any], parts: Sequence[str]) -> dict[str, Any]:
    """One cell per part: `0.912 [0.874, 0.950]`."""
    line = {name: row[name] for name in ("objective", "metric") if name in row}
    for name in parts:
        value, low, high = three(row, name)
        limits = f" {TOO_FEW}" if low is None else f" [{low:.3f}, {high:.3f}]"
        line[name] = None if value is None else f"{value:.3f}{limits}"
    verdict = {True: "yes", False: "no"}.get(row["differs"], "-")
    return line | {"differs": verdict, "items": row["n"], "clusters": row["clusters"]}


def _without(row: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in keys}
