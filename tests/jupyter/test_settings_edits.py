"""Texts of settings: what they come to, where an error belongs, and that the changes are those of `replace`."""

import ast
from typing import Any

import pytest

from grpo_nb import presets
from grpo_nb.config import Config, ConfigError
from grpo_nb.config.setting_keys import settings
from grpo_nb.jupyter.settings_edits import Edits, as_python
from tests.support.tokens import names

DEMO = presets.demo()
JUDGE = {"providers": [{"model": "m", "base_url": "http://localhost:1/v1"}], "weight": 0.1}


def edited(changes: dict[str, str], start: Config = DEMO) -> Edits:
    edits = Edits(start, {})
    for key, text in changes.items():
        edits.write(key, text)
    return edits


def test_every_setting_has_a_field_with_its_sentence() -> None:
    edits = Edits(DEMO, {})
    assert [*edits.fields] == [setting.key for setting in settings(DEMO) if setting.active]
    assert all(field.setting.meaning for field in edits.fields.values())
    found = [group.name for group in edits.groups]
    assert found[:3] == ["model", "objectives.fairness", "objectives.hallucination"] and len(found) == 11
    assert all(group.meaning and group.fields for group in edits.groups)
    assert edits.outcome().config == DEMO and edits.outcome().changes == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"batch.prompts": 8, "sampling.temperature": 0.9, "batch.mini_batch": 32, "model.tf32": True},
        {"objectives.fairness.judge": JUDGE, "run.trackers": ["wandb"], "objectives.fairness.kl_band": None},
        {"model.name": "12", "model.chat_template": "null", "objectives.fairness.data": "C:\\é\"'\n"},
        {"model.chat_template_kwargs": {"enable_thinking": False}, "model.chat_template_kwargs.depth": 2},
        {"objectives": {"geography": {"task": "capitals", "weight": 2.0}}, "batch.prompts": 3, "batch.micro_batch": 1},
        {"run.steps": DEMO.run.steps},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_changes_that_a_form_begins_with_come_out_again(changes: dict[str, Any]) -> None:
    outcome = Edits(DEMO, changes).outcome()
    assert outcome.config == DEMO.replace(**changes) == DEMO.replace(**outcome.changes)
    assert outcome.changes == {key: value for key, value in changes.items() if key != "run.steps"}
    line = as_python(outcome.changes)
    assert ast.literal_eval(line.removeprefix("CHANGES = ")) == outcome.changes and "\n" not in line


def test_changes_to_begin_with_are_validated() -> None:
    for wrong in ({"batch.promts": 8}, {"batch.prompts": 7}):
        with pytest.raises(ConfigError):
            Edits(DEMO, wrong)


def test_a_change_is_a_value_and_not_a_text() -> None:
    outcome = edited(
        {"batch.prompts": "8", "algorithm.learning_rate": "1e-4", "run.trackers": "wandb, mlflow"}
    ).outcome()
    assert outcome.changes == {
        "batch.prompts": 8,
        "algorithm.learning_rate": 1e-4,
        "run.trackers": ["wandb", "mlflow"],
    }
    same = edited({"batch.prompts": "16.0", "sft.data": '"demo"'})
    assert same.texts and same.outcome().changes == {}
    same.write("batch.prompts", "16")
    assert "batch.prompts" not in same.texts


@pytest.mark.parametrize(
    ("typed", "where", "beside"),
    [
        ({"batch.group_size": ""}, "batch.group_size", ["batch.group_size"]),
        ({"batch.group_size": "[1"}, "batch.group_size", ["batch.group_size"]),
        ({"objectives.fairness.kl_band": "[0.1, x]"}, "objectives.fairness.kl_band", ["objectives.fairness.kl_band"]),
        ({"objectives.fairness.kl_band": '["a", 1]'}, "objectives.fairness.kl_band.0", ["objectives.fairness.kl_band"]),
        ({"objectives.fairness.judge": '{"x": 1}'}, "objectives.fairness.judge.x", ["objectives.fairness.judge"]),
        ({"batch.mini_batch": "24"}, "batch", ["batch.mini_batch"]),
        ({"batch.group_size": "9"}, "batch", ["batch.group_size"]),
        ({"batch.prompts": "7"}, "", ["batch.prompts"]),
        ({"batch.prompts": "7", "run.steps": "3"}, "", ["batch.prompts"]),
        ({"batch.group_size": "9", "run.steps": "3"}, "batch", ["batch.group_size"]),
        ({"sampling.temperature": "9"}, "", ["sampling.temperature"]),
        ({"rollout.steps_off_policy": "1"}, "", ["rollout.steps_off_policy"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_an_error_is_the_configuration_s_own_and_stands_beside_its_field(
    typed: dict[str, str], where: str, beside: list[str]
) -> None:
    outcome = edited(typed).outcome()
    assert outcome.config is None and outcome.changes == {}
    assert where in outcome.problems and [key for key in outcome.beside if key in typed] == beside
    assert outcome.problems[where] in outcome.beside[beside[0]]


def test_several_errors_are_shown_together() -> None:
    outcome = edited({"batch.group_size": "many", "run.seed": "-1", "sft.batch": "{"}).outcome()
    assert {*outcome.problems} == {*outcome.beside} == {"batch.group_size", "run.seed", "sft.batch"}


def test_what_a_change_does_not_do_stands_beside_it() -> None:
    outcome = edited({"algorithm.cagrad_c": "0.3"}).outcome()
    assert outcome.config is not None and len(outcome.notes) == 1
    assert outcome.beside == {"algorithm.cagrad_c": outcome.notes}


def test_a_key_in_the_wrong_place_is_not_repeated() -> None:
    key = "sk-0123456789"
    outcome = edited(
        {"objectives.fairness.judge": f'{{"providers": [{{"model": "m", "api_key_env": "{key}"}}]}}'}
    ).outcome()
    assert outcome.problems and key not in str(outcome)
    assert key not in str(edited({"objectives.fairness.judge": f'{{"{key}"'}).outcome())


def test_values_are_never_evaluated() -> None:
    text = "[].__class__.__base__.__subclasses__()"
    assert edited({"model.name": f"x{text}"}).outcome().changes == {"model.name": f"x{text}"}
    assert edited({"run.steps": "__import__('os')"}).outcome().config is None


def test_a_search_knows_sentences_insides_and_the_names_of_other_trainers() -> None:
    edits = Edits(DEMO, {})

    def found(query: str) -> list[str]:
        return [field.key for field in edits.find(query)]

    assert found("num_generations") == ["batch.group_size"]
    assert found("kl_coef") == ["objectives.fairness.beta", "objectives.hallucination.beta"]
    assert found("deadline_s") == ["objectives.fairness.judge", "objectives.hallucination.judge"]
    assert "batch.micro_batch" in found("Memory GRADIENT") and found("sampling. nucleus") == ["sampling.top_p"]
    assert found("no such words") == [] and len(found("")) == len(edits.fields)


def test_a_line_to_copy_has_no_control_character_and_means_the_same() -> None:
    changes = {"objectives.fairness.data": "a\u202eb\x1b\U000e0001\\n$x$\"'", "model.name": "é\ud800"}
    line = as_python(changes)
    assert line.isprintable() and ast.literal_eval(line.removeprefix("CHANGES = ")) == changes
    assert names(line, "model.name")
