"""Memory terms of a training, each with its arithmetic."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from grpo_nb.config import Config
from grpo_nb.policy.loading import FULL_BELOW
from grpo_nb.policy.quantised import NF4_BYTES
from grpo_nb.policy.shapes import ModelShape

GIB = 2**30
IN_FLIGHT = 256
"""Completions that the eager engine samples at a time, at most."""
COPIED_AT_MOST = 4 * GIB
"""Bytes of weights that the graph engine copies, to add the adapters to them: a larger model's weights are used
in place. The rule depends on sizes only, never on the free memory, so that a resumed run decides alike."""
SCORES_AT_ONCE = 2**28
"""Bytes of scores that a flat pass holds at a time."""
ROOM = 64
"""The graph engine's room for prompts is a multiple of this."""

Phase = Literal["always", "sampling", "training", "update", "sft"]
PHASES: dict[Phase, str] = {
    "always": "held all the time",
    "sampling": "while completions are drawn",
    "training": "during a backward pass",
    "update": "during an optimizer step",
    "sft": "during a backward pass of SFT",
}


@dataclass(frozen=True)
class Term:
    """One use of memory."""

    name: str
    phase: Phase
    bytes: int
    arithmetic: str
    """The product in words and numbers."""


@dataclass(frozen=True)
class Setting:
    """Inputs of the terms: settings, model shape and device."""

    config: Config
    shape: ModelShape
    on_gpu: bool

    @property
    def full(self) -> bool:
        return is_full(self.config, self.shape)

    @property
    def quantised(self) -> bool:
        return is_quantised(self.config)

    @property
    def item(self) -> int:
        """Bytes of a weight."""
        return item_bytes(self.config, self.full, self.on_gpu)

    @property
    def graph(self) -> bool:
        """Whether the graph engine samples."""
        return self.on_gpu and self.config.rollout.engine not in ("eager", "vllm") and not self.quantised

    @property
    def flat(self) -> bool:
        """Whether passes use one packed row of tokens."""
        half = self.on_gpu and self.item == 2 and not self.full and not self.quantised
        return half and self.shape.kin and self.config.batch.passes == "auto"

    @property
    def rows(self) -> int:
        """Completions that are sampled at a time."""
        return min(self.config.batch.completions, IN_FLIGHT)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return self.config.sampling.max_prompt_length + self.config.sampling.max_completion_length


def terms(config: Config, shape: ModelShape, on_gpu: bool) -> tuple[Term, ...]:
    """Every term of the plan, in the order of the table."""
    setting = Setting(config, shape, on_gpu)
    trainable = shape.parameters if setting.full else config.model.lora_rank * shape.linear_sizes
    result = [*_weights(setting, trainable), *(_graph(setting) if setting.graph else _eager(setting))]
    rows = min(config.batch.micro_batch, config.batch.update_size)
    passes = _flat if setting.flat else _backward
    result += passes(setting, rows, "training")
    if config.sft.steps:
        result += passes(setting, min(config.sft.micro_batch, config.sft.batch), "sft")
    return tuple(sorted(result, key=lambda term: list(PHASES).index(term.phase)))


def is_full(config: Config, shape: ModelShape) -> bool:
    """Whether all weights train."""
    small = config.model.train == "auto" and shape.parameters < FULL_BELOW and not is_quantised(config)
    return config.model.train == "full" or small


def is_quantised(config: Config) -> bool:
    """Whether the base is quantised while it loads."""
    return config.model.quantize != "none"


def item_bytes(config: Config, full: bool, on_gpu: bool) -> int:
    """Bytes of one weight."""
    if config.model.dtype == "auto":
        return 2 if on_gpu and not full else 4
    return 4 if config.model.dtype == "float32" else 2


def kv_bytes_per_token(shape: ModelShape, item: int) -> int:
    """2 (key, value) x layers x KV heads x head size x bytes."""
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * item


