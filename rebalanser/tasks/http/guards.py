"""What stands before the application: the rate of a client, its token or its host, the size of a body."""

from __future__ import annotations

import ipaddress
import math
import secrets
import time
from typing import Final
from urllib.parse import urlsplit

from limits import RateLimitItem, parse
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rebalanser.errors import InvalidSettings
from rebalanser.tasks.http import problems

HEALTH_PATH: Final = "/health"
OPEN_PATHS: Final = ("/openapi.json", HEALTH_PATH, problems.PATH)
"""What needs no token: it tells nothing of any task."""


def parse_rate(text: str) -> RateLimitItem:
    """A rate such as ``100/second`` or ``1000/minute``.

    Raises:
        InvalidSettings: it can't be read.
    """
    try:
        return parse(text)
    except ValueError as error:
        raise InvalidSettings(f"{text!r} is no rate such as 100/second or 1000/minute") from error


class RateLimit:
    """At most so many requests of one address in a time (429), those for the server's health aside.

    Behind a proxy all requests have the proxy's address: limit there instead. Headers that name another one
    are not believed, as any client can send them.
    """

    def __init__(self, app: ASGIApp, rate: RateLimitItem) -> None:
        self._app = app
        self._rate = rate
        self._limiter = MovingWindowRateLimiter(MemoryStorage())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request pass, or answer that there were too many."""
        if scope["type"] == "http" and scope["path"] != HEALTH_PATH:
            client = scope["client"][0] if scope.get("client") else ""
            if not self._limiter.hit(self._rate, client):
                wait_s = self._limiter.get_window_stats(self._rate, client).reset_time - time.time()
                headers = {"Retry-After": str(max(1, math.ceil(wait_s)))}
                told = f"more than {self._rate} from {client}"
                await problems.send_problem(problems.TOO_MANY, told, scope, receive, send, headers)
                return
        await self._app(scope, receive, send)


class BearerToken:
    """Only who knows the token gets further (401). It is compared in a time that tells nothing of it."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request pass, or answer that its token is missing or wrong."""
        if scope["type"] == "http" and not _is_open(scope["path"]):
            scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
            is_right = secrets.compare_digest(token.strip().encode(), self._token)
            if scheme.lower() != "bearer" or not is_right:
                told = "send the header Authorization with the word Bearer, a space and the token"
                await problems.send_problem(problems.UNAUTHORIZED, told, scope, receive, send)
                return
        await self._app(scope, receive, send)


class OwnHost:
    """Only requests that name this host get further (403), where there is no token.

    A browser sends a page's requests to any server on its user's machine, under a name of the page's choice
    if its owner lets that name resolve to a loopback address; or to the right name, with the page's origin.
    Other clients choose freely what they send, and are not kept away by this.
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app = app
        self._host = host.lower()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request pass, or answer that it is meant for, or comes from, another host."""
        if scope["type"] == "http" and not _is_open(scope["path"]):
            headers = Headers(scope=scope)
            for name, prefix in (("host", "//"), ("origin", "")):
                told = headers.get(name)
                if told is not None and not self._is_own(f"{prefix}{told}"):
                    why = f"{name} {told!r} is not this host: name it localhost, or give the server a token"
                    await problems.send_problem(problems.FOREIGN, why, scope, receive, send)
                    return
        await self._app(scope, receive, send)

    def _is_own(self, url: str) -> bool:
        try:
            host = urlsplit(url).hostname or ""
        except ValueError:
            return False
        return host == self._host or is_loopback(host)


def is_loopback(host: str) -> bool:
    """True if a host can be reached from this one only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_open(path: str) -> bool:
    return any(path == each or path.startswith(f"{each}/") for each in OPEN_PATHS)


class BodyLimit:
    """A body of more than ``limit_bytes`` is refused before it is read (413), or as soon as it is over."""

    def __init__(self, app: ASGIApp, limit_bytes: int) -> None:
        self._app = app
        self._limit_bytes = limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request pass whose body is small enough."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        told = f"a body may have {self._limit_bytes} bytes"
        length = Headers(scope=scope).get("content-length", "")
        if length.isdigit() and int(length) > self._limit_bytes:
            await problems.send_problem(problems.TOO_LARGE, told, scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit_bytes:
                raise HTTPException(problems.TOO_LARGE.status, told)
            return message

        await self._app(scope, counted, send)
