"""Common parts of real servers for tests: installation, and processes that end with their parent."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import random
import shutil
import signal
import socket
import subprocess
import tarfile
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rebalanser.testing.pausing import wait_stopped
from rebalanser.testing.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class ServerMissing(Exception):
    """A server, or a command that it needs, is missing and could not be installed."""


class ServerFailed(Exception):
    """A server did not start, did not get ready, or does not run."""


class SourceFailed(Exception):
    """One way to get a server does not work here."""


def addresses_in(variable: str) -> tuple[str, ...]:
    """The ``HOST:PORT`` parts of an environment variable; empty if it is not set."""
    return tuple(part.strip() for part in os.environ.get(variable, "").split(",") if part.strip())


def cache_folder() -> Path:
    """Folder of installed servers: ``$REBALANSER_CACHE``, else ``rebalanser`` in the user's cache folder."""
    if own := os.environ.get("REBALANSER_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rebalanser"


@contextlib.contextmanager
def exclusive(name: str) -> Iterator[None]:
    """Hold a lock of this name in the cache folder against every other process of the user."""
    lock = cache_folder() / f"{name}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def workshop(name: str) -> Iterator[Path]:
    """A temporary folder on the cache's file system, from which finished files move in one step."""
    with tempfile.TemporaryDirectory(prefix=f"making-{name}-", dir=cache_folder()) as folder:
        yield Path(folder)


def run(way: str, command: Sequence[str | Path], *, telling_line: int = -1, **options: Any) -> None:
    """Run one command of a way to get a server.

    Raises:
        SourceFailed: it could not be run, failed or took too long; with the line of its output that says why,
            the last one by default.
    """
    try:
        subprocess.run(  # noqa: S603
            command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
        )
    except (OSError, subprocess.SubprocessError) as error:
        output = (getattr(error, "output", None) or str(error)).strip().splitlines()
        raise SourceFailed(f"{way}: {output[telling_line] if output else error}") from error


def copy_from_image(variable: str, inside: str, folder: Path) -> Path:
    """Copy a file or folder out of the container image that the environment variable names.

    The copy runs here: no container runs during tests.

    Raises:
        SourceFailed: no image is named, or there is no container engine that has it.
    """
    image = os.environ.get(variable)
    if not image:
        raise SourceFailed(f"container: {variable} names no image")
    try:
        import docker  # type: ignore[import-not-found,import-untyped,unused-ignore] # noqa: PLC0415
    except ImportError as error:
        raise SourceFailed("container: the docker package is not installed") from error
    packed = folder / "image.tar"
    try:
        engine = docker.from_env()
        engine.images.pull(image)
        container = engine.containers.create(image)
        try:
            chunks, _ = container.get_archive(inside)
            with packed.open("wb") as file:
                file.writelines(chunks)
        finally:
            container.remove()
    except docker.errors.DockerException as error:
        raise SourceFailed(f"container: {error}") from error
    with tarfile.open(packed) as archive:
        archive.extractall(folder, filter="data")
    return folder / Path(inside).name


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files of a small authority: its own certificate, and those of a server and of a client."""

    ca: Path
    server_cert: Path
    server_key: Path
    client_cert: Path
    client_key: Path


def make_certificates(folder: Path) -> Certificates:
    """Make an authority and certificates for ``127.0.0.1`` and a client, valid for two days, with openssl.

    Raises:
        ServerMissing: there is no openssl command.
    """
    if shutil.which("openssl") is None:
        raise ServerMissing("TLS needs the openssl command")
    folder.mkdir(parents=True, exist_ok=True)

    def openssl(*arguments: str | Path) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)  # noqa: S603, S607

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    openssl("req", "-x509", *new_key, "-subj", "/CN=test-authority", "-keyout", "ca.key", "-out", "ca.pem")
    for name, common_name in (("server", "127.0.0.1"), ("client", "root")):
        extensions = folder / f"{name}.ext"
        extensions.write_text(
            "subjectAltName=IP:127.0.0.1,DNS:localhost\nextendedKeyUsage=serverAuth,clientAuth\n"
        )
        request = ("req", *new_key[:-2], "-subj", f"/CN={common_name}")
        openssl(*request, "-keyout", f"{name}.key", "-out", f"{name}.csr")
        signing = ("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-days", "2")
        openssl(*signing, "-CAcreateserial", "-extfile", extensions, "-out", f"{name}.pem")
    return Certificates(
        ca=folder / "ca.pem",
        server_cert=folder / "server.pem",
        server_key=folder / "server.key",
        client_cert=folder / "client.pem",
        client_key=folder / "client.key",
    )


def free_ports(count: int) -> list[int]:
    """``count`` distinct TCP ports of 127.0.0.1 that were free a moment ago.

    They are below those that outgoing connections get (32768 and up on Linux), of which one might else take
    the port of a server that is down, or connect to itself there.
    """
    candidates = random.sample(range(10_000, 32_768), 1_000)
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        for port in candidates:
            if len(ports) == count:
                break
            with contextlib.suppress(OSError):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
                ports.append(port)
    return ports


@functools.cache
def _spawner() -> ThreadPoolExecutor:
    """The one thread that starts servers: a parent-death signal fires when the starting *thread* ends."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="server-spawner")


def _spawn(command: Sequence[str | Path], log: Path) -> subprocess.Popen[bytes]:
    setpriv = shutil.which("setpriv")
    bound_to_us = [setpriv, "--pdeathsig", "KILL"] if setpriv else []

    def start() -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            return subprocess.Popen(  # noqa: S603
                [*bound_to_us, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    return _spawner().submit(start).result()


class ServerProcess:
    """One server as a process group of its own that dies with this process.

    Its output is appended to ``log``.
    """

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._paused = False

    def start(self, command: Sequence[str | Path]) -> None:
        """Start the server; it must not be running."""
        self._process = _spawn(command, self.log)

    @property
    def is_alive(self) -> bool:
        """True if the process exists, paused or not."""
        return self._process is not None and self._process.poll() is None

    @property
    def should_serve(self) -> bool:
        """True if the server was started and neither ended nor paused by us; it may have ended by itself."""
        return self._process is not None and not self._paused

    @property
    def pid(self) -> int:
        """The process id.

        Raises:
            ServerFailed: it was not started, or was ended.
        """
        if self._process is None:
            raise ServerFailed(f"{self.name} does not run")
        return self._process.pid

    def kill(self) -> None:
        """End the server with SIGKILL, paused or not. Does nothing if it does not run."""
        self._end(signal.SIGKILL)

    def terminate(self) -> None:
        """End the server with SIGTERM and wait until it has gone; after ``PATIENCE_S`` with SIGKILL."""
        self._end(signal.SIGTERM)

    def pause(self) -> None:
        """Stop the server's clock and threads (SIGSTOP); its connections stay open and silent."""
        os.killpg(self.pid, signal.SIGSTOP)
        wait_stopped(self.pid)
        self._paused = True

    def resume(self) -> None:
        """Continue the server after a pause."""
        os.killpg(self.pid, signal.SIGCONT)
        self._paused = False

    def failure(self, state: str) -> str:
        """Message with this state, or the exit status, and the end of the log without stack frames."""
        status = None if self._process is None else self._process.poll()
        how = state if status is None else f"ended with {status}"
        printed = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        lines = [line for line in printed if line.strip() and not line.startswith("\tat ")]
        return "\n".join([f"{self.name} {how}; the end of {self.log}:", *lines[-5:]])

    def _end(self, how: signal.Signals) -> None:
        process, self._process, self._paused = self._process, None, False
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        try:
            process.wait(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
