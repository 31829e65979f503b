"""Pairs of an environment variable and a server that this user has confirmed, once per machine.

A run's settings may come from anybody, and name both a variable and a host, or a tracker that sends the run's numbers
to a server. The usual key of a well-known judge, and a server on this machine, need no confirmation; any other pair
of key variable and scheme, host and port is confirmed by creating a run with it here, by `trust` in a notebook, or by
`--yes` of a command.
"""

import json
import os
import sys
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import ValidationError

from grpo_nb.config import Config, ConfigError, JudgeProvider
from grpo_nb.config.trackers import PACKAGES, Server
from grpo_nb.printable import clean_logger
from grpo_nb.storage.safe_open import is_private

logger = clean_logger(__name__)

FOLDER = "GRPO_NB_CONFIG_DIR"
"""Environment variable: folder of this user's confirmations in place of the platform's configuration folder."""
FILE = "judges.json"
LARGEST = 1 << 20
WELL_KNOWN = {
    "OPENAI_API_KEY": "https://api.openai.com:443",
    "OPENROUTER_API_KEY": "https://openrouter.ai:443",
    "ANTHROPIC_API_KEY": "https://api.anthropic.com:443",
    "GEMINI_API_KEY": "https://generativelanguage.googleapis.com:443",
    "MISTRAL_API_KEY": "https://api.mistral.ai:443",
    "DEEPSEEK_API_KEY": "https://api.deepseek.com:443",
    "GROQ_API_KEY": "https://api.groq.com:443",
    "TOGETHER_API_KEY": "https://api.together.xyz:443",
}
"""The variable that each service's own documentation names, and the address of that service."""
NO_KEY = "prompts and answers (no key)"
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, order=True)
class Pair:
    """A key's variable and the server that it goes to: the unit of a confirmation."""

    variable: str
    """Name of the variable; empty for a server without a key, which still gets prompts and answers."""
    origin: str
    """Scheme, host and port."""

    @classmethod
    def of(cls, provider: JudgeProvider) -> "Pair":
        return cls(provider.api_key_env or "", origin(provider.base_url))

    @property
    def local(self) -> bool:
        """Whether the server is on this machine."""
        return on_this_machine(self.origin)

    @property
    def needs_word(self) -> bool:
        known = WELL_KNOWN.get(self.variable) == self.origin or (
            not self.variable and self.origin in WELL_KNOWN.values()
        )
        return not (known or self.local)


def trust(variable: str | None, url: str) -> None:
    """Confirm, for this user on this machine, that runs may send the key in `variable` to the server at `url`.

    Args:
        variable: NAME of the environment variable; None for a server that wants no key.
        url: an address of the server; its scheme, host and port count.

    Raises:
        ConfigError: a name that is none, an address that is none, or a key that would go over plain http.
    """
    provider = _provider(variable, url)
    _refuse_plain("trust", provider.label, provider.api_key_env, provider.base_url)
    confirm([Pair.of(provider)])


def confirm(pairs: Iterable[Pair]) -> None:
    """Keep pairs as confirmed; where no file can be written, for this process only, which is logged."""
    new = {pair for pair in pairs if pair.needs_word} - confirmed()
    if not new:
        return
    _here.update(new)
    try:
        _write(_read() | new)
    except OSError as error:
        logger.warning("%s is not written (%s): confirmed for this process only: %s", file(), error, _listed(new))


def servers_of(config: Config) -> list[JudgeProvider]:
    """The servers of a configuration: of its judges, and the rollout server."""
    judges = [objective.judge for objective in config.objectives.values() if objective.judge is not None]
    providers = [provider for judge in judges for provider in judge.providers]
    return providers if config.rollout.server is None else [*providers, config.rollout.server]


def pairs_of(config: Config) -> set[Pair]:
    """Pairs that the judges, the rollout server and the trackers of a configuration need."""
    pairs = {Pair.of(provider) for provider in servers_of(config)}
    for name in config.run.trackers:
        with suppress(ConfigError):  # a tracker whose environment is wrong is refused before it sends anything
            pairs |= {_pair(server) for server in [PACKAGES[name].server()] if server is not None}
    return pairs


def check_tracker(name: str) -> None:
    """Refuse a tracker that would send anything without this user's confirmation.

    Raises:
        ConfigError: as `check`.
    """
    server = PACKAGES[name].server()
    if server is not None:
        where = f"run.trackers: {name}"
        _refuse_plain(where, name, server.variable, server.url)
        otherwise = ". If not, remove the tracker from run.trackers in config.json"
        _refuse_unconfirmed(where, {_pair(server)}, ("metrics and settings (no key)", otherwise))


