"""Trackers by name: the package of each, and the server that the environment sends its rows to."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from grpo_nb.config.base import ConfigError

Tracker = Literal["tensorboard", "wandb", "trackio", "mlflow"]
LOCAL_STORE = "sqlite:///mlflow.db"
"""Default address of MLflow."""
SILENT = {
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "GRADIO_ANALYTICS_ENABLED": "False",
}
"""Environment variables, set where they are not: without them the packages report their use to their makers, and print
into whatever cell ran last."""


@dataclass(frozen=True)
class Server:
    """Server that a tracker sends to."""

    url: str
    variable: str = ""
    """Environment variable of the key that is sent; empty without one."""


@dataclass(frozen=True)
class Package:
    """One tracker: the package it needs and the server it sends to."""

    distributions: tuple[str, ...]
    """Distributions that provide it; any of them is enough."""
    server: Callable[[], Server | None]
    """Function that returns the server the tracker sends to; None where everything stays on this machine."""


def _wandb() -> Server | None:
    if wandb_mode() != "online":
        return None
    return Server(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai", "WANDB_API_KEY")


def wandb_mode() -> str:
    """Mode that WANDB_MODE requests: online, offline or disabled.

    Raises:
        ConfigError: the variable has another value.
    """
    mode = os.environ.get("WANDB_MODE") or "online"
    mode = {"run": "online", "dryrun": "offline"}.get(mode, mode)
    if mode not in ("online", "offline", "disabled"):
        raise ConfigError(f"WANDB_MODE={mode!r}; needs online, offline or disabled. Change or unset the variable")
    return mode


def _trackio() -> Server | None:
    if os.environ.get("TRACKIO_SPACE_ID"):
        return Server("https://huggingface.co", "HF_TOKEN")
    url = os.environ.get("TRACKIO_SERVER_URL")
    return Server(url, "TRACKIO_WRITE_TOKEN") if url else None


def _mlflow() -> Server | None:
    uri = mlflow_store()
    if uri.startswith(("sqlite:", "file:", "/", "./")):
        return None
    if not uri.startswith(("http://", "https://")):
        raise ConfigError(
            f"MLFLOW_TRACKING_URI begins with {uri.partition(':')[0]!r}; needs http://, https://, sqlite:, file: or an "
            "absolute path. Change or unset the variable"
        )
    secret = ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD")
    return Server(uri, next((name for name in secret if os.environ.get(name)), ""))


def mlflow_store() -> str:
    """Address of the MLflow store: MLFLOW_TRACKING_URI, else a local one."""
    return os.environ.get("MLFLOW_TRACKING_URI") or LOCAL_STORE


PACKAGES: Mapping[str, Package] = {
    "tensorboard": Package(("tensorboard", "tb-nightly"), lambda: None),
    "wandb": Package(("wandb",), _wandb),
    "trackio": Package(("trackio",), _trackio),
    "mlflow": Package(("mlflow", "mlflow-skinny"), _mlflow),
}
