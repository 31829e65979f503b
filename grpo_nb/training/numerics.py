"""Numerical choices of a run that change bits: made at its start, kept in its checkpoints and used again."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Float64
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from grpo_nb import passes, seeding
from grpo_nb.config import Config
from grpo_nb.config.batch import MOST_COMPLETIONS
from grpo_nb.passes.ahead import compile_kernels
from grpo_nb.policy.model import Policy
from grpo_nb.printable import clean_logger
from grpo_nb.rollout import ENGINES, ChosenEngine, Engine, choose
from grpo_nb.rollout.selfcheck import groups, shares_prompts
from grpo_nb.run.run import Run, RunError
from grpo_nb.storage.documents import State
from grpo_nb.training import threads
from grpo_nb.training.switches import TF32

logger = clean_logger(__name__)

STREAM = 2
"""The newest random stream: 1 is torch's own generator on the CPU, 2 counts (Philox), the same on every device."""


Rows = Annotated[int, Field(ge=1, le=MOST_COMPLETIONS)]
Passes = Literal["model", "flat", "grouped"]


class Numerics(BaseModel):
    """Numerical choices of a run. Two runs that differ here only have the same numbers to rounding, and not the same
    bits. The defaults are the behaviour of versions that stored no choices.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    engine: str = Field(default="eager", max_length=200)
    """Engine: a name of `rollout.ENGINES`, or the class of a caller's own engine. A server (`vllm`) samples with seeds
    of its own, so that a resumed run has the same completions to rounding only; see `rollout.vllm`."""
    random_stream: int = Field(default=1, ge=1, le=10**6)
    """Version of the random numbers that decide tokens."""
    shares_prompts: bool = False
    """Whether completions may share one copy of their prompt in the passes that score and train."""
    passes: Passes = "model"
    """Forward pass that scores and trains: the model's own on rows, `grpo_nb.passes` on one line of tokens (after
    which the optimizer takes all adapters together), or `policy.llama_layers` on groups."""
    micro_batch: Rows | None = None
    """Completions per forward and backward pass where `batch.micro_batch` was too much for the memory."""
    threads: Annotated[int, Field(ge=1, le=10**4)] | None = None
    """CPU threads (see `threads`); None: as many as the process has."""
    tf32: bool = False
    """Whether float32 matrix products on a GPU round their inputs to TF32 (`model.tf32`)."""
    rows_at_once: Rows | None = None
    """Completions sampled at a time, where the memory was too small for all of them; else None."""

    def micro_batch_of(self, setting: int) -> int:
        """The setting, or the less that the memory had room for."""
        return min(setting, self.micro_batch or setting)

    def uniforms(
        self, seed: int, step: int, size: tuple[int, int], device: torch.device, stream: int = 0
    ) -> Float64[Tensor, "row t"]:
        """Number (row, t) of [0, 1), float64, decides token t of a completion; rows count over the complete step.

        `stream`: another number gives other completions.
        """
        rows, tokens = size
        name = f"{_ROLLOUT}/{stream}" if stream else _ROLLOUT
        if self.random_stream == 1:
            generator = seeding.generator(seed, step, name)
            return torch.rand(rows, tokens, dtype=torch.float64, generator=generator)
        key = seeding.derived_seed(seed, step, name)
        return seeding.uniforms(key, torch.arange(rows, device=device), tokens)


_ROLLOUT = "rollout"


def begin(run: Run, policy: Policy, given: Engine | str | None) -> tuple[Numerics, ChosenEngine]:
    """The choices of a run that starts; `given` is an engine that the caller wants."""
    config = run.config
    compile_kernels(policy, config)
    chosen_engine = choose(given, policy, config.rollout)
    shares = config.batch.share_prompts == "auto" and shares_prompts(policy)
    return Numerics(
        engine=chosen_engine.name,
        random_stream=STREAM,
        shares_prompts=shares,
        passes=_served(config, policy),
        threads=threads.choose(run, policy),
        tf32=_rounds(config, policy),
    ), chosen_engine


def begin_sft(run: Run, policy: Policy) -> Numerics:
    """Choices of an SFT that starts; it samples nothing, and shares no prompts."""
    compile_kernels(policy, run.config)
    chosen = threads.choose(run, policy, "sft_")
    return Numerics(passes=_served(run.config, policy), threads=chosen, tf32=_rounds(run.config, policy))


def _rounds(config: Config, policy: Policy) -> bool:
    """Whether TF32 applies: in bfloat16, and on the CPU, no float32 matrix product exists that it would round."""
    if policy.device.type != "cuda" or policy.dtype != torch.float32:
        return False
    return policy.full if config.model.tf32 == "auto" else config.model.tf32


@contextmanager
def computing(chosen: Numerics) -> Iterator[None]:
    """Compute inside the block with the threads and the float32 products that were chosen."""
    with threads.computing(chosen.threads), TF32.on() if chosen.tf32 else nullcontext():
        yield


def _served(config: Config, policy: Policy) -> Passes:
    """The passes that serve a policy best, or those that the settings want."""
    if policy.sharding is not None:
        return "model"
    if config.batch.passes != "auto":
        return config.batch.passes
    every: tuple[Passes, ...] = ("flat", "grouped")
    return next((kind for kind in every if _serve(kind, policy)), "model")


def _serve(kind: Passes, policy: Policy) -> bool:
    if policy.sharding is not None:  # the others read weights by themselves
        return kind == "model"
    return {"model": lambda _: True, "flat": passes.serves, "grouped": groups}[kind](policy)


def stored(run: Run, state: State) -> Numerics:
    """The choices that a checkpoint's state holds.

    Raises:
        RunError: some are unknown here, so that a newer version made it, or damaged.
    """
    kept: Any = state.get("numerics", {"shares_prompts": bool(state.get("shares_prompts", False))})
    if not isinstance(kept, dict):
        raise RunError(
            f"a checkpoint of {run.path} is broken: numerics is {type(kept).__name__}; restore it from a copy"
        )
    try:
        found = Numerics.model_validate(kept)
    except ValidationError as error:
        places = ", ".join(".".join(map(str, item["loc"])) for item in error.errors())
        raise RunError(
            f"{run.path} computes in ways unknown here ({places}); continue with the version that made it"
        ) from None
    if not 1 <= found.random_stream <= STREAM:
        raise RunError(
            f"{run.path} draws by random stream {found.random_stream}, and this version has 1 to {STREAM}; continue "
            "with the version that made the run"
        )
    return found


def resume(run: Run, policy: Policy, before: Numerics, given: Engine | str | None) -> tuple[Numerics, ChosenEngine]:
    """Choices of a run that resumes: those of its start, as far as the model as loaded here still supports them."""
    compile_kernels(policy, run.config)
    known = before.engine if before.engine in ENGINES else run.config.rollout.engine
    chosen_engine = choose(given or known, policy, run.config.rollout)
    shares = before.shares_prompts and shares_prompts(policy)
    now = resume_sft(policy, before).model_copy(update={"engine": chosen_engine.name, "shares_prompts": shares})
    return now, chosen_engine


def resume_sft(policy: Policy, before: Numerics) -> Numerics:
    """Choices of an SFT that resumes."""
    return before if _serve(before.passes, policy) else before.model_copy(update={"passes": "model"})


def log_changes(run: Run, step: int, before: Numerics, now: Numerics, reason: str = "") -> None:
    """An event and a warning for each choice that changed, since other bits follow; `reason` is the engine's."""
    if before.shares_prompts != now.shares_prompts:
        run.log_event("prompts_not_shared", step=step)
        logger.warning(
            "%s shared prompts until step %d, and the model as loaded here gives other log-probs that way: from here "
            "on each completion has its own copy of the prompt; the next steps have other bits than those before",
            run.path,
            step,
        )
    if before.passes != now.passes:
        run.log_event("passes_changed", step=step, before=before.passes, now=now.passes)
        logger.warning(
            "%s scored and trained by '%s' passes until step %d, which this model on this device cannot be served by; "
            "from here on its own forward pass does; the next steps have other bits than those before",
            run.path,
            before.passes,
            step,
        )
    if before.engine != now.engine:
        run.log_event("engine_changed", step=step, before=before.engine, now=now.engine, reason=reason)
        logger.warning(
            "%s drew by the engine '%s' until step %d, and draws by '%s' now%s; the next steps have other bits",
            run.path,
            before.engine,
            step,
            now.engine,
            f" ({reason})" if reason else "",
        )
