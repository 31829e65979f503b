"""Data sets of the Hugging Face hub: what is taken for an id, how rows arrive, what errors say. No network."""

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_nb.tasks.bbq import BBQ
from grpo_nb.tasks.hub import is_hub_id
from grpo_nb.tasks.records import DataError
from tests.support.tokens import pattern
from tests.tasks.test_bbq import templates

Loader = Callable[..., Any]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Loader], None]:
    """Puts a `datasets` in place whose `load_dataset` is the given function."""

    def place(loader: Loader) -> None:
        config = SimpleNamespace(HF_HUB_OFFLINE=False)
        placed = SimpleNamespace(load_dataset=loader, config=config)
        monkeypatch.setitem(sys.modules, "datasets", placed)  # type: ignore[arg-type]
        monkeypatch.setitem(sys.modules, "datasets.config", config)  # type: ignore[arg-type]
        monkeypatch.setattr("grpo_nb.tasks.hub.unreachable", lambda name, revision: None)

    return place


def test_what_is_an_id_and_what_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ids = ["heegyu/bbq", "heegyu/bbq:Age", "o-1/n.2:c-d@main", "o/n@1f2e"]
    paths = ["bbq", "./bbq/x", "/a/b", "~/bbq", "a/b/c", "a/*", "a/b.jsonl", "a/b.json", "../a", ""]
    assert [name for name in (*ids, *paths) if is_hub_id(name)] == ids
    assert not is_hub_id(Path("heegyu/bbq")), "a Path is a path"
    (tmp_path / "heegyu").mkdir()
    assert not is_hub_id("heegyu/bbq"), "a name below a folder that is here is a mistyped path"


def test_rows_of_all_splits_are_read(hub: Callable[[Loader], None]) -> None:
    rows, asked = templates(5), []

    def load_dataset(name: str, config: str | None, *, revision: str | None) -> Mapping[str, Any]:
        asked.append((name, config, revision))
        return {"train": rows[:30], "test": rows[30:]}

    hub(load_dataset)
    task = BBQ("heegyu/bbq:all@v2")
    assert asked == [("heegyu/bbq", "all", "v2")]
    assert len(task.examples("train")) + len(task.examples("test")) == len(rows)
    task.selfcheck()
    hub(lambda name, config, revision: rows)
    assert [e.id for e in BBQ("heegyu/bbq").examples("test")] == [e.id for e in task.examples("test")]


def test_a_real_data_set_in_memory_reads_as_the_file_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra `datasets` is not installed")
    rows = templates(5)
    made = datasets.DatasetDict({"test": datasets.Dataset.from_list(rows)})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: made)
    monkeypatch.setattr("grpo_nb.tasks.hub.unreachable", lambda name, revision: None)
    (tmp_path / "same.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert BBQ("heegyu/bbq").examples("train") == BBQ(tmp_path / "same.jsonl").examples("train")


def test_without_datasets_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # type: ignore[arg-type]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("datasets")
    with pytest.raises(DataError, match=pattern("heegyu/bbq", "pip install 'grpo_nb[datasets]'")):
        BBQ("heegyu/bbq")


def test_a_wrong_id_or_row_is_one_clear_error(hub: Callable[[Loader], None]) -> None:
    def refuses(name: str, config: str | None, *, revision: str | None) -> Any:
        raise FileNotFoundError("Config name is missing")

    hub(refuses)
    with pytest.raises(DataError, match=pattern("a/b", "FileNotFoundError", "a/b:NAME")):
        BBQ("a/b")
    hub(lambda name, config, revision: {"test": []})
    with pytest.raises(DataError, match=pattern("a/b", "empty")):
        BBQ("a/b")
    broken = templates(1)
    del broken[3]["label"]
    hub(lambda name, config, revision: {"test": broken})
    with pytest.raises(DataError, match=pattern("a/b", "test", "row 3", "'label'")):
        BBQ("a/b")


def test_a_hub_that_cannot_be_reached_is_tried_once_and_its_cache_is_used(
    hub: Callable[[Loader], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No network is a refused connection here."""
    from huggingface_hub import constants

    real = importlib.import_module("grpo_nb.tasks.hub").unreachable
    asked = []

    def load_dataset(name: str, config: str | None, *, revision: str | None) -> Any:
        asked.append((constants.HF_HUB_OFFLINE, sys.modules["datasets.config"].HF_HUB_OFFLINE))
        if name == "never/read":
            raise ConnectionError("OfflineModeIsEnabled")
        return {"test": templates(5)}

    hub(load_dataset)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr("grpo_nb.tasks.hub.unreachable", real)
    with pytest.raises(DataError, match=pattern("never/read", "ConnectError")):
        BBQ("never/read")
    BBQ("once/read").selfcheck()
    assert asked == [(True, True)] * 2 and not constants.HF_HUB_OFFLINE
