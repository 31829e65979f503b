"""System prompts: an objective's text as the leading message of each of its prompts."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from grpo_nb.config.base import ConfigError
from grpo_nb.types import Example, Message, Prompt, Score

if TYPE_CHECKING:
    from grpo_nb.tasks import Task

ROLE = "system"


def with_system(prompt: list[Message], text: str) -> list[Message]:
    """The messages with `text` as their leading system message, in place of one that they have.

    >>> with_system([{"role": "user", "content": "Who?"}], "Be brief.")
    [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'Who?'}]
    """
    return [{"role": ROLE, "content": text}, *_without_leading(prompt)]


def without_system(prompt: Prompt) -> Prompt:
    """The prompt without a leading system message.

    >>> without_system([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}])
    [{'role': 'user', 'content': 'Who?'}]
    """
    return prompt if isinstance(prompt, str) else _without_leading(prompt)


class SystemPrompted:
    """A task whose prompts begin with a system message; everything else is the task's own."""

    def __init__(self, task: "Task", text: str) -> None:
        self.task = task
        self.name = task.name
        self.text = text

    def examples(self, split: Literal["train", "test"]) -> list[Example]:
        """The task's examples of one split, each with the system message.

        Raises:
            ConfigError: a prompt is a plain string, which has no messages.
        """
        given: Any = self.task.examples(split)
        if not isinstance(given, Iterable) or isinstance(given, str | Mapping):
            return given  # type: ignore[return-value]  # `read_examples` refuses it
        return [self._prompted(example) if isinstance(example, Example) else example for example in given]

    def score(self, example: Example, completion: str) -> Score:
        return self.task.score(example, completion)

    def _prompted(self, example: Example) -> Example:
        if isinstance(example.prompt, str):
            raise ConfigError(
                f"system_prompt is set, and the prompt of example '{example.id}' of task '{self.name}' is a plain "
                "string, which has no roles. Give the task's prompts as messages, "
                '[{"role": "user", "content": ...}], or remove system_prompt'
            )
        return replace(example, prompt=with_system(list(example.prompt), self.text))

    def __getattr__(self, name: str) -> Any:
        """The task's optional parts: `selfcheck`, `summary`, `support`, `told`, `rules`, `reads`."""
        if name == "task" or name.startswith("__"):  # asked for before it is set, by copy and pickle
            raise AttributeError(name)
        return getattr(self.task, name)


def prompted(task: "Task", text: str | None) -> "Task":
    """The task with an objective's `system_prompt`; as it is where there is none."""
    return task if text is None else SystemPrompted(task, text)


def _without_leading(prompt: Iterable[Message]) -> list[Message]:
    messages = list(prompt)
    return messages[1:] if messages and messages[0].get("role") == ROLE else messages
