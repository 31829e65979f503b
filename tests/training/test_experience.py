"""From scores to what a step learns from: shaping, advantages by objective, token weights; every setting acts."""

import dataclasses
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_nb import losses
from grpo_nb.config import JudgeConfig
from grpo_nb.policy.model import Policy
from grpo_nb.rollout import EagerEngine, Request
from grpo_nb.run.run import Run
from grpo_nb.training.experience import reward_matrix, shape, tied, without_lone_judge
from grpo_nb.training.grpo import grpo
from grpo_nb.types import Example, Rollouts, Score
from tests.support.tiny import REWARDS, rows, small_tasks, tiny_config, tiny_run, weights

NAN = float("nan")


class OffByHalf:
    """The eager engine with log-probs that are wrong by up to half a nat, as another framework's would be."""

    name = "off"

    def __init__(self) -> None:
        self.inner = EagerEngine()

    def generate(self, policy: Policy, request: Request) -> Rollouts:
        drawn = self.inner.generate(policy, request)
        wrong = [
            [min(p + 0.5 * ((i + t) % 3 - 1), 0.0) for t, p in enumerate(row)] for i, row in enumerate(drawn.logprobs)
        ]
        return dataclasses.replace(drawn, logprobs=wrong)


def trained(folder: Path, name: str, **changes: Any) -> tuple[Run, list[dict[str, Any]]]:
    run = tiny_run(folder, name, **{"run__steps": 2} | changes)
    return run, rows(list(grpo(run, rewards=REWARDS, tasks=small_tasks(), engine=OffByHalf())))


@functools.cache
def learnt(changes: str) -> dict[str, Tensor]:
    """The weights after a run with these changes of the tiny configuration, as JSON; most cases share their base."""
    return weights(trained(Path(tempfile.mkdtemp()), "run", **json.loads(changes))[0])


SOME_END: dict[str, Any] = {"sampling__max_completion_length": 6, "run__seed": 3}
"""Not all completions are cut."""


@pytest.mark.parametrize(
    ("change", "base"),
    [
        ({"algorithm__advantage": "opo"}, {}),
        ({"algorithm__learning_rate": 1e-4}, {}),
        ({"algorithm__max_grad_norm": 1e-3}, {}),
        ({"algorithm__skip_grad_norm": 1e-6}, {"run__steps": 1}),
        ({"algorithm__warmup_steps": 4}, {}),
        ({"algorithm__weight_decay": 0.5}, {}),
        ({"algorithm__advantage_clip": 0.3}, {}),
        ({"algorithm__advantage_clip": 0.3}, {"algorithm__name": "dr_grpo", "shaping__normalise": True}),
        ({"algorithm__mask_truncated": True}, {"sampling__max_completion_length": 6}),
        ({"algorithm__top_entropy_quantile": 0.2}, {}),
        ({"algorithm__importance_correction": "tis"}, {"algorithm__importance_correction_bounds": [0.5, 1.1]}),
        (
            {"algorithm__importance_correction": "mis"},
            {"algorithm__importance_correction": "tis", "algorithm__importance_correction_bounds": [0.9, 1.1]},
        ),
        ({"algorithm__importance_correction_level": "sequence_mean"}, {"algorithm__importance_correction": "mis"}),
        ({"algorithm__importance_correction_bounds": [0.9, 1.1]}, {"algorithm__importance_correction": "tis"}),
        ({"shaping__truncated_factor": -1.0}, {"sampling__max_completion_length": 6}),
        ({"shaping__overlong_buffer": 4}, SOME_END),
        ({"shaping__overlong_penalty": 3.0}, {"shaping__overlong_buffer": 4} | SOME_END),
        ({"shaping__normalise": True}, {"algorithm__name": "dr_grpo"}),
        ({"shaping__clip": 0.3}, {}),
    ],
    ids=lambda c: "-".join(f"{key}={value}" for key, value in c.items()) or "demo",
)
def test_changing_a_setting_changes_what_is_learnt(change: dict[str, Any], base: dict[str, Any]) -> None:
    a, b = learnt(json.dumps(base)), learnt(json.dumps(base | change))
    assert any(not torch.equal(a[name], b[name]) for name in a)


