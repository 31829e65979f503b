"""The settings of a run: frozen, validated, each field with its sentence; presets are functions.

A configuration is data and nothing else: `config.json` restores it. Values that a person may change
while a run trains (each beta, temperature, learning rate) start from here and then live in `knobs.json`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from grpo_nb.config.algorithm import AlgorithmConfig, ShapingConfig
from grpo_nb.config.base import ConfigError, Count, Positive, Settings, Steps
from grpo_nb.config.batch import BatchConfig
from grpo_nb.config.guards import GuardsConfig
from grpo_nb.config.inequalities import Inequality, of_data, of_objectives, refuse
from grpo_nb.config.judge import JudgeConfig, JudgeProvider
from grpo_nb.config.model import ModelConfig
from grpo_nb.config.objective import ObjectiveConfig
from grpo_nb.config.sampling import RolloutConfig, SamplingConfig
from grpo_nb.config.setting_keys import keys_at
from grpo_nb.config.trackers import Tracker
from grpo_nb.config.unknown import names_at, unknown
from grpo_nb.printable import LONGEST_VALUE, brief, cut
from grpo_nb.suggest import did_you_mean

__all__ = [
    "AlgorithmConfig",
    "BatchConfig",
    "Config",
    "ConfigError",
    "GuardsConfig",
    "JudgeConfig",
    "JudgeProvider",
    "ModelConfig",
    "ObjectiveConfig",
    "RolloutConfig",
    "RunConfig",
    "SFTConfig",
    "SamplingConfig",
    "Settings",
    "ShapingConfig",
    "check_data_size",
    "check_names",
    "parse",
]


MOST_OBJECTIVES = 32
"""Most objectives: a config.json may claim any number, and checks and views work through them."""


class SFTConfig(Settings):
    """Supervised fine-tuning before GRPO: the model learns the format of an answer."""

    steps: Steps = 100
    """Optimizer steps; 0 skips SFT, and GRPO starts from the model as loaded."""
    batch: Count = 16
    """Examples per optimizer step."""
    learning_rate: Positive = 2e-5
    """Peak learning rate of AdamW."""
    data: str | None = None
    """JSON lines of `messages`, or of `prompt` and `completion`; `demo`; null: the tasks' gold answers."""

    # advanced
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of each task's training templates or texts whose gold answers SFT learns; GRPO samples from all of them,
    and learns little from prompts whose answers SFT has memorized. Without effect on `sft.data`."""
    mix: Literal["examples", "objectives"] = "examples"
    """How a batch is mixed: `examples` weighs every example equally, so that the largest objective fills most of the
    batch; `objectives` gives every objective an equal part. Without effect on `sft.data`."""
    micro_batch: Count = 8
    """Examples per forward and backward pass; changes memory, never the gradient."""
    warmup_steps: Annotated[int, Field(ge=0)] = 10
    """Linear rise of the learning rate to its peak; afterwards it falls linearly to a tenth."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this global norm."""
    checkpoint_every: Annotated[int, Field(ge=0)] = 100
    """Steps between checkpoints of SFT itself; 0: only at the end."""

    def unused_settings(self) -> list[str]:
        """A sentence for each changed setting that needs the tasks' gold answers, while SFT trains on others."""
        needs = [("sft.data=null", self.data is None), ("sft.steps above 0", self.steps > 0)]
        return self._unused("sft", dict.fromkeys(("share", "mix"), needs))


def _names(value: Any) -> Any:
    """Names in a list, each once; also those of one text, with commas between them."""
    value = [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else value
    texts = isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)
    return tuple(dict.fromkeys(value)) if texts else value


