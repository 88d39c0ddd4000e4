"""The oracle: what must never be, judged by true time and by what the broker really did.

It asks members what they would answer at this very instant, also those that are stopped and could not even be
asked, and compares that with the coordinator's memory of who had a partition until when.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rebalanser.core.neli.settings import GroupProtocol, Mode
from simulation.kernel.reports import Violation
from simulation.kernel.scheduler import Scheduler
from simulation.neli.coordinator import Coordinator
from simulation.neli.log import Topic
from simulation.neli.process import Process
from simulation.neli.scenario import Scenario

_EPSILON_S = 1e-3


@dataclass
class Oracle:
    """Judges after every event of a process."""

    scenario: Scenario
    scheduler: Scheduler
    topic: Topic
    coordinator: Coordinator
    processes: list[Process]
    """Those of the world, which adds to them."""
    inductions: int = 0
    leader_changes: int = 0
    releases: int = 0
    overlaps: int = 0
    longest_overlap_s: float = 0.0
    _tokens: dict[int, dict[tuple[str, int], int]] = field(default_factory=dict)
    _highest: dict[int, int] = field(default_factory=dict)
    _leading: dict[str, dict[int, int]] = field(default_factory=dict)
    _leader: dict[int, str] = field(default_factory=dict)
    _overlaps_since: dict[tuple[str, str, int], float] = field(default_factory=dict)

    def look(self, process: Process) -> None:
        """Judge what a process would say now, beside what every other would."""
        member, now = process.member, process.now
        leads = {}
        for partition in process.owned:
            token = member.token_of(partition, now)
            if token is not None:
                leads[partition] = token
        before = self._leading.get(process.name, {})
        self._leading[process.name] = leads
        for partition, token in leads.items():
            if before.get(partition) != token:
                self._begins(process, partition, token)
            self._has_evidence(process, partition)
        together = self._nobody_else_leads(process) if leads else set()
        for ended in [key for key in self._overlaps_since if process.name in key and key not in together]:
            del self._overlaps_since[ended]

    def left_in_order(self, process: Process) -> None:
        """A process leaves: it leads nothing, and no handler of it runs."""
        if process.lapsing or process.member.held(process.now):
            raise Violation("NE-9", f"{process.name} leaves while it leads or its handlers run")

    def _begins(self, process: Process, partition: int, token: int) -> None:
        self.inductions += 1
        if self._leader.get(partition, process.name) != process.name:
            self.leader_changes += 1
        self._leader[partition] = process.name
        tokens = self._tokens.setdefault(partition, {})
        key = (process.name, token)
        highest = self._highest.get(partition, -1)
        known = key in tokens
        exclusive = self.scenario.settings.mode is not Mode.NON_EXCLUSIVE
        if (not known and token <= highest) or (exclusive and token < highest):
            raise Violation(
                "NE-15", f"{process.name} leads partition {partition} with token {token} after {highest}"
            )
        tokens[key] = token
        self._highest[partition] = max(highest, token)

    def _has_evidence(self, process: Process, partition: int) -> None:
        settings, now = process.settings, self.scheduler.now
        longest_s = settings.limit_s / (1 - settings.clock_drift_ratio) + _EPSILON_S
        if not self._had_since(process, partition, now - longest_s):
            raise Violation(
                "NE-10", f"{process.name} leads partition {partition} long after it was another's or nobody's"
            )
        if settings.mode is Mode.FAST:
            last = self.topic.last_of_process(process.name, partition)
            if last < now - longest_s:
                raise Violation(
                    "NE-9",
                    f"{process.name} leads partition {partition}, its last heartbeat came at {last:.3f}",
                )
        if settings.mode is Mode.EXCLUSIVE:
            last = self.topic.appended_at(partition, process.positions[partition] - 1)
            if last < now - longest_s - 2 * settings.clock_error_s:
                raise Violation(
                    "NE-7", f"{process.name} leads partition {partition} by a record of {last:.3f}"
                )

    def _nobody_else_leads(self, process: Process) -> set[tuple[str, str, int]]:
        """What ``process`` leads together with others, which only ``non-exclusive`` allows, for a while."""
        together = set()
        held = process.member.held(process.now)
        for other in self.processes:
            if other is process or not other.alive:
                continue
            for role in other.member.held(other.now).keys() & held.keys():
                first, second = sorted((process.name, other.name))
                together.add((first, second, int(role)))
                self._two_lead(process, other, (first, second, int(role)))
            for partition, (limit, client) in other.lapsing.items():
                if (
                    self.scenario.settings.mode is not Mode.NON_EXCLUSIVE
                    and partition in self._leading[process.name]
                    and other.now < limit
                    and not other.is_paused
                    and client in self.coordinator.members
                ):
                    raise Violation(
                        "NE-9",
                        f"{process.name} leads partition {partition}, {other.name} still hands it over",
                    )

        return together

    def _two_lead(self, process: Process, other: Process, key: tuple[str, str, int]) -> None:
        settings, now = self.scenario.settings, self.scheduler.now
        both = f"{process.name} and {other.name} both lead role {key[2]}"
        if settings.mode is not Mode.NON_EXCLUSIVE:
            raise Violation("NE-4", f"{both} at {now:.4f}")
        if process.member.partitions != other.member.partitions:
            return
        since = self._overlaps_since.setdefault(key, now)
        if since == now:
            self.overlaps += 1
        lasted_s = now - since
        self.longest_overlap_s = max(self.longest_overlap_s, lasted_s)
        longest_s = settings.limit_s / (1 - settings.clock_drift_ratio) + _EPSILON_S
        renews = settings.protocol is GroupProtocol.CLASSIC
        if renews and not self._was_expelled_early(process, other):
            longest_s -= settings.session_timeout_s
        if lasted_s > longest_s:
            raise Violation("NE-6", f"{both} since {since:.4f}, longer than {longest_s:.3f} s")

    def _had_since(self, process: Process, partition: int, since: float) -> bool:
        """Return True if the broker counted a process as a partition's owner at ``since`` or later."""
        ownership = self.coordinator.ownership
        prefix = f"{process.name}/"
        if ownership.owner.get(partition, "").startswith(prefix):
            return True
        ends = (
            until
            for (who, what), until in ownership.until.items()
            if what == partition and who.startswith(prefix)
        )
        return max(ends, default=float("-inf")) >= since

    def _was_expelled_early(self, *processes: Process) -> bool:
        """Return True if one of them was expelled for another reason than the end of its session."""
        why = self.coordinator.ownership.expelled
        return any(
            reason and who.partition("/")[0] == process.name
            for process in processes
            for who, reason in why.items()
        )
