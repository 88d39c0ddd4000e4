"""One application on one worker: its state, its process and its restarts."""

from __future__ import annotations

from collections import deque
from typing import Final

from rebalanser.core.shiva.records import RunReport
from rebalanser.core.shiva.run_states import RUN, RunTrigger
from rebalanser.core.shiva.types import ApplicationId, CommandId, Mode, RestartPolicy, RunState

MAX_REASON_CHARS: Final = 500
"""Maximum characters of a reason in a pong: those of many applications must fit into one record."""


class Run:
    """One command of an application, while a document names this worker for it or a process of it exists."""

    def __init__(
        self,
        application: ApplicationId,
        command: CommandId,
        mode: Mode,
        named: int = -1,
        since: float = 0.0,
    ) -> None:
        self.application = application
        self.command = command
        self.mode = mode
        self.named = named
        """Fencing token of its assignment, or of the one under which it failed."""
        self.since = since
        """Time at which it was made (monotonic seconds)."""
        self.state = RUN.first
        self.process: int | None = None
        """Number of the process that exists or may exist."""
        self.token: int | None = None
        """Fencing token of its last process."""
        self.restart_at = 0.0
        """Time of the next start (monotonic seconds), while it backs off."""
        self.reason = ""
        self.policy = RestartPolicy()
        """From its manifest, once its files are stored."""
        self._started_at = 0.0
        self._failures = 0
        self._unhealthy = ""
        """Why its process is being stopped, if its health check is the reason."""
        self._restarts = 0
        self._recent: deque[float] = deque()

    @property
    def exclusive(self) -> bool:
        """True if it needs a leader's permission."""
        return self.mode is Mode.EXCLUSIVE

    @property
    def report(self) -> RunReport:
        """Report for a pong."""
        return RunReport(self.command, self.state, self._restarts, self.reason)

    def _move(self, trigger: RunTrigger, reason: str = "") -> None:
        self.state = RUN.move(self.state, trigger)
        self.reason = reason[:MAX_REASON_CHARS]

    def wait(self, reason: str) -> None:
        """Note that it may not start yet, and why."""
        self.reason = reason

    def start(self, process: int, token: int) -> None:
        """Note that a process is about to be started with this fencing token."""
        self._move(RunTrigger.START)
        self.process = process
        self.token = token
        self._failures, self._unhealthy = 0, ""

    def refused(self, reason: str) -> None:
        """Note that its files cannot be used (SH-16)."""
        self._move(RunTrigger.REFUSED, reason)

    def started(self, now: float) -> None:
        """Note that its process runs; with a health check it counts as running once that passes (SH-23)."""
        self._started_at = now
        if self.policy.health is None or self.state is RunState.STOPPING:
            self._move(RunTrigger.STARTED, self.reason)

    def checked(self, error: str, now: float) -> bool:
        """Note a health check, failed with ``error``; True if the process is to be stopped (SH-23)."""
        health = self.policy.health
        if health is None or self.state not in {RunState.STARTING, RunState.RUNNING}:
            return False
        starting = self.state is RunState.STARTING
        if not error:
            self._failures = 0
            if starting:
                self._move(RunTrigger.STARTED)
            return False
        if starting:
            self.reason = f"its health check has not passed yet: {error}"[:MAX_REASON_CHARS]
            if now < self._started_at + health.grace_period_s:
                return False
        self._failures += 1
        if self._failures < health.failure_threshold:
            return False
        self._unhealthy = f"its health check failed {self._failures} times in a row: {error}"
        self._move(RunTrigger.UNHEALTHY, self._unhealthy)
        return True

    def stop(self, reason: str) -> None:
        """Note that its process is being stopped."""
        self._move(RunTrigger.STOP, reason)

    def elapsed(self) -> None:
        """Note that the delay before its restart is over."""
        self._move(RunTrigger.ELAPSED)

    def exited(self, code: int | None, error: str, now: float) -> None:
        """Note that its process and its group have ended, or were not started (``error``) (SH-17)."""
        self.process = None
        if self.state is RunState.STOPPING and not self._unhealthy:
            self._move(RunTrigger.ENDED, self.reason)
            return
        how = self._unhealthy or _how(code, error)
        restart = self.policy.restart
        by_itself = code is not None and not self._unhealthy
        if by_itself and (restart == "never" or (restart == "on_failure" and code == 0)):
            self._move(RunTrigger.DONE, how)
            return
        while self._recent and self._recent[0] <= now - self.policy.restart_window_s:
            self._recent.popleft()
        if restart == "never" or len(self._recent) >= self.policy.max_restarts:
            self._move(RunTrigger.GIVEN_UP, f"{how}, after {self._counted} within the restart window")
            return
        self.restart_at = now + self._delay_s
        self._recent.append(now)
        self._restarts += 1
        self._move(RunTrigger.CRASHED, how)

    @property
    def _delay_s(self) -> float:
        """Seconds before the next start: they double with each restart within the window."""
        doubled = self.policy.backoff_initial_s * 2.0 ** min(len(self._recent), 64)
        return min(doubled, self.policy.backoff_max_s)

    @property
    def _counted(self) -> str:
        return f"{len(self._recent)} restart{'' if len(self._recent) == 1 else 's'}"


def _how(code: int | None, error: str) -> str:
    if code is None:
        return f"could not be started: {error}"
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
