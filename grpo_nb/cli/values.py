"""Parsers of values on the command line; each refuses with what is needed."""

import argparse
import json
import math
import re
import tomllib
from pathlib import Path
from typing import Any

from grpo_nb.config.base import ConfigError
from grpo_nb.config.setting_keys import read_value
from grpo_nb.printable import cut
from grpo_nb.storage import safe_open
from grpo_nb.storage.vocabulary import Command

UNDO = "undo"
ORDERS = (*(command.label for command in Command), UNDO)
"""What `tell` takes besides `KNOB=VALUE`."""
LARGEST = 1 << 20
"""Bytes of a file of settings."""


def setting(text: str) -> tuple[str, Any]:
    """`KEY=VALUE` as a dotted name and its JSON value; a value that is not JSON is a string."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"'{text}' is no setting; needs KEY=VALUE, e.g. batch.group_size=4")
    try:
        return key, read_value(value)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(
            f"'{cut(text)}' {error}; quote it for the shell, e.g. 'KEY={{\"a\": 1}}'"
        ) from None


def settings_file(name: str) -> dict[str, Any]:
    """A TOML or JSON file of settings, a table a group, as dotted names; its `objectives` take the place of others."""
    try:
        text = safe_open.read(Path(name).expanduser().resolve(), LARGEST).decode()
        tree = json.loads(text) if name.endswith(".json") else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or error
        raise argparse.ArgumentTypeError(
            f"'{name}' cannot be read: {why}; needs a TOML file (or .json) with a table a group, e.g. "
            '"[batch]" and under it "group_size = 4"'
        ) from None
    if not isinstance(tree, dict):
        raise argparse.ArgumentTypeError(f"'{name}' holds {type(tree).__name__}; needs an object of settings")
    found: dict[str, Any] = {}
    for group, value in tree.items():
        apart = isinstance(value, dict) and group != "objectives"
        found |= {f"{group}.{key}": each for key, each in value.items()} if apart else {group: value}
    return found


def arm(text: str) -> tuple[str, dict[str, Any]]:
    """`NAME=KEY=VALUE,...` as a name and dotted settings; a comma inside of JSON does not separate."""
    name, equals, rest = text.partition("=")
    if not equals or not name:
        raise argparse.ArgumentTypeError(f"'{text}'; needs NAME=KEY=VALUE,..., or NAME= for an arm without changes")
    return name, dict(setting(part) for part in re.split(r",(?=[a-z_]+[.][\w.+-]+=)", rest) if part)


def own_task(text: str) -> tuple[str, str]:
    """`OBJECTIVE=MODULE:NAME` as the objective and an import path."""
    objective, _, path = text.partition("=")
    if not objective or ":" not in path:
        raise argparse.ArgumentTypeError(f"'{text}'; needs OBJECTIVE=MODULE:NAME, e.g. geography=own:Capitals")
    return objective, path


def own_reward(text: str) -> tuple[str, tuple[str, float]]:
    """`OBJECTIVE=MODULE:NAME`, with `=WEIGHT` after it where that is not 1."""
    objective, _, rest = text.partition("=")
    path, weighed, weight = rest.partition("=")
    try:
        value = float(weight) if weighed else 1.0
    except ValueError:
        value = math.nan
    if not objective or ":" not in path or not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"'{text}'; needs OBJECTIVE=MODULE:NAME=WEIGHT, e.g. fairness=own:short=0.1")
    return objective, (path, value)


def seeds(text: str) -> tuple[int, ...]:
    """Integers of 0 or more with commas between."""
    return tuple(_whole(part, 0) for part in text.split(","))


def count(text: str) -> int:
    """An integer of 1 or more."""
    return _whole(text, 1)


def seed(text: str) -> int:
    """An integer of 0 or more."""
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"'{text}'; needs a whole number of {least} or more")
    return int(text)


def order(text: str) -> str:
    """A word of `tell`, or `KNOB=VALUE`."""
    if "=" not in text and text not in ORDERS:
        raise argparse.ArgumentTypeError(f"'{text}'; needs one of {', '.join(ORDERS)}, or KNOB=VALUE")
    return text


def stage(text: str) -> str | int:
    """A stage of a run: a name, or the step of a checkpoint."""
    if text.isascii() and text.isdigit():
        return int(text)
    if text not in ("base", "sft", "latest"):
        raise argparse.ArgumentTypeError(f"'{text}'; needs base, sft, latest or the step of a checkpoint")
    return text


def exported_stage(text: str) -> str | int:
    """A stage of a run to export; also `best` or `best/OBJECTIVE`."""
    if text == "best" or text.startswith("best/"):
        return text
    try:
        return stage(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, best, or best/OBJECTIVE") from None


def gib(text: str) -> float:
    """Memory in GiB, more than 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}'; needs the device's memory in GiB, e.g. 24")
    return value
