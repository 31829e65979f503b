"""The engine that asks a vLLM server, against a stand-in that keeps the contract of a recorded one."""

import asyncio
import json
import math
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Lock
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_nb.config import ConfigError, RolloutConfig, SamplingConfig
from grpo_nb.judge import host_trust, trust
from grpo_nb.metrics import keys
from grpo_nb.policy.model import ModelError, Policy
from grpo_nb.rollout import Ended, Request, VLLMEngine, choose, vllm_server
from grpo_nb.rollout.selfcheck import sampler_gaps
from grpo_nb.rollout.vllm_server import URL, Cards, Completions, ServerError
from grpo_nb.run.run import Run
from grpo_nb.training import grpo as trainer
from grpo_nb.training.grpo import grpo
from grpo_nb.types import Rollouts
from tests.support import tiny_models as tiny
from tests.support.judge_server import serving
from tests.support.ranks import train
from tests.support.tiny import given, rows, tiny_config, tiny_run
from tests.support.tokens import pattern
from tests.support.vllm_stand_in import Body, StandIn

PROMPTS = [[tiny.BOS, 8, 9], [tiny.BOS, 10, 12, 13], [11]]
CAP, GROUP = 12, 3
SAMPLING = SamplingConfig(max_completion_length=CAP, max_prompt_length=24, temperature=0.7)
LONGEST = 24 + CAP
RECORDED = Path(__file__).with_name("vllm_0_32.json")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tiny.folder(tmp_path / "base")


@pytest.fixture
def server(base: Path) -> Iterator[StandIn]:
    with serving(StandIn(base)) as started:
        yield started


@pytest.fixture
def learner(base: Path) -> Policy:
    made = tiny.lora(base)
    tiny.nudge(made, 0.1)
    return made


def engine_at(server: StandIn, **settings: Any) -> VLLMEngine:
    return VLLMEngine(RolloutConfig(**{"engine": "vllm", "url": server.url, "patience_s": 5.0} | settings))


