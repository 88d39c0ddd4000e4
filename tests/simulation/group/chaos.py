"""Chance: faults at random times, and bursts of them in the middle of what matters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rebalanser.core.group.messages import Fact, FactKind
from rebalanser.core.group.types import POLICY_FIELDS, SPEC_FIELDS
from simulation.group.faults import HANDLER_FAULTS, RENEWAL_FAULTS, REQUEST_FAULTS, FaultKind
from simulation.group.network import Armed

if TYPE_CHECKING:
    from simulation.group.process import Host, Process
    from simulation.group.world import World

_DRAWS_FAULTS = frozenset(
    {
        FactKind.ALLOCATION_PUBLISHED,
        FactKind.ALLOCATION_ADOPTED,
        FactKind.BARRIER_ADDED,
        FactKind.BARRIER_BLOCKED,
        FactKind.BARRIER_REMOVED,
        FactKind.ELECTED,
        FactKind.JOINING,
        FactKind.JOINED,
        FactKind.STOP_FAILED,
        FactKind.ISOLATED,
        FactKind.RECONNECTED,
        FactKind.GROUP_READ,
        FactKind.LEAVING,
        FactKind.DEPOSED,
    }
)
_COMMANDS = (
    None,
    "AddBarriers",
    "AddBarriers",
    "RemoveBarriers",
    "RemoveBarriers",
    "Publish",
    "ReadShare",
    "ReadBarriers",
    "Acknowledge",
    "Campaign",
    "Resign",
    "Join",
    "Leave",
    "Heartbeat",
)


class Chaos:
    """Injects the faults that the scenario is about, until it is told to stop."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._random = world.random
        self._kinds = list(world.scenario.faults)
        self._weights = list(world.scenario.faults.values())
        self._quiet = False
        self._next_resource = world.scenario.resources
        self._over = False

    def begin(self) -> None:
        """Start the hosts at random moments and the faults with them."""
        world, random = self._world, self._random
        for host in world.hosts:
            self._start_later(host, random.choice((0.0, random.random(), 4 * random.random())))
        if self._kinds:
            world.reacts = self._react
            self._schedule()

    def end(self) -> None:
        """No more faults."""
        self._over = True

    def _schedule(self) -> None:
        mean_s = self._world.scenario.mean_between_faults_s * (6 if self._quiet else 1)
        self._world.scheduler.at(
            self._world.now + self._random.expovariate(1 / mean_s), self._strike_and_go_on
        )

    def _strike_and_go_on(self) -> None:
        if self._over:
            return
        if self._random.random() < 0.1:
            self._quiet = not self._quiet
        self._strike(self._random.choice(self._world.hosts))
        self._schedule()

    def _react(self, process: Process, fact: Fact) -> None:
        if fact.kind not in _DRAWS_FAULTS or self._quiet or self._over:
            return
        if self._random.random() >= self._world.scenario.burst / 3:
            return
        near = process.host if self._random.random() < 0.7 else self._random.choice(self._world.hosts)
        delay_s = self._random.choice((0.0, 0.002, 0.02)) * self._random.random()
        self._world.scheduler.at(
            self._world.now + delay_s, lambda: self._unless_over(lambda: self._strike(near))
        )

    def _unless_over(self, action: Callable[[], None]) -> None:
        if not self._over:
            action()

    def _strike(self, host: Host) -> None:
        kind = self._random.choices(self._kinds, self._weights)[0]
        if kind in REQUEST_FAULTS:
            self._disturb_requests(kind, host)
        elif kind in HANDLER_FAULTS:
            host.handler_faults.append(kind)
        else:
            _STRIKES[kind](self, host)

    def _disturb_requests(self, kind: FaultKind, host: Host) -> None:
        random, link = self._random, host.link
        operators = self._world.operators
        if operators and random.random() < 0.6:
            link = random.choice(operators).link
        if random.random() < 0.75:
            command = "Heartbeat" if kind in RENEWAL_FAULTS else random.choice(_COMMANDS)
            if operators:
                command = None
            elif FaultKind.RELEASE in self._kinds and random.random() < 0.3:
                command = "RecordReleases"
            link.armed.append(Armed(kind, command, random.choice((0, 0, 0, 1, 2))))
            return
        link.storm[kind] = random.uniform(0.1, 0.9)
        self._world.scheduler.at(self._world.now + random.uniform(0.1, 1.5), lambda: link.calm(kind))

    def _start_later(self, host: Host, delay_s: float) -> None:
        def start() -> None:
            if host.running is None and not self._over:
                self._world.start(host)

        self._world.scheduler.at(self._world.now + delay_s, start)

    def _watch_lost(self, host: Host) -> None:
        if host.running is not None:
            self._world.hit(FaultKind.WATCH_LOST, f"{host.name}: its watch streams break")
            host.running.lose_watches()

    def _watch_slow(self, host: Host) -> None:
        host.link.watch_lag_s = self._random.uniform(0.01, 1.0)
        self._later(0.2, 2.0, lambda: setattr(host.link, "watch_lag_s", 0.0))

    def _watch_silent(self, host: Host) -> None:
        host.link.watch_silent = True
        self._later(0.05, 1.5, lambda: setattr(host.link, "watch_silent", False))

    def _leading_refused(self, host: Host) -> None:
        link = host.link
        link.leading_refused = True
        if self._random.random() < 0.7:
            unheard = Armed(FaultKind.REPLY_LOST, "Heartbeat")
            link.armed.append(Armed(FaultKind.REPLY_LOST, "Resign", then=(unheard, unheard)))
            link.watch_silent = True

        def accept() -> None:
            link.leading_refused = link.watch_silent = False

        self._later(0.5, 4.0, accept)

    def _plan_overtaken(self, host: Host) -> None:
        read_slowly = Armed(FaultKind.REPLY_SLOW, "ReadGroup")
        host.link.armed.append(Armed(FaultKind.PLAN_OVERTAKEN, "Publish", then=(read_slowly,)))

    def _lease_revoked(self, host: Host) -> None:
        host.revoked_in_s = self._random.choice((0.005, 0.05)) * self._random.random()

    def _later(self, low_s: float, high_s: float, action: Callable[[], None]) -> None:
        self._world.scheduler.at(self._world.now + self._random.uniform(low_s, high_s), action)

    def _partition(self, host: Host) -> None:
        seconds = self._random.choice((0.3, 1.0, 2.0, 4.5)) * (0.5 + self._random.random())
        self._world.cut(host, seconds, refuses=self._random.random() < 0.5)

    def _outage(self, host: Host) -> None:
        seconds = self._random.uniform(0.1, 2.5)
        refuses = self._random.random() < 0.5
        self._world.hit(FaultKind.OUTAGE, f"the registry is out for {seconds:.3f} s")
        for each in self._world.hosts:
            self._world.cut(each, seconds, refuses)

    def _crash(self, host: Host) -> None:
        if host.running is None:
            self._start_later(host, 0.0)
            return
        self._world.hit(FaultKind.CRASH, f"{host.name}: crashes")
        self._world.crash(host)
        if self._random.random() < 0.8:
            self._start_later(host, self._random.choice((0.05, 1.0, 3.5)) * (0.5 + self._random.random()))

    def _stop(self, host: Host) -> None:
        if host.running is None:
            self._start_later(host, 0.0)
            return
        self._world.stop(host)
        if self._random.random() < 0.8:
            self._start_later(host, self._random.uniform(0.5, 4.0))

    def _stop_unbegun(self, host: Host) -> None:
        if host.running is None:
            self._world.hit(FaultKind.STOPPED_UNBEGUN, f"{host.name}: is asked to stop before it takes part")
            self._world.start(host, stopped=True)

    def _pause_short(self, host: Host) -> None:
        process = host.running
        margin_s = self._world.scenario.timings.safety_margin_s
        if process is None:
            return
        paused = self._world.oracle.conduct(process).paused
        if not paused.within(self._world.now - 4 * self._world.scenario.timings.lease_ttl_s, self._world.now):
            self._world.pause(host, margin_s * self._random.uniform(0.1, 0.8), FaultKind.PAUSE_SHORT)

    def _pause_long(self, host: Host) -> None:
        ttl_s = self._world.scenario.timings.lease_ttl_s
        self._world.pause(host, ttl_s * self._random.uniform(0.7, 1.7), FaultKind.PAUSE_LONG)

    def _pause_at_entry(self, host: Host) -> None:
        host.pause_at_entry_s = self._world.scenario.timings.lease_ttl_s * self._random.uniform(0.3, 1.7)

    def _drift_within(self, host: Host) -> None:
        ratio = self._world.scenario.timings.clock_drift_ratio
        self._world.drift(host, 1 + ratio * self._random.uniform(-0.95, 0.95), FaultKind.DRIFT_WITHIN)

    def _drift_beyond(self, host: Host) -> None:
        rate = self._random.choice((0.4, 0.7, 0.9, 1.2, 2.0))
        self._world.drift(host, rate, FaultKind.DRIFT_BEYOND)
        self._later(1.0, 5.0, lambda: self._world.drift(host, 1.0, FaultKind.DRIFT_WITHIN))

    def _restart_registry(self, host: Host) -> None:
        self._world.restart_registry()

    def _compact(self, host: Host) -> None:
        self._world.compact()
        if self._random.random() < 0.5 and host.running is not None:
            host.running.lose_watches()

    def _leases_late(self, host: Host) -> None:
        self._world.end_leases_late(
            self._world.scenario.capabilities.lease_detection_s * self._random.uniform(0.2, 1.0)
        )

    def _some(self) -> list[str]:
        names = sorted(self._world.resources)
        return self._random.sample(names, min(len(names), self._random.randint(1, 4)))

    def _add(self, host: Host) -> None:
        count = self._random.randint(1, 5)
        if len(self._world.resources) + count > max(24, self._world.scenario.resources + 12):
            return
        self._world.hit(FaultKind.RESOURCES_ADDED, f"{count} resources are added")
        names = [f"r{self._next_resource + index}" for index in range(count)]
        self._next_resource += count
        pin = host.plan.label if self._random.random() < 0.1 else None
        self._world.add(names, pin, self._fields(pin=pin is not None))

    def _remove(self, host: Host) -> None:
        names = self._some()
        if names:
            self._world.hit(FaultKind.RESOURCES_REMOVED, f"{len(names)} resources are removed")
            self._world.remove(names)

    def _readd(self, host: Host) -> None:
        names = self._some()
        if not names:
            return
        self._world.hit(FaultKind.RESOURCES_READDED, f"{len(names)} resources are removed and added")
        self._world.remove(names)
        self._later(
            0.0,
            self._random.choice((0.001, 0.1, 1.0)),
            lambda: self._unless_over(lambda: self._world.add(names, fields=self._fields(pin=False))),
        )

    def _fields(self, pin: bool) -> frozenset[str]:
        """Fields that a request changes in existing resources: with operators, the pin at most."""
        if not self._world.operators:
            return SPEC_FIELDS
        return frozenset({"pin"}) if pin else frozenset()

    def _weigh(self, host: Host) -> None:
        names = self._some()
        if names:
            self._world.hit(FaultKind.RESOURCES_WEIGHED, f"{len(names)} resources are weighed")
            self._world.weigh({name: self._random.choice((0.5, 1.0, 2.0)) for name in names})

    def _describe(self, host: Host) -> None:
        names = self._some()
        if names:
            fields = frozenset(self._random.sample(("weight", "needs", "spread"), self._random.randint(1, 3)))
            self._world.hit(FaultKind.RESOURCES_DESCRIBED, f"{len(names)} resources are described")
            self._world.add(names, fields=fields)

    def _set_policy(self, host: Host) -> None:
        names = sorted(POLICY_FIELDS)
        fields = self._random.sample(names, self._random.randint(1, len(names)))
        self._world.hit(FaultKind.POLICY, "the policy is changed")
        self._world.set_policy(self._world.scenario.draw_policy(self._random), frozenset(fields))

    def _drain(self, host: Host) -> None:
        self._world.hit(FaultKind.DRAIN, f"{host.plan.label} is drained")
        self._world.set_drained(host.plan.label, True)

    def _undrain(self, host: Host) -> None:
        self._world.hit(FaultKind.UNDRAIN, f"{host.plan.label} is undrained")
        self._world.set_drained(host.plan.label, False)

    def _release(self, host: Host) -> None:
        process = host.running
        if process is None or process.paused:
            return
        released = sorted(process.duties.released)
        if released and self._random.random() < 0.25:
            name = self._random.choice(released)
            self._world.hit(FaultKind.RELEASE, f"{host.name}: accepts {name}")
            process.accept(name)
            return
        owned = {**process.former_tokens, **process.tokens} if self._random.random() < 0.2 else process.tokens
        for name in self._random.sample(sorted(owned), min(len(owned), self._random.randint(1, 3))):
            for_s = self._random.choice((None, 0.05, 0.5, 2.0, 4.0))
            self._world.hit(FaultKind.RELEASE, f"{host.name}: releases {name} for {for_s} s")
            process.release(name, owned[name], for_s)

    def _pin(self, host: Host) -> None:
        names = self._some()[:1]
        if names:
            pin = host.plan.label if self._random.random() < 0.6 else None
            self._world.hit(FaultKind.PIN, f"{names[0]} is pinned to {pin}")
            self._world.add(names, pin, self._fields(pin=True))


