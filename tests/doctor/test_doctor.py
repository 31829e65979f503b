"""The doctor reads files and the machine, names what is wrong, and is silent where nothing is."""

import importlib.util
import json
import math
import socket
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from grpo_nb import rules
from grpo_nb.doctor import diagnose, environment, explain, machine
from grpo_nb.doctor.known_errors import KNOWN
from grpo_nb.rules import hindsight
from grpo_nb.rules.rewards import evaluation_leaked
from grpo_nb.run.run import Run
from tests.support.made_rows import healthy, ill
from tests.support.tiny import edited, tiny_run
from tests.support.tokens import names

F = "fairness"


def save(run: Run, *steps: int) -> None:
    for step in steps:
        run.checkpoints.save(step, {"policy": {"w": torch.full((4,), float(step))}}, {"step": step})


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run that ended well after 60 healthy steps."""
    run = tiny_run(tmp_path, run__steps=60)
    run.log_event("start", step=0, fingerprint="a")
    for row in healthy(60):
        run.log_metrics(row)
    save(run, 0, 40, 60)
    run.log_event("done", step=60)
    return run


def serious(run: Run) -> list[str]:
    return [finding.rule for finding in diagnose(run) if finding.severity != "info"]


# A run


def test_a_run_that_ended_well_has_no_findings(run: Run) -> None:
    assert serious(run) == []


def test_a_new_run_has_no_findings(tmp_path: Path) -> None:
    assert diagnose(tiny_run(tmp_path)) == []


def test_the_rules_see_the_log_nan_included(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, run__steps=60)
    rows = ill(lambda row: {"loss": math.nan, "grad/norm": math.nan, "status": "skipped"}, steps=20, since=20)
    for row in rows:
        run.log_metrics(row)
    save(run, 20)
    assert serious(run) == ["non_finite"]
    assert [f.rule for f in rules.post_mortem(rows, run.config) if f.severity != "info"] == ["non_finite"]


def test_what_a_training_alone_can_look_for_is_read_from_its_events(run: Run) -> None:
    leak = evaluation_leaked("fairness", 5, 9)
    assert leak is not None
    run.log_event("finding", **leak.to_dict())
    run.log_event("finding", rule="evaluation_leaked", severity="error", step=0, evidence={"leaked": "<b>", "of": 2})
    assert [str(finding) for finding in diagnose(run) if finding.severity != "info"] == [str(leak)]


def test_a_diagnosis_writes_nothing(run: Run) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    diagnose(run)
    assert before == {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}


def test_a_damaged_checkpoint_is_named_with_the_reason(run: Run) -> None:
    (run.path / "checkpoints" / "000040" / "policy.safetensors").write_bytes(b"cut")
    (finding,) = [f for f in diagnose(run) if f.rule == "checkpoint_damaged"]
    assert finding.severity == "error" and finding.step == 40 and "policy.safetensors has 3 bytes" in finding.message
    assert "no_checkpoint" not in serious(run)


def test_settings_edited_since_the_checkpoint_are_an_error_with_both_values(run: Run) -> None:
    state = {"step": 60, "config": run.config.model_dump(mode="json")}
    run.checkpoints.save(60, {"policy": {"w": torch.ones(4)}}, state)
    assert serious(run) == []
    (finding,) = [f for f in diagnose(edited(run, run__seed=5)) if f.severity != "info"]
    assert (finding.rule, finding.severity, finding.step) == ("config_edited", "error", 60)
    assert finding.evidence == {"differences": {"run.seed": [0, 5]}} and "run.seed" in finding.message


def test_the_damaged_checkpoint_of_the_start_has_advice_of_its_own(run: Run) -> None:
    for step in (0, 40):
        (run.path / "checkpoints" / f"{step:06d}" / "policy.safetensors").write_bytes(b"cut")
    first, second = (f for f in diagnose(run) if f.rule == "checkpoint_damaged")
    assert first.step == 0 and names(first.advice, "reference") and not names(second.advice, "reference")


def test_a_run_without_any_whole_checkpoint_cannot_go_on(run: Run) -> None:
    for folder in (run.path / "checkpoints").iterdir():
        (folder / "manifest.json").unlink()
    assert serious(run).count("checkpoint_damaged") == 3 and "no_checkpoint" in serious(run)


def test_a_broken_line_in_the_middle_of_a_log_is_counted(run: Run) -> None:
    path = run.path / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:30], "{broken\n", *lines[30:]]))
    (finding,) = [f for f in diagnose(run) if f.rule == "log_damaged"]
    assert finding.evidence == {"file": "metrics.jsonl", "lines": 1} and serious(run) == ["log_damaged"]


def test_steps_that_are_in_no_row_are_counted_and_named(run: Run) -> None:
    path = run.path / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:9], *lines[10:30], *lines[33:58]]))
    (finding,) = [f for f in diagnose(run) if f.rule == "log_hole"]
    assert "metrics.jsonl lacks 6 of 60 steps: 10, 31 to 33, 59 to 60." in finding.message
    assert finding.evidence["missing"] == [10, 31, 32, 33, 59, 60] and finding.severity == "warning"


def test_a_hole_in_the_log_of_sft_is_named(run: Run) -> None:
    for step in (1, 2, 4):
        run.log_sft({"step": step, "loss": 1.0})
    (finding,) = [f for f in diagnose(run) if f.rule == "log_hole"]
    assert "sft.jsonl lacks 1 of 4 steps: 3." in finding.message


def test_a_torn_last_line_is_a_remark(run: Run) -> None:
    path = run.path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    (finding,) = [f for f in diagnose(run) if f.rule == "log_torn"]
    assert finding.severity == "info" and "metrics.jsonl" in finding.message


def test_an_owner_that_vanished_is_reported_with_what_is_saved(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, run__steps=60)
    run.log_event("start", step=0)
    for row in healthy(25):
        run.log_metrics(row)
    save(run, 0, 20)
    with run.lock():
        owner = json.loads((run.path / "lock").read_bytes())
    (run.path / "lock").write_text(json.dumps(owner | {"host": "elsewhere", "heartbeat": 0.0}))
    (finding,) = [f for f in diagnose(run) if f.rule == "dead_owner"]
    assert names(finding.message, 25, 60, "GRPO", 20, 5)


def test_an_owner_that_vanished_in_sft_is_placed_there(tmp_path: Path) -> None:
    run = tiny_run(tmp_path, sft__steps=9)
    for step in range(1, 6):
        run.log_sft({"step": step, "loss": 1.0})
    with run.lock():
        owner = json.loads((run.path / "lock").read_bytes())
    (run.path / "lock").write_text(json.dumps(owner | {"host": "elsewhere", "heartbeat": 0.0}))
    (finding,) = [f for f in diagnose(run) if f.rule == "dead_owner"]
    assert names(finding.message, 5, 9, "SFT", 0)


def test_a_failure_is_explained(run: Run) -> None:
    run.log_event("failed", step=60, error="OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB")
    (finding,) = [f for f in diagnose(run) if f.rule == "failed"]
    assert names(finding.message, "2.50 GiB") and names(finding.advice, "batch.micro_batch")
    run.log_event("done", step=60)
    assert "failed" not in serious(run)


def test_a_failure_that_a_rule_caused_names_it_and_does_not_repeat_it(run: Run) -> None:
    run.log_metrics({"step": 61, "status": "rolled_back", "rollback/in_a_row": 9, "lr": 1e-3})
    (ended,) = [f for f in diagnose(run) if f.rule == "repeated_rollbacks"]
    run.log_event("failed", step=61, error=f"TrainingError: {ended}")
    (finding,) = [f for f in diagnose(run) if f.rule == "failed"]
    assert finding.evidence["rules"] == ["repeated_rollbacks"] and names(finding.message, "repeated_rollbacks", 61)
    assert ended.message not in finding.message and ended.advice not in finding.advice
    run.log_event("failed", step=61, error="TrainingError: error: of_another_log at step 3: gone. 4711")
    (finding,) = [f for f in diagnose(run) if f.rule == "failed"]
    assert names(finding.message, "of_another_log", 4711), "no finding of the list says it"


def test_other_code_on_resume_is_a_remark(run: Run) -> None:
    run.log_event("resume", step=20, fingerprint="a")
    assert "code_changed" not in [f.rule for f in diagnose(run)]
    run.log_event("resume", step=40, fingerprint="b")
    (finding,) = [f for f in diagnose(run) if f.rule == "code_changed"]
    assert finding.severity == "info" and names(finding.message, 40)


def test_knobs_that_cannot_be_read_are_reported(run: Run) -> None:
    (run.path / "knobs.json").write_text("{broken")
    assert "knobs_unreadable" in serious(run)


def test_reward_without_accuracy_needs_the_evaluations(run: Run) -> None:
    for stage, accuracy in (("sft", 0.6), ("latest", 0.59)):
        metrics = {"accuracy": {"value": accuracy, "low": 0.5, "high": 0.7}}
        run.log_evaluation({"stage": stage, "objective": F, "split": "test", "mode": "greedy", "metrics": metrics})
    assert serious(run) == ["reward_without_accuracy"]


# An error


def nested(error: BaseException) -> BaseException:
    try:
        try:
            raise error
        except BaseException as inner:
            raise ValueError("the cell failed") from inner
    except ValueError as outer:
        return outer


ERRORS: list[tuple[BaseException, str, str]] = [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."), "20.00 MiB", "batch.micro_batch"),
    (MemoryError("Unable to allocate 3 GiB"), "memory", "grpo-nb plan"),
    (RuntimeError("Trying to backward through the graph a second time"), "backward", "Not retain_graph"),
    (RuntimeError("CUDA error: device-side assert triggered"), "nan", "CUDA_LAUNCH_BLOCKING"),
    (RuntimeError("CUDA error: no kernel image is available for execution"), "other GPU arch", "download.pytorch.org"),
    (
        RuntimeError("probability tensor contains either `inf`, `nan` or element < 0"),
        "nan",
        "learning rate",
    ),
    (AssertionError("Torch not compiled with CUDA enabled"), "CPU only", "model.device"),
    (OSError(28, "No space left on device"), "disk", "keep_checkpoints"),
    (
        ModuleNotFoundError("No module named 'peft'"),
        sys.executable,
        f"{sys.executable} -m pip install peft",
    ),
]


@pytest.mark.parametrize(("error", "cause", "change"), ERRORS, ids=lambda value: type(value).__name__)
def test_well_known_errors_are_explained(error: BaseException, cause: str, change: str) -> None:
    for form in (error, nested(error)):
        words = explain(form)
        assert words is not None and cause in words and change in words and words.endswith(".")


def test_errors_really_raised_by_torch_are_recognised() -> None:
    x = torch.ones(2, requires_grad=True)
    loss = (x * x).sum()
    loss.backward()
    with pytest.raises(RuntimeError) as twice:
        loss.backward()
    with pytest.raises(RuntimeError) as frozen:
        torch.ones(2).sum().backward()
    with pytest.raises(RuntimeError) as poisoned:
        torch.multinomial(torch.tensor([math.nan, 1.0]), 1)
    explained = [explain(e.value) or "" for e in (twice, frozen, poisoned)]
    assert all(explained) and len(set(explained)) == 3 and "trainable" in explained[1] and "damaged" in explained[2]


def test_an_error_that_speaks_for_itself_is_left_alone() -> None:
    assert explain(ValueError("batch.prompts=3 cannot be shared")) is None


def test_a_circle_of_causes_ends() -> None:
    one, other = ValueError("a"), ValueError("b")
    one.__cause__, other.__cause__ = other, one
    assert explain(one) is None


def test_every_known_error_has_both_halves() -> None:
    for known in KNOWN:
        assert known.cause.endswith(".") and not known.change.endswith("."), known.pattern


# The machine


def checks(status: str | None = None) -> dict[str, machine.Check]:
    return {c.name: c for c in environment() if status in (None, c.status)}


def test_this_environment_has_no_error() -> None:
    assert {name for name in checks()} >= {"python", "kernel", "code", "packages", "torch", "device", "disk", "keys"}
    assert checks("error") == {}
    assert "torch" in checks()["packages"].found
    assert checks()["python"].status == "ok", "a check that breaks is a warning, so no error shows it"


def test_keys_are_told_to_be_there_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-verysecret")
    said = " ".join(f"{c.found} {c.advice}" for c in environment())
    assert "OPENAI_API_KEY" in said and "verysecret" not in said
    monkeypatch.delenv("OPENAI_API_KEY")
    assert said.count("OPENAI_API_KEY") and said != " ".join(f"{c.found} {c.advice}" for c in environment())


def versions(monkeypatch: pytest.MonkeyPatch, **changed: str | None) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name in changed and changed[name] is None:
            raise metadata.PackageNotFoundError(name)
        return changed.get(name) or real(name)

    monkeypatch.setattr(metadata, "version", version)


def test_a_version_outside_of_its_range_and_a_missing_package_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, transformers="4.44.2", peft=None)
    wrong = {c.found: c for c in machine._packages() if c.status == "error"}
    assert {found.split()[0] for found in wrong} == {"transformers", "peft"} and "transformers 4.44.2" in wrong
    assert "pip install 'transformers" in wrong["transformers 4.44.2"].advice


def test_an_absent_extra_is_no_fault_and_an_old_one_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        machine, "_project", lambda: (">=3.11", [(machine.Requirement("openai>=1.60; extra == 'judge'"), True)])
    )
    versions(monkeypatch, openai=None)
    assert [c.status for c in machine._packages()] == ["ok"]
    versions(monkeypatch, openai="0.28")
    assert [c.status for c in machine._packages()] == ["warning", "ok"]


def test_requirements_are_read_from_the_checkout_where_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "metadata", missing)
    wanted, requirements = machine._project()
    assert "3.11" in wanted and {"torch", "matplotlib"} <= {r.name for r, _ in requirements}


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((8, 0), ["sm_80"], True),
        ((8, 9), ["sm_80", "sm_90"], True),
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_90a"], True),
        ((7, 0), ["sm_75", "sm_80"], False),
        ((12, 0), ["sm_90", "compute_90"], True),
        ((10, 0), ["sm_100", "sm_120"], True),
        ((8, 0), [], False),
    ],
)
def test_gpu_code_runs_on_its_major_version_or_by_ptx(
    capability: tuple[int, int], architectures: list[str], runs: bool
) -> None:
    assert machine.runs_on(capability, architectures) is runs


def test_a_gpu_without_kernels_in_this_torch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_arch_list": lambda: ["sm_80", "sm_90"],
        "get_device_capability": lambda i: (12, 0),
        "get_device_name": lambda i: "RTX 5090",
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    (check,) = machine._torch()
    assert check.status == "error" and "RTX 5090 (sm_120)" in check.found and "sm_120" in check.advice


def test_a_driver_that_torch_cannot_use_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    (check,) = machine._torch()
    assert check.status == "warning" and names(check.advice, "NVIDIA")


def test_a_check_that_cannot_be_made_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: 1 / 0)
    assert names(checks("warning")["disk"].found, "ZeroDivisionError")
    assert "keys" in checks()


def test_one_of_several_processes_is_told_that_one_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert [*machine._processes()] == []
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for name, value in {"WORLD_SIZE": 8, "RANK": 3, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        (check,) = machine._processes()
    assert check.status == "warning" and names(check.found, 3, 8, port, "answers") and "torchrun" in check.advice
    (check,) = machine._processes()
    assert names(check.found, "not")


def test_little_disk_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = machine.shutil.disk_usage(Path.cwd())._replace(free=2**28)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: usage)
    assert "keep_checkpoints" in checks("warning")["disk"].advice


def test_memory_is_that_of_the_container_where_it_has_a_limit(tmp_path: Path) -> None:
    assert machine.available_ram_gib(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 33554432 kB\nMemAvailable: 16777216 kB\n")
    assert machine.available_ram_gib(tmp_path) == 16.0
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.current").write_text(str(2**30))
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert machine.available_ram_gib(tmp_path) == 16.0
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(str(4 * 2**30))
    assert machine.available_ram_gib(tmp_path) == 3.0


def test_standing_in_another_copy_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "grpo_nb").mkdir()
    (tmp_path / "grpo_nb" / "__init__.py").touch()
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    (check,) = machine._kernel()
    assert check.status == "warning" and str(tmp_path) in check.advice and sys.executable in check.found


SOURCE = """
from functools import cache

