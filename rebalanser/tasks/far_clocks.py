"""Finds hosts whose wall clocks are far from this one's, from the ids of new tasks (SK-18).

An id has the milliseconds of the host that made it (SK-1), and who owns the task's partition is told of it
soon after. No request is made for this, and no claim depends on it. What is certain differs:

- An id from the future was made by a clock that is *ahead* of this one by at least as much.
- An old id proves nothing by itself: it may have been made long before its task was enqueued, or told late.
  Only if a process' ids come late again and again, by the same time within :data:`SPREAD_S`, while its clock
  goes on by :data:`SPAN_S`, is its clock taken to be *behind*: what waited on its way comes ever less late.
  A process that makes all its ids beforehand, always by the same time, looks the same.

In both cases one of the two clocks is wrong, and nobody here knows which. Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final, TypeVar

from rebalanser.tasks.flakes import born_at, is_flake
from rebalanser.tasks.model import TaskId

LIMIT_S: Final = 30.0
"""How far two clocks may be apart."""
SPREAD_S: Final = 5.0
SPAN_S: Final = 30.0
SILENCE_S: Final = 600.0
"""How long a host that was told of is not told of again."""
MAX_HOSTS: Final = 1024
"""Of how many processes, and hosts, something is kept in mind: the latest."""
_HOST_AT: Final = 24
_PROCESS_AT: Final = 36

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, slots=True)
class FarClock:
    """A host whose clock is ``ahead_s`` seconds ahead of this one's, or behind where that is negative.

    ``host`` are the 12 digits that stand for it in the ids that it makes, such as ``task``, and ``process``
    the 4 of the process. A tick of a periodic task has others there, those of the queue and the function.
    """

    task: TaskId
    host: str
    process: str
    ahead_s: float


@dataclass(slots=True)
class _Late:
    """The ids of one process that came late by the same time, since the first of them."""

    born_first: float
    least_s: float
    most_s: float


@dataclass(slots=True)
class FarClocks:
    """What the ids of the tasks that one process is told of say about other hosts' clocks.

    For one thread at a time. ``now`` is seconds of a monotonic clock, ``wall`` seconds since 1970.
    """

    _late: OrderedDict[str, _Late] = field(default_factory=OrderedDict)
    _told_at: OrderedDict[str, float] = field(default_factory=OrderedDict)

    def saw(self, task: TaskId, now: float, wall: float, *, is_new: bool) -> FarClock | None:
        """A task was read or, where it ``is_new``, told of just now; the host to warn of, if any.

        None where it was told of lately, too.
        """
        if not is_flake(task):
            return None
        host, process = task[_HOST_AT:_PROCESS_AT], task[_PROCESS_AT:]
        born = born_at(task)
        late_s = wall - born
        if late_s >= 0:
            late_s = self._behind_s(host + process, born, late_s) if is_new else 0.0
        if abs(late_s) <= LIMIT_S or now - self._told_at.get(host, -SILENCE_S) < SILENCE_S:
            return None
        _keep(self._told_at, host, now)
        return FarClock(task, host, process, -late_s)

    def _behind_s(self, maker: str, born: float, late_s: float) -> float:
        """How far the clock that made an id is known to be behind, in seconds."""
        if late_s <= LIMIT_S:
            self._late.pop(maker, None)
            return 0.0
        known = self._late.get(maker, _Late(born, late_s, late_s))
        least_s, most_s = min(known.least_s, late_s), max(known.most_s, late_s)
        if most_s - least_s > SPREAD_S:
            known = _Late(born, late_s, late_s)
        else:
            known = _Late(min(known.born_first, born), least_s, most_s)
        _keep(self._late, maker, known)
        return known.least_s if born - known.born_first >= SPAN_S else 0.0


def _keep(kept: OrderedDict[str, ValueT], key: str, value: ValueT) -> None:
    """Note it as the latest, and forget the oldest where there are too many."""
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > MAX_HOSTS:
        kept.popitem(last=False)
