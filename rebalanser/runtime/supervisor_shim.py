"""The shim: a process that starts the jobs of a supervisor, and outlives the supervisor.

It is run as a program, by its path, with the standard library alone: ``supervisor_shim.py SOCKET``. The
supervisor sends it orders over a socket: start a job, stop it, extend its deadline. No job runs beyond its
deadline, whatever fails:

- The supervisor dies, even by ``kill -9``: the kernel closes its end of the socket. Every job gets SIGTERM,
  and SIGKILL after its stop limit or at its deadline, whichever comes first.
- The supervisor is stopped (SIGSTOP) or stuck, so that it extends no deadline. A job with a deadline gets
  SIGTERM its stop limit before the deadline, and SIGKILL at the deadline (RB-21, SH-14). No job is started
  after its deadline. A job without a deadline continues.
- Supervisor and shim are frozen together, as with a whole host or container: the jobs are frozen too.
  When the shim continues, it kills the jobs that are past their deadlines. Only receivers that check
  fencing tokens refuse what such a job writes in between.
- The shim dies: the kernel kills each job's command (PR_SET_PDEATHSIG, bound to this process's one
  thread) and closes the socket. The supervisor kills the rest of the process groups, and so does the logger
  below, whatever became of the supervisor.
- Supervisor, shim and logger are killed at once, or the job's output is not kept: descendants of a
  command can survive. They keep the job's lock, by which the next supervisor finds and kills them.

Each command leads a session and process group of its own. When it has exited, the shim kills the rest of
the group, and reports the exit only once the group is empty. It is the subreaper of all that it starts, so an
orphan of a group becomes its child. A process that creates a session of its own has left the group and is not
waited for, unless the job asks for its ``whole_tree``: then orphans with the job's mark in their environment
are killed and waited for, too. What begins with another environment, or runs as another user, gets away.

A job may name a lock file. It is started once the shim has the lock, and the command inherits the lock:
no second job with the same file is started while a process of the first one lives that has not closed it.

A job may leave its output to the shim. A separate process, ``runtime.output_logger``, reads it
and writes it to files, so that neither a stopped supervisor nor a slow disk blocks a job or the shim.

Deadlines are in seconds of CLOCK_BOOTTIME, which continues while the host is suspended.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Final

MAX_MESSAGE_BYTES: Final = 65_536
MAX_JOB_BYTES: Final = 4 * 1024 * 1024
"""Maximum size of a job; the kernel takes no larger command and environment anyway."""
LONGEST_SLEEP_S: Final = 0.5
"""Maximum delay after a suspend until a passed deadline is noticed: select() does not count a suspend."""
SHORTEST_SLEEP_S: Final = 0.005
"""Seconds between looks at a killed process that has not ended yet."""
LOCK_POLL_S: Final = 0.02
STARTS_AT_ONCE: Final = 8
"""Maximum number of starts before deadlines are checked again: starting hundreds takes seconds."""
LOGGER_PAUSE_S: Final = 1.0
"""Minimum seconds between two starts of the logger."""
PIPE_BYTES: Final = 1024 * 1024
"""Output that a job may write while the logger is busy, if the kernel grants it."""

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_FILES_OF_A_START: Final = 3
_MARK: Final = "REBALANSER_JOB"


@dataclass(frozen=True, slots=True)
class Output:
    """Files for a job's standard output and error: ``path``, and older output in ``path.1`` and so on."""

    path: str
    file_bytes: int
    files: int


@dataclass(frozen=True, slots=True)
class SupervisedCommand:
    """A command with its environment and limits."""

    command: Sequence[str]
    stop_limit_s: float
    """Seconds from SIGTERM to SIGKILL when the shim ends it."""
    deadline: float | None = None
    """Time by which it must have ended (CLOCK_BOOTTIME seconds); None for no deadline."""
    environment: Mapping[str, str] = field(default_factory=dict)
    inherits: bool = True
    """True if ``environment`` is added to the supervisor's, False if it replaces that."""
    folder: str | None = None
    """Working directory; None for the supervisor's."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """Resource limits by the kernel's names, such as ``RLIMIT_DATA``."""
    lock: str | None = None
    """File that stays locked while the job lives."""
    lock_timeout_s: float = 0.0
    """Maximum seconds to wait for the lock."""
    whole_tree: bool = False
    """True if processes outside the group end with the command, too, if they have kept its environment."""
    output: Output | None = None

    @classmethod
    def read(cls, text: bytes) -> SupervisedCommand:
        """Parse a job from JSON."""
        fields = json.loads(text)
        output = fields.pop("output")
        return cls(**fields, output=Output(**output) if output else None)


