"""Verdict of the audit, as text and as one JSON document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from rebalanser.audit.formatting import lasting, moment
from rebalanser.audit.tables import Certainty, FindingKind, Tables
from rebalanser.history import UnreadableReason

MOST_FINDINGS: Final = 1_000
"""Maximum number of findings in a verdict, worst first; the table has all of them."""
MOST_OTHERS: Final = 100
"""Maximum number of gaps and of clocks in a verdict, worst first."""
ROTATED: Final = "rotated"
"""Reason of a gap whose records were in old files that rotation deleted."""
HARMLESS: Final = frozenset({UnreadableReason.TORN.value})
"""Reasons of unreadable lines that can't hide a finding: the writer died in the middle of the line."""

_NOT_OF_GAPS: Final = {
    "node": "string",
    "first_wall": "double",
    "last_wall": "double",
    "duplicates": "long",
}

MEANINGS: Final[dict[str, str]] = {
    FindingKind.OVERLAP: "two owners had access to one resource at the same time",
    FindingKind.BARRIER_OVERLAP: "two nodes held one barrier at the same time",
    FindingKind.UNOWNED: "a resource had no owner for longer than the limit",
    FindingKind.TOKEN_ORDER: "the fencing token did not grow from one owner to the next",
    FindingKind.START_WITHOUT_BARRIER: "OnStart was called without the barrier",
    FindingKind.STEP_ORDER: "a node performed the protocol's steps in the wrong order",
    FindingKind.TWO_LEADERS: "one term had two leaders",
    FindingKind.CLAIM_TWICE: "two workers held one claim of a task",
    FindingKind.UPDATE_GAP: "updates of a claim are missing",
    FindingKind.STALE_WRITE: "a write of a superseded claim was accepted",
    FindingKind.CONFLICT: "two different records have the same process and number",
}
"""Short description of each kind of finding, worst first."""


class Conclusion(StrEnum):
    """Conclusion of the audit."""

    SOUND = "sound"
    """There are no findings, and no missing record could hide one."""
    FENCED = "fenced"
    """Every certain finding is an overlap of a resource whose receivers check the token: no harm was done."""
    UNSURE = "unsure"
    """No finding is certain, but one is possible, or missing records could hide one."""
    REFUTED = "refuted"
    """A rule was broken: at least one finding is certain."""


class _VerdictModel(BaseModel):
    model_config = ConfigDict(frozen=True)


class Count(_VerdictModel):
    """Number of findings of one kind."""

    kind: str
    rule: str = Field(description="rules that are broken, such as RB-1")
    certain: int = Field(description="number of certain findings, without those of fenced resources")
    fenced: int = Field(description="number of certain findings of resources whose receivers check the token")
    possible: int

    @property
    def sentence(self) -> str:
        """Number and meaning of the findings of this kind."""
        parts = [f"{self.certain:,} certain"] if self.certain else []
        parts += [f"{self.fenced:,} certain but fenced"] if self.fenced else []
        parts += [f"{self.possible:,} possible"] if self.possible else []
        return f"{self.kind} ({self.rule}), {', '.join(parts)}: {MEANINGS.get(self.kind, self.kind)}"


class Found(_VerdictModel):
    """Summary of a finding; the table of findings has its parties and its evidence."""

    id: str
    kind: str
    rule: str
    certainty: str
    protocol: str | None
    group: str | None
    resource: str | None
    sentence: str
    begins: float | None
    ends: float | None
    lasts_s: float | None
    uncertainty_s: float | None
    fenced: bool | None
    gap: str | None


class Missing(_VerdictModel):
    """Gap in the records of one process, between two Unix times."""

    group: str | None
    label: str | None
    process: str
    missing: int
    reason: str | None
    after_wall: float | None
    before_wall: float | None


class Unread(_VerdictModel):
    """Lines that could not be read for one reason."""

    reason: str
    items: int
    first_source: str | None
    first_position: int | None
    first_detail: str | None


class ClockBehind(_VerdictModel):
    """Host whose clock is proven to be behind the clock of another."""

    group: str | None
    host: str | None
    behind_host: str | None
    behind_s: float
    seen_wall: float | None


