"""A bug report has what is needed to help, and no secret in any writing."""

import base64
import json
import re
import zipfile
from pathlib import Path

import pytest

from grpo_nb.cli import main
from grpo_nb.config import JudgeConfig, JudgeProvider
from grpo_nb.doctor.bug_report import LAST_WORDS, bundle, members
from grpo_nb.judge import host_trust
from grpo_nb.judge.redaction import known_secrets, redacted
from grpo_nb.judge.secrets import strike
from grpo_nb.run.run import Run
from tests.support.made_rows import healthy
from tests.support.tiny import tiny_run
from tests.support.tokens import names

KNOWN = "sk-proj-4711Abcdefgh0815XyzQrstu99"
"""In the environment."""
ODD = "correct horse battery 42 staple!"
"""In the environment, and without the shape of a key."""
STRANGE = "hf_9Zx8Yw7Vu6Ts5Rq4Po3Nm2Lk1"
"""Of somebody else: known by its shape alone."""


def writings(key: str) -> dict[str, str]:
    half = len(key) // 2
    return {
        "plain": f"Authorization: Bearer {key}",
        "base64": f"body {base64.b64encode(f'user:{key}'.encode()).decode()} end",
        "base64 at another place": f"x{base64.b64encode(f'ab{key}'.encode()).decode()}",
        "escapes": "".join(f"\\u{ord(c):04x}" for c in key),
        "one escape": f"\\u{ord(key[0]):04x}{key[1:]}",
        "percent": "".join(f"%{ord(c):02X}" for c in key),
        "split by a line": f"{key[:half]}\n{key[half:]}",
        "split over strings": f'["{key[:half]}", "{key[half:]}"]',
        "in a proxy": f"http://me:{key.replace(' ', '-')}@proxy:3128/",
    }


def left_of(key: str, text: str) -> list[str]:
    """Pieces of eight letters and digits of a key that a text has, in any of the writings."""
    coded = " ".join(
        base64.b64decode(token[o:] + "=" * (-len(token[o:]) % 4)).decode("latin-1")
        for token in re.findall(r"[A-Za-z0-9+/]{12,}", text)
        for o in range(4)
        if (len(token) - o) % 4 != 1
    )
    decoded = re.sub(r"\\u([0-9a-f]{4})|%([0-9A-F]{2})", lambda m: chr(int(m[1] or m[2], 16)), text)
    plain = re.sub(r"[\W_]", "", f"{text} {coded} {decoded}").casefold()
    letters = re.sub(r"[\W_]", "", key).casefold()
    return [piece for i in range(len(letters) - 7) if (piece := letters[i : i + 8]) in plain]


@pytest.mark.parametrize("key", [KNOWN, ODD])
@pytest.mark.parametrize("form", writings(KNOWN))
def test_a_known_secret_is_struck_out_of_every_writing(key: str, form: str) -> None:
    text = writings(key)[form]
    assert left_of(key, text), "the planted text has it"
    assert left_of(key, redacted(text, [key])) == []


@pytest.mark.parametrize("key", [KNOWN, STRANGE])
@pytest.mark.parametrize("form", writings(KNOWN))
def test_an_unknown_key_is_found_by_its_shape(key: str, form: str) -> None:
    assert left_of(key, redacted(writings(key)[form])) == []


@pytest.mark.parametrize(
    "text",
    [
        '"tokens": 618, "max_tokens": 2048, "budget_tokens": 2000000',
        '"token_texts": ["Answer", ":", " Can\'t"], "stop_token_ids": [2, 3]',
        '"digest": "97993c954d46377dad4270021272e197d1e42d65111037caa300f9099d105b52"',
        '"api_key_env": "OPENAI_API_KEY", "tokenizer": "Qwen2TokenizerFast"',
        '"sampler_logp_difference_p99": 1.5e-06, "task": "bbq", "learning_rate": 5e-06',
    ],
)
def test_what_is_no_key_stays(text: str) -> None:
    assert redacted(text) == text


