"""Nothing that a run's files hold becomes markup: not in pages, not in widgets, not in a terminal."""

import importlib
import importlib.util
import json
import logging
import pkgutil
import re
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args

import ipywidgets as w
import pandas as pd
import pytest

import grpo_nb
from grpo_nb import cli
from grpo_nb.dev import docs, docs_pages, render
from grpo_nb.doctor import diagnose
from grpo_nb.jupyter import project
from grpo_nb.jupyter.samples import SampleBrowser
from grpo_nb.jupyter.start import attach, start
from grpo_nb.printable import _CONTROLS, Formatter, clean_logger, json_text, one_line, printable
from grpo_nb.report import markup, report, rollouts, tables
from grpo_nb.report.rollouts import Colouring
from grpo_nb.report.tables import Table
from grpo_nb.rules.finding import Finding
from grpo_nb.run.listing import list_runs
from grpo_nb.run.lock import Owner
from grpo_nb.run.run import Run, RunError
from tests.run.test_samples import sample
from tests.support.kill_points import ROOT
from tests.support.strangers_run import MARKUP, name, strangers_run

TAGS = {
    "html": {"lang"},
    "meta": {"charset", "http-equiv", "content"},
    "img": {"alt", "style", "src"},
    "table": {"class"},
    "p": {"class"},
    "td": {"style"},
    "th": {"style"},
    "div": {"class", "style"},
    "span": {"class", "style"},
    "i": {"class", "title"},
    "b": {"class"},
    "summary": {"class"},
} | {tag: set() for tag in ("head", "body", "title", "style", "h1", "h2", "thead", "tbody", "tr", "details", "pre")}
"""Elements of the templates, each with its attributes."""
STRUCK = "onerror"


