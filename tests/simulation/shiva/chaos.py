"""Chance: what befalls a world, when and whom."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from rebalanser.core.shiva.messages import FactKind
from rebalanser.core.shiva.records import StartCommand
from rebalanser.core.shiva.types import ApplicationId, Cordon
from simulation.shiva.clients import awkward
from simulation.shiva.faults import Fault
from simulation.shiva.log import Poison, Write
from simulation.shiva.running import SIGKILL
from simulation.shiva.scenario import DRIFT_RATIO, MAX_REPLICAS, requests

if TYPE_CHECKING:
    from rebalanser.core.shiva.messages import Fact
    from simulation.shiva.process import Process
    from simulation.shiva.world import Host, World

_DRAWS_FAULTS: Final = frozenset(
    {
        FactKind.TOOK_OVER,
        FactKind.WORKER_REMOVED,
        FactKind.WORKER_ADDED,
        FactKind.DOCUMENT_PUBLISHED,
        FactKind.DOCUMENT_ADOPTED,
        FactKind.PROCESS_STARTING,
        FactKind.PROCESS_STOPPING,
        FactKind.STOP_COMMANDED,
        FactKind.SCALE_COMMANDED,
    }
)
_BURST: Final = 0.04
_ON_REQUESTS: Final = frozenset({Fault.REQUEST_LOST, Fault.REQUEST_LATE, Fault.REPLY_LOST, Fault.COMMIT_LOST})
_ON_HOST: Final = _ON_REQUESTS | {
    Fault.DUPLICATE,
    Fault.FILES_SLOW,
    Fault.FILES_REFUSED,
    Fault.HANG,
    Fault.PAUSE_AT_SPAWN,
    Fault.PAUSE_AT_PONG,
}


class Chaos:
    """Strikes a world until it is told to end."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._random = world.random
        self._kinds = list(world.scenario.faults)
        self._weights = list(world.scenario.faults.values())
        self._over = False
        self._strikes: dict[Fault, Callable[[Host], None]] = {
            Fault.START: self._command_start,
            Fault.REPLACE: self._replace,
            Fault.STOP: self._stop,
            Fault.FLAP: self._flap,
            Fault.UNKNOWN_STOP: self._unknown_stop,
            Fault.WITHOUT_PARTS: self._without_parts,
            Fault.OVERSIZE: self._oversize,
            Fault.POISON: self._poison,
            Fault.BULK: self._bulk,
            Fault.SCALE: self._scale,
            Fault.CORDON: self._cordon,
            Fault.LEAVE: self._leave,
            Fault.CRASH: self._crash,
            Fault.ROLLING: self._rolling,
            Fault.NO_LEADER: self._no_leader,
            Fault.LEADER_LEAVES: self._leader_leaves,
            Fault.KICK: self._kick,
            Fault.PAUSE_SHORT: self._pause_short,
            Fault.PAUSE_LONG: self._pause_long,
            Fault.PAUSE_LEADER: self._pause_leader,
            Fault.CUT: self._cut,
            Fault.BROKER_DOWN: self._broker_down,
            Fault.LAG: self._lag,
            Fault.DRIFT_WITHIN: self._drift_within,
            Fault.DRIFT_BEYOND: self._drift_beyond,
            Fault.IMPOSTOR: self._impostor,
            Fault.EXIT: self._exit,
            Fault.ZOMBIE_DOCUMENT: self._zombie_document,
            Fault.COMPACTION: self._compaction,
            Fault.RETENTION: self._retention,
            Fault.CHANGE_LOST: self._change_lost,
        }

    def begin(self) -> None:
        """Start the hosts, the applications and the faults at random moments."""
        world = self._world
        world.faulty_applications = bool({Fault.FILES_REFUSED, Fault.EXIT} & set(self._kinds))
        for host in world.hosts:
            self._in(host.plan.starts_at_s, partial(world.start, host))
        for number in range(world.scenario.applications):
            self._in(
                self._random.choice((0.0, 1.0, 6.0)) * self._random.random(), partial(self._start, number)
            )
        if self._kinds:
            world.reacts = self._react
            self._schedule()

    def end(self) -> None:
        """No more faults."""
        self._over = True

    def _in(self, seconds: float, action: Callable[[], None]) -> None:
        def unless_over() -> None:
            if not self._over:
                action()

        self._world.after(seconds, unless_over)

    def _schedule(self) -> None:
        def strike() -> None:
            self.strike(self._kind(), self._random.choice(self._world.hosts))
            self._schedule()

        self._in(self._random.expovariate(1 / self._world.scenario.mean_between_faults_s), strike)

    def _kind(self) -> Fault:
        return self._random.choices(self._kinds, self._weights)[0]

    def _react(self, process: Process, fact: Fact) -> None:
        if fact.kind in _DRAWS_FAULTS and self._random.random() < _BURST:
            host = process.host if self._random.random() < 0.7 else self._random.choice(self._world.hosts)
            self._in(
                self._random.choice((0.0, 0.02, 0.3)) * self._random.random(),
                lambda: self.strike(self._kind(), host),
            )

    def strike(self, kind: Fault, host: Host) -> None:
        """Let a fault befall a host, or the world."""
        if self._over:
            return
        if kind in _ON_HOST:
            host.armed.append(kind)
        else:
            self._strikes[kind](host)

    def _number(self) -> int:
        return self._random.randrange(self._world.scenario.applications)

    def _start(self, number: int, anew: bool = True) -> None:
        world, random = self._world, self._random
        tagged, strange = random.random() < world.scenario.tagged, random.random() < world.scenario.awkward
        world.clients.fails_next = world.clients.fails_next or (
            Fault.REQUEST_LOST in self._kinds and random.random() < 0.2
        )
        world.clients.doubles_next = Fault.DUPLICATE in self._kinds and random.random() < 0.3
        world.clients.start(
            world.application(number),
            world.mode(),
            frozenset({"gpu"}) if tagged else frozenset(),
            awkward(world) if strange else None,
            parts=random.randint(1, 2),
            anew=anew,
            requests=requests(random)
            if world.scenario.weighed and random.random() < world.scenario.weighed
            else None,
            replicas=random.randint(1, MAX_REPLICAS)
            if world.scenario.replicated and random.random() < world.scenario.replicated
            else 1,
        )

    def _command_start(self, _: Host) -> None:
        number = self._number()
        if not isinstance(self._world.oracle.commands.get(self._world.application(number)), StartCommand):
            self._hit(Fault.START, f"start of a{number}")
            self._start(number)

    def _replace(self, _: Host) -> None:
        number = self._number()
        self._hit(Fault.REPLACE, f"replacement of a{number}")
        self._start(number, anew=self._random.random() < 0.7)

    def _stop(self, _: Host) -> None:
        number = self._number()
        self._hit(Fault.STOP, f"stop of a{number}")
        self._world.clients.stop(self._world.application(number))

    def _flap(self, _: Host) -> None:
        number = self._number()
        self._hit(Fault.FLAP, f"stop and start of a{number}")
        for _time in range(self._random.randint(1, 3)):
            self._world.clients.stop(self._world.application(number))
            self._start(number)

    def _hit(self, kind: Fault, sentence: str) -> None:
        self._world.hit(kind, sentence)

    def _unknown_stop(self, _: Host) -> None:
        self._hit(Fault.UNKNOWN_STOP, "stop of what was never started")
        self._world.clients.stop(ApplicationId("t", "c", "never"))

    def _without_parts(self, _: Host) -> None:
        self._hit(Fault.WITHOUT_PARTS, "start of an archive that is not there")
        self._world.clients.start_without_parts(self._world.application(self._number()), self._world.mode())

    def _oversize(self, _: Host) -> None:
        self._hit(Fault.OVERSIZE, "start of too large an archive")
        self._world.clients.start_oversize(self._world.application(self._number()), self._world.mode())

    def _poison(self, _: Host) -> None:
        world, broker = self._world, self._world.broker
        topic = self._random.choice((broker.command, broker.control))
        keys = ("poison", "cmd:t/c/poison") if topic is broker.command else ("ping", "pong:d0")
        self._hit(Fault.POISON, f"a record on {topic.name} that cannot be read")
        broker.append(world.now, Write(topic, self._random.choice(keys), Poison("not JSON"), 40))

    def _bulk(self, _: Host) -> None:
        self._hit(Fault.BULK, "an archive that is never started")
        self._world.clients.bulk(self._world.application(self._number()))

    def _scale(self, _: Host) -> None:
        number, replicas = self._number(), self._random.randint(1, MAX_REPLICAS)
        self._hit(Fault.SCALE, f"a{number} is to have {replicas} replicas")
        self._world.clients.scale(self._world.application(number), replicas)

    def _cordon(self, host: Host) -> None:
        if host.plan.worker is not None:
            cordon = self._random.choice((None, *Cordon))
            self._hit(Fault.CORDON, f"{host.plan.worker} is {cordon or 'uncordoned'}")
            self._world.clients.cordon(host.plan.worker, cordon)

    def _leave(self, host: Host) -> None:
        if host.up and not host.waits_for_lock:
            self._hit(Fault.LEAVE, f"{host.plan.name}: is asked to stop")
            self._world.stop(host)
            self._in(self._random.uniform(1.0, 10.0), lambda: self._world.start(host))

    def _crash(self, host: Host) -> None:
        if host.up and not host.waits_for_lock:
            self._hit(Fault.CRASH, f"{host.plan.name}: is killed")
            self._world.crash(host)
            self._in(self._random.uniform(1.0, 15.0), lambda: self._world.start(host))

    def _rolling(self, host: Host) -> None:
        if host.up and not host.waits_for_lock:
            self._hit(Fault.ROLLING, f"{host.plan.name}: is killed, and started again at once")
            self._world.crash(host)
            self._world.start(host)

    def _no_leader(self, _: Host) -> None:
        seconds = self._random.uniform(2.0, 9.0)
        self._hit(Fault.NO_LEADER, f"all leaders are killed, for {seconds:.3f} s")
        for host in [host for host in self._world.hosts if host.plan.leads and host.up]:
            self._world.crash(host)
            self._in(seconds, partial(self._world.start, host))

    def _leader_leaves(self, _: Host) -> None:
        leader = self._world.group.holder
        if leader is not None and leader.alive and leader.host.plan.worker is None:
            self._hit(Fault.LEADER_LEAVES, f"{leader.name}: is asked to stop")
            self._world.stop(leader.host)
            self._in(self._random.uniform(0.5, 5.0), lambda: self._world.start(leader.host))

    def _kick(self, _: Host) -> None:
        if self._world.group.holder is not None:
            self._hit(Fault.KICK, "the group shares its partition out anew")
            self._world.group.kick()

    def _pause_short(self, host: Host) -> None:
        self._world.pause(host, self._random.uniform(0.05, 1.0), Fault.PAUSE_SHORT)

    def _pause_long(self, host: Host) -> None:
        self._world.pause(host, self._random.uniform(1.0, 15.0), Fault.PAUSE_LONG)

    def _pause_leader(self, _: Host) -> None:
        leader = self._world.group.holder
        if leader is not None and leader.alive:
            session_s = self._world.scenario.session_s
            self._world.pause(leader.host, session_s * self._random.uniform(1.0, 6.0), Fault.PAUSE_LEADER)

    def _cut(self, host: Host) -> None:
        if host.up:
            self._world.cut(host, self._random.choice((1.0, 4.0, 15.0)) * (0.3 + self._random.random()))

    def _broker_down(self, _: Host) -> None:
        self._world.take_broker_down(self._random.uniform(0.1, 5.0))

    def _lag(self, host: Host) -> None:
        topic = self._random.choice(("COMMAND", "CONTROL"))
        longest_s = self._random.choice((5.0, 5.0, 20.0))
        self._world.lag(
            host, topic, self._random.uniform(0.2, longest_s), self._random.uniform(1.0, 2.4 * longest_s)
        )

    def _drift_within(self, host: Host) -> None:
        rate = 1 + DRIFT_RATIO / 2 * self._random.uniform(-0.95, 0.95)
        self._world.drift(host, rate, Fault.DRIFT_WITHIN)

    def _drift_beyond(self, host: Host) -> None:
        rate = self._random.choice((0.5, 0.8, 1.3, 2.0))
        self._world.drift(host, rate, Fault.DRIFT_BEYOND)
        self._in(self._random.uniform(1.0, 8.0), partial(self._world.run_clock, host, 1.0))

    def _impostor(self, host: Host) -> None:
        twins = [
            h for h in self._world.hosts if h is not host and h.worker_id and h.worker_id == host.worker_id
        ]
        if twins and host.up and twins[0].up:
            self._hit(Fault.IMPOSTOR, f"{host.plan.name} and {twins[0].plan.name} are both {host.worker_id}")

    def _exit(self, _: Host) -> None:
        running = [process for host in self._world.hosts for process in host.processes]
        if running:
            process = self._random.choice(running)
            self._hit(Fault.EXIT, f"{process.host.plan.name}: {process.application} ends by itself")
            process.end(self._random.choice((1, SIGKILL)))

    def _change_lost(self, _: Host) -> None:
        self._world.loses_next_change = True

    def _zombie_document(self, _: Host) -> None:
        self._world.forge()

    def _compaction(self, _: Host) -> None:
        self._world.compact()

    def _retention(self, _: Host) -> None:
        """Retention is always about; it shows once there is enough to drop."""
        self._world.clients.bulk(self._world.application(self._number()))
