"""The demo world: public formats, no word unseen, a lossless tokenizer, a flaw of the stated size."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from grpo_nb import presets
from grpo_nb.config import ConfigError, ObjectiveConfig
from grpo_nb.tasks import BBQ, HaluEvalQA, Task, demo, demo_world, load_task, summarise
from grpo_nb.types import Example, Score
from tests.support.tokens import pattern

SEED = 0
BBQ_FIELDS = {
    *("example_id", "question_index", "question_polarity", "context_condition", "category", "answer_info"),
    *("additional_metadata", "context", "question", "ans0", "ans1", "ans2", "label"),
}


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def tasks(workdir: Path) -> tuple[Any, Any]:
    return tuple(load_task(ObjectiveConfig(task=t, data="demo"), workdir, SEED) for t in ("bbq", "halueval_qa"))


@pytest.fixture(scope="module")
def sft(workdir: Path, tasks: tuple[Any, Any]) -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in demo.ensure(workdir / "data", SEED).sft.read_text().splitlines()]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return demo.build_tokenizer()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller world, where a test writes several."""
    monkeypatch.setattr(demo_world, "TEMPLATES", 16)
    monkeypatch.setattr(demo_world, "PASSAGES", 300)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_files_have_exactly_the_public_fields(workdir: Path, tasks: tuple[Any, Any]) -> None:
    paths = demo.ensure(workdir / "data", SEED)
    for file in paths.bbq.glob("*.jsonl"):
        assert all(set(row) == BBQ_FIELDS for row in rows(file)), file
    fields = {"knowledge", "question", "right_answer", "hallucinated_answer"}
    assert all(set(row) == fields for row in rows(paths.halueval))


def test_bbq_rows_come_in_pairs_ambiguous_first(workdir: Path, tasks: tuple[Any, Any]) -> None:
    for file in demo.ensure(workdir / "data", SEED).bbq.glob("*.jsonl"):
        lines = rows(file)
        for ambiguous, told in zip(lines[::2], lines[1::2], strict=True):
            assert (ambiguous["context_condition"], told["context_condition"]) == ("ambig", "disambig")
            assert told["context"].startswith(ambiguous["context"])
            assert (ambiguous["question"], ambiguous["answer_info"]) == (told["question"], told["answer_info"])


def test_every_cell_has_a_dozen_templates_and_several_pairs(tasks: tuple[Any, Any]) -> None:
    fairness = tasks[0]
    examples = [*fairness.examples("train"), *fairness.examples("test")]
    templates: dict[Any, set[str]] = {}
    pairs: dict[str, set[frozenset[str]]] = {}
    for e in examples:
        c = e.columns
        templates.setdefault((c["category"], c["polarity"], c["condition"]), set()).add(c["cluster"])
        people = frozenset(o for i, o in enumerate(c["options"]) if i != c["unknown"])
        pairs.setdefault(c["cluster"], set()).add(people)
    assert len(templates) == 3 * 2 * 2
    assert min(map(len, templates.values())) >= 12
    assert min(map(len, pairs.values())) >= 6
    unknowns = Counter(e.columns["options"][e.columns["unknown"]] for e in examples)
    assert len(unknowns) == 10, "the wording of unknown varies as in the real set"
    assert Counter(e.columns["biased"] is None for e in examples) == {False: len(examples)}


@pytest.mark.parametrize("seed", range(3))
def test_held_out_questions_are_new_combinations_of_known_words(small: None, tmp_path: Path, seed: int) -> None:
    paths = demo.write(tmp_path, seed)
    _check_held_out(BBQ(paths.bbq, seed), HaluEvalQA(paths.halueval, seed))


def test_held_out_questions_of_the_whole_world(tasks: tuple[Any, Any]) -> None:
    _check_held_out(*tasks)


