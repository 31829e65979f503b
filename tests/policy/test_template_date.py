"""A chat template that reads the clock is told the same date on every day."""

import datetime
from pathlib import Path
from unittest import mock

import pytest
from transformers.utils import chat_template_utils

from grpo_nb import presets
from grpo_nb.policy import template_date
from grpo_nb.policy.model import Policy
from grpo_nb.run.run import Run
from tests.support import tiny_models as tiny

DATE = datetime.datetime(2026, 3, 1, 13, 5)
LLAMA = (
    "{%- if not date_string is defined %}\n    {%- if strftime_now is defined %}\n"
    "        {%- set date_string = strftime_now('%d %b %Y') %}\n    {%- else %}\n"
    "        {%- set date_string = '26 Jul 2024' %}\n    {%- endif %}\n{%- endif %}\n"
    "{{- 'Today Date: ' + date_string }}"
)
HARMONY = (
    "{%- macro system() -%}\n{{- 'Today: ' + strftime_now('%Y-%m-%d') + '\\n' }}\n{%- endmacro -%}\n{{ system() }}"
)
SMOL = "{%- set today = strftime_now('%d %B %Y') -%}{{- 'Today Date: ' ~ today ~ '\\n' -}}"
LAYOUT = (
    "\n  {% if strftime_now('%d') == '01' %}one{% else %}two{% endif %} {{ strftime_now('%A, %-d %B %Y, %I:%M %p') }}\n"
)
TEMPLATES = {"llama": LLAMA, "harmony": HARMONY, "smol": SMOL, "layout": LAYOUT}


class Day(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> "Day":
        return cls(2026, 3, 1, 13, 5)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_dated_template_renders_as_on_that_day(name: str) -> None:
    tokenizer = tiny.tokenizer(TEMPLATES[name])
    with mock.patch.object(chat_template_utils, "datetime", Day):
        expected = tokenizer.apply_chat_template(tiny.CHAT, tokenize=False)
    dated = template_date.dated(TEMPLATES[name], DATE)
    assert tokenizer.apply_chat_template(tiny.CHAT, tokenize=False, chat_template=dated) == expected


def test_a_policy_reads_no_clock_and_takes_the_date_of_its_run(tmp_path: Path) -> None:
    numbered = "{% if strftime_now('%Y') == '2025' %}one{% else %}two{% endif %} <|end|>" + tiny.TEMPLATE
    policy = Policy(tiny.model(), tiny.tokenizer(numbered))
    undated = policy.encode(tiny.CHAT)
    with mock.patch.object(chat_template_utils, "datetime", Day):
        assert policy.encode(tiny.CHAT) == undated and undated[0] == tiny.ids("one")[0]
    policy.set_date(DATE)
    assert policy.encode(tiny.CHAT)[0] == tiny.ids("two")[0]
    run = Run.create(tmp_path / "run", presets.demo())
    assert abs((datetime.datetime.now() - run.started).total_seconds()) < 60
    assert Run.open(run.path).started == run.started


def test_a_template_without_a_clock_is_left_alone() -> None:
    assert not template_date.is_read(tiny.tokenizer()) and not template_date.is_read(tiny.tokenizer(None))
