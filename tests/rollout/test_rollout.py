"""A completion depends on its prompt, the policy and its own uniforms: on nothing else, whoever it is drawn with."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, TopPLogitsWarper

from grpo_nb.config import ConfigError, ModelConfig, SamplingConfig
from grpo_nb.policy.adapters import AdapterReference
from grpo_nb.policy.model import ModelError, Policy, load_policy
from grpo_nb.rollout import ENGINES, EagerEngine, Ended, Engine, Request, eager, engine
from grpo_nb.rollout.eager import sample_inverse_cdf
from grpo_nb.types import Rollouts
from tests.support import tiny_models as tiny
from tests.support.tokens import pattern

PROMPTS = [[tiny.BOS, 8, 9], [tiny.BOS, 10], [11], [tiny.BOS, *range(7, 23)]]
CAP = 12


def uniforms(rows: int, seed: int = 0, columns: int = CAP) -> Tensor:
    return torch.rand(rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def sample(
    learner: Policy,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    k: int = 3,
    draws: Tensor | None = None,
    temperature: float = 1.0,
    max_rows: int = 256,
    greedy: bool = False,
    **settings: Any,
) -> Rollouts:
    draws = uniforms(len(prompts) * k) if draws is None and not greedy else draws
    sampling = sampler(**settings).model_copy(update={"temperature": temperature})
    return EagerEngine(max_rows).generate(learner, Request(prompts, k, sampling, draws, greedy))


def sampler(**settings: Any) -> SamplingConfig:
    return SamplingConfig(**{"max_completion_length": CAP, "temperature": 1.0} | settings)


# ---- what is drawn


@pytest.mark.parametrize("kind", tiny.EVERY_KIND)
def test_greedy_equals_transformers_generate(kind: str) -> None:
    learner = tiny.policy(kind, seed=4, eos=[tiny.EOS, 20])
    found = sample(learner, k=1, greedy=True)
    theirs = tiny.generated(learner, PROMPTS, CAP)
    for ours, row, reason in zip(found.completion_ids, theirs, found.stop_reasons, strict=True):
        assert row[: len(ours)] == list(ours)
        assert set(row[len(ours) :]) <= {learner.pad_id}
        assert (ours[-1] in learner.stop_token_ids) == (reason == "stop")
    assert kind not in tiny.KINDS or {"stop", "length"} == set(found.stop_reasons)  # the prompts show both ends


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("kind", tiny.EVERY_KIND)
def test_logprobs_are_the_policys_own(kind: str, temperature: float) -> None:
    learner = tiny.policy(kind)
    found = sample(learner, temperature=temperature)
    prompts = [list(p) for p in PROMPTS for _ in range(3)]
    scored = learner.logprobs(learner.collate(prompts, found.completion_ids), temperature).logprobs
    for row, logprobs in enumerate(found.logprobs):
        assert logprobs == pytest.approx(scored[row, : len(logprobs)].tolist(), abs=1e-5)
    assert sum(map(len, found.completion_ids)) == sum(map(len, found.logprobs)) > 36


@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_frequencies_match_the_softmax(temperature: float) -> None:
    learner, n = tiny.policy("gpt2", initializer_range=0.15), 20_000
    with learner.eval_mode():
        logits = learner.model(torch.tensor([PROMPTS[0]])).logits[0, -1].double()
    expected = torch.softmax(logits / temperature, -1)
    found = sample(learner, PROMPTS[:1], n, uniforms(n, columns=1), temperature, max_completion_length=1)
    counts = torch.bincount(torch.tensor(found.completion_ids)[:, 0], minlength=tiny.VOCABULARY)
    deviation = (counts - n * expected) / (n * expected * (1 - expected)).sqrt()
    assert expected.max() < 0.6 and deviation.abs().max() < 4


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_row_does_not_depend_on_its_company(kind: str) -> None:
    learner, k = tiny.policy(kind), 3
    draws = uniforms(len(PROMPTS) * k)
    together = sample(learner, draws=draws)
    for p, prompt in enumerate(PROMPTS):
        alone = sample(learner, [prompt], draws=draws[p * k : (p + 1) * k])
        assert_same(alone, together, range(p * k, (p + 1) * k))
    order = [3, 1, 0, 2]
    rows = [p * k + n for p in order for n in range(k)]
    shuffled = sample(learner, [PROMPTS[p] for p in order], draws=draws[rows])
    assert_same(shuffled, together, rows)


@pytest.mark.parametrize("max_rows", [1, 4, 6, 7])
def test_chunks_change_memory_and_no_result(max_rows: int) -> None:
    learner = tiny.policy()
    seen = rows_forwarded(learner)
    whole = sample(learner)
    del seen[:]
    parts = sample(learner, max_rows=max_rows)
    assert_same(parts, whole, range(12))
    assert max(rows for rows, _ in seen) <= max(3, max_rows)


def assert_same(found: Rollouts, reference: Rollouts, rows: Sequence[int]) -> None:
    """Equal ids, reasons and texts; log-probs equal to rounding."""
    assert list(found.completion_ids) == [reference.completion_ids[row] for row in rows]
    assert list(found.stop_reasons) == [reference.stop_reasons[row] for row in rows]
    assert list(found.texts) == [reference.texts[row] for row in rows]
    for row, logprobs in zip(rows, found.logprobs, strict=True):
        assert logprobs == pytest.approx(reference.logprobs[row], abs=1e-5)


def test_uniforms_decide_alone_and_each_row_its_own() -> None:
    learner = tiny.policy(initializer_range=0.1)
    first, again = sample(learner, k=8), sample(learner, k=8)
    assert first == again
    assert sample(learner, k=8, draws=uniforms(32, seed=1)).completion_ids != first.completion_ids
    assert len({tuple(ids) for ids in first.completion_ids[:8]}) > 4  # a group's rows differ
    changed = uniforms(32)
    changed[5] = 1 - changed[5]
    other = sample(learner, k=8, draws=changed)
    assert [n for n in range(32) if other.completion_ids[n] != first.completion_ids[n]] == [5]


def test_the_adapter_draws_and_the_reference_does_not(tmp_path: Any) -> None:
    name = str(tiny.folder(tmp_path))
    learner = load_policy(ModelConfig(name=name, train="lora", device="cpu"))
    learner.freeze_reference()
    with torch.no_grad():
        for parameter in learner.parameters_by_name().values():
            parameter.add_(0.2)
    assert isinstance(learner._reference, AdapterReference)
    moved, start = sample(learner), sample(tiny.policy())
    assert moved.completion_ids != start.completion_ids
    with learner.as_reference():
        assert_same(sample(learner), start, range(12))


# ---- how it is drawn


def rows_forwarded(learner: Policy) -> list[tuple[int, int]]:
    """(rows, tokens) of every forward pass from now on."""
    seen: list[tuple[int, int]] = []
    embedding = learner.model.get_input_embeddings()
    embedding.register_forward_pre_hook(lambda _module, inputs: seen.append(tuple(inputs[0].shape)))
    return seen


def test_prompts_are_prefilled_once_and_finished_rows_leave() -> None:
    learner, k = tiny.policy(), 4
    seen = rows_forwarded(learner)
    found = sample(learner, k=k)
    lengths = [len(ids) for ids in found.completion_ids]
    assert seen[0] == (len(PROMPTS), max(map(len, PROMPTS)))
    # token t + 2 of a row needs token t + 1 to go through the model; the last token of a row never does
    assert seen[1:] == [(sum(length > t for length in lengths), 1) for t in range(1, max(lengths))]
    assert 1 < seen[-1][0] < len(lengths)


@pytest.mark.parametrize("terminator", [tiny.EOS, tiny.END, 20])
def test_every_terminator_stops_even_as_the_first_token(terminator: int) -> None:
    learner = tiny.policy(eos=[tiny.EOS, 20])
    bias_towards(learner, terminator)
    found = sample(learner)
    assert list(found.completion_ids) == [[terminator]] * 12
    assert set(found.stop_reasons) == {"stop"} and set(found.texts) == {""}
    assert all(len(row) == 1 and row[0] == pytest.approx(0, abs=1e-3) for row in found.logprobs)
    scored = learner.logprobs(learner.collate([PROMPTS[0]], found.completion_ids[:1]))
    assert scored.logprobs.shape == (1, 1)


def test_the_cap_counts_the_terminator() -> None:
    learner = tiny.policy()
    bias_towards(learner, 9)
    found = sample(learner, max_completion_length=5)
    assert list(found.completion_ids) == [[9] * 5] * 12 and set(found.stop_reasons) == {"length"}
    assert set(found.texts) == {"late late late late late"}
    bias_towards(learner, tiny.END)
    assert set(sample(learner, max_completion_length=1).stop_reasons) == {"stop"}


def bias_towards(learner: Policy, token: int) -> None:
    """Make one token all but certain everywhere."""

    strength = 1000.0 * (1 + len(learner.model.lm_head._forward_hooks))  # the latest bias wins

    def push(_module: Any, _inputs: Any, logits: Tensor) -> Tensor:
        pushed = logits.clone()
        pushed[..., token] += strength
        return pushed

    learner.model.lm_head.register_forward_hook(push)


def test_texts_and_ids_are_prompt_major() -> None:
    learner = tiny.policy()
    found = sample(learner)
    assert list(found.texts) == [learner.decode(ids) for ids in found.completion_ids]
    assert found.group_size == 3 and list(found.prompt_ids) == PROMPTS
    assert len(found.completion_ids) == len(found.stop_reasons) == 12


def test_each_completion_is_handed_over_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of n tokens after n draws, so while longer ones of the batch are drawn; each once, as tasks read it."""
    draws, handed, learner = [0], dict[int, tuple[int, str]](), tiny.policy()
    forward = eager.forward

    def counted(*arguments: Any) -> Any:
        draws[0] += 1
        return forward(*arguments)

    def ended(completions: Sequence[Ended]) -> None:
        for completion in completions:
            assert completion.row not in handed
            handed[completion.row] = draws[0], completion.text

    monkeypatch.setattr(eager, "forward", counted)
    found = EagerEngine().generate(learner, Request(PROMPTS, 3, sampler(), uniforms(12), ended=ended))
    lengths = [len(ids) for ids in found.completion_ids]
    assert len(set(lengths)) > 2 and found == sample(tiny.policy())
    assert [handed[row] for row in range(12)] == list(zip(lengths, found.scored_texts, strict=True))


