"""The workers that a leader knows, by their pongs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from rebalanser.shiva.records import Heard, Pong
from rebalanser.shiva.safeguards import Safeguards
from rebalanser.shiva.types import Incarnation, WorkerEntry, WorkerId


class Verdict(Enum):
    """What a pong means for the worker whose id it bears."""

    STALE = auto()
    """An earlier incarnation's, or one that was read before."""
    REFUSED = auto()
    """Another folder's process claims the id of a worker that is known."""
    ADDED = auto()
    SUCCEEDED = auto()
    """A new process of the same folder."""
    CHANGED = auto()
    """The same process, on another host or with other tags."""
    HEARD = auto()
    LEFT = auto()


@dataclass(frozen=True, slots=True)
class _LastPong:
    number: int
    sequence: int
    at: float


class Members:
    """Which workers are known, and when each was heard."""

    def __init__(self, guards: Safeguards, missed_rounds: int) -> None:
        self.entries: dict[WorkerId, WorkerEntry] = {}
        self.changed = False
        self._guards = guards
        self._missed_rounds = missed_rounds
        self._rounds = 0
        self._took_over_at = 0.0
        self._heard_in: dict[WorkerId, int] = {}
        self._answered: dict[WorkerId, Heard] = {}
        self._last: dict[tuple[WorkerId, str], _LastPong] = {}
        self._refused: dict[WorkerId, Incarnation] = {}

    def take_over(self, workers: Mapping[WorkerId, WorkerEntry], at: float) -> None:
        """Go on from the workers of a predecessor's document; nobody has been heard since ``at``."""
        self.entries = dict(workers)
        self._heard_in = dict.fromkeys(workers, 0)
        self._took_over_at = at

    def incarnation(self, worker: WorkerId) -> Incarnation | None:
        """Which process is behind a known worker's id."""
        entry = self.entries.get(worker)
        return entry.incarnation if entry else None

    def heard_at(self, worker: WorkerId, incarnation: Incarnation) -> float:
        """When (monotonic seconds) a leader can have read the last pong of this process at the latest."""
        last = self._last.get((worker, incarnation.lineage))
        if last is None or last.number != incarnation.number:
            return self._took_over_at
        return max(last.at, self._took_over_at)

    def judge(self, pong: Pong) -> Verdict:
        """What a pong means."""
        last = self._last.get((pong.worker, pong.incarnation.lineage))
        if last and (pong.incarnation.number, pong.sequence) <= (last.number, last.sequence):
            return Verdict.STALE
        known = self.entries.get(pong.worker)
        if known and self._guards.is_impostor(pong.incarnation, known.incarnation):
            return Verdict.REFUSED
        if known and known.incarnation.succeeds(pong.incarnation):
            return Verdict.STALE
        if pong.leaving:
            return Verdict.LEFT
        if known is None:
            return Verdict.ADDED
        if known.incarnation != pong.incarnation:
            return Verdict.SUCCEEDED
        return Verdict.HEARD if known == _entry(pong) else Verdict.CHANGED

    def is_answered(self, pong: Pong) -> bool:
        """Whether a ping can have told this process that it was heard."""
        heard = self._answered.get(pong.worker)
        return heard is not None and heard.incarnation == pong.incarnation

    def hear(self, pong: Pong, at: float) -> None:
        """Take in a pong that is neither stale nor refused."""
        worker = pong.worker
        self._last[worker, pong.incarnation.lineage] = _LastPong(pong.incarnation.number, pong.sequence, at)
        if pong.leaving:
            return
        entry = _entry(pong)
        if self.entries.get(worker) != entry:
            self.entries[worker] = entry
            self.changed = True
        self._heard_in[worker] = self._rounds
        self._answered[worker] = Heard(pong.incarnation, pong.sequence)

    def refuse(self, pong: Pong) -> bool:
        """Note an impostor. Whether it is news."""
        if self._refused.get(pong.worker) == pong.incarnation:
            return False
        self._refused[pong.worker] = pong.incarnation
        return True

    def remove(self, worker: WorkerId) -> None:
        """Know a worker no longer; when it was heard is remembered."""
        if self.entries.pop(worker, None) is not None:
            self.changed = True
        for about in (self._heard_in, self._answered, self._refused):
            about.pop(worker, None)

    def begin_round(self, overslept: bool) -> list[WorkerId]:
        """Count a round, and say who has been silent for too long (SH-8).

        A leader that overslept has pongs that it has not read yet: that round says nothing of anybody.
        """
        silent: list[WorkerId] = []
        if overslept:
            self._heard_in = dict.fromkeys(self._heard_in, self._rounds)
        else:
            silent = [
                worker
                for worker, heard_in in self._heard_in.items()
                if self._guards.is_silent(self._rounds - heard_in, self._missed_rounds)
            ]
        self._rounds += 1
        return silent

    @property
    def heard(self) -> dict[WorkerId, Heard]:
        """The last pong of each known worker that this leader has read."""
        return dict(self._answered)

    def forget(self, before: float, needed: Collection[tuple[WorkerId, Incarnation]]) -> None:
        """Forget the pongs before ``before`` of workers that are not known and not waited for."""
        lineages = {(worker, incarnation.lineage) for worker, incarnation in needed}
        lineages |= {(worker, entry.incarnation.lineage) for worker, entry in self.entries.items()}
        self._last = {key: last for key, last in self._last.items() if last.at >= before or key in lineages}


def _entry(pong: Pong) -> WorkerEntry:
    return WorkerEntry(pong.incarnation, pong.tags, pong.host)
