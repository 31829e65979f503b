"""Shares one SFT between all runs whose settings need the same one."""

from collections.abc import Iterable

from grpo_nb.config import Config
from grpo_nb.preflight import dependencies
from grpo_nb.run.run import Run
from grpo_nb.run.settings import plain
from grpo_nb.training.sft import finished

_LATER = ("algorithm", "shaping", "guards", "rollout")
"""Groups of settings that SFT does not read."""
_LATER_KEYS = {
    "batch": ("prompts", "group_size", "micro_batch", "mini_batch", "num_iterations"),
    "sampling": ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    "run": (
        *("steps", "checkpoint_every", "keep_checkpoints", "checkpoints_gib", "samples_per_step", "eval_examples"),
        *("quick_eval_every", "quick_eval_examples", "rank_timeout"),
    ),
}
_OF_OBJECTIVE = ("task", "data")
"""Settings of an objective that SFT reads, where it has no data of its own."""


def same_sft(a: Config, b: Config) -> bool:
    """Whether SFT with these settings gives the same weights."""
    return all(_later(key, own=a.sft.data is not None and b.sft.data is not None) for key in a.differences(b))


def _later(key: str, own: bool) -> bool:
    """Whether a setting is read after SFT only; `own`: SFT has data of its own."""
    group, _, rest = key.partition(".")
    if group == "objectives":
        return own or (rest.count(".") > 0 and rest.split(".")[1] not in _OF_OBJECTIVE)
    return group in _LATER or rest in _LATER_KEYS.get(group, ())


def adopt(run: Run, others: Iterable[Run]) -> Run | None:
    """Copy the finished SFT of the first run with the same SFT settings to `run`; returns that run, or None.

    `run` must keep the content that it was made with, e.g. the base weights, from here on.

    Raises:
        RunLocked: somebody trains `run`.
    """
    for other in others:
        newest, _ = other.sft_checkpoints.latest(finite=True)
        if newest is None or not finished(other) or not same_sft(other.config, run.config):
            continue
        with run.lock():
            if finished(run):  # another process was first
                return run
            dependencies.inherit(run, other)
            tensors = {name: newest.tensors(name) for name in newest.names()}
            run.sft_checkpoints.save(newest.step, tensors, {**newest.state(), "config": plain(run.config)})
            run.log_event("sft_adopted", step=0, sft_steps=newest.step, of=other.path.name)
        return other
    return None
