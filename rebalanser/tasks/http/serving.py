"""An HTTP server of a queue: its addresses, guards, connections and stop."""

from __future__ import annotations

import asyncio
import ipaddress
import math
import resource
import secrets
import socket
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI
from limits import RateLimitItem, parse
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from rebalanser.errors import InvalidSettings
from rebalanser.runtime.logs import get_logger
from rebalanser.runtime.participant import run_until_stopped
from rebalanser.tasks.http import problems
from rebalanser.tasks.http.dispenser import Dispenser
from rebalanser.tasks.http.routes import QueueRoutes, application
from rebalanser.tasks.queue import Queue

HEALTH_PATH: Final = "/health"
OPEN_PATHS: Final = ("/openapi.json", HEALTH_PATH, problems.PATH)
"""Paths that need no token: they reveal nothing of any task."""


def parse_rate(text: str) -> RateLimitItem:
    """Parse a rate such as ``100/second`` or ``1000/minute``.

    Raises:
        InvalidSettings: it can't be read.
    """
    try:
        return parse(text)
    except ValueError as error:
        raise InvalidSettings(f"{text!r} is not a rate such as 100/second or 1000/minute") from error


class RateLimit:
    """Limits the rate of requests of one address (429), those for the server's health aside.

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
                detail = f"more than {self._rate} from {client}"
                await problems.send_problem(problems.TOO_MANY, detail, scope, receive, send, headers)
                return
        await self._app(scope, receive, send)


class BearerToken:
    """Refuses requests without the token (401). It is compared in constant time."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request pass, or answer that its token is missing or wrong."""
        if scope["type"] == "http" and not _is_open(scope["path"]):
            scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
            is_right = secrets.compare_digest(token.strip().encode(), self._token)
            if scheme.lower() != "bearer" or not is_right:
                detail = "send the header Authorization with the word Bearer, a space and the token"
                await problems.send_problem(problems.UNAUTHORIZED, detail, scope, receive, send)
                return
        await self._app(scope, receive, send)


class HostCheck:
    """Refuses requests that name another host (403), if there is no token.

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
                value = headers.get(name)
                if value is not None and not self._is_own(f"{prefix}{value}"):
                    detail = (
                        f"{name} {value!r} is not this host: name it localhost, or give the server a token"
                    )
                    await problems.send_problem(problems.FOREIGN, detail, scope, receive, send)
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
    """Refuses bodies of more than ``limit_bytes`` (413): by their stated length, or once more has arrived."""

    def __init__(self, app: ASGIApp, limit_bytes: int) -> None:
        self._app = app
        self._limit_bytes = limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request pass whose body is small enough."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        detail = f"a body may have {self._limit_bytes} bytes"
        length = Headers(scope=scope).get("content-length", "")
        if length.isdigit() and int(length) > self._limit_bytes:
            await problems.send_problem(problems.TOO_LARGE, detail, scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit_bytes:
                raise HTTPException(problems.TOO_LARGE.status, detail)
            return message

        await self._app(scope, counted, send)


MIN_TOKEN: Final = 16
"""Minimum characters of a token."""
GRACE_S: Final = 10
"""Seconds in which running requests may end at a stop."""
HEAD_S: Final = 10.0
"""Seconds from a connection's begin, or from its last answer, to the end of the next request's headers."""
BODY_S: Final = 60.0
"""Seconds from the end of a request's headers to the end of its body."""
READ_S: Final = 60.0
"""Seconds after which a client that has read nothing more of its answer is cut off."""
MAX_CONNECTIONS: Final = 4096
_WARN_EVERY_S: Final = 60.0
_log = get_logger()


