"""Each access beside those of earlier tokens that it may contradict.

The accesses of a resource are ordered along their tokens, once for all invariants. Each gets the one access
before it that would show a contradiction if any did: the one that ended last, started last, had its barrier
removed last. Only those that may contradict are kept, of a sound history next to none.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from rebalanser.audit.caching import once
from rebalanser.audit.running_max import BUCKET, bucketed, running_max, spread
from rebalanser.audit.tables import EndedBy
from rebalanser.history import UNLIMITED_S, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import Column, DataFrame

    from rebalanser.audit.options import Options

ROUNDING_S: Final = 1e-6
"""Maximum rounding error, in seconds, of a time that is a difference of two."""
SERIES: Final = ("protocol", "group", "resource")
OWNER: Final = "owner"
CLOCK: Final = "clock"
_ORDER: Final = ("token", "process", "node", "turn")
_OF_OWNER: Final = (
    "start_entered_sequence", "start_entered_wall", "start_entered_monotonic",
    "process", "node", "turn", "label", "host", "boot", "token", "fenced", "overlap_limit_s",
    "barrier_added_sequence", "barrier_added_wall", "stop_returned_sequence", "stop_returned_wall",
    "stop_failed_sequence", "barrier_removed_sequence", "barrier_removed_wall", "removed_revision",
    "end_wall", "end_monotonic", "ended_by",
)  # fmt: skip
"""Columns of an access that are carried along. Numbers come first: structs compare from their beginning."""
_BACKWARDS: Final = "backwards"
_FIRST_LATER: Final = "first_later"
_IN_ORDER: Final = "in_order"
_SURE_WALL: Final = "sure_wall"
_SURE_MONOTONIC: Final = "sure_monotonic"
_RELEASED: Final = "released"


def suspects(accesses: DataFrame, options: Options) -> DataFrame:
    """The accesses that may contradict one of an earlier token of the resource, by any clock or revision.

    Columns: those of the resource, ``owner`` with the access's columns that the invariants need, and structs
    of a ``key`` and the ``owner`` before that has the greatest one, null if there is none:

    - ``longest`` and ``longest_exact``: the time until which it keeps the next from starting; by wall time
      among those whose release the registry does not confirm, and by monotonic time among all of the same
      boot. Access whose OnStop raised counts until that moment;
    - ``again`` and ``again_exact``: the same for an access that was started again with its token, which may
      begin after the present access has ended and would hide a longer one before;
    - ``unsure``: the wall time until which access whose OnStop raised may have kept the next from starting;
    - ``removal``: the revision at which its barrier was removed;
    - ``latest`` and ``latest_exact``: its start, on both clocks;
    - ``last``: its end by wall time;
    - ``previous``: its token.
    """
    return _beside_earlier(_ordered(accesses), options)


def suspects_in_order(accesses: DataFrame, options: Options) -> DataFrame:
    """``suspects``, with only those accesses as earlier ones that began before those of later tokens did.

    An access that began late may have begun after the present one had ended: it did not overlap with it, but
    ended last, and so hides others that did. Here every access that ends after the present one began overlaps
    with it.
    """
    ordered = _ordered(accesses).withColumn(_BACKWARDS, -F.col("token"))
    cut = spread(bucketed(ordered, SERIES, _BACKWARDS, options.crowded), SERIES)
    began = F.col(OWNER)["start_entered_wall"]
    known = running_max(cut, SERIES, (_BACKWARDS, *_ORDER[1:]), {_FIRST_LATER: -began})
    late = F.coalesce(began > -F.col(_FIRST_LATER), F.lit(False))
    marked = known.withColumn(_IN_ORDER, ~late).drop(_BACKWARDS, _FIRST_LATER, BUCKET)
    return _beside_earlier(marked, options, F.col(_IN_ORDER)).drop(_IN_ORDER)


def _ordered(accesses: DataFrame) -> DataFrame:
    return accesses.where(F.col("token").isNotNull()).select(*SERIES, *_ORDER, *_owners())


def _beside_earlier(ordered: DataFrame, options: Options, counts: Column | None = None) -> DataFrame:
    """The suspects among these, beside the earlier ones for which ``counts`` holds."""

    def counted(maxima: Mapping[str, Column]) -> Mapping[str, Column]:
        if counts is None:
            return maxima
        return {name: F.when(counts, value) for name, value in maxima.items()}

    cut = spread(bucketed(ordered, SERIES, "token", options.crowded), SERIES)
    exact = running_max(cut, (*SERIES, CLOCK), _ORDER, counted(_exact_maxima()))
    both = running_max(exact, SERIES, _ORDER, counted(_maxima()))
    return both.where(_is_doubted(options)).drop(*_ORDER, CLOCK, BUCKET)


@once
def _owners() -> tuple[Column, Column]:
    return _clock().alias(CLOCK), F.struct(*_OF_OWNER, *_derived()).alias(OWNER)


def _derived() -> list[Column]:
    """The sure ends of access, by both clocks; and a flag, true if it ended before its barrier's removal.

    The flag is true if the end was written before the removal, and not after the removal was requested. If
    the revision of the removal is known, no clock matters any more: see ``is_released``.
    """
    failed = F.col("ended_by") == EndedBy.FAILURE
    sure = {
        name: F.when(failed, F.col(f"stop_failed_{clock}")).otherwise(F.col(f"end_{clock}"))
        for name, clock in ((_SURE_WALL, "wall"), (_SURE_MONOTONIC, "monotonic"))
    }
    released = (
        (F.col("ended_by") == EndedBy.STOP)
        & (F.col("stop_returned_sequence") < F.col("barrier_removed_sequence"))
        & ~stopped_too_late()
        & F.col("removed_revision").isNotNull()
    )
    return [
        *(end.alias(name) for name, end in sure.items()),
        F.coalesce(released, F.lit(False)).alias(_RELEASED),
    ]


def stopped_too_late() -> Column:
    """True if an access had not ended when the removal of its barrier was requested, on one clock."""
    return F.coalesce(
        F.col("removal_sent_monotonic") < F.col("stop_returned_monotonic") - ROUNDING_S, F.lit(False)
    )


def is_released(owner: Column) -> Column:
    """True if access had ended before its barrier was removed at a known revision: no clock matters then."""
    return owner[_RELEASED]


def may_overlap_for(owner: Column) -> Column:
    """Maximum seconds by which the next owner may begin before this one has ended."""
    return F.coalesce(owner["overlap_limit_s"], F.lit(0.0))


@once
def contradicts_cause(options: Options) -> Column:
    """True if the barrier was added, by the clocks, before its last holder had stopped.

    The holder stopped before it removed the barrier, and only then could another add it.
    """
    owner, previous = F.col(OWNER), F.col("previous.owner")
    behind_s = previous["stop_returned_wall"] - owner["barrier_added_wall"]
    by_revision = previous["removed_revision"] < owner["token"]
    return is_released(previous) & by_revision & (behind_s > options.clock_error_s)


def _clock() -> Column:
    """The name of the clock of the access's monotonic times: the boot, else the process itself."""
    return F.coalesce(F.concat(F.lit("boot "), "boot"), F.concat(F.lit("process "), "process"))


