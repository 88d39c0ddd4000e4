"""Decisions of a worker: the tries to claim, begin, give back, renew and end (SK-7, SK-8, SK-20). Pure.

``Execution`` has the state. Its scripts yield requests, and its other methods return decisions. The
worker carries them out in threads, the simulator in simulated time.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, Generic, Protocol, TypeAlias, TypeVar

from rebalanser.core.tasks import rules
from rebalanser.core.tasks.claims import MAX_CLAIMS, Claimed
from rebalanser.core.tasks.model import ClaimTerm, Head, Status, Stored, TaskId
from rebalanser.core.tasks.rules import ClaimKey, Decision, Reason
from rebalanser.core.tasks.store import Change
from rebalanser.errors import InternalError

AHEAD_S: Final = 0.05
"""Seconds of work that a worker claims ahead."""
AHEAD_WAIT_S: Final = 0.075
"""Maximum seconds that a claim ahead waits for a thread."""
RENEWALS_PER_TTL: Final = 3
"""Renewals per claim TTL."""
CUT_OFF_S: Final = 10.0
"""Maximum seconds after the grace in which bodies end that can be ended."""
RENEWAL_RETRY_S: Final = 0.5
"""Seconds between a failed renewal and the next one."""
LONGEST_PAUSE_S: Final = 3600.0
"""Maximum seconds until the next look: the wait of a thread has a limit."""
EARLY_RENEWAL_RATIO: Final = 0.05
"""Part of a claim's TTL by which it may be renewed early, together with others."""
MAX_RECENT_CHANGES: Final = 1024
"""Maximum number of changes that are kept, as they may end a claim that is being handed out."""
ENDS_CLAIM: Final = frozenset({Status.WAITING, Status.DEAD, Status.CANCELLED})
"""Statuses that a claimed task gets only by the end of its claim, its completion aside."""
_SMOOTHING_RATIO: Final = 0.05
_SHORTEST_PAUSE_S: Final = 0.001


@dataclass(slots=True)
class RenewalRule:
    """Renews a claim. Its time counts from when it is written: it may wait for a store that is away."""

    held: ClaimKey
    now: Callable[[], float]
    term: Callable[[], ClaimTerm]
    written_at: float = 0.0

    def __call__(self, stored: Stored) -> Decision:
        """Return the renewed state, whose time counts from now."""
        self.written_at = self.now()
        return rules.renew(stored.state, self.held, self.term())


@dataclass(slots=True)
class ClaimLife:
    """A claim as its worker knows it: the newest state of its task, and its deadline.

    ``deadline`` is in seconds of the clock that leases are counted on.
    """

    stored: Stored
    held: ClaimKey
    deadline: float
    ended: Reason | None = None
    """Reason of its end; None while it lasts."""
    is_completed: bool = False
    """True if it is known, and written down, that the claim has completed the task."""
    _token: int = field(init=False)

    def __post_init__(self) -> None:
        """Note the revision at which it was made."""
        self._token = self.stored.revision

    def lasts(self, now: float) -> bool:
        """True if it is current, as far as this process knows."""
        return self.ended is None and now < self.deadline

    def learn(self, stored: Stored) -> None:
        """Keep the newest state of the task."""
        if stored.revision >= self.stored.revision:
            self.stored = stored

    def end(self, reason: Reason) -> bool:
        """End it, unless it is over; True if it was not. The first reason is kept."""
        is_new = self.ended is None
        if is_new:
            self.ended = reason
        return is_new

    def is_ended_by(self, status: Status, revision: int) -> bool:
        """True if this status at this revision ends the claim; older news do not."""
        return status in ENDS_CLAIM and revision > self._token

    def renewed(self, settled: Stored, written_at: float, ttl_s: float) -> bool:
        """Take a renewal that was written; False if the claim is over meanwhile."""
        self.learn(settled)
        if self.ended is not None:
            return False
        self.deadline = max(self.deadline, written_at + ttl_s)
        return True


class StopFlag(Protocol):
    """Request to a body to stop."""

    def set(self) -> None:
        """Request it."""

    def is_set(self) -> bool:
        """True if it was requested."""


