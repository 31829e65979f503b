"""A stranger's run in a real browser: whatever its files hold, no script of them runs."""

from pathlib import Path
from typing import Any

import pytest

from grpo_nb.report import report
from tests.support.lab import Desk, until
from tests.support.strangers_run import strangers_run

pytestmark = [pytest.mark.browser, pytest.mark.slow]

STRUCK = "() => window.struck || null"
SHOWN = """import grpo_nb as g
from IPython.display import display
from grpo_nb.jupyter import project
from grpo_nb.report import report, tables
session = g.attach({path!r})
board = session.dashboard()
board.pages.value = 'samples'
board.refresh()
display(board, report.events(session.run, limit=99), tables.settings(session.run.config), project.runs({folder!r}))
session.report()"""


def test_the_report_page_runs_nothing(chromium: Any, tmp_path: Path) -> None:
    page = chromium.new_page()
    file = tmp_path / "report.html"
    file.write_text(report.page(strangers_run(tmp_path)), encoding="utf-8")
    page.goto(file.as_uri())
    page.get_by_text("onerror").first.wait_for()
    assert page.evaluate(STRUCK) is None and page.locator("script").count() == 0
    assert page.locator("img:not([src^='data:image/png'])").count() == 0
    page.close()


def test_its_policy_holds_where_a_template_would_not(chromium: Any, tmp_path: Path) -> None:
    """The page with the markup put in unescaped: the second line of defence."""
    page = chromium.new_page()
    file = tmp_path / "report.html"
    text = report.page(strangers_run(tmp_path))
    evil = "<img src=x onerror=\"window.struck='yes'\"><script>window.struck='yes'</script>"
    file.write_text(text.replace("</body>", f"{evil}<b id=end></b></body>"), encoding="utf-8")
    page.goto(file.as_uri())
    page.locator("#end").wait_for(state="attached")
    assert page.evaluate(STRUCK) is None
    page.close()


def test_widgets_and_tables_in_a_notebook_run_nothing(desk: Desk, tmp_path: Path) -> None:
    run = strangers_run(tmp_path)
    desk.open(desk.lab.write("strangers.ipynb", SHOWN.format(path=str(run.path), folder=str(tmp_path))))
    desk.run_all()
    desk.says("are logged")
    for page in ("overview", "rewards", "machinery"):
        desk.page.get_by_role("button", name=page, exact=True).click()
        panels = {"overview": 6, "rewards": 4, "machinery": 6}[page]
        until(lambda panels=panels: desk.page.locator(".gnb-canvas").count() == panels, f"the page {page}")
        desk.page.locator(".gnb-canvas").first.hover(position={"x": 120, "y": 60})
        desk.page.locator(".gnb-tip:visible").wait_for()
        assert desk.page.locator(".gnb-live :is(img, script)").count() == 0
    assert "onerror" in desk.page.locator(".gnb-legend").inner_text(), "the markup of a name is its text"
    desk.page.locator("table:has-text('onerror')").first.wait_for()
    assert not desk.errors()
    desk.page.wait_for_timeout(1000)
    assert desk.page.evaluate(STRUCK) is None
    assert desk.page.locator(".jp-OutputArea img[src='x'], .jp-OutputArea script").count() == 0
