"""Invariants between successive owners: one at a time, short gaps between them, growing tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from rebalanser.audit.caching import once
from rebalanser.audit.clocks import with_uncertainty
from rebalanser.audit.formatting import lasting_column
from rebalanser.audit.invariants.findings import (
    Wording,
    by_protocol,
    certain_if,
    findings,
    named,
    party,
    subject,
    text,
    witness,
    worded,
)
from rebalanser.audit.owner_pairs import OWNER, SERIES, has_barriers, may_overlap_for
from rebalanser.audit.tables import EndedBy, FindingKind
from rebalanser.history import HistoryStep, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import Column, DataFrame

    from rebalanser.audit.invariants.findings import Case

_EARLIER: Final = "earlier"
_OF_ALL: Final = "of_all"
"""Column: true if all accesses of earlier tokens were compared, else only those that began in token order."""
_UNCERTAIN: Final = "uncertainty_s"
_UNSURE: Final = "unsure_end"
_OVERLAP_RULES: Final = {
    Protocol.GROUP: "RB-1",
    Protocol.SHIVA: "SH-13",
    Protocol.NELI: "NE-10",
    Protocol.SKULD: "SK-6",
}
_UNOWNED_RULES: Final = {Protocol.GROUP: "RB-2", Protocol.SHIVA: "SH-4", Protocol.NELI: "NE-6"}
_TOKEN_RULES: Final = {
    Protocol.GROUP: "RB-12",
    Protocol.SHIVA: "SH-7",
    Protocol.NELI: "NE-15",
    Protocol.SKULD: "SK-6",
}


def overlap(case: Case) -> DataFrame:
    """Accesses that began during one of an earlier token, each against the one that lasted longest.

    Times of one boot are exact. Times of two hosts are certain beyond the uncertainty of their clocks; within
    it they count only against an owner that is not known to have stopped in good order (AU-5). If OnStop
    raised, nothing is certain of the time after that.
    """
    pairs = _lasting(case.suspects)
    if case.in_order is None:
        return findings(_overlapping(pairs, case), _overlap_wording())
    of_all = pairs.withColumn(_OF_ALL, F.lit(True))
    both = of_all.unionByName(_lasting(case.in_order).withColumn(_OF_ALL, F.lit(False)))
    return findings(_one_of_each(_overlapping(both, case)), _overlap_wording())


def _one_of_each(pairs: DataFrame) -> DataFrame:
    """One pair of each access: a certain one if there is any, and if possible one of all accesses."""
    later = F.col(OWNER)
    best = F.max_by(F.struct("*"), F.struct("certain", _OF_ALL)).alias("pair")
    return (
        pairs.groupBy(*SERIES, later["process"], later["start_entered_sequence"]).agg(best).select("pair.*")
    )


def _lasting(suspects: DataFrame) -> DataFrame:
    """The suspects that began, each beside the longest of those that may overlap with it."""
    later = F.col(OWNER)
    on_boot, by_wall, unsure = _longest_on_boot(), _longest_by_wall(), F.col("unsure")
    return (
        suspects.where(later["start_entered_sequence"].isNotNull())
        .withColumns({"on_boot": on_boot[OWNER], "by_wall": by_wall[OWNER]})
        .withColumn(_UNSURE, F.coalesce("on_boot", "by_wall").isNull())
        .withColumn(_EARLIER, F.coalesce("on_boot", "by_wall", unsure[OWNER]))
        .where(F.col(_EARLIER).isNotNull())
        .withColumn("exact", _of_one_clock())
    )


@once
def _of_one_clock() -> Column:
    return _on_one_clock(F.col(_EARLIER), F.col(OWNER))


def _on_one_clock(earlier: Column, later: Column) -> Column:
    """True if the monotonic times of both owners are of one clock, so that wall times add nothing."""
    return F.coalesce(earlier["boot"] == later["boot"], earlier["process"] == later["process"])


@once
def _longest_on_boot() -> Column:
    """The longest access on the present owner's clock that overlaps with it; null if none does."""

    def overlapping(longest: Column) -> Column:
        later = F.col(OWNER)
        begun = later["sure_monotonic"] >= longest["owner"]["start_entered_monotonic"]
        return F.when((longest["key"] > later["start_entered_monotonic"]) & begun, longest)

    return F.greatest(*(overlapping(F.col(name)) for name in ("longest_exact", "again_exact")))


