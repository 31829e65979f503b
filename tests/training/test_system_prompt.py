"""An objective's system prompt begins each of its prompts: in SFT, training, evaluation and answers."""

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest

from grpo_nb import tasks
from grpo_nb.config import Config, ConfigError, ObjectiveConfig
from grpo_nb.evaluation.answers import answers
from grpo_nb.evaluation.evaluate import evaluate
from grpo_nb.jupyter.talk import Talk
from grpo_nb.policy.model import Policy
from grpo_nb.policy.tokenization import TokenizerAdapter
from grpo_nb.preflight import dependencies, requirements
from grpo_nb.rollout import EagerEngine, Request
from grpo_nb.run.run import Run, RunError
from grpo_nb.tasks import load_task, load_tasks, read_examples, told
from grpo_nb.tasks.system_prompt import prompted
from grpo_nb.training import gold
from grpo_nb.training.grpo import grpo
from grpo_nb.training.sft import sft
from grpo_nb.types import Example, Message, Rollouts, Score
from tests.support import tiny_models as tiny
from tests.support.stage import PATIENCE
from tests.support.tiny import demo_tasks, rows, tiny_config
from tests.support.tokens import names, pattern

A, B = "yes no", "red blue two"
"""System prompts in the tiny tokenizer's words."""
TEXTS = {"a": A, "b": B}
AS_USER = (
    "{% for m in messages %}<|{{ 'assistant' if m['role'] == 'assistant' else 'user' }}|> {{ m['content'] }} <|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NO_SYSTEM = {
    "as the user": AS_USER,
    "dropped": "{% for m in messages if m['role'] != 'system' %}<|{{ m['role'] }}|> {{ m['content'] }} <|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "refused": "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + AS_USER,
}


class Words:
    """Prompts as messages, or as `strings`; the first has a system message of its own."""

    name = "words"
    rules = 3

    def __init__(self, strings: bool = False) -> None:
        self.strings = strings

    def examples(self, split: Literal["train", "test"]) -> list[Example]:
        own: list[list[Message]] = [[{"role": "system", "content": "old"}], [], [], []]
        texts = ["who was late", "the old man", "young woman", "answer is"]
        chats = [[*first, {"role": "user", "content": text}] for first, text in zip(own, texts, strict=True)]
        return [
            Example(f"{split}/{i}", texts[i] if self.strings else chat, "one two three", {"answerable": i < 2})
            for i, chat in enumerate(chats)
        ]

    def score(self, example: Example, completion: str) -> Score:
        return Score(value=float(len(completion) % 5), label="x")