class Verdict(_VerdictModel):
    """Verdict of the audit. Durations are in seconds, times are Unix times."""

    conclusion: Conclusion
    records: int = Field(description="number of records read, without duplicates")
    missing: int = Field(description="number of missing records, without those that rotation deleted")
    duplicates: int = Field(description="number of records read more than once")
    accesses: int
    resources: int
    nodes: int = Field(description="number of nodes; each incarnation counts")
    processes: int
    groups: int
    first_wall: float | None
    last_wall: float | None
    findings: tuple[Count, ...] = Field(description="counts by kind, worst first")
    worst: tuple[Found, ...] = Field(description=f"at most {MOST_FINDINGS:,} findings, worst first")
    gaps: tuple[Missing, ...] = Field(description=f"at most {MOST_OTHERS} gaps, largest first")
    rotated: int = Field(description="number of processes whose oldest records rotation deleted")
    unread: tuple[Unread, ...]
    clocks: tuple[ClockBehind, ...] = Field(
        description=f"at most {MOST_OTHERS} pairs of clocks, furthest apart first"
    )

    @property
    def certain(self) -> int:
        """Number of certain findings, without overlaps whose receivers check the token."""
        return sum(count.certain for count in self.findings)

    def sentences(self) -> list[str]:
        """The verdict as lines of text: conclusion, findings, doubts, clocks."""
        return [
            f"{self._headline()}: {self._extent()}.",
            *(f"{count.sentence}." for count in self.findings),
            *self.doubts(),
            *self._clock_sentences(),
        ]

    def doubts(self) -> list[str]:
        """The doubts that missing and unreadable records raise, as lines of text."""
        return [*self._gap_sentences(), *self._unread_sentences()]

    def _headline(self) -> str:
        match self.conclusion:
            case Conclusion.SOUND:
                return "Sound. No resource had two owners"
            case Conclusion.FENCED:
                return "Fenced. Owners overlapped only on resources whose receivers check the fencing token"
            case Conclusion.UNSURE:
                return "Unsure. No violation of a rule is certain, but one is possible"
            case Conclusion.REFUTED:
                broken = ", ".join(sorted({count.rule for count in self.findings if count.certain}))
                breaks = "breaks" if self.certain == 1 else "break"
                return f"Refuted. {_counted(self.certain, 'certain finding')} {breaks} {broken}"

    def _extent(self) -> str:
        return (
            f"{_counted(self.accesses, 'access')} of {_counted(self.resources, 'resource')} by "
            f"{_counted(self.nodes, 'node')} of {_counted(self.groups, 'group')}"
            f"{self._period()}, {_counted(self.records, 'record')}{self._again()}"
        )

    def _again(self) -> str:
        return f" and {_counted(self.duplicates, 'duplicate')}" if self.duplicates else ""

    def _period(self) -> str:
        if self.first_wall is None or self.last_wall is None:
            return ""
        return f" over {lasting(self.last_wall - self.first_wall)} from {_to_the_second(self.first_wall)}"

    def _gap_sentences(self) -> Iterator[str]:
        if self.missing:
            labels = _listed([gap.label or gap.process for gap in self.gaps if gap.reason != ROTATED])
            yield (
                f"Doubt: {_counted(self.missing, 'record')} of {labels} "
                f"{'is' if self.missing == 1 else 'are'} missing and could hide a finding."
            )
        for gap in self.gaps[:3]:
            if gap.reason != ROTATED:
                yield f"  {_counted(gap.missing, 'record')} of {gap.label or gap.process} {_between(gap)}."
        if self.rotated:
            yield (
                f"The oldest records of {_counted(self.rotated, 'process', 'processes')} were deleted by "
                "rotation: the audit covers only the time after them."
            )

    def _unread_sentences(self) -> Iterator[str]:
        for unread in self.unread:
            place = unread.first_source or "an unknown place"
            if unread.first_position is not None:
                place += f":{unread.first_position}"
            detail = f", {unread.first_detail}" if unread.first_detail else ""
            items = _counted(unread.items, "item")
            words = f"{items} could not be read ({unread.reason}), the first at {place}{detail}"
            torn = unread.reason in HARMLESS
            yield f"{words}; its writer died there." if torn else f"Doubt: {words}."

    def _clock_sentences(self) -> Iterator[str]:
        for clock in self.clocks[:3]:
            yield (
                f"Clocks: {clock.host} is at least {lasting(clock.behind_s)} behind {clock.behind_host}; "
                "the audit allows for it."
            )
        if len(self.clocks) > 3:
            yield f"Clocks: {_counted(len(self.clocks) - 3, 'more pair')} of hosts disagree."