class ServingOptions(BaseModel):
    """Options of a server of a queue."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(default=8642, ge=0, le=65535)
    """The port; 0 for any free one."""
    token: str | None = Field(default=None, repr=False)
    """The bearer token; needed to bind beyond loopback."""
    max_body_bytes: int = Field(default=8 * 1024 * 1024, ge=1)
    rate: str = "1000/second"
    """Maximum rate of requests from one address."""


def read_token(file: Path) -> str:
    """Read a token from a file, without the white space around it.

    Raises:
        InvalidSettings: it can't be read, or has no valid token.
    """
    try:
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSettings(f"the token file {file} can't be read: {error}") from error
    if len(token) < MIN_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidSettings(
            f"the token in {file} must have {MIN_TOKEN} printable ASCII characters or more, without spaces; "
            f"make one with: openssl rand -hex 32"
        )
    return token


def build_application(queue: Queue, dispenser: Dispenser, options: ServingOptions) -> FastAPI:
    """Build the application behind its guards: rate, then token or host, then the size of the body.

    Raises:
        InvalidSettings: the rate can't be read, or a token is missing.
    """
    _refuse_open(options)
    app = application(
        QueueRoutes(queue, dispenser), version("rebalanser"), is_guarded=options.token is not None
    )
    app.add_middleware(BodyLimit, limit_bytes=options.max_body_bytes)
    if options.token is None:
        app.add_middleware(HostCheck, host=options.host)
    else:
        app.add_middleware(BearerToken, token=options.token)
    app.add_middleware(RateLimit, rate=parse_rate(options.rate))
    return app


class QueueServer:
    """A server of a queue, from its start to its stop, for ``run_until_stopped``.

    ``started`` is called with the URL once the server listens.

    Raises:
        InvalidSettings: the options are invalid.
    """

    def __init__(self, queue: Queue, options: ServingOptions, started: Callable[[str], None]) -> None:
        self._queue = queue
        self._host = options.host
        self._started = started
        self._stopped = threading.Event()
        limit = max_connections()
        self._dispenser = Dispenser(queue.context, max_waiting=limit // 2)
        self._config = uvicorn.Config(
            build_application(queue, self._dispenser, options),
            host=options.host,
            port=options.port,
            http=HttpConnection,
            ws="none",
            backlog=limit // 4,  # what asyncio accepts at once, before any of it is counted
            log_config=None,
            access_log=False,
            lifespan="off",
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=GRACE_S,
        )
        self._server = _UvicornServer(self._config, self._dispenser.stop, limit)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Bind, join the queue's workers, and listen.

        Raises:
            InvalidSettings: the address can't be bound.
            RegistryUnavailable: the engine did not answer in time.
        """
        bound = _bound(self._config)
        try:
            self._dispenser.start(self._queue.start_claim_source(self._dispenser.wake))
        except BaseException:
            bound.close()
            raise
        self._thread = threading.Thread(
            target=self._run, args=(bound,), name="rebalanser-tasks-http", daemon=True
        )
        self._thread.start()
        self._server.listens.wait()
        self._started(_url(self._host, bound.getsockname()[1]))

    def request_stop(self) -> None:
        """Begin to stop, and return at once."""
        self._stopped.set()

    def wait_stopped(self, timeout_s: float | None = None) -> bool:
        """Wait until a stop is requested or the server has ended; True if so."""
        return self._stopped.wait(timeout_s)

    def stop(self, timeout_s: float | None = None) -> None:
        """Answer the running requests, leave the queue's workers, and return once that is done."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(timeout_s)
        self._dispenser.stop()
        self._queue.stop()

    def _run(self, bound: socket.socket) -> None:
        try:
            self._server.run(sockets=[bound])
        finally:
            self._server.listens.set()
            self._stopped.set()


def serve(queue: Queue, options: ServingOptions, started: Callable[[str], None]) -> None:
    """Serve a queue until SIGINT, SIGTERM or SIGHUP; raises what ``QueueServer`` and its start do."""
    run_until_stopped(QueueServer(queue, options, started))


def _bound(config: uvicorn.Config) -> socket.socket:
    try:
        bound = config.bind_socket()
    except SystemExit as error:  # uvicorn exits if it can't bind
        raise InvalidSettings(f"{config.host}:{config.port} can't be bound: is it in use?") from error
    # Connections inherit it. An answer is two writes: the second would wait for the client's delayed ACK.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
    return bound


def max_connections() -> int:
    """Return the maximum of connections: half of the open files, whose limit is raised if possible."""
    files = 2 * MAX_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        files = min(files, hard)
    if soft != resource.RLIM_INFINITY and soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    return max(4, files // 2)


class Connections(ServerState):
    """State that the connections of a server share; at most ``limit`` are open at a time."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.owing: dict[HttpConnection, asyncio.TimerHandle] = {}
        """Connections that wait for their client, the longest first, each with the timer that ends it."""
        self.warned_at = -math.inf


