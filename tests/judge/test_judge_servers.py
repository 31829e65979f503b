"""What servers of other makers send: refusals in any shape, errors in words, drips, thinking, proxies, addresses."""

import base64
import gzip
import json
import sys
import urllib.parse
from pathlib import Path
from typing import Any, get_args

import pytest

from grpo_nb import presets
from grpo_nb.config import ConfigError, JudgeConfig
from grpo_nb.judge import FILE, trust
from grpo_nb.judge.client import THINKING
from grpo_nb.judge.failures import ADVICE, Kind, advice
from grpo_nb.judge.network import LARGEST_REPLY, proxy_of
from grpo_nb.judge.refusals import LONGEST_SAID, error_text, refused
from grpo_nb.judge.secrets import strike
from grpo_nb.storage.journal import Journal
from tests.support.judge_server import Body, JudgeServer, completion, parts_of, serving
from tests.support.judging import KEY, VARIABLE, F, H, ask, example, judge, provider
from tests.support.tokens import names, pattern

pytestmark = pytest.mark.usefixtures("judge_key")

VERDICT = '{"reason": "by the rules", "score": 3}'
PROXIES = [name for each in ("http_proxy", "https_proxy", "all_proxy", "no_proxy") for name in (each, each.upper())]


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No proxy in the environment, whatever this machine has."""
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


# ---- parameters that a server refuses

NESTED = {"detail": [{"type": "extra_forbidden", "loc": ["body", "seed"], "msg": "Extra inputs are not permitted"}]}
REFUSALS: list[tuple[str, int, Any]] = [
    ("seed", 422, {"object": "error", "message": NESTED, "type": "invalid_request_error", "param": None}),
    ("seed", 422, NESTED),
    ("seed", 422, {"error": "seed: unsupported", "error_type": "validation"}),
    ("seed", 400, {"errors": {"seed": ["is not allowed"]}}),
    ("seed", 400, b"unknown field `seed`, expected one of `model`, `messages`"),
    ("seed", 400, b"<html><head><title>x</title></head><body><h1>Bad Request</h1><p>seed not known</p></body></html>"),
    ("seed", 501, {"error": {"message": "seed is not implemented"}}),
    ("seed", 200, {"error": {"message": "Unsupported parameter: seed", "code": 400}}),
    ("temperature", 400, {"error": {"message": "Unsupported value: 'temperature' does not support 0", "param": "x"}}),
    ("temperature", 400, {"error": {"message": "not with this model", "param": "temperature"}}),
    ("response_format", 400, {"error": {"message": "This model does not support response format `json_schema`."}}),
    ("response_format", 404, {"error": {"message": "No endpoints found that support structured outputs"}}),
    ("response_format", 400, {"message": "no idea"}),
    ("response_format", 422, b""),
]


@pytest.mark.parametrize(("parameter", "status", "body"), REFUSALS)
def test_a_refused_parameter_is_left_out_once_for_all(
    tmp_path: Path, server: JudgeServer, parameter: str, status: int, body: Any
) -> None:
    server.script = lambda request: (status, body) if parameter in request else None
    function = judge(tmp_path, server.url, concurrency=1)
    scores = ask(function, [example()] * 3, ["a", "b", "c"])
    assert all(s.parts["judge"] is not None for s in scores)
    asked = [sorted(request) for request in server.bodies]
    assert len(asked) == 1 + 3 and {*asked[0]} - {*asked[-1]} == {parameter}, "nothing else was left out"
    (notice,) = function.tally.notices
    assert notice["kind"] == "judge_parameters" and notice["refused"] == [parameter]
    ask(function, [example()], ["d"])
    assert function.tally.notices == []


@pytest.mark.parametrize(
    "message",
    [
        "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.",
        "max_tokens: Extra inputs are not permitted",
    ],
)
def test_a_cap_of_another_name_is_renamed(tmp_path: Path, server: JudgeServer, message: str) -> None:
    server.script = lambda request: (400, {"error": {"message": message}}) if "max_tokens" in request else None
    function = judge(tmp_path, server.url, max_tokens=77)
    (verdict,) = ask(function, [example()], ["a"])
    assert verdict.parts["judge"] is not None and server.bodies[-1]["max_completion_tokens"] == 77
    assert function.tally.notices[0]["instead"] == ["max_completion_tokens"]


def test_a_cap_that_is_refused_under_both_names_is_left_out(tmp_path: Path, server: JudgeServer) -> None:
    said_ = "'max_tokens' or 'max_completion_tokens' is too large: 200. The context has 100"
    server.script = lambda request: (400, {"message": said_}) if [k for k in request if k.startswith("max_")] else None
    (verdict,) = ask(judge(tmp_path, server.url), [example()], ["a"])
    assert verdict.parts["judge"] is not None and len(server.bodies) == 3


def test_the_models_own_name_is_no_parameter() -> None:
    assert refused("The model 'Seed-OSS' does not exist", ["seed"], "m") == []
    assert refused("The model `temperature` does not exist", ["temperature"], "temperature") == []
    assert refused("body.seed: no; 'temperature'", ["seed", "temperature", "max_tokens"], "m") == [
        "seed",
        "temperature",
    ]


# ---- errors in the server's words


@pytest.mark.parametrize(
    ("status", "body", "words", "kind"),
    [
        (401, {"detail": "Invalid token"}, "Invalid token", "key"),
        (403, b"<html><body><h1>Forbidden</h1></body></html>", "Forbidden", "key"),
        (402, {"error": {"message": "Insufficient Balance"}}, "Insufficient Balance", "limit"),
        (429, {"error": "slow down, please"}, "slow down, please", "limit"),
        (404, {"error": {"message": "model 'm' not found, try pulling it"}}, "try pulling it", "address"),
        (405, {"detail": "Method Not Allowed"}, "Method Not Allowed", "address"),
        (500, b"CUDA out of memory", "CUDA out of memory", "server"),
        (503, {"error": {"type": "x", "message": "Model is loading"}}, "Model is loading", "server"),
        (413, {"message": "context length exceeded"}, "context length exceeded", "refused"),
        (
            400,
            {"error": {"metadata": {"raw": '{"error": {"message": "upstream says no"}}'}}},
            "upstream says no",
            "refused",
        ),
        (400, {"status": "NOT_OK"}, "NOT_OK", "refused"),
        (200, {"error": {"message": "Provider returned an error"}}, "Provider returned an error", "unreadable"),
        (200, b'"just a string"', "just a string", "unreadable"),
    ],
)
def test_the_servers_sentence_is_in_the_cause(
    tmp_path: Path, server: JudgeServer, status: int, body: Any, words: str, kind: str
) -> None:
    server.headers = {"x-should-retry": "false"}  # else the 429 is sent again until deadline_s
    server.script = lambda request: (status, body)
    function = judge(tmp_path, server.url)
    (verdict,) = ask(function, [example()], ["a"])
    assert verdict.value is None and words in verdict.cause
    assert status == 200 or str(status) in verdict.cause
    assert function.tally.failures == {kind: 1}
    row = function.tally.row(H, [verdict], [1])
    assert words in row[f"judge/{H}/cause"]  # type: ignore[operator]


def test_a_sentence_is_short_on_one_line_and_has_no_control_characters(tmp_path: Path, server: JudgeServer) -> None:
    server.script = lambda request: (400, {"error": {"message": "a\x1b[31m\u202eb\n\n" + "c" * 100_000}})
    (verdict,) = ask(judge(tmp_path, server.url), [example()], ["a"])
    assert "a [31m b ccc" in verdict.cause and verdict.cause.isprintable() and len(verdict.cause) < 500
    assert len(error_text("x" * 10**6)) == LONGEST_SAID
    assert error_text("[" * 100_000) and error_text('{"error": null}') == "" == error_text("")
    assert "secret" not in error_text('{"detail": [{"loc": ["body"], "msg": "no", "input": {"messages": "secret"}}]}')


# ---- the key

CUT = {f"cut at {n}": "A" * (60 - n) + KEY[:n] for n in (9, 15, 20)}
HIDDEN = {
    "as it is": KEY,
    "upper case": KEY.upper(),
    "JSON": "".join(f"\\u{ord(c):04x}" for c in KEY),
    "JSON in JSON": "".join(f"\\\\u{ord(c):04X}" for c in KEY),
    "percent": "".join(f"%{ord(c):02x}" for c in KEY),
    "percent twice": urllib.parse.quote("".join(f"%{ord(c):02X}" for c in KEY)),
    "HTML": "".join(f"&#{ord(c)};" for c in KEY),
    "lines": f"{KEY[:10]}\n{KEY[10:]}",
    "spaces": " ".join(KEY),
    "commas": ", ".join(KEY),
    "hex": KEY.encode().hex(),
    "base64": base64.b64encode(KEY.encode()).decode(),
    "base64 of more": base64.b64encode(f"Bearer {KEY}".encode()).decode(),
    "base64 of a user": base64.urlsafe_b64encode(f"user:{KEY}:x".encode()).decode(),
    "hex of UTF-16": f"Bearer {KEY}".encode("utf-16").hex(),
    "base64 of UTF-16": base64.b64encode(f"Bearer {KEY}".encode("utf-16")).decode(),
    "base64 of UTF-16, big end first": base64.b64encode(f"user:{KEY}:x".encode("utf-16-be")).decode(),
    "begin": f"{KEY[:12]}",
    "end": f"{KEY[-12:]}",
    "middle": f"{KEY[4:16]}",
    **CUT,
}


def pieces(text: str) -> list[str]:
    """Eight characters of the key in a row, in what was written, escaped or not."""
    keys = [KEY, KEY.encode().hex(), *(base64.b64encode(KEY[i:].encode()).decode()[:-4] for i in range(3))]
    found = [key[i : i + 8] for key in keys for i in range(len(key) - 7)]
    for data in (KEY[i:].encode(f"utf-16-{end}") for i in range(3) for end in ("le", "be")):
        wide = [data.hex(), *(base64.b64encode(data[i:]).decode()[:-4] for i in range(3))]
        found += [key[i : i + 16] for key in wide for i in range(len(key) - 15)]
    return [piece for piece in found if piece.lower() in text.lower()]


def told(name: str, written: str) -> tuple[int, Any]:
    """The ways in which a server gives a text back."""
    return {
        "cut": (200, completion("A" * 45 + written, ended="length")),
        "reason": (200, completion(json.dumps({"reason": f"the key is {written}", "score": 2}))),
        "raw": (200, completion(f'{{"reason": "the key is {written}", "score": 2}}'.replace("\n", " "))),
        "prose": (200, completion(f"{'B' * 70}{written}{'C' * 70}")),
        "score": (200, completion(json.dumps({"reason": "", "score": written}))),
        "refusal": (200, {"choices": [{"message": {"content": None, "refusal": "D" * 170 + written}}]}),
        "error": (400, {"error": {"message": "E" * 280 + written}}),
        "page": (502, f"<p>{'F' * 280}{written}</p>".encode()),
        "no completion": (200, {"error": "G" * 250 + written}),
    }[name]


WAYS = ("cut", "reason", "raw", "prose", "score", "refusal", "error", "page", "no completion")


def test_no_piece_of_the_key_reaches_a_file(tmp_path: Path, server: JudgeServer) -> None:
    def script(body: Body) -> tuple[int, Any]:
        way, _, form = parts_of(body)["ANSWER"].partition("/")
        return told(way, HIDDEN[form])

    server.script = script
    texts = [f"{way}/{form}" for way in WAYS for form in ("as it is", "JSON", "base64 of more", "begin", "cut at 9")]
    scores = ask(judge(tmp_path, server.url), [example()] * len(texts), texts)
    for text, verdict in zip(texts, scores, strict=True):
        assert pieces(repr(verdict)) == [], text
    file = (tmp_path / FILE).read_text()
    assert len(file.splitlines()) >= len(texts) and pieces(file) == []
    assert pieces("".join(str(list(row.values())) for row in Journal(tmp_path / FILE).read())) == []


@pytest.mark.parametrize("form", HIDDEN)
def test_the_key_is_struck_out_in_every_form(form: str) -> None:
    for text in (HIDDEN[form], f"x {HIDDEN[form]}.", json.dumps(HIDDEN[form]), repr(HIDDEN[form])):
        assert pieces(strike(text, [KEY])) == [] and "***" in strike(text, [KEY])


def test_words_that_share_little_with_the_key_stay() -> None:
    text = "The context names a person with sk-q9Z, %20q9 and \\u0071: q9Zk 2mX7."
    assert strike(text, ["sk-q9Zk_2mX7vR4tB8wL"]) == text.replace("q9Zk 2mX7", "***")
    assert strike("EMPTY or EMPTYING", ["EMPTY", ""]) == "*** or EMPTYING", "a short one is struck as a word alone"


def test_a_key_that_no_header_can_carry_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("sk-ä", "sk-a\nb"):
        monkeypatch.setenv(VARIABLE, wrong)
        with pytest.raises(ConfigError, match=VARIABLE) as caught:
            judge(tmp_path, "http://h/v1")
        assert wrong not in str(caught.value)


# ---- a reply that drips


def test_a_try_ends_in_time_however_many_bytes_still_come(tmp_path: Path, server: JudgeServer) -> None:
    server.drip = 0.1
    function = judge(tmp_path, server.url, timeout_s=0.4, deadline_s=60)
    (verdict,) = ask(function, [example()], ["a"])
    assert verdict.value is None and function.tally.failures == {"timeout": 1}
    assert "timeout" in ADVICE and "timeout_s" in advice(["timeout"], function.config, "j")


# ---- a model that thinks


def thinking(budget: int) -> Any:
    """A server whose model needs so many tokens before it writes."""
    spent = completion("", ended="length")
    spent["choices"][0]["message"] = {"role": "assistant", "content": None, "reasoning_content": "Let me see. " * 60}

    def script(request: Body) -> tuple[int, Any]:
        spent["usage"] = {"prompt_tokens": 100, "completion_tokens": request["max_tokens"]}
        return 200, completion(VERDICT) if request["max_tokens"] >= budget else spent

    return script


def test_a_model_that_thinks_gets_room_for_it_from_then_on(tmp_path: Path, server: JudgeServer) -> None:
    server.script = thinking(1000)
    function = judge(tmp_path, server.url, concurrency=1, max_tokens=100)
    scores = ask(function, [example()] * 3, ["a", "b", "c"])
    assert [s.parts["judge"] for s in scores] == [0.75] * 3
    assert [body["max_tokens"] for body in server.bodies] == [100] + [100 * THINKING] * 3
    (notice,) = function.tally.notices
    assert notice["kind"] == "judge_thinks" and notice["max_tokens"] == 100 * THINKING
    assert function.tally.tokens == 200 + 3 * 110, "what was cut off was paid"


@pytest.mark.parametrize(
    "content", ["<think>\nLet me see {x}.", "The answer names a person. The context", "", None, "[THINK]Perhaps"]
)
def test_thinking_that_was_cut_off_is_known_in_any_form(tmp_path: Path, server: JudgeServer, content: Any) -> None:
    cut = completion("", ended="length")
    cut["choices"][0]["message"]["content"] = content
    server.script = lambda request: (200, completion(VERDICT) if request["max_tokens"] > 200 else cut)
    (verdict,) = ask(judge(tmp_path, server.url), [example()], ["a"])
    assert verdict.parts["judge"] == 0.75 and len(server.bodies) == 2


def test_room_to_think_keeps_to_the_budget(tmp_path: Path, server: JudgeServer) -> None:
    server.script = thinking(10**9)
    function = judge(tmp_path, server.url, max_tokens=100, budget_tokens=900)
    ask(function, [example()], ["a"])
    assert [body["max_tokens"] for body in server.bodies] == [100, 700]
    again = judge(tmp_path, server.url, objective=F, max_tokens=100, budget_tokens=150)
    ask(again, [example(objective=F)], ["a"])
    assert len(server.bodies) == 3, "no more could be given, so nothing more is asked"


def test_a_model_that_never_stops_thinking_is_said_with_what_to_raise(tmp_path: Path, server: JudgeServer) -> None:
    server.script = thinking(10**9)
    function = judge(tmp_path, server.url)
    (verdict,) = ask(function, [example()], ["a"])
    assert function.tally.failures == {"cut_off": 1} and f"max_tokens={200 * THINKING}" in verdict.cause
    assert "objectives.x.judge.max_tokens (now 200)" in advice(["cut_off"], function.config, "objectives.x.judge")


@pytest.mark.parametrize(
    ("usage", "counted"),
    [
        ({"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}, 110),
        ({"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 610}, 610),
        ({"prompt_tokens": 100, "completion_tokens": 510, "total_tokens": 50}, 610),
    ],
)
def test_thinking_is_paid_wherever_the_server_counts_it(
    tmp_path: Path, server: JudgeServer, usage: Any, counted: int
) -> None:
    server.reply = {**completion(VERDICT), "usage": usage}
    function = judge(tmp_path, server.url)
    ask(function, [example()], ["a"])
    assert function.tally.tokens == counted


def test_a_text_in_parts_is_put_together(tmp_path: Path, server: JudgeServer) -> None:
    reply = completion("")
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}
    reply["choices"][0]["message"]["content"] = [thought, {"type": "text", "text": VERDICT}]
    server.reply = reply
    (verdict,) = ask(judge(tmp_path, server.url), [example()], ["a"])
    assert verdict.parts["judge"] == 0.75


# ---- the way there


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_a_proxy_that_does_not_answer_is_named(
    tmp_path: Path, server: JudgeServer, direct: pytest.MonkeyPatch, variable: str
) -> None:
    direct.setenv(variable, "http://me:secret-word@127.0.0.1:9")
    function = judge(tmp_path, server.url)
    (verdict,) = ask(function, [example()], ["a"])
    assert function.tally.failures == {"proxy": 1} and server.bodies == []
    assert all(word in verdict.cause for word in (variable, "http://127.0.0.1:9", "NO_PROXY=127.0.0.1"))
    assert "secret-word" not in (tmp_path / FILE).read_text()
    direct.setenv("NO_PROXY", "127.0.0.1")
    (verdict,) = ask(judge(tmp_path, server.url), [example()], ["a"])
    assert verdict.parts["judge"] is not None


def test_a_proxy_that_refuses_is_named(tmp_path: Path, server: JudgeServer, direct: pytest.MonkeyPatch) -> None:
    with serving(JudgeServer()) as proxy:
        proxy.script = lambda request: (503, b"<html><h1>Squid cannot do that</h1></html>")
        direct.setenv("HTTP_PROXY", proxy.url.removesuffix("/v1"))
        function = judge(tmp_path, server.url)
        (verdict,) = ask(function, [example()], ["a"])
    assert function.tally.failures == {"proxy": 1} and "Squid" in verdict.cause and "HTTP_PROXY" in verdict.cause


def test_the_proxy_of_an_address(direct: pytest.MonkeyPatch) -> None:
    direct.setenv("https_proxy", "http://a:3128")
    direct.setenv("ALL_PROXY", "b:3129")
    direct.setenv("NO_PROXY", ".inside.example,10.0.0.1")
    assert names(str(proxy_of("https://api.openai.com/v1")), "http://a:3128", "https_proxy")
    assert proxy_of("http://h:8000/v1").address == "http://b:3129"  # type: ignore[union-attr]
    assert proxy_of("http://gpu.inside.example:8000/v1") is None is proxy_of("http://10.0.0.1/v1")


def test_a_proxy_that_no_client_can_use_is_said_before_any_work(tmp_path: Path, direct: pytest.MonkeyPatch) -> None:
    trust(VARIABLE, "https://h")
    direct.setitem(sys.modules, "socksio", None)
    direct.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"ALL_PROXY .*socksio"):
        judge(tmp_path, "https://h/v1")
    direct.setenv("ALL_PROXY", "gopher://me:secret-word@h")
    with pytest.raises(ConfigError, match="ALL_PROXY") as caught:
        judge(tmp_path, "https://h/v1")
    assert "secret-word" not in str(caught.value)


@pytest.mark.parametrize("end", ["", "/v1/chat/completions", "/api"])
def test_a_wrong_address_is_in_the_cause(tmp_path: Path, server: JudgeServer, end: str) -> None:
    base = server.url.removesuffix("/v1") + end
    server.script = lambda request: (404, b"<html><h1>Not Found</h1></html>")
    (verdict,) = ask(judge(tmp_path, base), [example()], ["a"])
    assert f"{base}/chat/completions" in verdict.cause and "/v1" in verdict.cause and "base_url" in verdict.cause


def test_the_address_of_the_environment_is_heeded_where_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def address() -> str:
        return JudgeConfig.model_validate({"providers": [{"model": "m"}]}).providers[0].base_url

    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    assert address() == "https://api.openai.com/v1"
    monkeypatch.setenv("OPENAI_BASE_URL", "http://localhost:8000/v1/")
    assert address() == "http://localhost:8000/v1"
    given = JudgeConfig.model_validate({"providers": [provider("http://h/v1")]})
    assert given.providers[0].base_url == "http://h/v1"
    monkeypatch.setenv("OPENAI_BASE_URL", "localhost:8000")
    with pytest.raises(ConfigError, match=r"base_url: .* OPENAI_BASE_URL"):
        presets.demo().replace(**{f"objectives.{F}.judge": {"providers": [{"model": "m"}]}})


# ---- advice


def test_every_kind_of_failure_has_its_own_advice() -> None:
    assert set(ADVICE) == set(get_args(Kind))
    config = JudgeConfig.model_validate({"providers": [provider("http://h/v1"), provider("http://i/v1")]})
    written = {kind: advice([kind], config, "objectives.x.judge") for kind in ADVICE}
    assert len(set(written.values())) == len(ADVICE) and not any("{" in text for text in written.values())
    assert VARIABLE in written["key"] and "rules@h, rules@i" in written["server"]
    both = advice(["timeout", "cut_off"], config, "x")
    assert "x.timeout_s" in both and "x.max_tokens" in both
    assert advice([], config, "x") == advice(["request"], config, "x")


def test_a_key_goes_over_plain_http_to_no_proxy_elsewhere(tmp_path: Path, direct: pytest.MonkeyPatch) -> None:
    direct.setenv("HTTP_PROXY", "http://proxy.example:3128")
    with pytest.raises(ConfigError, match=pattern(VARIABLE, "HTTP_PROXY", "NO_PROXY=127.0.0.1")):
        judge(tmp_path, "http://127.0.0.1:8000/v1")
    direct.setenv("NO_PROXY", "127.0.0.1")
    judge(tmp_path, "http://127.0.0.1:8000/v1")


@pytest.mark.parametrize("scheme", ["HTTP", "Http"])
def test_plain_http_is_known_by_its_scheme_however_written(tmp_path: Path, scheme: str) -> None:
    with pytest.raises(ConfigError, match=pattern(VARIABLE, "https")):
        judge(tmp_path, f"{scheme}://judge.example/v1")
    with pytest.raises(ConfigError, match=pattern(VARIABLE, "https")):
        trust(VARIABLE, f"{scheme}://judge.example/v1")


@pytest.mark.parametrize("port", ["80000", "abc", "-1"])
def test_an_address_whose_port_is_none_is_refused_with_the_settings(port: str) -> None:
    with pytest.raises(ConfigError, match="base_url"):
        presets.demo().replace(**{f"objectives.{F}.judge": {"providers": [provider(f"http://localhost:{port}/v1")]}})


@pytest.mark.parametrize("coding", ["identity", "gzip"])
def test_a_flood_is_cut_off(tmp_path: Path, server: JudgeServer, coding: str) -> None:
    """More than the bytes that are read, in the clear or packed into a few."""
    flood = b'{"choices": [' + b" " * (LARGEST_REPLY + 1) + b"]}"
    server.headers = {} if coding == "identity" else {"Content-Encoding": coding}
    server.script = lambda request: (200, flood if coding == "identity" else gzip.compress(flood))
    function = judge(tmp_path, server.url, retries=0)
    (verdict,) = ask(function, [example()], ["a"])
    assert verdict.value is None and (str(LARGEST_REPLY) if coding == "identity" else "gzip") in verdict.cause
