"""The group coordinator: sessions, generations or epochs, and offsets that only members may commit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from rebalanser.core.neli.messages import Committing, LastCommit

Partitions: TypeAlias = frozenset[int]
NONE: Partitions = frozenset()


class Verdict(StrEnum):
    """What the coordinator says to a request."""

    OK = "ok"
    REBALANCE = "rebalance in progress"
    STALE = "illegal generation or stale epoch"
    UNKNOWN = "unknown member"


@dataclass(frozen=True, slots=True)
class Answer:
    """A verdict, with what a member has from now on where it is told."""

    verdict: Verdict
    epoch: int = 0
    partitions: Partitions | None = None


Reply: TypeAlias = Callable[[Answer], None]


def sticky(claims: Mapping[str, Partitions], count: int) -> dict[str, Partitions]:
    """Share out ``count`` partitions evenly, moving as few as that allows."""
    members = sorted(claims, key=lambda member: (-len(claims[member]), member))
    quota, extra = divmod(count, len(members)) if members else (0, 0)
    kept: dict[str, list[int]] = {}
    for index, member in enumerate(members):
        kept[member] = sorted(p for p in claims[member] if p < count)[: quota + (index < extra)]
    free = sorted(set(range(count)) - {p for owned in kept.values() for p in owned})
    for partition in free:
        least = min(members, key=lambda member: (len(kept[member]), member), default=None)
        if least is not None:
            kept[least].append(partition)
    return {member: frozenset(owned) for member, owned in kept.items()}


@dataclass
class Ownership:
    """Who has a partition, and who had it until when: what the oracle goes by."""

    owner: dict[int, str] = field(default_factory=dict)
    until: dict[tuple[str, int], float] = field(default_factory=dict)
    expelled: dict[str, str] = field(default_factory=dict)
    """Why a member was put out, if its session did not end."""

    def give(self, member: str, partitions: Partitions, now: float) -> None:
        """From now on these are the member's."""
        for partition in partitions:
            before = self.owner.get(partition)
            if before not in (None, member):
                self.until[str(before), partition] = now
            self.owner[partition] = member

    def keep_only(self, member: str, partitions: Partitions, now: float) -> None:
        """The member has given up all but these."""
        for partition in [p for p, owner in self.owner.items() if owner == member and p not in partitions]:
            del self.owner[partition]
            self.until[member, partition] = now

    def had_since(self, member: str, partition: int, since: float) -> bool:
        """Whether the partition was the member's at some time after ``since``."""
        return (
            self.owner.get(partition) == member or self.until.get((member, partition), float("-inf")) >= since
        )


@dataclass
class _Member:
    seen_at: float
    epoch: int = 0
    assigned: Partitions = NONE
    pending: Partitions = NONE
    pending_since: float = 0.0
    owned: Partitions = NONE
    waiting: Reply | None = None


