"""Every rule of the settings with its message: what was found, what is needed, what to change."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from grpo_nb import presets
from grpo_nb.algorithms import ADVANTAGE_ROWS, ALGORITHMS
from grpo_nb.config import (
    AlgorithmConfig,
    BatchConfig,
    Config,
    ConfigError,
    ObjectiveConfig,
    Settings,
    check_data_size,
    parse,
)
from grpo_nb.config.batch import MOST_COMPLETIONS
from grpo_nb.config.inequalities import of_batch, of_lengths
from grpo_nb.config.unknown import ELSEWHERE, leaves
from tests.support.tokens import names, pattern


def refused(**changes: Any) -> str:
    """The message with which a change of the demo's settings is refused; dots are written `__`."""
    with pytest.raises(ConfigError) as caught:
        presets.demo().replace(**{key.replace("__", "."): value for key, value in changes.items()})
    return str(caught.value)


def groups(group: type[Settings]) -> Iterator[type[Settings]]:
    yield group
    for field in group.model_fields.values():
        kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, Settings):
                yield from groups(kind)


ALL_GROUPS = list(groups(Config))


# ---- shape of the settings


def test_every_group_is_reached() -> None:
    assert len(ALL_GROUPS) == 13 and ObjectiveConfig in ALL_GROUPS


@pytest.mark.parametrize("group", ALL_GROUPS, ids=lambda group: group.__name__)
def test_every_field_has_its_sentence(group: type[Settings]) -> None:
    for name, field in group.model_fields.items():
        is_group = isinstance(field.annotation, type) and issubclass(field.annotation, Settings)
        text = field.annotation.__doc__ if is_group else field.description
        assert text and text.strip().endswith((".", ")")), f"{group.__name__}.{name}"


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Config().run.steps = 3  # type: ignore[misc]


def test_the_default_is_valid_and_survives_json() -> None:
    assert parse(Config().model_dump(mode="json")) == Config()


# ---- unknown and wrong


def test_unknown_keys_are_refused_by_name() -> None:
    assert names(parse_error({"run": {"stepz": 3}}), "'run.stepz'")
    assert names(parse_error({"runn": {}}), "'runn'")


def test_a_misspelt_change_names_the_nearest() -> None:
    assert names(refused(batch__group_sice=4), "'batch.group_sice'", "'group_size'")
    assert names(refused(objectives__fairnes__weight=2), "fairnes", "'fairness'")
    assert names(refused(objectives__xyz__weight=2), "xyz", "fairness", "hallucination")


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("optim.lr", "algorithm.learning_rate"),
        ("lr", "algorithm.learning_rate"),
        ("learning_rate", "algorithm.learning_rate"),
        ("beta", "objectives.NAME.beta"),
        ("batch.beta", "objectives.NAME.beta"),
        ("per_device_train_batch_size", "batch.micro_batch"),
        ("num_generations", "batch.group_size"),
        ("max_completion_length", "sampling.max_completion_length"),
    ],
)
def test_a_setting_of_another_group_or_trainer_is_named(key: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=pattern(f"'{key}'", f"'{meant}'")):
        Config().replace(**{key: 1})
    if "." not in key:
        assert names(parse_error({key: 1}), f"'{meant}'")


def test_names_of_other_trainers_lead_to_settings_that_exist() -> None:
    assert {*ELSEWHERE.values()} <= {*leaves(Config)}


def test_every_wrong_setting_is_listed_at_once() -> None:
    message = parse_error({"run": {"steps": -1, "seed": "x"}, "sampling": {"temperature": 0}})
    assert [line.split(":")[0] for line in message.splitlines()] == ["sampling.temperature", "run.steps", "run.seed"]
    assert names(message, -1, "'x'", 0)


