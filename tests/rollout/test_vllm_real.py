"""The engine against a real vLLM server: what the stand-in cannot show."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_nb.config import ModelConfig, RolloutConfig, SamplingConfig
from grpo_nb.metrics import keys
from grpo_nb.policy.model import Policy, load_policy
from grpo_nb.rollout import EagerEngine, Request, VLLMEngine
from grpo_nb.rollout.selfcheck import sampler_gaps
from grpo_nb.rollout.vllm_server import ServerError
from grpo_nb.training.grpo import grpo
from tests.rollout.test_vllm import RECORDED, _shape
from tests.support import tiny_models as tiny
from tests.support.ranks import free_port
from tests.support.tiny import given, tiny_run
from tests.support.tokens import pattern
from tests.support.vllm_process import LORA, PROCESSED, VLLMProcess

pytestmark = pytest.mark.slow

SAMPLING = SamplingConfig(max_completion_length=10, max_prompt_length=96, temperature=0.7)
PROMPTS = [[10 + i] * 20 + [7, 8, 9] for i in range(16)]
ROUNDING = 1e-4
"""Nats, in float32 on both sides."""


@contextmanager
def running(folder: Path, *flags: str, **more: Any) -> Iterator[VLLMProcess]:
    process = VLLMProcess(folder, free_port(), *flags, **more)
    process.start()
    try:
        process.wait()
        yield process
    finally:
        process.kill()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm") / "demo"
    load_policy(ModelConfig(name="demo", train="full", device="cpu")).save(folder)
    return folder


@pytest.fixture(scope="module")
def server(base: Path) -> Iterator[VLLMProcess]:
    with running(base, *LORA, *PROCESSED) as process:
        yield process


def learner_on(base: Path, rank: int = 8) -> Policy:
    return load_policy(ModelConfig(name=str(base), train="lora", lora_rank=rank, device="cpu"))


def engine_at(server: VLLMProcess) -> VLLMEngine:
    return VLLMEngine(RolloutConfig(engine="vllm", url=server.url))


def request(group: int = 4, prompts: Sequence[Sequence[int]] = PROMPTS, **changes: Any) -> Request:
    draws = torch.rand(len(prompts) * group, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return Request(**{"prompt_ids": prompts, "group_size": group, "sampling": SAMPLING, "uniforms": draws} | changes)


def test_the_contract_is_the_recorded_one(server: VLLMProcess, base: Path, tmp_path: Path) -> None:
    learner_on(base).save(tmp_path / "adapter")
    learner_on(base, rank=16).save(tmp_path / "rank16")
    for each in json.loads(RECORDED.read_text()):
        body = json.loads(json.dumps(each["body"]).replace("FOLDER", str(tmp_path)))
        status, reply = server.ask(each["path"], body)
        assert status == each["status"], (each["path"], reply)
        if not isinstance(each["reply"], str):
            places = {place for place in _shape(each["reply"]) if ".top_logprobs" not in place}  # named by the tokens
            assert places <= _shape(reply), each["path"]


def test_each_adapter_draws_by_its_own_weights(server: VLLMProcess, base: Path) -> None:
    learner, engine = learner_on(base), engine_at(server)
    engine.generate(learner, request())
    for size in (0.0, 0.05, 0.05):
        tiny.nudge(learner, size)
        for temperature in (0.5, 1.0, 1.5):
            (gap,) = sampler_gaps(learner, engine.generate, temperature, (temperature,))
            assert float(gap.abs().max()) < ROUNDING
    assert len(server.adapters()) == 1
    greedy = request(1, uniforms=None, greedy=True)
    assert engine.generate(learner, greedy).completion_ids == EagerEngine().generate(learner, greedy).completion_ids
    shaped = request(sampling=SAMPLING.model_copy(update={"top_k": 5, "min_p": 0.02}))
    drawn = engine.generate(learner, shaped)
    assert max(len({tuple(ids) for ids in drawn.completion_ids[i : i + 4]}) for i in range(0, 64, 4)) > 1
    engine.close()
    assert not server.adapters()


def test_what_it_lacks_is_named(server: VLLMProcess, base: Path, tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=pattern("max_lora_rank 8", "--max-lora-rank 16")):
        engine_at(server).check(learner_on(base, rank=16), 106)
    with pytest.raises(ServerError, match=pattern(128, 210, "--max-model-len 210")):
        engine_at(server).check(learner_on(base), 210)
    other = load_policy(ModelConfig(name="demo", train="full", device="cpu"))
    tiny.nudge(other, 0.1)
    other.save(tmp_path / "other")
    with pytest.raises(ServerError, match=pattern("nats", "demo")):
        engine_at(server).check(learner_on(tmp_path / "other"), 106)


def test_raw_log_probs_are_refused(base: Path) -> None:
    with (
        running(base, *LORA) as process,
        pytest.raises(ServerError, match=pattern("--logprobs-mode processed_logprobs")),
    ):
        engine_at(process).check(learner_on(base), 106)


@pytest.mark.parametrize(
    ("flags", "runtime", "named"),
    [(LORA, False, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"), ((), True, "--enable-lora")],
)
def test_a_server_without_runtime_lora_is_refused(base: Path, flags: Any, runtime: bool, named: str) -> None:
    with (
        running(base, *flags, *PROCESSED, runtime_lora=runtime) as process,
        pytest.raises(ServerError, match=pattern(named)),
    ):
        engine_at(process).check(learner_on(base), 106)


def test_a_run_survives_a_killed_server(base: Path, tmp_path: Path) -> None:
    model = {"model__name": str(base), "model__train": "lora", "model__lora_rank": 8, "sft__steps": 0}
    with running(base, *LORA, *PROCESSED) as process:
        settings = {"rollout__engine": "vllm", "rollout__url": process.url, "algorithm__learning_rate": 1e-2}
        run, found = tiny_run(tmp_path, "run", **model | settings), []
        for step in grpo(run, steps=4, **given()):
            found.append(step.metrics)
            if step.step == 2:
                process.kill()
                process.start()
    assert [row[keys.STEP] for row in found] == [1, 2, 3, 4]
    assert all(row[keys.SAMPLER_DIFFERENCE.mean] < ROUNDING for row in found)
