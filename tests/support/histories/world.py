"""A made-up world: hosts with clocks that are off, processes that write history, a registry that counts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, TypeVar

from rebalanser.core.group.messages import FactKind as GroupKind
from rebalanser.core.neli.messages import FactKind as NeliKind
from rebalanser.core.shiva.messages import FactKind as ShivaKind
from rebalanser.history import Author, Event, Protocol, Record, SkuldKind

T = TypeVar("T")

EPOCH: Final = 1_767_225_600.0
"""When a world begins, in seconds since 1970, unless told otherwise."""
CLOCK_ERROR_S: Final = 0.5
"""How far apart the clocks of two hosts may be by the audit's default; a healthy world stays within it."""
LEASE_TTL_S: Final = 10.0
NAMES: Final = ("orders", "ä/ö ☃", 'say "hi"', "back\\slash", "new\nline", "%41.x")


@dataclass(frozen=True, slots=True)
class Words:
    """The kinds with which a protocol tells the steps of one access; None where it has none."""

    barrier_added: str | None
    start_entered: str
    start_returned: str | None
    stop_entered: str | None
    stop_returned: str
    barrier_removed: str | None


WORDS: Final[Mapping[Protocol, Words]] = MappingProxyType(
    {
        Protocol.GROUP: Words(
            GroupKind.BARRIER_ADDED,
            GroupKind.START_ENTERED,
            GroupKind.START_RETURNED,
            GroupKind.STOP_ENTERED,
            GroupKind.STOP_RETURNED,
            GroupKind.BARRIER_REMOVED,
        ),
        Protocol.SHIVA: Words(
            None,
            ShivaKind.PROCESS_STARTING,
            ShivaKind.PROCESS_STARTED,
            ShivaKind.PROCESS_STOPPING,
            ShivaKind.PROCESS_EXITED,
            None,
        ),
        Protocol.NELI: Words(None, NeliKind.INDUCED, None, NeliKind.LAPSED, NeliKind.ENDED, None),
        Protocol.SKULD: Words(None, SkuldKind.CLAIMED, None, None, SkuldKind.CLAIM_ENDED, None),
    }
)

NOTES: Final[Mapping[Protocol, str]] = MappingProxyType(
    {
        Protocol.GROUP: GroupKind.LOAD_REPORTED,
        Protocol.SHIVA: ShivaKind.LEADER_SILENT,
        Protocol.NELI: NeliKind.COMMIT_FAILED,
        Protocol.SKULD: SkuldKind.CLAIM_RENEWED,
    }
)
"""A kind of each protocol that is no step of an access: it may be missing and no verdict changes."""

ELECTED: Final[Mapping[Protocol, str]] = MappingProxyType(
    {Protocol.GROUP: GroupKind.ELECTED, Protocol.SHIVA: ShivaKind.TOOK_OVER}
)


@dataclass(slots=True, eq=False)
class Host:
    """A machine: ``clock_error_s`` is how far its wall clock is ahead of the true time."""

    name: str
    boot: str
    clock_error_s: float
    booted_at: float


@dataclass(slots=True, eq=False)
class Process:
    """One process and all that it wrote, in order."""

    author: Author
    host: Host
    incarnation: int = 0
    term: int = 0
    version: int = 0
    records: list[Record] = field(default_factory=list)

    @property
    def name(self) -> str:
        """What names the process."""
        return self.author.process

    @property
    def node(self) -> str:
        """The id of its present incarnation."""
        return f"{self.author.process}-{self.incarnation}"


