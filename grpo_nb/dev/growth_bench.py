"""Cost of looking at a long run: `python -m grpo_nb.dev.growth_bench`.

Run folders of growing length are made; then each thing that a person does with one is done in a process of its own,
which prints its seconds and the MiB that it took beyond importing the package.
"""

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_nb import presets
from grpo_nb.metrics import keys
from grpo_nb.printable import clean_logger
from grpo_nb.run.run import Run
from grpo_nb.storage.files import to_json

logger = clean_logger(__name__)

LENGTHS = (10_000, 100_000, 1_000_000)
SAMPLES_MIB = (100, 1000)
TASKS = {
    "list": "list_runs({folder!r})",
    "open": "run = Run.open({run!r}); run.status(); repr(run)",
    "index": "len(Run.open({run!r}).stored('metrics'))",
    "report": "report.report(Run.open({run!r})).bundle()",
    "diagnose": "diagnose(Run.open({run!r}))",
    "page": "report.page(Run.open({run!r}))",
    "samples": "report.samples(Run.open({run!r}))",
}
_MEASURE = """
import json, resource, sys, time
from grpo_nb.doctor import diagnose
from grpo_nb.report import report
from grpo_nb.run.listing import list_runs
from grpo_nb.run.run import Run
unit = 2**20 if sys.platform == "darwin" else 2**10
before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
exec(sys.argv[1])
taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps([time.perf_counter() - began, taken / unit]))
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0: measured."""
    parser = argparse.ArgumentParser(
        prog="python -m grpo_nb.dev.growth_bench", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--steps", type=int, nargs="*", default=LENGTHS, help="steps of the runs")
    parser.add_argument("--samples", type=int, nargs="*", default=SAMPLES_MIB, help="MiB of samples of the runs")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which a measurement is given up")
    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s")
    logger.setLevel(logging.INFO)
    with tempfile.TemporaryDirectory(prefix="grpo_nb-") as folder:
        os.environ["GRPO_NB_CACHE_DIR"] = os.environ["GRPO_NB_CONFIG_DIR"] = f"{folder}/own"
        for line in measured(Path(folder), options.steps, options.samples, options.limit):
            logger.info("%s", line)
    logger.info("%d CPU cores; MiB beyond importing the package", os.cpu_count() or 0)
    return 0


def measured(folder: Path, lengths: Sequence[int], samples: Sequence[int], limit: float) -> Iterator[str]:
    """Table with one line for each action on a run of each length."""
    yield f"{'log':>24}  {'what is done':<18} {'seconds':>9} {'MiB':>7}"
    for steps in lengths:
        run = long_run(folder / f"steps-{steps}" / "run", steps)
        size = (run / "metrics.jsonl").stat().st_size
        title = f"{steps:,} steps, {size / 2**20:,.0f} MiB"
        yield from _lines(run, title, ("list", "open", "index", "report", "diagnose", "page"), limit, size)
    for mib in samples:
        run = many_samples(folder / f"samples-{mib}" / "run", mib)
        yield from _lines(run, f"{mib:,} MiB of samples", ("samples", "page", "diagnose", "diagnose"), limit)


def long_run(path: Path, steps: int) -> Path:
    """A run of so many steps, without models: metrics as a step of two objectives logs them, an event in a hundred."""
    run = Run.create(path, presets.demo().replace(**{"run.steps": steps}))
    noise = np.random.default_rng(0)
    with (path / "metrics.jsonl").open("wb") as metrics, (path / "events.jsonl").open("wb") as events:
        events.write(to_json({"time": time.time(), "kind": "start", "step": 0, "goal": steps}) + b"\n")
        for step in range(1, steps + 1):
            metrics.write(to_json(metric_row(step, steps, noise.random(64).tolist())) + b"\n")
            if step % 100 == 0:
                events.write(to_json({"time": time.time(), "kind": "checkpoint", "step": step}) + b"\n")
        events.write(to_json({"time": time.time(), "kind": "done", "step": steps}) + b"\n")
    run.checkpoints.save(steps, {"policy": {}}, {"step": steps})
    return path


def many_samples(path: Path, mib: int) -> Path:
    """A run with so many MiB of samples, token by token."""
    Run.create(path, presets.demo())
    with (path / "samples.jsonl").open("wb") as file:
        step = 0
        while file.tell() < mib << 20:
            step += 1
            file.writelines(to_json(_sample(step, n)) + b"\n" for n in range(8))
    return path


def metric_row(step: int, steps: int, noise: list[float]) -> dict[str, Any]:
    """A healthy step in numbers."""
    done = step / steps
    row: dict[str, Any] = {keys.STEP: step, keys.STATUS: "ok", keys.GRAD_SKIPPED: 0, keys.LOSS: 0.01 * noise[0]}
    row |= {
        keys.RATIO_MAX_DEVIATION: 0.0,
        keys.RATIO_CLAMPED: 0.0,
        keys.CLIP_RATIO_LOW: 0.0,
        keys.CLIP_RATIO_HIGH: 0.01 * noise[1],
    }
    row |= {keys.GRAD_NORM: 0.3 + 0.1 * noise[2], keys.GRAD_UPDATE: 1e-4 * (1 + noise[3])}
    row |= {keys.GRAD_COSINE: noise[4] - 0.4, keys.LR: 3e-4, keys.TEMPERATURE: 1.0, keys.TOKENS: 900}
    row |= {keys.SAMPLER_DIFFERENCE.mean: 1e-7 * noise[5], keys.MEMORY_PEAK: 850.0}
    phases = ("rollout", "score", "update", "step")
    row |= {keys.TIME.of(phase): 0.1 * (1 + noise[6 + n]) for n, phase in enumerate(phases)}
    for n, name in enumerate(("fairness", "hallucination")):
        correct = 0.5 + 0.3 * done + 0.05 * noise[10 + n]
        row |= {keys.REWARD.of(name): correct, keys.REWARD_STD.of(name): 0.3 - 0.1 * done + 0.01 * noise[12 + n]}
        row |= {keys.REWARD_PART.of(name, "task"): correct, keys.SCORED.of(name): 1.0, keys.UNSCORED_GROUPS.of(name): 0}
        row |= {keys.FRAC_REWARD_ZERO_STD.of(name): 0.2 + 0.1 * noise[14 + n], keys.LABEL.of(name, "correct"): correct}
        row |= {keys.LABEL.of(name, "wrong"): 0.98 - correct, keys.LABEL.of(name, "unparsed"): 0.02}
        row |= {keys.KL.of(name): 0.0 if step == 1 else 0.05 + 0.01 * noise[16 + n]}
        row |= {keys.KL_K1.of(name): 0.05 * noise[18 + n], keys.BETA.of(name): 0.04, keys.BETA_MODE.of(name): "auto"}
        row |= {keys.TRUNCATION.of(name): 0.02, keys.LENGTH_MEAN.of(name): 6.0 + noise[20 + n]}
        row |= {keys.LENGTH_P50.of(name): 6.0, keys.LENGTH_P95.of(name): 9.0}
        row |= {keys.ENTROPY.of(name): 0.5 - 0.3 * done + 0.01 * noise[22 + n]}
        row |= {keys.GRAD_NORM_OF.of(name): 0.3 + noise[24 + n]}
    return row


def _sample(step: int, n: int) -> dict[str, Any]:
    text = f"the answer {step} {n} " + "c " * 55
    return {
        "step": step, "objective": ("fairness", "hallucination")[n % 2], "example": f"e{n}", "prompt": "p" * 300,
        "completion": text, "reward": 1.0, "advantage": 0.1, "label": "correct", "stop_reason": "stop", "tokens": 60,
        "token_texts": ["c "] * 60, "logprobs_old": [-0.1] * 60, "logprobs_reference": [-0.1] * 60,
    }  # fmt: skip


def _lines(run: Path, title: str, tasks: Sequence[str], limit: float, size: int = 0) -> Iterator[str]:
    for task in tasks:
        done = _measure(TASKS[task].format(run=str(run), folder=str(run.parent)), limit)
        yield f"{title:>24}  {task:<18} " + (done if isinstance(done, str) else _figures(task, *done, size))


def _figures(task: str, seconds: float, mib: float, size: int) -> str:
    rate = f"  {size / seconds / 1e6:.0f} MB/s" if task == "index" else ""
    return f"{seconds:9.2f} {mib:7.0f}{rate}"


def _measure(code: str, limit: float) -> tuple[float, float] | str:
    """Seconds and MiB of some code in a process of its own; an error text where it took too long or died."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _MEASURE, code], capture_output=True, text=True, timeout=limit, check=True
        )
    except subprocess.TimeoutExpired:
        return f"over {limit:.0f} s"
    except subprocess.CalledProcessError as error:
        return f"failed: {(error.stderr.splitlines() or [''])[-1]}"
    seconds, mib = json.loads(done.stdout.splitlines()[-1])
    return seconds, mib


if __name__ == "__main__":
    sys.exit(main())
