"""The supervisor's client of the shim: starts it, sends it orders, and receives their outcomes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeAlias

from tenacity import (
    Retrying,
    retry_if_exception_type,
    retry_if_result,
    stop_after_delay,
    wait_fixed,
    wait_none,
)

from rebalanser.errors import InternalError, RequestTooLarge
from rebalanser.runtime import supervisor_shim as shim

CLOSE_TIMEOUT_S: Final = 1.0
START_TIMEOUT_S: Final = 10.0
"""Seconds that a start waits for room in the shim's queue of some hundred orders."""
ROOM_POLL_MS: Final = 100
KILLED_TIMEOUT_S: Final = 5.0
"""Seconds to wait for jobs that were killed because the shim died. A process may stay in the kernel, and
an init that reaps no children keeps dead ones."""
KILLED_POLL_S: Final = 0.01
STOP_TIMEOUT_S: Final = 0.5
"""Seconds that a stop waits for room; the caller must be ready to ``ShimClient.kill`` anyway."""


@dataclass(frozen=True, slots=True)
class CommandStarted:
    """The command runs."""

    pid: int
    """The id of the process and of its process group."""


@dataclass(frozen=True, slots=True)
class Exited:
    """The command's process group is empty, or it was never started."""

    code: int | None
    """The exit code, negative for a signal; None if the command was not started."""
    error: str | None
    """The reason why the command was not started."""
    by_shim: bool
    """True if the shim ended it because access ended, not because of an order."""
    at: float | None = None
    """Time at which the shim saw the end (CLOCK_BOOTTIME seconds); None if the shim died."""


Outcome: TypeAlias = CommandStarted | Exited


