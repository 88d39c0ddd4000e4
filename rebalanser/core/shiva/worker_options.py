"""Options of a worker, and the part of a leader's deadline that it can use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rebalanser.core.allocation import Capacity
from rebalanser.core.shiva.types import Tag, check_part
from rebalanser.errors import InvalidSettings

_MAX_DRIFT_RATIO: Final = 0.5
_APPLICATIONS_PER_INTERVAL: Final = 500
_APPLICATIONS_PER_SUSTAINED_INTERVAL: Final = 100


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Options of a worker.

    Raises:
        InvalidSettings: a number is out of its range, or a text is given in place of a set of tags.
        InvalidName: a tag is no valid name.
    """

    tags: frozenset[Tag] = frozenset()
    """Tags of the worker; an application runs only on workers that have all of its tags (SH-12)."""
    capacity: Capacity | None = None
    """Processors and memory that its applications may request together (SH-27). Default: no limit."""
    clock_drift_ratio: float = 0.01
    """Ratio by which the leader's clock may run faster than the worker's: 0.01 is a second in 100 s."""
    safety_margin_s: float = 1.0
    """Seconds before the leader's deadline by which an exclusive application has ended (SH-14)."""
    min_pong_interval_s: float = 0.1
    """Minimum seconds between two pongs that only report changes, of up to 500 applications; grows with their
    number. While changes go on, such as many starts, it grows from 100 applications on."""
    keep_files_s: float = 3600.0
    """Seconds that unpacked files stay after the last document that named this worker for them (SH-4)."""

    def __post_init__(self) -> None:
        """Refuse options with which no deadline can be kept."""
        if not 0 <= self.clock_drift_ratio < _MAX_DRIFT_RATIO:
            raise InvalidSettings(
                f"clock_drift_ratio {self.clock_drift_ratio:g} must be at least 0 and below "
                f"{_MAX_DRIFT_RATIO:g}"
            )
        if not 0 <= self.safety_margin_s < float("inf"):
            raise InvalidSettings(f"safety_margin_s {self.safety_margin_s:g} must be a time of at least 0 s")
        for name in ("min_pong_interval_s", "keep_files_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InvalidSettings(f"{name} {getattr(self, name):g} must be a time of at least 0 s")
        if isinstance(self.tags, str):
            raise InvalidSettings(f"tags {self.tags!r} must be a set of tags, such as frozenset({{'gpu'}})")
        for tag in self.tags:
            check_part(tag, "tag")

    def pong_interval_s(self, applications: int) -> float:
        """Return the minimum seconds between two pongs of N applications."""
        return self.min_pong_interval_s * max(1.0, applications / _APPLICATIONS_PER_INTERVAL)

    def sustained_pong_interval_s(self, applications: int) -> float:
        """Return the mean seconds between pongs of N applications while changes go on.

        Each pong has all applications. So N starts, one after the other, cost in proportion to N.
        """
        return self.min_pong_interval_s * max(1.0, applications / _APPLICATIONS_PER_SUSTAINED_INTERVAL)

    def access_s(self, deadline_s: float) -> float:
        """Return for how long after its pong an exclusive process may exist: less clock drift and margin."""
        return deadline_s * (1 - self.clock_drift_ratio) - self.safety_margin_s

    def check_deadline(self, deadline_s: float, round_s: float, stop_timeout_s: float) -> None:
        """Refuse a deadline that passes between two rounds, so that exclusive applications could not run on.

        A pong is answered by the ping of the next round, and a process is stopped ``stop_timeout_s`` before
        its deadline: what is left must outlast two rounds, one for the answer and one until the next.

        Raises:
            InvalidSettings: with the numbers.
        """
        left_s = self.access_s(deadline_s) - stop_timeout_s
        if left_s <= 2 * round_s:
            remedy = "a longer deadline_s, which follows the rounds unless it is set"
            if self.access_s(deadline_s) > 2 * round_s:
                remedy += ", or a shorter stop_timeout_s in the manifest"
            raise InvalidSettings(
                f"exclusive applications would be stopped between two rounds: deadline_s {deadline_s:g} less "
                f"clock drift {deadline_s * self.clock_drift_ratio:g}, safety_margin_s "
                f"{self.safety_margin_s:g} and the stop timeout {stop_timeout_s:g} leaves {left_s:g} s, "
                f"and two rounds take {2 * round_s:g} s: {remedy}"
            )


DEFAULT_WORKER_OPTIONS: Final = WorkerOptions()