LIMIT = {limit}

def plain(x):
    return [y + 1 for y in x if y in {{"a", "b", "c"}}]

class Thing:
    @property
    def size(self):
        return {size}

    @cache
    def slow(self):
        return "slow"
"""


def loaded(path: Path, **values: Any) -> ModuleType:
    path.write_text(SOURCE.format(**{"limit": 1, "size": 2} | values))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.ux(25, at="unit")
def test_code_edited_after_it_was_loaded_is_found(tmp_path: Path) -> None:
    path = tmp_path / "edited.py"
    module = loaded(path)
    assert machine.stale_functions(module) == []
    path.write_text("# a comment on top moves every line\n" + SOURCE.format(limit=1, size=2))
    assert machine.stale_functions(module) == []
    path.write_text(SOURCE.format(limit=1, size=3))
    assert machine.stale_functions(module) == ["Thing.size"]
    path.write_text(SOURCE.replace("def plain", "def renamed").format(limit=1, size=2))
    assert machine.stale_functions(module) == ["plain"]
    path.unlink()
    assert machine.stale_functions(module) == []


def test_the_package_is_found_stale_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PACKAGE", "edited")
    module = loaded(tmp_path / "edited.py")
    monkeypatch.setitem(sys.modules, "edited", module)
    assert [c.status for c in machine._code()] == ["ok"]
    (tmp_path / "edited.py").write_text(SOURCE.format(limit=1, size=99))
    (check,) = machine._code()
    assert check.status == "warning" and "edited" in check.found and "restart" in check.advice


def test_a_clock_that_was_set_back_while_a_run_trained_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 3600)
    run.log_event("checkpoint", step=60)
    (finding,) = [finding for finding in diagnose(run) if finding.rule == "clock_set_back"]
    assert finding.severity == "warning" and finding.evidence["seconds"] == pytest.approx(3600, abs=30)


def test_a_diagnosis_names_the_commonest_cause_of_missing_scores(tmp_path: Path) -> None:
    run = tiny_run(tmp_path)
    for row in healthy(4):
        run.log_metrics(row | {"scored/fairness": 0.0})
    run.log_samples([{"step": 4, "objective": "fairness", "reward": None, "cause": "'never' gave None"}])
    (finding,) = [found for found in diagnose(run) if found.rule == "unscored"]
    assert "'never' gave None" in finding.message


def test_a_diagnosis_knows_whether_sft_was_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny_run(tmp_path)
    for row in healthy(20):
        run.log_metrics(row | {"truncation/fairness": 0.99})

    def fires() -> bool:
        return "sft_not_run" in {found.rule for found in diagnose(run, quick=True)}

    run.log_event("start", step=0)
    assert not fires()  # a log of a version that did not say
    run.log_event("start", step=0, from_sft=False)
    assert fires()
    monkeypatch.setattr(hindsight, "FEW_ROWS", 1)
    assert fires()
    run.log_event("start", step=0, from_sft=True)
    assert not fires()


@pytest.mark.parametrize(
    ("versions", "status", "named"),
    [
        ({}, "ok", ()),
        ({"vllm": "0.20.0"}, "ok", ("0.20.0",)),
        ({"vllm": "0.20.0", "trl": "1.0"}, "info", ("0.20.0", "trl 1.0", "vllm>=0.21")),
        ({"vllm": "0.20.0", "torch": "2.0"}, "info", ("0.20.0", "torch==2.1", "2.0")),
    ],
    ids=["missing", "alone", "trl", "torch"],
)
def test_vllm_is_looked_up_and_not_imported(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], status: str, named: tuple[str, ...]
) -> None:
    needs = {"trl": ['vllm>=0.21; extra == "vllm"', "torch"], "vllm": ["torch==2.1", "transformers>=4"]}
    monkeypatch.setattr(machine, "installed_version", versions.get)
    monkeypatch.setattr(machine.metadata, "requires", needs.get)
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: object())
    (check,) = machine._vllm()
    assert check.status == status and names(check.found, "rollout.engine", *named)
    assert bool(check.advice) == (status == "info") and "vllm" not in sys.modules
