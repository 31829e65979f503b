"""The graph engine gives what the eager engine gives, or hands over to it; on the CPU its kernels are plain torch."""

import logging
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from grpo_nb.config import SamplingConfig
from grpo_nb.policy.model import ModelError, Policy
from grpo_nb.rollout import EagerEngine, Ended, Request, decode_attention, graph
from grpo_nb.rollout.graph import GraphEngine, base_of, bucket
from grpo_nb.rollout.projections import How
from grpo_nb.training.grpo import grpo
from grpo_nb.types import Rollouts
from tests.support import tiny_models as tiny
from tests.support.tiny import REWARDS, rows, small_tasks, tiny_run, weights
from tests.support.tiny_causal import causal
from tests.support.tokens import pattern

pytestmark = pytest.mark.usefixtures("narrow_model")

PROMPTS = [[tiny.BOS, 8, 9], [tiny.BOS, 10], [11], [tiny.BOS, *range(7, 23)]]
CAP = 12
KINDS = ("llama", "qwen2", "qwen3", "gemma3", "gpt2", "mistral")
"""Of our own forward pass and of transformers', with sliding windows and without."""
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cooler": {"temperature": 0.6},
    "cut": {"temperature": 0.8, "top_p": 0.7, "repetition_penalty": 1.3},
    "few": {"top_k": 4, "min_p": 0.05},
}
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"))
each_device = pytest.mark.parametrize("device", ["cpu", CUDA])


def policy_of(kind: str, device: str = "cpu", **settings: Any) -> Policy:
    if kind == "mistral":
        model = causal(kind)
    elif kind == "qwen3":
        shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        shape |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": tiny.VOCABULARY, "initializer_range": 0.3}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            model = AutoModelForCausalLM.from_config(Qwen3Config(**shape, eos_token_id=[tiny.EOS, 20])).eval()
    else:
        model = tiny.model(kind, 4, **{"eos": [tiny.EOS, 20]} | settings)
    return Policy(model.to(device), tiny.tokenizer())


