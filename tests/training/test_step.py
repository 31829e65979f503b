"""The records of one step: planned once, built once, never written to by what reads them."""

import dataclasses

import pytest
import torch

from grpo_nb.beta_control import BetaState, KLTarget, proportional
from grpo_nb.policy.model import Policy
from grpo_nb.training.experience import complete
from grpo_nb.training.gradients import measure, objective_gradients, token_stats
from grpo_nb.training.plan import kl_target_of
from grpo_nb.types import Example, Experience, Rollouts, SampledPrompt, by_prompt
from tests.support import tiny_models
from tests.support.made_experience import OBJECTIVES, kept_rows, made_experience, made_plan, taken
from tests.support.tiny import tiny_config

GENERATOR = torch.Generator().manual_seed(0)
ON_POLICY = made_plan(old_first=False)


@pytest.fixture(scope="module")
def policy() -> Policy:
    learner = tiny_models.policy()
    learner.freeze_reference()
    return learner


def test_rollouts_know_their_prompts_and_groups() -> None:
    prompts = [SampledPrompt("a", Example("p", "")), SampledPrompt("b", Example("q", ""))]
    rollouts = Rollouts([[1], [2]], [[3]] * 4, [[0.0]] * 4, ["stop"] * 4, [""] * 4, 2, prompts=prompts)
    assert [rollouts.example(i).id for i in range(4)] == ["p", "p", "q", "q"]
    assert (rollouts.rows_of("a"), rollouts.rows_of("b"), rollouts.rows_of("c")) == ([0, 1], [2, 3], [])
    assert rollouts.by_prompt(torch.arange(4)).tolist() == [[0, 1], [2, 3]]
    assert by_prompt(torch.zeros(4, 5), 2).shape == (2, 2, 5)


def test_nothing_writes_into_an_experience(policy: Policy) -> None:
    experience = made_experience(policy)
    with pytest.raises(dataclasses.FrozenInstanceError):
        experience.advantages = torch.zeros(8, 1)  # type: ignore[misc]
    before = tables(experience)
    for plan in (made_plan(), ON_POLICY):
        objective_gradients(policy, experience, kept_rows(experience), plan, GENERATOR)
        taken(policy)
    assert all(torch.equal(a, b) for a, b in zip(before, tables(experience), strict=True))


def tables(experience: Experience) -> list[torch.Tensor]:
    values = [getattr(experience, field.name) for field in dataclasses.fields(experience)]
    return [value.clone() for value in values if isinstance(value, torch.Tensor)]


def test_the_only_update_gives_back_what_a_pass_of_its_own_would_measure(policy: Policy) -> None:
    """On-policy saves the old policy's pass: its log-probs are those that train, and the ratio is exactly 1."""
    experience = made_experience(policy)
    stats = objective_gradients(policy, experience, kept_rows(experience), ON_POLICY, GENERATOR)
    taken(policy)
    assert stats.seen is not None and stats.ratio_deviation == 0
    with policy.eval_mode():
        own = token_stats(policy, experience.rollouts, ON_POLICY)
    torch.testing.assert_close(stats.seen.logprobs, own.logprobs)
    torch.testing.assert_close(stats.seen.entropy, own.entropy)
    unmeasured = dataclasses.replace(experience, measured=torch.zeros(8, dtype=torch.bool))
    known = complete(unmeasured, ON_POLICY, stats.seen)
    assert known.logprobs_old is stats.seen.logprobs and torch.equal(known.measured, experience.kept)


def test_passes_that_nothing_needs_are_not_made(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts, passes = made_experience(policy).rollouts, []
    honest = policy.logprobs
    monkeypatch.setattr(policy, "logprobs", lambda *a, **k: passes.append(1) or honest(*a, **k))
    for old, reference in ((False, False), (True, False), (False, True), (True, True)):
        passes.clear()
        found = measure(policy, rollouts, made_plan(old_first=old, needs_reference=reference, micro_batch=4))
        assert (found.old is not None, found.reference is not None) == (old, reference)
        assert len(passes) == 2 * (old + reference)


def test_the_kl_of_an_experience_is_what_its_controllers_get(policy: Policy) -> None:
    """A mean over kept rows by the loss's own estimator; None where there is no token or no reference."""
    experience, plan = made_experience(policy), made_plan({"kl": "k2"})
    assert experience.logprobs_reference is not None
    squares = (experience.logprobs_old - experience.logprobs_reference).square() / 2
    kept = torch.tensor([True, True, False, True] + [False] * 4)
    some = complete(dataclasses.replace(experience, kept=kept), plan, None)
    mask = experience.mask() & kept[:, None]
    assert some.kl == {"a": pytest.approx(float(squares[mask].mean())), "b": None}
    blind = complete(dataclasses.replace(experience, logprobs_reference=None), plan, None)
    assert blind.kl == dict.fromkeys(OBJECTIVES)


def test_aims_are_those_of_the_settings() -> None:
    objective = tiny_config(objectives__fairness__kl_band=(0.02, 0.06)).objectives["fairness"]
    aim = kl_target_of(objective)
    assert isinstance(aim, KLTarget) and (aim.band, aim.target) == ((0.02, 0.06), pytest.approx(0.04))
    assert proportional(BetaState(0.1), 1.0, aim)[0].value > 0.1
    assert kl_target_of(objective.model_copy(update={"kl_band": None})) is None


@pytest.mark.parametrize(("epochs", "updates"), [(1, 1), (1, 2), (3, 2)])
def test_each_epoch_deals_every_kept_row_once(policy: Policy, epochs: int, updates: int) -> None:
    experience = made_experience(policy)
    batch = dataclasses.replace(experience, kept=torch.tensor([True] * 7 + [False]))
    dealt = made_plan(epochs=epochs, updates_per_epoch=updates).updates(batch)
    assert len(dealt) == epochs * updates
    for k in range(epochs):
        epoch = dealt[k * updates : (k + 1) * updates]
        assert sorted(i for update in epoch for rows in update.values() for i in rows) == list(range(7))
    nothing = dataclasses.replace(experience, kept=torch.zeros(8, dtype=torch.bool))
    assert made_plan(epochs=epochs, updates_per_epoch=updates).updates(nothing) == []
