"""A script that starts a run and ends: its training is neither lost nor silent. On a stand-in for training."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_nb.jupyter import process_exit
from grpo_nb.run.run import Run
from tests.conftest import ROOT
from tests.support.tiny import tiny_run
from tests.support.tokens import names

SCRIPT = """\
import sys, time, types
from concurrent.futures import ThreadPoolExecutor
from grpo_nb import start

def grpo(run, *, tasks, rewards, steps):
    run.knobs.request("run")
    print("trains", flush=True)
    for step in range(1, steps + 1):
        time.sleep(0.1)
        if run.knobs.command == "stop":
            run.log_event("stopped", step=step - 1)
            return
        with ThreadPoolExecutor(1) as pool:  # as a judge asks
            pool.submit(run.log_metrics, {"step": step}).result()
        if step == int(sys.argv[3]):
            raise ValueError("cable-pulled")
        yield step
    run.log_event("done", step=steps)

# not the real one: models, and what they need, take seconds to import
trainer = types.ModuleType("grpo_nb.training.grpo")
trainer.grpo = grpo
sys.modules[trainer.__name__] = trainer
session = start(sys.argv[1], steps=int(sys.argv[2]))
exec(sys.argv[4])
"""
WAIT = 240
trains_on = pytest.mark.skipif(process_exit.STARTS_NO_THREAD, reason="this Python starts no thread after a script")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return tiny_run(tmp_path, run__steps=4, sft__steps=0)


def script(run: Run, steps: int = 4, fails_at: int = 0, then: str = "") -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", SCRIPT, str(run.path), str(steps), str(fails_at), then]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


@trains_on
def test_a_script_that_ends_waits_for_its_training(run: Run) -> None:
    process = script(run)
    _, err = process.communicate(timeout=WAIT)
    assert (process.returncode, run.last_step()) == (0, 4)
    assert names(err, "tiny", "Ctrl-C") and err.count("\n") == 1


@trains_on
def test_an_interrupt_of_a_script_that_has_ended_stops_its_training(run: Run) -> None:
    process = script(run, steps=10**6, then="sys.stderr.write('last line\\n'); sys.stderr.flush()")
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "trains\n"
    assert process.stderr.readline() == "last line\n" and names(process.stderr.readline(), "tiny", "Ctrl-C")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=WAIT)
    assert names(err, "stopping", "tiny") and err.count("\n") == 1
    assert run.status().state == "stopped"


@pytest.mark.parametrize("then", ["", "session.wait_blocking()"])
def test_a_python_that_starts_no_thread_after_a_script_stops_its_training_unless_it_waits(run: Run, then: str) -> None:
    process = script(
        run, then=f"from grpo_nb.jupyter import process_exit; process_exit.STARTS_NO_THREAD = True; {then}"
    )
    _, err = process.communicate(timeout=WAIT)
    if then:
        assert (process.returncode, run.last_step(), err) == (0, 4, "")
    else:
        assert names(err, "tiny", "session.wait_blocking()", "3.12.2") and (run.last_step() or 0) < 4
        assert process_exit.STARTS_NO_THREAD or run.status().state == "stopped", "the stand-in's step needs a thread"


INTERRUPTED_WHILE_IT_SAYS_SO = """
import logging, os, signal
class Impatient(logging.Handler):
    def emit(self, record):
        if "Ctrl-C" in record.getMessage():
            os.kill(os.getpid(), signal.SIGINT)
logging.getLogger("grpo_nb").addHandler(Impatient())
"""


@trains_on
def test_no_interrupt_is_lost_however_early_it_comes(run: Run) -> None:
    process = script(run, steps=10**6, then=INTERRUPTED_WHILE_IT_SAYS_SO)
    try:
        process.communicate(timeout=WAIT)
    finally:
        process.kill()
        process.communicate()
    assert run.status().state == "stopped"


@trains_on
def test_what_failed_is_said_at_the_end_unless_it_was_before(run: Run) -> None:
    failed = ("tiny", "ValueError: cable-pulled")
    process = script(run, fails_at=2)
    assert names(process.communicate(timeout=WAIT)[1].splitlines()[-1], *failed)
    process = script(run, fails_at=1, then="while session.live: time.sleep(0.05)")
    (line,) = process.communicate(timeout=WAIT)[1].splitlines()
    assert names(line, *failed), "it was over before the script was"
    process = script(run, fails_at=1, then="session.wait_blocking()")
    err = process.communicate(timeout=WAIT)[1]
    assert process.returncode == 1 and err.count(failed[1]) == 1, "once, not at the end again"
