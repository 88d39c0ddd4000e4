"""Lease of a worker to run exclusive applications (SH-14)."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from rebalanser.core.shiva.records import Ping
from rebalanser.core.shiva.types import Epoch

MAX_UNANSWERED: Final = 256
"""Maximum pongs whose time is kept. An answer to an older one permits nothing, which is safe."""


class ExclusiveLease:
    """Times at which pongs were sent, and until which those heard let exclusive processes exist."""

    def __init__(self) -> None:
        self._sent: OrderedDict[int, float] = OrderedDict()
        self._longest_s: float | None = None
        self.until: float | None = None
        """Time (monotonic seconds) by which exclusive processes must have ended; None before an answer."""
        self.term = -1
        """Greatest term of a ping."""
        self.epoch: Epoch | None = None
        """Epoch of the newest document in a ping of this term: an older one starts nothing exclusive.

        A later leader has read all that its predecessor published.
        """
        self.deadline_s: float | None = None
        """As of the last ping."""

    def sent(self, sequence: int, now: float) -> None:
        """Note that a pong is sent, and may be heard from now on."""
        if self._longest_s is not None:
            self._forget_before(now - self._longest_s)
        self._sent[sequence] = now
        if len(self._sent) > MAX_UNANSWERED:
            self._sent.popitem(last=False)

    def _forget_before(self, instant: float) -> None:
        """Forget pongs that were sent so early that they permit nothing any more, even if answered now."""
        for sequence in [s for s, sent_at in self._sent.items() if sent_at < instant]:
            del self._sent[sequence]

    def pinged(self, ping: Ping) -> None:
        """Take in a ping of the present term."""
        if self.epoch is None or ping.term > self.term:
            self.epoch = ping.epoch
        self.epoch = max(self.epoch, ping.epoch)
        self.term = max(self.term, ping.term)
        self.deadline_s = ping.deadline_s
        self._longest_s = max(self._longest_s or 0.0, ping.deadline_s)

    def answered(self, sequence: int) -> float | None:
        """Return when a pong that a leader heard was sent; None if it was not sent, or too long ago."""
        sent_at = self._sent.get(sequence)
        if sent_at is not None:
            for earlier in [s for s in self._sent if s < sequence]:
                del self._sent[earlier]
        return sent_at

    def extend(self, until: float) -> bool:
        """Let exclusive processes exist until then; True if that is later than before."""
        if self.until is not None and until <= self.until:
            return False
        self.until = until
        return True