class RunConfig(Settings):
    """Length of the run, its seed, and the intervals of checkpoints and evaluations."""

    steps: Steps = 100
    """GRPO steps in total; a resumed run continues to this number."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the run; every random draw is a function of (seed, step, stream)."""
    checkpoint_every: Count = 20
    """Steps between checkpoints."""

    # advanced
    keep_checkpoints: Count = 3
    """Number of newest checkpoints to keep; step 0 and the best by quick evaluation are kept too."""
    checkpoints_gib: Positive | None = None
    """Most GiB of disk for all checkpoints: older ones are deleted earlier; the newest, step 0 and the best stay."""
    deterministic: bool | Literal["auto"] = "auto"
    """Use only algorithms that give the same bits each time, on all CPU threads; `auto`: on CPU, on as many as pay."""
    samples_per_step: Annotated[int, Field(ge=0)] = 8
    """Completions a step written to samples.jsonl."""
    eval_examples: Count = 200
    """Held-out examples per objective that an evaluation uses, at most."""
    quick_eval_every: Annotated[int, Field(ge=0)] = 0
    """Steps between quick evaluations while training; 0: never. Those of a checkpoint's step can be loaded."""
    rank_timeout: Annotated[float, Field(ge=1, le=86_400)] = 1800.0
    """Seconds after which a GPU's process that does not answer ends the training, saved; for runs on several GPUs."""
    quick_eval_examples: Count = 32
    """Examples per objective of a quick evaluation: of the test split, different from `eval_examples` if it has enough.
    """
    trackers: Annotated[tuple[Tracker, ...], BeforeValidator(_names)] = ()
    """Experiment trackers that mirror the run's metrics: `tensorboard`, `wandb`, `trackio`, `mlflow`. Changes no step.
    """


