"""The claim of a body in a process of its own: everything is asked of the worker, which alone writes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from rebalanser.errors import InvalidState
from rebalanser.tasks.child_messages import AskDeadline, AskLog, AskRenewal, AskUpdate, ChildAsk
from rebalanser.tasks.claim import Claim, Facts, check_content
from rebalanser.tasks.model import Update

if TYPE_CHECKING:
    import sqlite3


PATIENCE_S: Final = 1.0
"""How long the worker may take to say that a claim lasts on; one that is paused says nothing."""


class Ask(Protocol):
    """Asks the worker something of the claim."""

    def __call__(self, ask: ChildAsk, timeout_s: float | None = None) -> Any:
        """The answer; raises what the worker raised, and TimeoutError if it took longer."""


class ChildClaim(Claim):
    """A claim that another process holds."""

    def __init__(self, facts: Facts, deadline: float, ask: Ask, max_bytes: int) -> None:
        super().__init__(facts, threading.Event())
        self._max_bytes = max_bytes
        self._deadline = deadline
        self._ask = ask

    @property
    def deadline(self) -> float:
        """See :attr:`Claim.deadline`; the last one that is known where the worker does not answer."""
        with contextlib.suppress(TimeoutError):
            self._deadline = float(self._ask(AskDeadline(), PATIENCE_S))
        return self._deadline

    def still_mine(self) -> bool:
        """See :meth:`Claim.still_mine`; the worker is asked once the time that it told is over."""
        if self.stop_requested.is_set():
            return False
        return time.monotonic() < self._deadline or time.monotonic() < self.deadline

    def update(self, content: bytes) -> int:
        """See :meth:`Claim.update`. What is over the limit does not get as far as the worker."""
        return int(self._ask(AskUpdate(check_content("an update", content, self._max_bytes))))

    def log_page(self, claim: int | None, first: int) -> Sequence[Update]:
        """See :meth:`Claim.log_page`."""
        return list(self._ask(AskLog(claim, first)))

    def complete_in(self, _connection: sqlite3.Connection, _result: bytes | None = None) -> None:
        """Refused: the worker renews the claim meanwhile, in transactions of its own.

        Raises:
            InvalidState: always.
        """
        raise InvalidState("complete_in needs a body that runs in a thread of the worker, not in a process")

    def renew(self) -> bool:
        """See :meth:`Claim.renew`."""
        return bool(self._ask(AskRenewal()))