class Coordinator(ABC):
    """What both group protocols have in common. True time is the broker's clock."""

    def __init__(self, partitions: int, session_s: float, rebalance_s: float) -> None:
        self.partitions = partitions
        self.session_s = session_s
        self.rebalance_s = rebalance_s
        self.ownership = Ownership()
        self.commits: dict[int, LastCommit] = {}
        self.members: dict[str, _Member] = {}
        self.rebalances = 0

    def last_commit(self, partition: int) -> LastCommit:
        """What the group committed last."""
        return self.commits.get(partition, LastCommit(None))

    def commit(self, member: str, epoch: int, offsets: Mapping[int, Committing], now: float) -> Verdict:
        """Take offsets from a member of the current generation or epoch; from nobody else."""
        self.tick(now)
        known = self.members.get(member)
        if known is None:
            return Verdict.UNKNOWN
        if epoch != self._epoch_of(known):
            return Verdict.STALE
        self._committed(known, now)
        for partition, part in offsets.items():
            self.commits[partition] = LastCommit(part.offset, part.note.encode())
        return Verdict.OK

    def leave(self, member: str, now: float) -> None:
        """A member says that it goes."""
        if member in self.members:
            self._remove(member, now, "left")

    def put_out(self, member: str, now: float) -> None:
        """An operator removes a member, or it has overrun the rebalance timeout."""
        if member in self.members:
            self._remove(member, now, "put out")

    def restart(self, now: float) -> None:
        """The broker starts again: every session starts anew."""
        for member in self.members.values():
            member.seen_at = now
            member.waiting = None

    @abstractmethod
    def heartbeat(self, member: str, epoch: int, owned: Partitions, now: float) -> Answer:
        """A member lives."""

    @abstractmethod
    def join(self, member: str, owned: Partitions, now: float, reply: Reply) -> None:
        """A process wants to be a member, or a member to take part in a rebalance."""

    @abstractmethod
    def tick(self, now: float) -> None:
        """End what has lasted too long."""

    @abstractmethod
    def grow(self, now: float) -> None:
        """The topic has one more partition."""

    @abstractmethod
    def _epoch_of(self, member: _Member) -> int: ...

    @abstractmethod
    def _committed(self, member: _Member, now: float) -> None: ...

    @abstractmethod
    def _remove(self, member: str, now: float, why: str) -> None: ...


class ClassicCoordinator(Coordinator):
    """Generations, with a cooperative assignor: what moves is taken in one rebalance, given in the next."""

    def __init__(self, partitions: int, session_s: float, rebalance_s: float) -> None:
        super().__init__(partitions, session_s, rebalance_s)
        self._generation = 0
        self._preparing_since: float | None = None
        self._moves_left = False

    def join(self, member: str, owned: Partitions, now: float, reply: Reply) -> None:
        """Answered once all members have joined, or the others were put out."""
        self.tick(now)
        if member in self.ownership.expelled:
            reply(Answer(Verdict.UNKNOWN))
            return
        known = self.members.get(member)
        if known is None:
            known = self.members[member] = _Member(now)
            self._prepare(now)
        elif self._preparing_since is None:
            settled = owned == known.assigned and known.epoch == self._generation and not self._moves_left
            if settled:
                known.seen_at = now
                reply(Answer(Verdict.OK, self._generation, known.assigned))
                return
            self._prepare(now)
        known.seen_at, known.owned, known.waiting = now, owned, reply
        self.ownership.keep_only(member, owned, now)
        self._complete_if_all_joined(now)

    def heartbeat(self, member: str, epoch: int, owned: Partitions, now: float) -> Answer:
        """Renews the session; what a member owns it says when it joins."""
        self.tick(now)
        known = self.members.get(member)
        if known is None:
            return Answer(Verdict.UNKNOWN)
        known.seen_at = now
        if self._preparing_since is not None:
            return Answer(Verdict.REBALANCE)
        return Answer(Verdict.OK if epoch == self._generation else Verdict.REBALANCE)

    def tick(self, now: float) -> None:
        """Sessions end, save of those who wait for a rebalance; a rebalance waits for nobody for ever."""
        for name, member in list(self.members.items()):
            if member.waiting is None and now - member.seen_at >= self.session_s:
                self._remove(name, now, "")
        if self._preparing_since is not None and now - self._preparing_since >= self.rebalance_s:
            for name, member in list(self.members.items()):
                if member.waiting is None:
                    self._remove(name, now, "rebalance timeout")

    def grow(self, now: float) -> None:
        """The leader of the group notices and rejoins."""
        self.partitions += 1
        if self.members:
            self._prepare(now)

    def restart(self, now: float) -> None:
        """A rebalance that was being prepared is begun again."""
        super().restart(now)
        if self._preparing_since is not None:
            self._preparing_since = now

    def _epoch_of(self, member: _Member) -> int:
        return self._generation

    def _committed(self, member: _Member, now: float) -> None:
        member.seen_at = now

    def _remove(self, member: str, now: float, why: str) -> None:
        del self.members[member]
        self.ownership.keep_only(member, NONE, now)
        self.ownership.expelled[member] = why
        if self.members:
            self._prepare(now)
            self._complete_if_all_joined(now)

    def _prepare(self, now: float) -> None:
        if self._preparing_since is None:
            self._preparing_since = now

    def _complete_if_all_joined(self, now: float) -> None:
        if self._preparing_since is None or any(m.waiting is None for m in self.members.values()):
            return
        self._preparing_since = None
        self._generation += 1
        self.rebalances += 1
        claims = {name: member.owned for name, member in self.members.items()}
        taken = {partition: name for name, owned in claims.items() for partition in owned}
        target = sticky(claims, self.partitions)
        self._moves_left = False
        for name, member in sorted(self.members.items()):
            given = frozenset(p for p in target[name] if taken.get(p, name) == name)
            self._moves_left |= given != target[name]
            member.assigned, member.seen_at, member.epoch = given, now, self._generation
            self.ownership.give(name, given, now)
        for _, member in sorted(self.members.items()):
            reply, member.waiting = member.waiting, None
            if reply is not None:
                reply(Answer(Verdict.OK, self._generation, member.assigned))


