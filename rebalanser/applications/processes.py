"""The processes of the applications that run on one worker (SH-17).

Each application is one command in a process group of its own, under the worker's
:mod:`~rebalanser.runtime.guardian`:

- The worker dies, even by ``kill -9``: every group gets SIGTERM, and SIGKILL after its stop timeout.
- The worker is stopped (SIGSTOP) or stuck: an application of mode ``exclusive`` has a deadline, gets SIGTERM
  its stop timeout before and SIGKILL at the deadline. One of mode ``available`` has none and runs on, and so
  does the keeping of its output (SH-14).
- The guardian dies: everything that it started is killed, and the next start begins a new guardian.

Nothing is decided here: when to start again, to back off or to give up is the business of
:class:`rebalanser.shiva.worker.Worker`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from rebalanser.applications.data_folder import DataFolder
from rebalanser.applications.manifest import Manifest
from rebalanser.errors import InvalidState, RebalanserError
from rebalanser.runtime.clock import SystemClock
from rebalanser.runtime.guarded import GuardedProcesses, Outcome, Started
from rebalanser.runtime.guardian import Job, Output
from rebalanser.shiva.messages import ProcessExited, ProcessStarted
from rebalanser.shiva.types import ApplicationId

ProcessEvent: TypeAlias = ProcessStarted | ProcessExited

INHERITED: Final = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR")
"""What an application gets of its worker's environment, which may hold secrets of the worker's own."""
LOCK_TIMEOUT_S: Final = 30.0
"""How long a start waits for an earlier process of the application to end."""
OWN_HANDS_S: Final = 1.0
"""So long after the stop timeout this process kills by itself: the guardian may have been stopped."""

_log = logging.getLogger("rebalanser.applications")


@dataclass(slots=True)
class _Running:
    """One process that was started, until its exit is told."""

    guarded: GuardedProcesses
    number: int
    stop_timeout_s: float
    pid: int | None = None
    last_resort: threading.Timer | None = None


class ApplicationProcesses:
    """Starts and stops processes of applications and tells what becomes of them. Used from any thread.

    ``tell`` is called with each event, from a thread of its own, and must not block. For each :meth:`start`
    there is one :class:`ProcessExited`, and at most one :class:`ProcessStarted` before it.
    """

    def __init__(self, data: DataFolder, worker: str, tell: Callable[[ProcessEvent], None]) -> None:
        self._data = data
        self._worker = worker
        self._tell = tell
        self._clock = SystemClock()
        self._lock = threading.RLock()
        self._guarded: GuardedProcesses | None = None
        self._running: dict[tuple[ApplicationId, int], _Running] = {}
        self._longest_stop_s = 0.0
        self._closed = False

    @property
    def running(self) -> Mapping[tuple[ApplicationId, int], int]:
        """The process ids of what runs now, which are those of the process groups too, by run."""
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
    ) -> None:
        """Start an application's command in ``folder``, where its files are.

        It waits, at most ``LOCK_TIMEOUT_S``, for an earlier process of the application to end. By
        ``deadline`` (seconds of :class:`~rebalanser.runtime.clock.SystemClock`) it has ended, whatever
        becomes of this process; None lets it run on. ``environment`` comes on top of the manifest's. A start
        that fails is told as :class:`ProcessExited` with its ``error``, and raises nothing.
        """
        key = application, run
        try:
            job = self._job(application, folder, manifest, token, deadline, environment or {})
            with self._lock:
                guarded = self._guardian()
                number = guarded.start(job, lambda outcome: self._hear(key, outcome))
                self._running[key] = _Running(guarded, number, manifest.stop_timeout_s)
                self._longest_stop_s = max(self._longest_stop_s, manifest.stop_timeout_s)
        except (OSError, RebalanserError) as error:
            self._tell(ProcessExited(application, run, None, str(error)))

    def stop(self, application: ApplicationId, run: int) -> None:
        """Send SIGTERM now, and SIGKILL after the manifest's ``stop_timeout_s``; the exit is told.

        What has exited already, or is being stopped, is left as it is.
        """
        with self._lock:
            running = self._running.get((application, run))
            if running is None or running.last_resort is not None:
                return
            running.guarded.stop(running.number, self._clock.now() + running.stop_timeout_s)
            patience_s = running.stop_timeout_s + OWN_HANDS_S
            running.last_resort = threading.Timer(patience_s, running.guarded.kill, (running.number,))
            running.last_resort.name = "rebalanser-last-resort"
            running.last_resort.daemon = True
            running.last_resort.start()

    def extend(self, application: ApplicationId, run: int, deadline: float) -> None:
        """Let a process that has a deadline run until ``deadline``, if that is later."""
        with self._lock:
            running = self._running.get((application, run))
            if running is not None:
                running.guarded.extend(deadline, running.number)

    def close(self) -> None:
        """Stop everything and wait until it has ended. Nothing is told any more. Twice does nothing."""
        with self._lock:
            self._closed = True
            guarded, self._guarded = self._guarded, None
            timeout_s = self._longest_stop_s + OWN_HANDS_S
            ended, self._running = self._running, {}
        for running in ended.values():
            if running.last_resort is not None:
                running.last_resort.cancel()
        if guarded is not None:
            guarded.close(timeout_s)

    def _guardian(self) -> GuardedProcesses:
        """The guardian, started with the first process and again after it was lost.

        Raises:
            InvalidState: there is to be none any more.
        """
        if self._closed:
            raise InvalidState("the worker is stopping")
        if self._guarded is None:
            self._guarded = GuardedProcesses(self._lose, held=(self._data.lock,))
        return self._guarded

    def _lose(self) -> None:
        """The guardian died and everything with it; that has been told by now."""
        _log.error("the guardian of the applications' processes died; all of them were killed")
        with self._lock:
            lost, self._guarded = self._guarded, None
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
    ) -> Job:
        limits = {"RLIMIT_DATA": manifest.limits.memory_bytes, "RLIMIT_NOFILE": manifest.limits.open_files}
        return Job(
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

    def _hear(self, key: tuple[ApplicationId, int], outcome: Outcome) -> None:
        application, run = key
        with self._lock:
            running = self._running.get(key)
            if running is None:
                return
            if isinstance(outcome, Started):
                running.pid = outcome.pid
                event: ProcessEvent = ProcessStarted(application, run)
            else:
                del self._running[key]
                if running.last_resort is not None:
                    running.last_resort.cancel()
                event = ProcessExited(application, run, outcome.code, outcome.error or "", outcome.at)
        self._tell(event)
