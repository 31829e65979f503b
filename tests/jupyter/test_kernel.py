"""In a real IPython kernel, on a copy of the package whose files are edited while it runs."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_nb.run.run import Run
from grpo_nb.training.grpo import grpo
from tests.support.live_kernel import PATIENCE, Kernel, until
from tests.support.tiny import stable, tiny_run
from tests.support.tokens import names


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Kernel]:
    kernel = Kernel(tmp_path)
    yield kernel
    kernel.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    kernel = Kernel(tmp_path_factory.mktemp("kernel"))
    yield kernel
    kernel.close()


def findings(run: Run) -> list[str]:
    return [event["message"] for event in run.rows("events") if event.get("rule") == "code_changed"]


SHOWN = "print(repr(session))"


@pytest.mark.ux(26, at="nbclient")
def test_reload_brings_new_code_to_what_the_notebook_holds(shared: Kernel, tmp_path: Path) -> None:
    kernel = shared
    tiny_run(tmp_path)
    kernel.run(f"import os; os.chdir({str(tmp_path)!r})")
    kernel.run("import grpo_nb as g\nfrom grpo_nb import Run, attach, presets\nrun = Run.open('tiny')")
    kernel.run("session = same = attach(run)\nconfig = run.config\nknob = run.knobs['temperature']")
    assert names(kernel.run("session"), "tiny", "new", 0, 4), "and with its dashboard, which holds it too"
    assert names(kernel.run(SHOWN), "Session", "tiny", "new", 0, 4)
    kernel.edit("jupyter/session.py", 'f"<Session {', 'f"<Renewed session {')
    kernel.edit("run/run.py", "        self.path = path\n", "        self.path = path\n        self.novelty = 7\n")
    kernel.edit("presets.py", "def demo(", "NOVEL = True\n\n\ndef demo(")
    kept, _, edited = kernel.run("box = session.dashboard().widget\ng.reload()").rpartition("\n")
    assert edited == "['jupyter/session.py', 'presets.py', 'run/run.py']"
    assert names(kept, "knob", "Run.open", "attach") and not any(word in kept for word in ("session", "config"))
    assert names(kernel.run(SHOWN), "Renewed", "tiny", "new", 0, 4)
    assert kernel.run("run.novelty, presets.NOVEL, knob.value, same is session") == "(7, True, 1.0, True)"
    assert kernel.run("box.children == (session.dashboard().widget,)") == "True", "shown where the old one was"
    held = "isinstance(run, Run), isinstance(run, g.Run), isinstance(session.run, Run), isinstance(config, g.Config)"
    assert kernel.run(held) == "(True, True, True, True)"
    assert kernel.run("attach is g.attach, type(attach(run)) is type(session)") == "(True, True)"
    kernel.edit("jupyter/session.py", "class Session:", "class Session(:")
    _, error = kernel.ask("g.reload()")
    assert error and names(error, "session.py", "line")
    shown, kept = kernel.run("session, isinstance(run, g.Run)").strip("()").rsplit(", ", 1)
    assert names(shown, "Renewed", "tiny", "new", 0, 4) and kept == "True", "nothing was reloaded"
    kernel.edit("jupyter/session.py", "class Session(:", "class Session:")
    assert names(kernel.run(f"g.reload()\n{SHOWN}"), "Renewed", "tiny", "new", 0, 4)
    kernel.run("steps = g.grpo(run)\n_ = next(steps)")
    _, refused = kernel.ask("g.reload()")
    assert refused and names(refused, "tiny", "grpo_nb.release"), "a training that nobody closed"
    assert kernel.run("g.release(run)") == "True"


EXPLODES = "1 / 0, metrics.Clock()"


@pytest.mark.ux(6, 7, 8, 12, 13, 25, at="nbclient")
def test_run_keeps_its_code_whatever_is_edited(kernel: Kernel, tmp_path: Path) -> None:
    run = tiny_run(tmp_path, run__steps=5000)
    kernel.run("%load_ext autoreload\n%autoreload 2\nimport grpo_nb as g")
    shown = kernel.run("session = g.start('tiny')")
    assert names(shown, "%autoreload", "grpo_nb.reload()")
    until(lambda: run.last_step(), "the first step")
    assert kernel.run("6 * 7, session.live") == "(42, True)", "other cells answer while it trains"
    _, refused = kernel.ask("g.start('tiny')")
    assert refused and names(refused, "tiny", "wait", "stop", "attach")
    kernel.edit("training/grpo.py", "plan_step(state, knobs), metrics.Clock()", EXPLODES)
    kernel.run("import grpo_nb as again")  # %autoreload looks at the files before each cell
    step = run.last_step() or 0
    until(lambda: (run.last_step() or 0) > step + 2, "steps after the edit")
    (finding,) = findings(run)
    assert names(finding, "training/grpo.py") and finding in kernel.run("session.summary()")
    assert kernel.run("again is g, session.live") == "(True, True)"
    _, refused = kernel.ask("g.reload()")
    assert refused and names(refused, "tiny") and kernel.run("session.live") == "True"

    def interrupt() -> None:
        time.sleep(1.0)
        kernel.manager.interrupt_kernel()

    _, detached = kernel.ask("await session.wait()", meanwhile=interrupt)
    assert detached and names(detached, "tiny", 5000, "Stop") and "\n" not in detached, "one line, no traceback"
    _, ended = kernel.ask("import time; time.sleep(1000)", meanwhile=interrupt)
    assert ended and "KeyboardInterrupt" in ended, "the cell that runs is interrupted"
    step = run.last_step() or 0
    until(lambda: (run.last_step() or 0) > step + 2, "steps after two interrupts")
    assert kernel.run("session.live, session.asked_to_stop") == "(True, False)"
    kernel.manager.interrupt_kernel()  # no cell runs
    until(lambda: run.status().state == "stopped", "the stop")
    assert run.checkpoints.steps()[-1] == run.last_step()
    until(lambda: kernel.run("session.live") == "False", "the end of the thread")
    idle = "import signal; get_ipython().kernel.saved_sigint_handler is signal.SIG_IGN"
    until(lambda: kernel.run(idle) == "True", "an idle kernel as it was")
    assert kernel.run("g.reload()") == "['training/grpo.py']"
    kernel.run("session.resume()")
    _, failed = kernel.ask("await session.wait()")
    assert failed and "ZeroDivisionError" in failed and "failed" in kernel.run("session.state")


@pytest.mark.ux(5, at="nbclient")
def test_killed_kernel_is_listed_and_its_run_goes_on_to_the_same_rows(kernel: Kernel, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    straight, run = tiny_run(tmp_path, "straight", run__steps=20), tiny_run(tmp_path / "runs", "killed", run__steps=20)
    for _ in grpo(straight):
        pass
    pid = json.loads(kernel.run("import os; os.getpid()"))
    kernel.run("import grpo_nb as g\nsession = g.start('runs/killed')")
    until(lambda: (run.last_step() or 0) >= 3, "three steps")
    os.kill(pid, signal.SIGKILL)
    until(lambda: run.status().state == "dead", "the kernel's death")
    kernel.manager.restart_kernel(now=True)
    kernel.client.wait_for_ready(timeout=PATIENCE)
    listed = kernel.run("import grpo_nb")
    state, _, line = listed.rpartition(": ")
    assert names(state, "killed", "dead", 20) and line == "grpo_nb.start('runs/killed')", listed
    assert kernel.run("import grpo_nb") == "", "said once"
    assert names(kernel.run("grpo_nb.jupyter.project.runs().frame.to_csv()"), "killed", "dead", line)
    kernel.run(f"await {line}.wait()")
    assert [stable(row) for row in run.metric_rows()] == [stable(row) for row in straight.metric_rows()]


@pytest.mark.slow
def test_old_kernel_trains_in_the_foreground_and_says_so(shared: Kernel, tmp_path: Path) -> None:
    kernel, run = shared, tiny_run(tmp_path, run__steps=2)
    kernel.run(f"import os; os.chdir({str(tmp_path)!r})\nimport importlib.metadata as m\nreal = m.version")
    kernel.run("m.version = lambda name: '6.17.1' if name == 'ipykernel' else real(name)\nimport grpo_nb as g")
    shown = kernel.run("session = g.start('tiny')")
    kernel.run("m.version = real")
    assert names(shown, "foreground", "6.17.1", 7.4)
    assert names(shown.splitlines()[-1], "tiny", "done", 2) and run.last_step() == 2, (
        "the cell waited and showed the end"
    )
