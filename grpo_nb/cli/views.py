"""The commands that train nothing: they show a run's log, a folder of runs, this machine, or change a run's knobs."""

import os
import textwrap
from argparse import Namespace
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from grpo_nb.cli.opening import existing_run, own_code, settings_of
from grpo_nb.cli.options import UsageError
from grpo_nb.cli.output import check_out, rows_of, say, show, show_json
from grpo_nb.cli.values import UNDO
from grpo_nb.config.setting_keys import settings
from grpo_nb.metrics import keys
from grpo_nb.printable import one_line
from grpo_nb.run.listing import list_runs
from grpo_nb.run.places import missing_file, root
from grpo_nb.run.run import Run
from grpo_nb.run.status import RunStatus
from grpo_nb.storage.files import write_atomically
from grpo_nb.storage.vocabulary import Command

DONE, FAILED = 0, 1
PROSE = 100
"""Columns of a table that is read, not cut."""
REASON = 160
"""Characters of a reason in the table of runs."""


def status_command(arguments: Namespace) -> int:
    """Show the run's state, and the newest step's numbers."""
    run = existing_run(arguments.run)
    from grpo_nb.jupyter.start import attach

    session, status = attach(run), run.status()
    newest = next(run.newest_first("metrics"), {})
    if arguments.json:
        facts = {"run": str(run.path), "state": str(session.state), "step": session.step, "steps": session.steps}
        owner = None if status.owner is None else str(status.owner)
        error = None if session.error is None else str(session.error)
        facts["sft"] = status.sft
        show_json(facts | {"owner": owner, "updated": status.updated, "error": error, "newest": newest})
        return DONE
    say(f"{session.summary()}{_after_sft(run, status)}")
    saved = f"checkpoints: {one_line(run.checkpoints.steps() or 'none')}"
    if status.sft is not None:
        saved = f"SFT checkpoints: {one_line(run.sft_checkpoints.steps() or 'none')}"
    say(f"logs last grew {_time(status.updated)}; {saved}")
    show(
        [
            {"objective": name} | {title: newest.get(key.of(name)) for title, key in _HEADLINES.items()}
            for name in run.config.objectives
        ]
    )
    return DONE


def _after_sft(run: Run, status: RunStatus) -> str:
    """The command that continues a run whose SFT stopped or is done; empty for any other."""
    if status.sft is None or status.state.is_live:
        return ""
    done, total = status.sft
    return f"; resume: grpo-nb sft {run.shown}" if done < total else f"; next: grpo-nb train {run.shown}"


_HEADLINES = {
    "reward": keys.REWARD,
    "KL": keys.KL,
    "beta": keys.BETA,
    "length": keys.LENGTH_MEAN,
    "truncated": keys.TRUNCATION,
}


def samples_command(arguments: Namespace) -> int:
    """Show completions of the model."""
    run = existing_run(arguments.run)
    if arguments.objective not in (None, *run.config.objectives):
        raise UsageError(f"--objective {arguments.objective}: the run has {', '.join(run.config.objectives)}")
    from grpo_nb.report.report import samples  # after the check of the path: this import takes seconds

    table = samples(run, objective=arguments.objective, step=arguments.step, limit=arguments.limit)
    if arguments.json:
        show_json({"run": str(run.path), "samples": rows_of(table.frame)})
    else:
        say(repr(table))
    return DONE if len(table.frame) or arguments.step is None else FAILED


def compare_command(arguments: Namespace) -> int:
    """Show runs side by side: two metric by metric, more as a table; as a page with their curves."""
    from grpo_nb.report.table_files import is_table

    if is_table(arguments.out):
        raise UsageError(f"--out {arguments.out}: compare writes a page (.html); --json has its tables")
    check_out(arguments.out, "report")
    runs = [existing_run(name) for name in (arguments.a, arguments.b, *arguments.more)]
    from grpo_nb.report import several_runs  # after the check of the paths: this import takes seconds
    from grpo_nb.report.run_comparison import compare

    paths = [str(run.path) for run in runs]
    if arguments.out is not None:
        write_atomically(Path(arguments.out), several_runs.page(runs).encode())
        show_json({"runs": paths, "file": arguments.out}) if arguments.json else say(arguments.out)
        return DONE
    found = compare(*runs) if len(runs) == 2 else several_runs.several(runs)
    if arguments.json:
        named = dict(zip("ab", paths, strict=True)) if len(runs) == 2 else {"runs": paths}
        show_json({**named, **found.rows()})
    else:
        say(repr(found))
    return DONE


