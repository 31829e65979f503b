"""The server that the engine starts: its arguments, its end, its crash, and what a failed start shows."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_nb.config import ConfigError, ModelConfig, RolloutConfig
from grpo_nb.metrics import keys
from grpo_nb.policy.model import ModelError, Policy, load_policy
from grpo_nb.rollout import VLLMEngine, run_bound, vllm_process
from grpo_nb.rollout.vllm_process import ARGUMENTS
from grpo_nb.rollout.vllm_server import PROGRAM, RUNTIME_LORA, URL, ServerError
from grpo_nb.training.grpo import grpo
from tests.rollout.test_vllm import LONGEST, base, demo_base, learner, request, served_run
from tests.support import vllm_program
from tests.support.judge_server import serving
from tests.support.stage import until
from tests.support.tiny import given, rows
from tests.support.tokens import names
from tests.support.vllm_stand_in import StandIn

SERVED = RolloutConfig(engine="vllm", patience_s=30.0)
__all__ = ["base", "demo_base", "learner"]


@pytest.fixture
def starts(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file to which each start is written; $GRPO_NB_VLLM is the stand-in's program."""
    program, log = tmp_path / "vllm", tmp_path / "starts.jsonl"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {vllm_program.__file__} "$@"\n')
    program.chmod(0o755)
    log.touch()
    with serving(StandIn(base)) as behind:
        monkeypatch.setenv("STAND_IN_PORT", str(behind.server_address[1]))
        monkeypatch.setenv("STAND_IN_LOG", str(log))
        monkeypatch.setenv(PROGRAM, str(program))
        monkeypatch.setenv("PYTHONPATH", "elsewhere")
        monkeypatch.setattr("grpo_nb.rollout.vllm.POLL_SECONDS", 0.05)
        monkeypatch.setattr("grpo_nb.rollout.vllm_server.PAUSES", (0.05, 0.05))
        yield log


@pytest.fixture
def engine(starts: Path) -> Iterator[VLLMEngine]:
    made = VLLMEngine(SERVED)
    yield made
    made.close()