def test_secrets_are_known_by_the_names_of_their_variables() -> None:
    environment = {
        "OPENAI_API_KEY": KNOWN, "MY_PASSWORD": ODD, "HF_TOKEN": STRANGE, "PLAIN": "value-of-mine",
        "JUDGE": "judge-9911", "TOKENIZERS_PARALLELISM": "false", "AUTH": "true",
        "KEY_FILE": "/usr", "SHORT_KEY": "abc", "MAX_TOKENS": "4096",
    }  # fmt: skip
    assert {*known_secrets(environment=environment)} == {KNOWN, ODD, STRANGE}
    for name in ("PGPASSWORD", "SSHPASS", "DBPASSWORD", "HFTOKEN", "GITHUB_PAT", "SENTRY_DSN", "SLURM_JWT", "MYSECRET"):
        assert known_secrets(environment={name: "plain-words-4711"}) == ["plain-words-4711"], name
    assert known_secrets(environment={"AZURE_OPENAI_KEY": "1234567890123456"}) == ["1234567890123456"]
    logins = known_secrets(environment={"HTTPS_PROXY": "http://bob:p@ss%2Fw0rdXY@proxy:1"})
    assert {"p@ss%2Fw0rdXY", "p@ss/w0rdXY"} <= {*logins}
    assert "judge-9911" in known_secrets(["JUDGE"], environment)


def test_a_secret_that_is_no_utf_8_is_struck() -> None:
    secret = known_secrets(environment={"MY_TOKEN": b"s3cr3t\xff\xfe4711abc".decode("utf-8", "surrogateescape")})
    assert "4711abc" not in redacted(f"found {secret[0]} here", secret)
    assert redacted("nothing of it", secret) == "nothing of it"


def test_the_prefix_of_a_provider_is_no_part_of_a_key() -> None:
    other = "sk-proj-" + "Ab3" * 12
    struck = strike(f"{other} and {KNOWN} at me:{KNOWN}@", [f"me:{KNOWN}", KNOWN])
    assert other in struck and not left_of(KNOWN, struck) and struck.count("***") == 2


@pytest.mark.parametrize("login", ["tok3nvalue99", "bob:p@ss/w0rdXY", "9f8e7d6c5b4a@x", "me:a:b@c@d"])
def test_the_login_of_an_address_is_struck_whole(login: str) -> None:
    assert redacted(f"see http://{login}@proxy.corp:3128/path now") == "see http://***@proxy.corp:3128/path now"


