"""The planner: the memory of a configuration, term by term with its arithmetic, and the settings to lower.

    plan(presets.gpu_24gb(), device_gib=24)

The numbers are for every prompt and completion at its cap, so a run stays below them. Where all were, an H200 measured
7.9 GiB for 8.2 planned (Qwen3-0.6B's shape, 64 completions, LoRA) and 19.6 for 19.7 (Llama-3.1-8B's, 8 completions):
`python -m grpo_nb.dev.peer --size 0.6b` and `8b`.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from grpo_nb.config import Config, ConfigError
from grpo_nb.policy.memory_terms import GIB, PHASES, Phase, Term, gib, terms
from grpo_nb.policy.shapes import ModelShape, shape_of

USABLE = 0.9
"""Share of a device that tensors can have: its context, kernels and fragmentation take about a tenth."""


@dataclass(frozen=True)
class Plan:
    """Bytes by term, against the device. The peak is the permanent memory plus the largest phase."""

    shape: ModelShape
    terms: tuple[Term, ...]
    device_gib: float
    advice: tuple[str, ...] = ()
    """Settings to change, in order, until it fits; each with the peak that it leaves."""

    def held(self, phase: Phase) -> int:
        """Bytes of one phase's own terms."""
        return sum(term.bytes for term in self.terms if term.phase == phase)

    @property
    def hungriest(self) -> Phase:
        """The phase that sets the peak."""
        phases: list[Phase] = [phase for phase in PHASES if phase != "always"]
        return max(phases, key=self.held)

    def needs(self, phase: Phase) -> int:
        """Bytes allocated during one phase."""
        return self.held("always") + (0 if phase == "always" else self.held(phase))

    @property
    def peak(self) -> int:
        return self.needs(self.hungriest)

    @property
    def budget(self) -> int:
        """Bytes of the device that tensors can have."""
        return int(self.device_gib * GIB * USABLE)

    @property
    def fits(self) -> bool:
        return self.peak <= self.budget

    @property
    def verdict(self) -> str:
        """One sentence: whether the plan fits, its peak and the usable memory."""
        have = f"{gib(self.budget)} usable of {round(self.device_gib, 1):g} GiB"
        if self.fits:
            return f"fits: peak {gib(self.peak)} {PHASES[self.hungriest]}, {have}"
        return f"does not fit: peak {gib(self.peak)} {PHASES[self.hungriest]}, {have}"

    def __str__(self) -> str:
        width = max(len(term.name) for term in self.terms)
        rows = [f"{t.name:<{width}}  {gib(t.bytes):>10}  {t.arithmetic}  ({PHASES[t.phase]})" for t in self.terms]
        return "\n".join([*rows, self.verdict, *self.advice])


def plan(config: Config, shape: ModelShape | None = None, device_gib: float | None = None) -> Plan:
    """Estimate the memory of training `config` by term, whether it fits, and which settings to lower if it does not.

    Args:
        shape: of the model; None reads it from the model that `config.model.name` names.
        device_gib: GiB of the device; None measures this machine's.

    Raises:
        ModelError: the model's shape cannot be found.
        ConfigError: the device has no memory to plan for.
    """
    on_gpu = _plans_for_gpu(config, device_gib)
    shape = shape or shape_of(config.model.name, config.run.seed)
    device_gib = measure_device(config) if device_gib is None else device_gib
    if not device_gib > 0:
        raise ConfigError(f"a device of {device_gib:g} GiB holds nothing; give its memory in GiB, e.g. 24")
    first = Plan(shape, terms(config, shape, on_gpu), device_gib)
    return first if first.fits else Plan(shape, first.terms, device_gib, tuple(_advice(config, first, on_gpu)))


def measure_device(config: Config) -> float:
    """GiB of the device that `config` would use: the GPU's memory, else this machine's."""
    device = config.model.device
    if device != "cpu" and torch.cuda.is_available():
        index = torch.device(device).index if device.startswith("cuda:") else 0
        return float(torch.cuda.get_device_properties(index or 0).total_memory / GIB)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB


def _plans_for_gpu(config: Config, device_gib: float | None) -> bool:
    device = config.model.device
    return device != "cpu" and (device != "auto" or device_gib is not None or torch.cuda.is_available())


Change = tuple[str, Callable[[Config], dict[str, Any] | None]]
"""Name of a rung of the ladder, and the settings it changes; None where it has nothing left to lower."""