def read(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_it_starts_once_serves_and_ends_with_the_engine(
    engine: VLLMEngine, starts: Path, base: Path, learner: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.check(learner, LONGEST)
    first, second = (engine.generate(learner, request()) for _ in range(2))
    assert first == second
    (start,) = read(starts)
    verb, model, *rest = start["arguments"]
    assert (verb, Path(model)) == ("serve", base) and "--max-model-len" in rest and str(LONGEST) in rest
    assert "PYTHONPATH" not in start["variables"] and "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in start["variables"]
    assert engine.about["model"] == "base" and not gone(start["pid"])
    engine.close()
    assert gone(start["pid"])
    assert engine.generate(learner, request()) == first, "a later rollout starts another"
    assert len(read(starts)) == 2


def test_each_server_gets_a_key_that_only_the_engine_has(
    starts: Path, learner: Policy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OF_A_JUDGE", others := "key-of-a-judge-4711")
    monkeypatch.setenv(vllm_process.KEY, others)
    engine, found = VLLMEngine(SERVED.model_copy(update={"api_key_env": "OF_A_JUDGE"})), []
    assert engine._own is not None
    with caplog.at_level("DEBUG", logger="grpo_nb"):
        for _ in range(2):
            engine.check(learner, LONGEST)
            key, asked = engine._own.key, f"{engine._own.url}/v1/models"
            for header in ({}, {"Authorization": f"Bearer {others}"}):
                with pytest.raises(urllib.error.HTTPError) as caught:
                    urllib.request.urlopen(urllib.request.Request(asked, headers=header))
                caught.value.close()
                assert caught.value.code == 401
            assert "loading" in (shown := engine._own.end_of_log()) and key not in shown
            found.append(key)
            engine.close()
    written = starts.read_text() + caplog.text + json.dumps(engine.about)
    assert all(vllm_process.KEY in start["variables"] for start in read(starts))
    assert len({*found}) == 2 and not any(key in written for key in (*found, others))


@pytest.mark.usefixtures("narrow_model")
def test_a_run_starts_its_server_and_ends_it(
    starts: Path, demo_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(StandIn(demo_base, context=256)) as behind:
        monkeypatch.setenv("STAND_IN_PORT", str(behind.server_address[1]))
        run = served_run(tmp_path, behind, rollout__url=None)
        assert [row[keys.ENGINE] for row in rows(list(grpo(run, steps=1, **given())))] == ["vllm"]
    (start,) = read(starts)
    assert gone(start["pid"])


def test_a_server_that_crashes_is_started_again_and_given_the_adapter(
    engine: VLLMEngine, starts: Path, learner: Policy
) -> None:
    before = engine.generate(learner, request())
    assert engine._own is not None
    with pytest.raises(OSError):
        urllib.request.urlopen(f"{engine._own.url}/die")
    assert engine.generate(learner, request()) == before
    first, second = read(starts)
    assert first["arguments"] == second["arguments"] and first["pid"] != second["pid"]


def test_a_restart_has_the_time_of_a_start_and_not_of_a_retry(engine: VLLMEngine, learner: Policy) -> None:
    before = engine.generate(learner, request())
    assert engine._own is not None and engine._own._process is not None
    engine._server._patience_s = 1e-3  # over before the next try
    with pytest.raises(OSError):
        urllib.request.urlopen(f"{engine._own.url}/die")
    engine._own._process.wait()
    assert engine.generate(learner, request()) == before


def test_one_that_hangs_in_a_step_ends_the_wait_with_its_log(engine: VLLMEngine, learner: Policy) -> None:
    engine.generate(learner, request())
    assert engine._own is not None
    engine._server._patience_s = engine._server._timeout_s = 0.5
    with pytest.raises(OSError):
        urllib.request.urlopen(f"{engine._own.url}/hang", timeout=0.2)
    with pytest.raises(ServerError) as caught:
        engine.generate(learner, request())
    assert names(str(caught.value), "loading") and URL not in str(caught.value)


def test_one_that_always_crashes_ends_the_wait(
    engine: VLLMEngine, starts: Path, learner: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.generate(learner, request())
    assert engine._own is not None
    engine._own._further = ["--broken"]
    with pytest.raises(OSError):
        urllib.request.urlopen(f"{engine._own.url}/die")
    with pytest.raises(ServerError) as caught:
        engine.generate(learner, request())
    assert names(str(caught.value), vllm_process.RESTARTS + 1, "no kernel image is available")


def test_a_start_that_fails_shows_the_end_of_its_log_without_secrets(
    engine: VLLMEngine, learner: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", secret := "s3cret-of-mine-77")
    assert engine._own is not None
    engine._own._further = ["--broken"]
    with pytest.raises(ServerError) as caught:
        engine.check(learner, LONGEST)
    assert names(str(caught.value), 1, "loading", "no kernel image is available")
    assert secret not in str(caught.value) and RUNTIME_LORA not in str(caught.value)


def test_an_interrupted_check_leaves_no_server(
    engine: VLLMEngine, starts: Path, learner: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(VLLMEngine, "_check_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.check(learner, LONGEST)
    (start,) = read(starts)
    assert gone(start["pid"])


def test_further_arguments_are_read_as_on_a_command_line(
    starts: Path, learner: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ARGUMENTS, "--dtype float32 --x 'a b'")
    engine = VLLMEngine(SERVED)
    engine.check(learner, LONGEST)
    engine.close()
    assert read(starts)[0]["arguments"][-4:] == ["--dtype", "float32", "--x", "a b"]
    monkeypatch.setenv(ARGUMENTS, "'open")
    with pytest.raises(ConfigError, match=ARGUMENTS):
        VLLMEngine(SERVED)


def test_what_cannot_be_started_is_refused_before_any_work(
    engine: VLLMEngine, starts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelError) as caught:
        engine.check(load_policy(ModelConfig(name="demo", train="lora", device="cpu")), LONGEST)
    assert names(str(caught.value), "model.name") and not read(starts)
    monkeypatch.setenv(PROGRAM, "/nowhere/vllm")
    with pytest.raises(ConfigError, match="/nowhere/vllm"):
        VLLMEngine(SERVED)
    assert VLLMEngine(RolloutConfig(engine="vllm", url="http://127.0.0.1:9"))._own is None, (
        "a running server is asked instead"
    )


def test_what_is_bound_to_a_killed_process_ends(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    inner = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(1000)"
    outer = (
        "import subprocess, sys, time\n"
        f"kept = subprocess.Popen([sys.executable, {run_bound.__file__!r}, sys.executable, '-c', {inner!r}],"
        " stdin=subprocess.PIPE, start_new_session=True)\n"
        "time.sleep(1000)"
    )
    trainer = subprocess.Popen([sys.executable, "-c", outer])
    until(lambda: note.is_file() and note.read_text() != "")
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    until(lambda: gone(int(note.read_text())))


def test_a_log_that_grows_keeps_its_end(tmp_path: Path) -> None:
    command = (
        "import os, time\n"
        "def write(mark):\n"
        f"    for _ in range({run_bound.LARGEST_LOG // 64 + 1}): os.write(1, b'%-63s\\n' % mark)\n"
        "write(b'first')\n"
        f"while os.fstat(1).st_size > {run_bound.KEPT_LOG}: time.sleep(0.01)\n"
        "os.write(1, b'last\\n')\n"
        "time.sleep(1000)"
    )
    bound = [sys.executable, run_bound.__file__, sys.executable, "-c", command]
    with (
        open(log := tmp_path / "log", "w+b") as out,
        subprocess.Popen(bound, stdin=subprocess.PIPE, stdout=out, start_new_session=True),
    ):
        until(lambda: log.stat().st_size == run_bound.KEPT_LOG + len(b"last\n"))
    lines = log.read_bytes().split()
    assert {*lines[:-1]} == {b"first"} and lines[-1] == b"last"


@pytest.mark.parametrize("end", ["crash", "stop"])
def test_a_process_that_the_command_leaves_ends_with_it(end: str, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    worker = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(1000)"
    rest = {"crash": f"while not os.path.exists({str(note)!r}): pass\nos._exit(9)", "stop": "time.sleep(1000)"}[end]
    command = f"import os, subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {worker!r}])\n{rest}"
    bound = [sys.executable, run_bound.__file__, sys.executable, "-c", command]
    with subprocess.Popen(bound, stdin=subprocess.PIPE, start_new_session=True) as kept:
        until(lambda: note.is_file() and note.read_text() != "")
        if end == "crash":
            kept.wait()
    assert gone(int(note.read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_the_command_ends_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    command = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(1000)"
    bound = [sys.executable, run_bound.__file__, sys.executable, "-c", command]
    with subprocess.Popen(bound, stdin=subprocess.PIPE, start_new_session=True) as kept:
        until(lambda: note.is_file() and note.read_text() != "")
        kept.kill()
    until(lambda: gone(int(note.read_text())))


def test_one_that_never_answers_ends_the_wait_with_its_log(
    engine: VLLMEngine, learner: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_nb.rollout.vllm.START_SECONDS", 2.0)
    monkeypatch.setattr("grpo_nb.rollout.vllm.ANSWER_SECONDS", 0.1)
    assert engine._own is not None
    engine._own._further = ["--silent"]
    with pytest.raises(ServerError) as caught:
        engine.check(learner, LONGEST)
    assert names(str(caught.value), "loading", 2) and URL not in str(caught.value)


def test_a_port_that_was_taken_meanwhile_is_left(engine: VLLMEngine, starts: Path, learner: Policy) -> None:
    assert engine._own is not None
    before = engine._own.url
    with socket.create_server(("127.0.0.1", int(before.rpartition(":")[2]))):
        engine.check(learner, LONGEST)
    (start,) = read(starts)
    assert engine.about["url"] == engine._own.url != before and engine._own.url.endswith(start["arguments"][-1])


def test_an_answer_of_another_program_is_not_the_servers(
    engine: VLLMEngine, learner: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine._own is not None
    engine._own._further = ["--broken"]

    async def answered(needed: int) -> dict[str, object]:
        assert engine._own is not None and engine._own._process is not None
        engine._own._process.wait()
        return {}

    monkeypatch.setattr(engine, "_ask_about", answered)
    with pytest.raises(ServerError) as caught:
        engine.check(learner, LONGEST)
    assert names(str(caught.value), 1, "no kernel image is available")


@pytest.mark.parametrize(
    "argument", ["--port 9", "--port=9", "--api-key s3cret-of-mine-77", "--api_key=k", "--host ::"]
)
def test_arguments_that_the_trainer_sets_itself_are_refused(
    argument: str, starts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ARGUMENTS, f"--dtype float32 {argument}")
    with pytest.raises(ConfigError, match=ARGUMENTS) as caught:
        VLLMEngine(SERVED)
    assert "s3cret" not in str(caught.value) and not read(starts)


@pytest.mark.parametrize("written", ["--hf-token {}", "--hf_token={}"])
def test_a_key_among_the_arguments_is_neither_logged_nor_shown(
    written: str, starts: Path, learner: Policy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(ARGUMENTS, written.format(secret := "mine-of-77-letters") + " --broken")
    engine = VLLMEngine(SERVED)
    with caplog.at_level("INFO"), pytest.raises(ServerError) as caught:
        engine.check(learner, LONGEST)
    assert secret in " ".join(read(starts)[0]["arguments"])
    assert "--broken" in caplog.text and secret not in caplog.text and secret not in str(caught.value)
