"""``rebalanser audit``: checks by the history of all nodes whether a resource ever had two owners.

The audit also computes weights from loads, and writes them to a registry (AU-7).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol

import typer
from pydantic import BaseModel, ConfigDict, ValidationError

from rebalanser.admin import Admin
from rebalanser.cli.arguments import parse_time
from rebalanser.cli.audit_stream import Following, line, refuse, steps, summary
from rebalanser.cli.options import JsonOption, RegistryOption
from rebalanser.cli.output import Face, counted
from rebalanser.errors import UnusableOutput
from rebalanser.history import Protocol as Writer
from rebalanser.redaction import redact
from rebalanser.registry.urls import open_backend
from rebalanser.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from rebalanser.audit import Audit, Options, Verdict
    from rebalanser.audit.streaming import Totals

LEAST_CHANGE: Final = 0.2
"""Minimum relative change of a weight: a move costs more than a little imbalance."""
MOST_SHOWN: Final = 10


def audit(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH",
            show_default=False,
            help="Folders or files of history, in JSONL or Parquet, or kafka://HOST:PORT/TOPIC.",
        ),
    ],
    since: Annotated[
        float | None,
        typer.Option(
            parser=parse_time,
            metavar="TIME",
            show_default="the beginning",
            help="Leave out findings that ended before this time: 2026-11-22T00:30, or 2h for two hours ago.",
        ),
    ] = None,
    until: Annotated[
        float | None,
        typer.Option(
            parser=parse_time,
            metavar="TIME",
            show_default="the end",
            help="Ignore records after this time.",
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            "--out", metavar="FOLDER", show_default=False, help="Write the tables to this folder, as Parquet."
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report", metavar="FILE", show_default=False, help="Write a report to this file, as HTML."
        ),
    ] = None,
    fail_on_findings: Annotated[
        bool,
        typer.Option(
            "--fail-on-findings", help="Exit with 1 if a finding is certain; possible findings don't count."
        ),
    ] = False,
    master: Annotated[
        str | None,
        typer.Option(
            "--master",
            metavar="URL",
            show_default="that of spark-submit, else all cores of this host",
            help="The Spark master, such as spark://HOST:7077.",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            metavar="SIZE",
            show_default=False,
            help="Memory for Spark in this process, such as 4g.",
        ),
    ] = None,
    clock_error: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            show_default="0.5",
            help="Maximum difference between the clocks of two hosts.",
        ),
    ] = None,
    unowned_limit: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="SECONDS",
            show_default="60",
            help="Maximum time for which a resource may be unowned.",
        ),
    ] = None,
    stream: Annotated[
        bool,
        typer.Option("--stream", help="Follow the history until Ctrl-C, and report findings as they come."),
    ] = False,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            "--checkpoint",
            metavar="FOLDER",
            show_default=False,
            help="Folder for the position of a stream, so that it can continue after a restart.",
        ),
    ] = None,
    delay: Annotated[
        float | None,
        typer.Option(
            min=0.5, metavar="SECONDS", show_default="2", help="How long a stream waits for late records."
        ),
    ] = None,
    write_weights: Annotated[
        bool, typer.Option("--apply", help="Write the weights computed from the loads to the registry.")
    ] = False,
    registry: RegistryOption = None,
    json: JsonOption = False,
) -> None:
    """Prove or refute, from the history of all nodes, that no resource ever had two owners.

    Needs the extra `spark`, and Java.
    """
    from rebalanser.audit import audit as look  # noqa: PLC0415 - what needs Spark is loaded when it is asked for
    from rebalanser.audit.outputs import OutputFolder  # noqa: PLC0415
    from rebalanser.audit.sources import places  # noqa: PLC0415

    given = {"since": since, "until": until, "report": report, "apply": write_weights}
    refuse(stream, given | {"checkpoint": checkpoint, "delay": delay, "out": out})
    options = _options(since=since, until=until, clock_error_s=clock_error, unowned_limit_s=unowned_limit)
    face = Face.of(registry if write_weights else "", json)
    if stream:
        assert checkpoint is not None
        assert out is not None
        totals = _follow(face, paths, options, Path(out), checkpoint, delay, master, memory)
        document, lines = summary(totals, out, str(checkpoint))
        face.answer(document, *lines)
        if fail_on_findings and totals.certain:
            raise typer.Exit(1)
        return
    if report is not None:
        _check_file(report)
    if write_weights:
        _check_registry(face)
    topics = places(paths).topics
    for topic in topics:
        topic.check()
    with contextlib.ExitStack() as stack:
        step = stack.enter_context(steps(silent=json))
        step("starting Spark")
        spark = stack.enter_context(_spark(master, memory, kafka=bool(topics)))
        step.watch(spark)
        folder = OutputFolder(spark, out) if out is not None else None
        found = stack.enter_context(look(spark, paths, options, step=step))
        verdict = found.verdict()
        if folder is not None:
            found.write(folder)
        if report is not None:
            found.report(report)
        step("weighing")
        weighings = list(_weigh(face, found, write=write_weights))
    document = {
        "verdict": verdict.model_dump(mode="json"),
        "weights": [weighing.model_dump(mode="json") for weighing in weighings],
        "out": out,
        "report": None if report is None else str(report),
    }
    face.answer(document, *_lines(verdict, weighings, out, report))
    if fail_on_findings and verdict.certain:
        raise typer.Exit(1)


def _follow(
    face: Face,
    sources: list[str],
    options: Options,
    out: Path,
    checkpoint: Path,
    delay_s: float | None,
    master: str | None,
    memory: str | None,
) -> Totals:
    """Follow the sources until a signal. Return the counts since the checkpoint began."""
    from rebalanser.audit.sources import KafkaTopic  # noqa: PLC0415 - what needs Spark is loaded when it is asked for
    from rebalanser.audit.streaming import DELAY_S, Stream, claimed, followed  # noqa: PLC0415

    topics = [KafkaTopic.from_url(url) for url in followed(sources)[1]]
    for topic in topics:
        topic.check()
    claimed(sources, out, checkpoint)
    with steps(silent=face.json) as step, contextlib.ExitStack() as stack:
        step("starting Spark")
        spark = stack.enter_context(_spark(master, memory, kafka=bool(topics)))
        following = Following(face, step)
        delay_s = DELAY_S if delay_s is None else delay_s
        return following.follow(
            Stream(
                spark,
                sources,
                out=out,
                checkpoint=checkpoint,
                options=options,
                delay_s=delay_s,
                on_batch=following.on_batch,
            )
        )


@contextlib.contextmanager
def _spark(master: str | None, memory: str | None, *, kafka: bool) -> Iterator[SparkSession]:
    """Open a session, and stop it at the end unless it existed before; a failure of Spark is one line."""
    from py4j.protocol import Py4JError  # noqa: PLC0415
    from pyspark.errors import PySparkException  # noqa: PLC0415
    from pyspark.sql import SparkSession  # noqa: PLC0415

    from rebalanser.audit.outputs import reason  # noqa: PLC0415
    from rebalanser.audit.session import SparkUnusable, session  # noqa: PLC0415

    had = SparkSession.getActiveSession()
    spark = session(master, kafka=kafka, memory=memory)
    try:
        yield spark
    except (PySparkException, Py4JError) as error:
        raise SparkUnusable(f"Spark failed: {reason(error)}") from error
    finally:
        if had is None:
            spark.stop()


def _options(**given: float | None) -> Options:
    """Return the given options, and defaults for the others."""
    from rebalanser.audit import Options  # noqa: PLC0415

    try:
        return Options.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        (first, *_) = error.errors(include_url=False, include_context=False, include_input=False)
        raise typer.BadParameter(first["msg"].removeprefix("Value error, ")) from error


def _check_file(report: Path) -> None:
    """Check that the report can be written, before an hour of work."""
    if report.is_dir() or not report.resolve().parent.is_dir():
        what = "is a folder" if report.is_dir() else "is in a folder that does not exist"
        raise UnusableOutput(f"the report {report} {what}; name a file in an existing folder")
    if not os.access(report.resolve().parent, os.W_OK):
        raise UnusableOutput(f"the report {report} can't be written: permission is denied")


def _check_registry(face: Face) -> None:
    """Check that the registry answers, before an hour of work."""
    settings = Settings()
    with face.patience(settings):
        open_backend(face.url, settings.connect_timeout_s).close()


def _weigh(face: Face, found: Audit, *, write: bool) -> Iterator[Weighing]:
    """Return the weights of each group that reported loads; write them if requested."""
    from rebalanser.audit.weights import changes  # noqa: PLC0415

    rows = found.tables.loads.orderBy("group", "resource").toLocalIterator()
    for group, loads in by_group(rows):
        if not write:
            yield asked(group, loads)
            continue
        with face.admin_of_known(group) as admin, face.progress("weighing", len(loads)) as progress:
            yield apply(admin, loads, changes, progress)


def _lines(
    verdict: Verdict, weighings: Sequence[Weighing], out: str | None, report: Path | None
) -> Iterator[str]:
    """Return the summary as lines."""
    yield from verdict.sentences()
    yield from (f"  {line(found.model_dump())}" for found in verdict.worst[:MOST_SHOWN])
    total = sum(count.certain + count.fenced + count.possible for count in verdict.findings)
    if total > MOST_SHOWN:
        yield f"  and {counted(total - MOST_SHOWN, 'more finding')}{_where(out, report)}"
    for weighing in weighings:
        yield from weighing.lines()
    if out is not None:
        yield f"tables: {redact(out)}"
    if report is not None:
        yield f"report: {report}"


def _where(out: str | None, report: Path | None) -> str:
    if out is not None:
        return "; all are in the table findings"
    return "" if report is not None else "; --out writes all of them"


class Load(Protocol):
    """A row of the table of loads."""

    group: str
    resource: str
    load: float
    weight: float


class Weighing(BaseModel):
    """The weights computed from the loads of one group."""

    model_config = ConfigDict(frozen=True)

    group: str
    weights: dict[str, float]
    """The weights that change in the registry, by resource; without a registry, all computed ones."""
    applied: bool

    def lines(self) -> Iterator[str]:
        """Return lines with the first weights and their number."""
        if not self.weights:
            yield f"Weights of {self.group}: nothing to change."
            return
        verb = "are written" if self.applied else "would be written by --apply"
        yield f"Weights of {self.group}, {len(self.weights):,} of which {verb}:"
        heaviest = sorted(self.weights.items(), key=lambda item: (-item[1], item[0]))
        yield from (f"  {resource}: {weight:g}" for resource, weight in heaviest[:MOST_SHOWN])
        if len(heaviest) > MOST_SHOWN:
            yield f"  and {len(heaviest) - MOST_SHOWN:,} more"


def by_group(rows: Iterable[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yield the loads of each group from rows sorted by group; only of resources of groups."""
    of_groups = (row for row in rows if row.protocol == Writer.GROUP)
    for group, loads in groupby(of_groups, key=lambda row: row.group):
        yield str(group), list(loads)


def asked(group: str, loads: Sequence[Load]) -> Weighing:
    """Return the weights computed from the loads, without a registry."""
    return Weighing(group=group, weights={each.resource: each.weight for each in loads}, applied=False)


def apply(
    admin: Admin,
    loads: Sequence[Load],
    changes: Callable[[Iterable[Any], Mapping[str, float], float], dict[str, float]],
    progress: Callable[[int, int], None],
) -> Weighing:
    """Write the weights that differ, and no other field; removed resources are not added again.

    ``changes`` decides which weights differ enough.
    """
    current = {resource.resource: resource.weight for resource in admin.resources()}
    weights = changes(loads, current, LEAST_CHANGE)
    admin.weigh(weights, progress=progress)
    return Weighing(group=admin.name, weights=weights, applied=True)