def test_an_interrupt_leaves_the_model_as_it_was() -> None:
    learner = tiny.policy()
    learner.model.activation_checkpointing_enable()
    learner.model.train()
    before = [(m.training, vars(m).get("gradient_checkpointing")) for m in learner.model.modules()]

    def stop(completions: Sequence[Ended]) -> None:
        assert not any(m.training for m in learner.model.modules()) and not torch.is_grad_enabled()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        EagerEngine().generate(learner, Request(PROMPTS, 3, sampler(), uniforms(12), ended=stop))
    assert [(m.training, vars(m).get("gradient_checkpointing")) for m in learner.model.modules()] == before
    assert torch.is_grad_enabled() and sample(learner) == sample(tiny.policy())


# ---- the draw itself


def test_the_ends_of_the_unit_interval() -> None:
    scores = torch.tensor([[-math.inf, 0.0, -math.inf, 1.0, -math.inf]])
    largest = torch.tensor([math.nextafter(1.0, 0.0)], dtype=torch.float64)
    assert sample_inverse_cdf(scores, torch.zeros(1, dtype=torch.float64)).tolist() == [1]
    assert sample_inverse_cdf(scores, largest).tolist() == [3]
    assert sample_inverse_cdf(scores, torch.ones(1, dtype=torch.float64)).tolist() == [
        3
    ]  # what float32 uniforms round up to
    assert sample_inverse_cdf(torch.tensor([[0.0]]), largest).tolist() == [0]