def asked(
    k: int = 3, cap: int = CAP, greedy: bool = False, prompts: Sequence[Any] = PROMPTS, **settings: Any
) -> Request:
    draws = torch.rand(len(prompts) * k, cap, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    sampling = SamplingConfig(**{"max_completion_length": cap, "temperature": 1.0} | settings)
    return Request(prompts, k, sampling, draws, greedy)


def engine(device: str = "cpu", adapters: How = "auto", **settings: Any) -> GraphEngine:
    return GraphEngine(adapters=adapters, devices=(device,), **settings)


def assert_same(found: Rollouts, reference: Rollouts, within: float = 1e-4) -> None:
    assert list(found.completion_ids) == list(reference.completion_ids)
    assert list(found.stop_reasons) == list(reference.stop_reasons) and list(found.texts) == list(reference.texts)
    for ours, theirs in zip(found.logprobs, reference.logprobs, strict=True):
        assert list(ours) == pytest.approx(list(theirs), abs=within)


# ---- the same answers


@each_device
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_logprobs_are_those_of_the_eager_engine(kind: str, setting: str, device: str) -> None:
    learner, request, own = policy_of(kind, device), asked(**SETTINGS[setting]), engine(device)
    found = own.generate(learner, request)
    assert own.refused(learner) is None
    assert_same(found, EagerEngine().generate(learner, request))
    assert own.generate(learner, request) == found  # from the kept cache and graphs: the same bits


@each_device
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_transformers_generate(kind: str, device: str) -> None:
    learner = policy_of(kind, device)
    found = engine(device).generate(learner, asked(1, greedy=True))
    theirs = tiny.generated(learner, PROMPTS, CAP)
    for ours, row in zip(found.completion_ids, theirs, strict=True):
        assert row[: len(ours)] == list(ours) and set(row[len(ours) :]) <= {learner.pad_id}


@each_device
def test_frequencies_match_the_softmax(device: str) -> None:
    learner, n = policy_of("llama", device, initializer_range=0.15), 5_000
    with learner.eval_mode():
        logits = learner.model(torch.tensor([PROMPTS[0]], device=device)).logits[0, -1].double().cpu()
    expected = torch.softmax(logits / 0.7, -1)
    request = asked(n, 1, prompts=PROMPTS[:1], temperature=0.7)
    found = engine(device, max_rows=n).generate(learner, request)
    counts = torch.bincount(torch.tensor(found.completion_ids)[:, 0], minlength=tiny.VOCABULARY)
    deviation = (counts - n * expected) / (n * expected * (1 - expected)).sqrt()
    assert expected.max() < 0.6 and deviation.abs().max() < 4


@each_device
@pytest.mark.parametrize("how", ["fused", "merged"])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2"])
def test_an_adapter_draws_and_nothing_of_the_model_changes(kind: str, how: How, device: str, tmp_path: Path) -> None:
    learner = tiny.lora(tmp_path, kind)
    tiny.nudge(learner, 0.1)
    learner.model.to(device)
    before, flags = {n: p.clone() for n, p in learner.model.named_parameters()}, tiny.flags(learner)
    request, own = asked(), engine(device, how)
    found = own.generate(learner, request)
    assert own.refused(learner) is None
    assert_same(found, EagerEngine().generate(learner, request))
    assert all(torch.equal(p, before[n]) for n, p in learner.model.named_parameters())
    assert tiny.flags(learner) == flags and untouched(learner)
    tiny.nudge(learner, 0.3)  # in place, as an optimizer step
    moved = own.generate(learner, request)
    assert moved.completion_ids != found.completion_ids
    assert_same(moved, EagerEngine().generate(learner, request))


def test_the_reference_is_drawn_from_with_its_own_weights(tmp_path: Path) -> None:
    for learner in (tiny.lora(tmp_path), tiny.policy()):
        own, request = engine(), asked()
        learner.freeze_reference()
        start = own.generate(learner, request)
        tiny.nudge(learner, 0.3)
        assert own.generate(learner, request).completion_ids != start.completion_ids
        with learner.as_reference():
            assert_same(own.generate(learner, request), start)


def untouched(learner: Policy) -> bool:
    """Whether modules compute with functions of their own, and attention is what it was."""
    ours = [m for m in learner.model.modules() if "forward" in vars(m)]
    return not ours and base_of(learner).config.get_text_config()._attn_implementation != decode_attention.NAME


COMPILED = """
import torch
compiled, torch_compile = [], torch.compile
def backend(module, _inputs):
    compiled.append(module)
    return module.forward
torch.compile = lambda f, **settings: torch_compile(f, backend=backend, **settings)
from grpo_nb.rollout import EagerEngine
from tests.rollout.test_graph import asked, assert_same, engine, tiny, untouched
for layers in (2, 4):
    learner, request = tiny.policy("llama", num_hidden_layers=layers), asked()
    assert_same(engine(compiled=True).generate(learner, request), EagerEngine().generate(learner, request))
    assert untouched(learner)
    print(len(compiled))
"""


@pytest.mark.slow
def test_compiled_layers_share_the_code_of_one() -> None:
    """In a process of its own, where signatures are not checked: the checks would be compiled too."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    first, both = map(int, done.stdout.split())
    shapes = 2  # the self-check's rows and the request's, each of both models
    assert first == both and first <= 4 * shapes + 2


# ---- how it is drawn


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The engine looks at every third token which rows have finished, and goes down to two rows."""
    monkeypatch.setattr(graph, "CHECK_EVERY", 3)
    monkeypatch.setattr(graph, "SMALLEST", 2)
    yield


@each_device
@pytest.mark.parametrize("setting", ["plain", "cut"])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2"])
def test_finished_rows_leave_and_change_nothing(kind: str, setting: str, device: str, often: None) -> None:
    learner = policy_of(kind, device, eos=[tiny.EOS, *range(15, 24)])
    request, own = asked(8, 40, **SETTINGS[setting]), engine(device)
    own.generate(learner, asked(1, 1))
    seen: list[int] = []
    handle = learner.model.get_input_embeddings().register_forward_pre_hook(lambda _m, x: seen.append(x[0].shape[0]))
    found = own.generate(learner, request)
    handle.remove()
    assert_same(found, EagerEngine().generate(learner, request))
    lengths = [len(ids) for ids in found.completion_ids]
    assert min(lengths) < max(lengths)
    if device == "cpu":
        assert len({*seen[1:]}) > 1 and seen[1:] == sorted(seen[1:], reverse=True)  # buckets, ever smaller


def test_buckets() -> None:
    assert [bucket(alive, 64) for alive in (64, 33, 32, 17, 16, 9, 8, 1)] == [64, 64, 32, 32, 16, 16, 8, 8]
    assert [bucket(alive, 12) for alive in (12, 6, 1)] == [12, 12, 12] and bucket(1, 16) == 8


@pytest.mark.parametrize("max_rows", [1, 4, 7])
def test_chunks_change_memory_and_no_result(max_rows: int, often: None) -> None:
    learner, request = policy_of("llama"), asked(3)
    assert_same(engine(max_rows=max_rows).generate(learner, request), EagerEngine().generate(learner, request))


def test_one_engine_serves_rollouts_of_other_sizes_and_settings(often: None) -> None:
    learner, own = policy_of("llama"), engine()
    for request in (asked(4, 20), asked(2, 9), asked(2, 9, temperature=0.5), asked(3, 7, top_k=2), asked(1, 30)):
        assert_same(own.generate(learner, request), EagerEngine().generate(learner, request))
    other = tiny.policy("llama", seed=9)
    assert_same(own.generate(other, asked()), EagerEngine().generate(other, asked()))


def test_a_new_temperature_needs_no_new_graph() -> None:
    learner, own = policy_of("llama"), engine()
    own.generate(learner, asked())
    assert own._held is not None
    loop = own._held._loop
    own.generate(learner, asked(temperature=0.5))
    assert own._held._loop is loop and loop is not None and loop.settings is not None and loop.settings.plain


def test_completions_are_handed_over_as_they_end_and_an_interrupt_restores_the_model(often: None) -> None:
    learner, calls = policy_of("llama"), list[list[Ended]]()
    own = engine()
    found = own.generate(learner, replace(asked(8, 40), ended=lambda completions: calls.append(list(completions))))
    texts = {completion.row: completion.text for call in calls for completion in call}
    assert len(calls) > 2 and sum(map(len, calls)) == 32
    assert [texts[row] for row in range(32)] == list(found.scored_texts)
    lengths = [max(len(found.completion_ids[completion.row]) for completion in call) for call in calls]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]

    def stop(completions: Sequence[Ended]) -> None:
        raise KeyboardInterrupt

    learner.model.train()
    with pytest.raises(KeyboardInterrupt):
        own.generate(learner, replace(asked(8, 40), ended=stop))
    assert untouched(learner) and all(m.training for m in learner.model.modules()) and torch.is_grad_enabled()


