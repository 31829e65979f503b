"""A judge in trouble, and what it costs: failures, several providers, the cache, the budget, the key, settings."""

import json
import logging
import math
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from grpo_nb import presets
from grpo_nb.config import ConfigError, JudgeConfig
from grpo_nb.config.setting_keys import settings
from grpo_nb.judge import FILE, Judge, ledger, prompts
from grpo_nb.storage.journal import Journal
from tests.support.fault_proxy import FAULTS, FaultProxy
from tests.support.judge_server import JudgeServer, by_text, completion, serving
from tests.support.judging import KEY, TASK, TEXTS, VARIABLE, F, H, ask, example, given_by, judge, provider
from tests.support.tokens import names, pattern

pytestmark = pytest.mark.usefixtures("judge_key")


# ---- failures


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_is_none_with_its_cause(tmp_path: Path, server: JudgeServer, fault: str) -> None:
    words = {
        "429": "RateLimitError",
        "500": "InternalServerError",
        "slow": "0.5 s",
        "cut": "RemoteProtocolError",
        "html": "completion",
        "prose": "JSON object",
        "half": "body",
    }
    with serving(FaultProxy(server.url, share=1.0, slow=1.0, faults=(fault,))) as proxy:
        limits: dict[str, Any] = {"429": {"deadline_s": 1}, "slow": {"timeout_s": 0.5}}
        function = judge(tmp_path, proxy.url, **limits.get(fault, {}))
        scores = ask(function, [example()] * 2, TEXTS[:2])
    assert [(s.value, s.parts["judge"]) for s in scores] == [(None, None)] * 2
    for s in scores:
        assert names(s.cause, "'judge'", "rules@127.0.0.1:", words[fault])
    assert function.tally.failures.total() == 2 and function.tally.dropped_groups == 1
    assert all(row["score"] is None and row["cause"] for row in Journal(tmp_path / FILE).read())


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    with serving(JudgeServer()) as gone:
        url = gone.url
    (verdict,) = ask(judge(tmp_path, url), [example()], TEXTS[:1])
    assert verdict.value is None and names(verdict.cause, "ConnectError")


def test_retries_bring_what_a_passing_fault_held_back(tmp_path: Path, server: JudgeServer) -> None:
    with serving(FaultProxy(server.url, share=0.5, faults=("429", "500"))) as proxy:
        scores = ask(judge(tmp_path, proxy.url, retries=8), [example()] * 12, [f"a {i}" for i in range(12)])
    assert proxy.done["429"] and proxy.done["500"]
    assert [s.parts["judge"] for s in scores] == [given_by(server)[f"a {i}"] for i in range(12)]


RIGHT = '{"reason": "as the context says", "score": 4}'


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (completion('{"reason": "because', ended="length"), "max_tokens"),
        ({"choices": []}, "completion"),
        ({"choices": [{"message": {"content": None, "refusal": "I may not"}}]}, "I may not"),
        ({"choices": {"0": 1}}, "completion"),
        (completion(RIGHT, ended="error"), "error"),
        ({**completion(RIGHT), "error": {"message": "upstream broke"}}, "upstream broke"),
        ({"choices": [{**completion(RIGHT)["choices"][0], "error": {"message": "upstream broke"}}]}, "upstream broke"),
        ({"choices": [{"message": {"content": RIGHT, "refusal": "I may not"}, "finish_reason": "stop"}]}, "I may not"),
        ([1, 2], "completion"),
        ({"choices": [{"message": {"content": 4}, "finish_reason": "stop"}]}, "completion"),
    ],
)
def test_replies_of_a_wrong_form(tmp_path: Path, server: JudgeServer, reply: Any, words: str) -> None:
    server.reply = reply
    (verdict,) = ask(judge(tmp_path, server.url), [example()], TEXTS[:1])
    assert verdict.value is None and names(verdict.cause, words)


