"""A config from elsewhere cannot choose which environment variable goes to which host."""

import json
import shutil
import stat
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from grpo_nb import cli, presets
from grpo_nb.config import Config, ConfigError, JudgeConfig
from grpo_nb.judge import host_trust, trust
from grpo_nb.judge.client import check_ready
from grpo_nb.judge.host_trust import Pair, file, origin
from grpo_nb.judge.network import _keep_private
from grpo_nb.preflight.requirements import check_judges
from grpo_nb.run.run import Run
from tests.support.judging import KEY, TEXTS, ask, example, judge
from tests.support.tokens import pattern

VARIABLE, HOST = "SOME_SECRET", "https://judge.example.org"


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(host_trust.FOLDER, str(tmp_path / "configuration"))
    monkeypatch.setattr(host_trust, "_here", set())
    for name in (VARIABLE, "OTHER_SECRET", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "sk-1234567890")


def judged(url: str = f"{HOST}/v1", variable: str | None = VARIABLE) -> JudgeConfig:
    return JudgeConfig.model_validate({"providers": [{"model": "m", "base_url": url, "api_key_env": variable}]})


def config(url: str = f"{HOST}/v1", variable: str | None = VARIABLE) -> Config:
    return presets.demo().replace(**{"objectives.fairness.judge": judged(url, variable).model_dump(mode="json")})


def copied(tmp_path: Path, settings: Config) -> Run:
    """A run that came from elsewhere: no code of this machine made it."""
    folder = tmp_path / "copied"
    made = Run.create(tmp_path / "theirs", presets.demo())
    shutil.copytree(made.path, folder)
    (folder / "config.json").write_text(json.dumps(settings.model_dump(mode="json")))
    return Run.open(folder)


def test_a_pair_of_key_and_host_is_confirmed_once(tmp_path: Path) -> None:
    run = copied(tmp_path, config())
    with pytest.raises(ConfigError) as refused:
        check_judges(run.config)
    for said in (VARIABLE, "https://judge.example.org:443", "--yes", "from grpo_nb.judge import trust"):
        assert said in str(refused.value)
    assert "sk-1234567890" not in str(refused.value) and "\n" not in str(refused.value)
    trust(VARIABLE, HOST)
    check_judges(run.config)
    check_ready("here", judged("https://JUDGE.example.org:443/other/path").providers)
    assert stat.S_IMODE(file().stat().st_mode) == 0o600 and stat.S_IMODE(file().parent.stat().st_mode) == 0o700
    assert "sk-1234567890" not in file().read_text()


@pytest.mark.parametrize(
    ("url", "variable"),
    [
        (f"{HOST}/v1", "OTHER_SECRET"),
        (f"{HOST}:8443/v1", VARIABLE),
        ("https://judge.example.org.evil.org/v1", VARIABLE),
        ("https://api.openai.com/v1", VARIABLE),
        ("https://api.openai.com.evil.org/v1", "OPENAI_API_KEY"),
        ("https://api.openai.com:8443/v1", "OPENAI_API_KEY"),
        ("https://localhost.evil.org/v1", VARIABLE),
        ("https://10.0.0.7/v1", VARIABLE),
        (f"{HOST}/v1", None),
        ("http://judge.example.org/v1", None),
    ],
)
def test_another_key_or_another_host_is_another_pair(url: str, variable: str | None) -> None:
    trust(VARIABLE, HOST)
    with pytest.raises(ConfigError, match=pattern(variable, origin(url), "--yes")):
        check_ready("here", judged(url, variable).providers)


@pytest.mark.parametrize(
    ("url", "variable"),
    [
        ("https://api.openai.com/v1", "OPENAI_API_KEY"),
        ("http://localhost:8000/v1", VARIABLE),
        ("http://127.0.0.1:8000/v1", VARIABLE),
        ("http://[::1]:8000/v1", None),
    ],
)
def test_well_known_and_local_ones_need_no_word(url: str, variable: str | None) -> None:
    check_ready("here", judged(url, variable).providers)
    assert not file().exists()


@pytest.mark.parametrize("url", ["http://judge.example.org/v1", "http://10.0.0.7:8000/v1", "http://0.0.0.0:80/v1"])
def test_a_key_goes_over_plain_http_to_this_machine_only(url: str) -> None:
    host_trust.confirm([Pair(VARIABLE, origin(url))])
    with pytest.raises(ConfigError, match=pattern("here", VARIABLE, "https://")):
        check_ready("here", judged(url).providers)
    with pytest.raises(ConfigError, match=pattern("trust", VARIABLE, "https://")):
        trust(VARIABLE, url)
    trust(None, url)
    check_ready("here", judged(url, None).providers)


def test_creating_a_run_here_confirms_its_pairs_and_no_others(tmp_path: Path) -> None:
    Run.create(tmp_path / "mine", config())
    check_judges(copied(tmp_path, config()).config)
    with pytest.raises(ConfigError):
        check_judges(config(variable="OTHER_SECRET"))


