"""Each verb of a session in a real kernel, as a notebook says it; notebooks out of order; a death, a full disk."""

import html
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nbclient.exceptions import DeadKernelError

from grpo_nb.report.aloud import OWN
from tests.jupyter.test_notebooks import code_cells
from tests.support.live_kernel import Shared, execute, until
from tests.support.tiny import tiny_run
from tests.support.tokens import names

IMPORTS = "import asyncio, os, time\nimport grpo_nb as g"
TOLD = (
    "from grpo_nb.jupyter import notices\n"
    "print(*(notice.text for notice in notices.notices(session, session.state, session.step)), sep='\\n')"
)
PAUSED = "while session.state != 'paused':\n    await asyncio.sleep(0.05)\n"


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    kernel = Shared(tmp_path_factory.mktemp("kernel"))
    yield kernel
    kernel.close()


@pytest.mark.ux(2, 8, 12, at="nbclient")
def test_every_verb_in_a_thread(kernel: Shared, tmp_path: Path) -> None:
    run = tiny_run(tmp_path, run__steps=4000, sft__steps=0, run__checkpoint_every=1000)
    said, _ = kernel.execute(
        tmp_path,
        IMPORTS,
        "session = g.start('tiny')\nsession.where, session.live",
        "await session.wait(step=2)",
        f"session.pause()\n{PAUSED}before = session.step\nawait asyncio.sleep(0.5)\nsession.step - before",
        "session.step_once()\nawait session.wait()\nsession.step - before",
        "session.save_now()\nwhile session.run.checkpoints.steps()[-1] != before + 1:\n    await asyncio.sleep(0.05)",
        "session.evaluate_now()\nwhile session.run.evaluations().empty:\n    await asyncio.sleep(0.05)",
        "session.run.evaluations()['step'].unique().tolist() == [before + 1]",
        "session.resume()\nawait session.wait(step=before + 4)",
        "g.start('tiny')",
        "g.attach('tiny') is session",
        "session.stop()\nsession.state",
        "await session.wait()",
        "at = session.step\nsession.resume()\nawait session.wait(step=at + 2)\nsession.state, session.where",
        "session.stop()\nawait session.wait()\nsession.summary()",
    )
    assert said[1] == "('thread', True)" and names(said[2], "tiny", "running")
    assert (said[3], said[4].splitlines()[-1]) == ("0", "1"), "a pause holds, a step is one step"
    assert "Error" not in said[5] + said[6] and said[7] == "True"
    assert names(said[8], "tiny", "running")
    assert names(said[9], "tiny", "wait", "stop", "attach"), "the choices"
    assert said[10:12] == ["True", "'stopping'"] and names(said[12], "tiny", "stopped")
    assert said[13].splitlines()[-1] == "('running', 'thread')" and names(said[14], "tiny", "stopped")
    steps = [row["step"] for row in run.metric_rows()]
    assert steps == list(range(1, len(steps) + 1)), "whatever was said, no step was lost or done twice"


@pytest.mark.ux(29, at="nbclient")
@pytest.mark.parametrize(
    ("name", "made", "needs"),
    [
        ("02_sft", "nothing", ("01_load",)),
        ("03_grpo", "the run", ("SFT of run demo", "02_sft")),
        ("04_diagnostics", "the run", ("run demo", "03_grpo")),
    ],
)
def test_notebook_started_out_of_order_says_what_it_needs(
    kernel: Shared, name: str, made: str, needs: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "pyproject.toml").touch()
    if made == "the run":
        tiny_run(tmp_path / "runs", "demo")
    sources = [cell.source for cell in code_cells(name)]
    opens = next(i for i, source in enumerate(sources) if "project.open_run" in source)
    own_file = f"import os; os.environ['GRPO_NB_PROJECT_DIR'] = {str(tmp_path)!r}"
    said, _ = kernel.execute(tmp_path, own_file, *sources[: opens + 1])
    lines = said[-1].splitlines()
    assert names(lines[-1], *needs), "one line, no traceback"
    assert len(lines) == 1 or (len(lines) == 2 and names(lines[0], "runs/demo", "RUN")), "which run it is"