def test_the_deadline_ends_a_step(tmp_path: Path, server: JudgeServer) -> None:
    ended = threading.Event()

    def only_the_first(parts: dict[str, str]) -> int:
        return 3 if len(server.bodies) == 1 or ended.wait(60) else 0

    server.grade = only_the_first
    function = judge(tmp_path, server.url, timeout_s=60, deadline_s=3, concurrency=1)
    scores = ask(function, [example(i) for i in range(8)], ["Answer: x"] * 8)
    ended.set()
    assert [s.value is None for s in scores] == [False] + [True] * 7
    assert all("deadline_s" in s.cause for s in scores[1:])
    assert function.tally.failures == {"deadline": 7}


def test_no_more_requests_at_a_time_than_allowed(tmp_path: Path, server: JudgeServer) -> None:
    server.delay = 0.05
    ask(judge(tmp_path, server.url, concurrency=3), [example()] * 12, [f"a {i}" for i in range(12)])
    assert server.busiest == 3


# ---- several providers


def test_a_group_is_never_mixed(tmp_path: Path, server: JudgeServer) -> None:
    """The first server cannot judge one answer of the first group: the second judges all of that group, and only it."""

    def picky(parts: dict[str, str]) -> int:
        return 99 if "bad" in parts["ANSWER"] else 1

    texts = ["a", "bad", "c", "d", "e", "f"]
    examples = [example(0)] * 3 + [example(1)] * 3
    with serving(JudgeServer(picky, key=KEY)) as first:
        server.grade = lambda parts: 4
        function = judge(tmp_path, first.url, server.url)
        scores = ask(function, examples, texts)
        resumed = judge(tmp_path, first.url, server.url)
        again = ask(resumed, examples, texts)
    assert [s.parts["judge"] for s in scores] == [1.0, 1.0, 1.0, 0.25, 0.25, 0.25]
    assert sorted(text for text, _ in server.given) == ["a", "bad", "c"]
    row = function.tally.row(H, scores, [1] * 6)
    assert row[f"judge/{H}/first_provider"] == 0.5 and row[f"judge/{H}/dropped_groups"] == 0
    assert [s.parts["judge"] for s in again] == [s.parts["judge"] for s in scores]
    assert resumed.tally.replies == [], "known whole from the second, so the first is not asked again"


def test_where_all_fail_the_group_is_dropped_with_every_cause(tmp_path: Path, server: JudgeServer) -> None:
    with serving(JudgeServer(lambda parts: 99 if parts["ANSWER"] == "a" else 2, key=KEY)) as first:
        server.grade = lambda parts: 99
        function = judge(tmp_path, first.url, server.url)
        scores = ask(function, [example()] * 3, ["a", "b", "c"])
    assert [s.parts["judge"] for s in scores] == [None, 0.5, 0.5], "what is there comes from one provider"
    causes = scores[0].cause.split("; ")
    assert len(causes) == 2 and all(names(cause, "rules@127.0.0.1:", 99) for cause in causes)
    assert function.tally.dropped_groups == 1 and function.tally.failures == {"unreadable": 1}


def test_two_providers_that_fail_on_different_answers_do_not_fill_up_each_other(
    tmp_path: Path, server: JudgeServer
) -> None:
    with serving(JudgeServer(lambda parts: 99 if parts["ANSWER"] == "a" else 0, key=KEY)) as first:
        server.grade = lambda parts: 99 if parts["ANSWER"] == "b" else 4
        scores = ask(judge(tmp_path, first.url, server.url), [example()] * 3, ["a", "b", "c"])
    assert [s.parts["judge"] for s in scores] == [None, 0.0, 0.0], "the second's 1.0 for `a` is not borrowed"


def test_the_first_provider_leaves_the_second_its_share_of_the_deadline(tmp_path: Path, server: JudgeServer) -> None:
    with serving(JudgeServer(key=KEY)) as hanging:
        hanging.delay = 12.0
        (verdict,) = ask(judge(tmp_path, hanging.url, server.url, timeout_s=9, deadline_s=4.0), [example()], ["a"])
        assert verdict.parts["judge"] == given_by(server)["a"]


