"""Faults of the tokens: in sampling, ending, masking and scoring completions."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from grpo_nb.config import SamplingConfig
from grpo_nb.fault_lab.patching import drawing, gradients, replaced
from grpo_nb.fault_lab.records import Patient
from grpo_nb.policy.model import Policy
from grpo_nb.policy.tokenization import TokenizerAdapter
from grpo_nb.rollout import eager
from grpo_nb.types import Experience, Prompt


@contextmanager
def temperature_ignored(patient: Patient) -> Iterator[None]:
    """The engine draws at temperature 1 whatever the settings say, as after "generation flags are not valid"."""
    chain = eager.processors_of

    def plain(sampling: SamplingConfig, temperature: float | None) -> Any:
        return chain(sampling, None if temperature is None else 1.0)

    with replaced(eager, "processors_of", plain):
        yield


@contextmanager
def sampler_mismatch(patient: Patient) -> Iterator[None]:
    """The engine has a top-p and a top-k of its own, from the model's files, which the trainer's log-probs lack."""
    chain, draw = eager.processors_of, drawing.sample

    def shaped(sampling: SamplingConfig, temperature: float | None) -> Any:
        own = sampling.model_copy(update={"top_p": 0.9, "top_k": 50})
        return chain(own, temperature)

    def drawn(*given: Any) -> Any:
        with replaced(eager, "processors_of", shaped):
            return draw(*given)

    with replaced(drawing, "sample", drawn):
        yield


@contextmanager
def wrong_temperature(patient: Patient) -> Iterator[None]:
    """The trainer takes log-probs at temperature 1, the engine draws at that of the settings."""
    score = gradients.score

    def at_one(policy: Policy, batch: Any, temperature: float = 1.0, **named: Any) -> Any:
        return score(policy, batch, 1.0, **named)

    with replaced(gradients, "score", at_one):
        yield


@contextmanager
def stale_weights(patient: Patient) -> Iterator[None]:
    """The engine draws from the weights of step 0 for ever: nobody sends it the new ones."""
    draw = drawing.sample
    first: dict[str, Tensor] = {}

    def stale(state: Any, *given: Any) -> Any:
        if not first:
            first.update(state.policy.state())
        now = state.policy.state()
        state.policy.load_state(first)
        try:
            return draw(state, *given)
        finally:
            state.policy.load_state(now)

    with replaced(drawing, "sample", stale):
        yield


@contextmanager
def one_stop_token_of_two(patient: Patient) -> Iterator[None]:
    """Only the model's own stop token ends a completion, not the chat template's."""
    settle = TokenizerAdapter._settle

    def halved(adapter: TokenizerAdapter) -> None:
        settle(adapter)
        first = next(i for i in sorted(adapter._special) if i not in (adapter.turn_end, adapter.pad_id))
        adapter.stop_token_ids = (first,)

    with replaced(TokenizerAdapter, "_settle", halved):
        yield


@contextmanager
def pad_is_eos(patient: Patient) -> Iterator[None]:
    """Padding is the end-of-sequence token, and the loss leaves out padding by id: the stop token is never trained."""
    mask = Experience.mask

    def by_id(batch: Experience) -> Tensor:
        right, ids = mask(batch), batch.rollouts.completion_ids
        stops = {row[-1] for row, reason in zip(ids, batch.rollouts.stop_reasons, strict=True) if reason == "stop"}
        padding = torch.zeros_like(right)
        for row, tokens in enumerate(ids):
            padding[row, : len(tokens)] = torch.tensor([token in stops for token in tokens])
        return right & ~padding

    with replaced(Experience, "mask", by_id):
        yield


@contextmanager
def sft_without_eos(patient: Patient) -> Iterator[None]:
    """SFT's completions end with their last word: the model never learns to stop."""
    encode = TokenizerAdapter.encode_completion

    def endless(adapter: TokenizerAdapter, text: str, prompt: Prompt | None = None) -> list[int]:
        return encode(adapter, text, prompt)[:-1]

    with replaced(TokenizerAdapter, "encode_completion", endless):
        yield