def _check_held_out(fairness: BBQ, grounding: HaluEvalQA) -> None:
    assert demo.unseen_words(fairness) == demo.unseen_words(grounding) == set()
    for task, part in ((fairness, "cluster"), (grounding, "knowledge")):
        sides = [{e.columns[part] for e in task.examples(split)} for split in ("train", "test")]
        assert sides[1] and not sides[0] & sides[1]
    contents = [{e.prompt[0]["content"] for e in fairness.examples(split)} for split in ("train", "test")]
    assert not contents[0] & contents[1]


def test_selfchecks_and_gold_answers(tasks: tuple[Any, Any]) -> None:
    for task in tasks:
        task.selfcheck()
        examples = task.examples("test")
        summary = task.summary(examples, [task.score(e, e.target) for e in examples])
        assert summary["accuracy"] == 1.0
    fairness = tasks[0]
    gold = fairness.summary(e := fairness.examples("test"), [fairness.score(x, x.target) for x in e])
    assert gold["bias_ambiguous"] == gold["bias_disambiguated"] == 0, "the told half leans to neither side"
    told = [x.columns for x in fairness.examples("train") if x.columns["condition"] == "disambig"]
    for polarity in ("neg", "nonneg"):
        along = [c["label"] == c["biased"] for c in told if c["polarity"] == polarity]
        assert sum(along) / len(along) == pytest.approx(0.5, abs=0.08), "nor does either wording of the question"


def _answers(sft: list[list[dict[str, str]]], examples: list[Example], wanted: Any) -> list[tuple[Example, str]]:
    by_prompt = {e.prompt[0]["content"]: e for e in examples}
    pairs = [
        (by_prompt[prompt["content"]], answer["content"]) for prompt, answer in sft if prompt["content"] in by_prompt
    ]
    return [(e, a) for e, a in pairs if wanted(e.columns)]


def test_sft_is_made_of_training_examples_and_flawed_as_said(
    sft: list[list[dict[str, str]]], tasks: tuple[Any, Any]
) -> None:
    fairness, grounding = tasks
    held_out = {e.prompt[0]["content"] for t in tasks for e in t.examples("test")}
    assert not held_out & {prompt["content"] for prompt, _ in sft}

    ambiguous = _answers(sft, fairness.examples("train"), lambda c: c["condition"] == "ambig")
    labels = Counter(fairness.score(e, a).parts.get("biased", "unknown") for e, a in ambiguous)
    assert set(labels) == {1.0, "unknown"}, "the flaw is the stereotype, never its opposite"
    assert labels[1.0] / len(ambiguous) == pytest.approx(demo.STEREOTYPED, abs=0.04)

    untold = _answers(sft, grounding.examples("train"), lambda c: not c["answerable"])
    invented = [grounding.score(e, a).label == "invented" for e, a in untold]
    assert sum(invented) / len(invented) == pytest.approx(demo.INVENTED, abs=0.04)

    told = _answers(sft, fairness.examples("train"), lambda c: c["condition"] == "disambig")
    told += _answers(sft, grounding.examples("train"), lambda c: c["answerable"])
    assert all(a == e.target for e, a in told), "what the text tells is answered right"
    assert len(told) > 1000


def test_the_world_is_a_function_of_its_seed(small: None, tmp_path: Path) -> None:
    first, again, other = (demo.write(tmp_path / name, seed) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    assert first.sft.read_bytes() == again.sft.read_bytes()
    assert first.halueval.read_bytes() != other.halueval.read_bytes()


def test_ensure_keeps_whole_files_and_mends_broken_ones(small: None, tmp_path: Path) -> None:
    paths = demo.ensure(tmp_path, SEED)
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in (paths.sft, paths.halueval)}
    assert demo.ensure(tmp_path, SEED) == paths
    assert {p: p.stat().st_mtime_ns for p in before} == {p: t for p, (t, _) in before.items()}, "nothing is rewritten"
    paths.sft.write_bytes(paths.sft.read_bytes()[:1000])
    paths.halueval.unlink()
    demo.ensure(tmp_path, SEED)
    assert {p: p.read_bytes() for p in before} == {p: b for p, (_, b) in before.items()}
    (tmp_path / "demo.json").unlink()
    demo.ensure(tmp_path, SEED + 1)
    assert paths.sft.read_bytes() != before[paths.sft][1], "another seed is another world"
    assert not list(tmp_path.rglob(".*")), "no drafts are left"