@pytest.mark.parametrize("refuses", [("response_format",), ("seed",), ("response_format", "seed", "temperature")])
def test_a_server_that_cannot_do_all_is_asked_for_less(
    tmp_path: Path, server: JudgeServer, refuses: tuple[str, ...]
) -> None:
    server.refuses = refuses
    function = judge(tmp_path, server.url, concurrency=1)
    scores = ask(function, [example()] * 3, ["a", "b", "c"])
    assert all(s.parts["judge"] is not None for s in scores)
    assert len(server.bodies) == 3 + len(refuses), "refused once each, then remembered"
    assert not set(server.bodies[-1]) & set(refuses)


def test_a_request_that_stays_wrong_fails_with_the_servers_words(tmp_path: Path, server: JudgeServer) -> None:
    server.refuses = ("model",)
    (verdict,) = ask(judge(tmp_path, server.url), [example()], ["a"])
    assert verdict.value is None and names(verdict.cause, "parameter: model")


# ---- cache


def test_a_second_run_over_the_same_texts_asks_nothing(tmp_path: Path, server: JudgeServer) -> None:
    first = ask(judge(tmp_path, server.url), [example()] * 4, TEXTS)
    server.grade = lambda parts: 0
    function = judge(tmp_path, server.url)
    second = ask(function, [example()] * 4, TEXTS)
    assert [s.parts["judge"] for s in first] == [s.parts["judge"] for s in second]
    assert len(server.bodies) == 4 and function.tally.cached == 4 and function.tally.replies == []


def test_a_torn_last_line_costs_one_verdict(tmp_path: Path, server: JudgeServer) -> None:
    ask(judge(tmp_path, server.url), [example()] * 4, TEXTS)
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes()[:-30])
    scores = ask(judge(tmp_path, server.url), [example()] * 4, TEXTS)
    assert all(s.parts["judge"] is not None for s in scores) and len(server.bodies) == 5
    assert [row["score"] for row in Journal(path).read()].count(None) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        *({"tokens_in": "many"}, {"usd": "1.5"}, {"tokens_out": -5}, {"usd": [1]}),
        *({"tokens_in": math.inf}, {"usd": math.inf}, {"usd": math.nan}, {"tokens_out": 2**70}, {"usd": 10**400}),
    ],
)
def test_an_account_that_cannot_be_read_is_one_clear_error(
    tmp_path: Path, server: JudgeServer, wrong: dict[str, Any]
) -> None:
    ask(judge(tmp_path, server.url), [example()], TEXTS[:1])
    Journal(tmp_path / FILE).append({"objective": F, **wrong})
    assert judge(tmp_path, server.url).tally.tokens == 110, "rows of other judges are none of its business"
    Journal(tmp_path / FILE).append({"objective": H, **wrong})
    with pytest.raises(ConfigError, match=pattern("judge.jsonl", "'hallucination'")):
        judge(tmp_path, server.url)


def test_of_a_reason_in_the_file_no_more_is_kept_than_is_written(tmp_path: Path) -> None:
    row = {"objective": H, "key": "k", "score": 3, "reason": "r" * 10**6, "tokens_in": 1, "tokens_out": 1, "usd": 0.0}
    Journal(tmp_path / FILE).append(row)
    config = JudgeConfig(providers=(provider("http://127.0.0.1:1/v1"),))
    known = ledger.Ledger(H, config, Journal(tmp_path / FILE)).known("k")
    assert known is not None and (known.score, len(known.reason)) == (3, ledger.LONGEST_REASON)


def test_a_reason_without_end_is_kept_short(tmp_path: Path, server: JudgeServer) -> None:
    server.says = lambda body: json.dumps({"reason": "x" * 100_000, "score": 3})
    (verdict,) = ask(judge(tmp_path, server.url), [example()], TEXTS[:1])
    assert verdict.parts["judge"] == 0.75 and (tmp_path / FILE).stat().st_size < 2000


