"""Profiles the time and memory of a step: `profile` by phase and operator, `memory_snapshot` by tensor.

A profile trains a few steps of a copy from the run's newest weights; the run itself is not touched.
"""

import gc
import tempfile
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from grpo_nb.config import Config
from grpo_nb.evaluation.compare import Stage
from grpo_nb.evaluation.evaluate import restore_policy
from grpo_nb.metrics import keys
from grpo_nb.metrics.phases import timed
from grpo_nb.policy.model import Policy
from grpo_nb.policy.roofline import Rates, StepTokens, measure_rates, rollout_floor, train_floor
from grpo_nb.policy.shapes import ModelShape
from grpo_nb.rollout import Engine
from grpo_nb.run.run import Run
from grpo_nb.storage.files import clear_errors
from grpo_nb.tasks import Task, load_tasks, read_examples
from grpo_nb.training.grpo import grpo
from grpo_nb.training.metrics import PHASE_RANGE
from grpo_nb.training.objectives import Rewards
from grpo_nb.training.state import draw
from grpo_nb.types import StepStats

WARM_UP = 1
"""Steps before those that are measured: caches fill, kernels are compiled."""
OPERATORS = 12
"""Operators of a phase that a profile keeps, the longest first."""
TENSORS = 20
"""Kinds of live tensors that a snapshot keeps, the largest first."""
US = 1e-6
MIB = 2**20


@dataclass(frozen=True)
class Operator:
    """An operator inside one phase, over all profiled steps."""

    phase: str
    name: str
    calls: int
    cpu_s: float
    """Seconds on the CPU, without the operators that it calls."""
    gpu_s: float
    """Seconds on the GPU, without the operators that it calls."""


@dataclass(frozen=True)
class Held:
    """Live tensors of one shape, type and device."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    count: int
    mib: float


@dataclass(frozen=True)
class Floor:
    """A phase against the seconds that its bytes and products alone take."""

    phase: str
    seconds: float
    """Wall time of a step."""
    floor: float
    """Seconds at the device's own rates."""

    @property
    def share(self) -> float:
        """Utilisation of the device: 1 means no time beyond the floor."""
        return self.floor / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Profile:
    """Profile of a few steps."""

    steps: int
    seconds: Mapping[str, float]
    """Wall time of a step by phase, mean."""
    operators: Sequence[Operator]
    trace: Path
    """A file for https://ui.perfetto.dev (Open trace file) or chrome://tracing."""
    memory: "Snapshot"
    """Memory at the end of the last step."""
    rates: Rates | None = None
    """Rates of the device, measured after the steps."""
    floors: Sequence[Floor] = ()
    """Lower bounds of the phases that sample and train."""

    def phase_rows(self) -> list[dict[str, Any]]:
        """Table with one row per phase; phases that sample and train also have the floor and its share."""
        floors = {f.phase: {"floor s": f.floor, "share of floor": f.share} for f in self.floors}
        nothing = {"floor s": None, "share of floor": None} if floors else {}
        return [
            {"phase": phase, "s/step": seconds, **floors.get(phase, nothing)} for phase, seconds in self.seconds.items()
        ]

    def rows(self) -> list[dict[str, Any]]:
        """Table with one row per operator, and its share of its phase's time on the busier device."""
        totals: defaultdict[str, float] = defaultdict(float)
        for operator in self.operators:
            totals[operator.phase] += max(operator.cpu_s, operator.gpu_s)
        return [
            {
                "phase": o.phase,
                "phase s/step": self.seconds.get(o.phase),
                "operator": o.name,
                "calls": o.calls,
                "cpu s": o.cpu_s,
                "gpu s": o.gpu_s,
                "share": max(o.cpu_s, o.gpu_s) / (totals[o.phase] or 1.0),
            }
            for o in self.operators
        ]


