"""The views over finished runs in a real browser: questions to each stage, runs to check, one prompt over time."""

from pathlib import Path
from typing import Any

import pytest

from tests.report.test_over_time import held, measured
from tests.report.test_run_comparison import made
from tests.support import exported
from tests.support.lab import Desk, until

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # peft's own
]
IMPORTS = "from grpo_nb.jupyter import compare_view, over_time, talk"
EVIL = "<img src=x onerror=\"window.struck='yes'\"> $x^2$"


def test_a_question_is_answered_side_by_side(desk: Desk, tmp_path: Path) -> None:
    run = exported.a_run(tmp_path, model__name="demo", model__train="full")
    desk.open(desk.lab.write("talk.ipynb", IMPORTS, f"talk.Talk({str(run.path)!r})"))
    desk.run_all()
    view = desk.page.locator(".grpo-nb-talk")
    view.get_by_label("example").select_option(index=1)
    question: Any = view.get_by_label("question")
    until(lambda: question.input_value(), "the example's text")
    view.get_by_role("button", name="Ask").click()
    until(lambda: view.get_by_text("score ").count() + view.get_by_text("not scored").count() == 3, "three verdicts")
    desk.shot("talk", view)
    assert view.get_by_text("base model").count() and view.get_by_text("after SFT").count()
    question.fill(EVIL)
    view.get_by_role("button", name="Ask").click()
    until(lambda: not view.get_by_text("score ").count() and view.get_by_role("button", name="Ask").is_enabled(), "all")
    assert desk.page.evaluate("() => window.struck || null") is None and not desk.errors()


def test_runs_are_checked_and_a_prompt_is_followed(desk: Desk, tmp_path: Path) -> None:
    runs = [
        made(tmp_path / "runs", name, 5 + n, run__seed=n) for n, name in enumerate(("a", "b", EVIL.replace("/", "")))
    ]
    for step in (0, 10, 20):
        measured(runs[0], step, held(completion=EVIL, tokens=3 + step))
    folder, one = str(tmp_path / "runs"), str(runs[0].path)
    cells = f"compare_view.RunsView({folder!r})", f"over_time.OverTime({one!r})"
    desk.open(desk.lab.write("views.ipynb", IMPORTS, *cells))
    desk.run_all()
    view = desk.page.locator(".grpo-nb-runs")
    picture = view.locator("img")
    picture.wait_for()
    before = picture.get_attribute("src")
    view.get_by_label("b", exact=True).click()
    until(lambda: picture.get_attribute("src") != before, "another picture")
    desk.shot("runs", view)
    prompt = desk.page.locator(".grpo-nb-over-time")
    prompt.get_by_text("step 20").wait_for()
    prompt.get_by_label("labels").select_option(index=0)
    desk.shot("over-time", prompt)
    assert desk.page.evaluate("() => window.struck || null") is None and not desk.errors()


def test_settings_are_searched_and_edited(desk: Desk) -> None:
    desk.open(desk.lab.write("settings.ipynb", f"{IMPORTS}, settings_form", "settings_form.SettingsForm('demo')"))
    desk.run_all()
    form = desk.page.locator(".grpo-nb-settings")
    form.get_by_role("button", name="Browse").click()
    form.get_by_text("batch (7)").click()
    prompts: Any = form.get_by_label("batch.prompts", exact=True)
    prompts.fill("32")
    form.get_by_text("batch (7, 1 changed)").wait_for()
    form.get_by_text("32 prompts x 8 completions").wait_for()
    form.get_by_text('CHANGES = {"batch.prompts": 32}').wait_for()
    desk.shot("settings-group", form)
    form.get_by_label("search").fill("prompts per step")
    until(lambda: not form.get_by_text("sft (11)").is_visible(), "the groups to make room")
    prompts = form.get_by_label("batch.prompts", exact=True).locator("visible=true")
    prompts.fill("7")
    form.get_by_text("batch.prompts=7 cannot").locator("visible=true").nth(1).wait_for()
    prompts.fill(EVIL)
    form.get_by_text("found '<img").locator("visible=true").first.wait_for()
    desk.shot("settings-wrong", form)
    form.get_by_role("button", name="Reset all").click()
    form.get_by_text("CHANGES = {}").wait_for()
    assert prompts.input_value() == "16"
    assert desk.page.evaluate("() => window.struck || null") is None and not desk.errors()
