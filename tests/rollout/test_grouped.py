"""The engine for small models on the CPU gives what the eager engine gives, or hands over to it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo_nb.config import SamplingConfig
from grpo_nb.policy import llama_layers
from grpo_nb.policy.model import ModelError, Policy
from grpo_nb.rollout import EagerEngine, Ended, Engine, Request, grouped
from grpo_nb.rollout.grouped import GroupedEngine
from grpo_nb.types import Rollouts
from tests.support import tiny_models as tiny
from tests.support.tiny_causal import causal

PROMPTS = [[tiny.BOS, 8, 9], [tiny.BOS, 10], [11], [tiny.BOS, *range(7, 23)]]
CAP = 12
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cooler": {"temperature": 0.6},
    "cut": {"temperature": 0.8, "top_p": 0.7},
    "few": {"top_k": 4, "min_p": 0.05},
}


def policy_of(kind: str = "llama", **settings: Any) -> Policy:
    model = causal(kind, eos_token_id=[tiny.EOS, 20], **settings)
    return Policy(model, tiny.tokenizer())


def asked(k: int = 3, greedy: bool = False, prompts: Sequence[Any] = PROMPTS, **settings: Any) -> Request:
    draws = torch.rand(len(prompts) * k, CAP, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sampling = SamplingConfig(**{"max_completion_length": CAP, "temperature": 1.0} | settings)
    return Request(prompts, k, sampling, draws, greedy)


def assert_same(found: Rollouts, reference: Rollouts) -> None:
    assert list(found.completion_ids) == list(reference.completion_ids)
    assert list(found.stop_reasons) == list(reference.stop_reasons) and list(found.texts) == list(reference.texts)
    for ours, theirs in zip(found.logprobs, reference.logprobs, strict=True):
        assert list(ours) == pytest.approx(list(theirs), abs=5e-5)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_tokens_and_logprobs_are_those_of_the_eager_engine(kind: str, setting: str) -> None:
    learner, request = policy_of(kind), asked(8, **SETTINGS[setting])
    expected, found = EagerEngine().generate(learner, request), GroupedEngine().generate(learner, request)
    assert_same(found, expected)
    assert len({len(ids) for ids in found.completion_ids}) > 3, "rows end at different tokens"


def test_greedy_equals_transformers_generate() -> None:
    learner = tiny.policy("llama", seed=4, eos=[tiny.EOS, 20])
    found = GroupedEngine().generate(learner, asked(1, greedy=True))
    theirs = tiny.generated(learner, PROMPTS, CAP)
    for ours, row in zip(found.completion_ids, theirs, strict=True):
        assert row[: len(ours)] == list(ours) and set(row[len(ours) :]) <= {learner.pad_id}
    assert {"stop", "length"} == set(found.stop_reasons)


@pytest.mark.parametrize("max_rows", [1, 7])
def test_chunks_change_no_result(max_rows: int) -> None:
    learner = policy_of()
    assert_same(GroupedEngine(max_rows).generate(learner, asked()), GroupedEngine().generate(learner, asked()))


def test_completions_are_handed_over_as_they_end() -> None:
    calls = list[list[Ended]]()
    request = replace(asked(8), ended=lambda completions: calls.append(list(completions)))
    found = GroupedEngine().generate(policy_of(), request)
    texts = {completion.row: completion.text for call in calls for completion in call}
    assert sum(map(len, calls)) == 32 and [texts[row] for row in range(32)] == list(found.scored_texts)
    lengths = [{len(found.completion_ids[completion.row]) for completion in call} for call in calls]
    assert all(len(own) == 1 for own in lengths) and lengths == sorted(lengths, key=min) and len(lengths) > 3


def test_finished_rows_and_prompts_leave_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, shapes = policy_of(), []
    plain = grouped._compact

    def watched(groups, cache):  # type: ignore[no-untyped-def]
        left = plain(groups, cache)
        shapes.append((tuple(left.rows.shape), int(left.alive.sum())))
        return left

    monkeypatch.setattr(grouped, "_compact", watched)
    found = GroupedEngine().generate(learner, asked(8))
    assert_same(found, EagerEngine().generate(learner, asked(8)))
    (prompts, members), alive = shapes[-1]
    assert prompts < 4 and members < 8 and alive <= prompts * members < 32


def test_others_are_drawn_from_by_the_eager_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    own = GroupedEngine()
    assert isinstance(own, Engine)
    monkeypatch.setattr(grouped, "_Decoding", None)  # nothing here decodes
    for learner, request in [
        (tiny.policy("gpt2"), asked()),
        (tiny.policy("gemma3"), asked()),
        (policy_of(), asked(repetition_penalty=1.2)),
    ]:
        assert own.generate(learner, request) == EagerEngine().generate(learner, request)


def test_adapters_draw_and_the_model_stays_as_it_was(tmp_path: Any) -> None:
    learner = tiny.lora(tmp_path)
    learner.freeze_reference()
    start = GroupedEngine().generate(learner, asked())
    tiny.nudge(learner, 0.2)
    before, flags = {n: p.clone() for n, p in learner.model.named_parameters()}, tiny.flags(learner)
    moved = GroupedEngine().generate(learner, asked())
    assert_same(moved, EagerEngine().generate(learner, asked()))
    assert moved.completion_ids != start.completion_ids
    with learner.as_reference():
        assert_same(GroupedEngine().generate(learner, asked()), start)
    assert all(torch.equal(p, before[n]) for n, p in learner.model.named_parameters())
    assert tiny.flags(learner) == flags and llama_layers.unserved(learner.model) is None


def test_scores_that_are_not_finite_are_refused() -> None:
    learner = policy_of()
    with torch.no_grad():
        learner.model.lm_head.weight[3] = float("nan")
    with pytest.raises(ModelError):
        GroupedEngine().generate(learner, asked())
