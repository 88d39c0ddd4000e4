"""Hooks around every task: for metrics, tracing, connections that a body needs."""

from __future__ import annotations

from rebalanser.tasks.claim import Claim
from rebalanser.tasks.model import Head


class Middleware:
    """Derive from it and overwrite what is needed; what a hook raises is ignored (SK-15).

    Hooks are called in the thread of the enqueuer or of the body: in the order given before, in the reverse
    order after. Those of a coroutine are called in two threads, of which none is that of its loop.
    """

    def enqueued(self, head: Head) -> None:
        """A task was committed or spooled."""

    def before(self, claim: Claim) -> None:
        """A body is about to be called."""

    def after(self, claim: Claim, error: BaseException | None) -> None:
        """A body has returned, or raised ``error``; its claim ends now."""
