"""Servers that hand out claims over HTTP, and their clients. The product decides which client is served.

Clients hang up at any moment, also during an answer; answers are late or lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import Any, Final

from rebalanser.core.tasks import rules
from rebalanser.core.tasks.claims import Claimed
from rebalanser.core.tasks.dispensing import (
    AnswerClient,
    ClaimForClient,
    ClaimForOthers,
    DispensedClaim,
    DispenserRequest,
    Dispensing,
    FailClaim,
    FillPayload,
    NextClaim,
    OfferToOwners,
    RefuseClient,
    ReleaseClaim,
    ReportClaims,
    TryClaiming,
)
from rebalanser.core.tasks.model import Stored
from rebalanser.core.tasks.rules import Decision
from rebalanser.core.tasks.worker import FetchPayloads
from rebalanser.core.tasks.writes import PendingMove
from rebalanser.errors import InvalidTask, RetryLater
from rebalanser.tasks.http.dispenser import ClaimsFuture, LongPoll
from simulation.kernel.reports import Violation
from simulation.tasks.claiming import ClaimingProcess, Signal, judge_time
from simulation.tasks.executing import source_of
from simulation.tasks.network import Resume, Wish, once
from simulation.tasks.process import Host, Script, Surroundings
from simulation.tasks.working import NAMES, PLAIN, Working, WorkingProcess
from simulation.tasks.writing import driven

PATIENCE_S: Final = 0.8
"""Seconds beyond the long poll's time for which a client waits for an answer."""


class Connection:
    """A request of a client for claims, and the answer to it."""

    def __init__(self, client: HttpClient, reply: Callable[[Sequence[DispensedClaim]], None]) -> None:
        self.client = client
        self.reply = reply
        self.waiting: LongPoll | None = None
        """The waiting client at the server, once the request has arrived."""

    def handed_out(self) -> Sequence[DispensedClaim]:
        """The claims in the answer, unless the client has hung up."""
        waiting = self.waiting
        if waiting is None or waiting.has_hung_up or not waiting.future.done():
            return ()
        return () if waiting.future.exception() is not None else waiting.future.result()


