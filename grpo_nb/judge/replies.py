"""A server's answer as a reply: its text, its problem if it cannot be a verdict, and its tokens."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_nb.judge.failures import Kind
from grpo_nb.judge.prompts import Messages, before_verdict
from grpo_nb.judge.refusals import error_text

BYTES_PER_TOKEN = 4
"""Bytes per token, assumed where a server gives no number of tokens or an impossible one."""
MOST_TOKENS = 10**8
"""Tokens of one request beyond which a server's count cannot be."""
LONGEST_TEXT = 200_000
"""Characters of a reply that are read: a server may ignore `max_tokens`."""
_ENDED: Mapping[str, tuple[Kind, str]] = {
    "length": ("cut_off", "cut off at max_tokens"),
    "content_filter": ("withheld", "withheld by the server's content filter"),
    "error": ("server", "ended by an error of the server"),
}
"""Failure of an incomplete reply, by the server's reason for its end."""


@dataclass(frozen=True)
class Reply:
    """Reply of the judge, with its tokens."""

    text: str
    tokens_in: int
    tokens_out: int
    problem: str = ""
    """Reason why the text cannot be a verdict, where that is clear before it is parsed."""
    kind: Kind = "unreadable"
    """Kind of the problem."""
    final: bool = False
    """Whether the model ended in this way itself; at temperature 0 it would repeat it."""
    thought: bool = False
    """Whether it was cut off before its verdict began, so that more tokens may bring one."""
    budget: int = 0
    """max_tokens of the request."""
    no_completion: bool = False
    """Whether the answer has no completion: an error with status 200, or a page."""


def read_reply(response: Any, messages: Messages, budget: int) -> Reply:
    """A server's answer as a Reply; the client passes on answers that are no chat completion without an error."""
    try:
        choice = response.choices[0]
        content, ended = choice.message.content, str(choice.finish_reason)
    except (AttributeError, TypeError, IndexError, KeyError):
        return _no_completion(response, messages)
    text, thinking = _text(content), _thinking(choice.message)
    tokens = _tokens(response, messages, (text or "") + thinking)
    refusal = getattr(choice.message, "refusal", None)
    if ended in _ENDED:
        kind, problem = _ENDED[ended]
        thought = kind == "cut_off" and before_verdict(text or "")
        if kind == "cut_off":
            problem += f"={budget}, before the verdict: the model was still thinking" if thought else f"={budget}"
        problem += f": {text[:LONGEST_TEXT]!r}" if text else ""
        return Reply("", *tokens, problem=problem, kind=kind, final=kind != "server", thought=thought, budget=budget)
    if refusal:  # whatever else it wrote
        return Reply("", *tokens, problem=f"the model refused: {refusal}", kind="withheld", final=True)
    if error := next((e for part in (response, choice, choice.message) if (e := getattr(part, "error", None))), None):
        problem = f"an error came with the reply: {error_text(json.dumps(error, default=str))}"
        return Reply("", *tokens, problem=problem, kind="server")
    if text is None:
        return _no_completion(response, messages)
    return Reply(text[:LONGEST_TEXT], *tokens)


def words_in(response: Any) -> str:
    """The sentence in an answer that came with status 200 and is an error, or a page."""
    if isinstance(response, str):
        return error_text(response)
    more = getattr(response, "model_extra", None)  # what a completion does not have
    return error_text(json.dumps(more, default=str)) if isinstance(more, dict) else ""


def _no_completion(response: Any, messages: Messages) -> Reply:
    words = words_in(response)
    problem = "the server's answer is no chat completion" + (f": {words}" if words else "")
    return Reply("", *_tokens(response, messages, ""), problem=problem, no_completion=True)


def _text(content: Any) -> str | None:
    """Text that the model wrote; of several parts, the text parts."""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else getattr(part, "text", None) for part in content]
        return "".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else None


def _thinking(message: Any) -> str:
    """Thinking that the server returns apart from the text, under either name that servers use."""
    found = [getattr(message, name, None) for name in ("reasoning_content", "reasoning")]
    return next((text for text in found if isinstance(text, str)), "")


def _tokens(response: Any, messages: Messages, text: str) -> tuple[int, int]:
    """Tokens in and out, thinking included; some servers count it in the total alone."""
    usage = getattr(response, "usage", None)
    counts = [getattr(usage, name, None) for name in ("prompt_tokens", "completion_tokens", "total_tokens")]
    guess = [
        sum(len(m["content"].encode()) for m in messages) // BYTES_PER_TOKEN,
        len(text.encode()) // BYTES_PER_TOKEN,
    ]
    stated = [count if type(count) is int and count <= MOST_TOKENS else -1 for count in counts]
    used, wrote = (c if c >= min(g, 1) else g for c, g in zip(stated[:2], guess, strict=True))
    total = stated[2]
    return used, max(wrote, total - used) if [used, wrote] == stated[:2] else wrote
