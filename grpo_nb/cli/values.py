"""What stands for a value on the command line, read or refused with what is needed."""

import argparse
import json
from typing import Any

from grpo_nb.storage.vocabulary import Command


def setting(text: str) -> tuple[str, Any]:
    """`KEY=VALUE` as a dotted name and its JSON value; what is no JSON is a string."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"'{text}' is no setting; needs KEY=VALUE, e.g. batch.group_size=4")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError as error:
        if value.startswith(("{", "[", '"')):
            raise argparse.ArgumentTypeError(
                f"'{text}' begins like JSON and is none: {error}; quote it for the shell, e.g. 'KEY={{\"a\": 1}}'"
            ) from None
        return key, value


def count(text: str) -> int:
    """A whole number of 1 or more."""
    return _whole(text, 1)


def seed(text: str) -> int:
    """A whole number of 0 or more."""
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"'{text}'; needs a whole number of {least} or more")
    return int(text)


def order(text: str) -> str:
    """A command of `tell`, or `KNOB=VALUE`."""
    words = [command.label for command in Command]
    if "=" not in text and text not in words:
        raise argparse.ArgumentTypeError(f"'{text}'; needs one of {', '.join(words)}, or KNOB=VALUE")
    return text


def stage(text: str) -> str | int:
    """A stage of a run: a name, or the step of a checkpoint."""
    if text.isascii() and text.isdigit():
        return int(text)
    if text not in ("base", "sft", "latest"):
        raise argparse.ArgumentTypeError(f"'{text}'; needs base, sft, latest or the step of a checkpoint")
    return text


def gib(text: str) -> float:
    """Memory in GiB, more than 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}'; needs the device's memory in GiB, e.g. 24")
    return value