def parse_error(tree: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(tree)
    return str(caught.value)


# ---- geometry


def test_a_group_of_one_compares_nothing() -> None:
    assert names(refused(batch__group_size=1), "group_size=1")
    assert names(refused(batch__group_size=0), "group_size=0", 2)


def test_train_batch_must_fit_and_divide() -> None:
    message = refused(batch__mini_batch=200)
    assert names(message, "mini_batch=200", 128, "16 prompts x 8")
    message = refused(batch__mini_batch=48)
    assert names(message, "mini_batch=48", 128, "[1, 2, 4, 8, 16, 32, 64, 128]")


def test_micro_batch_must_divide_an_update() -> None:
    message = refused(batch__micro_batch=48)
    assert names(message, "micro_batch=48", 128, "[1, 2, 4,")
    assert names(BatchConfig(prompts=2, group_size=4, micro_batch=100).describe(), 1, 8)


@given(
    prompts=st.integers(1, 12),
    group=st.integers(2, 8),
    parts=st.integers(1, 6),
    micro=st.integers(1, 40),
    epochs=st.integers(1, 3),
)
def test_a_valid_geometry_covers_every_completion(
    prompts: int, group: int, parts: int, micro: int, epochs: int
) -> None:
    total = prompts * group
    update = total // parts
    try:
        batch = BatchConfig(
            prompts=prompts, group_size=group, micro_batch=micro, mini_batch=update or None, num_iterations=epochs
        )
    except ValidationError:
        assert (update and total % update) or (micro < (update or total) and (update or total) % micro)
        return
    assert batch.completions == total
    assert batch.updates_per_rollout * batch.update_size == epochs * total
    assert batch.on_policy == (batch.updates_per_rollout == 1)


@given(prompts=st.integers(1, 12), group=st.integers(0, 8), update=st.integers(1, 100), micro=st.integers(1, 40))
def test_a_batch_is_refused_by_the_inequality_that_fails(prompts: int, group: int, update: int, micro: int) -> None:
    conditions, failed = of_batch(prompts, group, update, micro, MOST_COMPLETIONS), None
    try:
        failed = next((condition for condition in conditions if not condition.holds), None)
        BatchConfig(prompts=prompts, group_size=group, mini_batch=update, micro_batch=micro)
    except ValidationError as error:
        assert failed is not None and failed.text in str(error) and failed.otherwise in str(error)
        return
    assert failed is None


def test_the_inequalities_have_the_numbers_put_in() -> None:
    shown = [str(condition) for condition in presets.demo().inequalities()]
    for tokens in (
        ("group_size 8 >= 2",),
        ("mini_batch 128 <= prompts 16 x group_size 8 = 128",),
        ("prompts 16 x group_size 8 = 128 = 1 x mini_batch 128",),
        ("mini_batch 128", "micro_batch"),
        ("batch.prompts 16 = 8 x objectives 2",),
    ):
        assert any(names(line, *tokens) and line.endswith("holds") for line in shown), (tokens, shown)
    assert names(refused(batch__mini_batch=48), "128 = 2 x mini_batch 48 + 32")
    assert names(refused(batch__prompts=15, batch__micro_batch=8), "15 = 7 x objectives 2 + 1")
    huge = refused(batch__prompts=10**12, batch__group_size=10**3)
    assert names(huge, 10**15, MOST_COMPLETIONS), "and no divisor of it was sought"


def test_data_and_lengths_have_their_numbers_put_in() -> None:
    with pytest.raises(ConfigError, match=pattern("fairness", "3 training prompts >= batch.prompts 16 / 2")):
        check_data_size(presets.demo(), {"fairness": 3})
    cap, context = of_lengths("fairness/a", 90, (80, 24), 100)
    assert not cap.holds and names(cap.text, 90, "<=", 80)
    assert not context.holds and names(context.text, "90 + sampling.max_completion_length 24 = 114", 100)
    assert all(condition.holds for condition in of_lengths("fairness/a", 76, (80, 24), 100))


def test_geometry_in_words() -> None:
    words = BatchConfig(prompts=8, group_size=4, micro_batch=4, mini_batch=16, num_iterations=2).describe()
    assert re.findall(r"\d+", words) == ["8", "4", "32", "4", "16", "4", "4"], "the product, the updates, the passes"
    assert names(words, "off-policy") and names(BatchConfig().describe(), "on-policy")


def test_objectives_share_the_prompts_equally() -> None:
    assert names(refused(batch__prompts=15, batch__micro_batch=8), "batch.prompts=15", 2)
    assert refused(objectives={}).startswith("objectives ")
    assert presets.demo().prompts_per_objective == 8


def test_data_must_fill_a_step() -> None:
    config = presets.demo()
    check_data_size(config, {"fairness": 8, "hallucination": 8})
    with pytest.raises(ConfigError, match=pattern("'hallucination'", 7, 8)):
        check_data_size(config, {"fairness": 8, "hallucination": 7})


# ---- objectives and algorithm


def test_bands_are_ordered() -> None:
    for band in ([0.1, 0.1], [-0.1, 0.1]):
        message = refused(objectives__fairness__kl_band=band)
        assert names(message, "objectives.fairness", *band, "0 <= low < high")
    assert "beta_bounds=(0.0, 1.0); needs 0 < low < high" in refused(objectives__fairness__beta_bounds=[0, 1])
    assert presets.demo().replace(**{"objectives.fairness.kl_band": None}).objectives["fairness"].kl_band is None


@pytest.mark.parametrize("target", [0.005, 0.2])
def test_the_target_lies_in_the_band(target: float) -> None:
    message = refused(objectives__fairness__kl_band=[0.01, 0.1], objectives__fairness__kl_target=target)
    assert names(message, f"kl_target={target}", "kl_band=(0.01, 0.1)", "null")


def test_a_target_needs_a_band() -> None:
    message = refused(objectives__fairness__kl_band=None, objectives__fairness__kl_target=0.05)
    assert names(message, "kl_target=0.05", "kl_band")


def test_a_beta_is_controlled_where_there_is_a_band_and_a_controller_that_moves() -> None:
    def controlled(**changes: Any) -> bool:
        return ObjectiveConfig(task="bbq", **changes).controlled

    assert all(controlled(controller=name) for name in ("band", "proportional", "dual_ascent"))
    assert not controlled(controller="fixed") and not controlled(kl_band=None)


def test_k1_as_a_loss_is_refused_with_the_reason() -> None:
    message = refused(algorithm__kl="k1")
    assert names(message, "algorithm", "'k1'", "'k2'", "'k3'", "'k3_k2'", "'k1_in_reward'")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.lora_rank", 0),
        ("model.lora_alpha", 0),
        ("model.dtype", "int8"),
        ("model.train", "qlora"),
        ("objectives.fairness.weight", 0),
        ("objectives.fairness.beta", -0.1),
        ("objectives.fairness.controller", "adaptive"),
        ("objectives.fairness.kl_target", 0),
        ("objectives.fairness.controller_gain", 0),
        ("objectives.fairness.controller_limit", 0),
        ("objectives.fairness.controller_limit", 1),
        ("sft.steps", -1),
        ("sft.batch", 0),
        ("sft.learning_rate", 0),
        ("sft.micro_batch", 0),
        ("sampling.temperature", 0),
        ("sampling.max_completion_length", 0),
        ("sampling.max_prompt_length", 0),
        ("sampling.top_p", 0),
        ("sampling.top_p", 1.1),
        ("sampling.top_k", -1),
        ("sampling.min_p", 1),
        ("sampling.repetition_penalty", 0),
        ("batch.prompts", 0),
        ("batch.micro_batch", 0),
        ("batch.num_iterations", 0),
        ("algorithm.name", "ppo"),
        ("algorithm.combine", "mean"),
        ("algorithm.learning_rate", -1e-6),
        ("algorithm.cagrad_c", -0.1),
        ("algorithm.cagrad_c", 1),
        ("algorithm.clip_low", 0),
        ("algorithm.clip_high", 0),
        ("algorithm.max_grad_norm", 0),
        ("algorithm.skip_grad_norm", 0),
        ("algorithm.advantage_clip", 0),
        ("algorithm.log_ratio_clamp", 0),
        ("run.steps", -1),
        ("run.seed", -1),
        ("run.checkpoint_every", 0),
        ("run.keep_checkpoints", 0),
        ("run.eval_examples", 0),
        ("run.deterministic", "maybe"),
    ],
)
def test_values_out_of_range_are_refused_with_key_and_value(key: str, value: Any) -> None:
    message = refused(**{key: value})
    assert message.startswith(key) and f"found {value!r}" in message


