"""The rules that the fault lab asked for: each fires on its bug with its numbers, and is silent where there is none."""

from typing import Any

import pytest

from grpo_nb import presets, rules
from grpo_nb.config import Config
from grpo_nb.rules import causes, learning
from grpo_nb.rules.clock import clock_set_back
from grpo_nb.rules.finding import Finding
from grpo_nb.rules.history import History
from grpo_nb.rules.rewards import evaluation_leaked
from tests.support.made_rows import Row, healthy, ill
from tests.support.tokens import names

F, H = "fairness", "hallucination"
CONFIG = presets.demo()
ROUNDED = {"rounding": 1.2e-7, "sampler_logp_difference": 1e-6, "ratio/logp_difference": 0.0}
UNDIVIDED = CONFIG.replace(**{"algorithm.advantage": "mean_only"})


def found(rows: list[Row], config: Config = CONFIG) -> dict[str, Finding]:
    return {f.rule: f for f in rules.post_mortem(rows, config)}


def rows(*changes: Row) -> list[Row]:
    """Healthy rows of these changes, in order."""
    return [row | ROUNDED | change for row, change in zip(healthy(len(changes)), changes, strict=True)]


# The update


@pytest.mark.parametrize("apart", [0.05, 1.0])
def test_a_gradient_that_its_micro_batches_do_not_add_up_to_stops_the_run(apart: float) -> None:
    finding = found(rows({"grad/check": apart}, {}))["gradient_wrong"]
    assert (finding.step, finding.action, finding.severity) == (1, "stop", "error")
    assert names(finding.advice, ".grad", "zero_grad") and not names(finding.advice, "entropy_coef")


@pytest.mark.parametrize(
    ("ratio", "direction", "named", "left_out"),
    [
        (0.25, "smaller", ".grad", "micro-batches"),
        (2.0, "larger", "zero_grad", ".grad"),
        (1.0, "turned", "step", ".grad"),
    ],
)
def test_a_wrong_gradient_is_too_small_too_large_or_turned(
    ratio: float, direction: str, named: str, left_out: str
) -> None:
    finding = found(rows({"grad/check": 0.7, "grad/check_ratio": ratio}))["gradient_wrong"]
    assert (finding.evidence["ratio"], finding.evidence["direction"]) == (ratio, direction)
    assert names(finding.message, f"{ratio:.3g}", 0.7)
    assert names(finding.advice, named) and not names(finding.advice, left_out)


def test_an_entropy_bonus_that_lowers_the_entropy_stops_the_run() -> None:
    finding = found(rows({"grad/check": 1e-7, "grad/check_entropy": -0.98}))["gradient_wrong"]
    assert finding.evidence["entropy_rise"] == -0.98 and names(finding.message, "-0.98")
    assert names(finding.advice, "entropy_coef") and not names(finding.advice, ".grad")


@pytest.mark.parametrize(
    "row", [{"grad/check": 1e-3, "grad/check_entropy": 1.02}, {"grad/check": None}, {"grad/check": float("nan")}, {}]
)
def test_a_gradient_within_rounding_or_not_checked_is_no_finding(row: Row) -> None:
    assert "gradient_wrong" not in found(rows(row, {}))


def test_a_ratio_that_is_not_1_after_step_1_stops_the_run() -> None:
    off = {"ratio/logp_difference": 0.0066, "ratio/max_deviation": 0.3}
    finding = found(rows({}, off, off))["ratio_broken"]
    assert (finding.step, finding.action) == (2, "stop") and finding.evidence["steps"] == [2, 3]
    assert finding.evidence["values"] == {"ratio/logp_difference": 0.0066}


@pytest.mark.parametrize("gap", [0.0, 5e-4])
def test_a_ratio_of_1_to_rounding_is_no_finding(gap: float) -> None:
    assert "ratio_broken" not in found(rows({}, *[{"ratio/logp_difference": gap}] * 3))


def test_at_step_1_the_ratio_is_left_to_the_first_step_s_own_rule() -> None:
    assert found(rows({"ratio/logp_difference": 0.01})).keys() & {"ratio_broken", "first_update_wrong"} == {
        "first_update_wrong"
    }


AGREES = {"ratio/logp_difference": 0.0, "grad/update": 1e-4}
FAR = {"ratio/logp_difference": 0.0066}
NEAR_REFERENCE = {f"kl_k2/{name}": 1e-9 for name in (F, H)}
AT_REFERENCE = {f"kl_k2/{name}": 0.01 for name in (F, H)}
OTHER_SAMPLER = {"sampler_logp_difference": 0.02}


