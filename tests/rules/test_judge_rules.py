"""Each rule about a judge fires on its failure with its numbers, and is silent on a judge that does its work."""

from typing import Any

import pytest

from grpo_nb import presets, rules
from grpo_nb.config import Config
from grpo_nb.rules.finding import Finding
from tests.support.made_rows import Row, healthy, ill
from tests.support.tokens import names

H = "hallucination"
JUDGE: dict[str, Any] = {
    "providers": [{"model": "a", "base_url": "http://h/v1"}, {"model": "b"}],
    "budget_tokens": 90_000,
}
CONFIG = presets.demo().replace(**{"run.steps": 60, f"objectives.{H}.judge": JUDGE})


def judged(row: Row, **changes: Any) -> Row:
    """What a healthy judge adds to a row; names without their objective."""
    values: Row = {
        "judge/scored": 32,
        "judge/failed": 0,
        "judge/first_provider": 1.0,
        "judge/low": 0.25,
        "judge/high": 1.0,
        "judge/agreement": 0.7,
        "judge/length_correlation": 0.2 if row["step"] % 2 else -0.1,
        "cost/judge_tokens": 1000 * row["step"],
        "cost/judge_usd": 0.0,
        "time/judge": 0.4,
        "time/judge_p95": 0.3,
    }
    values |= {key.replace("__", "/"): value for key, value in changes.items()}
    new = {key: value for key, value in values.items() if key != "time/step"}
    named = {_with_objective(key): value for key, value in new.items()}
    return row | named | {key: value for key, value in values.items() if key not in new}


def _with_objective(key: str) -> str:
    group, _, name = key.partition("/")
    return f"judge/{H}/{name}" if group == "judge" else f"{key}/{H}"


def found(rows: list[Row], config: Config = CONFIG) -> dict[str, Finding]:
    return {f.rule: f for f in rules.post_mortem(rows, config) if f.rule.startswith("judge")}


def only(rows: list[Row], rule: str, config: Config = CONFIG) -> Finding:
    findings = found(rows, config)
    assert list(findings) == [rule], findings
    assert findings[rule].evidence["objective"] == H and str(findings[rule]).count(H) >= 1
    return findings[rule]


def sick(since: int = 40, steps: int = 60, **changes: Any) -> list[Row]:
    rows = ill(lambda row: judged(row), steps=steps)
    return [judged(row, **changes) if row["step"] >= since else row for row in rows]


def test_a_judge_that_does_its_work_has_no_findings() -> None:
    for steps in (1, 2, 3, 10, 60):
        assert found(sick(since=99, steps=steps)) == {}
    assert found(healthy()) == {}, "nor has a run without its numbers"


def test_no_judge_in_the_settings_no_budget_and_no_failure() -> None:
    plain = presets.demo()
    assert found(sick(judge__scored=0, judge__failed=32, cost__judge_tokens=10**9, time__judge=99.0), plain) == {}


def test_a_judge_that_always_fails_ends_the_run_in_order() -> None:
    failing = {"judge__scored": 0, "judge__failed": 32, "judge__low": None, "judge__high": None}
    failing |= {"judge__agreement": None, "judge__length_correlation": None, "judge__first_provider": None}
    rows = [row | {f"judge/{H}/failure/request": 30, f"judge/{H}/failure/deadline": 2} for row in sick(58, **failing)]
    finding = only(rows, "judge_failed")
    assert (finding.severity, finding.action) == ("error", "end")
    assert names(finding.message, 96, 3, "(deadline, request)")
    assert names(finding.advice, "a@h, b@api.openai.com")
    assert found(sick(59, **failing)) == {}, "two steps are no trend"
    told = {"judge__failed": 32, "judge__scored": 0, "judge__cause": "a@h: 200 tokens were not enough"}
    finding = only(sick(58, **told, **{"judge__failure/cut_off": 32}), "judge_failed")
    assert f"objectives.{H}.judge.max_tokens (now 200)" in finding.advice and told["judge__cause"] in finding.message
    finding = only(sick(58, **told, **{"judge__failure/key": 32}), "judge_failed")
    assert "OPENAI_API_KEY" in finding.advice and "max_tokens" not in finding.advice
    assert found(sick(58, **failing | {"judge__scored": 1})) == {}
    assert found(sick(58, **failing | {"judge__failed": 0})) == {}, "nothing asked, nothing failed"


