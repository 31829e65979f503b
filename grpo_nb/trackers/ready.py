"""Checks of trackers before any work: the package, the key, and this user's confirmation."""

import netrc
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.parse import urlsplit

from grpo_nb.config import Config, ConfigError
from grpo_nb.config.trackers import PACKAGES
from grpo_nb.judge import host_trust

WANDB_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


def check(config: Config) -> None:
    """Refuse trackers that could not be written to.

    Raises:
        ConfigError: as `check_one`.
    """
    for name in config.run.trackers:
        check_one(name)


def check_one(name: str) -> None:
    """Refuse a tracker that could not be written to.

    Raises:
        ConfigError: its package is not installed, it needs a key that is not set, or it would send to a server that
            was never confirmed on this machine.
    """
    if not any(map(_installed, PACKAGES[name].distributions)):
        raise ConfigError(
            f"run.trackers has '{name}', and its package is not installed; pip install \"grpo_nb[{name}]\", or remove "
            "it from run.trackers"
        )
    host_trust.check_tracker(name)
    server = PACKAGES[name].server()
    if name == "wandb" and server is not None and not _has_key(urlsplit(server.url).hostname or ""):
        raise ConfigError(
            f"run.trackers has 'wandb', and no key for {host_trust.origin(server.url)} was found; set WANDB_API_KEY or "
            "run `wandb login` once, or set WANDB_MODE=offline to write on this machine alone"
        )


def _installed(distribution: str) -> bool:
    # not by module: a folder `wandb`, which W&B itself makes where it runs, is one
    try:
        return bool(version(distribution))
    except PackageNotFoundError:
        return False


def _has_key(host: str) -> bool:
    """Whether W&B finds a key by itself; else it would request one on the terminal."""
    if any(map(os.environ.get, WANDB_KEYS)):
        return True
    own = os.environ.get("NETRC")
    for file in [Path(own)] if own else [Path.home() / ".netrc", Path.home() / "_netrc"]:
        try:
            return netrc.netrc(file.expanduser()).authenticators(host) is not None
        except (OSError, netrc.NetrcParseError):
            continue
    return False