class ServerProcess(ClaimingProcess):
    """A server: one thread that claims for clients, in FIFO order."""

    def __init__(self, world: Surroundings, name: str, host: Host) -> None:
        super().__init__(world, name, host)
        self._dispensing: Dispensing[ClaimsFuture] = Dispensing(lambda: self.now, Future)
        self._pause_s: float | None = 0.0
        self._in_hand: dict[str, Claimed] = {}
        """Claims made for clients that were neither sent to one nor ended, by holder."""
        self._connections: list[Connection] = []
        """Requests of clients that have not been answered."""
        self._first: tuple[LongPoll | None, float] = (None, 0.0)
        """The first waiting client, whose room is offered, and the true time since which it is the first."""
        self._has_ended = Signal(self)
        self._offers_end = Signal(self)
        self._source = source_of(self, self._offers_end)
        self.spawn(self.loop("dispenser", self._step, self._has_ended))

    def ask(self, connection: Connection, limit: int, wait_s: float, names: Collection[str] | None) -> None:
        """Take in a client's request for claims."""
        try:
            waiting = self._dispensing.add(connection.client.name, limit, wait_s, names)
        except RetryLater:
            connection.reply(())
            return
        connection.waiting = waiting
        self._connections.append(connection)
        answered = partial(self.received, partial(self._answered, connection))
        waiting.future.add_done_callback(lambda _: self.world.after(self.world.delay(), answered))
        self.wake()

    def hang_up(self, connection: Connection) -> None:
        """Notice that a connection has ended."""
        waiting = connection.waiting
        if waiting is None or connection not in self._connections:
            return
        self.world.oracle.counts["clients that hang up"] += 1
        self._connections.remove(connection)
        handed_out = connection.handed_out()
        if self.world.random.random() < 0.5:
            waiting.future.cancel()
        for each in self._dispensing.forget(waiting):
            self._release(each)
        self.wake()
        if any(each.claimed.held.holder in self._in_hand for each in handed_out):
            raise Violation("SK-20", f"{self.name} keeps what a client got that has hung up")

    def stop(self) -> None:
        """Hand out no more claims, answer all waiting clients, and leave."""
        if not self.stopping:
            self.world.oracle.counts["graceful stops"] += 1
            self.stopping = self._dispensing.stopping = True
            self.wake()
            self._source.hurry()
            self.spawn(self._stop())

    def _stop(self) -> Script:
        yield self._has_ended.wait(None)
        yield from driven(self._dispensing.stop(), self._perform)
        if any(each.waiting is not None and not each.waiting.future.done() for each in self._connections):
            raise Violation("SK-16", f"{self.name} stops, and leaves a client without an answer")
        yield from self.leave(self._source, self._offers_end)

    def owes_answer(self, connection: Connection) -> bool:
        """True if a client waits for an answer that it could get."""
        return connection in self._connections and self.alive and not self.stopping

    def waits_since(self, name: str) -> float:
        """Return the true time since which a client of this function is the first; infinity if none is."""
        first, since = self._first
        if first is None or first not in self._dispensing.clients[:1] or self.stopping:
            return math.inf
        return since if first.names is None or name in first.names else math.inf

    def _answered(self, connection: Connection) -> None:
        """Send an answer, unless the client has hung up meanwhile."""
        if connection in self._connections:
            self._connections.remove(connection)
            handed_out = connection.handed_out()
            for each in handed_out:
                self._in_hand.pop(each.claimed.held.holder)
            connection.reply(handed_out)

    def _step(self) -> Script:
        yield self._woken.wait(self._pause_s)
        if self.stopping:
            return False
        self._pause_s = 0.0
        began = self.now
        try:
            self._pause_s = yield from driven(self._dispensing.step(), self._perform)
        except Violation:
            raise
        except Exception:
            self._judge()
            raise
        self._judge()
        first = next(iter(self._dispensing.clients), None)
        if first is not self._first[0]:
            self._first = (first, self.world.now)
        if any(each.deadline <= began for each in self._dispensing.clients):
            raise Violation("SK-16", f"{self.name} lets a client wait for longer than it wants")
        return True

    def _judge(self) -> None:
        """Judge that each claim went to a client or was given back, and that no client is forgotten."""
        handed_out = {each.claimed.held.holder for one in self._connections for each in one.handed_out()}
        if not self._in_hand.keys() <= handed_out:
            raise Violation("SK-20", f"{self.name} keeps a claim that no client has")
        for each in self._connections:
            waiting = each.waiting
            if waiting is None or waiting.future.done() or waiting in self._dispensing.clients:
                continue
            raise Violation("SK-16", f"{self.name} has forgotten {waiting.worker}, which waits")

    def _perform(self, request: DispenserRequest) -> Script:
        match request:
            case ClaimForClient(client=client):
                return (yield from self._claim(client))
            case FetchPayloads(claimed=claimed):
                return (yield from self.payloads(claimed))
            case FillPayload(payload=payload):
                return (yield from self._filled(payload))
            case TryClaiming():
                yield from self.asked(lambda: None)
                yield from self._source.claim(1, ())
            case ClaimForOthers():
                yield from self._source.claim_for_others()
            case _:
                return self._performed(request)
        return None

    def _performed(self, request: DispenserRequest) -> Any:
        """Make a request that takes no time."""
        match request:
            case ReleaseClaim(claimed=claimed):
                self._release(claimed)
            case FailClaim(claimed=claimed):
                held = claimed.held
                self._end(claimed, lambda stored: rules.fail(stored.head, stored.state, held, "unread", None))
            case AnswerClient(client=client, dispensed=dispensed):
                return self._answer(client, lambda: client.future.set_result([*dispensed]))
            case RefuseClient(client=client, error=error):
                self.world.oracle.counts["clients told of an error"] += 1
                self._answer(client, lambda: client.future.set_exception(error))
            case ReportClaims(error=error):
                if error is not None:
                    return self.failures.failed("claims", error, self.now, self.wall).pause_s
                self.failures.ended("claims")
            case OfferToOwners(rooms=rooms):
                self._source.offer(rooms)
            case NextClaim(names=names):
                next_s = self._source.next_s(names)
                return None if next_s is None else self.now + next_s
        return None

    def _claim(self, client: LongPoll) -> Script:
        """Claim for a client; judge that it has not hung up and that the order is FIFO."""
        if client.has_hung_up:
            raise Violation("SK-20", f"{self.name} claims for {client.worker}, which has hung up")
        first = min(self._dispensing.clients, key=lambda each: each.requested_at, default=client)
        if first.requested_at < client.requested_at:
            raise Violation("SK-16", f"{self.name} serves {client.worker} before {first.worker}")
        claimed = yield from self._source.claim(client.limit, client.names, client.worker)
        self._in_hand |= {each.held.holder: each for each in claimed}
        self.world.oracle.counts["claims for clients"] += len(claimed)
        return claimed

    def _filled(self, payload: bytes) -> Script:
        """Fill a payload: some need results, a few of which are invalid."""
        if self.world.random.random() < 0.1:
            yield from self.asked(lambda: None)
        if self.world.random.random() < 0.02:
            raise InvalidTask("a result that is no number")
        return payload

    def _answer(self, client: LongPoll, settle: Callable[[], None]) -> bool:
        """Answer a client; False if it has hung up."""
        try:
            settle()
        except InvalidStateError:
            return False
        self.world.oracle.counts["answers while a client hangs up"] += client.has_hung_up
        return True

    def _release(self, claimed: Claimed) -> None:
        self.world.oracle.counts["given back"] += 1
        self._end(claimed, lambda stored: rules.release(stored.state, claimed.held))

    def _end(self, claimed: Claimed, rule: Callable[[Stored], Decision]) -> None:
        if self._in_hand.pop(claimed.held.holder, None) is None:
            raise Violation("SK-20", f"{self.name} ends a claim that it does not have")
        self.writer.submit_all([PendingMove(claimed.stored, rule, lasting=True)], claimed.held)