def diagnose_command(arguments: Namespace) -> int:
    """Show the findings of a run's log; 1 if one of them is more than a note."""
    run = existing_run(arguments.run)
    from grpo_nb.doctor import diagnose  # after the check of the path: this import takes seconds

    found = diagnose(run)
    if arguments.json:
        show_json({"run": str(run.path), "findings": [asdict(finding) for finding in found]})
    else:
        for finding in found:
            say(one_line(finding))
        say(f"{run.shown}: {len(found)} finding(s) in {run.last_step() or 0} steps")
    return FAILED if any(finding.severity != "info" for finding in found) else DONE


def report_command(arguments: Namespace) -> int:
    """Write the run as one HTML page; or its metrics as a table, if the file's name ends as one."""
    from grpo_nb.report.table_files import is_table, table

    check_out(arguments.out, "table" if is_table(arguments.out) else "report")
    run = existing_run(arguments.run)
    from grpo_nb.report.report import page  # after the check of the path: this import takes seconds

    file = Path(arguments.out or run.path / "report.html")
    write_atomically(file, table(run, file.suffix) if is_table(arguments.out) else page(run).encode())
    if arguments.json:
        show_json({"run": str(run.path), "file": str(file)})
    else:
        say(str(file))
    return DONE


def bundle_command(arguments: Namespace) -> int:
    """Write the zip of a bug report."""
    from grpo_nb.doctor.bug_report import bundle

    check_out(arguments.out, "bundle")
    run = existing_run(arguments.run)
    file = bundle(run, arguments.out)
    if arguments.json:
        show_json({"run": str(run.path), "file": str(file)})
    else:
        say(f"{file}: look through it before you send it")
    return DONE


def profile_command(arguments: Namespace) -> int:
    """Show seconds by phase and operator, and write the trace."""
    from grpo_nb.doctor.profiling import profile

    check_out(arguments.out, "trace")
    run = existing_run(arguments.run)
    result = profile(run, arguments.steps, out=arguments.out, **own_code(run).given("tasks", "rewards"))
    if arguments.json:
        floors = {floor.phase: floor.floor for floor in result.floors}
        show_json(
            {"run": str(run.path), "trace": str(result.trace), "seconds": result.seconds}
            | ({"floor_seconds": floors} if floors else {})
        )
        return DONE
    show(result.phase_rows())
    if result.rates:
        moved, multiplied = result.rates.bandwidth / 1e9, result.rates.products / 1e12
        say(f"floor: at {moved:.3g} GB/s and {multiplied:.3g} TFLOP/s, measured on this device")
    show(result.rows())
    if arguments.memory:
        show(result.memory.rows())
    say(f"{result.trace}: open it at https://ui.perfetto.dev")
    return DONE


def tell_command(arguments: Namespace) -> int:
    """Request a command from the run's trainer; 1 without a trainer."""
    run = existing_run(arguments.run)
    if "=" in arguments.what:
        return _turn(run, arguments.what)
    if arguments.what == UNDO:
        say(f"{run.shown}: {run.knobs.undo(by='the command line')} from the next step on")
        return DONE
    status = run.status()
    if not status.state.is_live:
        advice = _after_sft(run, status) or f"; grpo-nb train {run.shown}"
        say(f"{run.shown}: {status}, nothing trains it{advice}")
        return FAILED
    command = next(command for command in Command if command.label == arguments.what)
    run.knobs.request(command, by="the command line")
    say(f"{run.shown}: asked {status.owner} to {arguments.what}")
    return DONE


def _turn(run: Run, text: str) -> int:
    """Change a knob; the run's trainer takes it at the next step, or the next start does."""
    name, _, value = text.partition("=")
    knob = run.knobs[name]
    if value == "auto":
        knob.set_auto(by="the command line")
    else:
        knob.set(value, by="the command line")
    now = f"{knob.value:g}, by hand" if knob.mode == "manual" else "automatic"
    say(f"{run.shown}: {name} is {now} from the next step on")
    return DONE