@pytest.mark.slow  # test_workers.py has it without a notebook
@pytest.mark.ux(5, 10, 37, at="nbclient")
def test_process_lives_on_when_its_kernel_is_killed_and_a_new_kernel_attaches(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    run = tiny_run(tmp_path / "runs", run__steps=4000)
    with pytest.raises(DeadKernelError):
        execute(
            tmp_path,
            IMPORTS,
            "session = g.start('runs/tiny', where='process')\nawait session.wait(step=2)",
            "os.kill(os.getpid(), 9)",
        )
    step = run.last_step() or 0
    until(lambda: (run.last_step() or 0) > step + 2, "steps after the kernel's death")
    owner = run.status().owner
    assert owner is not None
    try:
        said, _ = execute(
            tmp_path,
            IMPORTS,
            "session = g.attach('runs/tiny')\nsession.live, session.followed",
            "await session.wait(step=session.step + 2)",
            TOLD,
            "session",
            "g.start('runs/tiny')",
            "session.run.knobs['temperature'].set(0.7)\nat = session.step\nawait session.wait(step=at + 3)",
            "float(session.metrics()['temperature'].iloc[-1])",
            f"session.pause()\n{PAUSED}at = session.step",
            "session.step_once()\nawait session.wait()\nsession.step - at",
            "session.resume()\nawait session.wait(step=at + 3)",
            "session.stop()\nawait session.wait()",
            "session.resume()\nawait session.wait(step=session.step + 1)\nsession.live, session.where",
            "session.stop()\nawait session.wait()",
        )
    finally:
        if owner.alive():
            os.kill(owner.pid, signal.SIGKILL)
    assert names(said[0], "tiny", "running"), "the first import lists it"
    assert said[0].endswith("grpo_nb.attach('runs/tiny')")
    assert said[1] == "(False, True)" and names(said[2], "tiny", "running")
    assert names(said[3], owner.pid) and names(said[4], "tiny", "running")
    assert names(said[5], "tiny", owner.pid)
    assert said[7] == "0.7" and said[9] == "1"
    moved, where = said[12].split("\n")
    assert names(said[11], "tiny", "stopped")
    assert names(moved, "tiny", "where='process'") and where == "(True, 'thread')"
    assert names(said[13], "tiny", "stopped")


def test_import_says_nothing_where_there_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    said, _ = execute(tmp_path, "import grpo_nb", "1")
    assert said == ["", "1"]


FAILS = """
def reward(completions, **columns):
    return [{}[0] for _ in completions]
"""


@pytest.mark.ux(13, at="nbclient")
def test_failure_is_told_in_a_few_lines_and_says_where_the_rest_is(kernel: Shared, tmp_path: Path) -> None:
    run = tiny_run(tmp_path, sft__steps=0)
    said, book = kernel.execute(
        tmp_path,
        IMPORTS + FAILS,
        "session = g.start('tiny', rewards={'fairness': [reward]})\nsession",
        "await session.wait()",
        "session.state, session.live",
        "session",
        "g.attach('tiny').summary()",
        "session = g.start('tiny', steps=1)\nawait session.wait()",
    )
    lines = said[2].splitlines()
    assert names(lines[0], "tiny", "RewardError", "'reward'", "KeyError: 0")
    assert "{}[0] for _ in completions" in said[2] and len(lines) <= 12, "the line that raised, and no wall"
    assert lines[-1].endswith("events.jsonl")
    assert "KeyError" in run.events().set_index("kind").loc["traceback", "traceback"]
    assert said[3] == "('failed', False)" and names(said[4], "tiny", "failed", 0, 4, lines[0][13:])
    assert names(said[5], "tiny", "failed", 0, 4, "WorkerFailed", lines[0][13:])
    assert names(said[6].splitlines()[-1], "tiny", "stopped", 1, 4), "and the kernel can start it again"
    assert book.cells[2].outputs[-1].output_type == "error", "the cell fails, so Run All stops"


def aloud(cell: Any) -> list[str]:
    """What a cell has for readers aloud, one text a picture."""
    shown = [output.get("data", {}).get("text/html", "") for output in cell.outputs]
    return [html.unescape(text.partition(">")[2].partition("<")[0]) for text in shown if OWN in text]


def test_a_picture_has_words_that_jupyterlab_reads_aloud(kernel: Shared, tmp_path: Path) -> None:
    curve = "pd.DataFrame({'x': [1, 2], 'y': [1, 2]})"
    value = (
        f"import pandas as pd\nfrom grpo_nb import plots\nplots.curves({{'A < B': {curve}}}, 'nats', mark=0.0, top=10)"
    )
    _, book = kernel.execute(tmp_path, IMPORTS, value)
    (picture,) = [output for output in book.cells[-1].outputs if "image/png" in output.data]
    assert aloud(book.cells[-1]) == [picture.metadata["image/png"]["alt"]] and "A < B" in aloud(book.cells[-1])[0]


@pytest.mark.ux(31, at="nbclient")
def test_a_wait_that_ended_leaves_picture_and_table_without_a_widget(kernel: Shared, tmp_path: Path) -> None:
    tiny_run(tmp_path, sft__steps=2, run__steps=2)
    _, book = kernel.execute(
        tmp_path,
        IMPORTS,
        "await g.start('tiny', stage='sft').wait()",
        "session = g.start('tiny')\nawait session.wait()",
        "await session.wait()",
    )
    for cell, title in zip(book.cells[1:], ("Loss", "Reward", "Reward"), strict=True):
        shown = [output for output in cell.outputs if "data" in output]
        (picture,) = [output for output in shown if "image/png" in output.data]
        assert title in picture.metadata["image/png"]["alt"]
        assert aloud(cell) == [picture.metadata["image/png"]["alt"]]
        assert [output for output in shown if "<table" in output.data.get("text/html", "")]
        assert names(shown[-1].data["text/plain"], "tiny", 2)
        assert not [kind for output in shown for kind in output.data if "widget" in kind]


FULL = """
import errno, shutil
from types import SimpleNamespace
real, disk = os.write, shutil.disk_usage
def full(fd, data):
    if 'metrics.jsonl' in os.readlink(f'/proc/self/fd/{fd}'):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return real(fd, data)
"""


# one clear state in the panel and in its text, and none of it lost
@pytest.mark.slow
def test_full_disk_is_one_clear_state_and_resume_goes_on_when_there_is_space(kernel: Shared, tmp_path: Path) -> None:
    run = tiny_run(tmp_path, run__steps=6)
    said, _ = kernel.execute(
        tmp_path,
        IMPORTS + FULL,
        "session = g.start('tiny', steps=2)\nawait session.wait()",
        "os.write, shutil.disk_usage = full, lambda path: SimpleNamespace(free=0)",
        "session = g.start('tiny')\nawait session.wait()",
        "session.state",
        "session",
        TOLD,
        "os.write, shutil.disk_usage = real, disk\nsession.resume()\nawait session.wait()",
    )
    assert names(said[3], "disk", "0 bytes") and len(said[3].splitlines()) == 1, said[3]
    assert said[4] == "'failed'" and names(said[5], "tiny", "failed", 2, 6, "RunError")
    assert names(said[6].split(". ")[0], "disk", "tiny") and "Resume" in said[6], "the worst first"
    assert names(said[7], "tiny", "done", 6)
    assert [row["step"] for row in run.metric_rows()] == [1, 2, 3, 4, 5, 6]