@given(
    st.lists(st.one_of(st.just(-math.inf), st.floats(-80, 80)), min_size=1, max_size=12),
    st.one_of(st.just(0.0), st.just(math.nextafter(1.0, 0.0)), st.floats(0, 1, exclude_max=True)),
)
def test_a_token_of_probability_zero_is_never_drawn(logits: list[float], u: float) -> None:
    scores = torch.tensor([[*logits, 0.0]])
    probabilities = torch.softmax(scores.double(), -1)[0]
    token = int(sample_inverse_cdf(scores, torch.tensor([u], dtype=torch.float64)))
    below = float(probabilities[:token].sum())
    assert probabilities[token] > 0
    assert below - 1e-12 <= u <= below + float(probabilities[token]) + 1e-12  # it is the inverse of the CDF


# ---- processors


def test_top_k_one_is_greedy_with_log_probability_zero() -> None:
    learner = tiny.policy()
    found, greedy = sample(learner, top_k=1), sample(learner, greedy=True)
    assert found.completion_ids == greedy.completion_ids
    assert all(logprob == 0 for row in found.logprobs for logprob in row)
    assert any(logprob < -0.01 for row in greedy.logprobs for logprob in row)  # the model's own


def test_truncation_is_in_the_logprobs() -> None:
    learner = tiny.policy(initializer_range=0.15)
    for settings in ({"top_p": 0.5}, {"min_p": 0.3}, {"top_k": 3}):
        found = sample(learner, temperature=0.8, **settings)
        prompts = [list(p) for p in PROMPTS for _ in range(3)]
        plain = learner.logprobs(learner.collate(prompts, found.completion_ids), 0.8).logprobs
        gaps = [lp - plain[n, t].item() for n, row in enumerate(found.logprobs) for t, lp in enumerate(row)]
        assert min(gaps) > 0.05  # renormalised over what was kept: at least -log(kept mass) above


