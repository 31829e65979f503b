"""The table of faults: a row each, with the rules that claim it, and the latest step."""

from collections.abc import Iterator, Mapping

from grpo_nb.algorithms import ADVANTAGE_ROWS
from grpo_nb.fault_lab import sampling, scoring, storing, updates
from grpo_nb.fault_lab.records import CLEAN, Fault

COOL = {"sampling.temperature": 0.7}
LORA = {"model.train": "lora", "algorithm.learning_rate": 1e-3}
UNDIVIDED = {"algorithm.advantage": next(name for name, row in ADVANTAGE_ROWS.items() if not row.scale_free)}
BONUS = {"algorithm.entropy_coef": 0.05}


def _updates() -> Iterator[Fault]:
    yield Fault(
        "overwritten_gradients",
        "a backward pass writes over .grad instead of adding to it",
        "rule",
        ("gradient_wrong",),
        1,
        updates.overwritten_gradients,
    )
    yield Fault(
        "zeroing_inside_the_loop",
        "zero_grad for every micro-batch",
        "rule",
        ("gradient_wrong",),
        1,
        updates.zeroing_inside_the_loop,
    )
    yield Fault(
        "stepping_too_early",
        "the optimizer steps after every micro-batch",
        "rule",
        ("gradient_wrong", "first_update_wrong"),
        1,
        updates.stepping_too_early,
    )
    yield Fault("clamped_kl", "the KL is clamp(ref - new, 0, 10)", "rule", ("kl_estimator",), 5, updates.clamped_kl)
    yield Fault(
        "ratio_against_the_reference",
        "the ratio is taken against the reference",
        "rule",
        ("ratio_broken",),
        2,
        updates.ratio_against_the_reference,
        {"run.steps": 5},
    )
    yield Fault(
        "entropy_sign", "the entropy bonus is descended", "rule", ("gradient_wrong",), 1, updates.entropy_sign, BONUS
    )
    yield Fault(
        "nan_gradient", "one NaN in a gradient", "guard", ("non_finite",), 2, updates.nan_gradient, {"run.steps": 5}
    )
    yield Fault(
        "learning_rate_times_100",
        "the learning rate is 100 times too high",
        "rule",
        ("kl_exploded", "exploded", "repeated_rollbacks"),
        5,
        updates.learning_rate_times_100,
    )
    yield Fault(
        "frozen_adapter",
        "the optimizer holds tensors that the model no longer uses",
        "rule",
        ("first_update_wrong",),
        1,
        updates.frozen_adapter,
        LORA,
    )


def _sampling() -> Iterator[Fault]:
    yield Fault(
        "temperature_ignored",
        "the engine draws at temperature 1, the settings say 0.7",
        "rule",
        ("sampler_broken",),
        1,
        sampling.temperature_ignored,
        COOL,
    )
    yield Fault(
        "wrong_temperature",
        "log-probs at temperature 1, draws at 0.7",
        "rule",
        ("sampler_broken",),
        1,
        sampling.wrong_temperature,
        COOL,
    )
    yield Fault(
        "sampler_mismatch",
        "the engine shapes its distribution by top-p and top-k of its own",
        "rule",
        ("sampler_broken",),
        1,
        sampling.sampler_mismatch,
    )
    yield Fault(
        "stale_weights",
        "the engine draws from the weights of step 0",
        "rule",
        ("sampler_stale",),
        5,
        sampling.stale_weights,
    )
    yield Fault(
        "one_stop_token_of_two",
        "the chat template's stop token does not end a completion",
        "rule",
        ("truncation",),
        3,
        sampling.one_stop_token_of_two,
    )
    yield Fault(
        "pad_is_eos",
        "padding is EOS, and the mask leaves it out by id",
        "refusal",
        ("TrainingError",),
        0,
        sampling.pad_is_eos,
    )
    yield Fault(
        "sft_without_eos",
        "SFT never shows the stop token",
        "refusal",
        ("TrainingError",),
        0,
        sampling.sft_without_eos,
        {"sft.steps": 2, "sft.data": None},
        "sft",
    )


def _scoring() -> Iterator[Fault]:
    yield Fault("constant_reward", "every answer earns the same", "rule", ("dead_groups",), 3, scoring.constant_reward)
    yield Fault(
        "reward_scales",
        "one objective is paid in percent, the other in shares of 1",
        "rule",
        ("reward_scales",),
        3,
        scoring.reward_scales,
        UNDIVIDED,
    )
    yield Fault("paid_by_length", "a reward pays for length", "rule", ("reward_length",), 5, scoring.paid_by_length)
    yield Fault("too_easy", "all prompts are too easy", "rule", ("dead_groups",), 5, scoring.too_easy)
    yield Fault("too_hard", "all prompts are too hard", "rule", ("dead_groups",), 5, scoring.too_hard)
    yield Fault(
        "leaked_evaluation",
        "training prompts hold the evaluation's",
        "rule",
        ("evaluation_leaked",),
        0,
        scoring.leaked_evaluation,
        {"run.quick_eval_every": 20},
    )
    yield Fault(
        "judge_failure_as_zero",
        "a judge that does not answer gives 0",
        "rule",
        ("judge_failure_scored",),
        1,
        scoring.judge_failure_as_zero,
    )
    yield Fault(
        "judge_injection",
        "answers carry a verdict, and the judge repeats it",
        "rule",
        ("unscored",),
        3,
        scoring.judge_injection,
    )


def _storing() -> Iterator[Fault]:
    yield Fault(
        "disk_full",
        "the disk is full at a checkpoint",
        "refusal",
        ("RunError",),
        2,
        storing.disk_full,
        {"run.checkpoint_every": 2, "run.steps": 4},
    )
    yield Fault(
        "torn_checkpoint",
        "half of a checkpoint's weights are lost",
        "rule",
        ("checkpoint_damaged",),
        2,
        storing.damaged_checkpoint,
        {"run.checkpoint_every": 1, "run.steps": 3},
    )
    yield Fault(
        "two_writers",
        "another machine takes the run over",
        "refusal",
        ("RunLocked",),
        2,
        storing.two_writers,
        {"run.steps": 5},
    )
    yield Fault(
        "clock_set_back", "the clock is set back by an hour", "rule", ("clock_set_back",), 3, storing.clock_set_back
    )
    yield Fault(
        "stale_module",
        "a file of the package was edited after it was loaded",
        "rule",
        ("code_changed",),
        0,
        storing.stale_module,
    )
    yield Fault(
        "data_replaced",
        "the data is other data when the run resumes",
        "refusal",
        ("DependencyChanged",),
        1,
        storing.data_replaced,
        {"run.steps": 3},
    )


def _by_id() -> dict[str, Fault]:
    every = [*_updates(), *_sampling(), *_scoring(), *_storing()]
    return {fault.id: fault for fault in every}


FAULTS: Mapping[str, Fault] = _by_id()
"""Every fault by its id, in the order of the matrix."""
ALL: Mapping[str, Fault] = {CLEAN.id: CLEAN, **FAULTS}
"""Every fault by its id, after the run without a fault."""
