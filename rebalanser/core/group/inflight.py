"""Commands under way, by lane, and the backoff of lanes whose command failed."""

from __future__ import annotations

from rebalanser.core.group.messages import Command, Lane
from rebalanser.errors import InternalError


class Inflight:
    """At most one command under way in each lane; a failure holds its lane back for a growing time."""

    def __init__(self, retry_initial_s: float, retry_max_s: float) -> None:
        self._retry_initial_s = retry_initial_s
        self._retry_max_s = retry_max_s
        self._under_way: dict[Lane, Command] = {}
        self._failures: dict[Lane, int] = {}
        self._retry_at: dict[Lane, float] = {}

    def under_way(self, lane: Lane) -> Command | None:
        """The command that the lane waits for."""
        return self._under_way.get(lane)

    def ready(self, lane: Lane, now: float) -> bool:
        """True if a command may be sent now."""
        return lane not in self._under_way and now >= self._retry_at.get(lane, now)

    def send(self, command: Command) -> None:
        """Record that a command is under way."""
        if command.lane in self._under_way:
            raise InternalError(f"{command!r} would overtake {self._under_way[command.lane]!r}")
        self._under_way[command.lane] = command

    def answered(self, command: Command) -> None:
        """Record that a command has ended."""
        sent = self._under_way.pop(command.lane, None)
        if sent is not command and sent != command:
            raise InternalError(f"an answer to {command!r}, which was not under way")

    def failed(self, lane: Lane, now: float) -> None:
        """Hold the lane back after a failure, twice as long as after the one before."""
        failures = self._failures.get(lane, 0)
        self._failures[lane] = failures + 1
        self._retry_at[lane] = now + min(self._retry_initial_s * 2 ** min(failures, 32), self._retry_max_s)

    def succeeded(self, lane: Lane) -> None:
        """Forget earlier failures of the lane."""
        self._failures.pop(lane, None)
        self._retry_at.pop(lane, None)

    def retries(self, now: float) -> list[float]:
        """Return when the lanes that are held back become ready."""
        return [at for lane, at in self._retry_at.items() if lane not in self._under_way and at > now]