class Config(Settings):
    """All settings of a run. `presets.demo()` and the other presets return one; `replace` returns a changed copy."""

    model: ModelConfig = ModelConfig()
    objectives: dict[str, ObjectiveConfig] = Field(
        default_factory=lambda: {
            "fairness": ObjectiveConfig(task="bbq", data="demo"),
            "hallucination": ObjectiveConfig(task="halueval_qa", data="demo"),
        }
    )
    """Objectives by name; the name is used in metrics, knobs and colours."""
    sft: SFTConfig = SFTConfig()
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutConfig = RolloutConfig()
    batch: BatchConfig = BatchConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    shaping: ShapingConfig = ShapingConfig()
    guards: GuardsConfig = GuardsConfig()
    run: RunConfig = RunConfig()

    @model_validator(mode="after")
    def _overlong_fits(self) -> Self:
        if self.shaping.overlong_buffer > self.sampling.max_completion_length:
            raise ValueError(
                f"shaping.overlong_buffer={self.shaping.overlong_buffer} is more than "
                f"sampling.max_completion_length={self.sampling.max_completion_length}; use at most that, a quarter "
                "of it is usual"
            )
        return self

    @model_validator(mode="after")
    def _off_policy_is_corrected(self) -> Self:
        if self.rollout.steps_off_policy and not self._corrected:
            raise ValueError(
                f"rollout.steps_off_policy={self.rollout.steps_off_policy} trains completions of older weights, and "
                "algorithm.importance_correction='none' would leave the gradient biased; set it to 'tis' (truncated "
                "importance weights) or 'mis'"
            )
        return self

    @model_validator(mode="after")
    def _batches_of_sft_hold_each_objective(self) -> Self:
        if self.sft.mix == "objectives" and self.sft.batch < len(self.objectives):
            raise ValueError(
                f"sft.batch={self.sft.batch} is fewer than {len(self.objectives)} objectives, and sft.mix='objectives' "
                "needs a pair of each in every batch; raise it, or set sft.mix to 'examples'"
            )
        return self

    @model_validator(mode="after")
    def _objectives_share_the_prompts(self) -> Self:
        n = len(self.objectives)
        if n > MOST_OBJECTIVES:
            raise ValueError(f"objectives has {n} of them; at most {MOST_OBJECTIVES} can be trained at once")
        if n == 0:
            raise ValueError("objectives is empty; needs at least one, e.g. {'fairness': {'task': 'bbq', 'data': ...}}")
        refuse(self._shared())
        return self

    @property
    def geometry(self) -> str:
        """A step's prompts, completions, updates and micro-batches in one sentence."""
        ahead = "; completions are drawn one step ahead" if self.rollout.steps_off_policy else ""
        return self.batch.describe(len(self.objectives)) + ahead

    def inequalities(self) -> list[Inequality]:
        """Inequalities of the batch settings, with the numbers put in; all hold in a valid configuration."""
        return [*self.batch.inequalities(), *self._shared()]

    def _shared(self) -> Iterator[Inequality]:
        batch = self.batch
        return of_objectives(batch.prompts, batch.update_size, batch.completions, len(self.objectives))

    @property
    def _corrected(self) -> bool:
        """Whether weights correct for completions of other weights than those that learn."""
        return self.algorithm.importance_correction != "none"

    @property
    def prompts_per_objective(self) -> int:
        return self.batch.prompts // len(self.objectives)

    def unused_settings(self) -> list[str]:
        """One sentence for each changed setting that other settings deprive of its effect, or of part of it."""
        notes = [note for name, o in self.objectives.items() for note in o.unused_settings(f"objectives.{name}")]
        if self.algorithm.combine != "sum" and len(self.objectives) == 1:
            notes.append(f"algorithm.combine='{self.algorithm.combine}' does nothing here; it needs two objectives")
        notes += self._fights()
        texts = [f"objectives.{name}.system_prompt" for name, o in self.objectives.items() if o.system_prompt]
        if texts and self.sft.data and self.sft.steps:
            notes.append(
                f"{', '.join(texts)}: without effect on SFT, which learns the pairs of sft.data as they are; write the "
                "system messages into that file, or set sft.data to null to learn the tasks' gold answers"
            )
        run = self.run
        if run.quick_eval_every % run.checkpoint_every:
            notes.append(
                f"run.quick_eval_every={run.quick_eval_every} measures steps that have no checkpoint, so the best of "
                f"them cannot be loaded; take a multiple of run.checkpoint_every={run.checkpoint_every}"
            )
        return [
            *notes,
            *self.sft.unused_settings(),
            *self.rollout.unused_settings(),
            *self.algorithm.unused_settings(self.batch.on_policy),
            *self.shaping.unused_settings(self.algorithm.row),
        ]

    def _fights(self) -> Iterator[str]:
        """Changed settings that undo or outlast others."""
        steps, warmup, limit = self.run.steps, self.algorithm.warmup_steps, self.guards.rollback_kl
        if warmup >= steps > 0:
            yield f"algorithm.warmup_steps={warmup} is not over at run.steps={steps}: the rate never reaches its peak"
        if self.run.quick_eval_every > steps > 0:
            yield f"run.quick_eval_every={self.run.quick_eval_every} is more than run.steps={steps}: none is made"
        if self.rollout.engine == "vllm" and self.model.quantize != "none" and not self._corrected:
            yield (
                f"model.quantize='{self.model.quantize}' changes the trained base, and rollout.engine='vllm' samples "
                "from the one before: set algorithm.importance_correction to 'tis' or 'mis', or another engine"
            )
        bands = {o.kl_band[1]: name for name, o in self.objectives.items() if o.kl_band and o.controlled}
        if self.guards.rollback and limit is not None and bands and limit <= (highest := max(bands)):
            yield (
                f"guards.rollback_kl={limit:g} undoes steps that objectives.{bands[highest]}.kl_band, up to "
                f"{highest:g}, allows; raise it well above the band"
            )

    def replace(self, **changes: Any) -> "Config":
        """A copy with dotted settings changed: `config.replace(**{"run.steps": 10, "batch.group_size": 4})`.

        Raises:
            ConfigError: an unknown name, or a value that does not validate.
        """
        tree = self.model_dump(mode="json")
        for dotted, value in changes.items():
            _set(tree, keys_at(tree, dotted) or dotted.split("."), value, dotted)
        return parse(tree)

    def flat(self) -> dict[str, Any]:
        """Every setting by its dotted name, as JSON values."""
        return _flatten(self.model_dump(mode="json"))

    def differences(self, other: "Config") -> dict[str, tuple[Any, Any]]:
        """Dotted names whose values differ, with (mine, other's)."""
        mine, theirs = self.flat(), other.flat()
        keys = sorted(mine.keys() | theirs.keys())
        return {k: (mine.get(k), theirs.get(k)) for k in keys if mine.get(k) != theirs.get(k)}


