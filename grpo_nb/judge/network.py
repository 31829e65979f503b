"""The way to a server: a client whose tries end in time, and the proxies of the environment."""

import asyncio
import contextlib
import email.utils
import functools
import importlib
import math
import os
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from grpo_nb.config import ConfigError

LARGEST_REPLY = 4 << 20
"""Bytes of a judge's reply that are read: a verdict is a few hundred."""

SENT = frozenset(
    ("host", "connection", "user-agent", "accept", "accept-encoding", "content-type", "content-length", "authorization")
)
"""Headers of a request; those of `openai` about itself (x-stainless-...) go too, and to OpenAI's own host all others:
the client takes an organisation, a project and headers of any kind from the environment, for any host."""
OPENAI = "https://api.openai.com"

RATE_LIMITED = 429
FINAL = "x-grpo-nb-should-retry"
"""Header that we add to a 429 with the server's own `x-should-retry`."""
_TRY_AGAIN = "x-should-retry"


@dataclass(frozen=True)
class Proxy:
    """The proxy that requests to one address go through."""

    variable: str
    """Environment variable that names it."""
    address: str
    """Address without user and password."""
    host: str
    """Host of the server behind the proxy."""
    secrets: tuple[str, ...] = ()
    """User and password."""

    def __str__(self) -> str:
        return f"through the proxy {self.address} of {self.variable}; to connect directly, set NO_PROXY={self.host}"

    def __repr__(self) -> str:
        return f"Proxy({self.variable}, {self.address})"


def proxy_of(url: str) -> Proxy | None:
    """The proxy that the environment sets for an address, as httpx follows it; None where the connection is direct."""
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


def bounded_client(seconds: float, key: str, largest: int = LARGEST_REPLY) -> Any:
    """An HTTP client for `openai` that gives each try `seconds` in all, and reads `largest` bytes of the reply.

    Of the environment only `key` reaches a server that is not OpenAI's.

    The timeouts of httpx bound the wait for the next bytes, so a reply that keeps dripping would never end. Nothing
    compressed is requested or accepted: a few bytes of it can unpack to any number.
    """
    import openai

    class Bounded(openai.DefaultAsyncHttpxClient):
        async def send(self, request: Any, *, stream: bool = False, **options: Any) -> Any:
            http = http_library()
            _keep_private(request, key)
            try:
                async with asyncio.timeout(seconds):
                    response = await super().send(request, stream=True, **options)
                    return response if stream else await _whole(response, http, largest)
            except TimeoutError:
                raise http.ReadTimeout(f"not complete after {seconds:g} s", request=request) from None

    certificates = tuple(os.environ.get(name, "") for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"))
    verify = _tls(certificates)
    # a redirect could take the key to any host
    return Bounded(timeout=seconds, follow_redirects=False, headers={"Accept-Encoding": "identity"}, verify=verify)


def http_library() -> Any:
    """HTTP library that `openai` uses: httpx, or httpx2."""
    import openai

    return importlib.import_module(openai.DefaultAsyncHttpxClient.__bases__[0].__module__.partition(".")[0])


@functools.cache
def _tls(certificates: tuple[str, ...]) -> Any:
    """The TLS settings of a client, which take longer to read than all else of it: the same in every step."""
    return http_library().create_ssl_context()


def _keep_private(request: Any, key: str) -> None:
    if f"{request.url.scheme}://{request.url.netloc.decode()}" != OPENAI:
        for name in [*request.headers]:
            if name.lower() not in SENT and not name.lower().startswith("x-stainless-"):
                del request.headers[name]
    request.headers["Authorization"] = f"Bearer {key}"


async def _whole(response: Any, http: Any, largest: int) -> Any:
    """The response with its body read."""
    body, coding = bytearray(), response.headers.get("content-encoding", "identity").lower()
    try:
        if coding != "identity":
            raise http.ReadError(
                f"the reply is compressed ({coding}), which was not requested", request=response.request
            )
        async for part in response.aiter_raw():
            body += part
            if len(body) > largest:
                raise http.ReadError(f"the reply is longer than {largest} bytes", request=response.request)
    finally:
        await response.aclose()
    kept = {"request": response.request, "extensions": response.extensions}
    return http.Response(response.status_code, headers=_passed_on(response), content=bytes(body), **kept)


def _passed_on(response: Any) -> Any:
    """The headers of a reply. The client must not retry a 429: its tries are few, and independent of other requests."""
    headers = response.headers.copy()
    if response.status_code == RATE_LIMITED:
        headers[FINAL] = headers.get(_TRY_AGAIN, "")
        headers[_TRY_AGAIN] = "false"
    return headers


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds that a server requests to wait; None without a readable value.

    >>> retry_after({"retry-after": "1.5"}), retry_after({"retry-after-ms": "20"}), retry_after({})
    (1.5, 0.02, None)
    >>> retry_after({"retry-after": "Fri, 01 Jan 99999999999 00:00:00 GMT"}) is None
    True
    """
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        with contextlib.suppress(KeyError, ValueError):
            seconds = float(headers[name]) * unit
            return seconds if 0 <= seconds < math.inf else None
    with contextlib.suppress(KeyError, ValueError, TypeError, OverflowError):
        date = email.utils.parsedate_to_datetime(headers["retry-after"])
        return max(0.0, date.timestamp() - time.time())
    return None


def _variable(scheme: str) -> str:
    """The environment variable that holds a scheme's proxy; lower case counts first, as in httpx."""
    name = f"{scheme}_proxy"
    return name if os.environ.get(name) else name.upper()
