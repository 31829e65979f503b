"""MLflow: the run's numbers in the store of MLFLOW_TRACKING_URI, by default MLflow's own (`mlflow.db`)."""

import hashlib
import os
import posixpath
import re
import time
from collections.abc import Sequence
from importlib import import_module
from itertools import islice
from typing import Any

from grpo_nb.config.trackers import mlflow_store
from grpo_nb.trackers.tracker import About, Point, Tracker

RUN, NEWEST = "grpo_nb.run", "grpo_nb.newest."
"""Tags: the run's id, and the newest step of each log, written with its numbers."""
MOST_METRICS, MOST_PARAMS, LONGEST_KEY, LONGEST_VALUE = 1000, 100, 250, 500
"""Limits of one request, and of one name and value."""


class MLflow:
    """A run of MLflow, found again by its tag."""

    def __init__(self, about: About) -> None:
        client: Any = import_module("mlflow").MlflowClient(tracking_uri=mlflow_store())
        self._entities: Any = import_module("mlflow.entities")
        self._client = client
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "grpo_nb"
        experiment = client.get_experiment_by_name(name)
        number = client.create_experiment(name) if experiment is None else experiment.experiment_id
        found = client.search_runs([number], filter_string=f"tags.`{RUN}` = '{about.id}'", max_results=1)
        self.fresh, self.newest = not found, dict.fromkeys(("sft", "metrics"), 0)
        if found:
            tags = found[0].data.tags
            self._run: str = found[0].info.run_id
            self.newest = {log: int(tags.get(NEWEST + log, 0)) for log in self.newest}
            client.update_run(self._run, status="RUNNING")
        else:
            self._run = client.create_run(number, run_name=about.name, tags={RUN: about.id}).info.run_id
            self._settings(about)

    def log(self, points: Sequence[Point]) -> None:
        now = int(time.time() * 1000)
        waiting: list[Any] = []
        newest: dict[str, int] = {}
        for point in points:
            own = [
                self._entities.Metric(_name(k), v, now, point.step)
                for k, v in islice(point.numbers.items(), MOST_METRICS)
            ]
            if len(waiting) + len(own) > MOST_METRICS:
                self._write(waiting, newest)
                waiting = []
            waiting += own
            newest[point.log] = point.step
        self._write(waiting, newest)

    def close(self) -> None:
        self._client.set_terminated(self._run)

    def _write(self, metrics: list[Any], newest: dict[str, int]) -> None:
        """Send one request: the numbers, and the step up to which they go."""
        tags = [self._entities.RunTag(NEWEST + log, str(step)) for log, step in newest.items()]
        self._client.log_batch(self._run, metrics=metrics, tags=tags)

    def _settings(self, about: About) -> None:
        params = [self._entities.Param(_name(k), str(v)[:LONGEST_VALUE]) for k, v in about.settings.items()]
        for first in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._run, params=params[first : first + MOST_PARAMS])


def _name(key: str) -> str:
    """The key as MLflow's names may be: it takes letters of any language, and refuses what a path would shorten.

    One that was changed ends in a digest of what it was, so that no two keys become one.

    >>> _name("reward/fairness/mean"), _name("a|b")
    ('reward/fairness/mean', 'a_b.0eab8a')
    """
    plain = re.sub(r"[^\w\-. :/]", "_", key)[:LONGEST_KEY]
    path = posixpath.normpath(plain).lstrip("/.") or "_"
    if path == key:
        return key
    digest = hashlib.sha256(key.encode()).hexdigest()[:6]
    return f"{path[: LONGEST_KEY - len(digest) - 1]}.{digest}"


def opened(about: About) -> Tracker:
    """MLflow for a run."""
    return MLflow(about)