def runs_command(arguments: Namespace) -> int:
    """List every run in a folder, the last changed first."""
    root = Path(arguments.root)
    if not root.is_dir():
        raise UsageError(
            f"no folder {root}; give the folder of your runs (grpo-nb train runs/demo --preset demo makes one)"
        )
    found = list_runs(root)
    if arguments.json:
        show_json([asdict(summary) for summary in found])
        return DONE
    rows: list[dict[str, str | None]] = [
        {"run": str(s.path), "state": state, "step": f"{step}/{steps}", "changed": _time(s.updated)}
        for s in found
        for state, step, steps in [s.shown]
    ]
    if any(s.problem for s in found):
        rows = [row | {"reason": _short(s.problem)} for row, s in zip(rows, found, strict=True)]
    show(rows, empty=f"no runs in {root}")
    return DONE


def doctor_command(arguments: Namespace) -> int:
    """Run the checks of this machine, or of the settings in a file; 1 if one fails."""
    if arguments.lint is not None:
        return _lint(arguments)
    if arguments.preset is not None:
        raise UsageError("--preset completes the settings of a file; give the file with --lint FILE")
    from grpo_nb.doctor import environment

    rows = [asdict(check) for check in environment()]
    if arguments.json:
        show_json(rows)
    else:
        show(rows, width=PROSE)
    return FAILED if any(row["status"] == "error" for row in rows) else DONE


def _lint(arguments: Namespace) -> int:
    """Show findings about settings in a file, and the source of the others; 1 if there are findings."""
    file: str = arguments.lint
    if missing := missing_file(file):
        raise UsageError(missing)
    from grpo_nb.doctor.settings_lint import completed_with, lint

    found, base = lint(file, arguments.preset), completed_with(file, arguments.preset)
    if arguments.json:
        show_json({"file": file, "completed_with": base, "findings": [asdict(finding) for finding in found]})
    else:
        for finding in found:
            say(one_line(finding))
        completed = f"; completed with {base}" + "; --preset NAME takes another" * (arguments.preset is None)
        say(f"{file}: {len(found)} finding(s){completed if base else ''}")
    return FAILED if found else DONE


def plan_command(arguments: Namespace) -> int:
    """Show memory by term; 1 if it does not fit."""
    from grpo_nb.policy import memory
    from grpo_nb.policy.memory_terms import PHASES, gib

    config = settings_of(arguments)
    if arguments.model:
        config = config.replace(**{"model.name": arguments.model})
    result = memory.plan(config, device_gib=arguments.gib)
    if arguments.json:
        show_json(
            asdict(result)
            | {
                "peak": result.peak,
                "fits": result.fits,
                "verdict": result.verdict,
                "inequalities": [asdict(condition) for condition in config.inequalities()],
            }
        )
    else:
        terms = [(t.name, gib(t.bytes), t.arithmetic, PHASES[t.phase]) for t in result.terms]
        show([dict(zip(("term", "memory", "arithmetic", "when"), term, strict=True)) for term in terms])
        for line in (config.geometry, *map(str, config.inequalities()), result.verdict, *result.advice):
            say(line)
    return DONE if result.fits else FAILED


def notebooks_command(arguments: Namespace) -> int:
    """Make copies of the project's notebooks to work in."""
    from grpo_nb.jupyter import copies

    rows = []
    for copy, state in copies.make(Path(arguments.folder or root() / copies.FOLDER)):
        rows.append({"notebook": os.path.relpath(copy), "state": state})
    show_json(rows) if arguments.json else show(rows)
    return DONE


def settings_command(arguments: Namespace) -> int:
    """List every setting with its value and its sentence."""
    found = settings(settings_of(arguments))
    if arguments.json:
        show_json([asdict(setting) for setting in found])
    else:
        show([{"key": s.key, "value": s.text, "meaning": s.meaning} for s in found])
        if not all(setting.active for setting in found):
            say(
                "(in brackets): a default inside a group that is null, or a list's item; set the complete group or list"
            )
    return DONE


def _short(reason: str | None) -> str | None:
    """The table's cell; --json has the reason in full."""
    return reason and textwrap.shorten(reason, REASON, placeholder=" ...")


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M}"