def test_the_key_of_the_cache_is_all_that_a_verdict_hangs_on(
    tmp_path: Path, server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked() -> int:
        before = len(server.bodies)
        ask(judge(tmp_path, server.url), [example()], ["a"])
        return len(server.bodies) - before

    assert (asked(), asked()) == (1, 0)
    monkeypatch.setattr(ledger, "VERSION", 2)
    assert (asked(), asked()) == (1, 0)
    monkeypatch.setattr(prompts, "_CLOSING", prompts._CLOSING + " Please.")
    assert (asked(), asked()) == (1, 0)
    other = JudgeConfig.model_validate({"providers": [provider(server.url, model="other")]})
    ask(Judge(H, TASK[H], other, Journal(tmp_path / FILE)), [example()], ["a"])
    ask(judge(tmp_path, server.url), [example(1)], ["a"])
    assert len(server.bodies) == 5


def test_without_the_cache_it_is_asked_again(tmp_path: Path, server: JudgeServer) -> None:
    for _ in range(2):
        ask(judge(tmp_path, server.url, cache=False), [example()], ["a"])
    assert len(server.bodies) == 2 and len(Journal(tmp_path / FILE).read()) == 2


@pytest.mark.parametrize("cache", [True, False])
def test_equal_answers_are_asked_about_once_a_step(tmp_path: Path, server: JudgeServer, cache: bool) -> None:
    scores = ask(judge(tmp_path, server.url, cache=cache), [example()] * 4, ["a", "a", "b", "a"])
    assert len(server.bodies) == 2 and len({s.parts["judge"] for s in scores}) == 2


def test_failures_are_not_kept(tmp_path: Path, server: JudgeServer) -> None:
    server.grade = lambda parts: 99
    ask(judge(tmp_path, server.url), [example()], ["a"])
    server.grade = by_text
    (verdict,) = ask(judge(tmp_path, server.url), [example()], ["a"])
    assert verdict.parts["judge"] is not None


# ---- budget


def test_at_the_end_of_its_budget_nothing_more_is_asked(tmp_path: Path, server: JudgeServer) -> None:
    function = judge(tmp_path, server.url, budget_tokens=330, concurrency=1)
    scores = ask(function, [example()] * 5, [f"a {i}" for i in range(5)])
    assert len(server.bodies) == 3 and [s.value is None for s in scores] == [False] * 3 + [True] * 2
    assert names(scores[-1].cause, 330, "budget_tokens=330") and function.tally.failures == {"budget": 2}
    with pytest.raises(ConfigError, match=pattern(330, "budget_tokens=330", "objectives")):
        judge(tmp_path, server.url, budget_tokens=330)
    assert judge(tmp_path, server.url, budget_tokens=331).tally.tokens == 330


def test_a_budget_in_money(tmp_path: Path, server: JudgeServer) -> None:
    priced = {**provider(server.url), "usd_per_million_in": 1000.0, "usd_per_million_out": 5000.0}
    function = judge(tmp_path, providers=[priced], budget_usd=0.3, concurrency=1)
    ask(function, [example()] * 5, [f"a {i}" for i in range(5)])
    assert len(server.bodies) == 2 and function.tally.usd == pytest.approx(2 * (0.1 + 0.05))


def test_an_unreadable_reply_is_paid_too(tmp_path: Path, server: JudgeServer) -> None:
    server.says = lambda body: "I cannot decide"
    function = judge(tmp_path, server.url)
    ask(function, [example()], ["a"])
    assert function.tally.tokens == 220 and function.tally.unreadable == 2, "it was asked for twice"


# ---- the key


def test_the_key_is_nowhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not even where a server repeats it in its error, or the model in its verdict."""
    caplog.set_level(logging.DEBUG)
    with serving(JudgeServer(key="another")) as strict, serving(JudgeServer(key=KEY)) as gossip:
        gossip.says = lambda body: json.dumps({"reason": f"the key is {KEY}", "score": 2})
        functions = [judge(tmp_path, strict.url), judge(tmp_path, gossip.url)]
        scores = [ask(function, [example()], ["a"])[0] for function in functions]
    assert "AuthenticationError" in scores[0].cause and "Bearer ***" in scores[0].cause
    assert scores[1].parts["judge"] == 0.5
    seen = [(tmp_path / FILE).read_text(), caplog.text, repr(scores), repr(vars(functions[0])), repr(functions)]
    seen += [repr(vars(endpoint)) for function in functions for endpoint in function._endpoints]
    assert not any(KEY in text for text in seen)
    assert "the key is ***" in seen[0]


def test_a_key_in_place_of_its_name_is_refused_and_not_repeated() -> None:
    for wrong in ("sk-proj-abcDEF123", "hf_abcdefgh", "my key", ""):
        with pytest.raises(ConfigError) as caught:
            judged(providers=[{"model": "m", "api_key_env": wrong}])
        assert names(str(caught.value), "api_key_env", "NAME")
        assert not wrong or wrong not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["http://user:sk-abc@h/v1", "https://sk-abc@h/v1", "https://h/v1?key=sk-abc", "ftp://sk-abc", "sk-abc"]
)
def test_an_address_with_a_key_in_it_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError, match=r"objectives\.hallucination\.judge\.providers\.0\.base_url: ") as caught:
        judged(providers=[{"model": "m", "base_url": url}])
    assert "sk-abc" not in str(caught.value)


# ---- settings


def judged(**changes: Any) -> Any:
    return presets.demo().replace(**{f"objectives.{H}.judge": {"providers": [{"model": "m"}], **changes}})


def test_settings_that_do_not_fit_together() -> None:
    with pytest.raises(ConfigError, match=pattern("m@api.openai.com")):
        judged(providers=[{"model": "m"}, {"model": "m"}])
    with pytest.raises(ConfigError, match=pattern("budget_usd=3", "usd_per_million_in", "m@api.openai.com")):
        judged(budget_usd=3)
    with pytest.raises(ConfigError, match=r"\bproviders\b"):
        judged(providers=[])


@pytest.mark.parametrize(
    "wrong",
    [KEY, [KEY], {"providers": [KEY]}, {"providers": KEY}, {"providers": [{"api_key": KEY}]}, {"weight": KEY}],
)
def test_a_key_anywhere_in_the_settings_is_refused_and_not_repeated(wrong: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        presets.demo().replace(**{f"objectives.{H}.judge": wrong})
    assert KEY not in str(caught.value) and f"objectives.{H}.judge" in str(caught.value)


def test_settings_with_a_judge_survive_json_and_are_listed() -> None:
    config = judged(weight=0.02)
    judge_settings = config.objectives[H].judge
    assert judge_settings.weight == 0.02 and judge_settings.providers[0].label == "m@api.openai.com"
    texts = {setting.key: setting.text for setting in settings(config)}
    assert json.loads(texts[f"objectives.{H}.judge.providers"])[0]["model"] == "m"


def test_what_is_missing_is_said_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=pattern("objectives.x.judge", "'capitals'", "bbq")):
        Judge("x", "capitals", judged().objectives[H].judge, Journal(tmp_path / FILE))
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(ConfigError, match=pattern(VARIABLE, "rules@h")):
        judge(tmp_path, "http://h/v1")
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ConfigError, match=r'pip install "grpo_nb\[judge\]"'):
        judge(tmp_path, "http://h/v1")


def test_a_server_without_a_key_gets_none_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with serving(JudgeServer(key="none")) as keyless:
        open_ = {"model": "m", "base_url": keyless.url, "api_key_env": None}
        (verdict,) = ask(judge(tmp_path, providers=[open_]), [example()], ["a"])
    assert verdict.parts["judge"] is not None
