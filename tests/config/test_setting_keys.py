"""Settings as texts: one reader for command line and form; what each may be; which one an error is about."""

import argparse
import json
from typing import Any

import pytest

from grpo_nb import presets
from grpo_nb.cli import values
from grpo_nb.config import Config, ConfigError
from grpo_nb.config.setting_keys import read_value, settings, value_text
from tests.support.tokens import names


@pytest.mark.parametrize(
    "value",
    [
        *("auto", "", "4", "1e-3", "null", "true", '"x"', "[a", "{", " 4", "NaN", "1" * 5000, "é\n"),
        *(4, 0.1, 1e-06, None, True, False, [1, "2"], {"a": [None]}, 10**30),
    ],
    ids=lambda value: repr(value)[:12],
)
def test_a_text_stands_for_its_value(value: Any) -> None:
    read = read_value(value_text(value))
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize("text", ["[1", '{"a"', '"', "1" * 5000, "[" * 100_000])
def test_what_cannot_be_read_is_refused_by_command_line_and_form_alike(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_value(text)
    assert text not in str(refused.value), "a key in the wrong place is not repeated"
    with pytest.raises(argparse.ArgumentTypeError):
        values.setting(f"run.steps={text}")


@pytest.mark.parametrize(
    ("address", "shown"), [("http://me:pass@host/v1", None), ("HTTP://host/v1/", "http://host/v1")]
)
def test_an_address_of_the_environment_is_shown_without_a_password(
    address: str, shown: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", address)
    found = [setting.value for setting in settings(presets.demo()) if setting.key.endswith("].base_url")]
    assert found == [shown, shown]


def test_a_value_is_never_evaluated() -> None:
    assert values.setting("model.name=__import__('os').getcwd()") == ("model.name", "__import__('os').getcwd()")


@pytest.mark.parametrize("name", presets.PRESETS)
def test_the_texts_of_all_settings_give_the_configuration_again(name: str) -> None:
    config = presets.PRESETS[name]().replace(**{"model.chat_template": "null", "objectives.fairness.data": "12"})
    assert config.replace(**{s.key: read_value(s.text) for s in settings(config) if s.active}) == config


def test_choices_are_all_that_a_setting_may_be() -> None:
    config = Config()
    listed = {setting.key: setting for setting in settings(config) if setting.active and setting.choices}
    assert listed["algorithm.kl"].choices == ("k1_in_reward", "k2", "k3", "k3_k2", "auto")
    assert listed["model.tf32"].choices == (False, True, "auto")
    assert listed["rollout.steps_off_policy"].choices == (0, 1) and "batch.prompts" not in listed
    for key, setting in listed.items():
        assert setting.value in setting.choices
        with pytest.raises(ConfigError) as refused:
            config.replace(**{key: "no such choice"})
        assert [*refused.value.at] == [key]
        for choice in setting.choices:
            try:
                config.replace(**{key: choice})
            except ConfigError as error:
                assert key not in error.at, "only another setting speaks against it"
    json.dumps([setting.choices for setting in listed.values()])


def test_an_error_knows_which_settings_it_is_about() -> None:
    with pytest.raises(ConfigError) as refused:
        Config().replace(**{"batch.group_size": "x", "run.seed": -1, "objectives.fairness.kl_band": ["a", 1]})
    assert [*refused.value.at] == ["objectives.fairness.kl_band.0", "batch.group_size", "run.seed"]
    assert str(refused.value).splitlines() == [*refused.value.at.values()]
    with pytest.raises(ConfigError) as refused:
        Config().replace(**{"batch.mini_batch": 7})
    assert [*refused.value.at] == ["batch"] and names(refused.value.at["batch"], "mini_batch=7")
    with pytest.raises(ConfigError) as refused:
        Config().replace(**{"batch.prompts": 7})
    assert [*refused.value.at] == [""] and names(refused.value.at[""], "batch.prompts=7")
    assert ConfigError("alone").at == {}
