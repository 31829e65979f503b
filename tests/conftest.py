"""Every shape in a signature is checked while testing; property tests draw the same examples each time."""

import gc
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from hypothesis import settings

from tests.support import checker

# jsonschema builds 38 grammars with it on import, seconds in every process, for formats that no notebook has.
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]

# Before anything imports the package: modules loaded earlier would go unchecked.
checker.install("grpo_nb")

# Tiny models: a second thread costs more than it brings where cores are shared. Processes that tests start inherit it.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

# What is written outlives a killed process without it, and no test cuts the power: in one of three seconds of a test
# that saves, a process would wait for the disk.
os.fsync = os.fstat  # type: ignore[assignment]

settings.register_profile("grpo_nb", derandomize=True, deadline=None, database=None)
settings.load_profile("grpo_nb")

ROOT = Path(__file__).resolve().parents[1]
collect_ignore = ["golden/make_trl.py"]  # run by hand; imports TRL


LONGEST = (
    *("executed", "browser", "grpo", "kernel", "loop", "experience", "graph", "plots", "session", "demo", "dashboard"),
    *("cli_train", "combine_gradients", "workers", "kernel_matrix", "checkpoints", "kernel_session", "notices", "kill"),
    *("judge_run", "quick_eval", "sft", "damage", "tailing", "pareto", "judge_servers", "fault_lab"),
)
"""Test files by their time, the longest first; the others take a few seconds each."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """No cycles are looked for while everything is imported, nor later in what was: that is a fifth of collection."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One process more than there are cores: those that drive a browser or a kernel wait for a third of their time."""
    return len(os.sched_getaffinity(0)) + 1 if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files: the processes of `make test` then end at about the same time."""
    place = {f"test_{name}": n for n, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


def pytest_runtest_setup() -> None:
    torch.manual_seed(0)  # what a library draws while it makes a model, such as the adapters of peft
    checker.begin()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a wait that was interrupted leaves the idle kernel's


@pytest.fixture(scope="session", autouse=True)
def own_confirmations(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes what this user confirmed or keeps; processes that tests start inherit it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_NB_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("GRPO_NB_CONFIG_DIR", str(tmp_path_factory.mktemp("configuration")))
        patch.setenv("GRPO_NB_PROJECT_DIR", str(tmp_path_factory.mktemp("project")))
        yield


@pytest.fixture(scope="session", autouse=True)
def encoded_once() -> Iterator[None]:
    """The demo's prompts are encoded by the first policy of this process that has its tokenizer."""
    from tests.support.tiny import prompts_encoded_once

    with prompts_encoded_once():
        yield


@pytest.fixture
def unchecked() -> Iterator[None]:
    """No types are checked at calls, as outside of tests: what the package itself says of a wrong argument."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def narrow_model() -> Iterator[None]:
    """What this file trains in this process is a tenth as large as the demo's model, and behaves alike."""
    from tests.support.tiny import narrow_models

    with narrow_models():
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets beside the repository; tests that need it are skipped where it is absent."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}")
    return folder


@pytest.fixture
def judge_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of the judges that tests ask."""
    from tests.support.judging import KEY, VARIABLE

    monkeypatch.setenv(VARIABLE, KEY)


@pytest.fixture
def server() -> Iterator[Any]:
    """A judge behind HTTP that grades by rules and wants the key."""
    from tests.support.judge_server import JudgeServer, serving
    from tests.support.judging import KEY

    with serving(JudgeServer(key=KEY)) as running:
        yield running


@pytest.fixture(scope="module")
def this_checkout() -> Iterator[None]:
    """Kernels that start meanwhile import the package from here, and add up in the order that one thread has."""
    from tests.support import forked

    with pytest.MonkeyPatch.context() as patch, forked.kernels():
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A JupyterLab for all browser tests: starting one takes longer than most of them."""
    pytest.importorskip("jupyterlab", reason="needs JupyterLab: pip install -e .[dev]")
    from tests.support.lab import Lab

    lab = Lab(tmp_path_factory.mktemp("lab"))
    yield lab
    lab.close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser for one file's tests: while it runs, playwright's event loop leaves no other test one of its own."""
    pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e .[dev]")
    from tests.support.lab import CHROMIUM, chromium

    if CHROMIUM is None:
        pytest.skip("no chromium or chrome on this machine")
    with chromium() as browser:
        yield browser


@pytest.fixture
def desk(chromium: Any, lab: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A window that no other test has used, in a JupyterLab as it comes; its kernels end with it."""
    from tests.support.lab import VIEWPORT, Desk

    context = chromium.new_context(viewport=VIEWPORT)
    desk = Desk(lab, context.new_page())
    yield desk
    desk.shot(f"last-{request.node.originalname}")
    context.close()
    lab.end_kernels()
    lab.reset()