def test_the_gradient_report_comes_when_asked_and_changes_no_bit(tmp_path: Path) -> None:
    plain, plain_rows = trained(tmp_path, "a")
    asked, asked_rows = trained(tmp_path, "b", algorithm__gradient_report_every=2)
    assert all(torch.equal(x, y) for x, y in zip(weights(plain).values(), weights(asked).values(), strict=True))
    extra = asked_rows[1].keys() - plain_rows[1].keys()
    assert {"grad/cosine/fairness/hallucination", "grad/norm/fairness/kl", "grad/norm/hallucination"} <= extra
    assert asked_rows[0] == plain_rows[0]
    told = {"grad/cosine": asked_rows[1]["grad/cosine/fairness/hallucination"]}  # with `sum` only a report knows it
    assert {key: asked_rows[1][key] for key in plain_rows[1]} == plain_rows[1] | told


@pytest.mark.parametrize("loss", ["rloo", "reinforce_pp"])
def test_kl_in_the_reward_acts_through_the_advantage(tmp_path: Path, loss: str) -> None:
    """No KL term in the loss, and yet beta changes what is learnt, once the policy has left its reference."""
    runs = [
        trained(
            tmp_path, f"beta{beta}", algorithm__name=loss, run__steps=3, algorithm__learning_rate=3e-3,
            objectives__fairness__beta=beta, objectives__fairness__kl_band=None,
            objectives__hallucination__beta=beta, objectives__hallucination__kl_band=None,
        )
        for beta in (0.0, 2.0)
    ]  # fmt: skip
    assert "loss/kl" not in runs[1][1][2]
    a, b = (weights(run) for run, _ in runs)
    assert any(not torch.equal(a[name], b[name]) for name in a)


def test_what_was_done_about_the_sampler_is_logged(tmp_path: Path) -> None:
    _, plain = trained(tmp_path, "a")
    _, masked = trained(
        tmp_path, "b", algorithm__importance_correction="mis", algorithm__importance_correction_bounds=[0.9, 1.1]
    )
    assert plain[0]["sampler_logp_difference"] == pytest.approx(1 / 3, abs=0.05)
    assert "importance_weight/zero" not in plain[0]
    assert masked[0]["importance_weight/zero"] == pytest.approx(2 / 3, abs=0.05)


# ---- rewards before they are compared


def shaped(rewards: list[float], moments: losses.Moments | None = None, **changes: Any) -> tuple[list[float], Any]:
    config = tiny_config(sampling__max_completion_length=10, **changes)
    lengths, truncated = torch.tensor([[4, 8, 10]]), torch.tensor([[False, False, True]])
    values, after = shape(torch.tensor([rewards]), lengths, truncated, config, moments or losses.Moments())
    return values[0].tolist(), after


def test_rewards_are_shaped_in_order() -> None:
    assert shaped([1.0, 1.0, 1.0])[0] == [1, 1, 1]
    assert shaped([1.0, 1.0, 1.0], shaping__truncated_factor=0.5)[0] == [1, 1, 0.5]
    assert shaped([1.0, 1.0, 1.0], shaping__overlong_buffer=4)[0] == [1, 0.5, 0]
    both = shaped([1.0, 1.0, 1.0], shaping__truncated_factor=0.5, shaping__overlong_buffer=4, shaping__clip=0.4)
    assert both[0] == pytest.approx([0.4, 0.4, -0.4])


def test_running_moments_go_on_from_step_to_step() -> None:
    values, after = shaped([1.0, NAN, 3.0], shaping__normalise=True)
    assert (after.count, after.mean) == (2, 2.0)
    assert [values[0], values[2]] == pytest.approx([-(0.5**0.5), 0.5**0.5])
    _, later = shaped([5.0, 5.0, 5.0], after, shaping__normalise=True)
    assert (later.count, later.mean) == (5, pytest.approx(19 / 5))