@dataclass(frozen=True)
class Snapshot:
    """Memory held at present: live tensors by kind, and the allocator's numbers."""

    tensors: Sequence[Held]
    allocated_mib: float
    """MiB in live tensors."""
    reserved_mib: float
    """MiB kept by the GPU's allocator; 0 on a CPU."""
    peak_mib: float
    """Highest MiB that the GPU's allocator gave out; 0 on a CPU."""
    origins: Sequence[tuple[str, float]] = field(default=())
    """Source lines that allocated the held memory, in MiB; needs `debug_mode()` on a GPU."""

    def rows(self) -> list[dict[str, Any]]:
        """Table with one row per kind of tensor, the largest first."""
        return [
            {"shape": " x ".join(map(str, t.shape)) or "scalar", "dtype": t.dtype, "device": t.device}
            | {"count": t.count, "MiB": t.mib}
            for t in self.tensors
        ]


def profile(
    run: Run,
    steps: int = 3,
    *,
    out: str | Path | None = None,
    tasks: Mapping[str, Task] | None = None,
    rewards: Rewards | None = None,
    engine: Engine | str | None = None,
) -> Profile:
    """Train `steps` steps of a copy under torch's profiler, without judges and evaluations; the run is not touched.

    Two lines `USDT:... profiler_start` and `profiler_stop` on standard error are torch's own (2.13). Its profiler
    writes them at a level above errors, so the one switch that hides them, KINETO_LOG_LEVEL=6, hides its errors too.

    Args:
        out: file of the trace; default: `trace.json.gz` in the run's folder.
        tasks, rewards, engine: as for `grpo`, where the run has some of your own.

    Raises:
        ConfigError, RunError, ModelError, DataError, DependencyChanged: as `grpo`, before any work.
    """
    trace = Path(out or run.path / "trace.json.gz")
    what = f"profiling {WARM_UP + steps} steps of a copy"
    with timed(what), tempfile.TemporaryDirectory(prefix="grpo_nb-") as scratch:
        copy = Run.create(Path(scratch) / "profile", _alone(run.config, WARM_UP + steps))
        policy, tasks = restore_policy(run, _newest(run)), load_tasks(copy.config, copy.path, tasks)
        trained = grpo(copy, policy=policy, tasks=tasks, rewards=rewards, engine=engine)
        with closing(trained):
            for _ in range(WARM_UP):
                next(trained)
            with torch.profiler.profile(activities=_activities(), record_shapes=True, acc_events=True) as profiler:
                taken = [next(trained) for _ in range(steps)]
            memory = memory_snapshot()
    with clear_errors("write the trace", trace):
        profiler.export_chrome_trace(str(trace))
    seconds, operators = _by_phase(profiler.events() or [], steps)
    rates = measure_rates(policy.device, policy.dtype)
    floors = _floors(run.config, policy, _tokens(run.config, policy, tasks, taken), rates, seconds)
    return Profile(steps, seconds, operators, trace, memory, rates, floors)


def _tokens(config: Config, policy: Policy, tasks: Mapping[str, Task], taken: Sequence[StepStats]) -> StepTokens:
    """Token counts of the profiled steps."""
    prompts, count = 0, config.prompts_per_objective
    for name, task in tasks.items():
        examples = read_examples(task, "train")
        drawn = (draw(len(examples), count, step.step, config.run.seed, f"prompts/{name}") for step in taken)
        prompts += sum(len(policy.encode(examples[i].prompt)) for indices in drawn for i in indices)
    completions = sum(int(step.metrics[keys.TOKENS] or 0) for step in taken)
    batch = config.batch
    return StepTokens(batch.completions, prompts / len(taken), completions / len(taken), batch.group_size)


def _floors(
    config: Config, policy: Policy, tokens: StepTokens, rates: Rates, seconds: Mapping[str, float]
) -> list[Floor]:
    shape = ModelShape.from_config(policy.model.config)
    floors = {
        "rollout": rollout_floor(shape, tokens, rates, policy.dtype.itemsize),
        "train": train_floor(shape, tokens, rates, full=policy.full, passes=config.batch.num_iterations),
    }
    return [Floor(phase, seconds[phase], floor) for phase, floor in floors.items() if phase in seconds]


