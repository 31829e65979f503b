"""What a run depends on is compared by content: at every start, evaluation and comparison."""

import functools
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from transformers import GenerationConfig

from grpo_nb import presets, tasks
from grpo_nb.cli import main
from grpo_nb.config import ConfigError
from grpo_nb.evaluation import evaluate as evaluation
from grpo_nb.evaluation.compare import compare_stages
from grpo_nb.evaluation.evaluate import evaluate, load_best, restore_policy
from grpo_nb.evaluation.pareto import pareto
from grpo_nb.jupyter.start import start
from grpo_nb.policy.model import load_policy
from grpo_nb.policy.origins import part_of
from grpo_nb.preflight import dependencies
from grpo_nb.preflight.dependencies import DependencyChanged
from grpo_nb.run import dependencies_file
from grpo_nb.run.run import Run, RunError
from grpo_nb.storage import digests
from grpo_nb.tasks import SPLITS, demo
from grpo_nb.training.grpo import grpo
from grpo_nb.training.sft import sft
from grpo_nb.types import Example, Score
from tests.support import tiny_models as tiny
from tests.support.tokens import names, pattern

pytestmark = pytest.mark.usefixtures("narrow_model")

SMALL = {
    "batch.prompts": 2,
    "batch.group_size": 2,
    "batch.micro_batch": 4,
    "run.steps": 3,
    "run.quick_eval_every": 0,
    "run.checkpoint_every": 1,
    "run.eval_examples": 6,
    "sft.steps": 0,
}


class Words:
    name = "words"

    def __init__(self, extra: str = "") -> None:
        self.extra = extra

    def examples(self, split: Literal["train", "test"]) -> list[Example]:
        texts = [tiny.SENTENCE[: 14 + i] for i in (0, 4, 10, 16)]
        return [Example(id=f"{split}/{i}", prompt=f"{t}{self.extra}", columns={"i": i}) for i, t in enumerate(texts)]

    def score(self, example: Example, completion: str) -> Score:
        return Score(value=float(len(completion) % 5), label="x")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_NB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(evaluation, "RESAMPLES", 20)


def model_run(folder: Path, **changes: Any) -> Run:
    """LoRA on a model folder, with a task of its own."""
    base = folder / "base"
    if not base.exists():
        tiny.folder(base)
        GenerationConfig(eos_token_id=tiny.EOS).save_pretrained(base)
    named = {
        "objectives": {"o": {"task": "words"}},
        "model.name": str(base),
        "model.train": "lora",
        "model.lora_rank": 2,
    }
    sampling = {"sampling.max_completion_length": 4}
    config = presets.demo().replace(
        **named, **SMALL, **sampling, **{k.replace("__", "."): v for k, v in changes.items()}
    )
    return Run.create(folder / "run", config)


def step(run: Run, steps: int = 1, task: Words | None = None, **options: Any) -> None:
    list(grpo(run, tasks={"o": task or Words()}, steps=steps, **options))


@functools.cache
def rows_of_bbq() -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        files = sorted(Path(demo.ensure(Path(folder), 0).bbq).glob("*.jsonl"))
        return files[0].read_text().splitlines(keepends=True)[:160]


def data_run(folder: Path, **changes: Any) -> tuple[Run, Path]:
    """A tiny model with one BBQ file."""
    tiny.folder(folder / "base")
    data = folder / "bbq.jsonl"
    data.write_text("".join(rows_of_bbq()))
    named = {"objectives": {"fairness": {"task": "bbq", "data": str(data)}}, "sampling.max_completion_length": 4}
    named |= {"model.name": str(folder / "base"), "sampling.max_prompt_length": 120}
    config = presets.demo().replace(**named, **SMALL | {k.replace("__", "."): v for k, v in changes.items()})
    return Run.create(folder / "run", config), data


def ask_otherwise(data: Path) -> None:
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    rows[3:] = [{**row, "question": f"Say, {row['question']}"} for row in rows[3:]]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))


def kinds(run: Run) -> list[str]:
    return [event["kind"] for event in run.rows("events")]


def accepted(run: Run) -> list[dict[str, Any]]:
    return [event for event in run.rows("events") if event["kind"] == "dependency_accepted"]


