"""The form of settings: boxes of the right kind, what is changed and wrong, the search, the memory plan."""

import ast
import html
import threading
from collections.abc import Iterator
from typing import Any

import ipywidgets as w
import numpy as np
import pytest

from grpo_nb import presets
from grpo_nb.config import BatchConfig, Config, ConfigError, ObjectiveConfig
from grpo_nb.config.setting_keys import read_value, settings
from grpo_nb.jupyter import settings_plan
from grpo_nb.jupyter.settings_edits import as_python
from grpo_nb.jupyter.settings_form import MOST_FOUND, SettingsForm
from grpo_nb.policy import memory, shapes
from grpo_nb.policy.shapes import ModelShape
from grpo_nb.policy.source import ModelError
from tests.support.stage import PATIENCE, until
from tests.support.tokens import names

EVIL = "<img src=x onerror=alert(1)> $x$"
SHAPE = ModelShape("small", 1000, 2, 8, 16, 2, 4, 100, 50, 400, 2)


@pytest.fixture(autouse=True)
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Models whose sizes were asked for; no form waits before it plans."""
    asked: list[str] = []

    def shape_of(name: str, seed: int = 0) -> ModelShape:
        asked.append(name)
        if name.startswith("no"):
            raise ModelError(f"{name} {EVIL}")
        return SHAPE

    monkeypatch.setattr(shapes, "shape_of", shape_of)
    monkeypatch.setattr(settings_plan, "DELAY_SECONDS", 0.0)
    return asked


@pytest.fixture
def form() -> Iterator[SettingsForm]:
    made = SettingsForm("demo")
    yield made
    made.close()


def planned(form: SettingsForm) -> str:
    until(lambda: form.plan.shown == form.config)
    return str(form.plan.widget.value)


def put(form: SettingsForm, **texts: str) -> None:
    for name, text in texts.items():
        form.row(name.replace("__", ".")).box.value = text


def test_each_setting_has_the_box_of_its_kind(form: SettingsForm) -> None:
    kinds = {w.Checkbox: set[str](), w.Dropdown: set[str](), w.Text: set[str]()}
    for setting in settings(presets.demo()):
        if not setting.active:
            continue
        row = form.row(setting.key)
        kinds[type(row.box)].add(setting.key)
        assert row.text == setting.text and row.box.description == setting.key
        assert row.box.tooltip == setting.meaning and setting.meaning in html.unescape(row.words.value)
    assert {"guards.rollback", "model.gradient_checkpointing"} < kinds[w.Checkbox]
    assert {"algorithm.name", "model.tf32", "rollout.steps_off_policy"} < kinds[w.Dropdown]
    assert {"batch.prompts", "model.name", "batch.mini_batch", "objectives.fairness.kl_band"} < kinds[w.Text]
    assert form.row("rollout.steps_off_policy").box.options == ("0", "1")


def test_changes_are_marked_counted_and_given(form: SettingsForm) -> None:
    put(form, batch__prompts="8", algorithm__name="grpo")
    form.row("guards.rollback").box.value = False
    assert form.changes == {"batch.prompts": 8, "algorithm.name": "grpo", "guards.rollback": False}
    assert form.config == presets.demo().replace(**form.changes)
    assert names(form.summary.value, 3, "CHANGES", "batch.prompts") and names(repr(form), "CHANGES", 3)
    titles = dict(zip((group.name for group in form._edits.groups), form.groups.titles, strict=True))
    assert names(titles["batch"], 7, 1) and not names(titles["sft"], 1)
    row = form.row("batch.prompts")
    assert names(row.words.value, 8, 16) and "transparent" not in row.widget.layout.border_left
    assert (
        "transparent" in form.row("batch.group_size").widget.layout.border_left and form.row("sft.mix").reset.disabled
    )
    row.reset.click()
    assert row.text == "16" and row.reset.disabled and form.changes.keys() == {"algorithm.name", "guards.rollback"}
    form.clear.click()
    assert form.changes == {} and form.row("guards.rollback").box.value is True and form.clear.disabled


def test_changes_to_begin_with_are_in_their_boxes() -> None:
    changes = {"batch.prompts": 8, "model.tf32": True, "model.chat_template_kwargs.deep": False}
    form = SettingsForm(presets.demo(), changes)
    assert form.changes == changes and form.row("batch.prompts").text == "8" and form.row("model.tf32").text == "true"
    form.reset()
    assert form.row("batch.prompts").text == "16"
    with pytest.raises(ConfigError):
        SettingsForm("demo", {"batch.promts": 8})
    with pytest.raises(ConfigError):
        SettingsForm("demo", {"batch.prompts": 8, 1: 2})  # type: ignore[dict-item]
    with pytest.raises(ConfigError):
        SettingsForm("domo")
    with pytest.raises(ConfigError):
        form.row("batch.promts")


@pytest.mark.parametrize(
    "changes",
    [
        {"guards.rollback": "no", "model.gradient_checkpointing": 1},
        {"run.steps": np.int64(7), "algorithm.learning_rate": np.float32(0.5), "run.trackers": {"wandb"}},
        {"batch": BatchConfig(prompts=8), "objectives.fairness": {"task": "bbq", "weight": np.float64(2.0)}},
        {"model.chat_template_kwargs.deep": True, "model.chat_template_kwargs": {"wide": 1}},
        {"model.chat_template_kwargs": {"wide": 1}, "model.chat_template_kwargs.deep": True},
        {"batch.prompts": 4, "batch": {"prompts": 8, "group_size": 4}},
    ],
)
def test_all_changes_that_a_configuration_takes_are_shown_as_they_apply(changes: dict[str, Any]) -> None:
    form = SettingsForm("demo", changes)
    assert form.config == presets.demo().replace(**changes) == pasted(form)
    for setting in settings(form.config):
        if setting.active and setting.key in form._edits.fields:
            assert read_value(form.row(setting.key).text) == read_value(setting.text), setting.key
    put(form, batch__prompts="16", batch__group_size="2")
    assert form.config.batch.group_size == 2 and pasted(form) == form.config


def pasted(form: SettingsForm) -> Config:
    return presets.demo().replace(**ast.literal_eval(as_python(form.changes).removeprefix("CHANGES = ")))


def test_an_objective_may_have_dots_in_its_name() -> None:
    parts = iter(presets.demo().objectives.values())
    start = presets.demo().model_copy(update={"objectives": {name: next(parts) for name in ("a.b", "a")}})
    form = SettingsForm(start)
    form.row("objectives.a.b.weight").put("2.5")
    form.row("objectives.a.weight").put("x")
    assert names(form.row("objectives.a.weight").words.value, "objectives.a.weight")
    form.row("objectives.a.weight").put("3.5")
    assert [each.weight for each in form.config.objectives.values()] == [2.5, 3.5]
    assert start.replace(**form.changes) == form.config


def test_what_is_wrong_stands_beside_its_field_and_nothing_is_given(form: SettingsForm) -> None:
    put(form, batch__prompts="7", batch__group_size="x")
    row = form.row("batch.group_size")
    with pytest.raises(ConfigError) as refused:
        presets.demo().replace(**{"batch.group_size": "x"})
    said = str(refused.value).replace("'", "&#39;")
    assert said in row.words.value and said in form.summary.value and "CHANGES" not in form.summary.value
    for give in (lambda: form.config, lambda: form.changes):
        with pytest.raises(ConfigError) as found:
            give()
        assert found.value.at.keys() == {"batch.group_size"}
    assert "batch.group_size" in repr(form) and names(form.groups.titles[6], "wrong", 1)
    put(form, batch__group_size="8")
    assert names(form.row("batch.prompts").words.value, "batch.prompts=7") and said not in row.words.value
    put(form, batch__prompts="8")
    assert form.changes == {"batch.prompts": 8} and "batch.prompts=7" not in form.row("batch.prompts").words.value


def test_widgets_are_made_when_they_are_seen(form: SettingsForm) -> None:
    assert not form._rows and form.groups.selected_index is None
    index = form.groups.titles.index(next(title for title in form.groups.titles if title.startswith("batch")))
    form.groups.selected_index = index
    assert {key.partition(".")[0] for key in form._rows} == {"batch"} and len(form._rows) == 7
    assert len(form.groups.children[index].children) == 8


def test_a_search_shows_settings_in_place_of_the_groups(form: SettingsForm) -> None:
    assert form.groups.layout.display == "none", "a cell of Run All takes little room"
    form.browse.value = True
    assert form.groups.layout.display is None
    form.search.value = "nucleus"
    assert form.found.children == (form.row("sampling.top_p").widget,) and form.groups.layout.display == "none"
    form.search.value = "the"
    assert len(form.found.children) == MOST_FOUND and names(form.found_words.value, MOST_FOUND)
    form.search.value = "prompst"
    assert form.found.children == () and names(form.found_words.value, "prompts")
    form.search.value = ""
    assert form.groups.layout.display is None and form.found.children == () and form.found_words.value == ""
    put(form, batch__prompts="8")
    form.only.value = True
    assert form.found.children == (form.row("batch.prompts").widget,)


def test_the_plan_follows_the_settings_and_reads_a_model_once(form: SettingsForm, looked_up: list[str]) -> None:
    before = planned(form)
    fits = memory.plan(presets.demo(), SHAPE).verdict
    assert names(before, "16 prompts", fits) and looked_up == ["demo"]
    put(form, batch__prompts="32")
    assert names(planned(form), "32 prompts") and looked_up == ["demo"]
    assert form.plan.widget.value != before
    put(form, batch__prompts="x")
    put(form, model__name="none")
    assert not form._outcome.config and looked_up == ["demo"], "what is not valid has no plan"
    put(form, batch__prompts="8")
    assert "&lt;img" in planned(form) and "<img" not in form.plan.widget.value
    put(form, batch__prompts="16")
    assert "&lt;img" in planned(form) and looked_up == ["demo", "none"], "nor is it looked for again"
    put(form, model__name="other")
    assert names(planned(form), "16 prompts") and looked_up[-1] == "other"


def test_edits_that_come_meanwhile_are_planned_once(form: SettingsForm, monkeypatch: pytest.MonkeyPatch) -> None:
    planned(form)
    begun, more = threading.Event(), threading.Event()
    seen: list[int] = []
    real = memory.plan

    def slowly(config: Config, *rest: Any) -> Any:
        seen.append(config.batch.prompts)
        begun.set()
        assert more.wait(PATIENCE)
        return real(config, *rest)

    monkeypatch.setattr(memory, "plan", slowly)
    put(form, batch__prompts="32")
    assert begun.wait(PATIENCE)
    for prompts in (64, 128, 256):
        put(form, batch__prompts=str(prompts))
        timer = form.plan._timer
        assert timer is not None
        timer.join(PATIENCE)
        assert not timer.is_alive(), "a model that is looked up for long keeps no thread for each edit"
    more.set()
    assert names(planned(form), "256 prompts") and seen == [32, 256]


def test_a_closed_form_plans_nothing_more(form: SettingsForm, monkeypatch: pytest.MonkeyPatch) -> None:
    planned(form)
    monkeypatch.setattr(settings_plan, "DELAY_SECONDS", PATIENCE)
    put(form, batch__prompts="32")
    timer = form.plan._timer
    form.close()
    assert timer is not None
    timer.join(PATIENCE)
    assert not timer.is_alive() and form.plan.shown == presets.demo() and form.widget.comm is None


def test_names_and_values_are_text() -> None:
    objectives = {EVIL: ObjectiveConfig(task="t", data=EVIL), "b": ObjectiveConfig(task="t")}
    form = SettingsForm(presets.demo().model_copy(update={"objectives": objectives}))
    row = form.row(f"objectives.{EVIL}.data")
    assert row.text == EVIL and "$" not in row.box.description and not row.box.description_allow_html
    assert "<img" not in row.words.value and not any("$" in title for title in form.groups.titles)
    put(form, model__name=EVIL, sft__batch=EVIL)
    for shown in (form.summary.value, form.row("sft.batch").words.value):
        assert "<img" not in shown and "mathjax_ignore" in shown
    put(form, sft__batch="4")
    assert form.changes["model.name"] == EVIL and "<img" not in form.summary.value