@once
def _longest_by_wall() -> Column:
    """The longest overlap with the present owner on another clock, by wall time; null if none.

    Candidates are accesses that are not released, and those released after the token of the present owner:
    the one that was released last, and the one that ended last.
    """
    later = F.col(OWNER)

    def released_late(owner: Column) -> Column:
        late = (owner["removed_revision"] > later["token"]) & owner["end_wall"].isNotNull()
        until = owner["sure_wall"] - may_overlap_for(owner)
        return F.when(late, F.struct(until.alias("key"), owner.alias(OWNER)))

    def overlapping(longest: Column) -> Column:
        begun = later["sure_wall"] >= longest["owner"]["start_entered_wall"]
        longer = (longest["key"] > later["start_entered_wall"]) & begun
        return F.when(longer & ~_on_one_clock(longest["owner"], later), longest)

    candidates = (
        *(F.col(name) for name in ("longest", "again")),
        *(released_late(F.col(f"{name}.owner")) for name in ("removal", "last")),
    )
    return F.greatest(*(overlapping(candidate) for candidate in candidates))


def _overlapping(pairs: DataFrame, case: Case) -> DataFrame:
    """The pairs that overlap, with the certainty that the clocks allow."""
    measured = (
        pairs.withColumns(_measures())
        .withColumn("lasts_s", F.greatest("shared_s", F.lit(0.0)))
        .where((F.col("earlier_lasts_s") > 0) & (F.col("later_lasts_s") >= 0))
    )
    return _with_uncertainty(measured, case).withColumn("certain", _is_certain()).where(_counts())


@once
def _measures() -> dict[str, Column]:
    earlier, later = F.col(_EARLIER), F.col(OWNER)
    start, end = _by_clock("start_entered"), _until()
    return {
        "earlier_lasts_s": end(earlier) - start(later) - may_overlap_for(earlier),
        "later_lasts_s": end(later) - start(earlier),
        "shared_s": F.least(end(earlier), end(later)) - F.greatest(start(earlier), start(later)),
    }


@once
def _is_certain() -> Column:
    beyond = F.least("earlier_lasts_s", "later_lasts_s") > F.col(_UNCERTAIN)
    return ~F.col(_UNSURE) & (F.col("exact") | beyond)


@once
def _counts() -> Column:
    return F.col("certain") | ~_is_in_good_order(F.col(_EARLIER))


def _until() -> Callable[[Column], Column]:
    """The end of an access: the sure one, or the last possible one if only that overlaps."""
    sure, possible = _by_clock("sure"), _by_clock("end")
    return lambda owner: F.when(F.col(_UNSURE), possible(owner)).otherwise(sure(owner))


def _is_in_good_order(owner: Column) -> Column:
    """True if the owner surely stopped as it should, so that clocks within their error prove nothing."""
    stopped = owner["ended_by"] == EndedBy.STOP
    return stopped & (~has_barriers(F.col("protocol")) | owner["barrier_removed_sequence"].isNotNull())


@once
def _overlap_wording() -> Wording:
    earlier, later = F.col(_EARLIER), F.col(OWNER)
    begins = F.greatest(earlier["start_entered_wall"], later["start_entered_wall"])
    swapped = earlier["start_entered_wall"] > later["start_entered_wall"]
    first, second = F.when(swapped, later).otherwise(earlier), F.when(swapped, earlier).otherwise(later)
    sentence = F.concat(
        text(
            "{} had two owners for {}: {} (token {}) had not stopped when {} (token {}) started",
            subject(),
            lasting_column(F.col("lasts_s")),
            named(first, second),
            first["token"],
            named(second, first),
            second["token"],
        ),
        F.when(
            first["ended_by"] == EndedBy.SILENCE, F.lit("; the end of its access was not recorded")
        ).otherwise(F.lit("")),
        F.when(
            F.col(_UNSURE),
            text("; OnStop of {} raised, so the end of its access is unknown", named(earlier, later)),
        ).otherwise(F.lit("")),
        F.when(
            ~F.col("certain") & ~F.col(_UNSURE),
            text(
                "; their clocks may differ by {}, so there may be no overlap",
                lasting_column(F.col(_UNCERTAIN)),
            ),
        ).otherwise(F.lit("")),
        F.when(
            _fenced(),
            text("; receivers check the token and refuse writes of {}", named(earlier, later)),
        ).otherwise(F.lit("")),
    )
    in_neli = F.when(
        (F.col("protocol") == str(Protocol.NELI)) & (may_overlap_for(earlier) > 0), F.lit("NE-6")
    )
    return worded(
        FindingKind.OVERLAP,
        rule=F.coalesce(in_neli, by_protocol(_OVERLAP_RULES)),
        certainty=certain_if(F.col("certain")),
        sentence=sentence,
        parties=[party(earlier), party(later)],
        evidence=[
            _witness(earlier, HistoryStep.START_ENTERED),
            _witness(earlier, HistoryStep.STOP_RETURNED),
            _witness(earlier, HistoryStep.STOP_FAILED),
            _witness(later, HistoryStep.START_ENTERED),
        ],
        begins=begins,
        ends=F.greatest(begins, F.least(*(_wall_end(owner) for owner in (earlier, later)))),
        lasts_s=F.col("lasts_s"),
        uncertainty_s=F.col(_UNCERTAIN),
        fenced=_fenced(),
    )