def _advice(config: Config, short: Plan, on_gpu: bool) -> Iterator[str]:
    """Rungs of the ladder, taken one after the other until it fits; then the settings that this comes to."""
    present, settled, reasons = short, dict[str, Any](), dict[str, str]()
    while not present.fits:
        found = _next_rung(config, present, on_gpu)
        if found is None:
            break
        why, changes, config, present = found
        settled |= changes
        reasons |= dict.fromkeys(changes, why)
    for key, value in settled.items():
        yield f"set {key}={_shown(value)}: {reasons[key]}"
    if present.fits:
        yield f"then it fits: peak {gib(present.peak)} {PHASES[present.hungriest]}"
    else:
        yield f"then it still needs {gib(present.peak)}: take a larger device or a smaller model"


def _next_rung(config: Config, before: Plan, on_gpu: bool) -> tuple[str, dict[str, Any], Config, Plan] | None:
    """The first rung that lowers the largest phase; the cheapest rungs are first in the ladder."""
    phase: Phase = "always" if before.held("always") > before.budget else before.hungriest
    for why, lower in _LADDER:
        changes = lower(config)
        if changes is None:
            continue
        lowered = config.replace(**changes)
        after = Plan(before.shape, terms(lowered, before.shape, on_gpu), before.device_gib)
        if after.needs(phase) < before.needs(phase):
            return why, changes, lowered, after
    return None


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _halve(value: int, floor: int = 1) -> int | None:
    return value // 2 if value % 2 == 0 and value // 2 >= floor else None


def _micro_batch(config: Config) -> dict[str, Any] | None:
    half = _halve(min(config.batch.micro_batch, config.batch.update_size))
    return {"batch.micro_batch": half} if half and config.batch.update_size % half == 0 else None


def _sft_micro_batch(config: Config) -> dict[str, Any] | None:
    half = _halve(min(config.sft.micro_batch, config.sft.batch))
    return {"sft.micro_batch": half} if half else None


def _checkpointing(config: Config) -> dict[str, Any] | None:
    return None if config.model.gradient_checkpointing else {"model.gradient_checkpointing": True}


def _lora(config: Config) -> dict[str, Any] | None:
    return None if config.model.train == "lora" else {"model.train": "lora"}


def _snapshot(config: Config) -> dict[str, Any] | None:
    moves = config.guards.rollback and config.guards.snapshot == "device" and config.model.device != "cpu"
    return {"guards.snapshot": "host"} if moves else None


def _half_precision(config: Config) -> dict[str, Any] | None:
    wide = config.model.dtype == "float32" and config.model.device != "cpu" and config.model.train == "lora"
    return {"model.dtype": "bfloat16"} if wide else None


def _prompts(config: Config) -> dict[str, Any] | None:
    half = _halve(config.batch.prompts, len(config.objectives))
    if half is None or half % len(config.objectives):
        return None
    return _fewer(config, prompts=half)


def _group(config: Config) -> dict[str, Any] | None:
    half = _halve(config.batch.group_size, 2)
    return _fewer(config, group_size=half) if half else None


def _fewer(config: Config, **changes: int) -> dict[str, Any]:
    """Fewer completions a step, with a micro-batch that still divides them, in one update."""
    batch = {"prompts": config.batch.prompts, "group_size": config.batch.group_size} | changes
    completions = batch["prompts"] * batch["group_size"]
    micro = config.batch.micro_batch
    fitting = micro if micro >= completions or completions % micro == 0 else batch["group_size"]
    named = {f"batch.{key}": value for key, value in changes.items()}
    extra = {"batch.micro_batch": fitting} if fitting != micro else {}
    return named | extra | ({"batch.mini_batch": None} if config.batch.mini_batch else {})


def _completion(config: Config) -> dict[str, Any] | None:
    half = _halve(config.sampling.max_completion_length, 16)
    return {"sampling.max_completion_length": half} if half else None


_LADDER: tuple[Change, ...] = (
    ("the last good state lies in the machine's memory", _snapshot),
    ("memory only, the gradient stays the same", _micro_batch),
    ("memory only, the gradient stays the same", _sft_micro_batch),
    ("about a fifth slower", _checkpointing),
    ("adapters learn in place of all weights", _lora),
    ("half the bytes of the frozen weights", _half_precision),
    ("fewer prompts a step: noisier", _prompts),
    ("smaller groups: a noisier baseline", _group),
    ("shorter answers: watch the truncated share", _completion),
)