def request(seed: int = 0, **changes: Any) -> Request:
    draws = torch.rand(len(PROMPTS) * GROUP, CAP, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return Request(**{"prompt_ids": PROMPTS, "group_size": GROUP, "sampling": SAMPLING, "uniforms": draws} | changes)


def scored(policy: Policy, found: Any, temperature: float) -> Tensor:
    batch = policy.collate([p for p in found.prompt_ids for _ in range(GROUP)], found.completion_ids)
    with torch.no_grad():
        return policy.logprobs(batch, temperature).logprobs[batch.completion_mask]


def test_token_ids_go_out_and_come_back_with_their_log_probs(server: StandIn, learner: Policy) -> None:
    ended: list[Ended] = []
    asked = request(ended=ended.extend)
    found = engine_at(server).generate(learner, asked)
    given = torch.tensor([value for row in found.logprobs for value in row])
    assert torch.allclose(given, scored(learner, found, SAMPLING.temperature), atol=1e-5)
    assert sorted(e.row for e in ended) == list(range(len(PROMPTS) * GROUP))
    assert [e.text for e in sorted(ended, key=lambda e: e.row)] == list(found.scored_texts)
    sent = [body for body in server.bodies("/v1/completions") if body["n"] == GROUP]
    assert sorted(body["prompt"] for body in sent) == sorted(PROMPTS), "the K completions of a prompt in one request"
    assert {(body["temperature"], body["max_tokens"], body["ignore_eos"]) for body in sent} == {(0.7, CAP, True)}
    assert all(body["stop_token_ids"] == list(learner.stop_token_ids) for body in sent)
    first = {body["prompt"][-1]: body["seed"] for body in sent}
    assert first[PROMPTS[1][-1]] == int(asked.uniforms[GROUP, 0] * 2**53), "of (seed, step, row)"
    assert len({tuple(ids) for ids in found.completion_ids[:GROUP]}) > 1


def test_the_same_request_has_the_same_completions_and_another_seed_others(server: StandIn, learner: Policy) -> None:
    engine = engine_at(server)
    first, again, other = (engine.generate(learner, request(seed)) for seed in (0, 0, 1))
    assert first == again and first.completion_ids != other.completion_ids


def test_it_draws_inside_an_event_loop_too(server: StandIn, learner: Policy) -> None:
    engine = engine_at(server)

    async def in_a_cell() -> Rollouts:
        return engine.generate(learner, request())

    assert asyncio.run(in_a_cell()) == engine.generate(learner, request())


@pytest.mark.slow
def test_an_interrupt_ends_the_wait(server: StandIn, learner: Policy) -> None:
    engine, released, once = engine_at(server), Event(), Lock()
    engine.check(learner, LONGEST)

    def hanging(path: str, body: Body) -> None:
        if path == "/v1/completions":
            if once.acquire(blocking=False):
                signal.raise_signal(signal.SIGINT)
            released.wait(60)

    server.script = hanging
    with pytest.raises(KeyboardInterrupt):
        engine.generate(learner, request())
    assert not released.is_set()
    released.set()
    server.script = None
    assert engine.generate(learner, request()).completion_ids


def test_greedy_and_the_settings_of_the_sampler(server: StandIn, learner: Policy) -> None:
    engine = engine_at(server)
    engine.generate(learner, request(uniforms=None, greedy=True))
    greedy = server.bodies("/v1/completions")[-1]
    assert greedy["temperature"] == 0 and greedy["seed"] is None
    shaped = SAMPLING.model_copy(update={"top_k": 4, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1})
    engine.generate(learner, request(sampling=shaped))
    sent = server.bodies("/v1/completions")[-1]
    assert [sent[name] for name in ("top_k", "top_p", "min_p", "repetition_penalty")] == [4, 0.9, 0.01, 1.1]


def test_an_adapter_is_loaded_under_a_new_name_when_it_has_changed(server: StandIn, learner: Policy) -> None:
    engine, names = engine_at(server), []
    for size in (0.0, 0.05, 0.0, 0.05):
        tiny.nudge(learner, size)
        engine.generate(learner, request())
        names.append([*server.adapters])
        (gap,) = sampler_gaps(learner, engine.generate, 1.0, (1.0,))
        assert float(gap.abs().max()) < 1e-5
    assert all(len(loaded) == 1 for loaded in names), "the old one is unloaded"
    assert names[0] != names[1] == names[2] != names[3]
    loads = server.bodies("/v1/load_lora_adapter")
    assert len({body["lora_name"] for body in loads}) == len({body["lora_path"] for body in loads}) == len(loads) == 3
    assert [Path(body["lora_path"]).is_dir() for body in loads] == [False, False, True]
    engine.close()
    assert not server.adapters and not Path(loads[-1]["lora_path"]).exists()
    assert engine.generate(learner, request()).completion_ids


def test_a_server_that_restarts_is_given_the_adapter_again(
    server: StandIn, learner: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "PAUSES", (0.01, 0.02))
    engine = engine_at(server)
    wanted, left = engine.generate(learner, request()), [4]

    def restarting(path: str, body: Body) -> Any:
        if left[0] and path == "/v1/completions":
            left[0] -= 1
            server.restart()
            return 500, {"error": {"message": "EngineCore encountered an issue.", "code": 500}}
        return None

    server.script = restarting
    assert engine.generate(learner, request()) == wanted
    assert not left[0] and len(server.bodies("/v1/load_lora_adapter")) >= 2
    server.alter = lambda reply: None if server.alter is None else restarted(server, reply)
    assert engine.generate(learner, request()) == wanted, "cut off within a completion"


def restarted(server: StandIn, reply: Body) -> None:
    server.alter = None
    reply["choices"][0]["finish_reason"] = "abort"


@pytest.mark.parametrize("fault", ["refused", "timeout", "forgets"])
def test_a_server_that_stays_away_is_one_error(
    fault: str, server: StandIn, learner: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "PAUSES", (0.01, 0.02))
    engine, released = engine_at(server, timeout_s=2.0 if fault == "timeout" else 60.0, patience_s=0.1), Event()
    engine.check(learner, LONGEST)

    def failing(path: str, body: Body) -> Any:
        if path == "/v1/completions" and fault == "timeout":
            released.wait(60)
        if path == "/v1/completions" and fault == "forgets":
            server.restart()
        return (503, "starting") if fault == "refused" else None

    server.script = failing
    with pytest.raises(ServerError, match=pattern(server.url)):
        engine.generate(learner, request())
    assert len(server.asked) < 60 and not released.is_set()
    released.set()


def no_token_ids(reply: Body) -> None:
    for choice in reply["choices"]:
        del choice["token_ids"]


def other_prompt(reply: Body) -> None:
    reply["choices"][0]["prompt_token_ids"] = [1, 2]


def other_vocabulary(reply: Body) -> None:
    reply["choices"][0]["token_ids"][0] = 5000


def too_few(reply: Body) -> None:
    reply["choices"].pop()


@pytest.mark.parametrize(
    ("lacks", "named"),
    [
        ({"runtime_lora": False}, ["VLLM_ALLOW_RUNTIME_LORA_UPDATING=True", "--enable-lora"]),
        ({"context": 30}, [30, 36, "--max-model-len 36"]),
        ({"lora_rank": 1}, ["max_lora_rank 1", "--max-lora-rank 8"]),
        ({"raw_logprobs": True}, ["--logprobs-mode processed_logprobs"]),
        ({"alter": no_token_ids}, ["token_ids"]),
        ({"alter": other_prompt}, ["--enable-lora"]),
        ({"alter": other_vocabulary}, [5000, tiny.VOCABULARY]),
        ({"alter": too_few}, [2, 1]),
        ({"script": lambda path, body: (404, {"detail": "Not Found"})}, ["/v1/models"]),
        ({"script": lambda path, body: (200, "hello")}, ["/v1/models"]),
    ],
)
def test_what_a_server_lacks_is_found_before_any_work(
    lacks: dict[str, Any], named: list[Any], base: Path, learner: Policy
) -> None:
    keywords = {name: value for name, value in lacks.items() if name in ("runtime_lora", "context", "lora_rank")}
    with serving(StandIn(base, **keywords)) as server:
        for name, value in lacks.items() - keywords.items() if not keywords else ():
            setattr(server, name, value)
        engine = engine_at(server)
        with pytest.raises(ServerError, match=pattern(*named)) as refused:
            engine.check(learner, LONGEST)
        assert str(refused.value).count("processed_logprobs") == 1 + ("raw_logprobs" in lacks), "in the command, too"
        with pytest.raises(ServerError):
            engine.generate(learner, request(prompt_ids=[[8] * (LONGEST - CAP)] * 3))
        assert len(server.bodies("/v1/completions")) <= 6, "of the check"
        assert not server.adapters


def test_another_model_is_refused(tmp_path: Path, learner: Policy) -> None:
    with (
        serving(StandIn(tiny.folder(tmp_path / "other", seed=5))) as server,
        pytest.raises(ServerError, match=pattern("nats", "vllm serve")),
    ):
        engine_at(server).check(learner, LONGEST)


def test_a_policy_that_trains_in_full_is_refused_without_a_request(server: StandIn) -> None:
    with pytest.raises(ModelError, match=pattern("model.train", "rollout.engine")):
        engine_at(server).generate(tiny.policy(), request())
    assert not server.asked


def test_no_address_is_refused_and_the_variable_replaces_it(
    server: StandIn, learner: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=pattern("rollout.url", URL)):
        choose("vllm", learner, RolloutConfig())
    monkeypatch.setenv(URL, server.url)
    chosen_engine = choose("vllm", learner, RolloutConfig(url="http://192.0.2.1:9"))
    assert chosen_engine.name == "vllm" and chosen_engine.engine.generate(learner, request()).completion_ids


@pytest.mark.parametrize("changes", [{"url": "ftp://host"}, {"url": "http://me:secret@host"}, {"api_key_env": "sk-1"}])
def test_addresses_and_names_of_keys_are_checked_and_not_repeated(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=pattern("rollout")) as refused:
        tiny_config(**{f"rollout__{name}": value for name, value in changes.items()})
    assert "secret" not in str(refused.value) and "sk-1" not in str(refused.value)


def test_a_key_goes_to_the_server_and_into_no_error(
    server: StandIn, learner: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_KEY", "sk-very-secret-4711")
    server.key = "sk-very-secret-4711"
    assert engine_at(server, api_key_env="SERVER_KEY").generate(learner, request()).completion_ids
    server.key = "another"
    with pytest.raises(ServerError, match=pattern(401)) as refused:
        engine_at(server, api_key_env="SERVER_KEY").check(learner, LONGEST)
    assert "4711" not in str(refused.value)


def test_the_replies_of_the_recorded_server_are_read() -> None:
    by_path = {(each["path"], each["status"]): each["reply"] for each in json.loads(RECORDED.read_text())}
    choices = Completions.model_validate(by_path["/v1/completions", 200]).choices
    assert [choice.index for choice in choices] == [0, 1] and choices[0].token_ids[-1] == tiny.EOS
    (base,) = (card for card in Cards.model_validate(by_path["/v1/models", 200]).data if card.parent is None)
    assert base.max_model_len == 128


def test_the_stand_in_answers_as_the_recorded_server(server: StandIn, learner: Policy, tmp_path: Path) -> None:
    recorded = json.loads(RECORDED.read_text())
    learner.save(tmp_path / "adapter")
    tiny.load_policy(tiny.ModelConfig(name=str(server.folder), train="lora", lora_rank=16)).save(tmp_path / "rank16")
    for each in recorded:
        body = json.loads(json.dumps(each["body"]).replace("FOLDER", str(tmp_path)))
        status, reply = server.answer(each["path"], body)
        assert status == each["status"], each["path"]
        assert _shape(reply) <= _shape(each["reply"]), each["path"]


def _shape(value: Any, at: str = "") -> set[str]:
    """The places of a reply that the client reads: names, without what stands there."""
    if isinstance(value, dict):
        return {f"{at}.{name}" for name in value} | {p for name, v in value.items() for p in _shape(v, f"{at}.{name}")}
    return {p for item in value[:1] for p in _shape(item, f"{at}[]")} if isinstance(value, list) else set()


# ---- a run


@pytest.fixture
def demo_base(tmp_path: Path) -> Path:
    from grpo_nb.config import ModelConfig
    from grpo_nb.policy.model import load_policy

    load_policy(ModelConfig(name="demo", train="full", device="cpu")).save(tmp_path / "demo")
    return tmp_path / "demo"


@pytest.fixture
def demo_server(demo_base: Path) -> Iterator[StandIn]:
    with serving(StandIn(demo_base, context=256)) as started:
        yield started


def served_run(folder: Path, server: StandIn, name: str = "served", **changes: Any) -> Run:
    model = {"model__name": str(server.folder), "model__train": "lora", "model__lora_rank": 4, "sft__steps": 0}
    rollout = {"rollout__engine": "vllm", "rollout__url": server.url, "algorithm__learning_rate": 1e-2}
    return tiny_run(folder, name, **model | rollout | changes)


@pytest.mark.usefixtures("narrow_model")
def test_a_run_is_drawn_by_the_server_and_each_step_proves_it(tmp_path: Path, demo_server: StandIn) -> None:
    run = served_run(tmp_path, demo_server, run__checkpoint_every=1)
    first = rows(list(grpo(run, steps=2, **given())))
    assert not demo_server.adapters, "given back"
    more = rows(list(grpo(Run.open(run.path), steps=3, **given())))
    assert [row[keys.ENGINE] for row in first + more] == ["vllm"] * 3
    assert all(row[keys.SAMPLER_DIFFERENCE.mean] < 1e-5 for row in first + more)
    loads = [body["lora_name"] for body in demo_server.bodies("/v1/load_lora_adapter")]
    assert len(set(loads)) >= 3, "a new name each step"
    events = [*run.stored("events").having("kind", {"start", "resume"})]
    assert [event["server"]["exact"] for event in events] == [False, False]
    assert {event["server"]["vllm"] for event in events} == {"0.32.0"}
    whole = rows(list(grpo(served_run(tmp_path, demo_server, "whole"), steps=3, **given())))
    assert whole[2] == more[0], "with a server that is exact, as the stand-in is"


@pytest.mark.usefixtures("narrow_model")
def test_one_step_off_policy_the_server_draws_while_the_step_trains(
    tmp_path: Path, demo_server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    off_policy = {"rollout__steps_off_policy": 1, "algorithm__importance_correction": "tis"}
    run, plain = (served_run(tmp_path, demo_server, name, **off_policy) for name in ("run", "plain"))
    begin, apply, begun, moved = VLLMEngine.begin, trainer.apply, threading.Event(), threading.Event()
    with monkeypatch.context() as without:
        without.delattr(VLLMEngine, "begin")
        expected = rows(list(grpo(plain, steps=3, **given())))

    def begins(*values: Any) -> Any:
        begun.set()
        return begin(*values)

    def applies(*values: Any) -> Any:
        moved.set()
        return apply(*values)

    def late(path: str, body: Body) -> None:
        assert not begun.is_set() or moved.wait(60), "what is drawn ahead comes after the step has trained"

    monkeypatch.setattr(VLLMEngine, "begin", begins)
    monkeypatch.setattr(trainer, "apply", applies)
    demo_server.script = late
    found = rows(list(grpo(run, steps=3, **given())))
    assert found == expected and [row[keys.STALENESS] for row in found] == [0, 1, 1]
    assert not demo_server.adapters, "given back"


@pytest.mark.usefixtures("narrow_model")
def test_a_server_that_is_gone_for_good_loses_no_step(
    tmp_path: Path, demo_server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "PAUSES", (0.01, 0.02))
    run = served_run(tmp_path, demo_server, rollout__patience_s=0.1)
    steps = grpo(run, steps=3, **given())
    next(steps)
    demo_server.script = lambda path, body: (503, "stopped")
    with pytest.raises(ServerError, match=pattern(demo_server.url)):
        next(steps)
    demo_server.script = None
    demo_server.restart()
    assert [row["step"] for row in rows(list(grpo(Run.open(run.path), steps=3, **given())))] == [2, 3]


def less_sure(reply: Body) -> None:
    for choice in reply["choices"]:
        choice["logprobs"]["token_logprobs"] = [value - 0.05 for value in choice["logprobs"]["token_logprobs"]]


@pytest.mark.usefixtures("narrow_model")
def test_a_server_that_is_not_exact_is_weighed_against(tmp_path: Path, demo_server: StandIn) -> None:
    demo_server.alter = less_sure
    run = served_run(tmp_path, demo_server, algorithm__importance_correction="tis")
    (row,) = rows(list(grpo(run, steps=1, **given())))
    assert row[keys.SAMPLER_DIFFERENCE.mean] == pytest.approx(0.05, abs=1e-4)
    assert row[keys.IMPORTANCE_WEIGHT_MEAN] == pytest.approx(math.exp(0.05), abs=1e-3)


@pytest.mark.slow
def test_of_several_ranks_one_asks_for_all(tmp_path: Path, demo_server: StandIn) -> None:
    run = served_run(tmp_path, demo_server)
    demo_server.asked.clear()
    assert [ended.status for ended in train(2, run.path, steps=2)] == [0, 0]
    asked = [body for body in demo_server.bodies("/v1/completions") if body["n"] == run.config.batch.group_size]
    assert len(asked) == 2 * run.config.batch.prompts
    assert len(demo_server.bodies("/v1/completions")) == len(asked) + 3, "one rank has checked the server"
    assert all(row[keys.SAMPLER_DIFFERENCE.mean] < 1e-5 for row in run.stored("metrics"))


# ---- whom a run may ask


@pytest.fixture
def stranger(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run that came from elsewhere: no code of this machine made it."""
    monkeypatch.setenv(host_trust.FOLDER, str(tmp_path / "configuration"))
    monkeypatch.setattr(host_trust, "_here", set())
    made = tiny_run(tmp_path, "theirs", sft__steps=0)
    shutil.copytree(made.path, tmp_path / "copied")
    changes = {"rollout.engine": "vllm", "rollout.url": "http://192.0.2.1:8000"}
    changes |= {"model.name": str(base), "model.train": "lora"}
    settings = made.config.replace(**changes).model_dump(mode="json")
    (tmp_path / "copied" / "config.json").write_text(json.dumps(settings))
    return Run.open(tmp_path / "copied")


def test_a_run_from_elsewhere_asks_no_host_that_was_not_confirmed(
    stranger: Run, learner: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.getaddrinfo", _no_network)
    engine = choose(None, learner, stranger.config.rollout).engine
    with pytest.raises(ConfigError, match=pattern("http://192.0.2.1:8000", "trust", "--yes")):
        engine.generate(learner, request())
    trust(None, "http://192.0.2.1:8000")
    monkeypatch.undo()


def _no_network(*asked: Any, **more: Any) -> Any:
    raise AssertionError(f"asked for {asked}")


def test_making_a_run_with_a_server_confirms_it(tmp_path: Path, stranger: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not host_trust.confirmed()
    tiny_run(tmp_path, "mine", rollout__engine="vllm", rollout__url="http://192.0.2.1:8000")
    assert host_trust.confirmed() == host_trust.pairs_of(stranger.config)
