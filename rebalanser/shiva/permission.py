"""Until when a worker may run exclusive applications (SH-14)."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from rebalanser.shiva.records import Ping
from rebalanser.shiva.types import Epoch

MAX_UNANSWERED: Final = 256
"""Pongs whose sending is remembered. An answer to an older one permits nothing, which is safe."""


class Permission:
    """When each pong was sent, and until when those that were heard let exclusive processes exist."""

    def __init__(self) -> None:
        self._sent: OrderedDict[int, float] = OrderedDict()
        self._longest_s: float | None = None
        self.until: float | None = None
        """When every exclusive process must have ended (monotonic seconds); None before the first answer."""
        self.term = -1
        """The highest term of a ping."""
        self.epoch: Epoch | None = None
        """Of the newest document that a ping of this term spoke of: an older one starts nothing exclusive.

        A later leader has read what its predecessor published; what that one only was about to is void.
        """
        self.deadline_s: float | None = None
        """As the last ping said."""

    def sent(self, sequence: int, now: float) -> None:
        """A pong leaves this worker, and may be heard from now on."""
        if self._longest_s is not None:
            self._forget_before(now - self._longest_s)
        self._sent[sequence] = now
        if len(self._sent) > MAX_UNANSWERED:
            self._sent.popitem(last=False)

    def _forget_before(self, instant: float) -> None:
        """What was sent so early permits nothing any more, even if it is answered now."""
        for sequence in [s for s, sent_at in self._sent.items() if sent_at < instant]:
            del self._sent[sequence]

    def pinged(self, ping: Ping) -> None:
        """A ping of the present term was read."""
        if self.epoch is None or ping.term > self.term:
            self.epoch = ping.epoch
        self.epoch = max(self.epoch, ping.epoch)
        self.term = max(self.term, ping.term)
        self.deadline_s = ping.deadline_s
        self._longest_s = max(self._longest_s or 0.0, ping.deadline_s)

    def answered(self, sequence: int) -> float | None:
        """That pong was heard by a leader. When it was sent; None if it was not, or too long ago."""
        sent_at = self._sent.get(sequence)
        if sent_at is not None:
            for earlier in [s for s in self._sent if s < sequence]:
                del self._sent[earlier]
        return sent_at

    def extend(self, until: float) -> bool:
        """Let exclusive processes exist until then. Whether that is later than before."""
        if self.until is not None and until <= self.until:
            return False
        self.until = until
        return True
