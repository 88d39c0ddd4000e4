"""Hands out the claims of a server's source to waiting clients, in FIFO order."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from rebalanser.errors import InternalError, InvalidTask, RebalanserError, RetryLater
from rebalanser.runtime.logs import get_logger
from rebalanser.tasks import rules
from rebalanser.tasks.context import Context
from rebalanser.tasks.execution.claim_source import ClaimSource
from rebalanser.tasks.execution.outcomes import raised
from rebalanser.tasks.http.claims import ClaimHistory
from rebalanser.tasks.http.problems import TOO_MANY, ProblemRaised
from rebalanser.tasks.index.claiming import Claimed
from rebalanser.tasks.index.free_slots import Names, Room
from rebalanser.tasks.loops import Loop
from rebalanser.tasks.model import TaskId
from rebalanser.tasks.results import MAX_RESULTS_BYTES, fill_results
from rebalanser.tasks.writes.pending import PendingMove

SHORTEST_PAUSE_S: Final = 0.001
_log = get_logger()


@dataclass(frozen=True, slots=True)
class DispensedClaim:
    """A claim for a client that had waited ``waited_s`` seconds when the claim was requested.

    ``waited_s`` is below 0 if the claim was requested before the client came (SK-20).
    """

    claimed: Claimed
    payload: bytes
    waited_s: float


@dataclass(slots=True, eq=False)
class WaitingClient:
    """A client that waits for claims until ``deadline``, in seconds of the context's clock.

    ``names`` are the functions that it knows, None for any.
    """

    worker: str
    limit: int
    requested_at: float
    deadline: float
    names: Collection[str] | None
    future: Future[list[DispensedClaim]] = field(default_factory=Future)


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
        self._clients: list[WaitingClient] = []
        self._stopping = False
        self._pause: float | None = 0.0
        """Seconds until a client can be served or a claim ends, unless woken before; None for ever."""
        self._claims_fail_for_s: float | None = None
        """Seconds before claiming is retried; None unless it has failed."""
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
            self._stopping = True
        self._woken.set()
        self._loop.hurry()
        self._loop.join()
        self._context.errors.ended("claims")
        self.claim_history.close()
        with self._lock:
            clients, self._clients = self._clients, []
        for each in clients:
            self._hand_out(each, [])

    def request(
        self, worker: str, limit: int, wait_s: float, names: Collection[str] | None = None
    ) -> WaitingClient:
        """Request at most ``limit`` claims of these functions, and wait at most ``wait_s`` seconds.

        The client's future gets the claims, or the error of an engine that is away.

        Raises:
            RetryLater: the server stops.
            ProblemRaised: too many clients wait already.
        """
        now = self._context.clock.now()
        client = WaitingClient(worker, limit, now, now + wait_s, names)
        with self._lock:
            if self._stopping:
                raise RetryLater("the server stops; ask another")
            if wait_s > 0 and len(self._clients) >= self._max_waiting:
                raise ProblemRaised(TOO_MANY, f"{self._max_waiting} clients wait for a task already")
            self._clients.append(client)
        self._woken.set()
        return client

    def forget(self, client: WaitingClient) -> None:
        """Give back what was claimed for a client that has hung up."""
        with self._lock:
            is_waiting = client in self._clients
            if is_waiting:
                self._clients.remove(client)
        if not is_waiting:
            client.future.add_done_callback(self._give_back_all)

    def _step(self) -> bool:
        self._woken.wait(self._pause)
        self._woken.clear()
        if self._stopping:
            return False
        self._pause = 0.0
        self._serve_all()
        self._answer_late()
        if self._claims_fail_for_s is not None:
            self._try_claiming()
        if self._source is not None and self._claims_fail_for_s is None:
            self._source.claim_for_others()
            self._offer(self._source)
        pauses = (self._pause_s(self.claim_history.end_over()), self._claims_fail_for_s)
        self._pause = min((each for each in pauses if each is not None), default=None)
        return True

    def _offer(self, source: ClaimSource) -> None:
        """Offer the room of all waiting clients, by the functions that they know (SK-20)."""
        room: Counter[Names] = Counter()
        with self._lock:
            for each in self._clients:
                room[None if each.names is None else frozenset(each.names)] += each.limit
        source.offer({names: Room(tasks, tasks) for names, tasks in room.items()})

    def _try_claiming(self) -> None:
        """Make a request to the store: the trouble of claims ends with its cause, even if no client comes."""
        try:
            self._context.engine.queues(self._context.timeout_s)
            if self._source is not None:
                self._source.claim(1, ())
        except Exception as error:
            self._claims_fail_for_s = self._context.errors.failed("claims", error)
        else:
            self._claims_work()

    def _claims_work(self) -> None:
        self._claims_fail_for_s = None
        self._context.errors.worked("claims")

    def _serve_all(self) -> None:
        """Hand out claims to waiting clients in FIFO order, as long as there is something to claim."""
        unserved: list[WaitingClient] = []
        try:
            while (client := self._first()) is not None:
                if not self._serve(client):
                    unserved.append(client)
                    if client.names is None:
                        break
        finally:
            with self._lock:
                self._clients[:0] = unserved

    def _serve(self, client: WaitingClient) -> bool:
        """Answer a client with claims or an error; False if there is nothing for it to claim."""
        try:
            dispensed = self._claim(client)
        except Exception as error:  # the client waits for an answer, whatever the error is
            self._claims_fail_for_s = self._context.errors.failed("claims", error)
            _refuse(client, error)
            return True
        self._claims_work()
        if dispensed:
            self._hand_out(client, dispensed)
        return bool(dispensed)

    def _first(self) -> WaitingClient | None:
        """Take the first waiting client out of the line, so that :meth:`forget` leaves it alone meanwhile."""
        with self._lock:
            return self._clients.pop(0) if self._clients and not self._stopping else None

    def _answer_late(self) -> None:
        """Answer timed-out long polls with no claim."""
        now = self._context.clock.now()
        with self._lock:
            late = [each for each in self._clients if each.deadline <= now]
            self._clients = [each for each in self._clients if each.deadline > now]
        for each in late:
            self._hand_out(each, [])

    def _claim(self, client: WaitingClient) -> list[DispensedClaim]:
        if self._source is None:
            return []
        claimed = self._source.claim(client.limit, client.names, client.worker)
        if not claimed:
            return []
        try:
            for each in claimed:
                self.claim_history.claimed(each)
            dispensed, undelivered = self._with_payloads(client, claimed)
        except BaseException:
            for each in claimed:
                self._give_back(each)
            raise
        for each, error in undelivered:
            if error is None:
                self._give_back(each)
            else:
                self._fail(each, error)
        return dispensed

    def _with_payloads(
        self, client: WaitingClient, claimed: Sequence[Claimed]
    ) -> tuple[list[DispensedClaim], list[tuple[Claimed, RebalanserError | None]]]:
        """Return claims with their payloads, and those not handed out: with an error, or over the limit."""
        assert self._source is not None
        dispensed: list[DispensedClaim] = []
        undelivered: list[tuple[Claimed, RebalanserError | None]] = []
        payloads, room = self._source.payloads(claimed), MAX_RESULTS_BYTES
        for each in claimed:
            payload = self._filled(each, payloads) if room > 0 else None
            if isinstance(payload, bytes):
                room -= len(payload) - len(payloads[each.stored.head.id])
                dispensed.append(DispensedClaim(each, payload, each.sent_at - client.requested_at))
            else:
                undelivered.append((each, payload))
        return dispensed, undelivered

    def _filled(self, claimed: Claimed, payloads: Mapping[TaskId, bytes]) -> bytes | RebalanserError:
        """Return a claimed task's payload with the results that it gets, or why there is none.

        Raises:
            RetryLater: the engine is away.
        """
        head = claimed.stored.head
        if head.id not in payloads:
            return InternalError("the task's payload is not in the store")
        try:
            return fill_results(head, payloads[head.id], self._context.read).payload
        except InvalidTask as error:
            return error

    def _hand_out(self, client: WaitingClient, dispensed: list[DispensedClaim]) -> None:
        try:
            client.future.set_result(dispensed)
        except InvalidStateError:  # the client has hung up meanwhile
            for each in dispensed:
                self._give_back(each.claimed)
        else:
            for each in dispensed:
                self._context.metrics.started(each.claimed.stored.head.name)

    def _pause_s(self, end_at: float | None) -> float | None:
        """Return the seconds until a client can be served or a claim ends, unless woken; None for ever."""
        with self._lock:
            deadlines = [each.deadline for each in self._clients]
            wanted = [each.names for each in self._clients]
        times = [*deadlines, *([] if end_at is None else [end_at])]
        if self._source is not None:
            wakeup = self._source.next_wakeup(_all_of(wanted) if wanted else ())
            times += [] if wakeup is None else [wakeup]
        return max(SHORTEST_PAUSE_S, min(times) - self._context.clock.now()) if times else None

    def _give_back_all(self, future: Future[list[DispensedClaim]]) -> None:
        is_empty = future.cancelled() or future.exception() is not None
        dispensed: Sequence[DispensedClaim] = [] if is_empty else future.result()
        for each in dispensed:
            self._give_back(each.claimed)

    def _give_back(self, claimed: Claimed) -> None:
        """Release a claim that no client has; its try is not counted."""
        task: TaskId = claimed.stored.head.id
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


def _refuse(client: WaitingClient, error: BaseException) -> None:
    with suppress(InvalidStateError):  # the client has hung up meanwhile
        client.future.set_exception(error)


def _all_of(wanted: Sequence[Collection[str] | None]) -> set[str] | None:
    """Return the functions that clients can take; None if a client takes any."""
    named = [names for names in wanted if names is not None]
    return None if len(named) < len(wanted) else {name for names in named for name in names}