@each_device
@pytest.mark.parametrize("settings", [{}, {"model__train": "lora", "model__dtype": "float32"}], ids=["full", "lora"])
def test_a_run_trains_and_resumes_as_with_the_eager_engine(settings: Any, device: str, tmp_path: Path) -> None:
    settings = settings | {"model__device": device, "run__steps": 3, "batch__micro_batch": 16}
    trained, found = {}, {}
    for name, drawing in {"eager": EagerEngine(), "graph": engine(device), "halted": engine(device)}.items():
        run = tiny_run(tmp_path, name, **settings)
        given: dict[str, Any] = {"tasks": small_tasks(), "rewards": REWARDS}
        if name == "halted":
            steps = [next(stage := grpo(run, engine=drawing, **given))]
            stage.close()
            drawing = engine(device)
        else:
            steps = []
        found[name] = [*steps, *grpo(run, engine=drawing, **given)]
        trained[name] = weights(run)
        engines = run.events()["engine"].dropna()
        drew = "graph" if isinstance(drawing, GraphEngine) else "eager"
        assert len(engines) == 1 + (name == "halted") and {*engines} == {drew}
    assert rows(found["halted"]) == rows(found["graph"])
    assert all(torch.equal(weight, trained["graph"][name]) for name, weight in trained["halted"].items())
    assert [step["tokens"] for step in found["graph"]] == [step["tokens"] for step in found["eager"]]
    assert all(torch.allclose(weight, trained["graph"][name], atol=1e-5) for name, weight in trained["eager"].items())


