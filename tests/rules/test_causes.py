"""Rules that tell causes apart: dead groups, templates, a sampler that differs, KL that nothing holds, memory, pace."""

from typing import Any

import pytest

from grpo_nb import presets, rules
from grpo_nb.config import Config
from grpo_nb.metrics import keys
from grpo_nb.rules import regressions
from grpo_nb.rules.finding import Finding
from tests.rules.test_rules import CONFIG, F, evaluation, found, labels, only
from tests.support.made_rows import Row, healthy, ill
from tests.support.tokens import names

GAP = keys.SAMPLER_DIFFERENCE.mean


# Groups without signal


def dead(share: float, expected: float, **more: Any) -> dict[str, Finding]:
    values = {keys.FRAC_REWARD_ZERO_STD.of(F): share, keys.FRAC_ZERO_STD_EXPECTED.of(F): expected}
    return found(ill(lambda row: values | more))


@pytest.mark.parametrize(
    ("expected", "more", "cause", "severity"),
    [
        (0.9, labels(0.97), "solved", "info"),
        (0.88, labels(0.02), "out_of_reach", "warning"),
        (0.85, labels(0.5), "alike", "warning"),
        (0.1, labels(0.5), "constant_reward", "warning"),
        (0.2, labels(0.95), "constant_reward", "warning"),
        (0.9, labels(0.05, 0.9), "parser", "warning"),
    ],
)
def test_dead_groups_have_a_cause(expected: float, more: Row, cause: str, severity: str) -> None:
    finding = dead(0.9, expected, **more)["dead_groups"]
    assert (finding.evidence["cause"], finding.severity) == (cause, severity)
    assert finding.evidence["expected_share"] == pytest.approx(expected)
    assert f"{expected:.0%}" in finding.message


def test_groups_that_are_dead_by_chance_alone_are_not_reported() -> None:
    assert "dead_groups" not in dead(0.27, 0.27, **labels(0.85))


# Templates


def test_a_sentence_for_every_prompt_is_named() -> None:
    always = only(ill(lambda row: {keys.TEMPLATE.of(F): 0.7, keys.EVASIVE.of(F): 0.1}), "template_answers")
    assert always.evidence["share"] == pytest.approx(0.7) and not always.evidence["rising"]
    rises = {keys.EVASIVE: lambda row: 0.02 if row["step"] < 30 else 0.3}
    drift = only(
        ill(lambda row: {key.of(F): share(row) for key, share in rises.items()} | labels(0.5)), "template_answers"
    )
    assert drift.evidence["rising"] and drift.evidence["share_start"] == pytest.approx(0.02)
    assert drift.evidence["kind"] != always.evidence["kind"]


@pytest.mark.parametrize(
    "values",
    [
        {keys.TEMPLATE.of(F): 0.1, keys.EVASIVE.of(F): 0.3},
        {},
    ],
)
def test_a_few_templates_are_none(values: Row) -> None:
    assert "template_answers" not in found(ill(lambda row: values))


def test_templates_that_go_away_are_none() -> None:
    falling = ill(lambda row: {keys.TEMPLATE.of(F): max(0.9 - 0.02 * row["step"], 0.0)})
    assert "template_answers" not in found(falling)


def test_hedging_is_told_once() -> None:
    shares = {f"label_answerable/{F}/unknown": 0.9, f"label_answerable/{F}/correct": 0.05}
    told = found(ill(lambda row: shares | {keys.EVASIVE.of(F): 0.9}))
    assert "hedging" in told and "template_answers" not in told


# The sampler


def growing(row: Row) -> Row:
    """A gap that comes with the updates, in float32: 1e-7 at step 1, then 2e-3 a step."""
    return {GAP: 1e-7 + 2e-3 * (row["step"] - 1), keys.ROUNDING: 1.2e-7}


@pytest.mark.parametrize("steps", [12, 60])
def test_a_gap_that_grows_with_the_updates_is_of_stale_weights(steps: int) -> None:
    assert only(ill(growing, steps=steps), "sampler_stale").evidence["gap_start"] == 1e-7
    corrected = CONFIG.replace(**{"algorithm.importance_correction": "tis"})
    finding = only(ill(growing, steps=60), "sampler_mismatch", corrected)
    assert (finding.evidence["cause"], finding.severity) == ("stale_weights", "warning")


def test_rollouts_one_step_off_policy_are_not_taken_for_stale_weights() -> None:
    off_policy = CONFIG.replace(**{"algorithm.importance_correction": "tis", "rollout.steps_off_policy": 1})
    rows = ill(lambda row: {GAP: 0.2 * min(row["step"] - 1, 1), keys.STALENESS: min(row["step"] - 1, 1)}, steps=60)
    finding = only(rows, "sampler_mismatch", off_policy)
    assert (finding.evidence["cause"], finding.severity, finding.action) == ("off_policy", "info", "none")
    assert names(finding.message, "rollout.steps_off_policy=1")


