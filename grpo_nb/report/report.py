"""Report of a run's files, without a live kernel: its picture, tables of its logs, its answers."""

from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from grpo_nb import plots
from grpo_nb.doctor import diagnose
from grpo_nb.doctor.reward_check import Bench
from grpo_nb.evaluation.compare import STAGES, Stage, three
from grpo_nb.evaluation.compare import comparison as stages_compared
from grpo_nb.evaluation.evaluate import ask, examples_of, restore_policy
from grpo_nb.evaluation.pareto import pareto
from grpo_nb.metrics import keys, limits
from grpo_nb.printable import clean_logger
from grpo_nb.report import aloud, tables
from grpo_nb.report.markup import Markup, html
from grpo_nb.report.tables import Table, cell, format_value, interval
from grpo_nb.rollout import choose, opened
from grpo_nb.rules.finding import named_in
from grpo_nb.run.dependencies_file import CHANGE
from grpo_nb.run.run import Run
from grpo_nb.run.status import MILESTONES
from grpo_nb.storage.digests import SHORT
from grpo_nb.storage.index import LogRows
from grpo_nb.storage.index.frames import narrowed
from grpo_nb.tasks import SPLITS, Task, load_tasks, selfcheck
from grpo_nb.types import Example, Prompt

logger = clean_logger(__name__)


@dataclass(frozen=True)
class Report:
    """The picture and the table of a run as they are on disk now."""

    figure: Figure
    table: Table

    def bundle(self) -> dict[str, str]:
        """The picture as a notebook keeps it, and its caption where there are no pictures."""
        return {
            "image/png": b64encode(plots.to_kept_png(self.figure)).decode(),
            "text/plain": self.table.caption or repr(self.table),
        }

    def picture(self) -> tuple[dict[str, str], dict[str, Any]]:
        """The bundle and its metadata, with the alternative text that pages made from a notebook show."""
        return self.bundle(), {"image/png": {"alt": f"{self.figure!r}. {self.table.caption}"}}

    def _ipython_display_(self) -> None:
        """Two outputs, so that the picture is a picture wherever the notebook is read, and is stored once."""
        from IPython.display import display

        data, metadata = self.picture()
        aloud.show(data, metadata["image/png"]["alt"])
        display(self.table)  # type: ignore[no-untyped-call]

    def __repr__(self) -> str:
        return repr(self.table)


def report(run: Run | str | Path, stage: Literal["grpo", "sft"] = "grpo") -> Report:
    """The dashboard's picture, and per objective the first and the newest numbers of the log; of a Run, name or path.

    Raises:
        RunError: there is no such run.
    """
    run = Run.of(run)
    if stage == "sft":
        return _sft_report(run)
    rows, status = run.stored("metrics"), run.status()
    caption = f"{run.name}: {status}"
    return Report(picture(run, rows), Table(first_and_last(rows, run.config.objectives), caption))


def _sft_report(run: Run) -> Report:
    rows = run.stored("sft")
    table = [
        {"mean of": title, "first steps": values[:5].mean(), "last steps": values[-5:].mean()}
        for title, key in _SFT_HEADLINES.items()
        if len(values := _known(rows, key))
    ]
    step = run.last_step("sft") or 0
    return Report(plots.sft(rows), Table(pd.DataFrame(table), f"{run.name}: step {step} of SFT"))


def _known(rows: LogRows, key: str) -> NDArray[np.float64]:
    """The finite values of a key, within its limits."""
    values = limits.bounded(key, rows.numbers(key).values)
    return values[np.isfinite(values)]


_SFT_HEADLINES = {"loss, nats per completion token": keys.LOSS, "gradient norm": keys.GRAD_NORM}