def now() -> float:
    """Return the time on the clock of deadlines, in seconds."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(slots=True)
class _Waiting:
    """A job that waits for its start, until its lock is free."""

    number: int
    job: SupervisedCommand
    files: list[int]
    """Standard output and error, or empty."""
    deadline: float
    lock_until: float

    def close(self) -> None:
        for file in self.files:
            os.close(file)
        self.files = []


@dataclass(slots=True)
class _Child:
    """A started process group; its id is that of its first process."""

    number: int
    process: subprocess.Popen[bytes]
    stop_limit_s: float
    deadline: float
    lock: int | None = None
    kill_at: float | None = None
    """Time of SIGKILL; None unless it has got SIGTERM."""
    mark: str | None = None
    """Entry of the environment of all its descendants; None if only the process group is killed."""
    by_shim: bool = False
    """True if the shim stopped it without an order."""
    code: int | None = None
    """The command's exit code; None while it runs."""


class SupervisorShim:
    """Starts, stops and watches the process groups of one supervisor."""

    def __init__(self, supervisor: socket.socket) -> None:
        self._supervisor = supervisor
        self._supervisor.setblocking(False)
        self._waiting: list[_Waiting] = []
        self._children: dict[int, _Child] = {}
        self._outbox: deque[bytes] = deque()
        self._alone = False
        self._in_a_hurry = False
        self._selector = selectors.DefaultSelector()
        self._logger = _LoggerProcess(self._selector)
        self._prctl = ctypes.CDLL(None).prctl
        self._prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._usual_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (self._usual_files[1], self._usual_files[1]))

    def serve(self) -> None:
        """Carry out orders until the supervisor is gone and all groups are empty."""
        with self._selector as selector, _wake_on_signals() as woken:
            selector.register(woken, selectors.EVENT_READ)
            selector.register(self._supervisor, selectors.EVENT_READ)
            while self._children or not self._alone:
                ready = {key.fileobj for key, _ in selector.select(self._sleep_s())}
                if woken in ready:
                    _drain(woken)
                if self._supervisor in ready and not self._alone:
                    self._listen()
                self._begin()
                self._reap()
                self._enforce()
                self._logger.step()
                self._send_reports()
                if self._alone and self._supervisor in selector.get_map():
                    selector.unregister(self._supervisor)
                elif not self._alone:
                    wanted = selectors.EVENT_WRITE if self._outbox else 0
                    selector.modify(self._supervisor, selectors.EVENT_READ | wanted)

    def _sleep_s(self) -> float | None:
        if self._in_a_hurry:
            return 0.0
        if not self._children and not self._waiting:
            return LONGEST_SLEEP_S if self._logger.is_behind else None
        instant = now()
        until = instant + (LOCK_POLL_S if self._waiting else LONGEST_SLEEP_S)
        for child in self._children.values():
            times = (child.kill_at or inf, child.deadline - child.stop_limit_s, child.deadline)
            until = min(until, *(at for at in times if at > instant or at == child.kill_at))
        return min(LONGEST_SLEEP_S, max(SHORTEST_SLEEP_S, until - instant))

    def _listen(self) -> None:
        """Read all messages that have arrived; the end of the stream means that the supervisor is gone."""
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    text, files, _, _ = socket.recv_fds(
                        self._supervisor, MAX_MESSAGE_BYTES, _FILES_OF_A_START
                    )
                except ConnectionError:
                    text, files = b"", []
                if not text:
                    self._alone = True
                    return
                self._obey(json.loads(text), list(files))

    def _obey(self, order: dict[str, Any], files: list[int]) -> None:
        number = order["number"]
        if order["do"] == "start" and not files:
            error = "the shim of the subprocesses has too many open files"
            self._report("exited", number=number, code=None, error=error, by_shim=False)
        elif order["do"] == "start":
            with os.fdopen(files.pop(0), "rb") as file:
                file.seek(0)
                job = SupervisedCommand.read(file.read())
            for handed_over in files:
                os.set_inheritable(handed_over, False)
            deadline = inf if job.deadline is None else job.deadline
            self._waiting.append(_Waiting(number, job, files, deadline, now() + job.lock_timeout_s))
        elif order["do"] == "stop":
            self._forget(number)
            for child in self._children.values():
                if child.number == number:
                    self._terminate(child, order["kill_at"], by_shim=False)
        elif order["do"] == "extend":
            held: list[_Waiting | _Child] = [*self._waiting, *self._children.values()]
            for each in held:
                # A deadline that has passed is never extended: the job may run elsewhere by now.
                if number in (None, each.number) and now() < each.deadline:
                    each.deadline = max(each.deadline, order["deadline"])

    def _forget(self, number: int) -> None:
        """Cancel a start that still waits."""
        for waiting in [waiting for waiting in self._waiting if waiting.number == number]:
            self._refuse(waiting, "it was stopped before it began", by_shim=False)
            self._waiting.remove(waiting)

    def _refuse(self, waiting: _Waiting, error: str, by_shim: bool) -> None:
        waiting.close()
        self._report("exited", number=waiting.number, code=None, error=error, by_shim=by_shim)

    def _begin(self) -> None:
        """Start waiting jobs, a few at a time, and report those that can't be started."""
        still: list[_Waiting] = []
        most = len(self._children) + STARTS_AT_ONCE
        for waiting in self._waiting:
            if self._alone:
                waiting.close()
            elif len(self._children) >= most:
                still.append(waiting)
            elif now() >= waiting.deadline:
                self._refuse(waiting, "access ended", by_shim=True)
            else:
                try:
                    lock = _lock(waiting.job.lock)
                except BlockingIOError:
                    if now() < waiting.lock_until:
                        still.append(waiting)
                        continue
                    waited_s = waiting.job.lock_timeout_s
                    self._refuse(
                        waiting, f"an earlier process still runs after {waited_s:g} s", by_shim=False
                    )
                except OSError as error:
                    self._refuse(waiting, str(error), by_shim=False)
                else:
                    self._start(waiting, lock)
        self._waiting = still
        self._in_a_hurry = len(self._children) >= most

    def _start(self, waiting: _Waiting, lock: int | None) -> None:
        job = waiting.job
        reading: int | None = None
        try:
            if job.output is not None:
                reading, writing = os.pipe()
                waiting.files += [writing]
                with contextlib.suppress(OSError):
                    fcntl.fcntl(reading, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            mark = f"{os.getpid()}.{waiting.number}" if job.whole_tree else None
            process = self._run(job, waiting.files, lock, {_MARK: mark} if mark else {})
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            _close(lock, reading)
            why = str(error)
            if isinstance(error, OSError) and error.errno == errno.ENOEXEC:
                why = (
                    f"{error.filename!r} is neither a program for this machine nor a script whose first line "
                    "names its interpreter, such as #!/bin/sh"
                )
            self._refuse(waiting, why, by_shim=False)
            return
        waiting.close()
        self._children[process.pid] = _Child(
            waiting.number,
            process,
            job.stop_limit_s,
            waiting.deadline,
            lock,
            mark=f"{_MARK}={mark}" if mark else None,
        )
        if job.output is not None and reading is not None:
            self._logger.keep(waiting.number, process.pid, job.output, reading, lock)
        self._report("started", number=waiting.number, pid=process.pid)

    def _run(
        self, job: SupervisedCommand, files: Sequence[int], lock: int | None, more: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        shim = os.getpid()
        limits = [(resource.RLIMIT_NOFILE, self._usual_files)]
        for name, value in job.limits.items():
            which = getattr(resource, name)
            hard = resource.getrlimit(which)[1]
            most = value if hard == resource.RLIM_INFINITY else min(value, hard)
            limits.append((which, (most, most)))

        def become_the_command() -> None:
            self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != shim:
                os._exit(1)
            for which, both in limits:
                resource.setrlimit(which, both)

        return subprocess.Popen(  # noqa: S603 - the user's own command
            list(job.command),
            stdin=subprocess.DEVNULL,
            stdout=files[0] if files else None,
            stderr=files[-1] if files else None,
            cwd=job.folder,
            env={**(os.environ if job.inherits else {}), **job.environment, **more},
            pass_fds=() if lock is None else (lock,),
            start_new_session=True,
            preexec_fn=become_the_command,  # noqa: PLW1509 - this process has one thread
        )

    def _terminate(self, child: _Child, kill_at: float, by_shim: bool) -> None:
        if child.kill_at is None:
            child.by_shim = by_shim
            _signal(child, signal.SIGTERM)
        child.kill_at = min(kill_at, child.kill_at or kill_at)

    def _enforce(self) -> None:
        """Stop and kill jobs by their deadlines and orders."""
        instant = now()
        for child in self._children.values():
            if child.code is not None and child.mark is not None:
                continue  # its group was killed and may be gone: another one may have its id
            if self._alone or instant >= child.deadline - child.stop_limit_s:
                kill_at = min(instant + child.stop_limit_s, child.deadline)
                self._terminate(child, kill_at, by_shim=True)
            if child.kill_at is not None and instant >= min(child.kill_at, child.deadline):
                _signal(child, signal.SIGKILL)

    def _reap(self) -> None:
        """Reap exited processes, and report a command's exit once its group is empty.

        The group is killed before its leader is reaped, so that its id can't belong to another group yet.
        """
        with contextlib.suppress(ChildProcessError):
            while exited := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                child = self._children.get(exited.si_pid)
                if child is not None:
                    _signal(child, signal.SIGKILL)
                _, status = os.waitpid(exited.si_pid, 0)
                if child is not None:
                    child.code = child.process.returncode = os.waitstatus_to_exitcode(status)
                self._logger.has_exited(exited.si_pid, status)
        for pid, child in list(self._children.items()):
            if child.code is not None and _is_empty(pid) and not self._kill_orphans(child.mark):
                del self._children[pid]
                if not self._logger.finish(child.number):
                    _close(child.lock)
                self._report(
                    "exited",
                    number=child.number,
                    code=child.code,
                    error=None,
                    by_shim=child.by_shim,
                )

    def _kill_orphans(self, mark: str | None) -> bool:
        """Kill the children of this process that have a mark; return False if there are none.

        When one ends, its own children become children of this process.
        """
        if mark is None:
            return False
        found = False
        for pid in _own_children():
            if _has_mark(pid, mark):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)  # its id is its own until this process reaps it
                    found = True
        return found

    def _report(self, kind: str, **what: object) -> None:
        self._outbox.append(json.dumps({"is": kind, "at": now(), **what}).encode())

    def _send_reports(self) -> None:
        """Send reports as far as the supervisor takes them: a stopped one must not block the shim."""
        try:
            while self._outbox and not self._alone:
                self._supervisor.send(self._outbox[0])
                self._outbox.popleft()
        except BlockingIOError:
            return
        except OSError:
            self._alone = True


@dataclass(slots=True)
class _Kept:
    """A job's output on its way to files; kept here until the logger confirms that all is written."""

    group: int
    output: Output
    reading: int
    lock: int | None
    keep_sent: bool = False
    finished: bool = False
    finish_sent: bool = False


class _LoggerProcess:
    """The process that writes the jobs' output to files; started for the first job, restarted if it dies.

    The pipes' reading ends stay open here too, so that unread output survives a restart.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._kept: dict[int, _Kept] = {}
        self._not_before = 0.0

    @property
    def is_behind(self) -> bool:
        """True if orders for it wait, or it has to be started."""
        return any(not kept.keep_sent or kept.finished != kept.finish_sent for kept in self._kept.values())

    def keep(self, number: int, group: int, output: Output, reading: int, lock: int | None) -> None:
        """Keep the output of a job, whose process group this is, from now on. This class closes the files."""
        self._kept[number] = _Kept(group, output, reading, lock)

    def finish(self, number: int) -> bool:
        """Write the rest of an ended job's output. Return False if its output is not kept here."""
        if number in self._kept:
            self._kept[number].finished = True
        return number in self._kept

    def step(self) -> None:
        """Start the logger if needed, send it orders as far as it takes them, and read its answers."""
        if self._kept and self._process is None and now() >= self._not_before:
            self._run()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._send_orders(self._socket)
            with contextlib.suppress(OSError):
                self._receive(self._socket)

    def has_exited(self, pid: int, status: int) -> None:
        """Handle the exit of a child of this process, which may have been the logger."""
        if self._process is None or self._process.pid != pid:
            return
        self._process.returncode = os.waitstatus_to_exitcode(status)
        self._process = None
        if self._socket is not None:
            self._selector.unregister(self._socket)
            self._socket.close()
            self._socket = None
        for kept in self._kept.values():
            kept.keep_sent = kept.finish_sent = False

    def _run(self) -> None:
        self._not_before = now() + LOGGER_PAUSE_S
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = [sys.executable, "-I", "-S", str(Path(__file__).with_name("output_logger.py"))]
        with theirs:
            try:
                self._process = subprocess.Popen(  # noqa: S603 - a module of this package
                    [*program, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            except OSError:
                ours.close()
                return
        ours.setblocking(False)
        self._selector.register(ours, selectors.EVENT_READ)
        self._socket = ours

    def _send_orders(self, logger: socket.socket) -> None:
        for number, kept in self._kept.items():
            if not kept.keep_sent:
                order = {"do": "keep", "number": number, "group": kept.group, **asdict(kept.output)}
                files = [kept.reading] if kept.lock is None else [kept.reading, kept.lock]
                socket.send_fds(logger, [json.dumps(order).encode()], files)
                kept.keep_sent = True
            if kept.finished and not kept.finish_sent:
                logger.send(json.dumps({"do": "finish", "number": number}).encode())
                kept.finish_sent = True

    def _receive(self, logger: socket.socket) -> None:
        while message := logger.recv(MAX_MESSAGE_BYTES):
            done = self._kept.pop(json.loads(message)["number"], None)
            if done is not None:
                _close(done.reading, done.lock)


def _close(*files: int | None) -> None:
    for file in files:
        if file is not None:
            os.close(file)


def _lock(path: str | None) -> int | None:
    """Lock a file, and create it if it is missing.

    If another process has removed the file between opening and locking, the lock is taken on a new file.

    Raises:
        BlockingIOError: another process has locked it.
        OSError: it can't be created.
    """
    if path is None:
        return None
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        removed = not is_file_at(Path(path), os.fstat(file))
    except OSError:
        os.close(file)
        raise
    if removed:
        os.close(file)
        return _lock(path)
    return file


def is_file_at(path: Path, status: os.stat_result) -> bool:
    """Return True if a path names the file of this status, and not another one or none."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), status)
    return False


def _signal(child: _Child, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.process.pid, number)


def _is_empty(group: int) -> bool:
    """Return True if no process of the group is left; orphans are children of this subreaper."""
    try:
        os.waitid(os.P_PGID, group, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


def _own_children() -> list[int]:
    """Return the children of this process; none where the kernel does not list them."""
    try:
        listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text("ascii")
    except OSError:
        return []
    return [int(pid) for pid in listed.split()]


def _has_mark(pid: int, mark: str) -> bool:
    """Return True if a process has this entry in its environment; that of another user can't be read."""
    try:
        return mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


@contextlib.contextmanager
def _wake_on_signals() -> Iterator[socket.socket]:
    """Return a socket that becomes readable when a child exits.

    Signals that stop the supervisor do not stop the shim. They are caught, not ignored, since the
    commands would inherit an ignored signal.
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
    """Serve the supervisor at the other end of the socket; the first argument is its file descriptor.

    Further descriptors, such as that of a lock, stay open as long as this process lives.
    """
    file, *held = (int(argument) for argument in arguments)
    for each in held:
        os.set_inheritable(each, False)
    with socket.socket(fileno=file) as supervisor:
        os.set_inheritable(supervisor.fileno(), False)
        SupervisorShim(supervisor).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
