"""Names and settings of somebody else's run, as trackers take and show them."""

import html
import posixpath
import re
from pathlib import Path

import pytest

from grpo_nb.run.run import Run
from grpo_nb.trackers import mirroring, to_mlflow, to_tensorboard
from tests.support.tiny import tiny_config

KEYS = (
    *(
        "reward/fairness/mean",
        "reward/公平/mean",
        "reward/幻觉/mean",
        "a|b",
        "a<b",
        "a//b",
        "a/b",
        "../x",
        "..",
        "/a",
        "a/",
    ),
    *("x" * 300, "x" * 301, "", ".", "./."),
)


def test_no_two_keys_are_one_of_mlflow_s_names_and_it_takes_each() -> None:
    found = [to_mlflow._name(key) for key in KEYS]
    assert len({*found}) == len(KEYS) and found[:3] == [*KEYS[:3]]
    for name in found:  # as its `_validate_metric_name` has it
        assert re.fullmatch(r"[/\w.\- :]+", name) and len(name) <= to_mlflow.LONGEST_KEY
        assert posixpath.normpath(name) == name and not name.startswith(("/", "..")) and name != "."


def test_settings_load_nothing_into_the_page_of_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    util = pytest.importorskip("tensorboard.plugin_util", reason='needs pip install "grpo_nb[tensorboard]"')
    shown: list[str] = []

    class Writer:
        def __enter__(self) -> "Writer":
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def add_text(self, tag: str, text: str, step: int) -> None:
            shown.append(util.markdown_to_safe_html(text))

    def writer(folder: Path) -> Writer:
        folder.mkdir(parents=True)
        return Writer()

    monkeypatch.setattr(to_tensorboard, "_writer", writer)
    evil = "__b__ ![x](http://evil/p.png)|\n\n# <img src=http://evil/q.png> [l](http://evil) http://evil"
    objectives = {"a|<b>![y](http://evil/r.png)": {"task": "bbq", "data": evil}}
    with mirroring(Run.create(tmp_path / "run", tiny_config(run__trackers=["tensorboard"], objectives=objectives))):
        pass
    (page,) = shown
    assert not re.search(r"<(img|a|h1|strong|em)\b", page) and page.count("<table>") == 1
    cells = [html.unescape(cell) for cell in re.findall("<td>(.*)</td>", page)]
    assert len(cells) == 2 * len(tiny_config(objectives=objectives).flat())
    assert cells[cells.index("objectives.a|<b>![y](http://evil/r.png).data") + 1] == evil.replace("\n", "\\n")