class HttpClient(WorkingProcess):
    """A worker in another language: it polls servers for claims, and sometimes hangs up."""

    def __init__(self, world: Surroundings, name: str, host: Host, servers: list[ServerProcess]) -> None:
        super().__init__(world, name, host, stubborn_ratio=0.2)
        self._servers = servers
        """Those of the world, which replaces them."""
        self._hangs_up: Callable[[], None] | None = None
        self.spawn(self._run())

    def kill(self) -> None:
        """End the process, and its connection."""
        super().kill()
        if self._hangs_up is not None:
            self._hangs_up()

    def _run(self) -> Script:
        random = self.world.random
        while True:
            yield self.sleep(random.uniform(0.0, 0.2))
            if not self._servers:
                continue
            asked_at = self.now
            server = random.choice(self._servers)
            dispensed: Sequence[DispensedClaim] = yield self._ask(server)
            for each in dispensed[1:]:
                self.spawn(self._work(each, asked_at))
            for each in dispensed[:1]:
                yield from self._work(each, asked_at)

    def _work(self, dispensed: DispensedClaim, asked_at: float) -> Script:
        claimed, counted_from = dispensed.claimed, asked_at + dispensed.waited_s
        judge_time(self, claimed.stored, counted_from)
        self._at_work += 1
        yield from Working(self, claimed.stored, claimed.held.holder, counted_from).run()
        self._at_work -= 1

    def _ask(self, server: ServerProcess) -> Wish:
        """Request claims from a server; the answer has the claims, none if it came too late."""
        world = self.world
        random = world.random
        wait_s = random.choice((0.0, 0.3, 1.0))
        names = random.choice((None, NAMES, frozenset({PLAIN})))
        limit = random.randint(1, 3)
        hangs_up_s = (
            random.uniform(0.0, random.choice((0.1, wait_s + 0.1))) if random.random() < 0.3 else None
        )

        def wish(resume: Resume) -> None:
            finish = once(self._finished(resume))
            connection = Connection(self, lambda dispensed: self._replied(finish, dispensed))

            def hang_up() -> None:
                finish(())
                world.after(world.delay(), lambda: server.received(lambda: server.hang_up(connection)))

            def lose_patience() -> None:
                if server.owes_answer(connection) and world.is_quiet:
                    raise Violation("SK-16", f"{server.name} does not answer {self.name}")
                hang_up()

            self._hangs_up = hang_up
            ask = partial(server.ask, connection, limit, wait_s, names)
            world.after(world.delay(), lambda: server.received(ask))
            world.after(wait_s + PATIENCE_S, lose_patience)
            if hangs_up_s is not None:
                world.after(hangs_up_s, hang_up)

        return wish

    def _finished(self, resume: Resume) -> Resume:
        def finish(answer: Any) -> None:
            self._hangs_up = None
            resume(answer)

        return finish

    def _replied(self, finish: Resume, dispensed: Sequence[DispensedClaim]) -> None:
        """Deliver an answer, which may be slow, or lost unnoticed by the server."""
        world, random = self.world, self.world.random
        is_struck = random.random() < world.network.fault_ratio
        if not is_struck or random.random() < 0.5:
            slow_s = random.uniform(0.1, 0.5) if is_struck else 0.0
            world.after(world.delay() + slow_s, lambda: finish(dispensed))
