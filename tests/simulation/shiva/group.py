"""The consumer group of the leaders: one partition, and a member that may not know yet that it lost it."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from simulation.kernel.scheduler import Scheduler

_TELL_S = 0.3


class GroupMember(Protocol):
    """A process that takes part in the group."""

    unreachable_since: float | None

    def tell(self, action: Callable[[], None]) -> None:
        """Report something to it, as soon as it can be reached."""

    def assigned(self, generation: int) -> None:
        """It has the partition."""

    def lost(self, generation: int) -> None:
        """It has lost the partition."""

    def expelled(self) -> None:
        """Its session has ended."""


MemberT = TypeVar("MemberT", bound=GroupMember)


class LeaderGroup(Generic[MemberT]):
    """Who holds COMMAND's partition."""

    def __init__(self, scheduler: Scheduler, random: Random, session_s: float) -> None:
        self._scheduler = scheduler
        self._random = random
        self.session_s = session_s
        self.members: list[MemberT] = []
        self.holder: MemberT | None = None
        self.generation = 0

    def join(self, member: MemberT) -> None:
        """A process wants to lead."""
        if member not in self.members:
            self.members.append(member)
            self._soon(self._give)

    def leave(self, member: MemberT) -> None:
        """A member goes, or its session has ended."""
        if member in self.members:
            self.members.remove(member)
        if self.holder is member:
            self.holder = None
            self._soon(self._give)

    def is_current(self, generation: int) -> bool:
        """Whether offsets may be committed in this generation."""
        return generation == self.generation and self.holder is not None

    def watch(self, member: MemberT) -> None:
        """A member cannot be reached from now on: its session may end."""
        since = member.unreachable_since

        def end() -> None:
            if member in self.members and since is not None and member.unreachable_since == since:
                self.expel(member)

        self._scheduler.at(self._scheduler.now + self.session_s, end)

    def died(self, member: MemberT) -> None:
        """A member is no more; the group finds out when its session ends."""
        self._scheduler.at(self._scheduler.now + self.session_s, lambda: self.expel(member))

    def expel(self, member: MemberT) -> None:
        """A member's session has ended; it learns of it when it is heard again."""
        self.leave(member)
        self._soon(lambda: member.tell(member.expelled))

    def kick(self) -> None:
        """Give the partition to whom chance will have, as a group that rebalances may."""
        holder, generation = self.holder, self.generation
        if holder is None:
            return
        self.holder = None
        self._give()
        self._soon(lambda: holder.tell(lambda: holder.lost(generation)))

    def _give(self) -> None:
        if self.holder is not None or not self.members:
            return
        self.generation += 1
        self.holder = holder = self._random.choice(self.members)
        generation = self.generation
        self._soon(lambda: holder.tell(lambda: holder.assigned(generation)))

    def _soon(self, action: Callable[[], None]) -> None:
        self._scheduler.at(self._scheduler.now + self._random.random() * _TELL_S, action)
