"""Membership: the workers that a leader knows from their pongs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from rebalanser.core.shiva.records import Heard, Pong
from rebalanser.core.shiva.safeguards import Safeguards
from rebalanser.core.shiva.types import Epoch, Incarnation, WorkerEntry, WorkerId


class PongMeaning(Enum):
    """Meaning of a pong for the worker whose id it has."""

    STALE = auto()
    """An earlier incarnation's, or one that was read before."""
    STALLED = auto()
    """A process that was removed as it followed no assignment, and still follows none."""
    REFUSED = auto()
    """Another folder's process claims the id of a worker that is known."""
    ADDED = auto()
    SUCCEEDED = auto()
    """A new process of the same folder."""
    CHANGED = auto()
    """The same process, on another host, with other tags or another capacity."""
    HEARD = auto()
    LEFT = auto()


@dataclass(frozen=True, slots=True)
class _LastPong:
    number: int
    sequence: int
    at: float


@dataclass(frozen=True, slots=True)
class _Behind:
    seen: Epoch | None
    since: float


class Members:
    """The known workers, and when each was heard."""

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
        self._seen: dict[WorkerId, Epoch | None] = {}
        self._behind: dict[WorkerId, _Behind] = {}
        self._stalled: dict[WorkerId, tuple[Incarnation, Epoch]] = {}
        self._reads_changes: set[WorkerId] = set()
        self._without_replicas: set[WorkerId] = set()

    def take_over(self, workers: Mapping[WorkerId, WorkerEntry], at: float) -> None:
        """Go on from the workers of a predecessor's document; none has been heard since ``at``."""
        self.entries = dict(workers)
        self._heard_in = dict.fromkeys(workers, 0)
        self._took_over_at = at

    def incarnation(self, worker: WorkerId) -> Incarnation | None:
        """Return the process behind a known worker's id."""
        entry = self.entries.get(worker)
        return entry.incarnation if entry else None

    def heard_at(self, worker: WorkerId, incarnation: Incarnation) -> float:
        """Return when (monotonic seconds) a leader can last have read a pong of this process."""
        last = self._last.get((worker, incarnation.lineage))
        if last is None or last.number != incarnation.number:
            return self._took_over_at
        return max(last.at, self._took_over_at)

    def judge(self, pong: Pong) -> PongMeaning:
        """Return the meaning of a pong."""
        last = self._last.get((pong.worker, pong.incarnation.lineage))
        if last and (pong.incarnation.number, pong.sequence) <= (last.number, last.sequence):
            return PongMeaning.STALE
        known = self.entries.get(pong.worker)
        if known and self._guards.is_impostor(pong.incarnation, known.incarnation):
            return PongMeaning.REFUSED
        if known and known.incarnation.succeeds(pong.incarnation):
            return PongMeaning.STALE
        if pong.leaving:
            return PongMeaning.LEFT
        if known is None:
            return PongMeaning.STALLED if self._is_stalled(pong) else PongMeaning.ADDED
        if known.incarnation != pong.incarnation:
            return PongMeaning.SUCCEEDED
        return PongMeaning.HEARD if known == _entry(pong) else PongMeaning.CHANGED

    def _is_stalled(self, pong: Pong) -> bool:
        incarnation, epoch = self._stalled.get(pong.worker, (None, None))
        return incarnation == pong.incarnation and epoch is not None and not _has_followed(pong.seen, epoch)

    def is_answered(self, pong: Pong) -> bool:
        """True if a ping may have answered a pong of this process."""
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
        self._seen[worker] = pong.seen
        self._stalled.pop(worker, None)
        (self._reads_changes.add if pong.reads_changes else self._reads_changes.discard)(worker)
        (self._without_replicas.discard if pong.reads_replicas else self._without_replicas.add)(worker)
        self._answered[worker] = Heard(pong.incarnation, pong.sequence)

    def refuse(self, pong: Pong) -> bool:
        """Note an impostor; True if it was not noted before."""
        if self._refused.get(pong.worker) == pong.incarnation:
            return False
        self._refused[pong.worker] = pong.incarnation
        return True

    def remove(self, worker: WorkerId) -> None:
        """Remove a worker; the time at which it was heard is kept."""
        if self.entries.pop(worker, None) is not None:
            self.changed = True
        for about in (self._heard_in, self._answered, self._refused, self._seen, self._behind):
            about.pop(worker, None)
        self._reads_changes.discard(worker)
        self._without_replicas.discard(worker)

    @property
    def all_read_changes(self) -> bool:
        """True if every known worker has said to this leader that it reads changes (SH-24)."""
        return self._reads_changes >= self.entries.keys()

    @property
    def without_replicas(self) -> list[WorkerId]:
        """Known workers that have said to this leader that they refuse documents with replicas (SH-28)."""
        return sorted(self._without_replicas)

    def remove_stalled(self, worker: WorkerId, until: Epoch) -> None:
        """Remove a worker, and ignore its pongs until it follows the document ``until``.

        So no ping answers it either: what it may run exclusively ends as if it were silent (SH-14).
        """
        incarnation = self.incarnation(worker)
        self.remove(worker)
        if incarnation is not None:
            self._stalled[worker] = incarnation, until

    def find_behind(self, required: Epoch | None, now: float, overslept: bool) -> list[WorkerId]:
        """Find the workers that answer and do not follow ``required``; return those not found before.

        A worker that follows slowly has not stalled: its time counts anew. A late round finds none, as pongs
        may be waiting unread.
        """
        if overslept or required is None:
            self._behind.clear()
            return []
        found: list[WorkerId] = []
        for worker, seen in self._seen.items():
            before = self._behind.get(worker)
            if _has_followed(seen, required):
                self._behind.pop(worker, None)
            elif before is None or before.seen != seen:
                self._behind[worker] = _Behind(seen, now)
                found += [worker] if before is None else []
        return found

    def stand_still(self, now: float) -> bool:
        """True if a worker that was found in an earlier round is still stalled."""
        return any(behind.since < now for behind in self._behind.values())

    def seen(self, worker: WorkerId) -> Epoch | None:
        """Return the last document that a known worker has reported to follow."""
        return self._seen.get(worker)

    def stalled(self, now: float, limit_s: float) -> list[WorkerId]:
        """Return the workers that have been stalled for ``limit_s`` seconds."""
        return [worker for worker, behind in self._behind.items() if now - behind.since >= limit_s]

    def begin_round(self, overslept: bool) -> list[WorkerId]:
        """Count a round; return the workers that have been silent for too long (SH-8).

        A late round counts for no worker, as pongs may be waiting unread.
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
        """Last pong of each known worker that this leader has read."""
        return dict(self._answered)

    def forget(self, before: float, needed: Collection[tuple[WorkerId, Incarnation]]) -> None:
        """Forget the pongs before ``before`` of workers that are neither known nor waited for."""
        lineages = {(worker, incarnation.lineage) for worker, incarnation in needed}
        lineages |= {(worker, entry.incarnation.lineage) for worker, entry in self.entries.items()}
        self._last = {key: last for key, last in self._last.items() if last.at >= before or key in lineages}


def _has_followed(seen: Epoch | None, required: Epoch) -> bool:
    return seen is not None and seen >= required


def _entry(pong: Pong) -> WorkerEntry:
    return WorkerEntry(pong.incarnation, pong.tags, pong.host, pong.capacity)
