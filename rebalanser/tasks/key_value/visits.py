"""What one call of an engine asks of the registry, all within its time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Final

from rebalanser.errors import InternalError, RegistryUnavailable, UnusableStore
from rebalanser.registry.contract import Get, KeyValue, Operation, Outcome, Registry, Result, Transaction

READS_AT_ONCE: Final = 128
"""Keys or ranges that one transaction reads at most; fewer where the registry's limit is lower."""


class Visit:
    """One call's transactions with the registry. All of them together take at most ``timeout_s`` seconds."""

    def __init__(self, registry: Registry, timeout_s: float, at_least: int = 0) -> None:
        """``at_least`` is a revision that the registry must have seen."""
        self._registry = registry
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._at_least = at_least
        self._capabilities = registry.capabilities
        self.seen = 0
        """The revision of the first answer: all that was read has seen it."""

    @property
    def max_operations(self) -> int:
        """How long a list of a transaction may be."""
        return self._capabilities.max_operations

    @property
    def max_request_bytes(self) -> int:
        """How many bytes a transaction may have."""
        return self._capabilities.max_request_bytes

    def execute(self, transaction: Transaction) -> Outcome:
        """Carry out a transaction in the time that is left.

        Raises:
            RegistryUnavailable: no time is left, or as the registry says.
            UnusableStore: the registry has not seen the revision that it must have seen (SK-11).
        """
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise RegistryUnavailable(f"the {self._timeout_s:g} s for this call are over")
        outcome = self._registry.execute(transaction, left_s)
        if not isinstance(outcome, Outcome):
            raise InternalError(f"a transaction was answered {outcome!r}")
        if outcome.revision < self._at_least:
            raise UnusableStore(
                f"the registry is at revision {outcome.revision}, but {self._at_least} was seen before: "
                "it was put back from a backup, or is another one"
            )
        self.seen = self.seen or outcome.revision
        return outcome

    def look(self, operations: Sequence[Operation]) -> list[Result]:
        """The results of reading operations, however many, in few transactions."""
        results: list[Result] = []
        step = min(READS_AT_ONCE, self.max_operations)
        for start in range(0, len(operations), step):
            results += self.execute(Transaction(then=tuple(operations[start : start + step]))).results
        return results

    def get(self, keys: Iterable[str]) -> dict[str, KeyValue]:
        """Those of the keys that exist."""
        found = self.look([Get(key) for key in dict.fromkeys(keys)])
        return {item.key: item for item in found if isinstance(item, KeyValue)}