def test_changing_another_setting_of_a_strangers_run_confirms_nothing(tmp_path: Path) -> None:
    run = copied(tmp_path, config())
    run = Run.open_or_create(run.path, changes={"run.seed": 7})
    assert run.config.run.seed == 7
    with pytest.raises(ConfigError, match=pattern("trust(", "--yes")):
        check_judges(run.config)
    url = "https://mine.example.org/v1"
    run = Run.open_or_create(run.path, changes={"objectives.fairness.judge": judged(url).model_dump(mode="json")})
    check_judges(run.config)


def test_a_command_confirms_with_yes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = copied(tmp_path, config())
    monkeypatch.setattr("grpo_nb.cli.verbs.load_tasks", lambda *_: {})
    assert cli.main(["train", str(run.path), "--no-sft"]) == cli.USAGE
    monkeypatch.setattr("grpo_nb.cli.verbs.follow", lambda *_: (run.config.run.steps, False))
    assert cli.main(["train", str(run.path), "--no-sft", "--yes"]) == cli.DONE
    assert cli.main(["train", str(run.path), "--no-sft"]) == cli.DONE
    assert host_trust.confirmed() == {Pair(VARIABLE, f"{HOST}:443")}


@pytest.mark.parametrize("content", ["", "[", "[]", '{"confirmed": [1]}', "[" * 100_000, '{"confirmed": null}', "\xff"])
def test_a_damaged_file_confirms_nothing(content: str) -> None:
    file().parent.mkdir()
    file().write_text(content)
    with pytest.raises(ConfigError):
        check_ready("here", judged().providers)
    trust(VARIABLE, HOST)
    check_ready("here", judged().providers)


def test_a_file_that_others_can_write_confirms_nothing() -> None:
    trust(VARIABLE, HOST)
    assert host_trust.confirmed()
    host_trust._here.clear()
    file().chmod(0o666)
    assert not host_trust.confirmed()
    with pytest.raises(ConfigError):
        check_ready("here", judged().providers)


def test_where_nothing_can_be_written_this_process_remembers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(host_trust.FOLDER, str(tmp_path / "file" / "below"))
    trust(VARIABLE, HOST)
    check_ready("here", judged().providers)
    monkeypatch.setattr(host_trust, "_here", set())
    with pytest.raises(ConfigError):
        check_ready("here", judged().providers)


@pytest.mark.parametrize(("variable", "url"), [("sk-the-key-itself", HOST), (VARIABLE, "judge"), (VARIABLE, "ftp://x")])
def test_what_is_no_name_or_no_address_is_refused(variable: str, url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        trust(variable, url)
    assert "sk-the-key-itself" not in str(refused.value)


def test_the_key_follows_no_redirect(tmp_path: Path, judge_key: None) -> None:
    """One server sends on to another; the other one hears nothing."""
    heard: list[str] = []

    class Thief(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(str(self.headers.get("Authorization")))
            self.send_response(500)
            self.end_headers()

        do_GET = do_POST

        def log_message(self, *_: Any) -> None: ...

    thief = HTTPServer(("127.0.0.1", 0), Thief)

    class Redirect(Thief):
        def do_POST(self) -> None:
            self.send_response(307)
            self.send_header("Location", f"http://127.0.0.1:{thief.server_port}/v1/chat/completions")
            self.send_header("Content-Length", "0")
            self.end_headers()

    servers = [thief, HTTPServer(("127.0.0.1", 0), Redirect)]
    for server in servers:
        Thread(target=server.serve_forever, daemon=True).start()
    try:
        (verdict,) = ask(judge(tmp_path, f"http://127.0.0.1:{servers[1].server_port}/v1"), [example()], TEXTS[:1])
        assert verdict.value is None and "307" in str(verdict.cause)
        assert not heard
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def test_nothing_else_of_the_environment_goes_to_a_server(
    tmp_path: Path, judge_key: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Any] = []

    class Listening(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(self.headers)
            self.send_response(400)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    monkeypatch.setenv("OPENAI_ORG_ID", "org-1")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "project-1")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Other: secret-1\nAuthorization: Bearer secret-2")
    server = HTTPServer(("127.0.0.1", 0), Listening)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        ask(judge(tmp_path, f"http://127.0.0.1:{server.server_port}/v1"), [example()], TEXTS[:1])
    finally:
        server.shutdown()
        server.server_close()
    (headers, *_) = heard
    assert headers["Authorization"] == f"Bearer {KEY}"
    assert not {"openai-organization", "openai-project", "x-other"} & {name.lower() for name in headers}
    assert not [value for value in headers.values() if any(x in value for x in ("org-1", "project-1", "secret-"))]


@pytest.mark.parametrize(
    ("url", "goes"), [("https://api.openai.com/v1", True), ("https://api.openai.com.x.org/v1", False)]
)
def test_an_organisation_is_named_to_openai_alone(url: str, goes: bool) -> None:
    httpx = pytest.importorskip("httpx")
    request = httpx.Request("POST", url, headers={"OpenAI-Organization": "org-1"})
    _keep_private(request, "key-1")
    assert ("openai-organization" in request.headers) is goes and request.headers["authorization"] == "Bearer key-1"