def _weights(setting: Setting, trainable: int) -> Iterator[Term]:
    config, shape, full, item = setting.config, setting.shape, setting.full, setting.item
    size = item if full else 4  # adapters are float32 whatever the base is
    if full:
        yield Term("weights", "always", item * trainable, f"{item} B x {trainable:,} parameters, all of them learn")
    else:
        yield _frozen(setting)
        sizes = f"rank {config.model.lora_rank} x {shape.linear_sizes:,} inputs and outputs"
        yield Term("adapters", "always", size * trainable, f"{size} B x {trainable:,} ({sizes})")
    yield Term("gradient, Adam", "always", 3 * size * trainable, f"3 x {size} B x {trainable:,} (g, m, v)")
    yield Term("reference", "always", size * trainable, f"{size} B x {trainable:,} (a frozen copy of what learns)")
    yield Term("update", "update", 2 * size * trainable, f"2 x {size} B x {trainable:,} (the old values, the change)")
    if config.guards.rollback:
        on_device = config.guards.snapshot == "device" or not setting.on_gpu
        held = 3 * size * trainable
        where = "" if on_device else f": {gib(held)} of the machine's memory"
        words = f"3 x {size} B x {trainable:,} (last good weights, m, v){where}"
        yield Term("snapshot", "always", held if on_device else 0, words)
    if config.algorithm.combine != "sum" and len(config.objectives) > 1:
        count = len(config.objectives)
        words = f"{count} objectives x {size} B x {trainable:,}"
        yield Term("gradients apart", "training", count * size * trainable, words)


def _frozen(setting: Setting) -> Term:
    """The weights that adapters are trained on."""
    shape, item = setting.shape, setting.item
    if not setting.quantised:
        return Term("weights", "always", item * shape.parameters, f"{item} B x {shape.parameters:,} frozen parameters")
    linear, rest = shape.linear_weights, shape.parameters - shape.linear_weights
    words = f"{NF4_BYTES:.3f} B x {linear:,} of the linear layers, {item} B x {rest:,} others"
    return Term("weights", "always", round(NF4_BYTES * linear) + item * rest, words)


def _eager(setting: Setting) -> Iterator[Term]:
    shape, item, rows = setting.shape, setting.item, setting.rows
    cached = kv_bytes_per_token(shape, item)
    words = f"{cached:,} B x {rows} rows x {setting.longest:,} tokens"
    yield Term("KV cache", "sampling", cached * rows * setting.longest, words)
    each = item + 12 if setting.on_gpu else item + 28  # float32 copies; the sampling itself is float64 on the CPU
    words = f"{each} B x {rows} rows x {shape.vocabulary:,} words"
    yield Term("next-token logits", "sampling", each * rows * shape.vocabulary, words)