def parse(tree: Any) -> Config:
    """A Config from plain data (as in config.json).

    Raises:
        ConfigError: one message that lists every wrong setting.
    """
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        wrong: dict[tuple[str, ...], list[Any]] = {}
        for item in error.errors():
            wrong.setdefault(_path(item), []).append(item)
        lines = {".".join(path): _explain(".".join(path), items) for path, items in wrong.items()}
        raise ConfigError("\n".join(lines.values()), lines) from None


def check_names(changes: Mapping[Any, Any]) -> None:
    """Refuse changes that `Config.replace` cannot take as keywords.

    Raises:
        ConfigError: a key is not a string.
    """
    for key in changes:
        if not isinstance(key, str):
            raise ConfigError(f"changes has the key {brief(key)}; needs names of settings, such as 'run.steps'")


def check_data_size(config: Config, examples: dict[str, int]) -> None:
    """Refuse a geometry that the data cannot fill (`examples`: training examples per objective).

    Raises:
        ConfigError: an objective has fewer training prompts than a step takes from it.
    """
    for name, have in examples.items():
        condition = of_data(name, have, config.batch.prompts, len(config.objectives))
        if not condition.holds:
            raise ConfigError(f"{condition.otherwise} (needed: {condition.text})")


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {k: v for key, sub in tree.items() for k, v in _flatten(sub, f"{prefix}.{key}" if prefix else key).items()}


def _set(tree: dict[str, Any], path: list[str], value: Any, dotted: str) -> None:
    *parents, leaf = path
    for name in parents:
        tree = _descend(tree, name, dotted)
    if leaf not in tree and parents[-1:] != ["chat_template_kwargs"]:
        raise ConfigError(unknown(dotted, leaf, tree, Config))
    tree[leaf] = value


def _descend(tree: dict[str, Any], name: str, dotted: str) -> dict[str, Any]:
    if name not in tree:
        raise ConfigError(unknown(dotted, name, tree, Config))
    if not isinstance(sub := tree[name], dict):
        found = "not set" if sub is None else "a single value"
        short = cut(name)
        raise ConfigError(
            f"'{cut(dotted)}' cannot be set: '{short}' is {found}; set '{short}' itself, with all that it needs"
        )
    return sub


def _path(item: Any) -> tuple[str, ...]:
    """The setting an error is about; a setting of several types has one error for each, with the type at the end."""
    *parts, last = (str(part) for part in item["loc"]) if item["loc"] else ("",)
    return tuple(parts) if "[" in last or last in ("bool", "int", "float", "str") else (*parts, last)


def _explain(where: str, items: Sequence[Any]) -> str:
    item = items[0]
    if item["type"] == "extra_forbidden":
        *group, name = map(str, item["loc"])
        return unknown(where, name, names_at(Config, group), Config)
    needed = "Input should be "
    message = item["msg"].removeprefix("Value error, ")
    message += "".join(f" or {other['msg'].removeprefix(needed)}" for other in items[1:])
    # a key in the wrong place would be repeated: what stands under `judge` is never shown
    silent = item["type"] == "value_error" or "judge" in item["loc"]
    found = "" if silent else f" (found {brief(item['input'])})"
    meant = (
        ""
        if silent or not isinstance(item["input"], str)
        else did_you_mean(item["input"][:LONGEST_VALUE], _literals(items))
    )
    return f"{cut(where)}: {message}{found}{meant}" if where else message


def _literals(items: Sequence[Any]) -> list[str]:
    """Values that a setting may have, where its type lists them."""
    listed = (item["ctx"]["expected"] for item in items if item["type"] in ("literal_error", "enum"))
    return [word for text in listed for word in re.findall(r"'([^']*)'", text)]
