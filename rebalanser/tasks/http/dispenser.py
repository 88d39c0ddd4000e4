"""Hands out the claims of a server's source to waiting clients, in FIFO order."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeAlias

from rebalanser.core.tasks import rules
from rebalanser.core.tasks.claims import Claimed
from rebalanser.core.tasks.dispensing import (
    AnswerClient,
    ClaimForClient,
    ClaimForOthers,
    DispensedClaim,
    DispenserRequest,
    DispenserScript,
    Dispensing,
    EndOverClaims,
    FailClaim,
    FillPayload,
    NextClaim,
    OfferToOwners,
    RecordClaims,
    RefuseClient,
    ReleaseClaim,
    ReportClaims,
    TryClaiming,
    WaitingClient,
)
from rebalanser.core.tasks.worker import FetchPayloads
from rebalanser.core.tasks.writes import PendingMove, ResultT, run_script
from rebalanser.errors import InternalError, InvalidTask, RebalanserError
from rebalanser.runtime.logs import get_logger
from rebalanser.tasks.context import Context
from rebalanser.tasks.execution.claim_source import ClaimSource
from rebalanser.tasks.execution.outcomes import raised
from rebalanser.tasks.http.claims import ClaimHistory
from rebalanser.tasks.http.problems import TOO_MANY, ProblemRaised
from rebalanser.tasks.loops import Loop
from rebalanser.tasks.results import fill_results

_log = get_logger()
ClaimsFuture: TypeAlias = Future[list[DispensedClaim]]
LongPoll: TypeAlias = WaitingClient[ClaimsFuture]
"""A client of this server that waits for claims."""


class Dispenser:
    """The one thread of a server that claims. All methods may be called from any thread.

    At most ``max_waiting`` clients wait for a task, so that connections are left for other requests.
    """

    def __init__(self, context: Context, max_waiting: float = math.inf) -> None:
        self._context = context
        self._max_waiting = max_waiting
        self._woken = threading.Event()
        self.claim_history = ClaimHistory(context, self._woken.set)
        """History of the claims that were handed out."""
        self._source: ClaimSource | None = None
        self._lock = threading.Lock()
        self._dispensing: Dispensing[ClaimsFuture] = Dispensing(context.clock.now, Future)
        self._pause: float | None = 0.0
        """Seconds until a client can be served or a claim ends, unless woken before; None for ever."""
        self._loop = Loop("dispenser", self._step, context.errors)

    def start(self, source: ClaimSource) -> None:
        """Begin to hand out claims of this source.

        Raises:
            RegistryUnavailable: the engine did not answer in time.
        """
        self.claim_history.follow()
        self._source = source
        self._loop.start()

    def wake(self) -> None:
        """Look for tasks to claim."""
        self._woken.set()

    def owned(self, partitions: int) -> int:
        """Return how many of the queue's ``partitions`` partitions this server claims from."""
        held = self._source
        return 0 if held is None else sum(held.owns(number) for number in range(partitions))

    def stop(self) -> None:
        """Hand out no more claims; waiting clients get none. Stopping twice does nothing."""
        with self._lock:
            self._dispensing.stopping = True
        self._woken.set()
        self._loop.end_soon()
        self._loop.join()
        self._context.errors.ended("claims")
        self.claim_history.close()
        self._run(self._dispensing.stop())

    def request(
        self, worker: str, limit: int, wait_s: float, names: Collection[str] | None = None
    ) -> LongPoll:
        """Request at most ``limit`` claims of these functions, and wait at most ``wait_s`` seconds.

        The client's future gets the claims, or the error of an engine that is away.

        Raises:
            RetryLater: the server stops.
            ProblemRaised: too many clients wait already.
        """
        with self._lock:
            is_full = wait_s > 0 and len(self._dispensing.clients) >= self._max_waiting
            if is_full and not self._dispensing.stopping:
                raise ProblemRaised(TOO_MANY, f"{self._max_waiting} clients wait for a task already")
            client = self._dispensing.add(worker, limit, wait_s, names)
        self._woken.set()
        return client

    def forget(self, client: LongPoll) -> None:
        """Give back what was claimed for a client that has hung up, or is claimed for it now."""
        with self._lock:
            given_back = self._dispensing.forget(client)
        for each in given_back:
            self._give_back(each)
        self._woken.set()  # its room is offered no longer, and that of the next client is

    def _step(self) -> bool:
        self._woken.wait(self._pause)
        self._woken.clear()
        if self._dispensing.stopping:
            return False
        self._pause = 0.0
        self._pause = self._run(self._dispensing.step())
        return True

    def _run(self, script: DispenserScript[ResultT]) -> ResultT:
        return run_script(script, self._perform, self._lock)

    def _perform(self, request: DispenserRequest) -> Any:
        """Make one request of a script. The lock is not held."""
        match request:
            case RecordClaims(claimed=claimed):
                for each in claimed:
                    self.claim_history.claimed(each)
            case FillPayload(claimed=claimed, payload=payload):
                return fill_results(claimed.stored.head, payload, self._context.read).payload
            case ReleaseClaim(claimed=claimed):
                self._give_back(claimed)
            case FailClaim(claimed=claimed, error=error):
                self._fail(claimed, error)
            case AnswerClient(client=client, dispensed=dispensed):
                return self._answer(client, dispensed)
            case RefuseClient(client=client, error=error):
                with suppress(InvalidStateError):  # the client has hung up meanwhile
                    client.future.set_exception(error)
            case ReportClaims(error=error):
                return self._report(error)
            case EndOverClaims():
                return self.claim_history.end_over()
            case _:
                return None if self._source is None else self._ask(self._source, request)
        return None

    def _ask(self, source: ClaimSource, request: DispenserRequest) -> Any:
        """Make a request of the source of claims."""
        match request:
            case ClaimForClient(client=client):
                return source.claim(client.limit, client.names, client.worker)
            case FetchPayloads(claimed=claimed):
                return source.payloads(claimed)
            case TryClaiming():
                self._context.engine.queues(self._context.timeout_s)
                source.claim(1, ())
            case ClaimForOthers():
                source.claim_for_others()
            case OfferToOwners(rooms=rooms):
                source.offer(rooms)
            case NextClaim(names=names):
                return source.next_wakeup(names)
            case _:
                raise InternalError(f"a dispenser makes no request {request!r}")
        return None

    def _report(self, error: Exception | None) -> float:
        """Report that claiming fails or works; return the seconds before it is tried again."""
        if error is not None:
            return self._context.errors.failed("claims", error)
        self._context.errors.worked("claims")
        return 0.0

    def _answer(self, client: LongPoll, dispensed: Sequence[DispensedClaim]) -> bool:
        try:
            client.future.set_result([*dispensed])
        except InvalidStateError:  # the client has hung up meanwhile
            return False
        for each in dispensed:
            self._context.metrics.started(each.claimed.stored.head.name)
        return True

    def _give_back(self, claimed: Claimed) -> None:
        """Release a claim that no client has; its try is not counted."""
        task = claimed.stored.head.id
        self.claim_history.ended(task, claimed.held)
        pending = PendingMove(
            claimed.stored, lambda stored: rules.release(stored.state, claimed.held), lasting=True
        )
        _log.info("a claim was given back, as no client has it", action="task_given_back", task=task)
        self._context.submit(pending)

    def _fail(self, claimed: Claimed, error: RebalanserError) -> None:
        """Fail the try of a task that no worker can run; the task is dead if the fault is its own."""
        due = None if isinstance(error, InvalidTask) else self._context.clock.wall() + self._context.ttl_s
        self._context.errors.ignored("a payload", error)
        self.claim_history.ended(claimed.stored.head.id, claimed.held)
        self._context.submit(
            PendingMove(
                claimed.stored,
                lambda stored: rules.fail(stored.head, stored.state, claimed.held, raised(error).text, due),
                lasting=True,
            )
        )