def conclude(tables: Tables) -> Verdict:
    """Judge the tables. Reads only bounded parts of them."""
    worst = _worst(tables.findings)
    counts = _counts(tables.findings if len(worst) == MOST_FINDINGS else None, worst)
    gaps, missing, rotated = _gaps(tables.gaps)
    unread = _unread(tables.quarantine)
    return Verdict(
        conclusion=_conclusion(counts, missing, unread),
        missing=missing,
        findings=counts,
        worst=worst,
        gaps=gaps,
        rotated=rotated,
        unread=unread,
        clocks=_clocks(tables.clocks),
        **_extent(tables, missing),
    )


def _conclusion(counts: Sequence[Count], missing: int, unread: Sequence[Unread]) -> Conclusion:
    if any(count.certain for count in counts):
        return Conclusion.REFUTED
    if missing or any(count.possible for count in counts) or any(u.reason not in HARMLESS for u in unread):
        return Conclusion.UNSURE
    return Conclusion.FENCED if any(count.fenced for count in counts) else Conclusion.SOUND


def severity(findings: DataFrame) -> DataFrame:
    """The findings, worst first: certain before possible, fenced last, then by kind and duration."""
    rank = f.array_position(f.array(*(f.lit(str(kind)) for kind in MEANINGS)), f.col("kind"))
    return findings.orderBy(
        f.col("certainty") != Certainty.CERTAIN.value,
        f.coalesce("fenced", f.lit(False)),
        rank,
        f.col("lasts_s").desc_nulls_last(),
        "begins",
        "id",
    )


def _worst(findings: DataFrame) -> tuple[Found, ...]:
    rows = severity(findings.select(*Found.model_fields)).limit(MOST_FINDINGS).collect()
    return tuple(Found(**row.asDict()) for row in rows)


def _counts(findings: DataFrame | None, worst: Sequence[Found]) -> tuple[Count, ...]:
    """Counts of ``findings``, or of ``worst`` if these are all."""
    counted: dict[tuple[str, str], dict[str, int]] = {}
    for kind, rule, column, number in _classes(findings, worst):
        of_kind = counted.setdefault((kind, rule), {"certain": 0, "fenced": 0, "possible": 0})
        of_kind[column] += number
    order = list(MEANINGS)
    counts = [Count(kind=kind, rule=rule, **numbers) for (kind, rule), numbers in counted.items()]
    return tuple(sorted(counts, key=lambda c: (not c.certain, order.index(FindingKind(c.kind)), c.rule)))


def _classes(findings: DataFrame | None, worst: Sequence[Found]) -> Iterator[tuple[str, str, str, int]]:
    if findings is None:
        for found in worst:
            yield found.kind, found.rule, _class(found.certainty, found.fenced), 1
        return
    fenced = f.coalesce("fenced", f.lit(False)).alias("fenced")
    for row in findings.groupBy("kind", "rule", "certainty", fenced).count().collect():
        yield row["kind"], row["rule"], _class(row["certainty"], row["fenced"]), row["count"]


def _class(certainty: str, fenced: bool | None) -> str:
    if certainty != Certainty.CERTAIN:
        return "possible"
    return "fenced" if fenced else "certain"


def _gaps(gaps: DataFrame) -> tuple[tuple[Missing, ...], int, int]:
    """The largest gaps, the number of missing records, and of processes whose oldest records are deleted."""
    rotated = f.coalesce(f.col("reason") == ROTATED, f.lit(False))
    listed = gaps.select(*Missing.model_fields).orderBy(rotated, f.col("missing").desc(), "process")
    rows = listed.limit(MOST_OTHERS).collect()
    largest = tuple(Missing(**row.asDict()) for row in rows)
    if len(rows) < MOST_OTHERS:
        lost = [gap.missing for gap in largest if gap.reason != ROTATED]
        return largest, sum(lost), len(largest) - len(lost)
    totals = gaps.agg(f.sum(f.when(~rotated, f.col("missing"))).alias("m"), f.count_if(rotated).alias("r"))
    row = _only(totals)
    return largest, row["m"] or 0, row["r"]