def _wall_end(owner: Column) -> Column:
    return F.when(F.col(_UNSURE), owner["end_wall"]).otherwise(owner["sure_wall"])


def barrier_overlap(case: Case) -> DataFrame:
    """Barriers added at a revision before the removal of an earlier one: certain."""
    later = F.col(OWNER)
    stood = later["barrier_added_sequence"].isNotNull() & (later["turn"] == 0)
    pairs = case.suspects.where(stood & (F.col("removal.key") > later["token"]))
    return findings(pairs, _barrier_wording())


@once
def _barrier_wording() -> Wording:
    earlier, later = F.col("removal.owner"), F.col(OWNER)
    sentence = text(
        "two nodes held the barrier of {}: {} (token {}) removed it at revision {}, "
        "but {} had added it at revision {}",
        subject(),
        named(earlier, later),
        earlier["token"],
        F.col("removal.key"),
        named(later, earlier),
        later["token"],
    )
    return worded(
        FindingKind.BARRIER_OVERLAP,
        rule=F.lit("RB-12"),
        sentence=sentence,
        parties=[party(earlier), party(later)],
        evidence=[_witness(earlier, HistoryStep.BARRIER_REMOVED), _witness(later, HistoryStep.BARRIER_ADDED)],
        begins=later["barrier_added_wall"],
        ends=earlier["barrier_removed_wall"],
        fenced=_fenced_by(earlier, later),
    )


def unowned(case: Case) -> DataFrame:
    """Times between two owners that exceed the limit even under the greatest error of the clocks.

    The finding is certain if the stop of the former owner is recorded. A task of Skuld may wait for its next
    claim for any time, and a stop of Shiva's application may have been commanded.
    """
    earlier, later = F.col(_EARLIER), F.col(OWNER)
    limit_s = case.options.unowned_limit_s
    by_wall = later["start_entered_wall"] - earlier["end_wall"]
    by_boot = F.when(_of_one_clock(), later["start_entered_monotonic"] - earlier["end_monotonic"])
    gaps = (
        case.suspects.where(F.col("protocol").isin(*map(str, _UNOWNED_RULES)))
        .withColumn(_EARLIER, F.col("last.owner"))
        .withColumn("lasts_s", F.coalesce(by_boot, by_wall))
        .withColumn("exact", by_boot.isNotNull())
        .where(F.col("lasts_s") > limit_s)
    )
    long = _with_uncertainty(gaps, case).where(F.col("lasts_s") - F.col(_UNCERTAIN) > limit_s)
    known = (earlier["ended_by"] == EndedBy.STOP) & (F.col("protocol") != str(Protocol.SHIVA))
    silent = earlier["ended_by"] != EndedBy.STOP
    sentence = F.concat(
        text("{} had no owner for {}, from ", subject(), lasting_column(F.col("lasts_s"))),
        F.when(silent, F.lit("the last record of ")).otherwise(F.lit("the stop of ")),
        text(
            "{} (token {}) to the start of {} (token {})",
            named(earlier, later),
            earlier["token"],
            named(later, earlier),
            later["token"],
        ),
        F.when(silent, F.lit("; its access may have lasted longer")).otherwise(F.lit("")),
    )
    return findings(
        long,
        worded(
            FindingKind.UNOWNED,
            rule=by_protocol(_UNOWNED_RULES),
            certainty=certain_if(known),
            sentence=sentence,
            parties=[party(earlier), party(later)],
            evidence=[
                _witness(earlier, HistoryStep.START_ENTERED),
                _witness(earlier, HistoryStep.STOP_RETURNED),
                _witness(later, HistoryStep.START_ENTERED),
            ],
            begins=earlier["end_wall"],
            ends=later["start_entered_wall"],
            lasts_s=F.col("lasts_s"),
            uncertainty_s=F.col(_UNCERTAIN),
        ),
    )


