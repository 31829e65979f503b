"""What SFT learns: a share of the gold answers, in parts of a batch, and nothing that is held out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_nb.config import ConfigError
from grpo_nb.evaluation.evaluate import cluster_of
from grpo_nb.rules.rewards import evaluation_leaked
from grpo_nb.tasks import Task, read_examples
from grpo_nb.training import gold
from grpo_nb.training import sft as sft_module
from grpo_nb.training.sft import sft
from tests.support.tiny import demo_tasks, small_tasks, tiny_config, tiny_run

pytestmark = pytest.mark.usefixtures("narrow_model")
GOLD = {"sft__data": None}


def clusters(texts: list[gold.Text], task: Task) -> set[str]:
    asked = {str(example.prompt): cluster_of(example) for example in read_examples(task, "train")}
    return {asked[str(prompt)] for prompt, _ in texts}


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_a_share_of_the_templates_is_learnt_with_all_their_examples(share: float, tmp_path: Path) -> None:
    folder, tasks = demo_tasks()
    learnt = gold.load_gold(tiny_config(**GOLD, sft__share=share), folder, tasks)
    for name, texts in learnt.items():
        train = [e for e in read_examples(tasks[name], "train") if e.target is not None]
        every = {cluster_of(example) for example in train}
        kept = clusters(texts, tasks[name])
        assert len(kept) == max(1, round(share * len(every)))
        assert len(texts) == sum(cluster_of(example) in kept for example in train)


def test_which_share_is_a_function_of_the_seed() -> None:
    examples = read_examples(demo_tasks()[1]["hallucination"], "train")
    first, again, other = (gold.shared_out(examples, 0.5, seed) for seed in (0, 0, 1))
    assert first == again != other and len({cluster_of(example) for example in first}) > 1
    assert gold.shared_out(examples[:1], 0.1, 0) == list(examples[:1])


def test_a_batch_has_as_many_pairs_of_each_objective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, int]] = []
    plan = sft_module.plan_sft_step

    def counted(config: Any, pools: Any, step: int, numerics: Any) -> Any:
        made = plan(config, pools, step, numerics)
        names = {id(pair): name.removeprefix(f"{gold.STREAM}/") for name, own in pools.items() for pair in own}
        found = [names[id(pair)] for pair in made.pairs]
        seen.append({name: found.count(name) for name in set(found)})
        return made

    monkeypatch.setattr(sft_module, "plan_sft_step", counted)
    run = tiny_run(tmp_path, **GOLD, sft__mix="objectives", sft__batch=9, sft__steps=2)
    list(sft(run, tasks=small_tasks()))
    assert seen == [{"fairness": 5, "hallucination": 4}] * 2


def test_a_mixed_sft_resumes_to_the_same_bits(tmp_path: Path) -> None:
    changes = GOLD | {"sft__mix": "objectives", "sft__share": 0.5, "sft__steps": 4, "sft__checkpoint_every": 2}
    straight, broken = tiny_run(tmp_path, "straight", **changes), tiny_run(tmp_path, "broken", **changes)
    list(sft(straight, tasks=small_tasks()))
    for step in sft(broken, tasks=small_tasks()):
        if step.step == 3:
            break
    assert [step.step for step in sft(broken, tasks=small_tasks())] == [4]
    (one, _), (two, _) = straight.sft_checkpoints.latest(), broken.sft_checkpoints.latest()
    assert one is not None and two is not None
    a, b = one.tensors("policy"), two.tensors("policy")
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("split", ["train", "test"])
def test_held_out_prompts_in_a_file_to_learn_are_found(tmp_path: Path, split: Any) -> None:
    tasks, lines = small_tasks(), []
    for example in read_examples(tasks["fairness"], split)[:12]:
        assert isinstance(example.prompt, list)
        lines.append({"messages": [*example.prompt, {"role": "assistant", "content": example.target}]})
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    run = tiny_run(tmp_path, sft__data=str(file), sft__steps=1)
    list(sft(run, tasks=tasks))
    found = [e for e in run.stored("events").having("kind", {"finding"}) if e["rule"] == "evaluation_leaked"]
    if split == "train":
        assert found == []
    else:
        expected = evaluation_leaked("fairness", 12, len(read_examples(tasks["fairness"], "test")))
        assert expected is not None
        assert [(e["rule"], e["evidence"]) for e in found] == [(expected.rule, expected.evidence)]


@pytest.mark.parametrize(("data", "searches"), [("demo", 1), (None, 0)])
def test_only_data_of_a_file_is_searched_for_held_out_prompts(
    data: str | None, searches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(gold, "leaks", lambda *given: made.append(given) or ())
    list(sft(tiny_run(tmp_path, sft__data=data, sft__steps=1), tasks=small_tasks()))
    assert len(made) == searches


def test_a_batch_too_small_for_each_objective_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sft\.mix"):
        tiny_config(**GOLD, sft__mix="objectives", sft__batch=1)


@pytest.mark.parametrize("changes", [{"share": 0.5}, {"mix": "objectives"}])
def test_settings_of_gold_answers_do_nothing_for_a_file(changes: dict[str, Any]) -> None:
    settings = {f"sft__{name}": value for name, value in changes.items()}
    (name,) = changes
    assert any(f"sft.{name}" in note for note in tiny_config(**settings).unused_settings())
    assert not any("sft." in note for note in tiny_config(**GOLD, **settings).unused_settings())