def test_positions_are_not_taken_for_stale_weights() -> None:
    rows = ill(lambda row: growing(row) | {keys.POSITIONS: "dynamic"})
    assert only(rows, "sampler_mismatch").evidence["cause"] == "positions"


def test_a_gap_of_step_1_is_not_of_stale_weights() -> None:
    finding = only(ill(lambda row: {GAP: 0.2}), "sampler_mismatch")
    assert (finding.evidence["cause"], finding.severity) == ("since_start", "error")
    finding = only(ill(lambda row: {GAP: 0.2})[5:], "sampler_mismatch")
    assert finding.evidence["cause"] == "unknown"


def test_half_precision_is_no_stale_engine() -> None:
    half = ill(lambda row: {GAP: 0.009 if row["step"] > 1 else 0.004, keys.ROUNDING: 0.0078})
    assert "sampler_mismatch" not in found(half)
    single = ill(lambda row: {GAP: 3e-7 * row["step"], keys.ROUNDING: 1.2e-7})
    assert "sampler_mismatch" not in found(single)


def test_positions_of_the_longest_row_are_the_cause() -> None:
    rows = ill(lambda row: {GAP: 0.08} | ({keys.POSITIONS: "longrope"} if row["step"] % 3 == 0 else {}))
    finding = only(rows, "sampler_mismatch")
    assert finding.evidence["cause"] == "positions" and "longrope" in finding.message
    assert "sampler_mismatch" not in found(ill(lambda row: {keys.POSITIONS: "longrope"}))
    shaped = found(rows, CONFIG.replace(**{"sampling.top_p": 0.9}))["sampler_mismatch"]
    assert shaped.evidence["cause"] == "settings"


# KL that nothing holds


def test_kl_above_its_ceiling_with_a_saturated_controller_is_one_error() -> None:
    finding = only(ill(lambda row: {f"kl/{F}": 0.5, f"beta/{F}": 1.0}, since=50), "kl_unheld")
    assert finding.severity == "error" and finding.evidence["kl"] == pytest.approx(0.5)
    assert finding.evidence["limit"] == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({f"kl/{F}": 0.2, f"beta/{F}": 1.0}, "beta_pinned"),
        ({f"kl/{F}": 0.5, f"beta/{F}": 0.5}, "kl_exploded"),
        ({f"kl/{F}": 0.5, f"beta/{F}": 1.0, f"beta_mode/{F}": "manual"}, "kl_exploded"),
    ],
)
def test_kl_that_something_could_still_hold_has_its_own_finding(values: Row, rule: str) -> None:
    assert only(ill(lambda row: values, since=50), rule)


# The reward


def earned(**more: Any) -> Finding | None:
    pair = [evaluation("sft", 0.55), evaluation("latest", 0.56)]
    return regressions.reward_without_accuracy(ill(lambda row: more), CONFIG, F, [e | {"step": 60} for e in pair])


def test_a_tricked_reward_is_told_from_memorised_prompts() -> None:
    memorised, tricked = earned(), earned(**labels(0.5))
    assert memorised is not None and memorised.evidence["cause"] == "memorised"
    assert tricked is not None and tricked.evidence["cause"] == "tricked"
    assert memorised.advice != tricked.advice


def test_the_stage_nearest_to_the_start_of_grpo_is_compared() -> None:
    rows, latest = healthy(), evaluation("latest", 0.9, step=60)
    before = [evaluation("sft", 0.55, step=0), evaluation("base", 0.9, step=0)]
    assert regressions.reward_without_accuracy(rows, CONFIG, F, [*before, latest]) is None, "SFT's end, not the base"


def test_an_accuracy_near_1_has_no_room_to_rise() -> None:
    pair = [evaluation("sft", 0.97, step=0), evaluation("latest", 0.975, step=60)]
    assert regressions.reward_without_accuracy(healthy(), CONFIG, F, pair) is None


def test_the_reward_is_that_of_the_step_that_was_measured() -> None:
    pair = [evaluation("sft", 0.55, step=0), evaluation("step 40", 0.56, step=40)]
    rows = ill(lambda row: {f"reward/{F}/mean": 0.5 if row["step"] <= 45 else 0.9})
    assert regressions.reward_without_accuracy(rows, CONFIG, F, pair) is None, "it rose after that step"


def test_a_wide_interval_leaves_it_open() -> None:
    wide = {"accuracy": [0.2, 0.9, 0.4, 0.7] * 50}
    other = {"accuracy": [0.7, 0.4, 0.9, 0.2] * 50}
    many = [{"accuracy": {"value": value, "clusters": 100, "effective": 100.0}} for value in (0.55, 0.56)]
    pair = [
        evaluation("sft", 0.55, step=0, resamples=wide, metrics=many[0]),
        evaluation("latest", 0.56, step=60, resamples=other, metrics=many[1]),
    ]
    assert regressions.reward_without_accuracy(healthy(), CONFIG, F, pair) is None