def page(run: Run | str | Path) -> str:
    """The files of a run as one HTML page, which needs neither kernel nor network; of a Run, its name or path.

    Raises:
        RunError: the run does not exist.
    """
    run = Run.of(run)
    parts: dict[str, Callable[[], list[Any]]] = {
        "Training": lambda: [report(run)],
        "Findings": lambda: [tables.findings(diagnose(run, quick=True))],
        "Before and after": lambda: [comparison(run)],
        "Which checkpoint": lambda: [] if (found := pareto(run)).empty else [plots.pareto(found), front(found)],
        "Answers": lambda: [samples(run, objective=name) for name in run.config.objectives],
        "Events": lambda: [events(run)],
        "Settings": lambda: [tables.changed_settings(run.config), tables.settings(run.config)],
        "Metrics": lambda: [glossary(run)],
    }
    return str(html("report", name=run.name, parts={title: _section(make) for title, make in parts.items()}))


def _section(make: Callable[[], list[Any]]) -> list[Markup]:
    """Content of a part of the page; an error message where the files of the run do not allow it."""
    try:
        return [*map(shown_as_html, make())]
    except Exception as error:  # whatever one file contains, the rest is shown
        logger.warning("a part of the page is left out", exc_info=True)
        return [Table(pd.DataFrame(), f"cannot be shown: {type(error).__name__}: {cell(error)}")._repr_html_()]


PAGES = {"overview": plots.dashboard, "rewards": plots.rewards, "machinery": plots.machinery}
"""Pictures that the dashboard turns between."""


def picture(
    run: Run,
    rows: LogRows | pd.DataFrame | None = None,
    page: str = "overview",
    events: pd.DataFrame | None = None,
) -> Figure:
    """One page of the dashboard, of the run's log as it is now, or of these rows and events."""
    rows = run.stored("metrics") if rows is None else rows
    if events is None:
        events = narrowed([*run.stored("events").having("kind", _MARKED)])
    updated = run.status().updated
    time = datetime.fromtimestamp(updated) if updated else None
    return PAGES[page](rows, run.config, events, name=run.name, updated=time)


_MARKED = MILESTONES | {"knob"}
"""Kinds of the events that a picture shows."""


def glossary(run: Run) -> Table:
    """Unit, meaning and healthy range of every kind of metric that the run's logs hold, folded."""
    return tables.glossary([*run.stored("metrics").keys, *run.stored("sft").keys])


def first_and_last(rows: LogRows, objectives: Iterable[str], window: int = 5) -> pd.DataFrame:
    """Mean of the first and of the last `window` steps, for what a run is judged by."""
    table = []
    for name in objectives:
        for title, key in _HEADLINES.items():
            values = _known(rows, key.of(name))
            if len(values):
                first, last = values[:window].mean(), values[-window:].mean()
                table.append({"objective": name, "mean of": title, "first steps": first, "last steps": last})
    return pd.DataFrame(table, columns=["objective", "mean of", "first steps", "last steps"])


_HEADLINES = {
    "reward": keys.REWARD,
    "KL to the reference, nats per token": keys.KL,
    "β": keys.BETA,
    "length, tokens": keys.LENGTH_MEAN,
    "share cut at the cap": keys.TRUNCATION,
    "share of groups without a signal": keys.FRAC_REWARD_ZERO_STD,
}


def evaluation(frame: pd.DataFrame) -> Table:
    """Table of one evaluation, one line per metric, with its 95% interval."""
    table = [
        {"objective": r.objective, "metric": r.metric, "value [95%]": interval(r.value, r.low, r.high)}
        | {"items": r.n, "clusters": r.clusters}
        for r in frame.itertuples()
    ]
    stage = frame["stage"].iloc[0] if len(frame) else ""
    return Table(pd.DataFrame(table), f"stage {stage}, held-out items")


def comparison(run: Run) -> Table:
    """Base, SFT and newest side by side on the same items, and what GRPO changed."""
    table, compared = [], stages_compared(run)
    for row in compared.to_dict("records"):
        line = {"objective": row["objective"], "metric": row["metric"]}
        for part in ("base", "sft", "latest", "difference"):
            title = {"difference": "change by GRPO [95%]", "latest": "after GRPO"}.get(part, part)
            line[title] = interval(*three(row, part))
        verdict = {True: "yes", False: "no"}.get(row["differs"], "")
        table.append(line | {"differs": verdict, "items": row["n"], "clusters": row["clusters"]})
    caption = f"{run.name}, the same held-out items at every stage"
    missing = [str(stage) for stage in STAGES if compared[str(stage)].isna().all()]
    return Table(pd.DataFrame(table), f"{caption}. {_to_evaluate(run, missing)}" if missing else caption)


