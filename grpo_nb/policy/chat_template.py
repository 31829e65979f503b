"""Chat templates: the template and its switches, and the text that follows a prompt in the assistant's turn."""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, TemplateError, meta
from transformers import PreTrainedTokenizerBase

from grpo_nb.policy.source import ModelError
from grpo_nb.suggest import did_you_mean

GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "raise_exception"}
"""Variables of a template that transformers fills in."""
SHOWN = 60
"""Characters that a message shows of a prompt and of a turn."""


def choose(tokenizer: PreTrainedTokenizerBase, name: str | None) -> None:
    """Make the template of this name the tokenizer's only one; None leaves the tokenizer as it is.

    Raises:
        ModelError: no such template.
    """
    if name is None:
        return
    named = names(tokenizer)
    if name not in named:
        found = f"the tokenizer's are {', '.join(named)}" if named else "the tokenizer has no templates by name"
        raise ModelError(f"model.chat_template='{name}': {found}{did_you_mean(name, named)}. Use one of them, or null")
    tokenizer.chat_template = tokenizer.chat_template[name]


def names(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Names of the tokenizer's templates, where it has several."""
    return sorted(tokenizer.chat_template) if isinstance(tokenizer.chat_template, dict) else []


def without_default(named: Sequence[str]) -> str:
    """Advice for a tokenizer whose templates have names and none of them is `default`."""
    first = named[0]
    return (
        f"the tokenizer has {len(named)} chat templates and none of them is the default: {', '.join(named)}. Choose "
        f"one with model.chat_template='{first}', or save it as chat_template.jinja in the model's folder; in Python "
        f"policy.set_chat_template(policy.tokenizer.chat_template['{first}']) does the same"
    )


def check_switches(template: Any, switches: Mapping[str, Any]) -> None:
    """Refuse switches that the template would ignore.

    Raises:
        ModelError: a name that the template does not read, with those that it reads.
    """
    text = "\n".join(template.values()) if isinstance(template, dict) else template or ""
    if unread := [name for name in switches if name not in text]:
        read = _variables(text)
        found = f"it reads {', '.join(read)}" if read else "it reads no switch at all" if text else "the model has none"
        raise ModelError(
            f"model.chat_template_kwargs has '{unread[0]}', which the chat template does not read: "
            f"{found}{did_you_mean(unread[0], read)}. Correct the name or remove it"
        )


def turn(messages: Sequence[Mapping[str, Any]], text: str) -> list[dict[str, Any]]:
    """The conversation with `text` as the assistant's last turn, or as the rest of it where it has begun."""
    *before, last = [dict(message) for message in messages]
    if last.get("role") == "assistant":
        return [*before, last | {"content": f"{last['content']}{text}"}]
    return [*before, last, {"role": "assistant", "content": text}]


def rest(prompt: str, written: str) -> str:
    """Text after the rendered prompt in the rendered conversation; white space between the two may differ.

    Raises:
        ModelError: the conversation does not begin with the prompt, so that no completion of it can match the template
        (DeepSeek-R1 opens a thinking block for the model and leaves it out of a turn).
    """
    if written.startswith(prompt):
        return written[len(prompt) :]
    bare = prompt.rstrip()
    if written.startswith(bare):
        return written[len(bare) :].lstrip()
    at = next(i for i, (a, b) in enumerate(zip(bare, f"{written}\0", strict=False)) if a != b)
    raise ModelError(
        f"the chat template's prompt ends in {prompt[max(0, at - 20) :][-SHOWN:]!r}, and an assistant's turn continues "
        f"with {written[max(0, at - 20) : at + SHOWN]!r}, so SFT has no target that the template writes. Both must "
        'begin alike. Switch the difference off with model.chat_template_kwargs (e.g. {"enable_thinking": false}, if '
        "the template reads it), put a corrected template into chat_template.jinja in the model's folder, or set "
        "sft.steps=0"
    )


def _variables(template: str) -> list[str]:
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except TemplateError:  # a tag of transformers' own
        return []
    return sorted(meta.find_undeclared_variables(tree) - GIVEN)
