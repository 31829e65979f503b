"""Parses a server's refusal: its sentence, and the parameters of the request that it refuses."""

import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

LONGEST_SAID = 400
"""Characters of a server's sentence that are looked at and kept."""
LONGEST_BODY = 1_000_000
"""Characters of an error's body that are read."""

_SAYING = (
    *("error", "message", "detail", "details", "errors", "msg", "title", "description", "error_description"),
    *("reason", "cause", "metadata", "raw", "param"),
)
_HIDDEN = re.compile(r"<(script|style|head)\b.*?(?:</\1\s*>|\Z)", re.IGNORECASE | re.DOTALL)
_TAG = re.compile(r"<[!/?a-z][^>]*>", re.IGNORECASE)

PARAMETERS: Mapping[str, Sequence[str]] = {
    "response_format": ("response_format", "response format", "json_schema", "json_object", "structured output"),
    "seed": ("seed",),
    "temperature": ("temperature",),
    "max_tokens": ("max_tokens",),
    "max_completion_tokens": ("max_completion_tokens",),
}
"""Parameters of a request, and the words by which servers name them."""


def error_text(body: str) -> str:
    """The sentence in an error's body of any shape: JSON of any maker, a page, or plain text; '' without one.

    >>> error_text('{"detail": [{"loc": ["body", "seed"], "msg": "Extra inputs are not permitted", "input": 0}]}')
    'body.seed: Extra inputs are not permitted'
    >>> error_text("<html><h1>Not Found</h1></html>")
    'Not Found'
    """
    body = body[:LONGEST_BODY].strip()
    try:
        sentences = list(dict.fromkeys(_sentences(json.loads(body))))
    except (ValueError, RecursionError):
        sentences = [html.unescape(_TAG.sub(" ", _HIDDEN.sub(" ", body))) if _TAG.match(body) else body]
    return plain("; ".join(sentences))[:LONGEST_SAID]


def plain(text: str) -> str:
    """The text on one line, without control and formatting characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def refused(words: str, parameters: Sequence[str], model: str) -> list[str]:
    """Parameters of a request that a server's sentence names; the model's own name is not searched.

    >>> refused("Unsupported: 'max_tokens'. Use 'max_completion_tokens' instead.", ["max_tokens", "seed"], "m")
    ['max_tokens']
    """
    searched = re.sub(rf"(?<![\w-]){re.escape(model)}(?![\w-])", " ", words).lower()
    return [name for name in parameters if any(_named(word, searched) for word in PARAMETERS.get(name, (name,)))]


def _named(word: str, text: str) -> bool:
    return re.search(rf"(?<![a-z0-9_-]){re.escape(word)}s?(?![a-z0-9_-])", text) is not None


def _sentences(value: Any, key: str = "") -> Iterator[str]:
    """The texts under keys that speak, outermost first; what a request sent (`input`, `body`) is none of them."""
    if isinstance(value, str):
        yield from _nested(value, key)
    elif isinstance(value, list):
        for item in value[:5]:
            yield from _sentences(item, key)
    elif isinstance(value, dict):
        if isinstance(value.get("loc"), list) and isinstance(value.get("msg"), str):  # FastAPI, pydantic
            yield f"{'.'.join(map(str, value['loc']))}: {value['msg']}"
        elif spoken := [name for name in _SAYING if name in value]:
            for name in spoken:
                yield from _sentences(value[name])
        else:  # {"seed": ["is not supported"]}
            for name, item in value.items():
                yield from _sentences(item if isinstance(item, str | list) else None, name)


def _nested(text: str, key: str) -> Iterator[str]:
    """The text, or the sentences inside it where it is JSON itself, as routers pass on the errors of others."""
    try:
        inner = json.loads(text) if text.lstrip().startswith("{") else None
    except ValueError:
        inner = None
    if isinstance(inner, dict):
        yield from _sentences(inner)
    elif text.strip():
        yield f"{key}: {text}" if key else text
