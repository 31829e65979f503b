"""SFT: completion-only loss with its terminator, exact resume, data of both shapes, clear refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_nb.config import ConfigError
from grpo_nb.policy.model import Policy, load_policy
from grpo_nb.run.run import Run, RunError
from grpo_nb.tasks import DataError
from grpo_nb.training import numerics
from grpo_nb.training.gold import load_gold, read_pairs
from grpo_nb.training.guards import TrainingError
from grpo_nb.training.sft import Pair, evaluate_loss, finished, schedule, sft
from grpo_nb.types import Example, Score, Steps
from tests.support.tiny import edited, rows, small_tasks, tiny_config, tiny_run
from tests.support.tokens import pattern

CHAT = {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Answer: The inn"}]}


def data(folder: Path, *lines: object) -> Path:
    path = folder / "sft.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def learn(run: Run, policy: Policy | None = None) -> Steps:
    return sft(run, policy=policy, tasks=small_tasks())


def result(run: Run) -> dict[str, torch.Tensor]:
    newest, damaged = run.sft_checkpoints.latest()
    assert newest is not None and not damaged
    return newest.tensors("policy")


def test_a_broken_off_sft_resumes_to_the_same_bits(tmp_path: Path) -> None:
    changes = {"sft__steps": 5, "sft__checkpoint_every": 2}
    straight, broken = tiny_run(tmp_path, "straight", **changes), tiny_run(tmp_path, "broken", **changes)
    expected = rows(list(learn(straight)))
    for step in learn(broken):
        if step.step == 3:
            break
    assert not finished(broken)
    assert [step.step for step in learn(broken)] == [4, 5]
    assert finished(broken) and list(learn(broken)) == []
    assert [r["step"] for r in broken.rows("sft")] == [1, 2, 3, 4, 5]
    assert [r["loss"] for r in broken.rows("sft")] == [r["loss"] for r in expected]
    a, b = result(straight), result(broken)
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_settings_edited_between_two_parts_of_sft_are_refused(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    next(learn(run))
    with pytest.raises(RunError, match=pattern("000001", "sft/", "sft.learning_rate", 0.5)):
        next(learn(edited(run, sft__learning_rate=0.5)))
    assert [step.step for step in learn(edited(run, sft__learning_rate=run.config.sft.learning_rate))] == [2, 3]


def test_the_loss_falls_on_pairs_that_were_held_out(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, sft__steps=12, sft__warmup_steps=2)
    list(sft(run))
    losses = run.events().query("kind == 'sft_eval'")["loss"].tolist()
    assert len(losses) == 2 and losses[1] < losses[0] - 1


def test_micro_batches_change_no_gradient(tmp_path: Path) -> None:
    norms = [next(learn(tiny_run(tmp_path, f"m{m}", sft__micro_batch=m)))["grad/norm"] for m in (16, 3)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)  # type: ignore[arg-type]


def test_the_loss_is_of_the_completion_and_its_terminator_alone() -> None:
    policy = load_policy(tiny_config().model, 0)
    target = policy.encode_completion("Answer: The inn")
    assert target[-1] in policy.stop_token_ids and not set(target[:-1]) & set(policy.stop_token_ids)
    prompt = policy.encode(CHAT["messages"][:1])
    with policy.eval_mode():
        logits = policy.model(input_ids=torch.tensor([prompt + target])).logits[0].log_softmax(-1)
    by_hand = [-float(logits[len(prompt) - 1 + i, token]) for i, token in enumerate(target)]
    loss = evaluate_loss(policy, [Pair(prompt, target), Pair(prompt, target[-1:])], micro_batch=2)
    alone = evaluate_loss(policy, [Pair(prompt, target[-1:])], micro_batch=1)
    assert loss == pytest.approx((sum(by_hand) + alone) / (len(target) + 1), rel=1e-5)


def test_both_shapes_of_data_are_read(tmp_path: Path) -> None:
    pairs = read_pairs(
        data(
            tmp_path,
            CHAT,
            {"prompt": "2 + 2 =", "completion": " 4"},
            {"prompt": CHAT["messages"][:1], "completion": CHAT["messages"][1:]},
        )
    )
    assert [completion for _, completion in pairs] == ["Answer: The inn", " 4", "Answer: The inn"]
    assert pairs[1][0] == "2 + 2 ="


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "empty"),
        ([CHAT, "{broken"], "line 2"),
        ([{"text": "hello"}], "'messages'"),
        ([{"messages": CHAT["messages"][:1]}], "assistant"),
        ([{"messages": CHAT["messages"][1:]}], "assistant"),
        ([{"messages": ["hi", CHAT["messages"][1]]}], "line 1"),
    ],
)
def test_bad_data_is_one_error_that_says_where(tmp_path: Path, lines: list[Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        read_pairs(data(tmp_path, *lines))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.jsonl"):
        read_pairs(tmp_path / "nowhere.jsonl")


def test_without_data_the_tasks_gold_answers_are_learnt(tmp_path: Path) -> None:
    config = tiny_config(sft__data=None)
    learnt = load_gold(config, tmp_path)
    assert learnt.keys() == config.objectives.keys()
    pairs = [text for own in learnt.values() for text in own]
    assert len(pairs) > 100 and all(completion.startswith("Answer:") for _, completion in pairs)


def test_a_task_without_gold_answers_needs_data(tmp_path: Path) -> None:
    class Bare:
        name = "bare"

        def examples(self, split: str) -> list[Example]:
            return [Example(id="1", prompt="?")]

        def score(self, example: Example, completion: str) -> Score:
            return Score(value=0.0)

    with pytest.raises(ConfigError, match=r"sft\.data"):
        load_gold(tiny_config(sft__data=None), tmp_path, {"fairness": Bare(), "hallucination": Bare()})


def test_the_learning_rate_rises_then_falls_to_a_tenth() -> None:
    factors = [schedule(step, 4, 20) for step in range(1, 21)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[3:] == sorted(factors[3:], reverse=True)
    assert factors[-1] == pytest.approx(0.1)


def test_a_model_that_is_not_finite_ends_sft_and_saves_nothing(tmp_path: Path) -> None:
    policy = load_policy(tiny_config().model, 0)
    with torch.no_grad():
        next(iter(policy.parameters_by_name().values())).fill_(float("nan"))
    run = tiny_run(tmp_path, sft__steps=5)
    with pytest.raises(TrainingError, match="skipped"):
        list(learn(run, policy=policy))
    assert not finished(run)


def test_sft_goes_on_with_the_passes_that_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: dict[str, Any] = {"sft__steps": 2, "sft__checkpoint_every": 1}
    own = rows(list(sft(tiny_run(tmp_path, "model", batch__passes="model", **changes))))
    grouped = rows(list(sft(tiny_run(tmp_path, "grouped", **changes))))
    assert own != grouped and [row["loss"] for row in own] == pytest.approx([row["loss"] for row in grouped], rel=1e-4)
    run = tiny_run(tmp_path, "older", **changes)
    with monkeypatch.context() as earlier:  # a version without passes of its own
        earlier.setattr(numerics, "_served", lambda config, policy: "model")
        first = rows([next(stage := sft(run))])
        stage.close()
    assert [*first, *rows(list(sft(run)))] == own


def test_a_completion_that_does_not_end_with_a_stop_token_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = Policy.encode_completion
    monkeypatch.setattr(Policy, "encode_completion", lambda policy, text, prompt: encode(policy, text, prompt)[:-1])
    run = tiny_run(tmp_path, sft__data=None)
    with pytest.raises(TrainingError, match=pattern("0", "stop token")):
        next(learn(run))
    assert run.last_step("sft") is None and not run.sft_checkpoints.steps()