class HeldClaim(Protocol):
    """A claim of this worker, in this process or simulated."""

    @property
    def stop_requested(self) -> StopFlag:
        """Set once the body should stop."""

    @property
    def deadline(self) -> float:
        """End of the claim, in seconds of the execution's clock."""

    @property
    def is_over(self) -> bool:
        """True if the claim has ended, as far as this process knows."""

    def still_mine(self) -> bool:
        """True if the claim lasts, and is this process's."""


ClaimT = TypeVar("ClaimT", bound=HeldClaim)
ResultT = TypeVar("ResultT")


@dataclass(slots=True, eq=False)
class Try(Generic[ClaimT]):
    """A claim that this worker holds; times are in seconds of the execution's clock."""

    claim: ClaimT
    holder: str
    head: Head
    renew_at: float
    """Infinity while a renewal is under way."""
    handed_out_at: float = 0.0
    began_at: float | None = None
    """Time at which its body began."""
    ends_at: float | None = None
    """Time at which the try fails.

    None before the body began, if it has no limit, or if the body is ended instead.
    """


@dataclass(frozen=True, slots=True)
class ClaimTasks:
    """Claim at most ``room`` tasks, the last ``ahead`` of them for threads that are still busy.

    The answer has the claims, and True if the queue is paused.
    """

    room: int
    ahead: int


@dataclass(frozen=True, slots=True)
class Hold(Generic[ClaimT]):
    """Take claims that were made; the answer has a claim of this worker for each."""

    claimed: Sequence[Claimed]


@dataclass(frozen=True, slots=True)
class FetchPayloads:
    """Read the payloads of claims; the answer has those that are there, by task."""

    claimed: Sequence[Claimed]


@dataclass(frozen=True, slots=True)
class GiveBack(Generic[ClaimT]):
    """End the claims of tries that have not begun; no try is counted. ``frees`` if they took places."""

    tries: Sequence[Try[ClaimT]]
    frees: bool = False


@dataclass(frozen=True, slots=True)
class FailTry(Generic[ClaimT]):
    """Fail a try that can't begin."""

    held: Try[ClaimT]
    error: InternalError


@dataclass(frozen=True, slots=True)
class Begin(Generic[ClaimT]):
    """Hand tries with their payloads to the threads, the best first."""

    tries: Sequence[tuple[Try[ClaimT], bytes]]
    changes: Sequence[Change]
    """Recent changes of these tasks, each of which may have ended its claim before that came."""


@dataclass(frozen=True, slots=True)
class ReportFound:
    """Report the number of tasks that a look has found."""

    found: int


@dataclass(frozen=True, slots=True)
class OfferRoom:
    """Offer idle threads to the owners of partitions, and room for tasks."""

    idle: int
    room: int


@dataclass(frozen=True, slots=True)
class ReportUnknown:
    """Report ready tasks of functions that no worker here knows."""


@dataclass(frozen=True, slots=True)
class NextTask:
    """Return the seconds until there may be a task to claim; None if unknown.

    ``has_room`` is True if a thread is idle: only then tasks to claim ahead must be found in time.
    """

    has_room: bool


@dataclass(frozen=True, slots=True)
class EndClaiming:
    """Wait until claiming has ended, at most ``seconds``."""

    seconds: float


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Wait until ``reached()`` is true, at most ``seconds``."""

    reached: Callable[[], bool]
    seconds: float


@dataclass(frozen=True, slots=True)
class CutOff:
    """End the bodies that can be ended."""


@dataclass(frozen=True, slots=True)
class Abandon(Generic[ClaimT]):
    """End the claims of tries whose bodies have not ended."""

    tries: Sequence[Try[ClaimT]]


EndRequest: TypeAlias = GiveBack[Any] | FailTry[Any] | EndClaiming | WaitUntil | CutOff | Abandon[Any]
WorkRequest: TypeAlias = (
    EndRequest
    | ClaimTasks
    | Hold[Any]
    | FetchPayloads
    | Begin[Any]
    | ReportFound
    | OfferRoom
    | ReportUnknown
    | NextTask
)
WorkScript: TypeAlias = Generator[WorkRequest, Any, ResultT]


@dataclass(frozen=True, slots=True)
class DueSteps:
    """Steps that a due try needs."""

    stops: bool
    """True to request a stop of its body: the claim's time is up."""
    times_out: bool
    """True to fail it: its body has taken too long."""
    renews: bool
    """True to renew its claim."""