class Strict(HTMLParser):
    """Collects what no template makes, and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.strange: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in TAGS or {key for key, _ in attrs} - TAGS[tag]:
            self.strange.append(self.get_starttag_text() or tag)
        if tag == "img" and not str(dict(attrs)["src"]).startswith("data:image/png;base64,"):
            self.strange.append(self.get_starttag_text() or tag)
        style = dict(attrs).get("style") or ""
        if "url" in style or "expression" in style or STRUCK in (dict(attrs).get("class") or ""):
            self.strange.append(style)

    def handle_data(self, data: str) -> None:
        self.text += data


def text_of(html: str) -> str:
    parser = Strict()
    parser.feed(str(html))
    parser.close()
    assert not parser.strange, parser.strange[:3]
    assert not (hidden := _CONTROLS.search(str(html))), hidden
    return parser.text


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return strangers_run(tmp_path_factory.mktemp("strangers"))


def test_the_report_page_shows_markup_as_text(run: Run) -> None:
    page = report.page(run)
    text = text_of(page)
    for part in ("run", "fairness", "model", "data", "m", "correct"):
        assert printable(name(part)) in text, part
    assert not re.search(r"\b[A-Z]\w+Error\b", text)
    assert f'http-equiv="Content-Security-Policy" content="{markup.POLICY}"'.replace("'", "&#39;") in page
    assert "script-src" not in markup.POLICY and markup.POLICY.startswith("default-src 'none'")


def test_tables_show_markup_as_text(run: Run) -> None:
    first = next(iter(run.config.objectives))
    shown = [
        report.events(run, limit=500),
        report.starts(run),
        report.samples(run, limit=50),
        report.comparison(run),
        report.sft_losses(run),
        report.knob_trace(run, f"beta/{first}", 3),
        report.report(run).table,
        tables.findings(diagnose(run)),
        tables.settings(run.config),
        tables.changed_settings(run.config),
        report.glossary(run),
        project.runs(run.path.parent),
        tables.key_values({MARKUP: MARKUP}, MARKUP),
        Table(pd.DataFrame({MARKUP: [MARKUP, [MARKUP], {MARKUP: 1}]}), MARKUP, folded=True),
        Table(pd.DataFrame(), MARKUP),
    ]
    seen = [text_of(table._repr_html_()) for table in shown]
    assert sum(STRUCK in text for text in seen) >= 10
    assert not any(_CONTROLS.search(repr(table)) for table in shown), "the text form may reach a terminal"


def widgets(widget: Any) -> Iterator[Any]:
    yield widget
    for child in getattr(widget, "children", ()):
        yield from widgets(child)


def test_widgets_show_markup_as_text(run: Run) -> None:
    board = attach(run).dashboard()
    try:
        seen = ""
        for page in board.pages.options:
            board.pages.value = page
            board.refresh()
            assert board.samples is not None
            for colouring in get_args(Colouring):
                board.samples.colouring.value = colouring
            parts = [*widgets(board.widget)]
            seen += "".join(text_of(part.value) for part in parts if isinstance(part, w.HTML))
        board.notify(MARKUP)
        seen += text_of(board.message.value)
        assert printable(name("run")) in seen and printable(name("m")) in seen and "Who is it?" in seen
        assert not any(getattr(part, "description_allow_html", False) for part in parts)
        assert not any(isinstance(part, w.HTMLMath) for part in parts)
        assert not any("$" in getattr(part, "description", "") for part in parts), "would be typeset"
    finally:
        board.close()


def test_samples_are_shown_whatever_stands_in_a_field() -> None:
    row = sample(1)
    values: tuple[Any, ...] = (MARKUP, [MARKUP], {MARKUP: MARKUP}, 10**400, True, None, float("nan"), [[1]], -1)
    for key in row.keys() - {"step"}:
        for value in values:
            for group in rollouts.groups([row | {key: value}]):
                for colouring in get_args(Colouring):
                    text_of(rollouts.page(group, colouring))


def test_the_browser_of_samples_chooses_among_names_that_are_markup(run: Run) -> None:
    browser = SampleBrowser(run)
    browser.refresh()
    for objective in run.config.objectives:
        browser.objective.value = objective
        for _, number in browser.group.options:
            browser.group.value = number
            assert STRUCK in text_of(browser.text.value)


def test_pages_of_the_documentation_take_no_markup_from_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docs, "pages", lambda: {"settings": f"# a\n\n{MARKUP}\n\n[x](javascript:alert(1))\n"})
    for path in docs.write(tmp_path):
        page = path.read_text().replace(f"<script>{docs_pages.SCRIPT}</script>", "")
        page = page.replace('<script type="application/json" id="sections">', "")
        assert "<script" not in page and "<img" not in page and 'href="javascript' not in page
        assert "Content-Security-Policy" in page


def test_a_rendered_widget_takes_no_markup_from_a_text() -> None:
    models = {
        "label": {"model_name": "LabelModel", "state": {"value": MARKUP}},
        "slider": {"model_name": "FloatTextModel", "state": {"description": MARKUP}},
        "image": {"model_name": "ImageModel", "state": {}, "buffers": [{"path": ["value"], "data": f'x">{MARKUP}'}]},
        "box": {"model_name": "VBoxModel", "state": {"children": ["IPY_MODEL_label", "IPY_MODEL_slider"]}},
    }
    assert text_of(render._still("box", models)).count(printable(MARKUP)) == 2
    text_of(render._still("image", models))


def test_the_package_writes_no_markup_but_in_templates() -> None:
    source = [path for path in (ROOT / "grpo_nb").rglob("*.py")]
    tags = ("<div", "<span", "<img", "<td", "<style", "<html", "</", "<details")
    allowed = {"tasks", "judge", "policy"}  # there it is what models and servers write
    found = [
        f"{path.name}: {tag}"
        for path in source
        if not allowed & {*path.relative_to(ROOT / "grpo_nb").parts}
        for tag in tags
        if tag in path.read_text().replace("</think>", "")
    ]
    assert not found, "HTML belongs into grpo_nb/report/templates"
    for template in (ROOT / "grpo_nb" / "report" / "templates").glob("*.html"):
        assert "|safe" not in template.read_text().replace(" ", "") and "autoescape" not in template.read_text()


# ---- terminals


COMMANDS = (["runs"], ["runs", "--json"], ["diagnose", "RUN"], ["diagnose", "RUN", "--json"], ["settings", "RUN"])
COMMANDS += (["status", "RUN"], ["status", "RUN", "--json"], ["samples", "RUN"], ["compare", "RUN", "RUN"])
COMMANDS += (["settings", "RUN", "--json"], ["tell", "RUN", "pause"], ["eval", "RUN", "--compare"])


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_control_character_reaches_a_terminal(
    run: Run, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"RUN": str(run.path), "runs": "runs"}
    arguments = [places.get(word, word) for word in command]
    cli.main([*arguments, *([str(run.path.parent)] if command[0] == "runs" else [])])
    said = capsys.readouterr()
    assert STRUCK in said.out and not _CONTROLS.search(said.out + said.err)
    if "--json" in command:
        assert json.loads(said.out)


def test_errors_and_warnings_reach_a_terminal_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a\x1b[31m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"\x1b[2J\u202e": 1}))
    assert cli.main(["diagnose", str(folder)]) == 1
    said = capsys.readouterr().err
    assert "config.json" in said and not _CONTROLS.search(said)
    record = logging.LogRecord("n", logging.WARNING, "p", 1, "%s", (MARKUP,), None)
    assert STRUCK in (line := Formatter("%(message)s").format(record)) and not _CONTROLS.search(line)


DIRTY = "\x1b[2J\x9b31m\u202e\x07"


def test_what_python_prints_is_clean(tmp_path: Path) -> None:
    """Where nobody cleans what comes out: plain Python, and whatever logging somebody set up."""
    path = strangers_run(tmp_path).path.rename(tmp_path / f"a{DIRTY}")
    run = Run.open(path)
    owner = json.dumps(asdict(replace(Owner.here(), host=DIRTY, user=DIRTY)))
    (path / "lock").write_text(owner.ljust(1024))
    status, finding = run.status(), Finding("r", "error", 1, DIRTY, {"x": DIRTY}, DIRTY)
    words = [str(finding), repr(finding), repr(run), repr(status), str(status.owner), repr(list_runs(tmp_path))]
    words += [repr(diagnose(run)), *map(str, diagnose(run)), attach(run).summary(), repr(attach(run))]
    words += [repr(report.report(run)), repr(report.samples(run)), repr(run.knobs["temperature"])]
    with pytest.raises(RunError) as refused:
        start(run)
    words += [str(refused.value), *traceback.format_exception(refused.value)]
    with pytest.raises(RunError) as missing:
        Run.open(tmp_path / f"b{DIRTY}")
    words += [str(missing.value), repr(missing.value)]
    assert not [text for text in words if _CONTROLS.search(text)]
    assert sum("\\x9b31m" in text for text in words) > 8


def error_classes() -> list[type[Exception]]:
    for module in pkgutil.walk_packages(grpo_nb.__path__, "grpo_nb."):
        needs_triton = module.name.endswith("_triton") and importlib.util.find_spec("triton") is None
        if not module.name.endswith("__main__") and not needs_triton:
            importlib.import_module(module.name)
    modules = [module for name, module in sys.modules.items() if name.startswith("grpo_nb.")]
    found = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
    own = {kind for kind in found if issubclass(kind, Exception) and kind.__module__.startswith("grpo_nb.")}
    return sorted(own, key=lambda kind: kind.__name__)


def test_every_error_of_the_package_is_clean() -> None:
    inside = {"Damaged", "Outdated", "Forgotten", "_Found"}  # caught where they are raised
    errors = [kind for kind in error_classes() if kind.__name__ not in inside]
    assert len(errors) > 15
    assert not [kind.__name__ for kind in errors if _CONTROLS.search(str(kind.__new__(kind, DIRTY)))]


def test_every_logger_of_the_package_is_clean(capsys: pytest.CaptureFixture[str]) -> None:
    for path in (ROOT / "grpo_nb").rglob("*.py"):
        assert path.name == "terminal.py" or "getLogger(__name__)" not in path.read_text(), path
    log, handler = clean_logger("grpo_nb.somewhere"), logging.StreamHandler(sys.stderr)
    log.addHandler(handler)
    try:
        log.error("%s %d %.1f %r " + DIRTY, DIRTY, 7, 0.5, Path(DIRTY))
        try:
            raise KeyError(DIRTY)
        except KeyError:
            log.exception("%(a)s", {"a": 1})
    finally:
        log.removeHandler(handler)
    said = capsys.readouterr().err
    assert not _CONTROLS.search(said) and " 7 0.5 " in said and "KeyError" in said


def test_the_list_of_the_first_import_is_clean(tmp_path: Path) -> None:
    run = strangers_run(tmp_path)
    forged = run.path.rename(tmp_path / "a\nb: done, step 1 of 1; all is well")
    text = project.runs_summary(tmp_path)
    assert text is not None and not _CONTROLS.search(text) and len(text.splitlines()) == 1
    assert list_runs(tmp_path)[0].name == forged.name


def test_names_in_brackets_are_no_markup_of_the_terminals_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from grpo_nb.cli.output import show

    show([{"[red]run": "[bold]x[/]", "n": 1}])
    assert "[red]run" in (said := capsys.readouterr().out) and "[bold]x[/]" in said


def test_cleaning_keeps_what_is_text() -> None:
    kept = "β µ ‘quoted’ \u200dنمی\u200cخواهم 👩‍🔬 a\tb\nc"
    assert printable(kept) == kept and one_line("a\tb\nc") == "a\\tb\\nc"
    assert printable("\x9b31m\x7f\r\ud800\U000e0041") == "\\x9b31m\\x7f\\x0d\\ud800\\U000e0041"
    assert json.loads(json_text(json.dumps("\x9b\u202e\U000e0041", ensure_ascii=False))) == "\x9b\u202e\U000e0041"