@pytest.mark.parametrize(
    ("first", "then", "open_"),
    [
        (AGREES, FAR | AT_REFERENCE, ["reference"]),
        (AGREES, FAR | OTHER_SAMPLER | NEAR_REFERENCE, ["earlier_step"]),
        (AGREES, FAR | OTHER_SAMPLER, ["reference", "earlier_step"]),
        ({"grad/update": 0.0}, FAR | NEAR_REFERENCE, ["optimizer_step"]),
        (AGREES, FAR | NEAR_REFERENCE, ["reference", "earlier_step", "optimizer_step"]),
    ],
)
def test_of_a_broken_ratio_only_the_causes_that_are_left_are_named(first: Row, then: Row, open_: list[str]) -> None:
    """In the last row every cause is excluded, so one of the numbers is wrong too."""
    finding = found(rows(first, then))["ratio_broken"]
    assert finding.evidence["causes"] == open_ and finding.advice == causes.ratio_advice(open_)


@pytest.mark.parametrize(
    ("change", "open_"),
    [
        ({"kl/fairness": 0.5}, ["reference"]),
        ({"grad/update": 0.0}, ["optimizer"]),
        ({"grad/update": 0.0, "rounding": 8e-3}, ["optimizer", "half_precision"]),
        ({"ratio/logp_difference": 0.5}, ["optimizer_step", "eval_mode"]),
        ({"ratio/logp_difference": 0.5, "grad/check": 1e-6}, ["eval_mode"]),
        ({"ratio/logp_difference": 0.5, "temperature": 0.7, "grad/check": 1e-6}, ["eval_mode", "temperature"]),
        ({"ratio/logp_difference": 0.5, "grad/check": 1e-6, **OTHER_SAMPLER}, ["eval_mode", "weights"]),
    ],
)
def test_of_a_wrong_first_step_only_the_causes_that_are_left_are_named(change: Row, open_: list[str]) -> None:
    finding = found(rows(change))["first_update_wrong"]
    assert finding.evidence["causes"] == open_ and finding.advice == causes.start_advice(open_)


def cut(*texts: str, reason: str = "length") -> Row:
    shown = "".join(text for text in texts if not text.startswith("<"))
    return {"objective": F, "stop_reason": reason, "token_texts": [*texts], "completion": shown}


@pytest.mark.parametrize(
    ("samples", "token"),
    [
        ([cut("a", "<|end|>", "b")] * 3 + [cut("a", "b")], "<|end|>"),
        ([cut("a", "<|end|>", "b"), cut("a", "b")], None),
        ([cut("<think>", "a")] * 3, None),
        ([cut("a", "<|end|>", reason="stop")] * 3, None),
        ([cut("a", " b ")] * 3, None),
        ([cut("a") | {"completion": None}, {"objective": F}, cut("a") | {"token_texts": [1, None]}], None),
        ([], None),
    ],
)
def test_a_stop_token_inside_cut_completions_is_named(samples: list[Row], token: str | None) -> None:
    finding = found(ill(lambda row: {f"truncation/{F}": 0.98}))["truncation"]
    told = learning.with_ignored_stop(finding, samples)
    assert told.evidence.get("ignored_stop") == token
    if token is None:
        assert told == finding
    else:
        assert names(told.message, token, 3, 4) and names(told.advice, token, "eos_token_id")
        assert not names(told.advice, "sampling.max_completion_length")


# KL and sampler


def kl(value: float, k2: float) -> Row:
    return {f"kl/{F}": value, f"kl_k2/{F}": k2}


def test_a_kl_that_is_far_from_half_the_squared_log_ratio_is_none() -> None:
    finding = found(rows({}, *[kl(4e-3, 5e-5)] * 3))["kl_estimator"]
    assert finding.evidence == {"objective": F, "kl": 4e-3, "half_squared": 5e-5, "factor": pytest.approx(80)}
    blind = found(rows({}, *[kl(1e-5, 1e-3)] * 3))["kl_estimator"]
    assert blind.evidence["factor"] == pytest.approx(0.01)


@pytest.mark.parametrize(
    "tail",
    [
        [kl(1.9e-3, 1e-3)] * 3,  # k3 of a skewed batch
        [kl(4e-3, 5e-5)] * 2,  # two bad batches are no estimator
        [kl(0.5, 0.05)] * 3,  # far from the reference they differ
        [kl(1e-7, 1e-9)] * 3,  # rounding
        [kl(0.0, 0.0)] * 3,
    ],
)
def test_a_kl_near_half_the_squared_log_ratio_or_far_away_is_no_finding(tail: list[Row]) -> None:
    assert "kl_estimator" not in found(rows({}, *tail))


