"""The guardian: the process that starts what ``rebalanser run`` supervises, and that outlives the supervisor.

It is run as a program, by its path, with the standard library alone: ``guardian.py SOCKET GROUP NODE
STOP_LIMIT_S COMMAND…``. The supervisor tells it over a socket what to start and to stop, and until when
access may last. Whatever becomes of the supervisor, no subprocess goes on:

- The supervisor died, even by ``kill -9``: the kernel closes its end of the socket. Everything gets SIGTERM,
  and SIGKILL after the stop limit or at the deadline, whichever comes first.
- The supervisor was stopped (SIGSTOP) or is stuck: no newer deadline comes. Everything gets SIGTERM the stop
  limit before the deadline, and SIGKILL at the deadline (RB-21). Nothing is started after it.
- The guardian itself died: the kernel kills each command (PR_SET_PDEATHSIG, bound to this process's one
  thread) and closes the socket; the supervisor kills what is left of their process groups. Only descendants
  of a command whose supervisor and guardian are killed at once can go on.

Each command leads a session and process group of its own. When it has exited, what is left of the group is
killed, and the exit is told only once the group is empty: the guardian is the subreaper of all that it
starts, so an orphan of a group becomes its child and is waited for. A process that makes a session of its own
has left the group and is on its own.

A deadline is in seconds of CLOCK_BOOTTIME, which goes on while the host is suspended.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

MAX_MESSAGE_BYTES: Final = 65_536
LONGEST_SLEEP_S: Final = 0.5
"""How late a deadline that passed during a suspend may be noticed: select() does not count a suspend."""
SHORTEST_SLEEP_S: Final = 0.005
"""How often to look at a process that is being killed and that the kernel holds on to."""

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_PLACEHOLDER: Final = re.compile(r"\{(resource|token)\}")


def now() -> float:
    """Seconds of the clock that deadlines are counted on."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def filled_in(command: Sequence[str], resource: str, token: int) -> list[str]:
    """The command with ``{resource}`` and ``{token}`` replaced, each once: no name is searched again."""
    values = {"resource": resource, "token": str(token)}
    return [_PLACEHOLDER.sub(lambda match: values[match[1]], part) for part in command]


@dataclass(slots=True)
class _Child:
    """A process group that was started; its id is its first process's."""

    number: int
    process: subprocess.Popen[bytes]
    kill_at: float | None = None
    """When it gets SIGKILL; None unless it was told to stop."""
    by_guardian: bool = False
    """Whether it was told to stop without the supervisor's asking."""
    code: int | None = None
    """How the command exited; None while it runs."""


