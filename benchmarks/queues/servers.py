"""Redis and PostgreSQL, started on loopback for one run, with every write synced to the disk."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PATIENCE_S = 30.0
REDIS_SETTINGS = ("--appendonly", "yes", "--appendfsync", "always", "--save", "")


def find_redis() -> str | None:
    """The program that ``REDIS_SERVER`` names, else a redis-server or valkey-server on the PATH."""
    return os.environ.get("REDIS_SERVER") or shutil.which("redis-server") or shutil.which("valkey-server")


def find_postgres() -> Path | None:
    """The folder of PostgreSQL's programs: ``POSTGRES_BIN``, else where ``postgres`` of the PATH is."""
    if named := os.environ.get("POSTGRES_BIN"):
        return Path(named)
    found = shutil.which("postgres")
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    candidates = ([] if found is None else [Path(found).resolve().parent]) + debian
    return next((each for each in candidates if (each / "initdb").exists()), None)


@contextlib.contextmanager
def redis() -> Iterator[str]:
    """A Redis that answers a write once it is on the disk; its URL."""
    program = find_redis()
    assert program is not None
    port = _free_port()
    with tempfile.TemporaryDirectory() as data:
        command = [program, "--port", str(port), "--bind", "127.0.0.1", "--dir", data, *REDIS_SETTINGS]
        with _running(command, port):
            yield f"redis://127.0.0.1:{port}/0"


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """A PostgreSQL with its defaults, which sync every commit; its URL."""
    programs = find_postgres()
    assert programs is not None
    port = _free_port()
    user = _unprivileged()
    with tempfile.TemporaryDirectory() as outer:
        data = Path(outer) / "data"
        data.mkdir(mode=0o700)
        if user is not None:
            Path(outer).chmod(0o755)
            shutil.chown(data, user)
        subprocess.run(
            [programs / "initdb", "-D", data, "-U", "bench", "-A", "trust", "-E", "UTF8"],
            check=True,
            stdout=subprocess.DEVNULL,
            user=user,
            cwd=data,
        )
        command = [programs / "postgres", "-D", data, "-p", str(port), "-h", "127.0.0.1", "-k", ""]
        with _running([*map(str, command)], port, user):
            _await_database(programs, port)
            yield f"postgresql://bench@127.0.0.1:{port}/postgres"


def _await_database(programs: Path, port: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    ready = [programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port)]
    while subprocess.run(ready, check=False).returncode:
        if time.monotonic() > deadline:
            raise TimeoutError("PostgreSQL did not become ready")
        time.sleep(0.1)


@contextlib.contextmanager
def _running(command: list[str], port: int, user: str | None = None) -> Iterator[None]:
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, user=user, start_new_session=True
    )
    try:
        _await_port(process, port)
        yield
    finally:
        process.terminate()
        process.wait()


def _await_port(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise TimeoutError(f"{process.args!r} does not answer on port {port}")


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def _unprivileged() -> str | None:
    """Who runs PostgreSQL, which refuses to be root's."""
    if os.geteuid() != 0:
        return None
    known = {each.pw_name for each in pwd.getpwall()}
    return "postgres" if "postgres" in known else "nobody"