def test_an_engine_that_stops_agreeing_draws_from_older_weights() -> None:
    gaps = [{"sampler_logp_difference": gap} for gap in (1e-6, 0.005, 0.01, 0.015)]
    finding = found(rows(*gaps))["sampler_stale"]
    assert finding.step == 4 and finding.evidence == {"gap_start": 1e-6, "gaps": [0.005, 0.01, 0.015]}
    assert "sampler_stale" not in found(rows(*gaps[:3]))


def test_an_engine_that_never_agreed_or_is_another_on_purpose_is_not_stale() -> None:
    gaps = [{"sampler_logp_difference": gap} for gap in (0.01, 0.005, 0.01, 0.015)]
    assert {"sampler_stale", "sampler_broken"} & found(rows(*gaps)).keys() == {"sampler_broken"}
    apart = CONFIG.replace(**{"sampling.top_p": 0.9})
    assert "sampler_stale" not in found(rows({}, *gaps[1:]), apart)


# Rewards


def spreads(fairness: float, hallucination: float) -> list[Row]:
    return rows(*[{f"reward/{F}/std": fairness, f"reward/{H}/std": hallucination}] * 4)


def test_objectives_on_two_scales_are_told_with_the_weight_that_evens_them() -> None:
    finding = found(spreads(30.0, 0.3), UNDIVIDED)["reward_scales"]
    assert (finding.evidence["large"], finding.evidence["small"]) == (F, H)
    assert names(finding.advice, f"objectives.{F}.weight", 0.01)


def test_scales_cancel_where_advantages_are_divided_by_the_spread_and_weights_even_them() -> None:
    assert "reward_scales" not in found(spreads(30.0, 0.3))
    assert "reward_scales" not in found(spreads(1.5, 0.3), UNDIVIDED)
    even = UNDIVIDED.replace(**{f"objectives.{F}.weight": 0.01})
    assert "reward_scales" not in found(spreads(30.0, 0.3), even)


def paid(correlation: float | None, count: int = 4) -> list[Row]:
    return rows(*[{f"reward/{F}/part_length/thorough": correlation}] * count)


@pytest.mark.parametrize(("correlation", "severity"), [(0.97, "warning"), (-0.97, "info")])
def test_a_reward_that_ranks_by_length_is_named(correlation: float, severity: str) -> None:
    finding = found(paid(correlation))["reward_length"]
    assert finding.severity == severity and finding.evidence["part"] == "thorough"
    assert names(finding.message, "thorough", F, correlation)


def test_it_is_named_where_the_log_lacks_the_lengths() -> None:
    bare = rows(*[{f"reward/{F}/part_length/thorough": 0.97, f"length/{F}/mean": None}] * 4)
    assert found(bare)["reward_length"].evidence["length"] == [None, None]


@pytest.mark.parametrize("given", [paid(0.5), paid(None), paid(0.97, 2), healthy(5)])
def test_a_reward_that_does_not_rank_by_length_is_no_finding(given: list[Row]) -> None:
    assert "reward_length" not in found(given)


@pytest.mark.parametrize(("leaked", "severity"), [(1, "warning"), (540, "error")])
def test_held_out_prompts_that_are_trained_on_are_counted(leaked: int, severity: str) -> None:
    finding = evaluation_leaked(F, leaked, 540)
    assert finding is not None and finding.severity == severity
    assert finding.evidence == {"objective": F, "leaked": leaked, "of": 540} and names(finding.message, F, leaked)


def test_no_leak_no_finding() -> None:
    assert evaluation_leaked(F, 0, 540) is None


def test_few_groups_without_signal_may_be_chance() -> None:
    """Two of three steps of a healthy run have three quarters of eight groups alike; ten such steps are no chance."""
    dead: dict[str, Any] = {f"frac_reward_zero_std/{F}": 0.79, f"label/{F}/correct": 0.6, f"label/{F}/wrong": 0.38}
    assert "dead_groups" not in found(ill(lambda row: dead, steps=3))
    assert found(ill(lambda row: dead, steps=12))["dead_groups"].severity == "warning"
    all_dead = dead | {f"frac_reward_zero_std/{F}": 1.0}
    assert found(ill(lambda row: all_dead, steps=3))["dead_groups"].severity == "error"


# The clock


def test_a_clock_that_went_back_is_named_with_the_size() -> None:
    finding = clock_set_back([1000.0, 1010.0, 910.0, 920.0])
    assert finding is not None and finding.evidence == {"times": 1, "seconds": 100.0, "at": 910.0}


@pytest.mark.parametrize("times", [[], [5.0], [1.0, 2.0, 3.0], [100.0, 99.0, 101.0]])
def test_a_clock_that_goes_on_is_no_finding(times: list[float]) -> None:
    assert clock_set_back(times) is None


