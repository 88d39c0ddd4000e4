"""The wait until the predecessors of a tenure can lead no longer."""

from __future__ import annotations

from rebalanser.core.neli.messages import HeartbeatRead, LastCommit
from rebalanser.core.neli.records import LeadershipClaim, Note, Stamp
from rebalanser.core.neli.settings import Mode, NeliSettings


class Succession:
    """Waits until no other process can lead a partition that was assigned at ``now``.

    A predecessor's accepted commits were sent before the assignment, so it leads for at most ``wait_s`` after
    that. The wait is spared if the last commit says "released", and all records from the committed offset up
    to the own first heartbeat were read and are, of this group, by the releasing process only: any process
    that led in between has a heartbeat of its own there.
    """

    def __init__(
        self, group: str, partitions: int, last: LastCommit | None, settings: NeliSettings, now: float
    ) -> None:
        self._group = group
        note = Note.decode(last.metadata) if last else None
        self.wait_s = self._longest_wait_s(settings, last, note)
        self.until = now if settings.mode is Mode.NON_EXCLUSIVE else now + self.wait_s
        self._releaser: tuple[str, int] | None = None
        self._expected = -1
        if settings.mode is Mode.FAST and note and last and last.offset is not None:
            self._expected = last.offset
            if note.claim is LeadershipClaim.RELEASED and note.partitions == partitions:
                self._releaser = (note.process, note.tenure)

    @staticmethod
    def _longest_wait_s(settings: NeliSettings, last: LastCommit | None, note: Note | None) -> float:
        """Return the wait by the own settings, or by the last note if a predecessor has a longer deadline."""
        if note:
            return max(settings.wait_s, note.wait_s)
        never_led = last is not None and last.offset is None
        return settings.wait_s if never_led else max(settings.wait_s, settings.session_timeout_s)

    def is_over(self, now: float) -> bool:
        """True if no earlier owner of the partition can lead it any more."""
        return now >= self.until

    def read(self, record: HeartbeatRead, own: bool, now: float) -> bool:
        """Take in the next record; ``own`` heartbeats are of this tenure. True if it ends the wait."""
        if self._releaser is None:
            return False
        if record.offset != self._expected or not (own or self._is_harmless(record.stamp)):
            self._releaser = None
            return False
        self._expected += 1
        if not own:
            return False
        self._releaser = None
        self.until = min(self.until, now)
        return True

    def _is_harmless(self, stamp: Stamp | None) -> bool:
        """True if a record is certainly of no leader between the releasing one and this tenure."""
        foreign = stamp is None or stamp.group != self._group
        return foreign or (stamp is not None and (stamp.process, stamp.tenure) == self._releaser)
