"""The processes of the applications that run on one worker (SH-17).

Each application is one command in a process group of its own, under the worker's
``runtime.supervisor_shim``:

- The worker dies, even by ``kill -9``: every group gets SIGTERM, and SIGKILL after its stop timeout.
- The worker is stopped (SIGSTOP) or stuck: an application of mode ``exclusive`` has a deadline, gets SIGTERM
  its stop timeout before and SIGKILL at the deadline. One of mode ``available`` has none and runs on, and so
  does the keeping of its output (SH-14).
- The shim dies: everything that it started is killed, and the next start begins a new shim.
- A health check runs in a thread of its own. If the host refuses the thread, the process is stopped and
  started again as after any exit. A check that is a command also runs under the shim, and ends with the
  process: the exit is reported once both have ended (SH-23).

Nothing is decided here: when to start again, to back off or to give up is the business of
``rebalanser.core.shiva.worker.Worker``.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeAlias
from urllib.parse import urlsplit

from rebalanser.core.shiva.messages import HealthChecked, ProcessExited, ProcessStarted
from rebalanser.core.shiva.types import ApplicationId
from rebalanser.errors import InvalidState, RebalanserError
from rebalanser.runtime.clock import SystemClock
from rebalanser.runtime.shim_client import CommandStarted, Exited, Outcome, ShimClient
from rebalanser.runtime.supervisor_shim import Output, SupervisedCommand
from rebalanser.shiva.data_folder import DataFolder
from rebalanser.shiva.manifest import HealthCheck, Manifest, address_of

ProcessEvent: TypeAlias = ProcessStarted | ProcessExited | HealthChecked

INHERITED: Final = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR")
"""Variables that an application inherits from its worker; others may hold secrets of the worker."""
LOCK_TIMEOUT_S: Final = 30.0
"""Seconds that a start waits for an earlier process of the application to end."""
OWN_HANDS_S: Final = 1.0
"""Seconds after the stop timeout at which this process kills by itself, if the shim does not."""
EAGER_INTERVAL_S: Final = 1.0
"""Maximum seconds between checks of a process that has passed none yet, within its grace period."""
_NOWHERE: Final = Output(path=os.devnull, file_bytes=0, files=1)
"""Output of a check: by it the shim's logger knows the check, and kills what outlives the shim."""
_LOOK_S: Final = 0.1
_STATUS_LINE_BYTES: Final = 1024
_HTTP_PORT: Final = 80

_log = logging.getLogger("rebalanser.applications")


@dataclass(slots=True)
class _Running:
    """One process that was started, until its exit is reported."""

    guarded: ShimClient
    number: int
    job: SupervisedCommand
    pid: int | None = None
    last_resort: threading.Timer | None = None
    ends: threading.Event = field(default_factory=threading.Event)
    """Set once it has ended or is to end: it is checked no more."""
    check: int | None = None
    """The job of a health check that is under way."""
    exited: ProcessExited | None = None
    """Its exit, which waits for the end of that check."""