def _to_evaluate(run: Run, missing: Sequence[str]) -> str:
    """Sentence with the calls that evaluate the stages a comparison lacks."""
    calls = ", ".join(f"grpo_nb.evaluate(run, stage={stage!r})" for stage in missing)
    return (
        f"Not evaluated yet: {', '.join(missing)}. To measure, run {calls} in a cell (own tasks: tasks=own.tasks), "
        f"or `grpo-nb eval {run.shown} --stage {missing[-1]}` in a terminal; then run this cell again"
    )


def front(stages: pd.DataFrame) -> Table:
    """`pareto`'s stages for reading: each objective's measure with its 95% interval, and what beats the stage."""
    measures = [str(name).removesuffix("_low") for name in stages if str(name).endswith("_low")]
    turn = "knee" if len(stages) > 1 else "the only one"
    table = [
        {"stage": row["stage"], "saved": "yes" if row["saved"] else "no"}
        | {name: interval(row[name], row[f"{name}_low"], row[f"{name}_high"]) for name in measures}
        | {"on the front": turn if row["knee"] else "yes" if row["front"] else "", "beaten by": row["dominated_by"]}
        for row in stages.to_dict("records")
    ]
    return Table(pd.DataFrame(table), "stages on the quick evaluation's questions" if table else "no quick evaluations")


def samples(run: Run, *, objective: str | None = None, step: int | None = None, limit: int = 4) -> Table:
    """Completions of the model, newest first, no answer twice; at `step`, or whenever it was logged last.

    Of a log longer than NEWEST_ROWS that many are looked through, and the caption states it where they were too few.
    """
    rows = islice(run.newest_first("samples"), NEWEST_ROWS) if step is None else _samples_at(run, step)
    shown: dict[tuple[Any, Any], dict[str, Any]] = {}
    looked = 0
    for row in rows:
        looked += 1
        if objective in (None, row.get("objective")):
            line = {"step": row["step"]} | {name: _text(row.get(name)) for name in _SAMPLE_COLUMNS}
            shown.setdefault((line["prompt"], line["completion"]), line)
        if len(shown) == limit:
            break
    title = objective or run.name
    what = f"{title}: the newest answers" if shown else f"{title}: {_no_samples(run, step)}"
    cut = len(shown) < limit and looked == NEWEST_ROWS
    lines = sorted(reversed(shown.values()), key=lambda row: -row["step"])  # of one step in the order of the log
    return Table(pd.DataFrame(lines), what + (f" (of the newest {looked:,} rows)" if cut else ""))


def _no_samples(run: Run, step: int | None) -> str:
    """Sentence that no samples were found, and the steps that have some."""
    newest = next(run.newest_first("samples"), None)
    if step is None or newest is None:
        return "no samples in the log"
    oldest = next(run.oldest_first("samples"), newest)
    return f"none at step {step}; samples of steps {oldest['step']} to {newest['step']}"


def _samples_at(run: Run, step: int) -> Iterator[Mapping[str, Any]]:
    rows = run.stored("samples")
    return rows.at(rows.equal("step", step)[::-1])


NEWEST_ROWS = 5_000
"""Rows of a long log that a page looks through for what it shows of the newest."""
_SAMPLE_COLUMNS = ("prompt", "completion", "label", "reward", "advantage", "stop_reason")


