"""Safety decisions of a leader, one method each, so that a test can remove any of them."""

from __future__ import annotations

from collections.abc import Sequence

from rebalanser.core.allocation import Capacity, Requests, has_room
from rebalanser.core.shiva.records import Pong
from rebalanser.core.shiva.types import ApplicationId, Epoch, Incarnation, Leaving, Mode


class Safeguards:
    """Safeguards of a leader. Only a test of the tests overrides them."""

    def may_publish(self, caught_up: bool) -> bool:
        """Nothing is published before COMMAND has been read: it holds stops that nobody followed (SH-9)."""
        return caught_up

    def is_reflected(self, order: int, consumed: int) -> bool:
        """True if the document that a leader goes on from has followed a command already (SH-9)."""
        return order <= consumed

    def comes_after(self, order: int, other: int) -> bool:
        """True if a command of an application wins over another one: the later one does (SH-2).

        A kept command counts as of the client's own record.
        """
        return order >= other

    def follows_start(self, order: int, start: int) -> bool:
        """True if a number of replicas was commanded after the start that it is for (SH-28).

        A start has a number of its own.
        """
        return order > start

    def is_overtaken(self, term: int, other: int) -> bool:
        """True if the term of another leader ends this one's (SH-7)."""
        return other > term

    def stops_first(self, leaving: Leaving) -> Leaving | None:
        """A worker that is no longer named may still run the application, and is waited for (SH-13)."""
        return leaving

    def proves_stopped(self, leaving: Leaving, application: ApplicationId, pong: Pong) -> bool:
        """True if a pong of the very incarnation shows that it stopped, and cannot start again (SH-13)."""
        report = pong.applications.get(application)
        return pong.seen is not None and pong.seen >= leaving.epoch and not (report and report.state.may_run)

    def tells_of_the_end(self, pong: Pong) -> bool:
        """True if a pong from before the take-over still counts: only a worker's last one does (SH-22).

        After any other pong the worker may be alive or not.
        """
        return pong.leaving

    def proves_ended(self, behind: Incarnation, leaving: Leaving) -> bool:
        """True if the process behind the worker's id proves that the awaited one has ended (SH-3)."""
        return behind.succeeds(leaving.incarnation)

    def is_gone(self, leaving: Leaving, issued: Epoch, silent_s: float, deadline_s: float) -> bool:
        """True if a worker that is not known any more need not be waited for (SH-13, SH-14).

        In mode ``exclusive`` the document without it must have been issued, too: from then on no ping lets
        it run the application by an older one.
        """
        if leaving.mode is Mode.AVAILABLE:
            return True
        return leaving.epoch <= issued and silent_s >= deadline_s

    def may_take_back(self, leaving: Leaving, known: Incarnation | None, mode: Mode) -> bool:
        """True if the awaited worker may be assigned again without a wait.

        It is the only one that may run the application, so that no second one comes about; not so if it may
        run it in another mode, which a document cannot take back.
        """
        return leaving.incarnation == known and leaving.mode is mode

    def is_silent(self, missed: int, allowed: int) -> bool:
        """True if a worker that missed N full rounds is removed (SH-8)."""
        return missed >= allowed

    def is_impostor(self, incarnation: Incarnation, known: Incarnation) -> bool:
        """True if another folder's process claims the id of a known worker (SH-3)."""
        return incarnation.lineage != known.lineage

    def permitted_by(self, published: Epoch, issued: Epoch) -> Epoch:
        """Return the oldest document by which a ping lets workers run exclusive applications (SH-14).

        The one under way counts already: it may name another worker as soon as it is published.
        """
        return max(published, issued)

    def longest_deadline(self, own_s: float, inherited_s: float) -> float:
        """Return for how many seconds workers may run on permissions of this or an earlier leader (SH-14)."""
        return max(own_s, inherited_s)

    def has_room(self, capacity: Capacity, requests: Requests, taken: Sequence[Requests]) -> bool:
        """True if a worker has what an application requests beside what is taken (SH-27)."""
        load = sum(each.cpu_milli for each in taken), sum(each.memory_mb for each in taken)
        return has_room(capacity.limits, load, requests.amounts)

    def waits_for(self, sibling: ApplicationId | None) -> bool:
        """True if a replica must wait for another one that its worker runs, or may still run (SH-28)."""
        return sibling is not None

    def keeps_room(self, requests: Requests | None, before: Requests | None) -> bool:
        """True if what an application requests now covers what its last process may still take (SH-27)."""
        if before is None:
            return True
        return (
            requests is not None
            and requests.cpu_milli >= before.cpu_milli
            and requests.memory_mb >= before.memory_mb
        )

    def fits(self, needed_bytes: int, budget_bytes: int) -> bool:
        """True if the archives of all that is to run fit into COMMAND's retention (SH-15)."""
        return needed_bytes <= budget_bytes
