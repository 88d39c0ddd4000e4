"""When claims are over whose time is counted on another clock (SK-8, SK-18). Pure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Final, Generic, TypeVar

from rebalanser.tasks.model import ClaimState

PAUSE_S: Final = 0.001
"""Seconds between two reads for each claim that is read."""
KeyT = TypeVar("KeyT", bound=Hashable)


def over_at(claim: ClaimState, now: float, clock: str, buffer_s: float) -> float:
    """When a claim is over whose term is learnt ``now``, in seconds of the clock of this name.

    Its end counts where it was counted on that clock. Any other is not compared, and neither is one without a
    name: ``ttl_s`` is counted from now on, which is later than when its holder began to count.
    """
    latest = now + claim.term.ttl_s
    if clock and claim.term.clock == clock:
        latest = min(latest, claim.term.ends_at_s)
    return latest + buffer_s


def is_same_term(claim: ClaimState, other: ClaimState | None) -> bool:
    """True if a claim was not renewed: each renewal ends at another time, an update leaves the term."""
    return other is not None and (claim.number, claim.holder, claim.term) == (
        other.number,
        other.holder,
        other.term,
    )


class ForeignTerms(Generic[KeyT]):
    """The claims of a queue that are counted on other clocks, and since when their terms are known here.

    For one thread at a time. Reading all of them takes about 1 % of the time, however many they are.
    """

    def __init__(self) -> None:
        self._known: dict[KeyT, tuple[ClaimState, float]] = {}
        self._look_at = 0.0
        self._skipped = False

    def skips(self, now: float) -> bool:
        """True if they need not be read now, as they were a moment ago; :meth:`next_over` says when."""
        self._skipped = now < self._look_at
        return self._skipped

    def learn(self, claims: Mapping[KeyT, ClaimState], now: float, buffer_s: float) -> list[KeyT]:
        """Take the claims that there are, as they were read before ``now``; those that are over."""
        before, self._known = self._known, {}
        for key, claim in claims.items():
            known = before.get(key)
            if known is not None and is_same_term(claim, known[0]):
                self._known[key] = known
            else:
                self._known[key] = (claim, over_at(claim, now, "", buffer_s))
        self._look_at = now + PAUSE_S * len(claims)
        return [key for key, (_, at) in self._known.items() if at <= now]

    def next_over(self) -> float | None:
        """When one may be over, or they are to be read; None where there is none."""
        times = [at for _, at in self._known.values()] + ([self._look_at] if self._skipped else [])
        return min(times, default=None)