# The machine


def memory(values: list[float], key: str = keys.MEMORY_PEAK) -> bool:
    rows = [row | {key: value} for row, value in zip(healthy(len(values)), values, strict=True)]
    return any("memory_trend" in found(rows[:n]) for n in range(1, len(rows) + 1))


WARM_UP = [
    *(591.0, 612.0, 617.2, 617.9, 619.2, 619.8, 621.2, 621.3, 625.3, 625.5, 629.1, 629.2, 630.6, 631.0, 632.3, 632.7),
    *(635.0, 637.3, 638.7, 639.2, 673.3, *[673.3] * 19, 683.1, *[683.1] * 19, 691.4, *[691.4] * 19),
]
"""Peak memory in MiB of the demo's first steps in a new process that also draws a dashboard."""


def test_a_process_that_warms_up_has_no_leak() -> None:
    assert not memory(WARM_UP)
    assert not memory([*[626.0] * 20, *WARM_UP[:60]]), "after a resume in a new process"
    assert not memory([*[600.0] * 40, *WARM_UP])
    assert not memory([600.0 + 40 * (step // 20) for step in range(100)]), "a step up at each checkpoint"


@pytest.mark.parametrize("key", [keys.MEMORY_PEAK, keys.MEMORY_NOW])
def test_a_leak_is_found_before_and_after_a_resume(key: str) -> None:
    assert memory([600.0 + 3 * step for step in range(60)], key)
    assert memory([*[626.0] * 20, *(600.0 + 3 * step for step in range(60))], key)
    assert memory([600.0 + 3 * step + 50 * (step % 2) for step in range(60)], key), "however it swings"


def test_what_is_held_now_counts_more_than_a_peak() -> None:
    rows = ill(lambda row: {keys.MEMORY_NOW: 600.0, keys.MEMORY_PEAK: 800 + 5.0 * row["step"]})
    assert "memory_trend" not in found(rows)


def paced(**seconds: float) -> list[Row]:
    """Sixty steps whose phases take 2 s each, and from step 45 on what is given."""
    usual = dict.fromkeys(("rollout", "score", "reference", "train"), 2.0)

    def phases(row: Row) -> Row:
        now = usual | (seconds if row["step"] >= 45 else {})
        noise = 1 + 0.2 * (row["step"] % 3)
        return {keys.TIME.of(name): value * noise for name, value in now.items()} | {
            keys.TIME_STEP: sum(now.values()) * noise
        }

    return ill(phases)


@pytest.mark.parametrize("phase", ["rollout", "score", "reference", "train"])
def test_a_phase_that_fell_behind_its_own_floor_is_named(phase: str) -> None:
    finding = only(paced(**{phase: 10.0}), "slow_phase")
    assert finding.evidence["phase"] == phase and finding.evidence["ratio"] >= 4


@pytest.mark.parametrize(
    "seconds",
    [
        {},
        {"rollout": 10.0, "score": 10.0, "reference": 10.0, "train": 10.0},
        {"rollout": 4.0},
        {"score": 0.1, "rollout": 2.5},
    ],
    ids=["steady", "a busy machine", "twice", "faster"],
)
def test_a_machine_that_is_busy_or_swings_has_no_slow_phase(seconds: dict[str, float]) -> None:
    assert "slow_phase" not in found(paced(**seconds))


def test_little_time_and_longer_answers_are_no_slow_phase() -> None:
    rows = [row | {keys.TIME.of(name): 0.02 for name in ("score", "reference", "train")} for row in healthy()]
    short = [row | ({keys.TIME.of("score"): 0.2} if row["step"] > 40 else {}) for row in rows]
    assert "slow_phase" not in found(short)
    longer = [
        row | ({"tokens": 9000, keys.TIME.of("rollout"): 20.0} if row["step"] > 40 else {keys.TIME.of("rollout"): 2.0})
        for row in rows
    ]
    assert "slow_phase" not in found(longer), "a token takes as long as before"


def test_waiting_for_a_judge_is_told_by_the_judges_rules() -> None:
    judged: Config = CONFIG.replace(**{f"objectives.{F}.judge": {"providers": [{"model": "m"}]}})
    assert "slow_phase" not in found(paced(score=10.0), judged)


def test_the_rules_cost_the_same_of_a_live_and_of_a_stored_run() -> None:
    live = rules.History(CONFIG)
    for row in paced(train=10.0):
        live.append(row)
    assert {finding.rule for finding in rules.check(live, CONFIG)} >= {"slow_phase"}


@pytest.mark.parametrize("preset", presets.PRESETS)
def test_a_healthy_run_of_any_preset_has_no_findings(preset: str) -> None:
    config = presets.PRESETS[preset]()
    assert {f.rule for f in rules.post_mortem(healthy(60), config) if f.severity != "info"} <= {"truncation"}