def test_processors_are_transformers_own_in_its_order() -> None:
    learner, draws = tiny.policy(initializer_range=0.15), uniforms(1)
    found = sample(learner, PROMPTS[3:], 1, draws, 0.7, repetition_penalty=1.5, top_p=0.6)
    ids = list(PROMPTS[3])
    for t, token in enumerate(found.completion_ids[0]):
        history = torch.tensor([ids])
        scores = learner.model(history).logits[:, -1].detach()
        scores = RepetitionPenaltyLogitsProcessor(1.5)(history, scores)
        scores = TopPLogitsWarper(0.6)(history, scores / 0.7)
        assert sample_inverse_cdf(scores, draws[:, t]).item() == token
        assert torch.log_softmax(scores, -1)[0, token].item() == pytest.approx(found.logprobs[0][t], abs=1e-5)
        ids.append(token)


def test_padding_is_not_penalised_as_a_repetition() -> None:
    learner = tiny.policy(initializer_range=0.15)
    draws = uniforms(12)
    together = sample(learner, draws=draws, repetition_penalty=3.0)
    alone = sample(learner, PROMPTS[1:2], draws=draws[3:6], repetition_penalty=3.0)
    assert_same(alone, together, range(3, 6))
    bias_towards(learner, learner.pad_id)
    assert set(sample(learner, max_completion_length=1, repetition_penalty=3.0).completion_ids[3]) == {learner.pad_id}


# ---- errors


def test_the_registry() -> None:
    assert isinstance(engine(), EagerEngine) and isinstance(engine("eager"), Engine) and "eager" in ENGINES
    with pytest.raises(ConfigError, match=pattern("'vlm'", "eager")):
        engine("vlm")


class OldEngine:
    def generate(self, policy: Policy, prompt_ids_P: Any, group_size: int, sampling: Any, *rest: Any) -> Rollouts:
        raise AssertionError("never called")


def test_an_engine_of_another_signature_is_refused_before_any_work() -> None:
    own = EagerEngine()
    assert engine(own) is own
    with pytest.raises(ConfigError, match=pattern("OldEngine", "generate(policy, request)", "Request")):
        engine(OldEngine())  # type: ignore[arg-type]


def test_what_cannot_be_drawn_is_refused() -> None:
    learner = tiny.policy()
    with pytest.raises(ModelError, match=pattern(17, "max_completion_length=120", 137, 128)):
        sample(learner, max_completion_length=120, draws=uniforms(12, columns=120))
    with pytest.raises(ModelError, match=r"\A\D*\bprompt\b\D*\Z"):
        sample(learner, [[8], []])
    for wrong in (None, uniforms(11), uniforms(12, columns=CAP - 1), uniforms(12).float()):
        with pytest.raises(ValueError, match=r"uniforms: found .*; needs float64 \[12, 12\]"):
            EagerEngine().generate(learner, Request(PROMPTS, 3, sampler(), wrong))
    with pytest.raises(ValueError, match="temperature=0"):
        sample(learner, temperature=0)


@pytest.mark.parametrize("greedy", [True, False])
def test_weights_that_are_not_finite_are_named_with_what_to_do(greedy: bool) -> None:
    learner = tiny.policy()
    name, parameter = list(learner.parameters_by_name().items())[-1]
    with torch.no_grad():
        parameter.fill_(math.nan)
    with pytest.raises(ModelError, match=pattern("token 1", "nan", 1, name)):
        sample(learner, greedy=greedy)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_scores_that_overflow_with_sound_weights_are_laid_to_the_precision(
    bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, calls = eager.forward, []

    def overflowing(*arguments: Any) -> Any:
        logits, cache = honest(*arguments)
        calls.append(1)
        if len(calls) == 2:
            logits[-1, 3:] = bad
            logits[-1, :3] = -math.inf
        return logits, cache

    monkeypatch.setattr(eager, "forward", overflowing)
    with pytest.raises(ModelError, match=pattern("token 2", "float32")):
        sample(tiny.policy())


def test_no_prompts_no_completions() -> None:
    empty = sample(tiny.policy(), [], draws=uniforms(0))
    assert replace(empty, group_size=1) == Rollouts([], [], [], [], [], 1)
