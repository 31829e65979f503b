"""The bar of the GPU's memory and utilisation: where it shows, what it reads, and how often."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_nb.jupyter import gpu
from grpo_nb.jupyter.dashboard import Dashboard
from grpo_nb.jupyter.gpu import Gauge, Reading
from grpo_nb.jupyter.session import Session
from grpo_nb.jupyter.start import attach
from grpo_nb.run.run import Run
from tests.support.made_rows import healthy
from tests.support.tokens import names

GIB = 2**30


def session(live: bool = True, where: str = "thread", device: str = "auto") -> Any:
    model = SimpleNamespace(device=device)
    return SimpleNamespace(live=live, where=where, run=SimpleNamespace(config=SimpleNamespace(model=model)))


def test_the_bar_has_its_width_and_a_label() -> None:
    html = Gauge(session(), lambda _: Reading(12.0, 16.0, 97)).html()
    (label,) = re.findall(r'role="img" aria-label="([^"]*)"', html)
    assert names(label, "12.0 of 16.0 GiB", "97%") and "width:75%" in html and html.count(label) == 2


def test_without_a_utilisation_the_memory_is_shown_alone() -> None:
    html = Gauge(session(), lambda _: Reading(4.0, 16.0)).html()
    assert names(html, "4.0 of 16.0 GiB") and re.findall(r"\d+%", html) == ["25%", "100%"]


@pytest.mark.parametrize(
    "other", [{"live": False}, {"where": "process"}, {"device": "cpu"}, {"device": "mps"}], ids=lambda o: next(iter(o))
)
def test_where_this_kernel_does_not_train_on_a_gpu_nothing_is_read(other: dict[str, Any]) -> None:
    read: list[Any] = []
    gauge = Gauge(session(**other), lambda device: read.append(device) or Reading(1, 2))
    assert gauge.html() == "" and read == []


def test_it_reads_once_a_second_and_the_gpu_of_the_settings() -> None:
    now, read = [5.0], list[Any]()

    def reader(device: str | None) -> Reading:
        read.append(device)
        return Reading(len(read), 16.0)

    gauge = Gauge(session(device="cuda:1"), reader, lambda: now[0])
    first = gauge.html()
    now[0] += 0.99
    assert gauge.html() == first and read == ["cuda:1"]
    now[0] += 0.01
    assert names(gauge.html(), "2.0 of 16.0 GiB") and read == ["cuda:1"] * 2
    unnamed = Gauge(session(device="cuda"), reader)
    assert unnamed.html() and read[-1] is None


def test_a_reading_that_fails_shows_nothing_and_is_tried_no_oftener() -> None:
    tries: list[int] = []

    def failing(_: str | None) -> Reading:
        tries.append(1)
        raise RuntimeError("driver")

    gauge = Gauge(session(), failing, lambda: 0.0)
    assert gauge.html() == gauge.html() == "" and len(tries) == 1


def test_a_process_without_the_gpu_sets_none_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: pytest.fail("initialises CUDA"))
    assert gpu.read(None) is None


@pytest.mark.parametrize(("utilisation", "expected"), [(lambda _: 31, 31), (None, None)])
def test_torch_is_asked(utilisation: Any, expected: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: Any) -> int:
        raise ModuleNotFoundError("pynvml")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (4 * GIB, 16 * GIB))
    monkeypatch.setattr(torch.cuda, "utilization", utilisation or missing)
    assert gpu.read(None) == Reading(12.0, 16.0, expected)


def test_the_dashboard_shows_it_with_the_other_numbers(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.log_metrics(healthy(1)[0])
    monkeypatch.setattr(gpu, "read", lambda _: Reading(12.0, 16.0, 97))
    session = attach(run)
    assert "12.0 of 16.0 GiB" not in Dashboard(session).status.value, "this kernel does not train it"
    monkeypatch.setattr(Session, "live", True)
    shown = Dashboard(session).status.value
    assert names(shown, "12.0 of 16.0 GiB") and '<div class="mathjax_ignore" role="img"' in shown