# ---- each kind


def other_weights(base: Path) -> None:
    tiny.model(seed=1).save_pretrained(base)
    GenerationConfig(eos_token_id=tiny.EOS).save_pretrained(base)


def other_tokenizer(base: Path) -> None:
    file = base / "tokenizer.json"
    file.write_text(file.read_text().replace('"three"', '"seven"'))


def other_template(base: Path) -> None:
    (base / "chat_template.jinja").write_text(tiny.TEMPLATE.replace("<|user|>", "<|assistant|>") + " ")


def other_generation(base: Path) -> None:
    GenerationConfig(eos_token_id=[tiny.EOS, tiny.UNK]).save_pretrained(base)


CHANGES: dict[str, Callable[[Path], None]] = {
    "weights": other_weights,
    "tokenizer": other_tokenizer,
    "template": other_template,
    "generation": other_generation,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One step on a model folder, to be copied."""
    run = model_run(tmp_path_factory.mktemp("trained"))
    step(run)
    return run


@pytest.fixture
def at(trained: Run) -> Iterator[Run]:
    """The trained run; afterwards its folder and its base are as before."""
    folder = trained.path.parent
    for name in ("run", "base"):
        shutil.copytree(folder / name, folder / f"{name}.kept")
    yield Run.open(trained.path)
    for name in ("run", "base"):
        (folder / name).unlink() if (folder / name).is_symlink() else shutil.rmtree(folder / name)
        (folder / f"{name}.kept").rename(folder / name)


@pytest.mark.parametrize("kind", CHANGES)
def test_a_changed_model_is_refused_by_its_kind(at: Run, kind: str) -> None:
    CHANGES[kind](at.path.parent / "base")
    found = dependencies.of_policy(load_policy(at.config.model))
    with pytest.raises(DependencyChanged) as refused:
        dependencies.check(at, found, set(CHANGES) - {kind}, "train")
    assert refused.value.kinds == (kind,) and f"--accept-changed {kind}" in str(refused.value)
    dependencies.check(at, found, {kind}, "train")
    dependencies.check(at, found, (), "train")
    (event,) = accepted(at)
    assert event["dependency"] == kind and event["old"]["digest"] != event["new"]["digest"]


def test_other_weights_are_refused_everywhere_and_go_on_when_accepted(at: Run) -> None:
    other_weights(at.path.parent / "base")
    for begin in (
        lambda: step(at, 2),
        lambda: evaluate(at, tasks={"o": Words()}),
        lambda: restore_policy(at, "base"),
    ):
        with pytest.raises(DependencyChanged, match=r"model\.safetensors"):
            begin()
    assert (at.last_step(), kinds(at).count("dependency_refused"), accepted(at)) == (1, 3, [])
    step(at, 2, accept_changed={"weights"})
    assert (at.last_step(), len(accepted(at))) == (2, 1)


def test_a_change_that_is_accepted_is_logged_before_it_is_kept(at: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    other_weights(at.path.parent / "base")
    monkeypatch.setattr(dependencies_file, "write", killed)
    with pytest.raises(KeyboardInterrupt):
        step(at, 2, accept_changed={"weights"})
    monkeypatch.undo()
    assert len(accepted(at)) == 1
    with pytest.raises(DependencyChanged):
        step(at, 2)


def test_what_was_only_touched_or_moved_is_not_refused(at: Run) -> None:
    base = at.path.parent / "base"
    for file in base.iterdir():
        os.utime(file, (1, 1))
    shutil.copytree(base, at.path.parent / "elsewhere")
    shutil.rmtree(base)
    base.symlink_to(at.path.parent / "elsewhere")
    settings = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**settings, "transformers_version": "9"}))
    before = len(at.rows("events"))
    step(at, 2)
    assert not {"dependency_refused", "dependencies"} & set(kinds(at)[before:])
    base.unlink()
    shutil.move(at.path.parent / "elsewhere", base)


def test_an_adapter_whose_base_moved_is_the_same_for_runs_of_earlier_versions_too(tmp_path: Path) -> None:
    run, file = Run.create(tmp_path / "run", presets.demo()), tmp_path / "adapter_config.json"
    run.log_metrics({"step": 1})
    settings = {"peft_type": "LORA", "r": 4, "base_model_name_or_path": "/models/base"}
    weights = digests.of_text("adapter_model.safetensors", "weights")

    def held_to(part: digests.Part) -> str:
        dependencies.check(run, {"weights/adapter": digests.entry([part, weights])}, (), "train")
        kept = dependencies_file.read(run.path)
        assert kept is not None
        return kept.entries["weights/adapter"].digest

    def found(**changes: Any) -> digests.Part:
        file.write_text(json.dumps(settings | changes))
        return part_of(file)

    earlier = held_to(digests.of_json(file.name, settings))
    now = held_to(found())
    assert now != earlier and held_to(found(base_model_name_or_path="/elsewhere/base")) == now
    with pytest.raises(DependencyChanged):
        held_to(found(r=8))
    with pytest.raises(DependencyChanged):
        held_to(digests.of_json(file.name, settings | {"r": 8}))


def test_an_own_tasks_examples_count(at: Run) -> None:
    with pytest.raises(DependencyChanged, match=r"words") as refused:
        step(at, 2, Words(" late"))
    assert refused.value.kinds == ("data",)
    step(at, 2, Words(" late"), accept_changed="data")
    assert [event["key"] for event in accepted(at)] == ["data/o/train"]


def test_an_old_run_takes_what_it_finds_with_an_event(at: Run) -> None:
    first = at.rows("events")[0]["time"]
    (at.path / dependencies_file.FILE).unlink()
    other_weights(at.path.parent / "base")
    step(at, 2)
    (event,) = [event for event in at.rows("events") if event["kind"] == "dependencies" and event["adopted"]]
    assert {"weights/base", "tokenizer", "template", "generation", "data/o/train"} <= event["entries"].keys()
    assert int(at.started.timestamp()) == int(first) and at.started.isoformat() == event["started"]
    other_tokenizer(at.path.parent / "base")
    with pytest.raises(DependencyChanged):
        step(at, 3)


def test_an_unknown_kind_is_refused_before_any_work(at: Run) -> None:
    for begin in (
        lambda: step(at, 2, accept_changed={"date"}),
        lambda: start(at, accept_changed={"date"}),
        lambda: list(sft(at, accept_changed={"date"})),
        lambda: evaluate(at, accept_changed={"date"}),
    ):
        with pytest.raises(ConfigError, match="accept_changed='date'"):
            begin()


def test_a_damaged_file_of_digests_is_refused(at: Run) -> None:
    (at.path / dependencies_file.FILE).write_text("{")
    with pytest.raises(RunError, match=dependencies_file.FILE):
        step(at, 2)


def test_a_session_accepts_once(at: Run) -> None:
    other_generation(at.path.parent / "base")
    session = start(at, tasks={"o": Words()}, steps=2, where="thread")
    with pytest.raises(DependencyChanged) as refused:
        session.wait_blocking()
    assert 'start(run, accept_changed={"generation"})' in str(refused.value)
    session.resume(accept_changed={"generation"})
    session.wait_blocking()
    assert at.last_step() == 2 and len(accepted(at)) == 1
    assert not session._job.accept_changed


# ---- data, by file


@pytest.fixture(scope="module")
def asked_once(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run, _ = data_run(tmp_path_factory.mktemp("asked"))
    list(grpo(run, steps=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "RESAMPLES", 20)
        evaluate(run, stage="base")
    return run


@pytest.fixture
def asked(asked_once: Run) -> Iterator[tuple[Run, Path]]:
    """One step and an evaluation of the base; afterwards its folder and its data are as before."""
    folder = asked_once.path.parent
    shutil.copytree(folder, folder.with_suffix(".kept"))
    yield Run.open(asked_once.path), folder / "bbq.jsonl"
    shutil.rmtree(folder)
    folder.with_suffix(".kept").rename(folder)


def test_a_replaced_data_file_is_refused_everywhere_and_its_questions_are_not_compared(
    asked: tuple[Run, Path], caplog: pytest.LogCaptureFixture
) -> None:
    run, data = asked
    ask_otherwise(data)
    for begin in (lambda: list(grpo(run, steps=2)), lambda: evaluate(run)):
        with pytest.raises(DependencyChanged, match=pattern("bbq.jsonl", "line 4")) as refused:
            begin()
        assert refused.value.kinds == ("data",)
    assert main(["train", str(run.path)]) == 1
    assert main(["eval", str(run.path)]) == 1
    assert main(["train", str(run.path), "--steps", "2", "--accept-changed", "data"]) == 0
    (event,) = accepted(run)
    assert (event["dependency"], event["key"], run.last_step()) == ("data", "data/fairness", 2)
    assert main(["eval", str(run.path)]) == 0
    with pytest.raises(RunError, match=pattern("6 and 6")):
        compare_stages(run, "base", "latest")
    with caplog.at_level(logging.WARNING):
        assert pareto(run, mode="greedy")["stage"].tolist() == ["step 2"]
    assert names(caplog.text, run.name, "fairness")
    load_best(run, "fairness", "accuracy")


def test_a_moved_data_file_is_the_same(asked: tuple[Run, Path]) -> None:
    run, data = asked
    data.rename(data.with_name("moved.jsonl"))
    data.symlink_to("moved.jsonl")
    list(grpo(run, steps=2))
    evaluate(run)
    assert len(compare_stages(run, "base", "latest")) and not accepted(run)


def test_evaluations_are_paired_by_content_not_by_id(asked: tuple[Run, Path]) -> None:
    run, data = asked
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    data.write_text("".join(json.dumps({**row, "example_id": row["example_id"] + 5000}) + "\n" for row in rows))
    evaluate(run, accept_changed={"data"})
    frame = compare_stages(run, "base", "latest")
    assert frame["difference"].notna().any()


def test_rows_of_earlier_versions_pair_by_id_until_other_questions_are_accepted(asked: tuple[Run, Path]) -> None:
    run, data = asked
    file = run.path / "evaluations.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text(
        "".join(json.dumps({k: v for k, v in r.items() if k not in ("asked", "items")}) + "\n" for r in rows)
    )
    evaluate(run)
    assert compare_stages(run, "base", "latest")["difference"].notna().any()
    ask_otherwise(data)
    evaluate(run, accept_changed=["data"])
    with pytest.raises(RunError, match=pattern("'base'", "'latest'")):
        compare_stages(run, "base", "latest")


def test_other_wording_of_the_same_data_is_a_changed_prompt(
    asked: tuple[Run, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = asked
    honest = tasks.load_task

    def reworded(*args: Any) -> Any:
        task = honest(*args)
        own = {split: task.examples(split) for split in SPLITS}
        task.examples = lambda split: [  # type: ignore[method-assign]
            Example(e.id, [{"role": "user", "content": "Be fair."}], e.target, e.columns) for e in own[split]
        ]
        return task

    monkeypatch.setattr(tasks, "load_task", reworded)
    with pytest.raises(DependencyChanged) as refused:
        list(grpo(run, steps=2))
    assert refused.value.kinds == ("prompt",)


@pytest.mark.slow
def test_nothing_stands_on_a_run_that_has_done_nothing(tmp_path: Path) -> None:
    run, data = data_run(tmp_path)
    loaded = tasks.load_tasks(run.config, run.path)
    found = dependencies.of_training(run.config, loaded, {name: t.examples("train") for name, t in loaded.items()})
    dependencies.check(run, found, (), "train")
    ask_otherwise(data)
    list(grpo(run, steps=1))
    assert not accepted(run) and kinds(run).count("dependencies") == 2


@pytest.mark.slow
def test_a_file_replaced_while_the_run_trains_is_logged_at_the_next_evaluation(tmp_path: Path) -> None:
    run, data = data_run(tmp_path, run__quick_eval_every=1, run__quick_eval_examples=2)
    for row in grpo(run, steps=3):
        if row.step == 1:
            ask_otherwise(data)
    logged = [event for event in run.rows("events") if event["kind"] == "dependency_replaced"]
    assert [(event["step"], event["key"]) for event in logged] == [(2, "data/fairness")]
    with pytest.raises(DependencyChanged):
        list(grpo(run, steps=4))


@pytest.mark.slow
def test_changed_pairs_of_sft_are_refused(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({"prompt": f"was {i}", "completion": "yes"}) + "\n" for i in range(4)))
    run, _ = data_run(tmp_path, sft__steps=2, sft__data=str(pairs), sft__batch=2, sft__micro_batch=2)
    walk = sft(run)
    next(walk)
    walk.close()  # type: ignore[attr-defined]
    pairs.write_text(pairs.read_text().replace("yes", "no"))
    with pytest.raises(DependencyChanged, match=pattern("pairs.jsonl", "line 1")) as refused:
        list(sft(run))
    assert refused.value.kinds == ("data",)
    assert main(["sft", str(run.path), "--accept-changed", "data"]) == 0


def test_the_wording_of_a_judge_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = {"providers": [{"model": "m", "base_url": "http://localhost:1/v1", "api_key_env": None}], "weight": 0.04}
    objective = {"task": "bbq", "data": "x", "judge": judge}
    config = presets.demo().replace(objectives={"fairness": objective}, **{"batch.prompts": 2})
    task = {"fairness": Words()}
    examples = {"fairness": Words().examples("train")}
    key = "prompt/fairness judge"
    before = dependencies.of_training(config, task, examples)[key]  # type: ignore[arg-type]
    monkeypatch.setattr(dependencies, "VERSION", dependencies.VERSION + 1)
    assert before.digest != dependencies.of_training(config, task, examples)[key].digest  # type: ignore[arg-type]


def test_the_rules_of_a_task_count() -> None:
    config, task = presets.demo().replace(**{"run.quick_eval_every": 0}), Words()
    config = config.replace(objectives={"o": {"task": "bbq", "data": "x"}}, **{"batch.prompts": 2})
    examples = {"o": task.examples("train")}
    assert "prompt/o rules" not in dependencies.of_training(config, {"o": task}, examples)
    found = []
    for version in (1, 2):
        task.rules = version  # type: ignore[attr-defined]
        found.append(dependencies.of_training(config, {"o": task}, examples)["prompt/o rules"].digest)
    assert found[0] != found[1]


# ---- hashing


def test_a_large_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(digests.CACHED_FROM))
    os.utime(file, (1, 1))
    monkeypatch.setattr(digests, "SETTLED", -1.0)
    read: list[Path] = []
    honest = digests._hashed
    monkeypatch.setattr(digests, "_hashed", lambda path, stamp: read.append(path) or honest(path, stamp))
    first = digests.of_file(file)
    assert digests.of_file(file) == first and len(read) == 1
    file.write_bytes(b"\1" + bytes(digests.CACHED_FROM - 1))
    os.utime(file, (1, 1))  # same size, time and inode: the change time still tells
    assert digests.of_file(file).digest != first.digest and len(read) == 2


@pytest.mark.parametrize(("seconds", "cached"), [(40, False), (61, True)])
def test_a_digest_is_cached_once_a_memory_map_was_written_back(
    seconds: int, cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then, more can be written through it without any trace in the file's times."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(digests.CACHED_FROM))
    now = file.stat().st_ctime_ns + seconds * 10**9
    with monkeypatch.context() as patch:
        patch.setattr(digests.time, "time_ns", lambda: now)
        digests.of_file(file)
    assert (str(file.resolve()) in digests._read_cache()) == cached


def test_a_cached_digest_that_this_user_did_not_write_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(digests.CACHED_FROM))
    monkeypatch.setattr(digests, "SETTLED", -1.0)
    first, cache = digests.of_file(file), digests.cache_file()
    kept = json.loads(cache.read_text())
    for change in ({"digest": "0" * 64}, {"digest": "0" * 64, "seal": None}):
        forged = {name: {**row, "part": {**row["part"], "digest": change["digest"]}} for name, row in kept.items()}
        if "seal" in change:  # as an earlier version wrote it
            forged = {name: {key: row[key] for key in ("stamp", "part")} for name, row in forged.items()}
        cache.write_text(json.dumps(forged))
        assert digests.of_file(file) == first


def test_a_file_that_changes_while_it_is_loaded_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("{}\n")
    stamp = digests.Stamp.of(file.stat())
    file.write_text("{ }\n")
    with pytest.raises(digests.Changed):
        digests.of_file(file, stamp)