class ApplicationProcesses:
    """Starts and stops processes of applications, and reports what happens to them. For any thread.

    ``tell`` is called with each event, from a thread of its own, and must not block. For each ``start``
    there is one ``ProcessExited``, and at most one ``ProcessStarted`` before it. A process with a
    health check has a ``HealthChecked`` for each check from its start until it ends.
    """

    def __init__(self, data: DataFolder, worker: str, tell: Callable[[ProcessEvent], None]) -> None:
        self._data = data
        self._worker = worker
        self._tell = tell
        self._clock = SystemClock()
        self._lock = threading.RLock()
        self._shim: ShimClient | None = None
        self._running: dict[tuple[ApplicationId, int], _Running] = {}
        self._longest_stop_s = 0.0
        self._closed = False

    @property
    def running(self) -> Mapping[tuple[ApplicationId, int], int]:
        """Process ids of what runs now, by run; they are those of the process groups too."""
        with self._lock:
            return {key: run.pid for key, run in self._running.items() if run.pid is not None}

    def start(
        self,
        application: ApplicationId,
        run: int,
        folder: Path,
        manifest: Manifest,
        token: int,
        deadline: float | None = None,
        environment: Mapping[str, str] | None = None,
        replicas: int = 1,
    ) -> None:
        """Start an application's command in ``folder``, where its files are.

        It waits, at most ``LOCK_TIMEOUT_S``, for an earlier process of the application to end. By
        ``deadline`` (seconds of ``SystemClock``) it has ended, whatever happens to this process; None is no
        deadline. ``environment`` is added to the manifest's, and ``replicas`` is the number of the
        application's replicas, for its environment (SH-28). A start that fails is reported as
        ``ProcessExited`` with its ``error``, and raises nothing.
        """
        key = application, run
        try:
            job = self._job(application, folder, manifest, token, deadline, environment or {}, replicas)
            with self._lock:
                guarded = self._opened_shim()
                number = guarded.start(job, lambda outcome: self._hear(key, outcome, manifest.health_check))
                self._running[key] = _Running(guarded, number, job)
                self._longest_stop_s = max(self._longest_stop_s, manifest.stop_timeout_s)
        except (OSError, RebalanserError) as error:
            self._tell(ProcessExited(application, run, None, str(error)))

    def stop(self, application: ApplicationId, run: int) -> None:
        """Send SIGTERM now, and SIGKILL after the manifest's ``stop_timeout_s``; the exit is reported.

        No-op if it has exited already, or is being stopped.
        """
        with self._lock:
            running = self._running.get((application, run))
            if running is None or running.last_resort is not None:
                return
            running.ends.set()
            running.guarded.stop(running.number, self._clock.now() + running.job.stop_limit_s)
            patience_s = running.job.stop_limit_s + OWN_HANDS_S
            running.last_resort = threading.Timer(patience_s, running.guarded.kill, (running.number,))
            running.last_resort.name = "rebalanser-last-resort"
            running.last_resort.daemon = True
            _begin(running.last_resort)

    def extend(self, application: ApplicationId, run: int, deadline: float) -> None:
        """Let a process that has a deadline run until ``deadline``, if that is later."""
        with self._lock:
            running = self._running.get((application, run))
            if running is not None:
                running.guarded.extend(deadline, running.number)
                if running.job.deadline is not None:
                    running.job = replace(running.job, deadline=max(deadline, running.job.deadline))

    def close(self) -> None:
        """Stop everything, wait until it has ended, and report nothing more. Closing twice does nothing."""
        with self._lock:
            self._closed = True
            guarded, self._shim = self._shim, None
            timeout_s = self._longest_stop_s + OWN_HANDS_S
            ended, self._running = self._running, {}
        for running in ended.values():
            running.ends.set()
            if running.last_resort is not None:
                running.last_resort.cancel()
        if guarded is not None:
            guarded.close(timeout_s)

    def _opened_shim(self) -> ShimClient:
        """Return the shim, started with the first process and again after it was lost.

        Raises:
            InvalidState: it is closed.
        """
        if self._closed:
            raise InvalidState("the worker is stopping")
        if self._shim is None:
            self._shim = ShimClient(self._lose, held=(self._data.lock,))
        return self._shim

    def _lose(self) -> None:
        """Forget the shim, which died with all that it started; their exits have been reported."""
        _log.error(
            "the shim of the applications' processes died; all of them were killed",
            extra={"action": "shim_died"},
        )
        with self._lock:
            lost, self._shim = self._shim, None
        if lost is not None:
            lost.close()

    def _job(
        self,
        application: ApplicationId,
        folder: Path,
        manifest: Manifest,
        token: int,
        deadline: float | None,
        environment: Mapping[str, str],
        replicas: int,
    ) -> SupervisedCommand:
        limits = {"RLIMIT_DATA": manifest.limits.memory_bytes, "RLIMIT_NOFILE": manifest.limits.open_files}
        return SupervisedCommand(
            command=manifest.command,
            stop_limit_s=manifest.stop_timeout_s,
            deadline=deadline,
            environment={
                **{name: os.environ[name] for name in INHERITED if name in os.environ},
                **manifest.environment,
                **environment,
                "SHIVA_TENANT": application.tenant,
                "SHIVA_CHANNEL": application.channel,
                "SHIVA_APPLICATION": application.application,
                "SHIVA_REPLICA": str(application.replica),
                "SHIVA_REPLICAS": str(replicas),
                "SHIVA_WORKER": self._worker,
                "SHIVA_TOKEN": str(token),
                "SHIVA_DATA": str(self._data.data_of(application)),
            },
            inherits=False,
            folder=str(folder),
            limits={name: value for name, value in limits.items() if value is not None},
            lock=str(self._data.lock_of(application)),
            lock_timeout_s=LOCK_TIMEOUT_S,
            output=Output(
                path=str(self._data.output_of(application)),
                file_bytes=manifest.limits.log_bytes,
                files=manifest.limits.log_files,
            ),
        )

    def _hear(
        self, key: tuple[ApplicationId, int], outcome: Outcome, health_check: HealthCheck | None
    ) -> None:
        application, run = key
        with self._lock:
            running = self._running.get(key)
            if running is None:
                return
            if isinstance(outcome, CommandStarted):
                running.pid = outcome.pid
                event: ProcessEvent = ProcessStarted(application, run)
            else:
                running.pid = None
                running.ends.set()
                if running.last_resort is not None:
                    running.last_resort.cancel()
                event = ProcessExited(application, run, outcome.code, outcome.error or "", outcome.at)
                if running.check is not None:
                    running.exited = event
                    return
                del self._running[key]
        self._tell(event)
        if isinstance(outcome, CommandStarted) and health_check is not None:
            arguments = key, running, health_check
            checking = threading.Thread(
                target=self._check_health, args=arguments, name="rebalanser-health", daemon=True
            )
            if not _begin(checking):
                running.guarded.stop(running.number, self._clock.now() + running.job.stop_limit_s)

    def _check_health(self, key: tuple[ApplicationId, int], running: _Running, check: HealthCheck) -> None:
        """Check a process until it ends, in a thread of its own."""
        grace_ends = time.monotonic() + check.grace_period_s
        passed = False
        pause_s = min(check.interval_s, EAGER_INTERVAL_S)
        while not running.ends.wait(pause_s):
            error = self._failure_of(key, running, check)
            if running.ends.is_set():
                return
            self._tell(HealthChecked(*key, error))
            passed = passed or not error
            eager = not passed and time.monotonic() < grace_ends
            pause_s = min(check.interval_s, EAGER_INTERVAL_S) if eager else check.interval_s

    def _failure_of(self, key: tuple[ApplicationId, int], running: _Running, check: HealthCheck) -> str:
        """Carry out a check once. Return why it failed; nothing if it passed."""
        try:
            if check.http is not None:
                return _http_failure(check.http, check.timeout_s)
            if check.tcp is not None:
                _connect(f"//{check.tcp}", check.timeout_s).close()
                return ""
            return self._command_failure(key, running, check)
        except TimeoutError:
            return f"no answer within {check.timeout_s:g} s"
        except (OSError, RebalanserError) as error:
            return str(error)

    def _command_failure(self, key: tuple[ApplicationId, int], running: _Running, check: HealthCheck) -> str:
        """Run a check that is a command. It ends with the process, and before its deadline."""
        outcomes: list[Exited] = []
        ended = threading.Event()

        def hear(outcome: Outcome) -> None:
            if isinstance(outcome, Exited):
                outcomes.append(outcome)
                ended.set()
                self._check_ended(key, running)

        with self._lock:
            if running.ends.is_set():
                return ""
            number = self._start_check(running, check, hear)
            running.check = number
        while not ended.wait(_LOOK_S):
            with self._lock:
                if self._closed:
                    return ""
                if running.ends.is_set() and not ended.is_set():
                    running.guarded.stop(number, self._clock.now())
                    running.guarded.kill(number)
        [outcome] = outcomes
        if outcome.by_shim:
            raise TimeoutError
        if outcome.code is None:
            return f"could not be started: {outcome.error}"
        if outcome.code == 0:
            return ""
        return f"killed by signal {-outcome.code}" if outcome.code < 0 else f"exit code {outcome.code}"

    def _start_check(self, running: _Running, check: HealthCheck, hear: Callable[[Outcome], None]) -> int:
        deadline = self._clock.now() + check.timeout_s
        if running.job.deadline is not None:
            deadline = min(deadline, running.job.deadline)
        job = replace(
            running.job,
            command=check.exec or (),
            stop_limit_s=0.0,
            deadline=deadline,
            lock=None,
            whole_tree=True,
            output=_NOWHERE,
        )
        return running.guarded.start(job, hear)

    def _check_ended(self, key: tuple[ApplicationId, int], running: _Running) -> None:
        """Report the exit of the process if it waited for the end of this check."""
        with self._lock:
            running.check = None
            event = running.exited
            if event is None or self._running.get(key) is not running:
                return
            del self._running[key]
        self._tell(event)


