"""What a leader's safety rests on: a small decision each, so that a test can take any of them away."""

from __future__ import annotations

from rebalanser.shiva.records import Pong
from rebalanser.shiva.types import ApplicationId, Epoch, Incarnation, Leaving, Mode


class Safeguards:
    """The safeguards of a leader. Nobody but a test of the tests overrides them."""

    def may_publish(self, caught_up: bool) -> bool:
        """Nothing is published before COMMAND has been read: it holds stops that nobody followed (SH-9)."""
        return caught_up

    def is_reflected(self, order: int, consumed: int) -> bool:
        """Whether the document that a leader goes on from has followed a command already (SH-9)."""
        return order <= consumed

    def comes_after(self, order: int, other: int) -> bool:
        """Of two commands of an application the one that stands later wins (SH-2).

        A kept command stands where the client's own record stood.
        """
        return order >= other

    def is_overtaken(self, term: int, other: int) -> bool:
        """Whether the term of another leader ends this one's (SH-7)."""
        return other > term

    def stops_first(self, leaving: Leaving) -> Leaving | None:
        """A worker that is no longer named may still run the application, and is waited for (SH-13)."""
        return leaving

    def proves_stopped(self, leaving: Leaving, application: ApplicationId, pong: Pong) -> bool:
        """Whether a pong of the very incarnation shows that it stopped, and cannot start again (SH-13)."""
        report = pong.applications.get(application)
        return pong.seen is not None and pong.seen >= leaving.epoch and not (report and report.state.may_run)

    def tells_of_the_end(self, pong: Pong) -> bool:
        """True if a pong from before the take-over still counts: only a worker's last one does (SH-22).

        After any other pong the worker may be alive or not.
        """
        return pong.leaving

    def proves_ended(self, behind: Incarnation, leaving: Leaving) -> bool:
        """Whether the process behind the worker's id shows that the one that is waited for ended (SH-3)."""
        return behind.succeeds(leaving.incarnation)

    def is_gone(self, leaving: Leaving, issued: Epoch, silent_s: float, deadline_s: float) -> bool:
        """Whether a worker that is not known any more need not be waited for (SH-13, SH-14).

        In mode ``exclusive`` the document without it must have been issued, too: from then on no ping lets
        it run the application by an older one.
        """
        if leaving.mode is Mode.AVAILABLE:
            return True
        return leaving.epoch <= issued and silent_s >= deadline_s

    def may_take_back(self, leaving: Leaving, known: Incarnation | None, mode: Mode) -> bool:
        """Whether the worker that is waited for may be named again without a wait.

        It is the only one that may run the application, so that no second one comes about; not so if it may
        run it in another mode, which a document cannot take back.
        """
        return leaving.incarnation == known and leaving.mode is mode

    def is_silent(self, missed: int, allowed: int) -> bool:
        """Whether a worker that missed so many full rounds is removed (SH-8)."""
        return missed >= allowed

    def is_impostor(self, incarnation: Incarnation, known: Incarnation) -> bool:
        """Whether another folder's process claims the id of a worker that is known (SH-3)."""
        return incarnation.lineage != known.lineage

    def permitted_by(self, published: Epoch, issued: Epoch) -> Epoch:
        """The oldest document by which a ping lets workers run exclusive applications (SH-14).

        The one under way counts already: it may name another worker the moment that it is there.
        """
        return max(published, issued)

    def longest_deadline(self, own_s: float, inherited_s: float) -> float:
        """How long workers may run on permissions of this leader and its predecessors, in seconds (SH-14)."""
        return max(own_s, inherited_s)

    def fits(self, needed_bytes: int, budget_bytes: int) -> bool:
        """Whether the archives of what is to run fit into COMMAND's retention (SH-15)."""
        return needed_bytes <= budget_bytes
