"""The measured result of `presets.gpu_result`: arms, seeds, and every answer.

    python -m grpo_nb.dev.result sweeps/result --devices 0 --jobs 4 --take notebooks/result

Trains and evaluates what is left of the study, has the end of each run answer everything that is held out, a category
that no run learns from, HaluEval's yes-or-no recognition and the general probe, and with `--take` writes what notebook
07 reads: results.csv, curves.csv, front.csv, examples.csv, and the answers as predictions that `grpo-nb score` reads.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from os import environ
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from grpo_nb import presets
from grpo_nb.cli import values
from grpo_nb.dev.result_answers import LARGEST, OBJECTIVES, Sources, answer_file, answered, examples, measures
from grpo_nb.evaluation.compare import Stage
from grpo_nb.evaluation.pareto import pareto
from grpo_nb.metrics import keys
from grpo_nb.storage import safe_open
from grpo_nb.storage.files import write_atomically
from grpo_nb.sweeps import Arm, Study, sweep
from grpo_nb.sweeps.plan import Trial
from grpo_nb.sweeps.results import Key, Value, compared, curves
from grpo_nb.sweeps.work import measured, stages

_NEXT_TO_NOTHING = 1e-6
"""An objective's weight has to be above 0."""
SECONDS = 760
"""Steps of SFT that take as long as 300 and then 100 steps of GRPO, at 4.6 a step on the same GPU."""
ARMS = {
    "sft": Arm(grpo=False),
    "grpo": Arm(),
    "sft-same-seconds": Arm(changes={"sft.steps": SECONDS}, grpo=False),
    "sft-same-examples": Arm(changes={"sft.steps": 400, "sft.share": 1.0}, grpo=False),
    "no-kl": Arm(changes={f"objectives.{o}.{k}": v for o in OBJECTIVES for k, v in (("beta", 0), ("kl_band", None))}),
    "fairness-alone": Arm(changes={"objectives.hallucination.weight": _NEXT_TO_NOTHING}),
    "hallucination-alone": Arm(changes={"objectives.fairness.weight": _NEXT_TO_NOTHING}),
    "pcgrad": Arm(changes={"algorithm.combine": "pcgrad"}),
    "upgrad": Arm(changes={"algorithm.combine": "upgrad"}),
}
"""The study's own table compares with the first."""
REFERENCE = "grpo"
"""The arm that results.csv compares the others with."""
EXAMPLES = 5
"""Examples of each objective whose answers are shown."""
CURVES = [key.of(name) for key in (keys.REWARD, keys.KL, keys.BETA) for name in OBJECTIVES]


def study(folder: Path, model: str, bbq: str, halueval: str, seeds: Sequence[int]) -> Study:
    """The study in a folder, created if it is missing."""
    return sweep(folder, presets.gpu_result(model, bbq, halueval), ARMS, seeds)


def ends(study: Study) -> Iterator[tuple[Trial, Stage]]:
    """The trials and stages that were evaluated."""
    for trial in study.trials:
        if run := trial.readable():
            yield from ((trial, stage) for stage in stages(trial) if measured(run, trial, stage))


def answer(study: Study, sources: Sources, jobs: int, devices: Sequence[int]) -> list[str]:
    """Let every end answer its remaining questions, each in a process of its own; returns the commands that failed."""
    left = [
        [sys.executable, "-m", "grpo_nb.dev.result_answers", str(trial.path), str(stage), sources.unseen, sources.qa]
        for trial, stage in ends(study)
        if not answered(trial.path, stage)
    ]
    places = cycle([{"CUDA_VISIBLE_DEVICES": str(device)} for device in devices] or [{}])

    def call(command: list[str], place: dict[str, str]) -> bool:
        return subprocess.run(command, env={**environ, **place}, check=False).returncode == 0

    with ThreadPoolExecutor(jobs * max(1, len(devices))) as pool:
        done = list(pool.map(call, left, places))
    return [" ".join(command[2:5]) for command, well in zip(left, done, strict=True) if not well]


def take(study: Study, sources: Sources, out: Path) -> None:
    """Write the data of notebook 07, of the runs that have answered; one that stopped early counts as it is.

    Raises:
        RunError: the runs whose answers are shown have not answered yet, or a file of answers is damaged; nothing is
            written.
    """
    found: dict[Key, dict[int, Value]] = {}
    predictions: dict[str, bytes] = {}
    for trial in study.trials:
        for stage in stages(trial) if trial.readable() else ():
            if not answered(trial.path, stage):
                continue
            for place, metric, value in measures(trial, stage, sources):
                found.setdefault(Key(trial.arm, str(stage), place, metric), {})[trial.seed] = value
            for kind in OBJECTIVES.values():
                made = answer_file(trial.path, str(stage), kind)
                predictions[made.name] = safe_open.read(made, LARGEST)
    drawn = pd.DataFrame([row for trial in study.trials for row in _curves(trial)])
    fronts = [(trial.seed, trial.readable()) for trial in study.trials if trial.arm == REFERENCE]
    tables = {
        "examples": pd.DataFrame(examples(study, EXAMPLES)),  # refused where a run that it shows has not answered
        "results": compared(found, REFERENCE).round(6),
        "curves": drawn,
        "front": pd.concat([pareto(run).assign(seed=seed) for seed, run in fronts if run]).round(5),
    }
    (out / "predictions").mkdir(parents=True, exist_ok=True)
    for name, data in predictions.items():
        write_atomically(out / "predictions" / name, data)
    for name, table in tables.items():
        write_atomically(out / f"{name}.csv", table.to_csv(index=False).encode())


def _curves(trial: Trial) -> Iterator[dict[str, Any]]:
    """A row for each step of a run's GRPO."""
    drawn = {key: arms[trial.arm][0] for key, arms in curves([trial], CURVES).items() if trial.arm in arms}
    if drawn:
        steps = next(iter(drawn.values()))[0]
        for place, step in enumerate(steps):
            shown = {key: round(float(numbers[place]), 5) for key, (_, numbers) in drawn.items()}
            yield {"arm": trial.arm, "seed": trial.seed, "step": int(step)} | shown


def main() -> int:
    """Do the remaining work, and show the table."""
    usual = presets.gpu_result()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="STUDY")
    parser.add_argument("--model", default=usual.model.name, help="a hub id or a folder")
    parser.add_argument("--bbq", default=usual.objectives["fairness"].data)
    parser.add_argument("--qa", default=usual.objectives["hallucination"].data)
    parser.add_argument("--unseen", default="data/bbq_more", help="BBQ's categories that no run learns from")
    parser.add_argument("--seeds", type=values.seeds, default=(0, 1, 2))
    parser.add_argument("--only", action="append", default=[], metavar="ARM")
    parser.add_argument("--jobs", type=values.count, default=1, help="runs at a time, on each GPU")
    parser.add_argument("--devices", type=values.seeds, default=())
    parser.add_argument("--take", type=Path, metavar="FOLDER", help="where to write what notebook 07 reads")
    parser.add_argument("--ask", action="store_true", help="train nothing; have what has ended answer")
    parser.add_argument("--show", action="store_true", help="neither train nor ask")
    given = parser.parse_args()
    made = study(given.folder, given.model, given.bbq, given.qa, given.seeds)
    sources, console, failed = Sources(given.qa, given.unseen), Console(), []
    if not given.show and not given.ask:
        console.print(str(made.train(given.jobs, given.devices, given.only)))
    if not given.show:
        failed = answer(made, sources, given.jobs, given.devices)
    if given.take:
        take(made, sources, given.take)
    console.print(str(made.table()))
    for command in failed:
        console.print(f"failed: {command}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
