"""One partition from its assignment to this process until its end: the evidence for leading it."""

from __future__ import annotations

from rebalanser.core.neli.messages import HeartbeatRead, LastCommit, Partition
from rebalanser.core.neli.records import LeadershipClaim, Note, Stamp
from rebalanser.core.neli.settings import Mode, NeliSettings
from rebalanser.core.neli.succession import Succession


class Tenure:
    """One partition while it is assigned. This process never uses ``number`` again."""

    def __init__(
        self,
        stamp: Stamp,
        partition: Partition,
        last: LastCommit | None,
        settings: NeliSettings,
        now: float,
    ) -> None:
        self._stamp = stamp
        self._settings = settings
        self.partition = partition
        self.succession = Succession(stamp.group, stamp.partitions, last, settings, now)
        self.position: int | None = None
        self.heard_at: float | None = None
        self.committed_at: float | None = None
        self.token: int | None = None
        self.token_found: int | None = None
        self.fenced = False
        self.asked_back = False
        self.let_go_by: float | None = None
        self.release: int | None = None
        self._sent: dict[int, float] = {}

    @property
    def number(self) -> int:
        """The number that its heartbeats and commits carry."""
        return self._stamp.tenure

    @property
    def is_lapsing(self) -> bool:
        """True if the group has asked for the partition back."""
        return self.let_go_by is not None

    @property
    def needs_commit(self) -> bool:
        """True if a token was found that no accepted commit has confirmed yet."""
        return self.token is None and self.token_found is not None

    def sending(self, sequence: int, now: float) -> None:
        """Note a heartbeat that is about to be sent; forget those that can renew nothing any more."""
        horizon = now - self._settings.limit_s
        self._sent = {known: at for known, at in self._sent.items() if at > horizon}
        self._sent[sequence] = now

    def read(self, record: HeartbeatRead, now: float) -> bool:
        """Take in a record of the partition. True if it ends the wait for a predecessor.

        Only a heartbeat of this very tenure renews, as of just before it was sent, or becomes a token.
        """
        stamp = record.stamp
        own = stamp is not None and self._is_own(stamp)
        if own and stamp is not None:
            sent_at = self._sent.get(stamp.sequence)
            if sent_at is not None:
                self.heard_at = max(self.heard_at or sent_at, sent_at)
                if self.token_found is None:
                    self.token_found = record.offset
        self.position = record.offset + 1
        return self.succession.read(record, own, now)

    def _is_own(self, stamp: Stamp) -> bool:
        return (stamp.group, stamp.process, stamp.tenure) == (
            self._stamp.group,
            self._stamp.process,
            self._stamp.tenure,
        )

    def committed(self, offset: int, sent_at: float) -> None:
        """Take in an accepted commit of this tenure: at ``sent_at`` the partition was still assigned to it.

        It confirms the own heartbeat that was read before the commit was sent as the token (NE-15).
        """
        self.committed_at = max(self.committed_at or sent_at, sent_at)
        if self.token is None and self.token_found is not None and offset > self.token_found:
            self.token = self.token_found

    def may_release(self, now: float) -> bool:
        """True if it may be noted as released: no predecessor can lead any more either."""
        return (
            self._settings.mode is Mode.FAST
            and not self.fenced
            and self.position is not None
            and self.succession.is_over(now)
        )

    def note(self, claim: LeadershipClaim, now: float) -> Note:
        """Return the note of a commit for this tenure."""
        own_s, inherited_s = self._settings.wait_s, self.succession.wait_s
        wait_s = own_s if self.succession.is_over(now) else max(own_s, inherited_s)
        stamp = self._stamp
        return Note(claim, stamp.process, stamp.tenure, wait_s, stamp.partitions)