# What recurs


def undone(*steps: int) -> list[Row]:
    """Rows of a run with a high truncation, of which these steps were undone, with the count of them in a row."""
    changes = []
    for step in range(1, 61):
        in_a_row = sum(step - n in steps for n in range(2)) if step in steps else 0
        bad = {"health/kl": 9.0, "status": "rolled_back", "lr": 5e-3, "lr/requested": 0.01} if in_a_row else {}
        changes.append({f"truncation/{F}": 0.9, "rollback/in_a_row": in_a_row} | bad)
    return rows(*changes)


@pytest.mark.parametrize(("steps", "severity"), [((7,), "warning"), ((7, 8), "error"), ((7, 14), "error")])
def test_a_rollback_that_recurs_says_which_rate_to_take(steps: tuple[int, ...], severity: str) -> None:
    told = rules.post_mortem(undone(*steps), CONFIG)
    (finding,) = [one for one in told if one.rule == "exploded"]
    assert finding.severity == severity and "algorithm.learning_rate" in finding.advice
    recurs = severity == "error"
    assert names(finding.advice, 0.01, "0.00012") == recurs and ("alone" in finding.advice) != recurs
    assert ([one.rule for one in told].index("truncation") > told.index(finding)) or not recurs


def test_rollbacks_far_apart_do_not_recur() -> None:
    assert found(undone(7, 40))["exploded"].severity == "warning"


def test_the_second_rollback_in_a_row_is_an_error_at_once() -> None:
    live = {one.rule: one for one in rules.check(undone(7, 8)[:8], CONFIG)}["exploded"]
    assert live.severity == "error" and names(live.advice, 0.01, "0.00012")


def test_the_preset_s_rate_is_that_of_the_model() -> None:
    assert presets.usual_rate(presets.cpu_small()) == 2e-5
    other = CONFIG.replace(**{"model.name": "own/model"})
    assert presets.usual_rate(other) == type(CONFIG.algorithm)().learning_rate


# Completions without a score


def test_the_commonest_cause_of_a_missing_score_is_named() -> None:
    finding = found(ill(lambda row: {f"scored/{F}": 0.0}))["unscored"]
    causes_seen = ["'never' gave None"] * 3 + ["'other' gave None", ""]
    samples = [{"objective": F, "reward": None, "cause": cause} for cause in causes_seen]
    others = [{"objective": H, "reward": None, "cause": "H"}, {"objective": F, "reward": 1.0, "cause": "F"}] * 5
    told = learning.with_commonest_cause(finding, samples + others)
    assert names(told.message, "'never' gave None", 3, 5) and told.evidence["cause"] == "'never' gave None"
    assert learning.with_commonest_cause(finding, others) == finding
    assert len(learning.with_commonest_cause(finding, [samples[0] | {"cause": "x" * 9000}]).message) < 600


def test_updates_left_out_without_any_score_name_their_cause() -> None:
    samples = [{"objective": F, "reward": None, "cause": "'never' gave None"}]
    empty = found(rows({}, *[{"status": "skipped", "grad/norm": None}] * 3))["repeated_skips"]
    assert "'never' gave None" in learning.with_commonest_cause(empty, samples).message
    large = found(rows({}, *[{"status": "skipped", "grad/norm": 1e9}] * 3))["repeated_skips"]
    assert learning.with_commonest_cause(large, samples) == large


# SFT that was not run

UNREADABLE = {f"label/{F}/unparsed": 0.98, f"label/{F}/correct": 0.01, f"label/{F}/wrong": 0.01}


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({f"truncation/{F}": 0.99}, "truncation"),
        (UNREADABLE, "unparsed"),
        (UNREADABLE | {f"frac_reward_zero_std/{F}": 1.0}, "dead_groups"),
    ],
)
def test_sft_that_was_not_run_comes_before_what_follows_from_it(values: Row, rule: str) -> None:
    told = rules.post_mortem(ill(lambda row: values), CONFIG, History(CONFIG, without_sft=True))
    by_rule = {one.rule: one for one in told}
    cause = by_rule["sft_not_run"]
    assert told.index(cause) < told.index(by_rule[rule]) and rule in cause.evidence["explains"]
    assert names(cause.advice, "sft(run)", "sft.steps=0") and names(by_rule[rule].advice, "sft(run)")
    after = found(ill(lambda row: values))
    assert "sft_not_run" not in after and "sft(run)" not in after[rule].advice


def test_a_healthy_run_without_sft_has_no_finding() -> None:
    told = rules.post_mortem(healthy(60), CONFIG, History(CONFIG, without_sft=True))
    assert "sft_not_run" not in {one.rule for one in told}
