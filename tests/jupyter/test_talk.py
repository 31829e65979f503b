"""The same question to three stages: one policy, token by token, scored where the question is an example's."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_nb.evaluation import staged
from grpo_nb.evaluation.evaluate import restore_policy
from grpo_nb.evaluation.staged import StagedPolicy
from grpo_nb.jupyter import talk
from grpo_nb.jupyter.start import start
from grpo_nb.jupyter.talk import Talk
from grpo_nb.rollout import EagerEngine, Request
from grpo_nb.rollout.eager import stream
from grpo_nb.run.run import Run, RunError
from grpo_nb.types import Example, Score
from tests.support import exported
from tests.support.stage import PATIENCE, Stage
from tests.support.tokens import names, pattern

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft's own
EVIL = "<img src=x onerror=alert(1)> $x^2$ \x1b[31m"


class Quiz:
    """A task whose examples score by the length of an answer."""

    name = "quiz"

    def examples(self, split: str) -> list[Example]:
        return [Example(id=f"{split}/{i}", prompt=[{"role": "user", "content": f"who was {i}?"}]) for i in range(12)]

    def score(self, example: Example, completion: str) -> Score:
        return Score(value=float(len(completion)), label=f"<b>{example.id}</b>")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return exported.a_run(tmp_path, objectives={"quiz": {"task": "quiz"}}, sampling__max_completion_length=6)


@pytest.fixture
def open_talk(run: Run) -> Iterator[Talk]:
    made = Talk(run, tasks={"quiz": Quiz()})
    yield made
    made.close()


def asked(made: Talk) -> dict[Any, str]:
    thread = made.begin()
    assert thread is not None
    thread.join(PATIENCE)
    assert not thread.is_alive() and not made.ask.disabled and made.stop.disabled
    return {stage: answer.value for stage, answer in made.answers.items()}


def alone(run: Run, stage: Any, prompt: Any, uniforms: torch.Tensor | None = None) -> str:
    policy = restore_policy(run, stage)
    sampling = run.config.sampling.model_copy(update={"temperature": 1.5})
    request = Request([policy.encode(prompt)], 1, sampling, uniforms, uniforms is None)
    return EagerEngine().generate(policy, request).texts[0]


def test_a_stream_writes_what_the_engine_draws(run: Run) -> None:
    policy = restore_policy(run, 4)
    uniforms = torch.rand(1, 6, dtype=torch.float64)
    for request in (
        Request([policy.encode("who was late")], 1, run.config.sampling, None, True),
        Request([policy.encode("who was late")], 1, run.config.sampling, uniforms),
    ):
        steps = list(stream(policy, request))
        assert steps[-1] == EagerEngine().generate(policy, request).completion_ids[0]
        assert [len(ids) for ids in steps] == list(range(1, len(steps) + 1)) and steps[-1][:1] == steps[0]


@pytest.mark.parametrize("train", ["lora", "full"])
def test_one_policy_answers_as_each_stage(tmp_path: Path, train: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = exported.a_run(tmp_path, model__train=train)
    loads = []
    monkeypatch.setattr(staged, "restore_policy", lambda run, stage: loads.append(stage) or restore_policy(run, stage))
    policy = StagedPolicy(run)
    prompt = [{"role": "user", "content": "who was late?"}]
    said = {stage: [*policy.answer(stage, prompt, 0.0, 10)][-1] for stage in ("base", "sft", 4, "base", 2)}
    assert loads == ["base"], "the model is in memory once"
    assert said == {stage: alone(run, stage, prompt) for stage in said}
    assert len(set(said.values())) > 1
    policy.release()
    assert not policy.loaded


def test_three_answers_side_by_side_with_their_scores(open_talk: Talk, run: Run) -> None:
    assert open_talk.example.options[0] == (talk.OWN, None) and len(open_talk.example.options) == 9
    open_talk.example.index = 1
    objective, example = open_talk.example.value
    assert objective == "quiz" and open_talk.question.value == example.prompt[0]["content"]
    shown = asked(open_talk)
    assert list(shown) == ["base", "sft", "latest"]
    for stage, html in shown.items():
        text = alone(run, stage, example.prompt)
        assert names(html, f"score {len(text):.3g}") and "<b>test" not in html and "&lt;b&gt;test" in html
    open_talk.question.value += " really"
    assert not any("score" in html for html in asked(open_talk).values()), "an edited question has no gold"


def test_temperature_draws_with_equal_luck_for_all(open_talk: Talk) -> None:
    open_talk.question.value = "who was late?"
    greedy = asked(open_talk)
    assert greedy == asked(open_talk)
    open_talk.temperature.value = 2.0
    drawn = asked(open_talk)
    assert drawn != greedy and drawn != asked(open_talk), "asked again, it draws anew"


def test_an_answer_is_shown_while_it_grows_and_can_be_stopped(open_talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(talk, "REDRAW_SECONDS", 0.0)
    seen: list[str] = []
    more = threading.Event()

    def slowly(*_: Any) -> Iterator[str]:
        for n in range(1, 100):
            yield "a" * n
            if n == 3:
                more.set()
                assert open_talk._stop.wait(PATIENCE)

    monkeypatch.setattr(open_talk, "_answer", slowly)
    open_talk.answers["base"].observe(lambda change: seen.append(change["new"]), names="value")
    thread = open_talk.begin()
    assert thread is not None and more.wait(PATIENCE) and open_talk.begin() is None, "one question at a time"
    open_talk.stop.click()
    thread.join(PATIENCE)
    assert ["a" * n + " …" in text for n, text in enumerate(seen[1:4], 1)] == [True] * 3
    assert "aaaa" in seen[-1] and "aaaaa" not in seen[-1]
    assert "aaa" not in open_talk.answers["sft"].value, "the others were not asked"


def test_the_step_that_is_named_is_the_one_that_answered(run: Run) -> None:
    weights = next((run.path / "checkpoints" / "000004").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    made = Talk(run, tasks={"quiz": Quiz()})
    made.question.value = "who?"
    assert names(made._title("latest"), 4)
    assert names(asked(made)["latest"], 2) and names(repr(made), 2) and not names(repr(made), 4)
    shutil.rmtree(run.path / "checkpoints")
    assert names(repr(Talk(run)), "mine")
    made.close()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("stage", ["newest", "sft", "base", "4", 3, -1, 2.0, True, None])
def test_a_stage_that_the_run_does_not_have_is_refused_at_once(stage: Any, run: Run) -> None:
    with pytest.raises(RunError, match=pattern("2, 4", "'latest'")):
        Talk(run, stage=stage)


def test_what_a_model_writes_is_text(open_talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_talk, "_answer", lambda *_: iter([EVIL]))
    for html in asked(open_talk).values():
        assert "<img" not in html and "\x1b" not in html and "mathjax_ignore" in html and "&lt;img" in html


def test_a_run_that_trains_in_this_kernel_cannot_be_asked(tmp_path: Path, stage: Stage) -> None:
    run = exported.a_run(tmp_path, run__steps=9, objectives={"quiz": {"task": "quiz"}})
    made = Talk(run, tasks={"quiz": Quiz()})
    session = start(run)
    assert made.begin() is None and names(made.message.value, run.name) and made.ask.tooltip != "ask each stage"
    stage.release(100)
    session.wait_blocking()
    assert made.check() is None and made.message.value == ""
    made.close()


def test_what_fails_is_said_and_can_be_asked_again(open_talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Iterator[str]:
        raise RuntimeError("no room <b>")

    monkeypatch.setattr(open_talk, "_answer", fails)
    asked(open_talk)
    assert names(open_talk.message.value, "RuntimeError") and "<b>" not in open_talk.message.value


def test_a_run_without_its_data_or_checkpoints_still_answers(tmp_path: Path) -> None:
    run = exported.a_run(tmp_path, objectives={"quiz": {"task": "quiz"}})
    made = Talk(run)  # its task was not given
    assert len(made.example.options) == 1 and made.example.value is None
    made.question.value = "who?"
    assert all(asked(made).values())
    made.close()
