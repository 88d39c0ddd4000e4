"""The supervisor's end of the guardian: starts it, gives it orders, and hears what becomes of them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from rebalanser.cli import guardian
from rebalanser.errors import InternalError

CLOSE_TIMEOUT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Started:
    """The command runs; its process group has this id too."""

    pid: int


@dataclass(frozen=True, slots=True)
class Exited:
    """The command's process group is empty, or it was never started."""

    code: int | None
    """The exit code, negative for a signal; None where it was not started."""
    error: str | None
    """Why it was not started."""
    by_guardian: bool
    """Whether the guardian ended it because access ended, and nobody here asked for that."""


@dataclass(frozen=True, slots=True)
class StopAsked:
    """The command has to be stopped; put into the same queue by whoever asks for it."""


Event: TypeAlias = Started | Exited | StopAsked
Events: TypeAlias = "queue.SimpleQueue[Event]"


class GuardedProcesses:
    """The process groups of one supervisor, kept by a guardian of their own. Used from any thread.

    ``lost`` is called once, from a thread of its own, if the guardian dies; everything has been killed then.
    """

    def __init__(
        self, group: str, node: str, stop_limit_s: float, command: Sequence[str], lost: Callable[[], None]
    ) -> None:
        self._lost = lost
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._events: dict[int, Events] = {}
        self._pids: dict[int, int] = {}
        self._closing = False
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            program = [sys.executable, "-I", "-S", guardian.__file__]
            self._process = subprocess.Popen(  # noqa: S603 - a module of this package
                [*program, str(theirs.fileno()), group, node, str(stop_limit_s), *command],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._listener = threading.Thread(target=self._listen, name="rebalanser-guardian", daemon=True)
        self._listener.start()

    def start(
        self, resource: str, token: int, deadline: float, events: Events, files: Sequence[int] = ()
    ) -> int:
        """Start the command for a resource, and put what becomes of it into ``events``; the job's number.

        ``files`` are its standard output and error; without them it has those of this process.

        Raises:
            InternalError: the guardian is gone.
        """
        number = next(self._numbers)
        with self._lock:
            self._events[number] = events
        order = {"do": "start", "number": number, "resource": resource, "token": token, "deadline": deadline}
        try:
            socket.send_fds(self._socket, [json.dumps(order).encode()], files)
        except OSError as error:
            with self._lock:
                self._events.pop(number, None)
            raise InternalError("the guardian of the subprocesses is gone") from error
        return number

    def stop(self, number: int, kill_at: float) -> None:
        """Send SIGTERM to a job's process group now, and SIGKILL at ``kill_at`` (CLOCK_BOOTTIME seconds)."""
        self._order({"do": "stop", "number": number, "kill_at": kill_at})

    def kill(self, number: int) -> None:
        """Send SIGKILL to a job's process group from here, for when the guardian does not."""
        with self._lock:
            pid = self._pids.get(number)
        if pid is not None:
            _kill_group(pid)

    def extend(self, deadline: float) -> None:
        """Let everything run until ``deadline`` (CLOCK_BOOTTIME seconds) at the longest."""
        self._order({"do": "extend", "deadline": deadline})

    def _order(self, order: dict[str, object]) -> None:
        """A guardian that is gone needs no orders: the listener sees to the rest."""
        with contextlib.suppress(OSError):
            self._socket.send(json.dumps(order).encode())

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while message := self._socket.recv(guardian.MAX_MESSAGE_BYTES):
                self._hear(json.loads(message))
        if not self._closing:
            self._kill_all()
            self._lost()

    def _hear(self, message: dict[str, Any]) -> None:
        number = message["number"]
        with self._lock:
            events = self._events[number]
            if message["is"] == "started":
                self._pids[number] = message["pid"]
            else:
                del self._events[number]
                self._pids.pop(number, None)
        if message["is"] == "started":
            events.put(Started(message["pid"]))
        else:
            events.put(Exited(message["code"], message["error"], message["by_guardian"]))

    def _kill_all(self) -> None:
        """The kernel has killed the commands themselves along with the guardian; kill their descendants."""
        with self._lock:
            pids, self._pids = dict(self._pids), {}
            waiting, self._events = dict(self._events), {}
        for pid in pids.values():
            _kill_group(pid)
        for events in waiting.values():
            events.put(Exited(None, "the guardian of the subprocesses died", by_guardian=True))

    def close(self) -> None:
        """Let the guardian end; it stops first what still runs. Closing twice does nothing."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._listener.join()
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_TIMEOUT_S)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