@once
def _maxima() -> Mapping[str, Column]:
    owner = F.col(OWNER)
    entered, limited = _entered(owner), _limited(owner)
    spare_s = may_overlap_for(owner)
    failed, first = owner["ended_by"] == EndedBy.FAILURE, owner["turn"] == 0
    lasting = entered & limited & ~is_released(owner)
    until = _keyed(owner[_SURE_WALL] - spare_s)
    return {
        "longest": F.when(lasting & first, until),
        "again": F.when(lasting & ~first, until),
        "unsure": F.when(failed & limited, _keyed(owner["end_wall"] - spare_s)),
        "removal": F.when(owner["removed_revision"].isNotNull(), _keyed(owner["removed_revision"])),
        "latest": F.when(entered & limited, _keyed(owner["start_entered_wall"] - spare_s)),
        "last": F.when(entered, _keyed(owner["end_wall"])),
        "previous": F.when(entered, _keyed(F.col("token"))),
    }


@once
def _exact_maxima() -> Mapping[str, Column]:
    owner = F.col(OWNER)
    limited = _entered(owner) & _limited(owner)
    spare_s, first = may_overlap_for(owner), owner["turn"] == 0
    until = _keyed(owner[_SURE_MONOTONIC] - spare_s)
    return {
        "longest_exact": F.when(limited & first, until),
        "again_exact": F.when(limited & ~first, until),
        "latest_exact": F.when(limited, _keyed(owner["start_entered_monotonic"] - spare_s)),
    }


@once
def _is_doubted(options: Options) -> Column:
    return _is_any(*doubts(options).values())


@once
def doubts(options: Options) -> Mapping[str, Column]:
    """Conditions of a suspect's row, by what it may contradict. If none has one, nothing is found of it.

    ``overlaps``: access during an earlier owner's; ``barriers``: the barrier's revisions; ``unowned``: the
    limit of time without an owner; ``tokens``: their order; ``hidden``: an earlier one began only after it
    had ended, see ``suspects_in_order``; ``causes``: the clocks of both hosts.
    """
    owner = F.col(OWNER)
    wall, monotonic = owner["start_entered_wall"], owner["start_entered_monotonic"]
    removed_later = F.col("removal.key") > owner["token"]
    lasted = (
        F.col("longest.key") > wall,
        F.col("again.key") > wall,
        F.col("unsure.key") > wall,
        F.col("longest_exact.key") > monotonic,
        F.col("again_exact.key") > monotonic,
        removed_later,
    )
    order = (
        F.col("latest.key") > wall,
        F.col("latest_exact.key") > monotonic,
        F.col("previous.key") == owner["token"],
    )
    return {
        "overlaps": _is_any(*lasted),
        "barriers": removed_later,
        "unowned": wall - F.col("last.key") > options.unowned_limit_s,
        "tokens": _is_any(*order),
        "hidden": _is_any(
            F.col("latest.key") > owner[_SURE_WALL], F.col("latest_exact.key") > owner[_SURE_MONOTONIC]
        ),
        "causes": contradicts_cause(options),
    }


def _is_any(*conditions: Column) -> Column:
    return reduce(or_, (F.coalesce(condition, F.lit(False)) for condition in conditions))


def _entered(owner: Column) -> Column:
    return owner["start_entered_sequence"].isNotNull()


def _limited(owner: Column) -> Column:
    return may_overlap_for(owner) < UNLIMITED_S


def _keyed(key: Column) -> Column:
    return F.struct(key.alias("key"), F.col(OWNER))


def has_barriers(protocol: Column) -> Column:
    """True if the protocol excludes by barriers in a registry."""
    return protocol == str(Protocol.GROUP)