class HttpConnection(H11Protocol):
    """A connection that is ended when its client is late, or when others need its place meanwhile.

    The client has to send the headers of the next request, then its body, and to read what is answered.
    """

    server_state: Connections
    _owes_s: float | None = None
    """Seconds in which the client must send what is due; None while it is the server's turn."""
    _unread: float = math.inf
    """Bytes that the client had not read at the last look."""
    _reads_slowly = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as the base
        """Keep the connection if there is a place for it, and wait for a request."""
        super().connection_made(transport)
        self._follow()
        if len(self.connections) > self.server_state.limit:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        """Take what the client has sent."""
        super().data_received(data)
        self._follow()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._follow()

    def pause_writing(self) -> None:
        """Wait for the client to read."""
        super().pause_writing()
        self._reads_slowly = True
        self._follow()

    def resume_writing(self) -> None:
        """Write on."""
        super().resume_writing()
        self._reads_slowly = False
        self._follow()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        super().connection_lost(exc)
        self._wait(None)

    def _follow(self) -> None:
        """Restart the client's timer if it must do something else now."""
        if self._reads_slowly:
            owes_s: float | None = READ_S
        elif self.owes_head:
            owes_s = HEAD_S
        else:
            owes_s = BODY_S if self.cycle.more_body else None
        if owes_s != self._owes_s:
            self._unread = math.inf
            self._wait(owes_s)

    @property
    def owes_head(self) -> bool:
        """True if all requests that have begun are answered."""
        return self.cycle is None or self.cycle.response_complete  # type: ignore[redundant-expr] # at first

    def _wait(self, seconds: float | None) -> None:
        self._owes_s = seconds
        timer = self.server_state.owing.pop(self, None)
        if timer is not None:
            timer.cancel()
        if seconds is not None:
            self.server_state.owing[self] = self.loop.call_later(seconds, self._end_late)

    def _end_late(self) -> None:
        """End the connection, unless its client still reads a large answer."""
        unread = self.transport.get_write_buffer_size()
        if 0 < unread < self._unread:
            self._unread = unread
            self._wait(self._owes_s)
        else:
            self.end()

    def end(self) -> None:
        """End the connection at once."""
        self._wait(None)
        self.transport.abort()

    def _make_room(self) -> None:
        """End the connection that has waited longest for its client: another without a request, else any."""
        state = self.server_state
        idle = (each for each in state.owing if each.owes_head and each is not self)
        next(idle, next(iter(state.owing))).end()
        now = self.loop.time()
        if now - state.warned_at >= _WARN_EVERY_S:
            state.warned_at = now
            _log.warning(
                "too many connections: those that wait for their clients are ended",
                action="http_connections",
                limit=state.limit,
            )


class _UvicornServer(uvicorn.Server):
    """A server that signals when it listens, and answers waiting clients before it shuts down."""

    def __init__(self, config: uvicorn.Config, before_shutdown: Callable[[], None], limit: int) -> None:
        super().__init__(config)
        self.server_state = Connections(limit)
        self.listens = threading.Event()
        self._before_shutdown = before_shutdown

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        self.listens.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer the clients that wait for claims, then shut down."""
        await asyncio.to_thread(self._before_shutdown)
        await super().shutdown(sockets)


def _refuse_open(options: ServingOptions) -> None:
    if options.token is None and not is_loopback(options.host):
        raise InvalidSettings(
            f"{options.host} can be reached from other hosts: give --token-file, or bind to 127.0.0.1"
        )


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