class Spy:
    """The eager engine, which keeps the prompts' ids."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, ...]] = set()

    def generate(self, policy: Policy, request: Request) -> Rollouts:
        self.seen |= {tuple(ids) for ids in request.prompt_ids}
        return EagerEngine().generate(policy, request)


TASKS = {"a": Words(), "b": Words()}


def config_of(folder: Path, texts: Mapping[str, str | None] = TEXTS, **changes: Any) -> Config:
    base = folder / "base"
    if not base.exists():
        tiny.folder(base)
    asked = {
        "objectives": {name: {"task": "words", "system_prompt": text} for name, text in texts.items()},
        **{"model__name": str(base), "model__train": "lora", "model__lora_rank": 2, "model__device": "cpu"},
        **{"batch__prompts": 2, "batch__group_size": 2, "batch__micro_batch": 4},
        **{"sampling__max_completion_length": 3, "run__steps": 2, "run__checkpoint_every": 1, "run__eval_examples": 4},
        **{"run__quick_eval_every": 0, "sft__steps": 0, "sft__data": None, "sft__batch": 2},
    }
    return tiny_config(**asked | changes)


def made(folder: Path, name: str = "run", **changes: Any) -> Run:
    return Run.create(folder / name, config_of(folder, **changes))


def prompt_ids(text: str, question: str) -> tuple[int, ...]:
    turns = (tiny.UNK, *tiny.ids(text), tiny.END, tiny.USER, *tiny.ids(question), tiny.END)  # no token `<|system|>`
    return (tiny.BOS, *turns, tiny.ASSISTANT)


def test_each_objectives_text_reaches_its_rendered_prompts(tmp_path: Path) -> None:
    run, engine = made(tmp_path, run__steps=4), Spy()
    list(grpo(run, tasks=TASKS, engine=engine))
    both = {prompt_ids(text, q) for text in (A, B) for q in ("who was late", "the old man", "young woman", "answer is")}
    assert engine.seen == both, "four steps of one prompt for each objective see them all"
    evaluated = Spy()
    evaluate(run, tasks=TASKS, engine=evaluated, limit=4)
    assert evaluated.seen == both
    sampled = {(row["objective"], row["prompt"]) for row in run.rows("samples")}
    assert {(name, TEXTS[name] in prompt) for name, prompt in sampled} == {("a", True), ("b", True)}


def test_sft_learns_the_gold_answers_after_the_text(tmp_path: Path) -> None:
    run = made(tmp_path, sft__steps=1)
    found = gold.load_gold(run.config, run.path, TASKS)
    first = [{"role": "system", "content": A}, {"role": "user", "content": "who was late"}]
    assert found["a"][0] == (first, "one two three") and found["b"][3][0][0] == {"role": "system", "content": B}
    assert [step.step for step in sft(run, tasks=TASKS)] == [1]


def test_one_objective_may_have_none(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"a": A, "b": None})
    loaded = load_tasks(config, tmp_path, TASKS)
    assert loaded["b"] is TASKS["b"]
    assert [e.prompt for e in read_examples(loaded["a"], "test")] != [e.prompt for e in Words().examples("test")]


def test_a_run_resumes_to_the_same_bits_and_refuses_another_text(tmp_path: Path) -> None:
    straight, broken = made(tmp_path, "straight"), made(tmp_path, "broken")
    expected = rows(list(grpo(straight, tasks=TASKS)))
    begun = rows(list(grpo(broken, tasks=TASKS, steps=1)))
    assert begun + rows(list(grpo(Run.open(broken.path), tasks=TASKS))) == expected
    plain = made(tmp_path, "plain", texts={"a": None, "b": None})
    assert rows(list(grpo(plain, tasks=TASKS))) != expected
    file = broken.path / "config.json"
    other = config_of(tmp_path, {"a": B, "b": B}).model_dump(mode="json")["objectives"]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"objectives": other}))
    with pytest.raises(RunError, match=pattern("objectives.a.system_prompt", A, B)):
        list(grpo(Run.open(broken.path), tasks=TASKS, steps=3))


def test_the_text_is_part_of_the_datas_digest(tmp_path: Path) -> None:
    def digest(texts: Mapping[str, str | None]) -> dict[str, str]:
        config = config_of(tmp_path, texts)
        loaded = load_tasks(config, tmp_path, TASKS)
        examples = {name: read_examples(task, "train") for name, task in loaded.items()}
        found = dependencies.of_training(config, loaded, examples)
        return {key: entry.digest for key, entry in found.items()}

    one, other, none = digest(TEXTS), digest({"a": B, "b": B}), digest({"a": None, "b": None})
    assert one["data/a/train"] != other["data/a/train"] and one["data/b/train"] == other["data/b/train"]
    assert one["prompt/a rules"] == none["prompt/a rules"] and none["data/a/train"] == none["data/b/train"]


@pytest.mark.parametrize("template", NO_SYSTEM.values(), ids=NO_SYSTEM)
def test_a_template_without_the_role_is_refused_before_the_first_step(template: str, tmp_path: Path) -> None:
    tiny.folder(tmp_path / "base", tokens=tiny.tokenizer(template))
    run = made(tmp_path, texts={"a": None, "b": B}, sft__steps=1)
    for verb in (lambda: list(sft(run, tasks=TASKS)), lambda: list(grpo(run, tasks=TASKS))):
        with pytest.raises(ConfigError, match=pattern("objectives.b.system_prompt", str(tmp_path / "base"))):
            verb()
    with pytest.raises(ConfigError, match=pattern("objectives.b.system_prompt")):
        evaluate(run, stage="base", tasks=TASKS)
    with pytest.raises(ConfigError, match=pattern("objectives.b.system_prompt")):
        answers(run, "b", stage="base", tasks=TASKS)
    assert run.last_step() is None
    requirements.check_system_prompts(config_of(tmp_path, {"a": None}), tiny.policy(tokens=tiny.tokenizer(template)))


def test_a_template_with_the_role_takes_it_and_none_does_not() -> None:
    assert tiny.policy().takes_system
    merged = "{{ messages[0]['content'] if messages[0]['role'] == 'system' }} " + NO_SYSTEM["dropped"]
    assert TokenizerAdapter(tiny.tokenizer(merged), [tiny.EOS], tiny.VOCABULARY).takes_system
    assert not TokenizerAdapter(tiny.tokenizer(None), [tiny.EOS], tiny.VOCABULARY).takes_system


def test_prompts_that_are_strings_are_refused(tmp_path: Path) -> None:
    run = made(tmp_path, texts={"a": A})
    with pytest.raises(ConfigError, match=pattern("system_prompt", "'train/0'", "'words'")):
        list(grpo(run, tasks={"a": Words(strings=True)}))


@pytest.mark.parametrize(("cap", "fits"), [(12, True), (11, False)])
def test_the_length_of_a_prompt_counts_the_text(cap: int, fits: bool, tmp_path: Path) -> None:
    assert len(prompt_ids(B, "who was late")) == 12
    run = made(tmp_path, sampling__max_prompt_length=cap, run__steps=1)
    if fits:
        assert len(list(grpo(run, tasks=TASKS))) == 1
        return
    with pytest.raises(ConfigError, match=pattern(12, "max_prompt_length")):
        list(grpo(run, tasks=TASKS))


def test_the_task_keeps_its_other_parts(tmp_path: Path) -> None:
    own = demo_tasks()[1]["fairness"]
    task = prompted(own, A)
    assert task.name == own.name and task.reads == own.reads  # type: ignore[attr-defined]
    assert task.selfcheck == own.selfcheck  # type: ignore[attr-defined]
    example, bare = task.examples("test")[0], own.examples("test")[0]
    assert list(example.prompt) == [{"role": "system", "content": A}, *bare.prompt]
    assert task.score(example, bare.target or "") == own.score(bare, bare.target or "")
    given = load_tasks(config_of(tmp_path), tmp_path, TASKS)["a"]
    assert given.rules == 3 and not hasattr(given, "summary")  # type: ignore[attr-defined]
    assert told(given, given.examples("train")[0]) is True
    assert pickle.loads(pickle.dumps(given)).examples("train") == given.examples("train")


@pytest.mark.parametrize("data", ["demo", "file.jsonl"])
def test_a_built_in_task_has_the_text(data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tasks.BUILT_IN, "bbq", lambda data, seed: Words())
    monkeypatch.setattr(tasks, "_demo_task", lambda name, folder, seed: Words())
    task = load_task(ObjectiveConfig(task="bbq", data=data, system_prompt=A), tmp_path, 0)
    assert [e.prompt[0] for e in task.examples("test")] == [{"role": "system", "content": A}] * 4


def test_held_out_prompts_in_a_file_are_found_without_the_text(tmp_path: Path) -> None:
    loaded = load_tasks(config_of(tmp_path), tmp_path, TASKS)
    learnt = [(list(e.prompt)[-1:], "x") for e in Words().examples("test")]
    assert [finding.evidence for finding in gold.leaks(learnt, loaded)]
    assert not list(gold.leaks([([{"role": "user", "content": "red"}], "x")], loaded))


def test_pairs_of_a_file_are_reported_as_without_the_text(tmp_path: Path) -> None:
    def notes(**changes: Any) -> list[str]:
        return [n for n in config_of(tmp_path, **changes).unused_settings() if names(n, "system_prompt", "sft.data")]

    assert len(notes(sft__data="pairs.jsonl", sft__steps=1)) == 1
    assert notes(sft__data="pairs.jsonl") == notes(sft__steps=1) == []
    assert notes(sft__data="pairs.jsonl", sft__steps=1, texts={"a": None}) == []


@pytest.mark.parametrize("blank", ["", " \n"])
def test_a_text_without_a_word_is_refused(blank: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=pattern("system_prompt", "null")):
        config_of(tmp_path, {"a": blank})


def test_a_question_is_asked_after_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(talk: Talk) -> Any:
        seen.clear()
        thread = talk.begin()
        assert thread is not None
        thread.join(PATIENCE)
        return seen[0]

    seen: list[Any] = []
    monkeypatch.setattr(Talk, "_answer", lambda self, stage, prompt: seen.append(prompt) or iter(["yes"]))
    talk = Talk(made(tmp_path), tasks=TASKS)
    talk.question.value = "who is the man"
    turn = {"role": "user", "content": "who is the man"}
    assert asked(talk) == [turn], "no example is chosen, and the texts differ"
    talk.example.index = 1
    objective, example = talk.example.value
    assert objective == "a" and asked(talk) == example.prompt
    assert talk.question.value == example.prompt[-1]["content"], "the text is not part of what is edited"
    talk.question.value = "who is the man"
    assert asked(talk) == [{"role": "system", "content": A}, turn]
    talk.close()
    shared = Talk(made(tmp_path, "shared", texts={"a": B, "b": B}), tasks=TASKS)
    shared.question.value = "who is the man"
    assert asked(shared) == [{"role": "system", "content": B}, turn]
    shared.close()