def test_a_budget_that_is_used_up_ends_the_run_in_order() -> None:
    finding = only(sick(60, cost__judge_tokens=90_000), "judge_budget")
    assert finding.action == "end" and names(finding.message, 90000, 0, "budget_tokens=90000")
    assert names(finding.advice, f"objectives.{H}.judge.budget_tokens", 1500)
    assert found(sick(60, cost__judge_tokens=89_999)) == {}
    priced = {"model": "a", "usd_per_million_in": 1.0, "usd_per_million_out": 2.0}
    money = CONFIG.replace(**{f"objectives.{H}.judge": {"providers": [priced], "budget_usd": 2.5}})
    assert names(only(sick(60, cost__judge_usd=2.5), "judge_budget", money).message, 2.5, "budget_usd=2.5")
    assert found(sick(60, cost__judge_usd=2.4), money) == {}
    assert (
        found(sick(60, cost__judge_tokens=10**9), CONFIG.replace(**{f"objectives.{H}.judge.budget_tokens": None})) == {}
    )


def test_a_judge_that_says_the_same_of_everything() -> None:
    finding = only(sick(50, judge__low=0.5, judge__high=0.5), "judge_constant")
    assert "all 320 verdicts" in finding.message and "are 0.5" in finding.message
    assert found(sick(52, judge__low=0.5, judge__high=0.5)) == {}, "one step in the window was different"
    few = sick(1, steps=10, judge__low=0.5, judge__high=0.5, judge__scored=1)
    assert found(few) == {}, "ten verdicts may well be equal"


@pytest.mark.parametrize(("correlation", "word"), [(0.6, "long"), (-0.6, "short")])
def test_a_judge_that_counts_words(correlation: float, word: str) -> None:
    finding = only(sick(judge__length_correlation=correlation, judge__agreement=0.3), "judge_length")
    assert names(finding.message, word, f"{correlation:.2f}", "0.30")
    assert found(sick(judge__length_correlation=correlation, judge__agreement=0.65)) == {}, "right answers are long"
    unmeasured = found(sick(judge__length_correlation=correlation, judge__agreement=None, since=1))["judge_length"]
    assert unmeasured.evidence["agreement"] is None


def test_a_judge_against_the_task() -> None:
    assert "correlation -0.40" in only(sick(judge__agreement=-0.4), "judge_disagrees").message
    assert found(sick(judge__agreement=-0.1)) == {}


def test_a_judge_that_is_waited_for() -> None:
    finding = only(sick(time__judge=8.0, time__judge_p95=4.0, time__step=10.0), "judge_slow")
    assert names(finding.message, "8.0 s", "10.0 s", "4.0 s")
    assert names(finding.advice, "judge.concurrency", 32)
    limited = only(sick(time__judge=8.0, time__step=10.0, cost__judge_limited=40.0), "judge_slow")
    assert names(limited.advice, 40) and "concurrency" not in limited.advice
    assert found(sick(time__judge=8.0, time__step=20.0)) == {} == found(sick(time__judge=2.0, time__step=2.5))


def test_verdicts_of_a_fallback() -> None:
    finding = only(sick(judge__first_provider=0.75), "judge_fallback")
    assert names(finding.message, "25%", "a@h")
    assert found(sick(judge__first_provider=0.95)) == {}


def test_a_failure_that_has_a_score_is_an_error_at_once() -> None:
    finding = only(sick(since=60, judge__failed=1, **{"judge__failure/server": 4}), "judge_failure_scored")
    assert finding.step == 60 and finding.severity == "error"
    assert finding.evidence["failures"] == {"server": 4} and finding.evidence["unscored"] == 1


def test_failures_without_a_score_are_what_they_should_be() -> None:
    assert "judge_failure_scored" not in found(sick(judge__failed=4, **{"judge__failure/server": 4}))