def events(run: Run, limit: int = 20) -> Table:
    """The newest events, latest first; checkpoints as a matter of routine are left out."""
    newest = islice(run.newest_first("events"), NEWEST_ROWS)
    found = [*islice((event for event in newest if event.get("kind") != "checkpoint"), limit)]
    rows = [
        {"time": format_value(e.get("time"), "time"), "step": e.get("step"), "kind": e.get("kind"), "what": _details(e)}
        for e in found
    ]
    caption = f"{run.name}: the newest {len(rows)} events" if rows else f"{run.name}: no events"
    return Table(pd.DataFrame(rows), caption)


def starts(run: Run) -> Table:
    """Every start and resume of GRPO in the log, and how each ended."""
    found = run.stored("events").having("kind", _STARTS.keys())
    rows = [{"step": e.get("step"), "what": _STARTS[e["kind"]]} for e in found]
    return Table(pd.DataFrame(rows), f"{run.name}: starts and ends" if rows else f"{run.name} was not started yet")


_STARTS = {
    "start": "started from the result of SFT, or from the model as loaded",
    "resume": "continued from the checkpoint of this step",
    "takeover": "took over from a trainer that had died",
    "stopped": "stopped on request",
    "torn": "ended inside an update, so training continues from the newest checkpoint",
    "step_undone": "ended inside a step, which was undone, so training continues from the previous step",
    "done": "reached the requested steps",
    "failed": "failed",
}


def knob_trace(run: Run, key: str, around: int, window: int = 3) -> Table:
    """The rows of the metrics on both sides of step `around`: the active values before and after a knob was changed."""
    rows = run.stored("metrics")
    steps = rows.numbers("step")
    near = rows.at(steps.at[(steps.values > around - window) & (steps.values <= around + window)])
    columns = ("step", key, key.replace("/", "_mode/", 1))
    table = pd.DataFrame([{name: row[name] for name in columns if name in row} for row in near])
    return Table(table, f"{key} active, step by step")


def sft_losses(run: Run) -> Table:
    """Loss on held-out pairs before and after SFT, nats per token."""
    found = {e.get("step"): e for e in run.stored("events").having("kind", {"sft_eval"})}  # the newest of each step
    rows = [{"SFT step": step, "loss": e.get("loss"), "pairs": e.get("n")} for step, e in found.items()]
    return Table(
        pd.DataFrame(rows), "loss on held-out pairs, nats per token" if rows else "SFT has measured no loss yet"
    )


def answers(run: Run, stage: Stage, *, limit: int = 2, tasks: Mapping[str, Task] | None = None) -> Table:
    """Greedy answers of a stage to the first held-out prompts of each objective."""
    policy = restore_policy(run, stage)
    table = []
    with opened(choose(None, policy, run.config.rollout).engine) as sampler:
        for name, task in load_tasks(run.config, run.path, tasks).items():
            pool = examples_of(run, name, task, limit=limit)
            rollouts = ask(policy, pool, run.config.sampling, sampler)
            for example, text, scored in zip(pool, rollouts.texts, rollouts.scored_texts, strict=True):
                score = task.score(example, scored)
                table.append(
                    {"objective": name, "prompt": _text(example.prompt), "gold": example.target, "answer": text}
                    | {"label": score.label, "reward": score.value}
                )
    return Table(pd.DataFrame(table), f"greedy answers, stage {stage}")


def selfchecks(tasks: Mapping[str, Task]) -> Table:
    """Check every task: gold answers score top, known bad ones do not. Table of its examples by split.

    Raises:
        DataError: an item where that fails, by id.
    """
    table = []
    for name, task in tasks.items():
        selfcheck(task)
        train, test = (len(task.examples(split)) for split in SPLITS)
        table.append({"objective": name, "task": task.name, "train": train, "test": test, "selfcheck": "gold on top"})
    return Table(pd.DataFrame(table), "examples by split, all of them checked")


def scored_examples(tasks: Mapping[str, Task], count: int = 1) -> Table:
    """Scores of each task for the gold answer, an abstention, another question's answer, and nothing."""
    table = []
    for name, task in tasks.items():
        examples = task.examples("train")
        for example in examples[:count]:
            other = next((e.target for e in examples if e.target != example.target), None)
            table += [
                _scored(name, task, example, kind, answer)
                for kind, answer in (("gold", example.target), *_BAD_ANSWERS.items(), ("of another question", other))
            ]
    return Table(pd.DataFrame(table), "what the scorers give good and bad answers")