def token_order(case: Case) -> DataFrame:
    """Owners that started after another and have a smaller token, and two owners with the same token."""
    return _regressions(case).unionByName(_same_tokens(case))


def _regressions(case: Case) -> DataFrame:
    """Owners with too small a token, each once, against the last one that started before it."""
    later, earlier = F.col(OWNER), F.col(_EARLIER)
    by_boot = F.col("latest_exact.key") > later["start_entered_monotonic"]
    pairs = (
        case.suspects.withColumn("exact", F.coalesce(by_boot, F.lit(False)))
        .withColumn(
            _EARLIER, F.when(F.col("exact"), F.col("latest_exact.owner")).otherwise(F.col("latest.owner"))
        )
        .withColumn("too_late_s", F.col("latest.key") - later["start_entered_wall"])
        .where((F.col("exact") | (F.col("too_late_s") > 0)) & (earlier["token"] < later["token"]))
    )
    sure = _with_uncertainty(pairs, case).where(F.col("exact") | (F.col("too_late_s") > F.col(_UNCERTAIN)))
    told = (
        sure.groupBy(
            "protocol",
            "group",
            "resource",
            earlier["process"].alias("of_process"),
            earlier["start_entered_sequence"].alias("of_sequence"),
        )
        .agg(
            F.max(
                F.struct(
                    later["start_entered_wall"].alias("at"), F.col(_EARLIER), F.col(OWNER), F.col(_UNCERTAIN)
                )
            ).alias("pair")
        )
        .select("protocol", "group", "resource", "pair.*")
    )
    sentence = text(
        "{} started {} with token {} after {} had started it with token {}: tokens must grow",
        named(earlier, later),
        subject(),
        earlier["token"],
        named(later, earlier),
        later["token"],
    )
    return _of_tokens(told, FindingKind.TOKEN_ORDER, sentence, F.col(_UNCERTAIN))


def _same_tokens(case: Case) -> DataFrame:
    pairs = _with_same_token(case).where(F.col("protocol") != str(Protocol.SKULD))
    earlier, later = F.col(_EARLIER), F.col(OWNER)
    sentence = text(
        "{} and {} both owned {} with token {}: each owner must have its own token",
        named(earlier, later),
        named(later, earlier),
        subject(),
        later["token"],
    )
    return _of_tokens(pairs, FindingKind.TOKEN_ORDER, sentence, F.lit(0.0))


def _with_same_token(case: Case) -> DataFrame:
    return case.suspects.withColumn(_EARLIER, F.col("previous.owner")).where(
        (F.col("previous.key") == F.col(OWNER)["token"])
        & F.col(OWNER)["start_entered_sequence"].isNotNull()
        & (F.col(OWNER)["turn"] == 0)
    )


def _of_tokens(pairs: DataFrame, kind: FindingKind, sentence: Column, uncertainty_s: Column) -> DataFrame:
    earlier, later = F.col(_EARLIER), F.col(OWNER)
    return findings(
        pairs,
        worded(
            kind,
            rule=by_protocol(_TOKEN_RULES),
            sentence=sentence,
            parties=[party(earlier), party(later)],
            evidence=[
                _witness(earlier, HistoryStep.START_ENTERED),
                _witness(later, HistoryStep.START_ENTERED),
            ],
            begins=F.greatest(earlier["start_entered_wall"], later["start_entered_wall"]),
            ends=F.greatest(earlier["start_entered_wall"], later["start_entered_wall"]),
            uncertainty_s=uncertainty_s,
            fenced=_fenced_by(earlier, later),
        ),
    )


def _by_clock(step: str) -> Callable[[Column], Column]:
    """The time of a step, by the exact clock if the pair has one."""
    return lambda owner: F.when(F.col("exact"), owner[f"{step}_monotonic"]).otherwise(owner[f"{step}_wall"])


def _with_uncertainty(pairs: DataFrame, case: Case) -> DataFrame:
    doubted = with_uncertainty(pairs, case.errors, _EARLIER, OWNER, case.options)
    return doubted.withColumn(_UNCERTAIN, F.when(F.col("exact"), 0.0).otherwise(F.col(_UNCERTAIN)))


@once
def _fenced() -> Column:
    return _fenced_by(F.col(_EARLIER), F.col(OWNER))


def _fenced_by(earlier: Column, later: Column) -> Column:
    return F.coalesce(earlier["fenced"] & later["fenced"], earlier["fenced"], later["fenced"])


def _witness(owner: Column, step: HistoryStep) -> Column:
    return witness(owner["process"], owner[f"{step}_sequence"], step)
