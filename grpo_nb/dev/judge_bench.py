"""Cost of a judge per step: `python -m grpo_nb.dev.judge_bench --steps 4`.

Steps of a preset with a judge of every objective, against a server in a process of its own that takes 0, 1 or 3 s for
a verdict, and one that allows 20 requests a second. Nothing is in the judge's cache when a step begins.
"""

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from grpo_nb import presets
from grpo_nb.cli.values import setting
from grpo_nb.config import Config
from grpo_nb.dev import bench
from grpo_nb.metrics import keys


@dataclass(frozen=True)
class Server:
    """Behaviour of a server."""

    name: str
    latency: float
    """Seconds of a reply."""
    rate: float | None = None
    """Requests a second beyond which it answers 429; None: any."""

    @contextmanager
    def running(self) -> Iterator[str]:
        """Address of the server, while it runs."""
        command = [sys.executable, "-m", "grpo_nb.dev.judge_server", "--latency", str(self.latency)]
        command += [] if self.rate is None else ["--rate", str(self.rate)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
            finally:
                process.terminate()


SERVERS = (Server("0 s", 0), Server("1 s", 1), Server("3 s", 3), Server("0 s, 20 a second", 0, 20))


def judged(config: Config, url: str) -> Config:
    """The settings with a judge of every objective; existing settings of a judge stay."""
    given = {"providers": [{"model": "checksum", "base_url": url, "api_key_env": None}], "budget_tokens": None}
    judges = {name: objective.judge for name, objective in config.objectives.items()}
    return config.replace(
        **{
            f"objectives.{name}.judge": (judge.model_dump(exclude_unset=True) if judge else {}) | given
            for name, judge in judges.items()
        }
    )


def total(rows: Sequence[Mapping[str, Any]], family: keys.Key, config: Config) -> float:
    """Median over the steps of a number, summed over the objectives."""
    return statistics.median(sum(row.get(family.of(name)) or 0 for name in config.objectives) for row in rows)


def table(found: Mapping[str, Sequence[Mapping[str, Any]]], config: Config) -> Table:
    """Table of the median step by server, compared with the step without a judge, the first row."""
    drawn = Table(box=None, pad_edge=False)
    for name in ("server", "step", "added", "score", "waited", "requests", "too many", "no verdict"):
        drawn.add_column(name, justify="left" if name == "server" else "right")
    steps = {name: statistics.median(row[keys.TIME_STEP] for row in rows) for name, rows in found.items()}
    alone = next(iter(steps.values()))
    for name, rows in found.items():
        waited = statistics.median(max(row.get(keys.TIME_JUDGE.of(n)) or 0 for n in config.objectives) for row in rows)
        counts = [total(rows, family, config) for family in (keys.JUDGE_ASKED, keys.JUDGE_LIMITED, keys.JUDGE_FAILED)]
        score = statistics.median(row[keys.TIME.of("score")] for row in rows)
        seconds = [steps[name], steps[name] - alone, score, waited]
        drawn.add_row(name, *(f"{s:.2f} s" for s in seconds), *(f"{count:.0f}" for count in counts))
    return drawn


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m grpo_nb.dev.judge_bench", description=__doc__)
    parser.add_argument("--preset", choices=sorted(presets.PRESETS), default="demo")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--set", dest="changes", type=setting, action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args(argv)
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}; needs 1 or more")
    config = presets.PRESETS[arguments.preset]().replace(**dict(arguments.changes))
    found = {"no judge": bench.measure(config, arguments.steps)}
    for server in SERVERS:
        with server.running() as url:
            found[server.name] = bench.measure(judged(config, url), arguments.steps)
    console = Console(soft_wrap=True, highlight=False)
    console.print(table(found, config))
    console.print(config.geometry)
    console.print("score: what the step took to score its completions, waiting included")
    console.print(f"waited: from the last completion to the last verdict; {bench.machine()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
