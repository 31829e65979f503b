"""Completions that SFT trains on: gold answers of the objectives' tasks, or pairs of a file."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_nb.config import Config, ConfigError, SFTConfig
from grpo_nb.evaluation.evaluate import cluster_of
from grpo_nb.rules.finding import Finding
from grpo_nb.rules.rewards import evaluation_leaked
from grpo_nb.tasks import DataError, Task, demo, load_tasks, read_examples, records
from grpo_nb.tasks.system_prompt import without_system
from grpo_nb.training.pairs import Pair
from grpo_nb.types import Example, Prompt

Text = tuple[Prompt, str]
"""A prompt with the completion to learn."""
STREAM = "sft/batch"


def load_gold(config: Config, folder: Path, tasks: Mapping[str, Task] | None = None) -> dict[str, list[Text]]:
    """Prompts with the completions to learn: gold answers by objective, or under "" the pairs of `sft.data`.

    Raises:
        DataError: a file that is missing, empty or broken, with the line and the error.
        ConfigError: a task without gold answers and no `sft.data`.
    """
    if config.sft.data == "demo":
        return {"": read_pairs(demo.ensure(folder / "data", config.run.seed).sft)}
    if config.sft.data:
        try:
            return {"": read_pairs(Path(config.sft.data))}
        except DataError as error:
            raise DataError(f"sft.data: {error}") from error
    found = {}
    for name, task in load_tasks(config, folder, tasks).items():
        examples = shared_out(read_examples(task, "train"), config.sft.share, config.run.seed)
        found[name] = [(e.prompt, e.target) for e in examples if e.target is not None]
        if not found[name]:
            raise ConfigError(f"the task of objective '{name}' has no gold answers; set sft.data, or sft.steps=0")
    return found


def shared_out(examples: Sequence[Example], share: float, seed: int) -> list[Example]:
    """The examples of so many of their templates or texts, at least one; the choice is a function of the seed."""
    if share == 1:
        return list(examples)
    kept = records.held_out(map(cluster_of, examples), share, seed) or set(map(cluster_of, examples))
    return [example for example in examples if cluster_of(example) in kept]


def leaks(texts: Sequence[Text], tasks: Mapping[str, Task]) -> Iterator[Finding]:
    """Held-out prompts of a task whose answers SFT would learn; `sft.data` may hold any."""
    learnt = {str(without_system(prompt)) for prompt, _ in texts}
    for name, task in tasks.items():
        held_out = {str(without_system(example.prompt)) for example in read_examples(task, "test")}
        if finding := evaluation_leaked(name, len(held_out & learnt), len(held_out)):
            yield finding


def pools(settings: SFTConfig, pairs: Sequence[Pair], origins: Sequence[str]) -> dict[str, list[Pair]]:
    """Pairs by the random stream that samples a step's batch from them: one pool, or one for each objective."""
    if settings.mix == "examples":
        return {STREAM: list(pairs)}
    named = list(zip(pairs, origins, strict=True))
    return {f"{STREAM}/{name}": [pair for pair, origin in named if origin == name] for name in sorted(set(origins))}


def counts(batch: int, pools: int) -> list[int]:
    """Number of pairs that each pool gives to a batch.

    >>> counts(32, 3)
    [11, 11, 10]
    """
    return [batch // pools + (place < batch % pools) for place in range(pools)]


def read_pairs(path: Path) -> list[Text]:
    """JSON lines of `{"messages": [..., assistant]}` or `{"prompt": ..., "completion": ...}`."""
    return [_pair(row) for row in records.read_rows(records.find_files(path, ("*.jsonl",)), {})]


def _pair(row: records.Row) -> tuple[Prompt, str]:
    match row.data:
        case {"messages": [*prompt, {"role": "assistant", "content": str(completion)}]} if prompt and _chat(prompt):
            return prompt, completion
        case {"prompt": str() as prompt, "completion": str(completion)} if prompt:
            return prompt, completion
        case {"prompt": [*prompt], "completion": str(completion)} if prompt and _chat(prompt):
            return prompt, completion
        case {"prompt": [*prompt], "completion": [{"role": "assistant", "content": str(completion)}]} if _chat(prompt):
            return prompt, completion
    raise DataError(
        f"{row.where}: found fields {', '.join(row.data) or 'none'}; needs 'messages' that end with the assistant's "
        "turn, or 'prompt' and 'completion'"
    )


def _chat(messages: Sequence[Any]) -> bool:
    return all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    )
