"""Checks that refuse a run before any work: a missing solver; tasks, data and prompts that cannot be trained on.

SFT runs them too, on behalf of GRPO, which would fail only after the minutes of SFT.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from grpo_nb import combine_gradients
from grpo_nb.config import Config, ConfigError, check_data_size, inequalities
from grpo_nb.judge.client import check_ready
from grpo_nb.policy.model import ModelError, Policy
from grpo_nb.printable import clean_logger
from grpo_nb.rollout.selfcheck import check_model
from grpo_nb.tasks import BUILT_IN, EVALUATION_ONLY, DataError, Task, load_tasks, read_examples
from grpo_nb.types import Example

logger = clean_logger(__name__)

Encode = Callable[[str, Example], list[int]]
"""Token ids of the prompt of an objective's example."""


def check_combiner(config: Config) -> None:
    """Refuse a combiner whose solver is not installed.

    Raises:
        ConfigError: a package is missing; names it and the extra that brings it.
    """
    if len(config.objectives) == 1:
        return
    try:
        combine_gradients.rehearse(config.algorithm.combine)
    except ImportError as error:
        raise ConfigError(
            f"algorithm.combine='{config.algorithm.combine}' needs packages that are not installed ({error}); "
            "pip install \"grpo_nb[combine]\", or take one of 'sum', 'pcgrad', 'mgda', which need none"
        ) from None


def check_ahead(
    config: Config, folder: Path, policy: Policy, tasks: Mapping[str, Task] | None = None
) -> dict[str, Task]:
    """Refuse before SFT what GRPO would refuse after it; objectives whose task only GRPO gets are left to GRPO.

    A judge without the means to send requests only causes a warning: GRPO may run elsewhere, where the key is.

    Returns:
        The tasks that were checked, by objective.

    Raises:
        ConfigError: as `check_examples` and `check_system_prompts`, or a task that is for evaluation only.
        ModelError: the model's scores depend on padding or on training mode.
        DataError: a built-in task's data cannot be used, or an example id is used twice.
    """
    try:
        check_judges(config)
    except ConfigError as error:
        logger.warning("%s; SFT needs no judge, but GRPO does", error)
    try:
        check_model(policy)
    except ModelError as error:
        check_model(policy, draws=False)
        logger.warning("%s; SFT samples nothing, but GRPO does, unless you give it an engine of your own", error)
    check_system_prompts(config, policy)
    given = tasks or {}
    known = [name for name, o in config.objectives.items() if name in given or o.task in (*BUILT_IN, *EVALUATION_ONLY)]
    loaded = load_tasks(config, folder, given, known)
    examples = {name: read_examples(task, "train") for name, task in loaded.items()}
    check_ids(examples)
    check_examples(config, examples, policy.context, lambda _, example: policy.encode(example.prompt))
    return loaded


def check_judges(config: Config) -> None:
    """Refuse judges to which no request could be sent.

    Raises:
        ConfigError: the client is not installed, or a key is not in the environment.
    """
    for name, objective in config.objectives.items():
        if objective.judge is not None:
            check_ready(f"objectives.{name}.judge", objective.judge.providers)


def check_system_prompts(config: Config, policy: Policy) -> None:
    """Refuse system prompts that the model's chat template has no role for.

    Raises:
        ConfigError: an objective has one; names its setting and the changes that help.
    """
    named = [f"objectives.{name}.system_prompt" for name, o in config.objectives.items() if o.system_prompt is not None]
    if named and not policy.takes_system:
        raise ConfigError(
            f"{', '.join(named)} {'is' if len(named) == 1 else 'are'} set, and the chat template of "
            f"{config.model.name} has no system role. Set system_prompt to null and write the text into the user "
            "messages of a task of your own, take a model whose template has the role, or put a template with it into "
            "chat_template.jinja in the model's folder"
        )


def check_examples(config: Config, examples: Mapping[str, Sequence[Example]], context: int, encode: Encode) -> None:
    """Refuse training examples by objective that a step could not take.

    Raises:
        ConfigError: fewer than a step takes, or a prompt that does not fit sampling.max_prompt_length or the context.
    """
    check_data_size(config, {name: len(own) for name, own in examples.items()})
    sampling = config.sampling
    lengths = ((len(encode(name, e)), f"{name}/{e.id}") for name, own in examples.items() for e in own)
    longest, where = max(lengths, default=(0, ""))
    caps = sampling.max_prompt_length, sampling.max_completion_length
    try:
        inequalities.refuse(inequalities.of_lengths(where, longest, caps, context))
    except ValueError as error:
        raise ConfigError(str(error)) from None


def check_ids(examples: Mapping[str, Sequence[Example]]) -> None:
    """Check that ids are unique: they name an example in the log, in evaluations and in the prompt cache.

    Raises:
        DataError: one is used twice.
    """
    for objective, own in examples.items():
        counts = Counter(example.id for example in own)
        if repeated := [example_id for example_id, count in counts.items() if count > 1]:
            raise DataError(
                f"objective '{objective}': example id '{repeated[0]}' is used {counts[repeated[0]]} times "
                f"({len(repeated)} ids repeat); its task has to give each example an id of its own"
            )