def test_sampling_knows_when_it_leaves_the_policy() -> None:
    assert not presets.demo().sampling.changes_policy
    for change in ({"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.05}, {"repetition_penalty": 1.1}):
        (item,) = change.items()
        assert presets.demo().replace(**{f"sampling.{item[0]}": item[1]}).sampling.changes_policy


# ---- changing and comparing


def test_replace_leaves_the_original_alone() -> None:
    config = presets.demo()
    changed = config.replace(**{"run.steps": 7, "objectives.fairness.beta": 0.5})
    assert (changed.run.steps, changed.objectives["fairness"].beta) == (7, 0.5)
    assert config == presets.demo()


def test_differences_are_dotted_with_both_values() -> None:
    config = presets.demo()
    changed = config.replace(**{"run.steps": 7, "objectives.fairness.kl_band": None})
    assert config.differences(changed) == {
        "run.steps": (config.run.steps, 7),
        "objectives.fairness.kl_band": (list(config.objectives["fairness"].kl_band or ()), None),
    }
    assert config.differences(config) == {}


# ---- choices that do not go together


@pytest.mark.parametrize("surrogate", ["gspo", "gmpo"])
def test_a_ratio_of_the_whole_completion_takes_no_weights_of_tokens(surrogate: str) -> None:
    said = refused(algorithm__surrogate=surrogate, algorithm__top_entropy_quantile=0.2)
    assert names(said, f"'{surrogate}'", "top_entropy_quantile=0.2", "top_entropy_quantile=1")
    said = refused(algorithm__surrogate=surrogate, algorithm__importance_correction="tis")
    assert names(said, "importance_correction='tis'", "'token'", "importance_correction_level='sequence'")
    presets.demo().replace(
        **{
            "algorithm.surrogate": surrogate,
            "algorithm.importance_correction": "tis",
            "algorithm.importance_correction_level": "sequence",
        }
    )
    presets.demo().replace(**{"algorithm.surrogate": "gspo_token", "algorithm.top_entropy_quantile": 0.2})


@pytest.mark.parametrize("kl", ["k2", "k3_k2"])
def test_the_ratios_gradient_is_for_k3_only(kl: str) -> None:
    said = refused(algorithm__kl=kl, algorithm__kl_weight="ratio_through")
    assert names(said, f"kl='{kl}'", "kl_weight", "ratio_through")
    presets.demo().replace(**{"algorithm.kl": "k3", "algorithm.kl_weight": "ratio_through"})


@pytest.mark.parametrize(("kl", "through"), [("k3", True), ("k2", False), ("k3_k2", False)])
def test_the_kls_weight_follows_the_estimator(kl: str, through: bool) -> None:
    chosen = presets.demo().replace(**{"algorithm.kl": kl}).algorithm
    assert chosen.kl_factor == ("ratio_through" if through else "ratio")


def test_the_bound_of_the_advantages_follows_the_estimator() -> None:
    for name, row in ADVANTAGE_ROWS.items():
        settings = AlgorithmConfig(advantage=name)
        assert settings.advantage_bound == (10 if row.scale_free else None)
        assert AlgorithmConfig(advantage=name, advantage_clip=7).advantage_bound == 7
        assert AlgorithmConfig(advantage=name, advantage_clip=None).advantage_bound is None


def test_settings_written_by_an_older_version_keep_their_values() -> None:
    """config.json holds every value: what was a default then is a choice now."""
    tree = presets.demo().model_dump(mode="json")
    assert {"kl_weight", "advantage_clip"} <= tree["algorithm"].keys()
    tree["algorithm"] |= {"kl_weight": "ratio", "advantage_clip": 10.0, "name": "dr_grpo"}
    old = parse(tree).algorithm
    assert (old.kl_factor, old.advantage_bound) == ("ratio", 10)


@pytest.mark.parametrize("bounds", [[1.1, 2.0], [0.2, 0.9], [1.0, 2.0], [2.0, 0.5]])
def test_a_correction_lets_an_engine_through_that_agrees(bounds: list[float]) -> None:
    said = refused(algorithm__importance_correction="mis", algorithm__importance_correction_bounds=bounds)
    assert names(said, "importance_correction_bounds", *bounds, "lower < 1 < upper")


def test_every_update_has_all_objectives() -> None:
    said = refused(batch__mini_batch=1, batch__micro_batch=1)
    assert names(said, "batch.mini_batch=1", 2, "[2, 4, 8, 16")


def test_the_geometry_counts_the_passes_of_each_objective() -> None:
    config = presets.demo().replace(**{"batch.mini_batch": 64, "batch.micro_batch": 64})
    assert re.search(r"\b2\D+64\D+\b2\D+32\D*$", config.geometry), "a pass has rows of one objective"


@pytest.mark.parametrize(
    ("changes", "idle"),
    [
        ({"objectives.fairness.kl_target": 0.05}, ("objectives.fairness.kl_target=0.05", "'proportional'")),
        ({"objectives.fairness.controller_gain": 0.2}, ("objectives.fairness.controller_gain=0.2", "'proportional'")),
        (
            {"objectives.fairness.kl_band": None, "objectives.fairness.controller": "dual_ascent"},
            ("objectives.fairness.controller=dual_ascent", "kl_band"),
        ),
        (
            {"objectives.fairness.controller": "fixed", "objectives.fairness.controller_limit": 0.1},
            ("objectives.fairness.controller_limit=0.1", "beta"),
        ),
    ],
)
def test_a_controllers_setting_that_nothing_reads_is_said(changes: dict[str, Any], idle: tuple[str, str]) -> None:
    assert not [note for note in presets.demo().unused_settings() if "objectives." in note]
    (note,) = [note for note in presets.demo().replace(**changes).unused_settings() if "objectives." in note]
    assert note.startswith(idle[0]) and names(note, *idle)
    steering = {"objectives.fairness.controller": "proportional", "objectives.fairness.controller_gain": 0.2}
    assert not [n for n in presets.demo().replace(**steering).unused_settings() if "objectives." in n]


@pytest.mark.parametrize(("quick", "saved", "notes"), [(3, 20, 1), (30, 20, 1), (40, 20, 0), (20, 20, 0), (0, 20, 0)])
def test_steps_that_are_measured_and_cannot_be_loaded_are_said(quick: int, saved: int, notes: int) -> None:
    config = presets.demo().replace(**{"run.quick_eval_every": quick, "run.checkpoint_every": saved})
    found = [
        note for note in config.unused_settings() if names(note, "run.quick_eval_every", "run.checkpoint_every=20")
    ]
    assert len(found) == len(config.unused_settings()) == notes


def test_the_clamp_acts_after_the_clip() -> None:
    said = refused(algorithm__log_ratio_clamp=0.1)
    assert names(said, "log_ratio_clamp=0.1", 0.247)
    assert names(refused(algorithm__log_ratio_clamp=1.0, algorithm__dual_clip=3.0), "log_ratio_clamp=1", 1.1)
    assert names(refused(algorithm__name="cispo_cap", algorithm__log_ratio_clamp=1.0), "log_ratio_clamp=1", 1.61)
    assert names(refused(algorithm__name="gmpo", algorithm__log_ratio_clamp=0.3), "log_ratio_clamp=0.3", 0.4)
    presets.demo().replace(**{"algorithm.name": "sapo", "algorithm.log_ratio_clamp": 0.1})


def test_a_cap_is_no_offset() -> None:
    said = refused(algorithm__name="cispo_cap", algorithm__clip_high=0.28)
    assert names(said, "clip_high=0.28", "28%", 1, 5)


@pytest.mark.parametrize(
    ("change", "loss"),
    [
        ({"clip_low": 0.1}, "dapo"),
        ({"clip_high": 0.5}, "dapo"),
        ({"dual_clip": 3.0}, "dapo"),
        ({"sapo_tau_positive": 3.0}, "sapo"),
        ({"cpgd_drift": 0.1}, "cpgd"),
        ({"kl_weight": "none"}, "reinforce_pp_baseline"),
    ],
)
def test_what_holds_a_ratio_rests_on_policy(change: dict[str, Any], loss: str) -> None:
    dotted = {"algorithm.name": loss} | {f"algorithm.{name}": value for name, value in change.items()}
    (note,) = presets.demo().replace(**dotted).unused_settings()
    assert note.startswith(f"algorithm.{next(iter(change))}=") and names(note, "batch.num_iterations")
    assert presets.demo().replace(**dotted | {"batch.num_iterations": 2}).unused_settings() == []


@pytest.mark.parametrize(
    ("loss", "left"),
    [
        ("dapo", "shaping.clip"),
        ("dr_grpo", "step"),
        ("reinforce_pp", "KL"),
        ("rloo", "KL"),
    ],
)
def test_what_normalising_changes(loss: str, left: str) -> None:
    (note,) = presets.demo().replace(**{"algorithm.name": loss, "shaping.normalise": True}).unused_settings()
    assert names(note, "shaping.normalise", ALGORITHMS[loss].advantage, left)


def test_a_clip_that_is_skipped_first_is_said() -> None:
    (note,) = presets.demo().replace(**{"algorithm.skip_grad_norm": 0.5}).unused_settings()
    assert names(note, "max_grad_norm=1", "skip_grad_norm=0.5")


def test_a_server_that_no_engine_asks_is_an_idle_setting() -> None:
    server = {"rollout.url": "http://127.0.0.1:8000"}
    (note,) = presets.demo().replace(**server).unused_settings()
    assert names(note, "rollout.url", "rollout.engine='vllm'")
    assert presets.demo().replace(**server | {"rollout.engine": "vllm"}).unused_settings() == []


@pytest.mark.parametrize("preset", presets.PRESETS)
def test_presets_have_no_idle_settings(preset: str) -> None:
    assert getattr(presets, preset)().unused_settings() == []


def test_a_setting_of_several_types_is_refused_in_one_line() -> None:
    message = refused(algorithm__kl="k4")
    assert "\n" not in message and message.startswith("algorithm.kl: ") and names(message, "'k3'")
    assert names(message, "'k1_in_reward'", "'k2'", "'k3_k2'", "'auto'", "'k4'")
    assert names(refused(model__lora_targets=3), "model.lora_targets: ", "'auto'")


@pytest.mark.parametrize(
    ("setting", "value", "named"),
    [
        ("algorithm.name", "gpro", ("'gpro'", "'grpo'")),
        ("algorithm.combine", "pcgard", ("'pcgard'", "'pcgrad'")),
        ("objectives.fairness.controller", "bnad", ("'bnad'", "'band'")),
        ("model.lora_targets", "aut", ("'aut'", "'auto'")),
        ("algorithm.name", "zzz", ("'zzz'",)),
        ("run.steps", "grpo", ("'grpo'",)),
    ],
)
def test_a_misspelt_value_is_told_the_nearest(setting: str, value: str, named: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refusal:
        presets.demo().replace(**{setting: value})
    assert names(str(refusal.value), setting, *named)


@pytest.mark.parametrize(
    ("judge", "near"),
    [
        ({"providers": [{"model": "m"}], "wieght": 0.1}, "weight"),
        ({"providers": [{"model": "m", "base_ulr": "http://localhost"}]}, "base_url"),
    ],
)
def test_a_misspelt_key_inside_a_judge_gets_the_near_one(judge: dict[str, Any], near: str) -> None:
    with pytest.raises(ConfigError, match=pattern(f"'{near}'")):
        presets.demo().replace(**{"objectives.fairness.judge": judge})


def test_a_key_of_a_group_that_is_not_set_names_the_group() -> None:
    with pytest.raises(ConfigError, match=pattern("'objectives.fairness.judge.weight'", "'judge'")) as refused:
        presets.demo().replace(**{"objectives.fairness.judge.weight": 0.1})
    assert "did you mean" not in str(refused.value)