def ranked(bench: Bench) -> Table:
    """The workbench's answers, prompt by prompt, the best paid first; equal ones once, with how often they came."""
    key = ["objective", "example", "kind", "answer", "reward"]
    frame = bench.answers.assign(times=bench.answers.groupby(key, dropna=False)["answer"].transform("size"))
    frame = frame.drop_duplicates(key)
    parts = [name for name in frame if str(name).startswith("part/") and frame[name].notna().any()]
    table = {
        "objective": frame["objective"],
        "prompt": frame["prompt"].mask(frame.duplicated(["objective", "example"]), '"'),
        "rank": frame["rank"],
        "kind": frame["kind"] + frame["what"].where(frame["what"] == "", ": " + frame["what"]),
        "answer": frame["answer"],
        "times": frame["times"],
        "label": frame["label"],
        "reward": frame["reward"],
        **({"shaped": frame["shaped"]} if "shaped" in frame else {}),
        **({str(name): frame[name] for name in parts} if len(parts) > 1 else {}),  # a lone one is the reward
        "tokens": frame["tokens"],
    }
    return Table(pd.DataFrame(table), "answers to a few training prompts, the best paid first")


_BAD_ANSWERS = {"abstaining": "Answer: Unknown", "empty": ""}


def _scored(name: str, task: Task, example: Example, kind: str, answer: str | None) -> dict[str, Any]:
    score = task.score(example, answer or "")
    return {
        "objective": name,
        "prompt": _text(example.prompt) if kind == "gold" else '"',
        "answer": f"{kind}: {answer}" if answer else kind,
        "reward": score.value,
        "label": score.label,
    }


def shown_as_html(shown: Report | Table | Figure) -> Markup:
    if isinstance(shown, Figure):
        return html("picture", words="picture", png=b64encode(plots.to_png(shown)).decode())
    if isinstance(shown, Report):
        picture = html("picture", words=shown.table.caption, png=shown.bundle()["image/png"])
        return picture + shown.table._repr_html_()
    return shown._repr_html_()


def _text(value: Prompt | Any) -> Any:
    """Chat turns as text; anything else as it is."""
    if isinstance(value, list | tuple):
        turns = [(turn.get("role"), turn.get("content") or "") for turn in value if isinstance(turn, Mapping)]
        return "\n".join(f"{role}: {content}" if len(turns) > 1 else str(content) for role, content in turns)
    return value


def _details(event: Mapping[str, Any]) -> str:
    """An event's own sentence, else its values; of content that a run depends on, only what is new or changed."""
    if sentence := event.get("message"):
        return str(sentence)
    entries = event.get("entries")
    if event.get("kind") == "dependencies" and isinstance(entries, Mapping):
        return f"{len(entries)} noted: {', '.join(entries)}"
    old, new = event.get("old"), event.get("new")
    if event.get("kind") == CHANGE and isinstance(old, Mapping) and isinstance(new, Mapping):
        changed = (f"{name} {_fact(name, old)} is now {_fact(name, new)}" for name in _differing(old, new))
        return f"{event.get('key')}: {', '.join(changed)}"
    if named := named_in(str(event.get("error") or "")):
        return f"because of {' and '.join(named)}"
    known = {"kind", "step", "time", "traceback"}
    pairs = ((key, value) for key, value in event.items() if key not in known and value is not None)
    return ", ".join(f"{key} {format_value(value, key)}" for key, value in pairs)


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    return [name for name in dict.fromkeys((*old, *new)) if old.get(name) != new.get(name)]


def _fact(name: str, facts: Mapping[str, Any]) -> str:
    """A digest as refusals show it; anything else as it is."""
    text = format_value(facts.get(name)) or "missing"
    return text[:SHORT] if name == "digest" else text
