"""Decides how a server hands out claims to waiting clients, in FIFO order (SK-16, SK-20). Pure.

``Dispensing`` has the waiting clients. Its scripts yield requests, which the dispenser carries out in
its thread, and the simulator in simulated time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeAlias, TypeVar

from rebalanser.core.tasks.claims import Claimed
from rebalanser.core.tasks.model import MAX_RESULTS_BYTES, TaskId
from rebalanser.core.tasks.slots import Rooms, WorkerRoom
from rebalanser.core.tasks.store import Names
from rebalanser.core.tasks.worker import FetchPayloads
from rebalanser.core.tasks.writes import ResultT
from rebalanser.errors import InternalError, InvalidTask, RebalanserError, RetryLater

SHORTEST_PAUSE_S: Final = 0.001
FutureT = TypeVar("FutureT")


@dataclass(frozen=True, slots=True)
class DispensedClaim:
    """A claim for a client that had waited ``waited_s`` seconds when the claim was requested.

    ``waited_s`` is below 0 if the claim was requested before the client came (SK-20).
    """

    claimed: Claimed
    payload: bytes
    waited_s: float


@dataclass(slots=True, eq=False)
class WaitingClient(Generic[FutureT]):
    """A client that waits for claims until ``deadline``, in seconds of the server's clock.

    ``names`` are the functions that it knows, None for any.
    """

    worker: str
    limit: int
    requested_at: float
    deadline: float
    names: Collection[str] | None
    future: FutureT
    """The place of the answer, for the caller of ``Dispensing.add``."""
    has_hung_up: bool = False
    handed_out: Sequence[DispensedClaim] = ()
    """Claims to give back if the client hangs up."""


@dataclass(frozen=True, slots=True)
class ClaimForClient:
    """Claim tasks for a client; the answer has the claims."""

    client: WaitingClient[Any]


@dataclass(frozen=True, slots=True)
class RecordClaims:
    """Write to the history that claims were made."""

    claimed: Sequence[Claimed]


@dataclass(frozen=True, slots=True)
class FillPayload:
    """Fill the results into a payload that gets some; the answer is the payload, or raises InvalidTask."""

    claimed: Claimed
    payload: bytes


@dataclass(frozen=True, slots=True)
class ReleaseClaim:
    """Give back a claim that no client has; its try is not counted."""

    claimed: Claimed


@dataclass(frozen=True, slots=True)
class FailClaim:
    """Fail the try of a task that no worker can run."""

    claimed: Claimed
    error: RebalanserError


@dataclass(frozen=True, slots=True)
class AnswerClient:
    """Answer a client with claims, or none; the answer is False if it has hung up."""

    client: WaitingClient[Any]
    dispensed: Sequence[DispensedClaim]


@dataclass(frozen=True, slots=True)
class RefuseClient:
    """Answer a client with an error."""

    client: WaitingClient[Any]
    error: Exception


@dataclass(frozen=True, slots=True)
class ReportClaims:
    """Report that claiming has failed, or works (``error`` None); the answer is the pause in seconds."""

    error: Exception | None


@dataclass(frozen=True, slots=True)
class TryClaiming:
    """Make a request to the store that shows if tasks can be claimed."""


@dataclass(frozen=True, slots=True)
class ClaimForOthers:
    """Claim tasks for other processes that have room."""


@dataclass(frozen=True, slots=True)
class OfferToOwners:
    """Offer the room of the waiting clients to the owners of partitions."""

    rooms: Rooms


@dataclass(frozen=True, slots=True)
class EndOverClaims:
    """Write the end of claims that are over; the answer is the time of the next one, None for none."""


@dataclass(frozen=True, slots=True)
class NextClaim:
    """Ask when these functions may have a task to claim; the answer is None if only news can bring it."""

    names: Collection[str] | None


DispenserRequest: TypeAlias = (
    ClaimForClient
    | RecordClaims
    | FetchPayloads
    | FillPayload
    | ReleaseClaim
    | FailClaim
    | AnswerClient
    | RefuseClient
    | ReportClaims
    | TryClaiming
    | ClaimForOthers
    | OfferToOwners
    | EndOverClaims
    | NextClaim
)
DispenserScript: TypeAlias = Generator[DispenserRequest, Any, ResultT]


class Dispensing(Generic[FutureT]):
    """The clients that wait for claims, and the next step for each.

    ``now`` returns seconds of the server's monotonic clock, ``new_future`` a place for the answer to a
    client. Not thread-safe: one script runs at a time, and other methods may be called while it waits for an
    answer.
    """

    def __init__(self, now: Callable[[], float], new_future: Callable[[], FutureT]) -> None:
        self.clients: list[WaitingClient[FutureT]] = []
        """Waiting clients in FIFO order."""
        self.stopping = False
        self._now = now
        self._new_future = new_future
        self._claims_fail_for_s: float | None = None
        """Seconds before claiming is retried; None unless it has failed."""

    def add(
        self, worker: str, limit: int, wait_s: float, names: Collection[str] | None
    ) -> WaitingClient[FutureT]:
        """Let a client wait for at most ``limit`` claims, for ``wait_s`` seconds.

        Raises:
            RetryLater: the server is stopping.
        """
        if self.stopping:
            raise RetryLater("the server stops; ask another")
        now = self._now()
        client = WaitingClient(worker, limit, now, now + wait_s, names, self._new_future())
        self.clients.append(client)
        return client

    def forget(self, client: WaitingClient[FutureT]) -> list[Claimed]:
        """Forget a client that has hung up; return the claims to give back.

        Claims that are being made for it are given back as they arrive.
        """
        client.has_hung_up = True
        if client in self.clients:
            self.clients.remove(client)
        return self._take_back(client)

    def stop(self) -> DispenserScript[None]:
        """Answer all clients that wait with no claim. The caller has set ``stopping``."""
        while self.clients:
            yield from self._hand_out(self.clients.pop(0), [])

    def step(self) -> DispenserScript[float | None]:
        """Serve the clients; return the seconds until the next step, unless woken, or None for ever.

        Raises:
            RebalanserError: the store is away or takes no writes; no client is the cause.
        """
        yield from self._serve_all()
        yield from self._answer_late()
        if self._claims_fail_for_s is not None:
            yield from self._try_claiming()
        if self._claims_fail_for_s is None:
            yield ClaimForOthers()
            yield self._offer()
        end_at = yield EndOverClaims()
        pauses = ((yield from self._pause_s(end_at)), self._claims_fail_for_s)
        return min((each for each in pauses if each is not None), default=None)

    def _serve_all(self) -> DispenserScript[None]:
        """Hand out claims to waiting clients in FIFO order, as long as there is something to claim."""
        unserved: list[WaitingClient[FutureT]] = []
        try:
            while self.clients and not self.stopping:
                client = self.clients.pop(0)  # removed, so that it is not answered twice
                unserved.append(client)
                if (yield from self._serve(client)):
                    unserved.pop()
                elif client.names is None:
                    break
        finally:
            self.clients[:0] = [each for each in unserved if not each.has_hung_up]

    def _serve(self, client: WaitingClient[FutureT]) -> DispenserScript[bool]:
        """Answer a client with claims or an error; False if there is nothing for it to claim."""
        try:
            dispensed = yield from self._claim(client)
        except Exception as error:  # the client needs an answer after any error
            self._claims_fail_for_s = yield ReportClaims(error)
            yield RefuseClient(client, error)
            return True
        yield from self._claims_work()
        if dispensed:
            yield from self._hand_out(client, dispensed)
        return bool(dispensed)

    def _claim(self, client: WaitingClient[FutureT]) -> DispenserScript[list[DispensedClaim]]:
        claimed: Sequence[Claimed] = yield ClaimForClient(client)
        if not claimed:
            return []
        try:
            yield RecordClaims(claimed)
            dispensed, undelivered = yield from self.with_payloads(client, claimed)
        except GeneratorExit:
            raise
        except BaseException:
            for each in claimed:
                yield ReleaseClaim(each)
            raise
        for each, error in undelivered:
            yield ReleaseClaim(each) if error is None else FailClaim(each, error)
        return dispensed

    def with_payloads(
        self, client: WaitingClient[FutureT], claimed: Sequence[Claimed]
    ) -> DispenserScript[tuple[list[DispensedClaim], list[tuple[Claimed, RebalanserError | None]]]]:
        """Return claims with their payloads, and those not handed out: failed, or over the limit."""
        dispensed: list[DispensedClaim] = []
        undelivered: list[tuple[Claimed, RebalanserError | None]] = []
        room = MAX_RESULTS_BYTES
        payloads: Mapping[TaskId, bytes] = yield FetchPayloads(claimed)
        for each in claimed:
            payload = (yield from self._filled(each, payloads)) if room > 0 else None
            if isinstance(payload, bytes):
                room -= len(payload) - len(payloads[each.stored.head.id])
                dispensed.append(DispensedClaim(each, payload, each.sent_at - client.requested_at))
            else:
                undelivered.append((each, payload))
        return dispensed, undelivered

    def _filled(
        self, claimed: Claimed, payloads: Mapping[TaskId, bytes]
    ) -> DispenserScript[bytes | RebalanserError]:
        """Return a claimed task's payload with the results that it gets, or why there is none.

        Raises:
            RetryLater: the engine is away.
        """
        task = claimed.stored.head.id
        if task not in payloads:
            return InternalError("the task's payload is not in the store")
        try:
            payload: bytes = yield FillPayload(claimed, payloads[task])
        except InvalidTask as error:
            return error
        return payload

    def _hand_out(
        self, client: WaitingClient[FutureT], dispensed: Sequence[DispensedClaim]
    ) -> DispenserScript[None]:
        """Answer a client; give its claims back if it has hung up, also during the answer."""
        client.handed_out = dispensed  # before the answer, as the client may hang up during it
        if not (yield AnswerClient(client, dispensed)) or client.has_hung_up:
            for each in self._take_back(client):
                yield ReleaseClaim(each)

    def _take_back(self, client: WaitingClient[FutureT]) -> list[Claimed]:
        """Return the claims that a client got, only once."""
        handed_out, client.handed_out = client.handed_out, ()
        return [each.claimed for each in handed_out]

    def _answer_late(self) -> DispenserScript[None]:
        """Answer timed-out long polls with no claim."""
        now = self._now()
        late = [each for each in self.clients if each.deadline <= now]
        self.clients = [each for each in self.clients if each.deadline > now]
        for each in late:
            yield from self._hand_out(each, [])

    def _try_claiming(self) -> DispenserScript[None]:
        """Probe the store, so that the trouble of claims ends with its cause even if no client comes."""
        try:
            yield TryClaiming()
        except Exception as error:
            self._claims_fail_for_s = yield ReportClaims(error)
        else:
            yield from self._claims_work()

    def _claims_work(self) -> DispenserScript[None]:
        self._claims_fail_for_s = None
        yield ReportClaims(None)

    def _offer(self) -> OfferToOwners:
        """Return the room of all waiting clients, by the functions that they know (SK-20)."""
        room: Counter[Names] = Counter()
        for each in self.clients:
            room[None if each.names is None else frozenset(each.names)] += each.limit
        return OfferToOwners({names: WorkerRoom(tasks, tasks) for names, tasks in room.items()})

    def _pause_s(self, end_at: float | None) -> DispenserScript[float | None]:
        """Return the seconds until a client can be served or a claim ends, unless woken; None for ever."""
        wanted = [each.names for each in self.clients]
        at = yield NextClaim(_all_of(wanted) if wanted else ())
        times = [each.deadline for each in self.clients]
        times += [each for each in (end_at, at) if each is not None]
        return max(SHORTEST_PAUSE_S, min(times) - self._now()) if times else None


def _all_of(wanted: Sequence[Collection[str] | None]) -> set[str] | None:
    """Return the functions that clients can take; None if a client takes any."""
    named = [names for names in wanted if names is not None]
    return None if len(named) < len(wanted) else {name for names in named for name in names}