def memory_snapshot() -> Snapshot:
    """Tensors that hold memory in this process at present, by shape, type and device."""
    sizes: dict[tuple[tuple[int, ...], str, str], list[int]] = defaultdict(list)
    seen: set[tuple[str, int]] = set()
    for tensor in _live_tensors():
        device = str(tensor.device)
        place = device, tensor.untyped_storage().data_ptr()
        if place not in seen:
            seen.add(place)
            key = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), device
            sizes[key].append(tensor.untyped_storage().nbytes())
    held = [Held(*key, len(each), sum(each) / MIB) for key, each in sizes.items()]
    held.sort(key=lambda kind: -kind.mib)
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    return Snapshot(
        held[:TENSORS],
        sum(kind.mib for kind in held),
        torch.cuda.memory_reserved() / MIB if cuda else 0.0,
        torch.cuda.max_memory_allocated() / MIB if cuda else 0.0,
        _origins() if cuda else (),
    )


def _live_tensors() -> Iterator[torch.Tensor]:
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.layout is torch.strided and thing.device.type != "meta":
            yield thing
            if thing.grad_fn is None and thing.is_leaf and thing.grad is not None:
                yield thing.grad


def _origins() -> list[tuple[str, float]]:
    """Source lines of the blocks that the GPU's allocator has given out, where it records them."""
    found: defaultdict[str, float] = defaultdict(float)
    for segment in torch.cuda.memory._snapshot()["segments"]:
        for block in segment["blocks"]:
            frames = [f for f in block.get("frames", ()) if f.get("filename", "??") != "??"]
            if block["state"] == "active_allocated" and frames:
                found[f"{frames[0]['filename']}:{frames[0]['line']}"] += block["size"] / MIB
    return sorted(found.items(), key=lambda item: -item[1])[:TENSORS]


def _alone(config: Config, steps: int) -> Config:
    """Settings of a few steps without judges, evaluations or samples."""
    judges = {f"objectives.{name}.judge": None for name in config.objectives}
    return config.replace(
        **judges,
        **{"sft.steps": 0, "run.steps": steps, "run.quick_eval_every": 0, "run.checkpoint_every": steps},
        **{"run.samples_per_step": 0},
    )


def _newest(run: Run) -> Stage:
    if run.checkpoints.latest()[0] is not None:
        return "latest"
    return "sft" if run.sft_checkpoints.latest()[0] is not None else "base"


def _activities() -> list[ProfilerActivity]:
    cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    return [ProfilerActivity.CPU, *cuda]


def _by_phase(events: Sequence[Any], steps: int) -> tuple[dict[str, float], list[Operator]]:
    """Seconds a step by phase, and each phase's longest operators; an event is of the phase that it begins in.

    By time, not by nesting: the backward pass runs in a thread of its own.
    """
    ranges = sorted(
        (e.time_range.start, e.time_range.end, e.name.removeprefix(PHASE_RANGE))
        for e in events
        if e.name.startswith(PHASE_RANGE) and str(e.device_type).endswith("CPU")
    )
    seconds: defaultdict[str, float] = defaultdict(float)
    for start, end, phase in ranges:
        seconds[phase] += (end - start) * US / steps
    starts = [start for start, _, _ in ranges]
    spent: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for event in events:
        at = bisect_right(starts, event.time_range.start) - 1
        if event.name.startswith(PHASE_RANGE) or at < 0 or event.time_range.start > ranges[at][1]:
            continue
        row = spent[ranges[at][2], event.name]
        row[0] += 1
        row[1] += event.self_cpu_time_total * US
        row[2] += event.self_device_time_total * US
    found = [Operator(*key, int(calls), cpu, gpu) for key, (calls, cpu, gpu) in spent.items()]
    found.sort(key=lambda o: -max(o.cpu_s, o.gpu_s))
    order = sorted(seconds, key=lambda phase: -seconds[phase])
    return dict(seconds), [o for phase in order for o in [o for o in found if o.phase == phase][:OPERATORS]]
