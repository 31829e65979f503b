"""The way to a judge's server: a client whose tries end in time, and the proxies of the environment."""

import asyncio
import importlib
import os
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from grpo_nb.config import ConfigError


@dataclass(frozen=True)
class Proxy:
    """The proxy that requests to one address go through."""

    variable: str
    """Environment variable that names it."""
    address: str
    """Without user and password."""
    host: str
    """Of the server behind it."""
    secrets: tuple[str, ...] = ()
    """User and password."""

    def __str__(self) -> str:
        return f"through the proxy {self.address} of {self.variable}; to connect directly, set NO_PROXY={self.host}"

    def __repr__(self) -> str:
        return f"Proxy({self.variable}, {self.address})"


def proxy_of(url: str) -> Proxy | None:
    """The proxy that the environment sets for an address, as httpx follows it; None where it is asked directly."""
    parts, proxies = urlsplit(url), urllib.request.getproxies()
    host = parts.hostname or ""
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    scheme = parts.scheme if proxies.get(parts.scheme) else "all"
    if not (address := proxies.get(scheme)) or urllib.request.proxy_bypass(f"{host}:{port}"):
        return None
    found = urlsplit(address if "://" in address else f"http://{address}")
    shown = f"{found.scheme}://{found.netloc.rpartition('@')[2]}"
    secrets = tuple(form for part in (found.username, found.password) if part for form in {part, unquote(part)})
    return Proxy(_variable(scheme), shown, host, secrets)


def check_proxies(where: str) -> None:
    """Refuse proxies of the environment that no client can be made with.

    Raises:
        ConfigError: a SOCKS proxy without its package, or an address that is no proxy's.
    """
    if not urllib.request.getproxies():
        return
    import openai

    named = ", ".join(name for name in map(_variable, ("http", "https", "all")) if os.environ.get(name))
    try:
        openai.DefaultHttpxClient().close()
    except ImportError:
        raise ConfigError(
            f"{where}: {named} names a SOCKS proxy, and the package for it is not installed. Requests to a judge go "
            "through it. Run pip install socksio, or unset the variable"
        ) from None
    except Exception as error:  # ValueError or httpx.InvalidURL; the text may hold a password
        raise ConfigError(
            f"{where}: no client can be made with the proxies of {named} ({type(error).__name__}). Needs addresses "
            "such as http://proxy:3128. Correct or unset the variable"
        ) from None


def bounded_client(seconds: float) -> Any:
    """An HTTP client for `openai` that gives each try `seconds` in all.

    The timeouts of httpx bound the wait for the next bytes, so a reply that keeps dripping would never end.
    """
    import openai

    class Bounded(openai.DefaultAsyncHttpxClient):
        async def send(self, request: Any, **options: Any) -> Any:
            try:
                async with asyncio.timeout(seconds):
                    return await super().send(request, **options)
            except TimeoutError:
                http = importlib.import_module(type(request).__module__.partition(".")[0])  # httpx, or httpx2
                raise http.ReadTimeout(f"not complete after {seconds:g} s", request=request) from None

    return Bounded(timeout=seconds, follow_redirects=False)  # a redirect could take the key to any host


def _variable(scheme: str) -> str:
    """The environment variable that holds a scheme's proxy; lower case counts first, as in httpx."""
    name = f"{scheme}_proxy"
    return name if os.environ.get(name) else name.upper()
