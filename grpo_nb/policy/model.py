"""The policy: a language model, its tokenizer, its trained weights, and the reference that it must stay near."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_nb.config import ModelConfig
from grpo_nb.policy import (
    adapter_files,
    adapters,
    anatomy,
    chat_template,
    description,
    grouped,
    loading,
    logprobs,
    packing,
    shards,
)
from grpo_nb.policy.eval_mode import as_it_came, evaluating, silence
from grpo_nb.policy.grouped import GroupedBatch
from grpo_nb.policy.llama_layers import LlamaLayers
from grpo_nb.policy.origins import Origin
from grpo_nb.policy.ownership import Ownership, ownership
from grpo_nb.policy.packing import PackedBatch
from grpo_nb.policy.policy_text import PolicyText
from grpo_nb.policy.shards import Parts, Sharding
from grpo_nb.policy.source import ModelError, Source, locate
from grpo_nb.policy.tokenization import TokenizerAdapter
from grpo_nb.printable import clean_logger
from grpo_nb.types import Batch, TokenStats

__all__ = ["ModelError", "Policy", "load_policy"]

logger = clean_logger(__name__)

UNLIMITED = 2**31 - 1
"""Context of a model whose configuration states none."""


def load_policy(model: ModelConfig, seed: int = 0, sharding: Sharding | None = None) -> "Policy":
    """Load the policy that the settings describe onto its device, ready to train.

    `model.name` is `demo`, a folder (a model, or an adapter as `Policy.save` or peft wrote it), a .gguf file or a
    hub id. The seed decides fresh weights: the demo model's, and LoRA's A. With `sharding` the base is spread over the
    ranks, all of which load it at once; rank 0 alone reads it.

    Raises:
        ModelError: the message names what was found, what is needed and what to change.
    """
    source = locate(model.name, seed)
    if source.kind == "adapter" and model.train == "full":
        raise ModelError(f"{source.path} is a LoRA adapter and model.train='full'; set train='lora' or merge it first")
    device = loading.pick_device(model.device)
    dtype = loading.pick_dtype(model.dtype, device, full=model.train == "full")
    origin = Origin(source)
    tokenizer = loading.read_tokenizer(source)
    chat_template.choose(tokenizer, model.chat_template)
    empty = sharding is not None and not sharding.reads
    base = loading.read_model(source, dtype, empty, device if model.quantize == "nf4" else None)
    full = source.kind != "adapter" and loading.learns_in_full(model, base)
    if full and dtype != (settled := loading.pick_dtype(model.dtype, device, full=True)):
        base = loading.read_model(source, settled, empty)  # again, since its checkpoint may be finer than `dtype`
    if sharding is None:
        loading.move(base, device)
    else:
        shards.spread_layers(base, sharding)
    wrapped = base if full else _with_adapter(base, source, model, seed)
    if sharding is not None:
        shards.spread_root(wrapped, sharding)
    origin.loaded(base)
    policy = Policy(wrapped, tokenizer, model.name, model.chat_template_kwargs, origin)
    policy.hold_part(sharding)
    if model.gradient_checkpointing:
        loading.checkpoint_activations(base)
    return policy


class Policy(PolicyText):
    """A causal language model that trains, with the operations that GRPO needs.

    `Policy(model, tokenizer)` takes any transformers model or LoRA model that is in memory; its parameters with
    requires_grad are trained. Dropout and router noise are set to 0 in the model given.

    Raises:
        ModelError: nothing to train, offloaded weights, no stop token, or a tokenizer that does not fit the model.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str = "in memory",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        origin: Origin | None = None,
    ) -> None:
        self.model = anatomy.in_memory(model)
        self.tokenizer = tokenizer
        self.name = name
        self.origin = origin or Origin()
        """Files that it was loaded from, and the digests of its content."""
        self.full = not isinstance(model, PeftModel)
        self._trainable = adapters.trainable_names(model)
        present = dict(model.named_parameters())
        self._parameters = {name: present[name] for name in self._trainable}
        self._size = sum(parameter.numel() for parameter in model.parameters())
        self._silenced = silence(model)
        self.checked: set[str] = set()
        """Checks of `rollout.selfcheck` that were made on its weights."""
        self.agrees: set[str] = set()
        """Checks that agreed; policies that it loads from the same files share them."""
        self._reference: adapters.Reference | None = None
        self.interrupted_update = ""
        """Update that was interrupted and left the weights between two steps; empty for weights of a step."""
        self.moved_in: Path | None = None
        """The run in which SFT has moved the weights since they were loaded."""
        self.sharding: Sharding | None = None
        """Ranks that hold the base's weights together; None: this process has them all."""
        self.parts: Parts | None = None
        """This rank's rows of the weights that train, where these are spread."""
        self._adapter: str | None = None
        """Adapter that scores grouped batches in place of the active one."""
        self.tokenization = TokenizerAdapter(
            tokenizer, anatomy.stop_ids(model), anatomy.embedding(model).shape[0], chat_template_kwargs
        )

    @property
    def ownership(self) -> Ownership:
        """The training that the model belongs to."""
        return ownership(anatomy.plain(self.model))

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the base weights; adapters are float32 in any case."""
        return anatomy.embedding(self.model).dtype

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a completion, sorted."""
        return self.tokenization.stop_token_ids

    @property
    def pad_id(self) -> int:
        """Filler id of masked positions; never a stop token."""
        return self.tokenization.pad_id

    @property
    def text_config(self) -> Any:
        """The configuration of the language model, of a multimodal one too."""
        return self.model.config.get_text_config()

    @property
    def context(self) -> int:
        """Most tokens, prompt and completion together, that the model has positions for."""
        return getattr(self.text_config, "max_position_embeddings", None) or UNLIMITED

    def parameters_by_name(self) -> dict[str, Parameter]:
        """The parameters that train, in an order that never changes; the reference's are not among them."""
        return dict(self._parameters)

    def shard(self, sharding: Sharding) -> None:
        """Spread the base over the ranks; all of them call it at once, each with a model of the same shapes.

        Raises:
            ModelError: as `shards.spread_layers`.
        """
        if sharding.reads:
            self.origin.content(self.model, self.tokenizer)  # while it is in one piece
        base: Any = anatomy.plain(self.model)
        shards.spread_layers(base, sharding)
        for parameter in shards.adapter_weights(self.model):
            parameter.data = parameter.data.to(sharding.device)
        shards.spread_root(self.model, sharding)
        self.hold_part(sharding)

    def hold_part(self, sharding: Sharding | None) -> None:
        """Train only this rank's part from here on, where all weights train and are spread."""
        self.sharding = sharding
        if sharding is not None and self.full:
            self.parts = Parts(self.model, self._trainable, sharding)
            self._parameters = self.parts.parameters

    def drop_gradients(self) -> None:
        """Drop the gradients of all trained weights."""
        if self.parts is not None:
            self.parts.drop_gradients()
        for parameter in self._parameters.values():
            parameter.grad = None

    def within(self) -> contextlib.AbstractContextManager[None]:
        """Block that all ranks leave together, where the weights that train are spread over them."""
        return contextlib.nullcontext() if self.sharding is None else self.sharding.passes.within()

    @property
    def refers(self) -> bool:
        """Whether the rows that this rank holds are the reference's at present."""
        return isinstance(self._reference, adapters.ExchangedReference) and self._reference.acts

    def fill(self, learns: bool) -> None:
        """Take part in a pass of other ranks; see `shards.fill`."""
        shards.fill(self.model, learns)

    # scores

    def collate(self, prompt_ids_B: Sequence[Sequence[int]], completion_ids_B: Sequence[Sequence[int]]) -> Batch:
        """Prompts padded on the left, completions on the right, on the policy's device; masks by position.

        Raises:
            ModelError: lists of different lengths, an empty prompt, or a row beyond the context.
        """
        packing.check_rows(prompt_ids_B, completion_ids_B, self.context)
        left, right = max(map(len, prompt_ids_B)), max(map(len, completion_ids_B))
        ids = torch.full((len(prompt_ids_B), left + right), self.pad_id, dtype=torch.long)
        attention = torch.zeros_like(ids)
        for row, (prompt, completion) in enumerate(zip(prompt_ids_B, completion_ids_B, strict=True)):
            filled = slice(left - len(prompt), left + len(completion))
            ids[row, filled] = torch.tensor([*prompt, *completion])
            attention[row, filled] = 1
        return Batch(ids.to(self.device), attention.to(self.device), attention[:, left:].bool().to(self.device))

    def pack(
        self, prompt_ids: Sequence[Sequence[int]], completion_ids: Sequence[Sequence[int]], prompt_of: Sequence[int]
    ) -> PackedBatch:
        """Completions after the prompts that they share, on the policy's device; see `packing.pack`.

        Raises:
            ModelError: an empty prompt, or a completion that with its prompt is beyond the context.
        """
        packing.check_rows([prompt_ids[p] for p in prompt_of], completion_ids, self.context)
        return packing.pack(prompt_ids, completion_ids, prompt_of, self.pad_id).to(self.device)

    def group(
        self, prompt_ids: Sequence[Sequence[int]], completion_ids: Sequence[Sequence[int]], prompt_of: Sequence[int]
    ) -> GroupedBatch:
        """Grouped batch for policies that `llama_layers` serve, with the errors of `pack`; see `grouped.group`."""
        packing.check_rows([prompt_ids[p] for p in prompt_of], completion_ids, self.context)
        return grouped.group(prompt_ids, completion_ids, prompt_of, self.pad_id)

    def logprobs(
        self, batch: Batch | PackedBatch | GroupedBatch, temperature: float = 1.0, *, entropy_learns: bool = False
    ) -> TokenStats:
        """log softmax(logits / temperature)[token] of each completion token; see `logprobs.token_stats`."""
        return logprobs.token_stats(self._scorer(batch), batch, temperature, entropy_learns)

    def distributions(self, batch: Batch | GroupedBatch, temperature: float = 1.0) -> Tensor:
        """Log-probs of the complete vocabulary wherever a completion token is predicted; see `logprobs`."""
        return logprobs.distributions(self._scorer(batch), batch, temperature)

    def _scorer(self, batch: Batch | PackedBatch | GroupedBatch) -> Any:
        return LlamaLayers(self.model, self._adapter) if isinstance(batch, GroupedBatch) else self.model

    @contextlib.contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Eval mode without gradients inside the block; every flag of the model is as before after it.

        Raises:
            PolicyTaken: another thread trains it, and is within a step or began one meanwhile.
        """
        with self.ownership.steady(), torch.no_grad(), evaluating(self.model):
            yield

    # reference

    @property
    def has_reference(self) -> bool:
        return self._reference is not None

    def freeze_reference(self) -> None:
        """Make the present weights the reference: an adapter's copy with LoRA, else copies of all that trains."""
        self.load_reference_state(self.state())

    @contextlib.contextmanager
    def as_reference(self) -> Iterator[None]:
        """The policy computes as its reference inside the block: eval mode, no gradients, all restored after it.

        Raises:
            ModelError: `freeze_reference` was never called.
        """
        with self.eval_mode(), self._known_reference().active():
            yield

    @contextlib.contextmanager
    def as_grouped_reference(self) -> Iterator[None]:
        """Act as the reference for grouped batches alone, which do not depend on the model's modes."""
        reference = self._known_reference()
        by_name = isinstance(reference, adapters.AdapterReference)
        before = self._adapter
        with torch.no_grad(), contextlib.nullcontext() if by_name else reference.active():
            try:
                self._adapter = adapters.REFERENCE if by_name else None
                yield
            finally:
                self._adapter = before

    def load_reference_state(self, state: Mapping[str, Tensor]) -> None:
        """Make these weights the reference.

        Raises:
            ModelError: names, shapes or types differ from the trainable parameters', or an open training owns it.
        """
        self.ownership.refuse_writing()
        if self._reference is None:
            self._reference = self._new_reference()
        adapters.restore(self._reference.state(), self.trained_of(state), "the reference state")

    def reference_state(self) -> dict[str, Tensor]:
        """Copies on CPU of the reference's weights, by the names of `state`.

        Raises:
            ModelError: `freeze_reference` was never called.
        """
        return adapters.snapshot(self._known_reference().state())

    def reference_by_name(self) -> dict[str, Tensor]:
        """The reference's own weights, not copies, by the names of `state`; `ModelError` without a reference."""
        return self._known_reference().state()

    def _new_reference(self) -> adapters.Reference:
        if isinstance(self.model, PeftModel):
            return adapters.AdapterReference(self.model, self.parameters_by_name())
        spread = self.parts is not None
        return (adapters.ExchangedReference if spread else adapters.CopiedReference)(self.parameters_by_name())

    def _known_reference(self) -> adapters.Reference:
        if self._reference is None:
            raise ModelError("this policy has no reference yet; call policy.freeze_reference() before training")
        return self._reference

    # weights

    def settle(self) -> None:
        """Compute as the policy again, where an interrupt broke off the way back from `as_reference`.

        Raises:
            PolicyTaken: another thread trains it and is within a step.
        """
        self.ownership.refuse_reading()
        self._adapter = None
        if self._reference is not None:
            self._reference.settle()

    def refuse_interrupted(self) -> None:
        """Refuse weights that an interrupted update left, which are those of no step.

        Raises:
            ModelError: names the update.
        """
        if self.interrupted_update:
            raise ModelError(
                f"the policy holds weights from within {self.interrupted_update}, which was interrupted: they belong "
                "to no step. Load it again: policy = load_policy(run.config.model)"
            )

    def refuse_moved(self, run: Path) -> None:
        """Refuse to start a run anew from weights that an earlier attempt at it has moved.

        Raises:
            ModelError: names the run.
        """
        if self.moved_in == run:
            raise ModelError(
                f"this policy was already trained in {run}, which has no checkpoint of that: the run would start anew "
                "from weights that are not its first. Load it again: policy = load_policy(run.config.model)"
            )

    def state(self) -> dict[str, Tensor]:
        """Copies on CPU of the weights that train, by parameter name (where these are spread, of this rank's rows); not
        to be called within `as_reference`."""
        self.settle()
        return adapters.snapshot(self.parameters_by_name())

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Write weights that `state` returned back in place, bit for bit.

        Raises:
            ModelError: names, shapes or types differ, or an open training owns it; nothing is written then.
        """
        self.ownership.refuse_writing()
        self.settle()
        adapters.restore(self.parameters_by_name(), self.trained_of(state), "the saved state")
        self.interrupted_update, self.moved_in = "", None

    def trained_of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors without the adapters that text never reaches: `auto` once put some there, and their B is still 0.

        Args:
            tensors: by parameter name, after which `/` and more may follow.
        """
        strange = [name for name in tensors if name.partition("/")[0] not in self._trainable and ".lora_" in name]
        if not strange or not isinstance(self.model, PeftModel):
            return dict(tensors)
        base: Any = self.model.get_base_model()
        unreached = {*adapters.beyond_text(base, (name.removeprefix("base_model.model.") for name in strange))}
        return {name: t for name, t in tensors.items() if name.removeprefix("base_model.model.") not in unreached}

    def save(self, folder: Path | str) -> None:
        """Write the trained model for use elsewhere: a PEFT adapter or a transformers folder, with the tokenizer.

        Raises:
            ModelError: the folder cannot be written, an interrupted update left the weights, or they are spread.
        """
        self.settle()
        self.refuse_interrupted()
        if self.parts is not None:
            raise ModelError(
                "this policy holds a part of its weights (model.shard='fsdp2'), and the folder needs all. Save from a "
                "checkpoint, in one process: policy = load_policy(run.config.model); "
                "policy.load_state(run.checkpoints.load(step).tensors('policy')); policy.save(folder)"
            )
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with loading.quietly(), as_it_came(self._silenced):
                _save(self.model, str(folder))
                self.tokenizer.save_pretrained(str(folder))
        except OSError as error:
            raise ModelError(f"cannot save to {folder}: {error}; choose a folder that can be written") from error

    def describe(self) -> dict[str, object]:
        """Description of the model as loaded and the choices made for it, for people and the log (JSON values)."""
        return description.describe(self, self._size, self._silenced)


def _with_adapter(base: PreTrainedModel, source: Source, config: ModelConfig, seed: int) -> PeftModel:
    if source.path is None or source.kind != "adapter":
        return adapters.attach(base, config, source.name, seed)
    wrapped = adapter_files.reopen(base, source.path)
    if (rank := anatomy.rank(wrapped)) != config.lora_rank:
        logger.info("adapter %s has rank %d; model.lora_rank=%d is not used", source.path, rank, config.lora_rank)
    return wrapped


def _save(model: PreTrainedModel | PeftModel, folder: str) -> None:
    if isinstance(model, PeftModel):
        adapter_files.save(model, folder)
    else:
        model.save_pretrained(folder)