# ---- what it cannot serve


def refusal(learner: Policy, own: GraphEngine, caplog: pytest.LogCaptureFixture) -> str:
    """What the log says, once, when the eager engine draws instead."""
    with caplog.at_level(logging.INFO, "grpo_nb.rollout.graph"):
        for _ in range(2):
            assert own.generate(learner, asked()) == EagerEngine().generate(learner, asked())
    ours = [record.getMessage() for record in caplog.records if record.name == graph.__name__]
    assert len(ours) == 1 and own.refused(learner)
    return ours[0]


@pytest.mark.parametrize(("kind", "names"), [("gemma2", "soft-capped"), ("bloom", "Bloom"), ("gpt_oss", "s_aux")])
def test_other_attentions_are_drawn_from_by_the_eager_engine(kind: str, names: str, caplog: Any) -> None:
    assert names in refusal(Policy(causal(kind), tiny.tokenizer()), engine(), caplog)


def test_states_are_drawn_from_by_the_eager_engine(caplog: Any) -> None:
    assert "LinearAttention" in refusal(tiny.policy("lfm2"), engine(), caplog)


def test_a_cpu_and_quantised_weights_are_drawn_from_by_the_eager_engine(caplog: Any) -> None:
    assert "cpu" in refusal(policy_of("llama"), GraphEngine(), caplog)
    caplog.clear()
    learner = policy_of("llama")
    learner.model.is_quantized = True
    assert "quantised" in refusal(learner, engine(), caplog)


def test_a_step_that_is_another_function_is_found_before_anything_is_drawn(caplog: Any, monkeypatch: Any) -> None:
    honest = decode_attention.reference

    def forgetful(query: Tensor, *rest: Any) -> Tensor:
        return 0.5 * honest(query, *rest)

    monkeypatch.setattr(decode_attention, "reference", forgetful)
    assert "nats" in refusal(policy_of("llama"), engine(), caplog)


def test_weights_that_are_not_finite_are_named(often: None) -> None:
    learner, own = policy_of("llama"), engine()
    own.generate(learner, asked())
    name, parameter = list(learner.parameters_by_name().items())[-1]
    with torch.no_grad():
        parameter.fill_(torch.nan)
    for greedy in (True, False):
        with pytest.raises(ModelError, match=pattern("token 1", "nan", 1, name)):
            own.generate(learner, asked(greedy=greedy))
    assert untouched(learner)


def test_what_cannot_be_drawn_is_refused_as_the_eager_engine_does() -> None:
    learner, own = policy_of("llama"), engine()
    with pytest.raises(ModelError, match=r"\A\D*\bprompt\b\D*\Z"):
        own.generate(learner, asked(prompts=[[8], []]))
    with pytest.raises(ValueError, match=r"uniforms: found none; needs float64 \[12, 12\]"):
        own.generate(learner, Request(PROMPTS, 3, SamplingConfig(max_completion_length=CAP)))
    assert own.generate(learner, asked(prompts=[])).completion_ids == []