def test_tokenizer_gives_every_text_back(
    tokenizer: PreTrainedTokenizerFast, sft: list[list[dict[str, str]]], tasks: tuple[Any, Any]
) -> None:
    texts = {tokenizer.apply_chat_template(messages, tokenize=False) for messages in sft[::5]}
    texts |= {f"{e.prompt[0]['content']}\n{e.target}" for t in tasks for e in t.examples("test")}
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.unk_token_id not in ids, text
        assert tokenizer.decode(ids) == text


def test_tokenizer_specials_and_template(tokenizer: PreTrainedTokenizerFast) -> None:
    special = [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id]
    assert special == [0, 1, 2, 3]
    assert tokenizer.padding_side == "left"
    turns = [{"role": "user", "content": "Who was fired?"}, {"role": "assistant", "content": "Answer: Unknown"}]
    prompt = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(turns, tokenize=False)
    assert prompt == "<bos><user>Who was fired?<assistant>"
    assert whole == prompt + "Answer: Unknown<eos>"
    ids = tokenizer(whole, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids[-4:], skip_special_tokens=True) == "Answer: Unknown"
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer("never heard", add_special_tokens=False).input_ids == [tokenizer.unk_token_id] * 2
    assert 300 <= len(tokenizer) <= 1000


def test_tokenizer_survives_saving(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = "A tullic and a peltrin met at the mill.\nWho was fired?"
    ids = tokenizer(text).input_ids
    assert again(text).input_ids == ids and again.decode(ids) == text
    assert again.chat_template == tokenizer.chat_template
    assert (again.pad_token_id, again.eos_token_id) == (0, 2)


def test_model_is_small_and_a_function_of_its_seed() -> None:
    state = torch.random.get_rng_state()
    model, same, other = demo.build_model(3), demo.build_model(3), demo.build_model(4)
    assert torch.equal(state, torch.random.get_rng_state()), "building it leaves the global generator alone"
    count = sum(p.numel() for p in model.parameters())
    assert 0.7e6 <= count <= 1.3e6
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True))
    assert not torch.equal(model.lm_head.weight, other.lm_head.weight)
    assert model.config.vocab_size == len(demo.vocabulary())
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 0)


def test_preset_fits_the_world(tokenizer: PreTrainedTokenizerFast, tasks: tuple[Any, Any]) -> None:
    sampling = presets.demo().sampling
    for task in tasks:
        for e in [*task.examples("train"), *task.examples("test")]:
            prompt = tokenizer.apply_chat_template(e.prompt, tokenize=False, add_generation_prompt=True)
            assert len(tokenizer(prompt).input_ids) <= sampling.max_prompt_length
            assert len(tokenizer(e.target).input_ids) + 1 <= sampling.max_completion_length
    assert sampling.max_prompt_length + sampling.max_completion_length <= demo.CONTEXT


def test_load_task_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=pattern("'bbqq'", "bbq, halueval_qa, ")):
        load_task(ObjectiveConfig(task="bbqq", data="demo"), tmp_path, 0)
    with pytest.raises(ConfigError, match=pattern("'bbq'", "data")):
        load_task(ObjectiveConfig(task="bbq"), tmp_path, 0)


def test_tasks_fit_the_protocol(tasks: tuple[Any, Any]) -> None:
    assert all(isinstance(task, Task) for task in tasks)


def test_summarise_serves_a_task_without_measures_of_its_own() -> None:
    class Plain:
        name = "plain"

        def examples(self, split: str) -> list[Example]:
            return []

        def score(self, example: Example, completion: str) -> Score:
            return Score(value=1.0)

    scores = [Score(value=1.0), Score(value=0.0), Score(value=None, cause="judge")]
    assert summarise(Plain(), [], scores) == {"reward": 0.5, "scored": pytest.approx(2 / 3)}
