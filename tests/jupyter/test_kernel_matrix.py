"""Widgets of a run that trains, with subshells and without: what a front end sends is active at the next step.

A front end sends a widget's change as a comm message: over a subshell (JupyterLab as it comes), or over the shell
that a waiting cell holds (JupyterLab with `commsOverSubshells` off, VS Code). Kernels have no switch for it.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_nb.run.run import Run
from tests.support.live_kernel import Kernel, until
from tests.support.tiny import tiny_run
from tests.support.tokens import names

WIDGETS = """
import json
import grpo_nb as g
session = g.start('tiny')
board = session.dashboard()
controls = board.controls
print(json.dumps({name: control.entry.model_id for name, control in controls.knobs.items()}
    | {name: button.model_id for name, button in controls.buttons.items()}))
"""


def change(kernel: Kernel, model: str, subshell: str | None, **state: Any) -> None:
    data = {"method": "update", "state": state, "buffer_paths": []}
    kernel.send("comm_msg", {"comm_id": model, "data": data}, subshell)


def press(kernel: Kernel, model: str, subshell: str | None) -> None:
    data = {"method": "custom", "content": {"event": "click"}}
    kernel.send("comm_msg", {"comm_id": model, "data": data}, subshell)


def used_after(run: Run, key: str, step: int) -> float:
    """What the second step after `step` used: the first may have begun before the change."""
    until(lambda: (run.last_step() or 0) >= step + 2, "two more steps")
    return float(next(row for row in run.metric_rows() if row["step"] == step + 2)[key])


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    kernel = Kernel(tmp_path_factory.mktemp("kernel"))
    yield kernel
    kernel.close()


@pytest.mark.ux(3, 4, 6, 8, 40, at="nbclient")
@pytest.mark.parametrize("used", [True, False], ids=["over_a_subshell", "over_the_shell"])
def test_controls_work_while_a_cell_waits_and_while_none_does(kernel: Kernel, used: bool, tmp_path: Path) -> None:
    assert "kernel subshells" in kernel.client.kernel_info(reply=True, timeout=120)["content"]["supported_features"]
    run = tiny_run(tmp_path, run__steps=5000, sft__steps=0)
    models = json.loads(kernel.run(f"import os; os.chdir({str(tmp_path)!r})\n{WIDGETS}"))
    subshell = kernel.subshell() if used else None
    until(lambda: run.last_step(), "the first step")

    change(kernel, models["temperature"], subshell, value=0.7)
    until(lambda: run.knobs["temperature"].value == 0.7, "the temperature, with no cell running")
    assert used_after(run, "temperature", run.last_step() or 0) == 0.7

    def meanwhile() -> None:
        change(kernel, models["beta/fairness"], subshell, value=0.05)
        until(lambda: run.knobs["beta/fairness"].value == 0.05, "beta, while a cell waits")
        assert used_after(run, "beta/fairness", run.last_step() or 0) == 0.05
        press(kernel, models["stop"], subshell)

    said, error = kernel.ask("await session.wait()", meanwhile=meanwhile)
    assert error is None and names(said.splitlines()[-1], "tiny", "stopped", run.last_step(), 5000), error
    turns = [event for event in run.rows("events") if event["kind"] == "knob" and event["key"] != "command"]
    assert [(turn["key"], turn["new"], turn["by"]) for turn in turns] == [
        ("temperature", 0.7, "dashboard"),
        ("beta/fairness", 0.05, "dashboard"),
    ]
