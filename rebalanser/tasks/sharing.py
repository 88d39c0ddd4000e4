"""Concurrency that the workers of several queues in one process share, the earlier queues first.

A worker takes places before it claims, and holds one for each claim until its body has ended. While a worker
*looks* for tasks, workers of later queues get no place. It looks from its request for places until it has
claimed fewer tasks than it got places for. If all places are taken it goes on looking, and gets the next free
one. A worker that can take no task although a place is free does not look.

So a task of a later queue begins only while no earlier queue has a ready one, and a queue that always has
ready tasks starves those after it. A body that runs is never ended for a task of an earlier queue.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class _Sharer:
    """A worker, in the order of its queue."""

    held: Callable[[], int]
    wake: Callable[[], None]
    taken: int = 0
    """Number of places for claims that are being made."""
    looks: bool = False


class SharedConcurrency:
    """``concurrency`` places for bodies. May be used from any thread.

    ``stopped`` is set once any of the queues is asked to stop.
    """

    def __init__(self, concurrency: int) -> None:
        self.stopped = threading.Event()
        self._concurrency = concurrency
        self._lock = threading.Lock()
        self._sharers: list[_Sharer] = []

    def join(self, held: Callable[[], int], wake: Callable[[], None]) -> int:
        """Add a worker behind the others, and return its number.

        ``held()`` returns the number of its claims; ``wake`` makes it request places again.
        """
        with self._lock:
            self._sharers.append(_Sharer(held, wake))
            return len(self._sharers) - 1

    def take(self, number: int, wanted: int) -> int:
        """Take places for claims, at most ``wanted``; :meth:`looked` gives them back."""
        with self._lock:
            sharer = self._sharers[number]
            sharer.looks = wanted > 0 or self._free() <= 0
            if any(each.looks for each in self._sharers[:number]):
                return 0
            sharer.taken = max(0, min(wanted, self._free()))
            return sharer.taken

    def looked(self, number: int, claimed: int) -> None:
        """Return the places of a worker that now holds its claims; it looks on if it may find more."""
        with self._lock:
            sharer = self._sharers[number]
            sharer.looks = sharer.looks and sharer.taken <= claimed
            changes = sharer.taken > 0 or not sharer.looks
            sharer.taken = 0
        if changes:  # other workers counted these places as taken meanwhile
            self.freed()

    def freed(self) -> None:
        """Wake the workers that look: a place is free, or a worker has stopped looking."""
        with self._lock:
            looking = [each.wake for each in self._sharers if each.looks]
        for wake in looking:
            wake()

    def idle(self) -> int:
        """Return the number of free places."""
        with self._lock:
            return self._free()

    def leave(self, number: int) -> None:
        """Stop looking for a worker; its claims still count."""
        with self._lock:
            self._sharers[number].looks = False
        self.freed()

    def _free(self) -> int:
        return self._concurrency - sum(each.held() + each.taken for each in self._sharers)