def _graph(setting: Setting) -> Iterator[Term]:
    """The graph engine keeps its cache and its copy of the weights from one rollout to the next."""
    shape, item, rows, sampling = setting.shape, setting.item, setting.rows, setting.config.sampling
    if (copied := item * shape.linear_weights) <= COPIED_AT_MOST:
        yield Term("merged weights", "always", copied, f"{item} B x {shape.linear_weights:,} of the linear layers")
    prompts, room = -(-rows // setting.config.batch.group_size), -(-sampling.max_prompt_length // ROOM) * ROOM
    cached, tokens = kv_bytes_per_token(shape, item), prompts * room + rows * sampling.max_completion_length
    words = f"{cached:,} B x ({prompts} prompts x {room:,} + {rows} rows x {sampling.max_completion_length:,} tokens)"
    yield Term("KV cache", "always", cached * tokens, words)
    given = prompts * sampling.max_prompt_length
    each = cached + item * (4 * shape.hidden + 3 * shape.intermediate)
    yield Term("prefill", "sampling", each * given, f"{each:,} B x {given:,} prompt tokens")
    each = item if not sampling.changes_policy else item + 12
    words = f"{each} B x {rows} rows x {shape.vocabulary:,} words"
    yield Term("next-token logits", "sampling", each * rows * shape.vocabulary, words)


def _flat(setting: Setting, rows: int, phase: Phase) -> Iterator[Term]:
    """Memory that `grpo_nb.passes` keeps; see `passes.layer`. Pairs of SFT share no prompts."""
    config, shape, item = setting.config, setting.shape, setting.item
    shared = phase == "training" and config.batch.share_prompts == "auto"
    prompts = -(-rows // config.batch.group_size) if shared else rows
    tokens = prompts * config.sampling.max_prompt_length + rows * config.sampling.max_completion_length
    heads = shape.heads * shape.head_dim
    kept = item * (2 * shape.hidden + 2 * heads + 2 * shape.kv_heads * shape.head_dim + 2 * shape.intermediate)
    works = item * (4 * shape.hidden + 3 * heads + 5 * shape.intermediate)
    if config.model.gradient_checkpointing:
        sums = item * shape.hidden
        each = sums * shape.layers + kept + works
        words = f"{tokens:,} tokens x ({sums:,} B x {shape.layers} layers + {kept + works:,} B one layer)"
    else:
        each = kept * shape.layers + works
        words = f"{tokens:,} tokens x ({kept:,} B x {shape.layers} layers + {works:,} B in the backward pass)"
    yield Term("activations", phase, each * tokens, words)
    answers = rows * config.sampling.max_completion_length
    scores = min(SCORES_AT_ONCE, item * answers * shape.vocabulary)
    pulls = 2 * item * answers * shape.hidden
    words = f"2 x {scores:,} B of scores, {answers:,} tokens x {2 * item * shape.hidden:,} B of gradients"
    yield Term("logits", phase, 2 * scores + pulls, words)


def _backward(setting: Setting, rows: int, phase: Phase) -> Iterator[Term]:
    config, shape, item = setting.config, setting.shape, setting.item
    tokens, saved = rows * setting.longest, _saved_bytes(shape, setting.full, item)
    if config.model.gradient_checkpointing:
        kept = item * shape.hidden * (shape.layers + 2)
        amount, words = tokens * (kept + saved), f"{tokens:,} tokens x ({kept:,} B checkpoints + {saved:,} B one layer)"
    else:
        amount, words = tokens * saved * shape.layers, f"{tokens:,} tokens x {shape.layers} layers x {saved:,} B"
    yield Term("activations", phase, amount, words)
    answers = rows * config.sampling.max_completion_length
    each = item + 12  # the logits, float32 copies, their gradient
    words = f"{each} B x {answers:,} completion tokens x {shape.vocabulary:,} words"
    yield Term("logits", phase, each * answers * shape.vocabulary, words)


def _saved_bytes(shape: ModelShape, full: bool, item: int) -> int:
    """Bytes that autograd keeps per token and layer of a gated-MLP decoder without checkpointing.

    In units of the hidden size, with i = intermediate / hidden and k = KV heads x head size / hidden, fitted to
    what `torch.autograd.graph.saved_tensors_hooks` counts in torch 2.13, transformers 5.24, peft 0.21 (within 1%
    on SmolLM2 and Qwen2.5 shapes). LoRA in half precision costs more than full training, since peft casts every
    adapted layer's input to float32 and keeps the copy.
    """
    i, k = shape.intermediate / shape.hidden, shape.kv_heads * shape.head_dim / shape.hidden
    fitted: dict[tuple[bool, bool], float] = {
        (True, True): 4 * (4 * i + 8.5 + 2 * k),
        (True, False): 4 * (4 * i + 6.1 + 2 * k),
        (False, True): 2 * (4 * i + 8.5 + 2 * k) + 4.6,
        (False, False): 10 * i + 36.4 + 4 * k,
    }
    return round(shape.hidden * fitted[item == 4, full])


def gib(count: int) -> str:
    """Bytes for a reader."""
    return f"{count / GIB:.2f} GiB" if count >= GIB / 10 else f"{count / 2**20:.1f} MiB"
