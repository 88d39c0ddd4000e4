"""A server of a queue over HTTP: where it binds, what guards it, how it stops."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Final

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field

from rebalanser.errors import InvalidSettings
from rebalanser.runtime.running import run_until_stopped
from rebalanser.tasks.http.dispenser import Dispenser
from rebalanser.tasks.http.guards import BearerToken, BodyLimit, RateLimit, parse_rate
from rebalanser.tasks.http.routes import Server, application
from rebalanser.tasks.queue import Queue

MIN_TOKEN: Final = 16
GRACE_S: Final = 10


class ServingOptions(BaseModel):
    """How a queue is served."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = Field(default=8642, ge=0, le=65535)
    """0 for any that is free."""
    token: str | None = Field(default=None, repr=False)
    """The bearer token; needed to bind beyond loopback."""
    max_body_bytes: int = Field(default=8 * 1024 * 1024, ge=1)
    rate: str = "1000/second"
    """How many requests one address may send in which time."""


def read_token(file: Path) -> str:
    """The token that a file holds, without the white space around it.

    Raises:
        InvalidSettings: it can't be read, or what it holds is no token.
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


def built(queue: Queue, dispenser: Dispenser, options: ServingOptions) -> FastAPI:
    """The application behind its guards: the rate first, then the token, then the size of the body.

    Raises:
        InvalidSettings: the rate can't be read, or a token is missing.
    """
    _refuse_open(options)
    app = application(Server(queue, dispenser), version("rebalanser"), is_guarded=options.token is not None)
    app.add_middleware(BodyLimit, limit_bytes=options.max_body_bytes)
    if options.token is not None:
        app.add_middleware(BearerToken, token=options.token)
    app.add_middleware(RateLimit, rate=parse_rate(options.rate))
    return app


class Serving:
    """A server of a queue, from its start to its stop, for ``run_until_stopped``.

    ``started`` is told the URL once the server listens.

    Raises:
        InvalidSettings: the options can't be so.
    """

    def __init__(self, queue: Queue, options: ServingOptions, started: Callable[[str], None]) -> None:
        self._queue = queue
        self._host = options.host
        self._started = started
        self._stopped = threading.Event()
        self._dispenser = Dispenser(queue.context)
        self._config = uvicorn.Config(
            built(queue, self._dispenser, options),
            host=options.host,
            port=options.port,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=GRACE_S,
        )
        self._server = _Server(self._config, self._dispenser.stop)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Bind, join the queue's workers, and listen.

        Raises:
            InvalidSettings: the address can't be bound.
            RegistryUnavailable: the engine did not answer in time.
        """
        bound = _bound(self._config)
        try:
            self._dispenser.start(self._queue.lend(self._dispenser.wake))
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
        """Wait until somebody asks to stop, or the server has ended; whether that is so."""
        return self._stopped.wait(timeout_s)

    def stop(self, timeout_s: float | None = None) -> None:
        """Let what was asked be answered, leave the queue's workers, and return once that is done."""
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
    """Serve a queue until SIGINT, SIGTERM or SIGHUP; raises what :class:`Serving` and its start do."""
    run_until_stopped(Serving(queue, options, started))


def _bound(config: uvicorn.Config) -> socket.socket:
    try:
        return config.bind_socket()
    except SystemExit as error:  # its way to say that it can't
        raise InvalidSettings(f"{config.host}:{config.port} can't be bound: is it in use?") from error


class _Server(uvicorn.Server):
    """A server that tells when it listens, and ends what waits before it waits for it."""

    def __init__(self, config: uvicorn.Config, before_shutdown: Callable[[], None]) -> None:
        super().__init__(config)
        self.listens = threading.Event()
        self._before_shutdown = before_shutdown

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        self.listens.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer who waits for a claim, then shut down."""
        await asyncio.to_thread(self._before_shutdown)
        await super().shutdown(sockets)


def _refuse_open(options: ServingOptions) -> None:
    if options.token is None and not _is_loopback(options.host):
        raise InvalidSettings(
            f"{options.host} can be reached from other hosts: give --token-file, or bind to 127.0.0.1"
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