def test_a_key_that_the_cut_goes_through_leaves_nothing(run: Run) -> None:
    key = "sk-proj-" + "Ab3" * 40
    run.log_event("failed", step=1, error="x", traceback="A" * 10 + f" {key} " + "z " * 1960)
    log = f"{key} " + "y " * ((LAST_WORDS - 60) // 2)
    (run.path / "worker.log").write_text("first line\n" * 5000 + log)
    files = members(run)
    assert "zz" not in files["events.jsonl"] and "z z" in files["events.jsonl"] and "y y" in files["worker.log"]
    assert not [name for name, text in files.items() if "Ab3Ab3" in text]


def test_a_file_that_cannot_be_read_is_a_line_of_the_report(run: Run) -> None:
    for name in ("worker.log", "samples.jsonl", "evaluations.jsonl"):
        (run.path / name).unlink(missing_ok=True)
        (run.path / name).mkdir()
    files = members(run)
    assert names(files["worker.log"], "not readable") and names(files["evaluations.jsonl"], "not readable")
    assert files["metrics.jsonl"].count("\n") > 5


def test_home_folders_and_the_machine_are_shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/srv/people/ada")
    monkeypatch.setattr("socket.gethostname", lambda: "lovelace-9")
    text = r'/srv/people/ada/runs \/srv\/people\/ada /srv/people/adamant /home/bob/x "C:\\Users\\eve\\a" on lovelace-9'
    assert redacted(text) == r'~/runs ~ /srv/people/adamant ~/x "~\\a" on <host>'


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A failed run with a judge, whose log repeats keys in every writing."""
    monkeypatch.setenv("OPENAI_API_KEY", KNOWN)
    monkeypatch.setenv("MY_SECRET", ODD)
    monkeypatch.setenv("HTTPS_PROXY", f"http://me:{KNOWN}@proxy:3128")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setattr(host_trust, "confirm", lambda pairs: None)
    judge = JudgeConfig(providers=[JudgeProvider(model="m", base_url="http://localhost:1/v1")])
    run = tiny_run(tmp_path, run__steps=60, objectives__fairness__judge=judge.model_dump(mode="json"))
    for row in healthy(60):
        run.log_metrics(row)
    for key in (KNOWN, ODD, STRANGE):
        for form, text in writings(key).items():
            run.log_event("judge_notice", step=3, form=form, text=text, parts=[key[:9], key[9:]])
    run.log_samples([{"step": 60, "objective": "fairness", "prompt": "a private prompt", "completion": KNOWN}])
    home = Path.home() / "projects" / "mine.py"
    trace = f'Traceback (most recent call last):\n  File "{home}", line 3\nRuntimeError: CUDA out of memory'
    run.log_event("traceback", step=60, error="RuntimeError", traceback=trace)
    run.log_event("failed", step=60, error=f"RuntimeError: CUDA out of memory {KNOWN}")
    (run.path / "worker.log").write_text("\n".join(writings(KNOWN).values()))
    return run


def test_the_zip_has_what_helps_and_no_secret(run: Run) -> None:
    path = bundle(run)
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name).decode() for name in archive.namelist()}
        assert archive.testzip() is None
    assert path == run.path / "bug-report.zip"
    assert {*files} >= {
        "README.md", "environment.json", "settings.json", "changed-settings.json", "metrics.jsonl", "events.jsonl",
        "findings.json", "traceback.txt", "repro.py", "worker.log", "command.txt", "knobs.json",
    }  # fmt: skip
    raw = path.read_bytes().decode("latin-1")
    for key in (KNOWN, ODD, STRANGE):
        assert {name: left for name, text in files.items() if (left := left_of(key, text))} == {}
        assert key not in raw
    everything = "".join(files.values())
    assert "private prompt" not in everything and str(Path.home()) not in everything
    environment = json.loads(files["environment.json"])
    assert environment["variables"]["NCCL_DEBUG"] == "INFO" and environment["packages"]["torch"]
    assert {"OPENAI_API_KEY", "MY_SECRET"} <= {*environment["variables that are set and not shown"]}
    assert json.loads(files["settings.json"])["run"]["steps"] == 60
    assert len(files["metrics.jsonl"].splitlines()) == 50
    assert json.loads(files["metrics.jsonl"].splitlines()[-1])["step"] == 60
    assert names(files["traceback.txt"], "CUDA out of memory", "~/projects/mine.py")
    assert {finding["rule"] for finding in json.loads(files["findings.json"])} >= {"failed"}


def test_an_exception_at_hand_takes_the_place_of_the_log_s(run: Run) -> None:
    try:
        raise RuntimeError(f"Trying to backward through the graph a second time {KNOWN}")
    except RuntimeError as error:
        text = members(run, error)["traceback.txt"]
    assert names(text, "test_bug_report.py", "no_grad") and left_of(KNOWN, text) == []


def test_the_reproduction_of_a_report_runs(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = members(run)["repro.py"]
    compile(code, "repro.py", "exec")
    assert names(code, "settings.json", "grpo(run, steps=3)")


def test_the_command_writes_the_file_it_names(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.zip"
    assert main(["bundle", str(run.path), "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["file"] == str(out) and zipfile.is_zipfile(out)


def test_nothing_in_a_strangers_run_is_followed(run: Run, tmp_path: Path) -> None:
    (run.path / "worker.log").unlink()
    (run.path / "worker.log").symlink_to("/etc/hostname")
    assert names(members(run)["worker.log"], "not readable", "symbolic link")