def check(where: str, providers: Collection[JudgeProvider]) -> None:
    """Refuse a server that would be sent a key, or anything, without this user's confirmation.

    Raises:
        ConfigError: a key would go over plain http, or a pair is not confirmed; with the way to confirm it.
    """
    for provider in providers:
        _refuse_plain(where, provider.label, provider.api_key_env, provider.base_url)
    _refuse_unconfirmed(where, set(map(Pair.of, providers)))


def confirmed() -> set[Pair]:
    """The pairs that this user has confirmed on this machine."""
    return _read() | _here


def file() -> Path:
    """Path of the file of confirmations."""
    if own := os.environ.get(FOLDER):
        return Path(own) / FILE
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "grpo_nb" / FILE
    base = os.environ.get("APPDATA" if sys.platform == "win32" else "XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "grpo_nb" / FILE


def origin(url: str) -> str:
    """Scheme, host and port of an address, in one spelling.

    >>> origin("https://API.openai.com/v1"), origin("http://[::1]:8000/v1")
    ('https://api.openai.com:443', 'http://[::1]:8000')
    """
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".").lower()
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{parts.port or _PORTS.get(parts.scheme, 0)}"


def on_this_machine(url: str) -> bool:
    """Whether an address is one of this machine's own: its loopback by number, or `localhost`."""
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


_here: set[Pair] = set()
"""Pairs confirmed in this process."""


def in_the_clear(provider: JudgeProvider) -> bool:
    """Whether a key is sent over plain http."""
    return bool(provider.api_key_env) and urlsplit(provider.base_url).scheme == "http"


def _refuse_plain(where: str, label: str, variable: str | None, url: str) -> None:
    if variable and urlsplit(url).scheme == "http" and not on_this_machine(url):
        raise ConfigError(
            f"{where}: requests to {label} go over plain http, where anybody on the way reads the key in {variable}. A "
            "key goes over https, or to this machine; use an https:// address, or no key (api_key_env=null) for a "
            "server that wants none"
        )


def _refuse_unconfirmed(where: str, pairs: set[Pair], words: tuple[str, str] = (NO_KEY, "")) -> None:
    """`words`: the data that goes to a server without a key, and the alternative."""
    without_key, otherwise = words
    if unknown := {pair for pair in pairs if pair.needs_word} - confirmed():
        lines = "; ".join(f"trust({pair.variable or None!r}, {pair.origin!r})" for pair in sorted(unknown))
        raise ConfigError(
            f"{where} would send {_listed(unknown, without_key)}, which was never confirmed on this machine: settings "
            "that come from elsewhere may not choose who gets a key or a run's numbers. If that is what you want, "
            f"confirm it once: `from grpo_nb.judge import trust; {lines}` in a notebook, or the command again with "
            f"--yes{otherwise}"
        )


def _pair(server: Server) -> Pair:
    return Pair(server.variable, origin(server.url))


def _provider(variable: str | None, url: str) -> JudgeProvider:
    try:
        return JudgeProvider(model="any", base_url=url, api_key_env=variable)
    except ValidationError as error:
        raise ConfigError(f"trust: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None


def _listed(pairs: Iterable[Pair], without_key: str = NO_KEY) -> str:
    return ", ".join(f"{pair.variable or without_key} to {pair.origin}" for pair in sorted(pairs))


def _read() -> set[Pair]:
    """Confirmed pairs of the file; empty where it is missing or damaged, so that all must be confirmed again."""
    try:
        with open(file(), "rb") as opened:
            if not is_private(opened.fileno(), 0o022):
                raise ValueError("another user owns it or may write it; chmod 600 if it is yours")
            found = json.loads(opened.read(LARGEST))
        return {Pair(str(pair["variable"]), str(pair["origin"])) for pair in found["confirmed"]}
    except (FileNotFoundError, NotADirectoryError):
        return set()
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        logger.warning("%s cannot be read (%s): nothing counts as confirmed", file(), error)
        return set()


def _write(pairs: set[Pair]) -> None:
    """Replace the file, which only this user may read."""
    path = file()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{FILE}.{os.getpid()}.tmp")
    rows = [{"variable": pair.variable, "origin": pair.origin} for pair in sorted(pairs)]
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0), 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as opened:
        json.dump({"confirmed": rows}, opened, indent=1)
    os.replace(temporary, path)