class ConsumerCoordinator(Coordinator):
    """KIP-848: members are brought to the target one by one; a commit does not renew the session."""

    def __init__(self, partitions: int, session_s: float, rebalance_s: float) -> None:
        super().__init__(partitions, session_s, rebalance_s)
        self._epoch = 0
        self._target: dict[str, Partitions] = {}

    def join(self, member: str, owned: Partitions, now: float, reply: Reply) -> None:
        """Answered at once."""
        self.tick(now)
        if member in self.ownership.expelled:
            reply(Answer(Verdict.UNKNOWN))
            return
        if member not in self.members:
            self.members[member] = _Member(now)
            self._retarget()
        reply(self._reconcile(member, owned, now))

    def heartbeat(self, member: str, epoch: int, owned: Partitions, now: float) -> Answer:
        """Renews the session, and moves the member towards its target, whatever epoch it knows of."""
        self.tick(now)
        known = self.members.get(member)
        if known is None:
            return Answer(Verdict.UNKNOWN)
        known.seen_at = now
        return self._reconcile(member, owned, now)

    def tick(self, now: float) -> None:
        """Put out who is silent, or does not give up what it was asked for."""
        for name, member in list(self.members.items()):
            if now - member.seen_at >= self.session_s:
                self._remove(name, now, "")
            elif member.pending and now - member.pending_since >= self.rebalance_s:
                self._remove(name, now, "rebalance timeout")

    def grow(self, now: float) -> None:
        """The broker sees it itself."""
        self.partitions += 1
        self._retarget()

    def _epoch_of(self, member: _Member) -> int:
        return member.epoch

    def _committed(self, member: _Member, now: float) -> None:
        """Only heartbeats renew the session."""

    def _remove(self, member: str, now: float, why: str) -> None:
        del self.members[member]
        self.ownership.keep_only(member, NONE, now)
        self.ownership.expelled[member] = why
        self._retarget()

    def _retarget(self) -> None:
        self._epoch += 1
        self.rebalances += 1
        self._target = sticky(
            {name: member.assigned for name, member in self.members.items()}, self.partitions
        )

    def _reconcile(self, name: str, owned: Partitions, now: float) -> Answer:
        member, target = self.members[name], self._target[name]
        member.pending &= owned
        self.ownership.keep_only(name, member.assigned | member.pending, now)
        if not member.pending:
            member.pending = member.assigned - target
            member.assigned &= target
            member.pending_since = now
            if not member.pending:
                member.epoch = self._epoch
                held = [other.assigned | other.pending for key, other in self.members.items() if key != name]
                free = target - frozenset().union(*held)
                member.assigned |= free
                self.ownership.give(name, free, now)
        return Answer(Verdict.OK, member.epoch, member.assigned)