class World:
    """One group in one protocol, with a true time that only this world knows, in seconds since its start."""

    def __init__(self, rng: random.Random, protocol: Protocol, group: str, *, begins: float = EPOCH) -> None:
        self.rng = rng
        self.protocol = protocol
        self.group = group
        self.now = 0.0
        self.revision = rng.randint(1, 1000)
        self.term = 0
        self.fenced = rng.choice([None, True, False])
        self._host_numbers = itertools.count()
        self.hosts = [self.host() for _ in range(rng.randint(2, 4))]
        self.processes: list[Process] = []
        self._begins = begins
        self._claims: dict[str, int] = {}
        self._resources = 0

    def host(self, clock_error_s: float | None = None) -> Host:
        """A host beside ``hosts``; by default its clock is off by no more than is allowed."""
        most = CLOCK_ERROR_S / 2 - 0.01
        return Host(
            f"host-{next(self._host_numbers)}",
            f"{self.group}-boot-{self.rng.getrandbits(64):016x}",
            self.rng.uniform(-most, most) if clock_error_s is None else clock_error_s,
            -self.rng.uniform(60.0, 1e6),
        )

    def process(self, host: Host, label: str | None = None) -> Process:
        """A new process on ``host``."""
        number = len(self.processes)
        label = label or f"worker-{number}"
        name = f"{self.group}-{label}-{self.rng.getrandbits(32):08x}"
        process = Process(
            Author(self.protocol, self.group, name, label, host.name, host.boot), host, term=self.term
        )
        self.processes.append(process)
        return process

    def resource(self) -> str:
        """The name of a resource that nobody has used yet; some are hard to write."""
        self._resources += 1
        return f"{self.rng.choice(NAMES)}-{self._resources}"

    def after(self, shortest_s: float, longest_s: float | None = None) -> float:
        """Let a drawn time pass, and tell what it is then."""
        self.now += shortest_s if longest_s is None else self.rng.uniform(shortest_s, longest_s)
        return self.now

    def commit(self) -> int:
        """The revision of a new write to the registry."""
        self.revision += self.rng.randint(1, 3)
        return self.revision

    def shuffled(self, things: Sequence[T]) -> list[T]:
        """The same things in a drawn order."""
        return self.rng.sample(things, len(things))

    def write(
        self,
        process: Process,
        kind: str,
        *,
        resource: str | None = None,
        token: int | None = None,
        revision: int | None = None,
        value: float | None = None,
        overlap_limit_s: float | None = None,
        detail: Mapping[str, str | int | float | bool | None] | None = None,
    ) -> None:
        """Let the process write a record now."""
        event = Event(
            kind,
            process.node,
            process.incarnation,
            process.term,
            process.version,
            resource,
            token,
            revision,
            value,
            self.fenced if resource is not None else None,
            overlap_limit_s,
            detail or {},
        )
        process.records.append(
            Record.of(
                process.author,
                event,
                sequence=len(process.records),
                wall=self._begins + self.now + process.host.clock_error_s,
                monotonic=self.now - process.host.booted_at,
            )
        )

    def add_barrier(self, process: Process, resource: str, token: int | None = None) -> int:
        """Take a token, and the barrier where the protocol has one."""
        token = self.commit() if token is None else token
        if kind := WORDS[self.protocol].barrier_added:
            self.write(process, kind, resource=resource, token=token, revision=token)
        return token

    def start(
        self,
        process: Process,
        resource: str,
        token: int,
        *,
        overlap_limit_s: float | None = None,
        claim: int | None = None,
    ) -> None:
        """Access begins now, and what begins it takes a moment."""
        words = WORDS[self.protocol]
        value: int | None = None
        if self.protocol is Protocol.SKULD:
            value = self._claims.get(resource, -1) + 1 if claim is None else claim
            self._claims[resource] = value
        self.write(
            process,
            words.start_entered,
            resource=resource,
            token=token,
            value=value,
            overlap_limit_s=overlap_limit_s,
        )
        if words.start_returned:
            self.after(0.001, 0.05)
            self.write(
                process,
                words.start_returned,
                resource=resource,
                token=token,
                overlap_limit_s=overlap_limit_s,
            )

    def stop(
        self,
        process: Process,
        resource: str,
        token: int,
        *,
        ends: float | None = None,
        overlap_limit_s: float | None = None,
    ) -> None:
        """Access ends: at the true time ``ends``, or after a moment."""
        words = WORDS[self.protocol]
        if words.stop_entered:
            if ends is not None:
                self.now = ends - 0.0005
            self.write(
                process, words.stop_entered, resource=resource, token=token, overlap_limit_s=overlap_limit_s
            )
        if ends is None:
            self.after(0.001, 0.05)
        else:
            self.now = ends
        self.write(
            process, words.stop_returned, resource=resource, token=token, overlap_limit_s=overlap_limit_s
        )

    def fail_to_stop(self, process: Process, resource: str, token: int) -> None:
        """OnStop of a group's node raises after a moment: nobody knows when access ends."""
        self.write(process, GroupKind.STOP_ENTERED, resource=resource, token=token)
        self.after(0.01, 1.0)
        detail = {"error": "RuntimeError: not now"}
        self.write(process, GroupKind.STOP_FAILED, resource=resource, token=token, detail=detail)

    def remove_barrier(
        self,
        process: Process,
        resource: str,
        token: int,
        revision: int | None = None,
        *,
        sent: float | None = None,
    ) -> int:
        """Give back the barrier where the protocol has one, asked for at ``sent``, and tell the revision."""
        revision = self.commit() if revision is None else revision
        if kind := WORDS[self.protocol].barrier_removed:
            sent = self.now if sent is None else sent
            self.after(0.001, 0.02)
            took_s = self.now - sent
            self.write(process, kind, resource=resource, token=token, revision=revision, value=took_s)
        return revision

    def take(
        self,
        process: Process,
        resource: str,
        *,
        token: int | None = None,
        overlap_limit_s: float | None = None,
        claim: int | None = None,
    ) -> int:
        """The barrier, then the start of an access: its token."""
        token = self.add_barrier(process, resource, token)
        self.after(0.001, 0.02)
        self.start(process, resource, token, overlap_limit_s=overlap_limit_s, claim=claim)
        return token

    def give(self, process: Process, resource: str, token: int, *, ends: float | None = None) -> int:
        """The end of an access, then its barrier given back: the revision of that."""
        self.stop(process, resource, token, ends=ends)
        return self.remove_barrier(process, resource, token)

    def note(self, process: Process, resource: str | None = None, token: int | None = None) -> None:
        """A record without meaning for any verdict."""
        value = round(self.rng.uniform(0.0, 100.0), 3) if self.protocol is Protocol.GROUP else None
        self.write(process, NOTES[self.protocol], resource=resource, token=token, value=value)