def hundredfold(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [100.0 * (sum(ids) % 11) for ids in completion_ids]


@pytest.mark.parametrize("loss", ["dr_grpo", "opo"])
def test_advantages_in_units_of_the_reward_are_not_flattened(tmp_path: Path, loss: str) -> None:
    rewards = {name: [hundredfold] for name in REWARDS}
    cut: list[dict[str, Any]] = []
    for name, clip in (("auto", "auto"), ("old", 10.0)):
        changes = {"run__steps": 1, "algorithm__name": loss, "algorithm__advantage_clip": clip}
        run = tiny_run(tmp_path, name, **changes)
        cut += rows(list(grpo(run, rewards=rewards, tasks=small_tasks())))
        sizes = {abs(sample["advantage"]) for sample in run.samples().to_dict("records")}
        assert max(sizes) > 10 if clip == "auto" else sizes <= {0.0, 10.0}
    assert "advantage_clipped/fairness" not in cut[0]
    assert cut[1]["advantage_clipped/fairness"] > 0.9


def test_moments_survive_a_resume(tmp_path: Path) -> None:
    changes = {"shaping__normalise": True, "algorithm__name": "dr_grpo"}
    _, straight = trained(tmp_path, "straight", run__steps=4, **changes)
    run = tiny_run(tmp_path, "broken", run__steps=4, **changes)
    for step in grpo(run, rewards=REWARDS, tasks=small_tasks(), engine=OffByHalf()):
        if step.step == 2:
            break
    resumed = rows(list(grpo(run, rewards=REWARDS, tasks=small_tasks(), engine=OffByHalf())))
    assert resumed == straight[2:]


@pytest.mark.parametrize(("loss", "says"), [("dapo", "shaping.clip"), ("dr_grpo", "step")])
def test_normalising_for_nothing_is_said_in_the_log(tmp_path: Path, loss: str, says: str) -> None:
    run, _ = trained(tmp_path, "a", shaping__normalise=True, algorithm__name=loss, run__steps=1)
    events = [json.loads(line) for line in (run.path / "events.jsonl").read_text().splitlines()]
    (notice,) = [event for event in events if event["kind"] == "idle_setting"]
    assert says in notice["message"]


def test_the_log_has_rewards_as_given_and_as_compared(tmp_path: Path) -> None:
    _, plain = trained(tmp_path, "a", run__steps=1)
    _, clipped = trained(tmp_path, "b", run__steps=1, shaping__clip=0.01)
    assert clipped[0]["reward/fairness/mean"] == plain[0]["reward/fairness/mean"]
    assert abs(clipped[0]["reward/fairness/shaped"]) <= 0.01 < plain[0]["reward/fairness/mean"]
    assert "reward/fairness/shaped" not in plain[0]


def test_a_group_is_dead_by_what_was_compared(tmp_path: Path) -> None:
    """A clip below every reward makes them all alike, and the log says that nothing can be learnt from them."""
    _, plain = trained(tmp_path, "a", run__steps=1)
    _, flat = trained(tmp_path, "b", run__steps=1, shaping__clip=1e-13)
    assert plain[0]["frac_reward_zero_std/fairness"] < 1
    assert flat[0]["frac_reward_zero_std/fairness"] == flat[0]["frac_reward_zero_std/hallucination"] == 1


def alike(completions: list[Any], **columns: Any) -> list[float]:
    return [1000.1] * len(completions)


def alike_in_float32(completions: list[Any], **columns: Any) -> list[float]:
    """One value summed in different orders: its last bits differ."""
    return [0.3 * (1 + 6e-8 * (i % 3)) for i in range(len(completions))]


@pytest.mark.parametrize("loss", ["dr_grpo", "reinforce_pp"])
@pytest.mark.parametrize("function", [alike, alike_in_float32])
def test_equal_rewards_teach_nothing_however_large(tmp_path: Path, function: Any, loss: str) -> None:
    """1000.1 is no float32: a mean over eight of them is another number, and was once taken for a baseline."""
    changes = {f"objectives__{name}__beta": 0.0 for name in REWARDS}
    run = tiny_run(tmp_path, run__steps=2, shaping__normalise=True, algorithm__name=loss, **changes)
    tasks = {name: OneReward() for name in run.config.objectives}
    steps = rows(list(grpo(run, tasks=tasks, rewards={name: [(function, 1.0)] for name in tasks})))
    assert [row["frac_reward_zero_std/fairness"] for row in steps] == [1, 1]
    assert [row["loss/policy"] for row in steps] == [0, 0]


def test_a_step_without_a_gradient_moves_nothing(tmp_path: Path) -> None:
    """AdamW remembers the steps before, and would go on by them as far as it went then."""

    def differ_once(completions: list[Any], **columns: Any) -> list[float]:
        first = not (run.path / "metrics.jsonl").exists() or not run.last_step()
        return [float(i % 2) if first else 1.0 for i in range(len(completions))]

    run = tiny_run(tmp_path, run__steps=3, objectives__fairness__beta=0.0, objectives__hallucination__beta=0.0)
    run.knobs["beta/fairness"].set(0.0)
    run.knobs["beta/hallucination"].set(0.0)
    tasks = {name: OneReward() for name in run.config.objectives}
    steps = rows(list(grpo(run, tasks=tasks, rewards={name: [(differ_once, 1.0)] for name in tasks})))
    assert [row["status"] for row in steps[1:]] == ["empty", "empty"] and steps[0]["grad/update"] > 0
    assert [(row["grad/norm"], row["grad/update"]) for row in steps[1:]] == [(0, 0)] * 2


def test_masked_answers_teach_nothing_and_their_groups_are_dead(tmp_path: Path) -> None:
    changes = {"algorithm__mask_truncated": True, "sampling__max_completion_length": 1}
    run = tiny_run(tmp_path, run__steps=1, **changes)
    (step,) = rows(list(grpo(run, rewards=REWARDS, tasks=small_tasks())))
    assert step["truncation/fairness"] == 1 and step["status"] == "empty" and step["grad/update"] == 0
    assert step["frac_reward_zero_std/fairness"] == 1


class OneReward:
    """A task that gives every answer the same."""

    name = "one"

    def examples(self, split: str) -> list[Example]:
        return [Example(id=f"{split}/{i}", prompt=[{"role": "user", "content": "answer :"}]) for i in range(4)]

    def score(self, example: Example, completion: str) -> Score:
        return Score(0.1)


def test_a_group_of_equal_rewards_lives_where_answers_meet_the_whole_batch(tmp_path: Path) -> None:
    """reinforce_pp knows no group: it learns that one prompt's answers are worse than another's."""
    own = {"rewards": {"fairness": [(by_prompt, 1.0)]}, "tasks": small_tasks() | {"fairness": OneReward()}}
    for loss, dead in (("dapo", 1), ("reinforce_pp", 0)):
        run = tiny_run(tmp_path, loss, run__steps=1, algorithm__name=loss)
        assert rows(list(grpo(run, **own)))[0]["frac_reward_zero_std/fairness"] == dead


def by_prompt(completions: list[Any], **columns: Any) -> list[float]:
    """One reward for the first half of the rows, another for the rest: the same inside each group."""
    half = len(completions) // 2
    return [0.0] * half + [1.0] * (len(completions) - half)


def test_one_objective_may_have_no_beta_where_the_kl_is_in_the_reward(tmp_path: Path) -> None:
    """Its advantages are one a completion, those of the other one a token; and a beta may come and go."""
    run = tiny_run(tmp_path, run__steps=3, algorithm__name="reinforce_pp", objectives__fairness__beta=0.0)
    for step in grpo(run, rewards=REWARDS, tasks=small_tasks()):
        run.knobs["beta/fairness"].set(0.1 if step.step == 1 else 0.0)
        run.knobs["beta/hallucination"].set(0.0)
    assert run.last_step() == 3


# ---- a judge beside task scores that tie


def judged(task: float, judge: float | None) -> Score:
    value = None if judge is None else task + 0.04 * judge
    return Score(value=value, parts={"task": task, "judge": judge})


def test_where_all_task_scores_tie_a_judge_decides_only_if_a_setting_says_so() -> None:
    scores = [judged(0.5, 1.0), judged(0.5, 0.0), judged(0.1 + 0.2, 0.25), judged(0.3, 1.0)]
    scores += [judged(1.0, 0.0), judged(0.5, 1.0), judged(0.5, 1.0), judged(0.5, None)]
    rewards = reward_matrix(scores, 2)
    given = JudgeConfig.model_validate({"providers": [{"model": "m"}]})
    assert tied(scores, 2).tolist() == [True, True, False, True]
    levelled = without_lone_judge(rewards, scores, given)
    assert losses.has_signal(rewards).tolist() == [True, True, True, False]
    assert losses.has_signal(levelled).tolist() == [False, False, True, False]
    assert levelled[:2].mean(dim=1).tolist() == pytest.approx(rewards[:2].mean(dim=1).tolist())
    assert torch.equal(levelled[2], rewards[2]) and levelled[3].isnan().any()
    for judge in (None, given.model_copy(update={"decides_ties": True})):
        assert torch.equal(without_lone_judge(rewards, scores, judge)[:3], rewards[:3])


def test_reward_functions_go_on_to_count_where_task_scores_tie() -> None:
    scores = [Score(value=0.5 + 0.04 * j + 0.1 * own, parts={"task": 0.5, "judge": j}) for j, own in ((1.0, 0), (0, 1))]
    judge = JudgeConfig.model_validate({"providers": [{"model": "m"}]})
    low, high = without_lone_judge(reward_matrix(scores, 2), scores, judge)[0].tolist()
    assert high - low == pytest.approx(0.1)