def _unread(quarantine: DataFrame) -> tuple[Unread, ...]:
    first = f.min_by(f.struct("source", "position", "detail"), f.struct("source", "position"))
    rows = quarantine.groupBy("reason").agg(f.count("*").alias("items"), first.alias("first")).collect()
    return tuple(
        Unread(
            reason=row["reason"],
            items=row["items"],
            first_source=row["first"]["source"],
            first_position=row["first"]["position"],
            first_detail=row["first"]["detail"],
        )
        for row in sorted(rows, key=lambda row: (row["reason"] in HARMLESS, row["reason"]))
    )


def _clocks(clocks: DataFrame) -> tuple[ClockBehind, ...]:
    rows = clocks.select(*ClockBehind.model_fields).orderBy(f.col("behind_s").desc()).limit(MOST_OTHERS)
    return tuple(ClockBehind(**row.asDict()) for row in rows.collect())


def _extent(tables: Tables, missing: int) -> dict[str, Any]:
    """Size of the history: the numbers from first to last of each process, without the missing ones."""
    numbers = ("protocol", "group", "process")
    dropped = tables.gaps.where(f.col("reason").isNull() | (f.col("reason") != ROTATED)).select(
        *numbers,
        f.col("first").alias("first_sequence"),
        f.col("last").alias("last_sequence"),
        *(f.lit(None).cast(kind).alias(name) for name, kind in _NOT_OF_GAPS.items()),
    )
    lived = tables.processes.select(*numbers, "first_sequence", "last_sequence", *_NOT_OF_GAPS)
    of_each = (
        lived.unionByName(dropped)
        .groupBy(*numbers)
        .agg(
            f.count("node").alias("nodes"),
            (f.max("last_sequence") - f.min("first_sequence") + 1).alias("numbers"),
            f.min("first_wall").alias("first_wall"),
            f.max("last_wall").alias("last_wall"),
            f.sum("duplicates").alias("duplicates"),
        )
    )
    processes = _only(
        of_each.agg(
            f.sum("nodes").alias("nodes"),
            f.count("*").alias("processes"),
            f.count_distinct("protocol", "group").alias("groups"),
            f.sum("numbers").alias("numbers"),
            f.sum("duplicates").alias("duplicates"),
            f.min("first_wall").alias("first_wall"),
            f.max("last_wall").alias("last_wall"),
        )
    ).asDict()
    entered = f.count("start_entered_sequence").alias("entered")
    of_resources = tables.accesses.groupBy("protocol", "group", "resource").agg(entered)
    accesses = _only(of_resources.agg(f.sum("entered").alias("accesses"), f.count("*").alias("resources")))
    records = (processes.pop("numbers") or 0) - missing
    return {
        **processes,
        "nodes": processes["nodes"] or 0,
        "duplicates": processes["duplicates"] or 0,
        "accesses": accesses["accesses"] or 0,
        "resources": accesses["resources"],
        "records": records,
    }


def _only(frame: DataFrame) -> Any:
    (row,) = frame.collect()
    return row


def _to_the_second(wall: float) -> str:
    return f"{moment(wall, milliseconds=False)} UTC"


def _between(gap: Missing) -> str:
    after = f"after {_to_the_second(gap.after_wall)}" if gap.after_wall is not None else "at the beginning"
    before = f"before {_to_the_second(gap.before_wall)}" if gap.before_wall is not None else "at the end"
    reason = f" ({gap.reason})" if gap.reason else ""
    return f"{after}, {before}{reason}"


def _listed(names: Sequence[str]) -> str:
    """The first three distinct names and the number of the others."""
    distinct = list(dict.fromkeys(names))
    more = len(distinct) - 3
    return ", ".join(distinct[:3]) + (f" and {more:,} more" if more > 0 else "")


def _counted(number: int, noun: str, plural: str | None = None) -> str:
    ending = "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun if number == 1 else plural or noun + ending}"