_STRIKES: Mapping[FaultKind, Callable[[Chaos, Host], None]] = {
    FaultKind.WATCH_LOST: Chaos._watch_lost,
    FaultKind.WATCH_SLOW: Chaos._watch_slow,
    FaultKind.WATCH_SILENT: Chaos._watch_silent,
    FaultKind.LEADING_REFUSED: Chaos._leading_refused,
    FaultKind.PLAN_OVERTAKEN: Chaos._plan_overtaken,
    FaultKind.PARTITION: Chaos._partition,
    FaultKind.OUTAGE: Chaos._outage,
    FaultKind.CRASH: Chaos._crash,
    FaultKind.PAUSE_SHORT: Chaos._pause_short,
    FaultKind.PAUSE_LONG: Chaos._pause_long,
    FaultKind.PAUSE_AT_ENTRY: Chaos._pause_at_entry,
    FaultKind.DRIFT_WITHIN: Chaos._drift_within,
    FaultKind.DRIFT_BEYOND: Chaos._drift_beyond,
    FaultKind.REGISTRY_RESTART: Chaos._restart_registry,
    FaultKind.COMPACTION: Chaos._compact,
    FaultKind.LEASES_LATE: Chaos._leases_late,
    FaultKind.LEASE_REVOKED: Chaos._lease_revoked,
    FaultKind.RESOURCES_ADDED: Chaos._add,
    FaultKind.RESOURCES_REMOVED: Chaos._remove,
    FaultKind.RESOURCES_READDED: Chaos._readd,
    FaultKind.RESOURCES_WEIGHED: Chaos._weigh,
    FaultKind.RESOURCES_DESCRIBED: Chaos._describe,
    FaultKind.POLICY: Chaos._set_policy,
    FaultKind.DRAIN: Chaos._drain,
    FaultKind.UNDRAIN: Chaos._undrain,
    FaultKind.PIN: Chaos._pin,
    FaultKind.RELEASE: Chaos._release,
    FaultKind.GRACEFUL_STOP: Chaos._stop,
    FaultKind.STOPPED_UNBEGUN: Chaos._stop_unbegun,
}
