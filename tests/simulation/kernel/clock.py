"""Clocks of hosts, and spans of true time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile

_FOREVER = math.inf


class LocalClock:
    """A host's monotonic clock, which may run faster or slower than true time.

    It remembers how it ran, so that any time can be translated: what lies ahead as if its rate stays.
    """

    def __init__(self, now: float, start: float) -> None:
        self._pieces = [(now, start, 1.0)]

    @property
    def rate(self) -> float:
        """Local seconds that pass in a true second."""
        return self._pieces[-1][2]

    def local(self, true: float) -> float:
        """What it shows at a true time."""
        began, shown, rate = next(
            (piece for piece in reversed(self._pieces) if piece[0] <= true), self._pieces[0]
        )
        return shown + (true - began) * rate

    def true(self, local: float) -> float:
        """When it shows a time."""
        began, shown, rate = next(
            (piece for piece in reversed(self._pieces) if piece[1] <= local), self._pieces[0]
        )
        return began + (local - shown) / rate

    def run_at(self, rate: float, now: float) -> None:
        """Run at another rate from true time ``now`` on."""
        self._pieces.append((now, self.local(now), rate))

    def slowest(self, since: float) -> float:
        """The lowest rate from a true time on."""
        ends = [began for began, _, _ in self._pieces[1:]] + [math.inf]
        return min(rate for (_, _, rate), end in zip(self._pieces, ends, strict=True) if end > since)


@dataclass(slots=True)
class Spans:
    """Periods in which a condition held (true seconds)."""

    spans: list[tuple[float, float]] = field(default_factory=list)

    def begin(self, now: float) -> None:
        """It is so from now on."""
        self.spans.append((now, _FOREVER))

    def end(self, now: float) -> None:
        """It is no longer so."""
        if self.spans and self.spans[-1][1] == _FOREVER:
            self.spans[-1] = (self.spans[-1][0], now)

    def ever(self, since: float) -> bool:
        """True if it held at any time since then."""
        return any(True for _ in self.since(since))

    def since(self, since: float) -> Iterator[tuple[float, float]]:
        """The spans that ended then or later, in order."""
        return reversed(list(takewhile(lambda span: span[1] >= since, reversed(self.spans))))

    def within(self, since: float, now: float) -> float:
        """For how long it was so since then."""
        return covered(self.since(since), since, now)


def covered(spans: Iterable[tuple[float, float]], since: float, now: float) -> float:
    """Seconds covered by spans, which may overlap and are sorted by their starts."""
    total, reached = 0.0, since
    for start, end in spans:
        upto = min(end, now)
        total += max(0.0, upto - max(start, reached))
        reached = max(reached, upto)
    return total
