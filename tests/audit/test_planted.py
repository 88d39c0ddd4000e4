"""What is planted in histories is found, and nothing else is: precision and recall of the audit."""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest

from rebalanser.audit import Options, audit
from rebalanser.audit.tables import Certainty, FindingKind
from rebalanser.history import Protocol
from support.histories import (
    CLOCK_ERROR_S,
    DRAMAS,
    SPOILING,
    Defect,
    Planted,
    Story,
    tell,
    write_pages,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from pyspark.sql import SparkSession

    from rebalanser.audit import Tables

SEEDS = int(os.environ.get("REBALANSER_PLANTED_SEEDS", "60"))
FILES = 5
OTHER = {Defect.GAP, Defect.CLOCK, Defect.QUARANTINE}
"""What is in a table of its own, not among the findings."""
WHOSE = re.compile(r"seed-\d+")


@dataclass
class Score:
    """What became of the defects of one kind."""

    planted: int = 0
    found: int = 0
    missed: list[Planted] = field(default_factory=list)
    invented: list[Planted] = field(default_factory=list)

    @property
    def precision(self) -> float:
        return self.found / (self.found + len(self.invented)) if self.found or self.invented else 1.0

    @property
    def recall(self) -> float:
        return self.found / self.planted if self.planted else 1.0


def found_in(tables: Tables) -> Iterator[Planted]:
    """Everything that the audit found, in the words of what was planted."""
    for row in tables.findings.select("kind", "group", "resource", "certainty", "gap").collect():
        yield Planted(
            Defect(row["kind"]), row["group"], row["resource"], row["certainty"], row["gap"] is not None
        )
    for row in tables.gaps.collect():
        yield Planted(
            Defect.GAP,
            row["group"],
            process=row["process"],
            first=row["first"],
            last=row["last"],
            reason=row["reason"],
        )
    apart = tables.clocks.where(f"behind_s > {CLOCK_ERROR_S}").select("group", "host", "behind_host")
    for row in apart.distinct().collect():
        yield Planted(Defect.CLOCK, row["group"], hosts=(row["host"], row["behind_host"]))
    for row in tables.quarantine.select("reason", "raw").collect():
        group = WHOSE.search(row["raw"])
        yield Planted(Defect.QUARANTINE, group.group() if group else "nobody's", reason=row["reason"])


def scores(planted: Iterable[Planted], found: Iterable[Planted]) -> dict[Defect, Score]:
    """How each kind of defect fared."""
    wanted, got = Counter(planted), Counter(found)
    result: dict[Defect, Score] = defaultdict(Score)
    for one in wanted.elements():
        result[one.defect].planted += 1
    for one in (wanted & got).elements():
        result[one.defect].found += 1
    for one in (wanted - got).elements():
        result[one.defect].missed.append(one)
    for one in (got - wanted).elements():
        result[one.defect].invented.append(one)
    return result


def table(result: dict[Defect, Score], stories: Sequence[Story]) -> str:
    """The scores for people, and every miss and invention with the plot it belongs to."""
    plots = {story.group: f"{story.protocol}: {', '.join(story.plot) or 'healthy'}" for story in stories}
    lines = [
        f"{'kind':24}{'planted':>9}{'found':>9}{'missed':>9}{'invented':>9}{'precision':>11}{'recall':>9}"
    ]
    lines += [
        f"{kind:24}{s.planted:9}{s.found:9}{len(s.missed):9}{len(s.invented):9}{s.precision:11.4f}{s.recall:9.4f}"
        for kind, s in sorted(result.items())
    ]
    for word in ("missed", "invented"):
        for score in result.values():
            for one in getattr(score, word):
                lines.append(f"{word} {told(one)} [{plots.get(one.group, '?')}]")
    return "\n".join(lines)


def told(one: Planted) -> str:
    known = {name: value for name in Planted.__slots__ if (value := getattr(one, name))}
    return " ".join(f"{name}={value!s}" for name, value in known.items())


def judge(spark: SparkSession, folder: Path, stories: Sequence[Story]) -> dict[Defect, Score]:
    """All stories in one audit."""
    write_pages(folder, [story.pages for story in stories], files=FILES, seed=len(stories))
    with audit(spark, folder, Options(clock_error_s=CLOCK_ERROR_S)) as audited:
        found = list(found_in(audited.tables))
    return scores((one for story in stories for one in story.planted), found)


def assert_perfect(result: dict[Defect, Score], stories: Sequence[Story]) -> None:
    ok = all(score.precision == 1.0 and score.recall == 1.0 for score in result.values())
    assert ok, "\n" + table(result, stories)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.rule("AU-1", "AU-2", "AU-3", "AU-4", "AU-5")
def test_all_that_is_planted_is_found_and_nothing_else(spark: SparkSession, tmp_path: Path) -> None:
    """Seeds draw protocol, life, defects, near misses and what happens to the files; one job judges all."""
    stories = [tell(seed) for seed in range(SEEDS)]
    result = judge(spark, tmp_path / "history", stories)
    print(table(result, stories))
    assert_perfect(result, stories)


@pytest.mark.slow
@pytest.mark.rule("AU-1", "AU-2", "AU-4", "AU-5")
def test_each_drama_and_each_spoiler_on_its_own(spark: SparkSession, tmp_path: Path) -> None:
    """Every kind of defect and every near miss, in every protocol in which it can happen."""
    acts = {name: drama.protocols for name, drama in DRAMAS.items()}
    acts |= {name: spoiling.protocols for name, spoiling in SPOILING.items()}
    plots = [(name, protocol) for name, protocols in acts.items() for protocol in sorted(protocols)]
    stories = [tell(10_000 + at, [name], protocol=protocol) for at, (name, protocol) in enumerate(plots)]
    result = judge(spark, tmp_path / "history", stories)
    assert_perfect(result, stories)
    assert set(result) == set(Defect)
    assert all(score.planted for score in result.values())


@pytest.mark.rule("AU-4")
def test_nothing_is_found_in_healthy_lives(spark: SparkSession, tmp_path: Path) -> None:
    stories = [tell(20_000 + at, [], protocol=protocol) for at in range(5) for protocol in Protocol]
    assert judge(spark, tmp_path / "history", stories) == {}


def test_a_planted_defect_is_named_as_the_audit_names_it() -> None:
    assert {str(kind) for kind in Defect if kind not in OTHER} == {str(kind) for kind in FindingKind}
    certainties = {one.certainty for seed in range(200) for one in tell(seed).planted if one.certainty}
    assert certainties == {str(certainty) for certainty in Certainty}


def test_the_scores_tell_misses_from_inventions() -> None:
    one = Planted(Defect.OVERLAP, "seed-1", "orders", "certain")
    other = replace(one, certainty="possible")
    result = scores([one, one, one], [one, other])[Defect.OVERLAP]
    assert (result.planted, result.found) == (3, 1)
    assert result.missed == [one, one]
    assert result.invented == [other]
    assert result.precision == 0.5
    assert result.recall == pytest.approx(1 / 3)