class ShimClient:
    """The process groups of one supervisor, run by a shim process. All methods are thread-safe.

    ``lost`` is called once, in another thread, if the shim dies; all jobs have been killed by then.
    ``held`` are files that the shim keeps open until it ends, that is, until all groups are empty: a lock
    among them is not released before.
    """

    def __init__(self, lost: Callable[[], None], held: Sequence[int] = ()) -> None:
        self._lost = lost
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._callbacks: dict[int, Callable[[Outcome], None]] = {}
        self._pids: dict[int, int] = {}
        self._closing = False
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            program = [sys.executable, "-I", "-S", shim.__file__]
            self._process = subprocess.Popen(  # noqa: S603 - a module of this package
                [*program, str(theirs.fileno()), *map(str, held)],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *held),
                start_new_session=True,
            )
        self._listener = threading.Thread(target=self._listen, name="rebalanser-shim", daemon=True)
        self._listener.start()

    def start(
        self, job: shim.SupervisedCommand, on_outcome: Callable[[Outcome], None], files: Sequence[int] = ()
    ) -> int:
        """Start a job and return its number. ``on_outcome`` is called in another thread with each outcome.

        ``on_outcome`` must not block. It gets at most one ``CommandStarted``, and then one ``Exited``.
        ``files`` are the job's standard output and error; by default those of this process.

        Raises:
            InternalError: the shim is gone, or has taken no orders for ``START_TIMEOUT_S``.
            RequestTooLarge: command and environment are too large for the kernel.
        """
        number = next(self._numbers)
        with self._lock:
            self._callbacks[number] = on_outcome
        order = json.dumps({"do": "start", "number": number}).encode()
        try:
            with _written(job) as description:
                self._send(order, [description, *files], START_TIMEOUT_S)
        except OSError as error:
            self._forget(number)
            stuck = isinstance(error, BlockingIOError)
            what = "takes no orders" if stuck else "is gone"
            raise InternalError(f"the shim of the subprocesses {what}") from error
        except RequestTooLarge:
            self._forget(number)
            raise
        return number

    def _forget(self, number: int) -> None:
        with self._lock:
            self._callbacks.pop(number, None)

    def stop(self, number: int, kill_at: float) -> None:
        """Send SIGTERM to a job's process group now, and SIGKILL at ``kill_at`` (CLOCK_BOOTTIME seconds)."""
        self._order({"do": "stop", "number": number, "kill_at": kill_at}, STOP_TIMEOUT_S)

    def kill(self, number: int) -> None:
        """Send SIGKILL to a job's process group from this process, in case the shim does not."""
        with self._lock:
            pid = self._pids.get(number)
        if pid is not None:
            _kill_group(pid)

    def extend(self, deadline: float, number: int | None = None) -> None:
        """Extend the deadline of one job, or of all that have one (CLOCK_BOOTTIME seconds).

        Never waits: if the shim takes no orders, the deadline stays as it is.
        """
        self._order({"do": "extend", "number": number, "deadline": deadline}, 0.0)

    def _order(self, order: dict[str, object], timeout_s: float) -> None:
        """Send an order; ignore a shim that is gone, which the listener handles."""
        with contextlib.suppress(OSError):
            self._send(json.dumps(order).encode(), (), timeout_s)

    def _send(self, order: bytes, files: Sequence[int], timeout_s: float) -> None:
        """Send an order as soon as there is room for it.

        Raises:
            BlockingIOError: there was no room within ``timeout_s``: the shim is stopped or stuck.
            OSError: the shim is gone.
        """
        room = select.poll()
        room.register(self._socket, select.POLLOUT)

        def until_there_may_be_room(_seconds: float) -> None:
            room.poll(ROOM_POLL_MS)

        attempts = Retrying(
            retry=retry_if_exception_type(BlockingIOError),
            stop=stop_after_delay(timeout_s),
            wait=wait_none(),
            sleep=until_there_may_be_room,
            reraise=True,
        )
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", files))] if files else []
        attempts(self._socket.sendmsg, [order], rights, socket.MSG_DONTWAIT)

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while message := self._socket.recv(shim.MAX_MESSAGE_BYTES):
                self._hear(json.loads(message))
        if not self._closing:
            self._kill_all()
            self._lost()

    def _hear(self, message: dict[str, Any]) -> None:
        number = message["number"]
        with self._lock:
            on_outcome = self._callbacks[number]
            if message["is"] == "started":
                self._pids[number] = message["pid"]
            else:
                del self._callbacks[number]
                self._pids.pop(number, None)
        if message["is"] == "started":
            on_outcome(CommandStarted(message["pid"]))
        else:
            on_outcome(Exited(message["code"], message["error"], message["by_shim"], message["at"]))

    def _kill_all(self) -> None:
        """Kill the descendants of the commands; the kernel has killed the commands with the shim."""
        with self._lock:
            pids, self._pids = dict(self._pids), {}
            waiting, self._callbacks = dict(self._callbacks), {}
        for pid in pids.values():
            _kill_group(pid)
        _wait_for_end(pids.values())
        for on_outcome in waiting.values():
            on_outcome(Exited(None, "the shim of the subprocesses died", by_shim=True))

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Ask the shim to stop all jobs and to end. Closing twice does nothing.

        Waits at most ``timeout_s`` seconds for the shim, and so for all that it started.
        """
        self._closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._listener:
            self._listener.join()
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)


@contextlib.contextmanager
def _written(job: shim.SupervisedCommand) -> Iterator[int]:
    """Write a job to an anonymous file: a command may be too long for a message."""
    text = json.dumps(asdict(job)).encode()
    if len(text) > shim.MAX_JOB_BYTES:
        raise RequestTooLarge(
            f"command and environment have {len(text):,} bytes; the limit is {shim.MAX_JOB_BYTES:,}"
        )
    with os.fdopen(os.memfd_create("rebalanser-job"), "wb") as file:
        file.write(text)
        file.flush()
        yield file.fileno()


def _wait_for_end(groups: Collection[int]) -> None:
    """Wait, for a bounded time, until these groups are empty: a reported exit may start a successor."""
    Retrying(
        retry=retry_if_result(bool),
        stop=stop_after_delay(KILLED_TIMEOUT_S),
        wait=wait_fixed(KILLED_POLL_S),
        retry_error_callback=lambda _state: None,
    )(lambda: any(map(_lives, groups)))


def _lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