def _begin(thread: threading.Thread) -> bool:
    """Start a thread. Return False on a host at its limit of threads, which stops nothing else."""
    try:
        thread.start()
    except RuntimeError as error:
        _log.error("%s: %s", thread.name, error, extra={"action": "thread_not_started"})
        return False
    return True


def _connect(url: str, timeout_s: float) -> socket.socket:
    host, port = address_of(url)
    return socket.create_connection((host or "", port or _HTTP_PORT), timeout_s)


def _http_failure(url: str, timeout_s: float) -> str:
    """Request a URL, and read no further than the status line, however slowly that comes.

    Raises:
        TimeoutError: not within ``timeout_s``.
        OSError: the server can't be reached.
    """
    ends = time.monotonic() + timeout_s
    parts = urlsplit(url)
    target = f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}"
    answer = b""
    with _connect(url, timeout_s) as connection:
        request = f"GET {target} HTTP/1.1\r\nHost: {parts.netloc}\r\nUser-Agent: rebalanser\r\n"
        connection.sendall(f"{request}Connection: close\r\n\r\n".encode())
        while b"\n" not in answer and len(answer) < _STATUS_LINE_BYTES:
            left_s = ends - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            connection.settimeout(left_s)
            part = connection.recv(_STATUS_LINE_BYTES)
            if not part:
                break
            answer += part
    status = re.match(rb"HTTP/1\.[01] ([1-5]\d\d)\b", answer)
    if status is None:
        return "the answer is not HTTP"
    code = int(status[1])
    return "" if 200 <= code < 400 else f"HTTP status {code}"
