"""Each rule fires on its failure, says its numbers, and is silent on a healthy run."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from grpo_nb import presets, rules
from grpo_nb.config import Config
from grpo_nb.metrics import keys
from grpo_nb.rules import regressions
from grpo_nb.rules.finding import Finding
from tests.support.made_rows import Row, healthy, ill
from tests.support.tokens import names

CONFIG = presets.demo().replace(
    **{
        "sampling.max_completion_length": 12,
        "run.steps": 60,
        "objectives.fairness.kl_band": (0.01, 0.1),
        "objectives.hallucination.kl_band": (0.01, 0.1),
    }
)
F, H = "fairness", "hallucination"


def found(rows: list[Row], config: Config = CONFIG) -> dict[str, Finding]:
    return {f.rule: f for f in rules.post_mortem(rows, config)}


def only(rows: list[Row], rule: str, config: Config = CONFIG) -> Finding:
    """The finding of `rule`, which must be the only thing found but for remarks."""
    findings = {name: f for name, f in found(rows, config).items() if f.severity != "info" or name == rule}
    assert list(findings) == [rule], findings
    return findings[rule]


@pytest.mark.parametrize("steps", [1, 2, 3, 10, 60, 200])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_healthy_run_has_no_findings_but_the_word_about_its_loss(steps: int, seed: int) -> None:
    rows = healthy(steps, seed)
    for n in range(1, steps + 1, max(1, steps // 10)):
        assert set(found(rows[:n])) <= {"loss_near_zero"}
    assert all(rules.before_update(rows[:n], CONFIG) is None for n in range(1, steps + 1))


def test_no_rows_no_findings() -> None:
    assert rules.post_mortem([], CONFIG) == [] == rules.after_step([], CONFIG)


def test_a_row_with_nothing_measured_has_no_findings() -> None:
    bare = [{"step": s, "status": "ok"} for s in range(1, 61)]
    empty = [dict.fromkeys(healthy(1)[0]) | row for row in bare]
    assert found(bare) == {} == found(empty)


# One step


@pytest.mark.ux(15, at="unit")
@pytest.mark.parametrize("bad", [math.nan, math.inf, "NaN", "-Infinity"])
@pytest.mark.parametrize("key", ["loss", "grad/norm", "grad/norm/fairness", "kl/fairness"])
def test_a_number_that_is_not_finite_skips_the_update(key: str, bad: Any) -> None:
    rows = ill(lambda row: {key: bad}, steps=12, since=12)
    finding = rules.before_update(rows, CONFIG)
    assert finding is not None and finding.rule == "non_finite" and finding.action == "skip" and finding.step == 12
    assert key in finding.message and "0.0003" in finding.advice
    assert found(rows)["non_finite"].message == finding.message


def test_a_gradient_above_the_threshold_skips_the_update() -> None:
    rows = ill(lambda row: {"grad/norm": 113_818_385.0}, steps=12, since=12)
    finding = rules.before_update(rows, CONFIG)
    assert finding is not None and finding.rule == "grad_spike" and finding.action == "skip"
    assert finding.evidence["norm"] == 113_818_385.0 and finding.evidence["usual"] < 2
    assert "1.138e+08" in finding.message and "skip_grad_norm 100" in finding.message


def test_no_threshold_means_only_finiteness_is_asked() -> None:
    config = CONFIG.replace(**{"algorithm.skip_grad_norm": None})
    assert rules.before_update(ill(lambda row: {"grad/norm": 1e9}, steps=3), config) is None
    finding = rules.before_update(ill(lambda row: {"grad/norm": math.nan}, steps=3), config)
    assert finding is not None and finding.rule == "non_finite"


def test_three_skips_in_a_row_stop_the_run_and_two_do_not() -> None:
    skip: Callable[[Row], Row] = lambda row: {"status": "skipped", "grad/norm": math.nan, "grad/update": 0.0}  # noqa: E731
    assert not [f for f in rules.after_step(ill(skip, steps=21, since=20), CONFIG) if f.action == "stop"]
    (stop,) = [f for f in rules.after_step(ill(skip, steps=22, since=20), CONFIG) if f.action == "stop"]
    assert stop.rule == "repeated_skips" and names(stop.advice, "learning rate")


def test_nothing_scored_for_three_steps_stops_with_another_advice() -> None:
    rows = ill(lambda row: {"status": "skipped", "grad/norm": None, "loss": None}, steps=5, since=3)
    assert not names(found(rows)["repeated_skips"].advice, "learning rate")


def test_weights_that_do_not_move_stop_the_run() -> None:
    finding = only(ill(lambda row: {"grad/update": 0.0}, steps=6, since=3), "params_frozen")
    assert finding.action == "stop" and "bfloat16" in finding.advice


@pytest.mark.parametrize("reason", [{"lr": 0.0}, {"grad/norm": 0.0}, {"status": "skipped"}])
def test_weights_may_stand_still_for_a_reason(reason: Row) -> None:
    assert "params_frozen" not in found(ill(lambda row: {"grad/update": 0.0} | reason, steps=6, since=3))


@pytest.mark.parametrize(
    ("change", "severity", "action"),
    [
        ({"ratio/max_deviation": 0.5}, "error", "stop"),
        ({"ratio/max_deviation": 0.01}, "warning", "warn"),
        ({"ratio/max_deviation": math.nan}, "error", "stop"),
        ({"kl/fairness": 1.007}, "error", "stop"),
        ({"kl/hallucination": 0.005}, "warning", "warn"),
        ({"grad/update": 0.0}, "error", "stop"),
    ],
)
def test_what_must_hold_at_step_one(change: Row, severity: str, action: str) -> None:
    rows = [row | (change if row["step"] == 1 else {}) for row in healthy(5)]
    finding = found(rows)["first_update_wrong"]
    assert (finding.severity, finding.action, finding.step) == (severity, action, 1)
    assert next(iter(change)) in finding.message
    assert "first_update_wrong" not in found(rows[1:])


@pytest.mark.parametrize("rule", ["first_update_wrong", "params_frozen"])
def test_rewards_too_small_to_move_a_weight_are_named(rule: str) -> None:
    still, spreads = {keys.GRAD_UPDATE: 0.0}, [*map(keys.REWARD_STD.of, ("fairness", "hallucination"))]
    tiny = still | dict.fromkeys(spreads, 1e-20)
    first = {"first_update_wrong": 1, "params_frozen": 3}[rule]
    stop = found(ill(lambda row: tiny, steps=6, since=first))[rule]
    assert stop.action == "stop" and {*spreads} <= stop.evidence.keys()
    assert stop.advice != found(ill(lambda row: still, steps=6, since=first))[rule].advice


@pytest.mark.parametrize("mode", ["auto", "manual"])
@pytest.mark.parametrize("above", [lambda step: step % 2, lambda step: step > 45, lambda step: step <= 31])
def test_kl_above_its_band_in_half_of_the_steps(above: Any, mode: str) -> None:
    rows = ill(lambda row: {f"kl/{F}": 0.15 if above(row["step"]) else 0.05, f"beta_mode/{F}": mode}, since=2)
    finding = only(rows, "kl_above_band")
    assert (finding.severity, finding.evidence["objective"]) == ("warning", F)
    assert finding.evidence["share"] >= 0.5 and finding.evidence["by_hand"] == (mode == "manual")
    assert ("set_auto()" in finding.advice) == (mode == "manual")


def test_an_excursion_above_the_band_is_none() -> None:
    rows = ill(lambda row: {f"kl/{F}": 0.15 if row["step"] % 5 == 0 else 0.05})
    assert "kl_above_band" not in found(rows)
    assert "kl_above_band" not in found(ill(lambda row: {f"kl/{F}": 0.15}, steps=4))
    free = CONFIG.replace(**{f"objectives.{F}.kl_band": None})
    assert "kl_above_band" not in found(ill(lambda row: {f"kl/{F}": 0.15}), free)


def test_advantages_that_a_bound_flattens() -> None:
    config = CONFIG.replace(**{"algorithm.advantage_clip": 10.0, "algorithm.name": "dr_grpo"})
    finding = only(ill(lambda row: {f"advantage_clipped/{F}": 0.8}), "advantage_clipped", config)
    assert finding.evidence == {"objective": F, "share": pytest.approx(0.8), "bound": 10, "advantage": "mean_only"}
    assert "advantage_clipped" not in found(ill(lambda row: {f"advantage_clipped/{F}": 0.01}), config)


# KL and beta


def test_kl_that_reads_zero_while_weights_move() -> None:
    finding = only(ill(lambda row: {f"kl/{H}": 0.0}, steps=20), "kl_zero")
    assert finding.evidence["objective"] == H and "reference" in finding.message
    assert "kl_zero" not in found(ill(lambda row: {f"kl/{H}": 0.0, "grad/update": 0.0, "grad/norm": 0.0}, steps=20))
    assert "kl_zero" not in found(ill(lambda row: {f"kl/{H}": 0.0}, steps=4))


def test_kl_far_above_its_band() -> None:
    finding = only(ill(lambda row: {f"kl/{F}": 0.47}, since=50), "kl_exploded")
    assert finding.severity == "warning" and names(finding.message, 0.47) and names(finding.advice, f"beta/{F}")
    assert found(ill(lambda row: {f"kl/{F}": 2.0}, since=50))["kl_exploded"].severity == "error"
    assert "kl_exploded" not in found(ill(lambda row: {f"kl/{F}": 0.2}, since=50))


def test_without_a_band_only_a_nat_is_too_far() -> None:
    config = CONFIG.replace(**{f"objectives.{F}.kl_band": None})
    assert "kl_exploded" not in found(ill(lambda row: {f"kl/{F}": 0.47}, since=50), config)
    assert names(found(ill(lambda row: {f"kl/{F}": 1.5}, since=50), config)["kl_exploded"].message, 1.5)


def test_beta_at_its_upper_bound_is_a_warning_and_at_its_lower_a_remark() -> None:
    high = only(ill(lambda row: {f"beta/{F}": 1.0, f"kl/{F}": 0.2}, since=50), "beta_pinned")
    assert high.severity == "warning" and names(high.message, "upper", 1)
    low = only(ill(lambda row: {f"beta/{F}": 1e-4, f"kl/{F}": 0.001}, since=50), "beta_pinned")
    assert low.severity == "info" and low.action == "none"


@pytest.mark.parametrize("excuse", [{f"kl/{F}": 0.05}, {f"beta_mode/{F}": "manual"}, {f"beta/{F}": 0.9}])
def test_beta_is_not_pinned_inside_the_band_or_by_hand(excuse: Row) -> None:
    assert "beta_pinned" not in found(ill(lambda row: {f"beta/{F}": 1.0, f"kl/{F}": 0.2} | excuse, since=50))


def test_a_policy_that_hardly_moves() -> None:
    still = {f"kl/{o}": 1e-5 for o in (F, H)} | {f"reward/{o}/mean": 0.5 for o in (F, H)}
    assert "five-fold" in only(ill(lambda row: still, steps=40), "policy_static").advice
    assert "policy_static" not in found(ill(lambda row: still, steps=20))
    assert "policy_static" not in found(ill(lambda row: still | {f"kl/{H}": 0.02}, steps=40))


# Signal and answers


def labels(correct: float, unparsed: float = 0.0) -> Row:
    shares = {"correct": correct, "wrong": 1 - correct - unparsed, "unparsed": unparsed}
    return {f"label/{F}/{name}": share for name, share in shares.items() if share}


@pytest.mark.parametrize(
    ("correct", "severity", "word"),
    [(0.97, "info", "97%"), (0.02, "warning", "2%"), (0.5, "warning", "90%")],
)
def test_dead_groups_are_told_apart_by_their_labels(correct: float, severity: str, word: str) -> None:
    finding = only(ill(lambda row: {f"frac_reward_zero_std/{F}": 0.9} | labels(correct)), "dead_groups")
    assert finding.severity == severity and names(finding.message, word, "90%")
    assert finding.evidence["correct_share"] == pytest.approx(correct)


@pytest.mark.ux(18, at="unit")
def test_all_groups_dead_is_an_error_unless_solved() -> None:
    assert found(ill(lambda row: {f"frac_reward_zero_std/{F}": 1.0} | labels(0.5)))["dead_groups"].severity == "error"
    assert found(ill(lambda row: {f"frac_reward_zero_std/{F}": 1.0} | labels(1.0)))["dead_groups"].severity == "info"


def test_a_label_nobody_got_counts_as_zero() -> None:
    rows = [{k: v for k, v in row.items() if k != f"label/{F}/correct"} for row in healthy(20)]
    finding = found([row | {f"frac_reward_zero_std/{F}": 0.9} for row in rows])["dead_groups"]
    assert finding.evidence["correct_share"] == 0.0


@pytest.mark.ux(17, at="unit")
def test_truncation_names_the_cap_and_what_to_set() -> None:
    finding = only(ill(lambda row: {f"truncation/{F}": 0.3}, since=45), "truncation")
    assert finding.severity == "warning" and names(finding.advice, "raise", "sampling.max_completion_length", 12, 24)
    all_of_them = only(ill(lambda row: {f"truncation/{F}": 1.0}), "truncation")
    assert all_of_them.severity == "error" and names(all_of_them.advice, "SFT")


def test_answers_that_shrink_to_the_terminator() -> None:
    assert only(ill(lambda row: {f"length/{F}/p50": 1.0}, since=55), "length_collapse").severity == "error"
    assert only(ill(lambda row: {f"length/{F}/p50": 2.0}, since=55), "length_collapse").severity == "warning"
    assert "length_collapse" not in found(
        ill(lambda row: {f"length/{F}/p50": 2.0})
    )  # one-letter answers from the start


def advice(config: Config) -> str:
    return only(ill(lambda row: {f"entropy/{F}": 0.01}, since=45), "entropy_collapse", config).advice


def test_entropy_is_compared_with_the_runs_own_start() -> None:
    finding = only(ill(lambda row: {f"entropy/{F}": 0.01}, since=45), "entropy_collapse")
    assert names(finding.message, 0.01) and names(finding.advice, "raise", "algorithm.entropy_coef", 0)
    clips = CONFIG.replace(**{"batch.num_iterations": 2})
    assert "clip_high from 0.28 to 0.39" in advice(clips), "a clip that acts"
    assert "clip_high from 0.0004 to 0.00056" in advice(clips.replace(**{"algorithm.name": "gspo"}))
    assert "clip_high" not in advice(clips.replace(**{"algorithm.name": "sapo"}))
    assert "entropy_collapse" not in found(ill(lambda row: {f"entropy/{F}": 0.01} | labels(0.97), since=45))
    assert "entropy_collapse" not in found(ill(lambda row: {f"entropy/{F}": 0.01}))


def test_low_entropy_from_the_start_is_put_down_to_sft() -> None:
    rows = ill(lambda row: {f"entropy/{F}": 0.03, f"frac_reward_zero_std/{F}": 0.8} | labels(0.5))
    assert "sft.steps" in found(rows)["low_entropy_start"].advice
    assert "low_entropy_start" not in found(ill(lambda row: {f"entropy/{F}": 0.03}))


def test_sampler_mismatch_names_the_settings() -> None:
    config = CONFIG.replace(**{"sampling.top_p": 0.9, "sampling.top_k": 50})
    finding = only(ill(lambda row: {"sampler_logp_difference": 0.2}), "sampler_mismatch", config)
    assert finding.severity == "warning" and finding.evidence["settings"] == ["sampling.top_p=0.9", "sampling.top_k=50"]
    stale = only(ill(lambda row: {"sampler_logp_difference": 0.2}), "sampler_mismatch")
    assert stale.severity == "error" and stale.evidence["settings"] == []


def test_answers_without_a_score() -> None:
    assert only(ill(lambda row: {f"scored/{F}": 0.8}), "unscored").severity == "warning"
    assert only(ill(lambda row: {f"scored/{F}": 0.2}), "unscored").severity == "error"


def test_answers_that_cannot_be_read() -> None:
    assert "30%" in only(ill(lambda row: labels(0.4, 0.3)), "unparsed").message


def test_objectives_that_pull_apart_need_persistence() -> None:
    assert "pcgrad" in only(ill(lambda row: {"grad/cosine": -0.5}), "gradient_conflict").advice
    surgery = CONFIG.replace(**{"algorithm.combine": "pcgrad"})
    assert found(ill(lambda row: {"grad/cosine": -0.5}), surgery)["gradient_conflict"].severity == "info"
    assert "gradient_conflict" not in found(ill(lambda row: {"grad/cosine": -0.5 if row["step"] % 2 else 0.0}))


@pytest.mark.ux(19, at="unit")
def test_zero_loss_is_explained_on_policy_only() -> None:
    finding = found(healthy())["loss_near_zero"]
    assert finding.severity == "info" and finding.action == "none" and "reward" in finding.advice
    assert "loss_near_zero" not in found(healthy(), CONFIG.replace(**{"batch.num_iterations": 2}))


def test_memory_that_keeps_growing() -> None:
    finding = only(ill(lambda row: {"memory/peak_mib": 800 + 5.0 * row["step"]}), "memory_trend")
    assert names(finding.message, "5 MiB")
    assert "memory_trend" not in found(ill(lambda row: {"memory/peak_mib": 800 if row["step"] < 50 else 1200}))
    assert "memory_trend" not in found(ill(lambda row: {"memory/peak_mib": 700 + 6.0 * row["step"]}, steps=20))


def evaluation(stage: str, accuracy: float, **more: Any) -> dict[str, Any]:
    return {
        "stage": stage,
        "objective": F,
        "split": "test",
        "mode": "greedy",
        "pool": "a",
        "metrics": {"accuracy": {"value": accuracy}},
    } | more


def test_reward_that_rises_without_accuracy() -> None:
    rows = healthy()
    flat = [evaluation("sft", 0.55), evaluation("latest", 0.56)]
    finding = regressions.reward_without_accuracy(rows, CONFIG, F, flat)
    assert finding is not None and "0.55 (sft) to 0.56" in finding.message
    better = [evaluation("sft", 0.55), evaluation("latest", 0.9)]
    unlike = [evaluation("sft", 0.55, pool="b"), evaluation("latest", 0.56)]
    for others in (better, unlike, flat[:1], []):
        assert regressions.reward_without_accuracy(rows, CONFIG, F, others) is None
    assert regressions.reward_without_accuracy(rows, CONFIG, H, flat) is None


# Asking


def test_after_step_reports_a_trouble_once() -> None:
    rows = ill(lambda row: {f"truncation/{F}": 0.4}, since=20)
    told = {n: [f.rule for f in rules.after_step(rows[:n], CONFIG)] for n in range(1, 41)}
    assert [n for n, names in told.items() if "truncation" in names] == [23]


def test_one_finding_for_each_objective() -> None:
    rows = ill(lambda row: {f"truncation/{F}": 0.4, f"truncation/{H}": 0.9}, since=20)
    hits = [f for f in rules.post_mortem(rows, CONFIG) if f.rule == "truncation"]
    assert [(f.severity, f.evidence["objective"]) for f in hits] == [("error", H), ("warning", F)]


def test_a_post_mortem_counts_what_happened_on_the_way_and_sorts_worst_first() -> None:
    rows = ill(lambda row: {"grad/norm": 500.0, "status": "skipped"} if row["step"] in (7, 30) else {})
    rows[40] |= {"loss": math.nan, "status": "skipped"}
    findings = rules.post_mortem(rows, CONFIG)
    assert [f.rule for f in findings] == ["non_finite", "grad_spike", "loss_near_zero"]
    assert findings[1].evidence["steps"] == [7, 30] and names(findings[1].message, 2, 7, 30)


def test_guards_and_post_mortem_agree_whatever_the_length_of_the_log() -> None:
    rows = ill(lambda row: {"status": "skipped", "grad/norm": 1e6}, since=40)
    stopped_at = next(n for n in range(1, 61) if any(f.action == "stop" for f in rules.after_step(rows[:n], CONFIG)))
    assert rules.post_mortem(rows, CONFIG)[0].step == stopped_at == 42


def test_every_finding_reads_as_a_sentence_with_numbers_and_advice() -> None:
    sick = {
        f"{k}/{F}": v for k, v in {"truncation": 0.9, "kl": 3.0, "frac_reward_zero_std": 1.0, "scored": 0.1}.items()
    }
    findings = rules.post_mortem(ill(lambda row: sick | {"sampler_logp_difference": 1.0, "grad/cosine": -1.0}), CONFIG)
    assert len(findings) > 6
    for finding in findings:
        assert re.search(r"\d", finding.message) and finding.advice, finding
        assert finding.message.endswith(".") and not finding.advice.endswith("."), finding
        assert names(str(finding), finding.severity, finding.rule, finding.step), finding


# ---- knobs at 0, settings already on


def far(row: Row) -> Row:
    return {f"kl/{F}": 5.0}


def test_a_beta_of_0_is_named_as_the_cause() -> None:
    rows = ill(lambda row: far(row) | {f"beta/{F}": 0.0})
    assert names(found(rows)["kl_exploded"].advice, f"beta/{F}", 0)
    at_its_end = found(ill(lambda row: far(row) | {f"beta/{F}": 10.0, f"beta_mode/{F}": "manual"}))["kl_exploded"]
    assert at_its_end.advice != found(ill(far))["kl_exploded"].advice, "the knob cannot be raised"
    near_it = ill(lambda row: far(row) | {f"beta/{F}": 9.0, f"beta_mode/{F}": "manual"})
    assert "from 9 to 10" in found(near_it)["kl_exploded"].advice


def test_a_learning_rate_of_0_is_named_as_the_cause() -> None:
    still = {f"kl/{o}": 1e-5 for o in CONFIG.objectives} | {f"reward/{o}/mean": 0.5 for o in CONFIG.objectives}
    rows = ill(lambda row: still | {"lr": 0.0})
    assert names(found(rows)["policy_static"].advice, "learning rate", 0)


def test_a_conflict_is_seen_in_reports_every_few_steps() -> None:
    """With `sum` the cosine is known in the steps of a gradient report only."""
    rows = ill(lambda row: {"grad/cosine": -0.6 if row["step"] % 2 == 0 else None})
    assert "algorithm.combine='pcgrad'" in found(rows)["gradient_conflict"].advice


def test_a_correction_is_known_to_the_mismatch() -> None:
    config = CONFIG.replace(**{"algorithm.importance_correction": "tis"})
    rows = ill(
        lambda row: {"sampler_logp_difference": 0.08, "importance_weight/mean": 0.97, "importance_weight/zero": 0.0}
    )
    finding = found(rows, config)["sampler_mismatch"]
    assert finding.severity == "info" and names(finding.message, "importance_correction='tis'", 0.97)
    assert names(found(rows)["sampler_mismatch"].advice, "algorithm.importance_correction='tis'")


def test_masking_is_no_advice_where_it_is_on() -> None:
    rows = ill(lambda row: {f"truncation/{F}": 0.4})
    assert "mask_truncated" in found(rows)["truncation"].advice
    assert (
        "mask_truncated" not in found(rows, CONFIG.replace(**{"algorithm.mask_truncated": True}))["truncation"].advice
    )
