"""`make docs`: notebooks executed in a scratch project, reference pages, an index; none of them needs a network."""

import re
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest

from grpo_nb.dev import docs
from grpo_nb.metrics import keys
from grpo_nb.metrics.healthy import HEALTHY
from tests.conftest import ROOT

LOADS = {"script": "src", "img": "src", "iframe": "src", "link": "href", "source": "src", "object": "data"}


class Loads(HTMLParser):
    """What a browser fetches by itself when it shows a page, except what is inside the page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        address = dict(attrs).get(LOADS.get(tag, ""))
        if address and not address.startswith("data:"):
            self.found.append(address)
        self.found += re.findall(r"url\(['\"]?(?!data:)([^)]+)", dict(attrs).get("style") or "")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "style":
            bare = re.sub(r"/\*.*?\*/", "", data, flags=re.DOTALL)
            self.found += re.findall(r"@import\s+\S+", bare)
            self.found += re.findall(r"url\(\s*['\"]?(?!data:|#)([^)'\"]+)", bare)


def loads(page: str) -> list[str]:
    parser = Loads()
    parser.feed(page)
    return parser.found


def book(path: Path, *cells: tuple[str, str]) -> Path:
    kinds = {"md": nbformat.v4.new_markdown_cell, "code": nbformat.v4.new_code_cell}
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    made = [kinds[kind](source) for kind, source in cells]
    nbformat.write(nbformat.v4.new_notebook(cells=made, metadata={"kernelspec": kernel}), path)
    return path


PLOT = """
import matplotlib.pyplot as plt, ipywidgets as w
plt.plot([1, 2])
display(w.HBox([w.Label("a label"), w.FloatSlider(description="a slider")]))
"""


@pytest.mark.ux(31, at="nbclient")
def test_pages_of_notebooks_need_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = book(
        tmp_path / "01_first.ipynb",
        ("md", "# 1. First\n\nSee [02_second](02_second.ipynb)."),
        ("code", "from pathlib import Path\nPath('../runs').mkdir()\n" + PLOT),
    )
    second = book(tmp_path / "02_second.ipynb", ("md", "# 2. Second"), ("code", "Path('../runs').is_dir(), Path.cwd()"))
    second.write_text(second.read_text().replace("Path('../runs').is", "from pathlib import Path\\nPath('../runs').is"))
    out = tmp_path / "docs"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert docs.main([str(out), str(first), str(second)]) == 0
    written = {path.name: path.read_text() for path in out.glob("*.html")}
    assert set(written) == {f"{name}.html" for name in ("01_first", "02_second", "index", *docs.pages())}
    assert {name: loads(page) for name, page in written.items() if loads(page)} == {}
    assert "data:image/png" in written["01_first.html"] and "a label" in written["01_first.html"]
    assert "No description" not in written["01_first.html"], "every picture says what it shows"
    assert 'href="02_second.html"' in written["01_first.html"]
    assert "(True, " in written["02_second.html"] and not (tmp_path / "runs").exists(), "run in a project of their own"
    assert '<a href="01_first.html">1. First</a>' in written["index.html"]
    links = re.findall(r'href="([^"]+)"', written["index.html"])
    assert all((out / link).is_file() for link in links) and len(links) == 2 + len(docs.pages())


def test_docs_fail_where_a_notebook_does(tmp_path: Path) -> None:
    bad = book(tmp_path / "01_bad.ipynb", ("md", "# 1. Bad"), ("code", "1 / 0"))
    assert docs.main([str(tmp_path / "docs"), str(bad)]) == 1
    assert "ZeroDivisionError" in (tmp_path / "docs" / "01_bad.html").read_text()


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://a.example/x.js"></script>',
        '<link rel="stylesheet" href="https://a.example/x.css">',
        '<style>@import "https://a.example/x.css";</style>',
        "<style>a { background: url(https://a.example/x.png) }</style>",
        '<img src="x.png">',
    ],
)
def test_what_a_page_would_fetch_is_seen(text: str) -> None:
    assert loads(text)
    assert not loads('<a href="https://a.example">link</a><img src="data:image/png;base64,QUJD">')


def test_every_metric_is_listed_with_its_unit_and_meaning() -> None:
    lines = docs.pages()["metrics"].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| `")]
    wanted = [
        [f"`{row.name}`", row.unit, row.meaning, HEALTHY[row.name], ", ".join(row.producers)]
        for row in keys.TABLE.values()
    ]
    assert [[cell.replace(r"\|", "|") for cell in row] for row in rows] == wanted
