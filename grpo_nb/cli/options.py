"""Shared parts of commands: their parser, and the arguments that several take."""

import argparse
import textwrap
from argparse import ArgumentParser, Namespace
from importlib import import_module
from typing import Any

from grpo_nb import presets
from grpo_nb.cli import values
from grpo_nb.config import Config
from grpo_nb.printable import Clean
from grpo_nb.run.dependencies_file import KINDS

WIDTH = 80


class UsageError(Clean):
    """Raised for options of the command line that contradict each other."""


def changes(arguments: Namespace) -> dict[str, Any]:
    """Dotted settings that the command line sets: of a file, and over them one by one."""
    given: dict[str, Any] = arguments.settings | dict(arguments.set or [])
    if arguments.seed is not None:
        given["run.seed"] = arguments.seed
    if arguments.deterministic is not None:
        given["run.deterministic"] = arguments.deterministic
    return given


def preset(name: str) -> Config:
    """The configuration of a preset."""
    return presets.PRESETS[name]()


def command_of(commands: Any, name: str, summary: str, details: str, examples: str = "") -> ArgumentParser:
    epilog = f"examples:\n{_indented(examples)}" if examples else None
    description = f"{_sentence(summary)}\n\n{textwrap.fill(details, WIDTH)}".replace("%%", "%")
    command: ArgumentParser = parser_of(commands.add_parser, name, help=summary, description=description, epilog=epilog)
    command.set_defaults(command=_lazily(name))
    return command


_MODULES = {"sft": "verbs", "train": "verbs", "eval": "verbs", "answer": "scores", "score": "scores", "sweep": "sweeps"}
_MODULES |= {"export": "sharing"}
_MAKES = {"sft", "train", "eval"}
"""Commands that make a run; arguments are checked before torch is imported, which takes seconds."""


def _lazily(name: str) -> Any:
    """The command, imported when it is called: help must not wait for torch."""

    def call(arguments: Namespace) -> int:
        if name in _MAKES:
            import_module("grpo_nb.cli.opening").check_arguments(arguments)
        module = import_module(f"grpo_nb.cli.{_MODULES.get(name, 'views')}")
        status: int = getattr(module, f"{name}_command")(arguments)
        return status

    return call


def parser_of(make: Any, *names: str, **options: Any) -> Any:
    return make(*names, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)


def run_argument(command: ArgumentParser) -> None:
    command.add_argument("run", metavar="RUN", help="run directory, or the name of a run in the project's runs/")


def making_arguments(command: ArgumentParser) -> None:
    group = command.add_argument_group(
        "settings", "make the run if it is missing, correct it until it has trained; after that, others are refused"
    )
    group.add_argument("--preset", choices=sorted(presets.PRESETS), help="where the settings start (default: demo)")
    group.add_argument(
        "--settings",
        type=values.settings_file,
        metavar="FILE",
        default={},
        help="change those of a TOML or JSON file, a table a group; --set goes over them",
    )
    group.add_argument(
        "--set",
        action="append",
        type=values.setting,
        metavar="KEY=VALUE",
        help="change one, e.g. batch.group_size=4; VALUE is JSON or else text; may be repeated",
    )
    group.add_argument("--seed", type=values.seed, metavar="N", help="short for --set run.seed=N")
    group.add_argument(
        "--deterministic",
        action=argparse.BooleanOptionalAction,
        help="the same bits each time (default: on CPU): two runs of one seed then write equal metrics.jsonl but "
        "for time/, memory/ and cost/, with as many threads (given, all; by default as many as are fastest)",
    )


def own_arguments(command: ArgumentParser) -> None:
    group = command.add_argument_group(
        "own code",
        "import paths of the run's own tasks and reward functions; the project remembers them",
    )
    group.add_argument(
        "--task",
        action="append",
        type=values.own_task,
        metavar="OBJECTIVE=MODULE:NAME",
        help="the objective's task, e.g. geography=own:Capitals of own.py in this folder; may be repeated",
    )
    group.add_argument(
        "--reward",
        action="append",
        type=values.own_reward,
        metavar="OBJECTIVE=MODULE:NAME[=WEIGHT]",
        help="a reward function and its weight (default 1), e.g. fairness=own:short=0.1; may be repeated",
    )


def accepting_arguments(command: ArgumentParser) -> None:
    yes_argument(command)
    changed_argument(command)


def yes_argument(command: ArgumentParser) -> None:
    command.add_argument(
        "--yes",
        action="store_true",
        help="confirm, once for this machine, that the keys of the run's judges may go to their servers",
    )


def changed_argument(command: ArgumentParser) -> None:
    command.add_argument(
        "--accept-changed",
        action="append",
        choices=KINDS,
        default=[],
        metavar="KIND",
        help=f"continue although this content differs from the run's: {', '.join(KINDS)}; may be repeated",
    )


def out_argument(command: ArgumentParser, usual: str) -> None:
    command.add_argument("--out", metavar="FILE", help=f"where to write it; default: {usual} in the run")


def json_argument(command: ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="the answer as JSON on standard output")


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."