class Execution(Generic[ClaimT]):
    """The tries of a worker, and the next steps of each.

    ``now`` returns seconds of a monotonic clock, ``ttl_s`` is the seconds that a claim lasts. ``capacity()``
    returns the number of bodies that can run. ``can_end(head)`` is True if a body can be ended. ``sooner`` is
    called when a try needs a look before ``next_look``. With ``is_shared`` nothing is claimed ahead. Not
    thread-safe: one script runs at a time, and other methods may be called while it waits for an answer.
    """

    def __init__(
        self,
        now: Callable[[], float],
        ttl_s: float,
        capacity: Callable[[], int],
        can_end: Callable[[Head], bool],
        sooner: Callable[[], None],
        *,
        is_shared: bool = False,
    ) -> None:
        self.tries: dict[str, Try[ClaimT]] = {}
        """Tries by the holder of their claim."""
        self.claim_of: dict[TaskId, ClaimT] = {}
        """The last claim of each task that is held, for news of it."""
        self.stopping = False
        self.next_look = math.inf
        """Time of the next look at the tries."""
        self.body_s: float | None = None
        """Seconds that bodies take lately; None before the first has ended."""
        self._now = now
        self._ttl_s = ttl_s
        self._capacity = capacity
        self._can_end = can_end
        self._sooner = sooner
        self._is_shared = is_shared
        self._ahead: dict[str, Try[ClaimT]] = {}
        """Tries that no thread has begun, the oldest first."""
        self._recent: OrderedDict[TaskId, Change] = OrderedDict()
        """The last changes that end a claim, by task: the news may come before the claim's answer does."""
        self._unrenewed: set[str] = set()
        """The holders of claims whose last renewal has failed."""

    @property
    def running(self) -> int:
        """Number of bodies that run."""
        return sum(each.began_at is not None for each in self.tries.values())

    def look(self) -> WorkScript[float | None]:
        """Claim tasks for the free room; return the seconds until the next look, None to wait for news.

        Raises:
            RebalanserError: the store was away or takes nothing; claims that were made are given back.
        """
        if late := self._take_late():
            self.body_s = max(self.body_s or 0.0, AHEAD_WAIT_S)
            yield GiveBack(late, frees=True)
        room = self.room()
        idle = max(self.idle(), 0)
        claimed, is_paused = yield ClaimTasks(max(room, 0), max(room - idle, 0))
        if claimed:
            yield from self._hand_out(claimed)
        yield ReportFound(len(claimed))
        if is_paused and (waiting := self._take_ahead()):
            yield GiveBack(waiting, frees=True)
        yield OfferRoom(self.idle(), self.room())
        if claimed:
            return _SHORTEST_PAUSE_S  # until then the threads that got them begin, or bring news
        if room > 0 and not is_paused:
            yield ReportUnknown()
        next_s = yield NextTask(min(room, idle) > 0)
        times = self._late_in()
        times += [] if next_s is None else [next_s]
        return min(max(_SHORTEST_PAUSE_S, min(times)), LONGEST_PAUSE_S) if times else None

    def leave(self, grace_s: float) -> WorkScript[bool]:
        """Give back tries that have not begun, and after ``grace_s`` seconds those that still run.

        True if none still ran. The caller has set ``stopping``.
        """
        deadline = self._now() + grace_s
        yield GiveBack(self._take_ahead(), frees=True)
        yield EndClaiming(grace_s)  # what is being claimed now is given back too
        yield WaitUntil(lambda: not self.tries, deadline - self._now())
        yield CutOff()
        yield WaitUntil(lambda: not any(self._can_end(each.head) for each in self.tries.values()), CUT_OFF_S)
        remaining = [*self.tries.values()]
        yield Abandon(remaining)
        self.tries.clear()
        self._ahead.clear()
        return not remaining

    def give_back_ahead(self) -> WorkScript[None]:
        """Give back tries that have not begun."""
        yield GiveBack(self._take_ahead(), frees=True)

    def room(self) -> int:
        """Return the number of tasks to claim: for free threads, and some ahead if bodies are quick."""
        if self._is_shared:
            return min(self.idle(), MAX_CLAIMS)
        ahead = 0
        if self.body_s is not None:
            slow_since = self._now() - AHEAD_S
            running = (each.began_at for each in self.tries.values() if each.began_at is not None)
            quick = self._capacity() - sum(began_at < slow_since for began_at in running)
            ahead = int(quick * AHEAD_S / max(self.body_s, 1e-6))
        return min(self._capacity() + ahead - len(self.tries), MAX_CLAIMS)

    def idle(self) -> int:
        """Return the number of idle threads."""
        return self._capacity() - len(self.tries)

    def begin(self, held: Try[ClaimT]) -> bool:
        """Begin a try; False if it was given back, as it waited for too long or the worker stops."""
        if self._ahead.pop(held.holder, None) is None:
            return False
        held.began_at = self._now()
        return True

    def may_run(self, held: Try[ClaimT]) -> bool:
        """True if the body of a try that has begun may run; else its claim is given back."""
        if not self.stopping and held.claim.still_mine():
            return True
        held.began_at = None
        return False

    def limit_time(self, held: Try[ClaimT]) -> None:
        """Limit the time of a body that runs now and can't be ended."""
        if held.head.timeout_s is not None and not self._can_end(held.head):
            held.ends_at = self._now() + held.head.timeout_s
            self._request_look(held.ends_at)

    def ended(self, held: Try[ClaimT]) -> bool:
        """Forget a try that has ended: a claim that stayed here would be renewed for ever.

        True if its renewals were the last that fail.
        """
        if held.began_at is not None:
            self._measure(self._now() - held.began_at)
        was_unrenewed = held.holder in self._unrenewed
        self._forget(held)
        return was_unrenewed and not self._unrenewed

    def due(self) -> list[Try[ClaimT]]:
        """Return the tries that need a look now, with those due soon; if none does, set ``next_look``."""
        now = self._now()
        due = [(at, each) for each in self.tries.values() if (at := _due_at(each)) is not None]
        if any(at <= now for at, _ in due):
            early = now + EARLY_RENEWAL_RATIO * self._ttl_s
            return [each for at, each in due if at <= early]
        self.next_look = min((at for at, _ in due), default=math.inf)
        return []

    def due_steps(self, held: Try[ClaimT]) -> DueSteps:
        """Return the steps that a due try needs."""
        now = self._now()
        stops = held.claim.deadline <= now
        if held.ends_at is not None and held.ends_at <= now:
            held.ends_at = now + RENEWAL_RETRY_S
            return DueSteps(stops, times_out=True, renews=False)
        return DueSteps(
            stops, times_out=False, renews=held.renew_at <= now + EARLY_RENEWAL_RATIO * self._ttl_s
        )

    def renewing(self, tries: Iterable[Try[ClaimT]]) -> float:
        """Note that renewals are submitted; return the time."""
        for each in tries:
            each.renew_at = math.inf
        return self._now()

    def renewed(self, held: Try[ClaimT], sent_at: float, *, has_failed: bool) -> bool:
        """Take the outcome of a renewal; True if the trouble of renewals begins or ends with it.

        A failed renewal begins none once its body has ended, as nothing would end that trouble.
        """
        interval_s = self._ttl_s / RENEWALS_PER_TTL
        is_held = held.holder in self.tries
        if not has_failed:
            held.renew_at = sent_at + interval_s
            self._unrenewed.discard(held.holder)
        else:
            held.renew_at = self._now() + min(interval_s, RENEWAL_RETRY_S)
            if is_held:
                self._unrenewed.add(held.holder)
        self._request_look(held.renew_at)
        return is_held if has_failed else not self._unrenewed

    def learn_change(self, change: Change) -> ClaimT | None:
        """Take a change of a task; return the claim that it may have ended, None if there is none."""
        if change.status not in ENDS_CLAIM:
            return None
        self._recent[change.task] = change  # a claim that comes now looks here
        self._recent.move_to_end(change.task)
        if len(self._recent) > MAX_RECENT_CHANGES:
            self._recent.popitem(last=False)
        return self.claim_of.get(change.task)

    def renew_all(self) -> None:
        """Renew all claims now, as changes may have been missed: a refusal shows that a claim is over."""
        now = self._now()
        for each in self.tries.values():
            each.renew_at = min(each.renew_at, now)
        self._request_look(now)

    def _hand_out(self, claimed: Sequence[Claimed]) -> WorkScript[None]:
        """Hand claimed tasks to the threads; give them back if their payloads can't be read now."""
        claims: Sequence[ClaimT] = yield Hold(claimed)
        tries = [self.try_of(each, claim) for each, claim in zip(claimed, claims, strict=True)]
        try:
            payloads: Mapping[TaskId, bytes] = yield FetchPayloads(claimed)
        except GeneratorExit:
            raise
        except BaseException:
            yield GiveBack(tries)
            raise
        for each in [each for each in tries if each.head.id not in payloads]:
            tries.remove(each)
            yield FailTry(each, InternalError("the task's payload is not in the store"))
        if not tries:
            return
        if self.stopping:
            yield GiveBack(tries)
            return
        self.hold(tries)
        recent = [self._recent[each.head.id] for each in tries if each.head.id in self._recent]
        yield Begin([(each, payloads[each.head.id]) for each in tries], recent)

    def try_of(self, claimed: Claimed, claim: ClaimT) -> Try[ClaimT]:
        """Return the try of a claim. A claim for a slot is older: part of its time is over (SK-20)."""
        now = self._now()
        renew_at = claim.deadline - self._ttl_s + self._ttl_s / RENEWALS_PER_TTL
        return Try(claim, claimed.held.holder, claimed.stored.head, renew_at, now)

    def hold(self, tries: Iterable[Try[ClaimT]]) -> None:
        """Hold tries that wait for a thread."""
        for each in tries:
            self.tries[each.holder] = self._ahead[each.holder] = each
            self.claim_of[each.head.id] = each.claim
            self._request_look(each.renew_at)

    def _behind_bodies(self) -> Iterator[Try[ClaimT]]:
        """Return the tries that wait for a body to end, the oldest first; free threads take those before."""
        return islice(self._ahead.values(), max(self._capacity() - self.running, 0), None)

    def _late_in(self) -> list[float]:
        """Return the seconds until a try may have waited for too long; none if no try waits."""
        first = next(self._behind_bodies(), None)
        if first is not None:
            return [first.handed_out_at + AHEAD_WAIT_S - self._now()]
        # A thread that is free now may be refused by the host, or take another try.
        return [AHEAD_WAIT_S / 3] if self._ahead else []

    def _take_late(self) -> list[Try[ClaimT]]:
        """Take back tries that have waited for too long for a body to end.

        A free thread of a busy host may begin later than that. Its claim is kept, as a claim given back takes
        a place of the rate limit (SK-23).
        """
        handed_out_before = self._now() - AHEAD_WAIT_S
        return self._take([each for each in self._behind_bodies() if each.handed_out_at <= handed_out_before])

    def _take_ahead(self) -> list[Try[ClaimT]]:
        """Take back all tries that have not begun."""
        return self._take([*self._ahead.values()])

    def _take(self, tries: list[Try[ClaimT]]) -> list[Try[ClaimT]]:
        for each in tries:
            del self._ahead[each.holder]
            self._forget(each)
        return tries

    def _forget(self, held: Try[ClaimT]) -> None:
        """Stop renewing a try, and expect no news of it."""
        self.tries.pop(held.holder, None)
        self._unrenewed.discard(held.holder)
        if self.claim_of.get(held.head.id) is held.claim:
            del self.claim_of[held.head.id]

    def _measure(self, body_s: float) -> None:
        """Update the moving average of the seconds that bodies take; a slower body replaces it at once."""
        before = self.body_s
        self.body_s = (
            body_s if before is None or body_s > before else before + _SMOOTHING_RATIO * (body_s - before)
        )

    def _request_look(self, at: float) -> None:
        """Ask for a look at the tries by this time."""
        if at < self.next_look:
            self._sooner()


def _due_at(held: Try[Any]) -> float | None:
    """Return when a try needs a look; None once its claim is over."""
    if held.claim.is_over:
        return None
    at = held.renew_at if held.ends_at is None else min(held.renew_at, held.ends_at)
    deadline: float = held.claim.deadline
    return at if held.claim.stop_requested.is_set() else min(at, deadline)
