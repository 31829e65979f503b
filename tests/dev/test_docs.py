"""`make docs`: notebooks executed in a scratch project, reference pages, an index; none of them needs a network."""

import base64
import hashlib
import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest

from grpo_nb import presets
from grpo_nb.dev import docs, docs_pages
from grpo_nb.doctor.known_errors import KNOWN
from grpo_nb.metrics import keys
from grpo_nb.metrics.healthy import HEALTHY
from grpo_nb.run.run import Run
from grpo_nb.training.grpo import grpo
from grpo_nb.training.sft import sft
from tests.conftest import ROOT
from tests.support.tiny import small_world, tiny_config

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
    named = docs.guides().keys() | docs.pages().keys()
    assert set(written) == {f"{name}.html" for name in ("01_first", "02_second", "index", *named)}
    assert {name: loads(page) for name, page in written.items() if loads(page)} == {}
    assert "data:image/png" in written["01_first.html"] and "a label" in written["01_first.html"]
    assert "No description" not in written["01_first.html"], "every picture says what it shows"
    assert 'href="02_second.html"' in written["01_first.html"]
    assert "(True, " in written["02_second.html"] and not (tmp_path / "runs").exists(), "run in a project of their own"
    assert '<a href="01_first.html">1. First</a>' in written["index.html"]
    links = re.findall(r'href="([^"]+)"', written["index.html"])
    assert all((out / link).is_file() for link in links) and len(links) == 2 + len(named)


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


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    docs.write(folder)
    return folder


class Anchors(HTMLParser):
    """Links of a page, and what can be linked to in it."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.links += [given["href"] or ""] if tag == "a" and "href" in given else []
        self.ids |= {given["id"] or ""} if "id" in given else set()


def test_no_link_of_a_page_is_dead(written: Path) -> None:
    found = {path.name: Anchors(path.read_text()) for path in written.glob("*.html")}
    dead = [
        (name, link)
        for name, page in found.items()
        for link in page.links
        if not link.startswith(("https://", "http://"))
        and (target := link.partition("#")[0] or name) is not None
        and (target not in found or (link.partition("#")[2] or "") not in {"", *found[target].ids})
    ]
    assert dead == []
    assert {known.page.partition("#")[2] for known in KNOWN} <= found["errors.html"].ids


def test_the_readme_links_to_what_is_there() -> None:
    text = (ROOT / "README.md").read_text()
    anchors = {docs_pages.slug(line.lstrip("# ")) for line in text.splitlines() if line.startswith("#")}
    pictures = re.findall(r'\b(?:src|srcset)="([^"]+)"', text)
    assert len(pictures) == 2
    for link in [*re.findall(r"\]\(([^)\s]+)\)", text), *pictures]:
        path, _, anchor = link.partition("#")
        if link.startswith("http"):
            continue
        assert not path or (ROOT / path).exists(), link
        sections = docs_pages.parsed((ROOT / path).read_text()).sections if path.endswith(".md") else ()
        assert not anchor or anchor in (anchors if not path else {section.anchor for section in sections}), link


def test_the_search_finds_a_setting_by_its_words(written: Path) -> None:
    page = (written / "index.html").read_text()
    data = json.loads(page.partition('id="sections">')[2].partition("</script>")[0])
    found = {heading: text for page_name, _, heading, text in data if page_name == "settings"}
    assert found["batch.group_size"].startswith("batch.group_size 8") and len(found) > 100
    policy = re.findall(r"script-src 'sha256-([^']+)'", html.unescape(page))
    script = page.rpartition("<script>")[2].partition("</script>")[0]
    assert policy == [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()]


@pytest.mark.usefixtures("narrow_model")
def test_the_script_of_the_readme_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    monkeypatch.chdir(tmp_path)
    config = tiny_config(run__steps=2, sft__steps=1)
    monkeypatch.setattr(presets, "demo", lambda: config)
    run = Run.create("runs/first", config)
    small_world(run.path)
    for _ in (*sft(run), *grpo(run, steps=1)):
        pass
    for _ in range(2):
        exec(script, {})
        assert [row["step"] for row in run.rows("metrics")] == [1, 2]