class Guardian:
    """Starts, stops and watches over the process groups of one supervisor."""

    def __init__(
        self, supervisor: socket.socket, group: str, node: str, stop_limit_s: float, command: Sequence[str]
    ) -> None:
        self._supervisor = supervisor
        self._supervisor.setblocking(False)
        self._group = group
        self._node = node
        self._stop_limit_s = stop_limit_s
        self._command = command
        self._deadline = 0.0
        self._children: dict[int, _Child] = {}
        self._outbox: deque[bytes] = deque()
        self._alone = False
        self._prctl = ctypes.CDLL(None).prctl
        self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def serve(self) -> None:
        """Do as the supervisor says until it is gone and all groups are empty."""
        with selectors.DefaultSelector() as selector, _wake_on_signals() as woken:
            selector.register(woken, selectors.EVENT_READ)
            selector.register(self._supervisor, selectors.EVENT_READ)
            while self._children or not self._alone:
                ready = {key.fileobj for key, _ in selector.select(self._sleep_s())}
                if woken in ready:
                    _drain(woken)
                if self._supervisor in ready and not self._alone:
                    self._listen()
                self._reap()
                self._enforce()
                self._tell()
                if self._alone and self._supervisor in selector.get_map():
                    selector.unregister(self._supervisor)
                elif not self._alone:
                    wanted = selectors.EVENT_WRITE if self._outbox else 0
                    selector.modify(self._supervisor, selectors.EVENT_READ | wanted)

    def _sleep_s(self) -> float | None:
        if not self._children:
            return None
        times = [child.kill_at for child in self._children.values() if child.kill_at is not None]
        times += [at for at in (self._deadline - self._stop_limit_s, self._deadline) if at > now()]
        until = min(times, default=now() + LONGEST_SLEEP_S) - now()
        return min(LONGEST_SLEEP_S, max(SHORTEST_SLEEP_S, until))

    def _listen(self) -> None:
        """Read every message that has come; the end of the stream is the supervisor's."""
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    text, files, _, _ = socket.recv_fds(self._supervisor, MAX_MESSAGE_BYTES, 2)
                except ConnectionError:
                    text, files = b"", []
                if not text:
                    self._alone = True
                    return
                try:
                    self._obey(json.loads(text), files)
                finally:
                    for file in files:
                        os.close(file)

    def _obey(self, order: dict[str, Any], files: Sequence[int]) -> None:
        if "deadline" in order:
            self._deadline = max(self._deadline, order["deadline"])
        if order["do"] == "start":
            self._start(order["number"], order["resource"], order["token"], files)
        elif order["do"] == "stop":
            for child in self._children.values():
                if child.number == order["number"]:
                    self._terminate(child, order["kill_at"], by_guardian=False)

    def _start(self, number: int, resource: str, token: int, files: Sequence[int]) -> None:
        if now() >= self._deadline:
            self._report("exited", number=number, code=None, error="access ended", by_guardian=True)
            return
        out, err = files or (None, None)
        guardian = os.getpid()

        def die_with_the_guardian() -> None:
            self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != guardian:
                os._exit(1)

        try:
            process = subprocess.Popen(  # noqa: S603 - the user's own command
                filled_in(self._command, resource, token),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={
                    **os.environ,
                    "REBALANSER_GROUP": self._group,
                    "REBALANSER_NODE": self._node,
                    "REBALANSER_RESOURCE": resource,
                    "REBALANSER_TOKEN": str(token),
                },
                start_new_session=True,
                preexec_fn=die_with_the_guardian,  # noqa: PLW1509 - this process has one thread
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._report("exited", number=number, code=None, error=str(error), by_guardian=False)
            return
        self._children[process.pid] = _Child(number, process)
        self._report("started", number=number, pid=process.pid)

    def _terminate(self, child: _Child, kill_at: float, by_guardian: bool) -> None:
        if child.kill_at is None:
            child.by_guardian = by_guardian
            _signal(child, signal.SIGTERM)
        child.kill_at = min(kill_at, child.kill_at or kill_at)

    def _enforce(self) -> None:
        """End what must not go on."""
        instant = now()
        kill_at = min(instant + self._stop_limit_s, self._deadline)
        last_call = self._alone or instant >= self._deadline - self._stop_limit_s
        for child in self._children.values():
            if last_call:
                self._terminate(child, kill_at, by_guardian=True)
            if child.kill_at is not None and instant >= min(child.kill_at, self._deadline):
                _signal(child, signal.SIGKILL)

    def _reap(self) -> None:
        """Take note of what has exited; a command's exit is told once its group is empty.

        Each is looked at before it is reaped, so that its process group's id cannot belong to another yet.
        """
        with contextlib.suppress(ChildProcessError):
            while exited := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                child = self._children.get(exited.si_pid)
                if child is not None:
                    _signal(child, signal.SIGKILL)
                _, status = os.waitpid(exited.si_pid, 0)
                if child is not None:
                    child.code = child.process.returncode = os.waitstatus_to_exitcode(status)
        for pid, child in list(self._children.items()):
            if child.code is not None and _is_empty(pid):
                del self._children[pid]
                self._report(
                    "exited",
                    number=child.number,
                    code=child.code,
                    error=None,
                    by_guardian=child.by_guardian,
                )

    def _report(self, kind: str, **what: object) -> None:
        self._outbox.append(json.dumps({"is": kind, **what}).encode())

    def _tell(self) -> None:
        """Send what the supervisor can take now: a stopped supervisor must not hold the guardian up."""
        try:
            while self._outbox and not self._alone:
                self._supervisor.send(self._outbox[0])
                self._outbox.popleft()
        except BlockingIOError:
            return
        except OSError:
            self._alone = True


def _signal(child: _Child, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.process.pid, number)


def _is_empty(group: int) -> bool:
    """Whether no process of the group is left: an orphan is a child of this process, its subreaper."""
    try:
        os.waitid(os.P_PGID, group, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


@contextlib.contextmanager
def _wake_on_signals() -> Iterator[socket.socket]:
    """A socket that can be read once a child has exited.

    What asks the supervisor to stop does not stop the guardian. Those signals are caught, not ignored: what
    is ignored stays ignored in the commands.
    """
    woken, waker = socket.socketpair()
    with woken, waker:
        woken.setblocking(False)
        waker.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, lambda _number, _frame: None)
        yield woken
        signal.set_wakeup_fd(-1)


def _drain(woken: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        while woken.recv(4096):
            continue


def main(arguments: Sequence[str]) -> None:
    """Serve the supervisor at the other end of the socket whose number is the first argument."""
    file, group, node, stop_limit_s, *command = arguments
    with socket.socket(fileno=int(file)) as supervisor:
        os.set_inheritable(supervisor.fileno(), False)
        Guardian(supervisor, group, node, float(stop_limit_s), command).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
