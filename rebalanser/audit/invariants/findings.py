"""Builds a finding: its name, its parties, its witnesses and its sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom

from rebalanser.audit.tables import FINDINGS, PARTY, WITNESS, Certainty
from rebalanser.history import HistoryStep

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import Column, DataFrame

    from rebalanser.audit.options import Options
    from rebalanser.audit.tables import FindingKind
    from rebalanser.history import Protocol

_SEEN: Final = "evidence_seen"
_BEGINNINGS: Final = (
    str(HistoryStep.ELECTED),
    str(HistoryStep.START_ENTERED),
    str(HistoryStep.UPDATED),
    str(HistoryStep.FINISHED),
)


def subject() -> Column:
    """The resource with its group, for people."""
    return F.concat_ws("/", "group", "resource")


def text(template: str, *parts: Column) -> Column:
    """``template`` with each ``{}`` replaced by a part; a null part is ``?``."""
    pieces = template.split("{}")
    filled = [
        piece
        for before, part in zip(pieces, parts, strict=False)
        for piece in (F.lit(before), F.coalesce(part.cast("string"), F.lit("?")))
    ]
    return F.concat(*filled, F.lit(pieces[-1]))


def by_protocol(rules: Mapping[Protocol, str]) -> Column:
    """The rule of the row's protocol."""
    chain = F.lit(None).cast("string")
    for protocol, rule in rules.items():
        chain = F.when(F.col("protocol") == protocol, F.lit(rule)).otherwise(chain)
    return chain


def certain_if(condition: Column | bool) -> Column:
    """``certain`` where the condition holds, else ``possible``."""
    if isinstance(condition, bool):
        return F.lit(Certainty.CERTAIN if condition else Certainty.POSSIBLE)
    return F.when(condition, F.lit(Certainty.CERTAIN)).otherwise(F.lit(Certainty.POSSIBLE))


def named(party: Column, other: Column) -> Column:
    """A party's label, with its node's id where the other party has the same label."""
    label, node = party["label"], party["node"]
    return (
        F.when(label != other["label"], label)
        .when(node != other["node"], F.concat(label, F.lit(" ("), node, F.lit(")")))
        .otherwise(F.concat(label, F.lit(" ("), party["process"], F.lit(")")))
    )


def party(owner: Column) -> Column:
    """The ``PARTY`` of a struct that has the columns of an access."""
    fields = {
        "node": owner["node"],
        "label": owner["label"],
        "process": owner["process"],
        "host": owner["host"],
        "token": owner["token"],
        "begins": owner["start_entered_wall"],
        "ends": owner["end_wall"],
    }
    return F.struct(*(value.alias(name) for name, value in fields.items())).cast(PARTY)


def witness(process: Column, sequence: Column, step: HistoryStep) -> Column:
    """The ``WITNESS`` of one record, named only: evidence adds the rest."""
    known = {"process": process, "sequence": sequence, "kind": F.lit(str(step))}
    return F.struct(
        *(known.get(field.name, F.lit(None)).cast(field.dataType).alias(field.name) for field in WITNESS)
    )


@dataclass(frozen=True, slots=True)
class Wording:
    """Columns of one kind of findings."""

    evidence: Column
    columns: tuple[Column, ...]
    """The columns of ``FINDINGS``, once the evidence is a column of its own."""


def findings(suspects: DataFrame, wording: Wording) -> DataFrame:
    """A row of ``FINDINGS`` for each of ``suspects``."""
    return suspects.select("*", wording.evidence).select(*wording.columns)


def worded(
    kind: FindingKind,
    *,
    rule: Column,
    sentence: Column,
    parties: list[Column],
    evidence: list[Column],
    certainty: Column | None = None,
    **known: Column,
) -> Wording:
    """Build a kind of findings; ``known`` are further columns of ``FINDINGS``, the rest is null.

    Witnesses without a number are left out. A finding is identified by its parties and by the records that
    began their actions: the records that end it may come later, and must not change its identity (AU-9).
    """
    seen = F.filter(F.array(*evidence), lambda record: record["sequence"].isNotNull())
    owners = F.transform(F.array(*parties), lambda owner: _named(owner, "process", "node", "token"))
    begun = F.filter(_SEEN, lambda record: record["kind"].isin(*_BEGINNINGS))
    names = F.transform(begun, lambda record: _named(record, "process", "sequence"))
    columns = {
        "id": F.sha2(F.concat_ws("|", F.lit(str(kind)), "protocol", "group", "resource", owners, names), 256),
        "kind": F.lit(str(kind)),
        "rule": rule,
        "certainty": certain_if(True) if certainty is None else certainty,
        "protocol": F.col("protocol"),
        "group": F.col("group"),
        "resource": F.col("resource"),
        "sentence": sentence,
        "parties": F.array(*parties),
        "evidence": F.col(_SEEN),
        **known,
    }
    in_order = (
        columns.get(field.name, F.lit(None)).cast(field.dataType).alias(field.name) for field in FINDINGS
    )
    return Wording(seen.alias(_SEEN), tuple(in_order))


def _named(struct: Column, *fields: str) -> Column:
    return F.concat_ws("#", *(struct[field].cast("string") for field in fields))


@dataclass(frozen=True, slots=True)
class Case:
    """Input tables of the invariants. Each is read several times, and should be persisted."""

    records: DataFrame
    accesses: DataFrame
    suspects: DataFrame
    """``owner_pairs.suspects`` of the accesses."""
    in_order: DataFrame | None
    """``suspects_in_order``; None if no access can hide another."""
    errors: DataFrame | None
    """``host_errors`` of the clocks; None if no host is proven to be off."""
    options: Options
