"""The audit as a stream: the same functions on micro-batches, each finding reported once (AU-9).

Each micro-batch takes the state that the one before left: a *watermark* and the records carried over
(``rebalanser.audit.stream_state``). Records up to the new watermark are judged together with those carried;
later ones wait, since earlier ones may still come. A record is late, and quarantined, if it is from before
the watermark and a later one of its process was judged already. A process whose clock or whose records lie
behind those of all others is not late: its numbers continue, and it is judged at once. So is one whose clock
is ahead of this host's, which the watermark would not reach for long.

**Restarting.** Spark repeats a micro-batch that was not finished, with the same records. A micro-batch writes
to folders of its own number, which it makes anew, and starts from the state of the number before. So a batch
that was half written is written again, the same; one that left a complete state has happened, and is not
repeated. A finding that another batch has reported is left out.

The last records of a source that falls silent would wait for ever. So after ``delay_s`` seconds without a new
record the watermark moves up to the newest one, as a step of its own (``N-idle``).

**Time.** A small micro-batch takes most of its time for planning. So presence flags are collected as rows are
computed (``observed``), queries that they rule out are not planned, numbers that differ each time come as
rows (``limits``), and intervals and carried records are written in parallel with the evaluation.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Final

from pyarrow.parquet import ParquetFile, read_metadata
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from rebalanser.audit.accesses import put_together
from rebalanser.audit.caching import computed, count, observed
from rebalanser.audit.checkpoint import TIP, Checkpoint, StreamState, Totals, UnusableCheckpoint, claim_output
from rebalanser.audit.evaluation import Presence, evaluate, of_accesses
from rebalanser.audit.evidence import with_evidence
from rebalanser.audit.ingest import kafka_options, parse_lines, parse_messages, read
from rebalanser.audit.micro_batch import LATE, Came, Placed, counted_on, place, read_once
from rebalanser.audit.options import Options
from rebalanser.audit.schema import RECORDS
from rebalanser.audit.sequences import ROTATED, gaps
from rebalanser.audit.sources import KafkaTopic, NoHistory
from rebalanser.audit.tables import ACCESSES, CLOCKS, FINDINGS, GAPS, QUARANTINE, Certainty
from rebalanser.audit.tailing import NAME, HistoryFiles, oldest_unread, planned

__all__ = ["DELAY_S", "LATE", "TABLES", "Stream", "Told", "Totals", "UnusableCheckpoint"]

DELAY_S: Final = 2.0
"""Seconds for which the stream waits for late records."""
TABLES: Final = {
    "findings": FINDINGS,
    "gaps": GAPS,
    "clocks": CLOCKS,
    "quarantine": QUARANTINE,
    "intervals": ACCESSES,
}
"""The tables that are written, a folder each; in it a folder for each micro-batch that had rows."""

_POLL_S: Final = 0.2
"""Seconds between two looks at the sources while nothing comes."""
_MOST_FOLDERS: Final = 32
"""Number of folders of reported rows from which they are merged into one."""
_GROWN_S: Final = 0.1
"""Seconds by which a proven difference of two clocks must grow to be reported again."""
_GAP: Final = ("process", "first", "last")


@dataclass(frozen=True, slots=True)
class Told:
    """Result of one micro-batch."""

    batch: str
    came: Totals
    """Counts of this micro-batch."""
    totals: Totals
    """Counts since the checkpoint began."""
    watermark: float | None
    """Wall time up to which all is judged, in seconds since 1970."""
    took_s: float


class Stream:
    """An audit that continues while the history grows.

    ``sources`` are folders and files of JSONL, or URLs of Kafka topics. Tables are written below ``out``, the
    state below ``checkpoint``: folders of a file system that the driver and all workers see. ``delay_s`` is
    the time for which the stream waits for late records. ``on_batch`` is called with the result of each
    micro-batch, in a thread of Spark's.

    Raises:
        UnusableCheckpoint: the checkpoint is of another version or of other sources.
        UnusableOutput: the output folder belongs to something else, or can't be written to.
        NoHistory: a source can't be followed.
        InvalidTopic: the URL of a topic can't be used.
    """

    def __init__(
        self,
        spark: SparkSession,
        sources: Sequence[str],
        *,
        out: Path,
        checkpoint: Path,
        options: Options | None = None,
        delay_s: float = DELAY_S,
        on_batch: Callable[[Told], None] = lambda _told: None,
    ) -> None:
        self._spark = spark
        self._paths, self._topics = followed(sources)
        self._out = out
        self._checkpoint = Checkpoint(
            checkpoint, [*self._paths, *(str(KafkaTopic.from_url(url)) for url in self._topics)]
        )
        claim_output(out, self._checkpoint)
        # A micro-batch is of bounded size, so that no query for crowded series is needed.
        self._options = (options or Options()).model_copy(update={"crowded": None})
        self._delay_s = delay_s
        self._on_batch = on_batch
        self._turn = threading.Lock()
        self._last_batch: int | None = None
        self._quiet_since = time.monotonic()
        self._ending = threading.Event()
        self._failure: BaseException | None = None
        self._query: StreamingQuery | None = None
        self._beside = ThreadPoolExecutor(2, "rebalanser-audit-writing")

    def start(self) -> None:
        """Begin, or continue from the checkpoint.

        Raises:
            UnusableCheckpoint: another stream uses it.
            KafkaUnreachable: no broker answers.
            InvalidTopic: there is no such topic.
        """
        self._checkpoint.lock()
        self._forget_what_never_happened()
        self._last_batch = self._checkpoint.last()
        writer = self._raw().writeStream.foreachBatch(self._micro_batch)
        writer = writer.option("checkpointLocation", str(self._checkpoint.spark))
        self._query = writer.trigger(processingTime=f"{_POLL_S} seconds").start()
        self._quiet_since = time.monotonic()
        threading.Thread(target=self._watch_for_silence, name="rebalanser-audit-idle", daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the stream has stopped by itself, as after a failure; True if it has.

        Raises:
            pyspark.errors.StreamingQueryException: a micro-batch failed.
        """
        query = self._query
        ended = query is None or self._ending.wait(timeout_s) or not query.isActive
        if self._failure is not None:
            raise self._failure
        if query is not None and not query.isActive and (failure := query.exception()) is not None:
            raise failure
        return ended

    def read_all(self) -> None:
        """Read all records there are now, and judge them up to the watermark."""
        assert self._query is not None
        self._query.processAllAvailable()

    def settle(self) -> None:
        """Read all records there are now and judge all of them, without waiting out the delay."""
        self.read_all()
        with self._turn:
            self._idle()

    def stop(self) -> None:
        """Stop after the present micro-batch; waiting records stay in the checkpoint. Twice is fine."""
        self._ending.set()
        with self._turn:
            query, self._query = self._query, None
        if query is not None:
            query.stop()
        self._beside.shutdown()
        self._checkpoint.unlock()

    def totals(self) -> Totals:
        """Counts of records and findings since the checkpoint began."""
        last = self._checkpoint.last()
        return Totals() if last is None else self._checkpoint.load(self._spark, below=last + 1)[0].totals

    def table(self, name: str, batch: str | None = None) -> DataFrame:
        """The written rows of one of ``TABLES``; with ``batch`` those that this micro-batch wrote."""
        folders = self._folders(name) if batch is None else [self._folder(name, batch)]
        return self._read(TABLES[name], [str(folder) for folder in folders if folder.exists()])

    def findings_of(self, batch: str) -> Iterator[dict[str, Any]]:
        """The findings of a micro-batch, without the parties and the evidence. Needs no Spark job."""
        columns = [name for name in FINDINGS.names if name not in {"parties", "evidence"}]
        for file in sorted(self._folder("findings", batch).glob("*.parquet")):
            for rows in ParquetFile(file).iter_batches(columns=columns):
                yield from rows.to_pylist()

    def _raw(self) -> DataFrame:
        """The raw rows of all sources, the files first."""
        frames = [self._files()] if self._paths else []
        for url in self._topics:
            read(self._spark, [url])  # which says in one line what is wrong with the address or the topic
            topic = KafkaTopic.from_url(url)
            stream = self._spark.readStream.format("kafka").options(
                **kafka_options(topic), startingOffsets="earliest"
            )
            frames.append(parse_messages(stream.load()))
        return reduce(DataFrame.unionByName, frames)

    def _files(self) -> DataFrame:
        self._spark.dataSource.register(HistoryFiles)
        lines = self._spark.readStream.format(NAME).options(
            paths=json.dumps(self._paths),
            planned=json.dumps(planned(self._checkpoint.spark)),
            tasks=self._spark.sparkContext.defaultParallelism,
        )
        return parse_lines(lines.load())

    def _micro_batch(self, raw: DataFrame, number: int) -> None:
        with self._turn:
            if not self._checkpoint.has(str(number)):
                self._advance(str(number), raw, below=number)
                self._checkpoint.prune(number)
            self._last_batch = number
            self._quiet_since = time.monotonic()

    def _watch_for_silence(self) -> None:
        while not self._ending.wait(min(_POLL_S, self._delay_s)):
            quiet_s = time.monotonic() - self._quiet_since
            query = self._query
            if quiet_s < self._delay_s or query is None or not _has_read_all(query):
                continue
            try:
                with self._turn:
                    self._idle()
            except Exception as error:
                self._failure = error
                query.stop()
                return

    def _idle(self) -> None:
        """Judge the waiting records, once after each micro-batch."""
        if self._last_batch is None or self._ending.is_set():
            return
        name = f"{self._last_batch}-idle"
        if not self._checkpoint.has(name):
            self._advance(name, None, below=self._last_batch + 1)

    def _advance(self, name: str, raw: DataFrame | None, *, below: int) -> None:
        """Take one step: with the input of a micro-batch, or with all waiting records."""
        began = time.monotonic()
        before, carried_over = self._checkpoint.load(self._spark, below=below)
        state = self._step(name, raw, before, carried_over)
        came = Totals(
            **{
                field: getattr(state.totals, field) - getattr(before.totals, field)
                for field in Totals.model_fields
            }
        )
        self._on_batch(Told(name, came, state.totals, state.watermark, time.monotonic() - began))

    def _step(
        self, name: str, raw: DataFrame | None, before: StreamState, carried_over: DataFrame
    ) -> StreamState:
        ahead = time.time() + self._options.clock_error_s
        came = Came() if raw is None else read_once(raw, ahead)
        limit = None if raw is None else oldest_unread(self._checkpoint.spark, int(name), self._paths)
        state = self._reached(before, came.newest, limit, 0.0 if raw is None else self._delay_s)
        placed = place(came.records, carried_over, before, state, ahead)
        processes, is_missing, twice = counted_on(placed.judged)
        settled = placed.judged.select(*RECORDS.names)
        together = put_together(settled, F.broadcast(processes), computed, **of_accesses())
        owned = together.in_turns
        carried_on = placed.carried_on(settled, processes, together.whole)
        carrying = self._beside.submit(self._checkpoint.carry, name, carried_on)
        writing = self._beside.submit(self._write, "intervals", name, placed.ended(owned))
        told, missing = dict(before.told), 0
        if is_missing or placed.has_gaps:
            missing = self._gaps(name, placed, told)
        there = Presence(**placed.there, twice=twice, **together.are_any)
        counts = self._judge(name, settled, owned, there, told)
        if came.bad or placed.late:
            unread = () if came.quarantine is None else (came.quarantine,)
            self._write("quarantine", name, reduce(DataFrame.unionByName, unread, placed.too_late()))
        writing.result()
        carrying.result()
        added = Totals(
            records=came.count - placed.late,
            late=placed.late,
            quarantined=came.bad,
            missing=missing,
            **counts,
        )
        state = state.model_copy(update={"told": told, "totals": before.totals + added})
        self._checkpoint.save(name, state)
        return state

    def _judge(
        self,
        name: str,
        settled: DataFrame,
        owned: DataFrame,
        there: Presence,
        told: dict[str, tuple[str, ...]],
    ) -> dict[str, int]:
        """Write the findings; the number of each certainty. Adds to ``told`` the folders that it wrote."""
        proven = self._known("clocks", told.get("clocks", ()))
        evaluation = evaluate(settled, owned, self._options, computed, there=there, proven=proven)
        counts = {} if evaluation.found is None else self._findings(name, evaluation.found, settled, told)
        if evaluation.clocks is not None:
            self._clocks(name, evaluation.clocks, proven, told)
        return counts

    def _reached(
        self, before: StreamState, newest: float | None, limit: float | None, delay_s: float
    ) -> StreamState:
        """The state with its clocks set by the newest record; some records from ``limit`` on are unread."""
        seen = max((wall for wall in (before.newest, newest) if wall is not None), default=None)
        if seen is None:
            return before
        walls = [seen - delay_s, *([] if limit is None else [limit])]
        watermark = max(min(walls), min(walls) if before.watermark is None else before.watermark)
        return before.model_copy(update={"watermark": watermark, "newest": seen})

    def _gaps(self, name: str, placed: Placed, told: dict[str, tuple[str, ...]]) -> int:
        """Write the gaps before the new numbers; the number of missing ones."""
        found = gaps(placed.linked.select(*RECORDS.names))
        known = placed.judged.where(TIP).select("process").distinct()
        others = found.where("first = 0").join(known, "process", "left_semi").select(*_GAP)
        before = self._known("gaps", told.get("gaps", ()))
        if before is not None:
            others = others.unionByName(before.select(*_GAP))
        new, seen = observed(
            computed,
            "looking for gaps",
            found.join(others, list(_GAP), "left_anti"),
            missing=F.sum(F.when(F.col("reason") != ROTATED, F.col("missing"))),
        )
        self._tell("gaps", name, new, told)
        return seen["missing"] or 0

    def _findings(
        self, name: str, found: DataFrame, settled: DataFrame, told: dict[str, tuple[str, ...]]
    ) -> dict[str, int]:
        """Write the findings that were not reported before; the number of each certainty."""
        before = self._known("findings", told.get("findings", ()))
        new = found if before is None else found.join(before.select("id"), "id", "left_anti")
        new, seen = observed(computed, "looking for findings", new.select(*FINDINGS.names), rows=count())
        if not seen["rows"]:
            return {}

        def write(_words: str | None, findings: DataFrame) -> DataFrame:
            self._tell("findings", name, findings, told)
            return findings

        gaps_told = self._known("gaps", told.get("gaps", ()))
        whole = F.col("certainty") == Certainty.CERTAIN
        fenced = F.coalesce("fenced", F.lit(False))
        _, counts = observed(
            write,
            "collecting evidence",
            with_evidence(new, settled, gaps_told, has_lines=True),
            possible=F.count_if(~whole),
            fenced=F.count_if(whole & fenced),
            certain=F.count_if(whole & ~fenced),
        )
        return dict(counts)

    def _clocks(
        self, name: str, apart: DataFrame, proven: DataFrame | None, told: dict[str, tuple[str, ...]]
    ) -> None:
        """Write the clocks that are proven to be further apart than reported before."""
        if proven is not None:
            pair = ["group", "host", "behind_host", "cause"]
            known = proven.groupBy(*pair).agg(F.max("behind_s").alias("known_s"))
            grown = F.col("known_s").isNull() | (F.col("behind_s") > F.col("known_s") + _GROWN_S)
            apart = apart.join(known, pair, "left").where(grown)
        self._tell("clocks", name, apart, told)

    def _tell(self, table: str, name: str, rows: DataFrame, told: dict[str, tuple[str, ...]]) -> None:
        """Write rows that are looked up later, and add their folder to ``told``."""
        written = self._write(table, name, rows)
        if written is not None:
            told[table] = self._gathered(table, name, (*told.get(table, ()), written))

    def _known(self, table: str, folders: Sequence[str]) -> DataFrame | None:
        """Rows reported by earlier micro-batches, of findings the id only; None if there are none."""
        if not folders:
            return None
        return self._read(StructType([FINDINGS["id"]]) if table == "findings" else TABLES[table], folders)

    def _gathered(self, table: str, name: str, folders: tuple[str, ...]) -> tuple[str, ...]:
        """The folders of reported rows, merged into one once they are many."""
        if len(folders) <= _MOST_FOLDERS:
            return folders
        one = self._checkpoint.known(table, name)
        shutil.rmtree(one, ignore_errors=True)
        known = self._known(table, folders)
        assert known is not None
        known.coalesce(1).write.parquet(str(one))
        return (str(one),)

    def _read(self, schema: StructType, folders: Sequence[str]) -> DataFrame:
        if not folders:
            return self._spark.createDataFrame([], schema)
        return self._spark.read.schema(schema).parquet(*folders)

    def _write(self, table: str, name: str, rows: DataFrame) -> str | None:
        """Write the rows of a micro-batch in place of an earlier attempt's; the folder, None without rows."""
        folder = self._folder(table, name)
        shutil.rmtree(folder, ignore_errors=True)
        rows.select(*TABLES[table].names).coalesce(1).write.parquet(str(folder))
        if any(read_metadata(file).num_rows for file in folder.glob("*.parquet")):
            return str(folder)
        shutil.rmtree(folder, ignore_errors=True)
        return None

    def _folder(self, table: str, name: str) -> Path:
        return self._out.resolve() / table / f"batch={name}"

    def _folders(self, table: str) -> list[Path]:
        """The folders of all micro-batches that have rows in a table."""
        return [folder for folder in (self._out / table).glob("batch=*") if (folder / "_SUCCESS").exists()]

    def _forget_what_never_happened(self) -> None:
        """Delete the output of a micro-batch that left no state because its driver was killed."""
        for table in TABLES:
            for folder in (self._out / table).glob("batch=*"):
                if not self._checkpoint.happened(folder.name.removeprefix("batch=")):
                    shutil.rmtree(folder, ignore_errors=True)


def followed(sources: Sequence[str]) -> tuple[list[str], list[str]]:
    """The paths, and the URLs of topics, that a stream can follow.

    Raises:
        NoHistory: a path does not exist, or is not of growing lines on this host.
        InvalidTopic: the URL of a topic can't be used.
    """
    topics = sorted(source for source in sources if source.startswith("kafka:"))
    for topic in topics:
        KafkaTopic.from_url(topic)
    paths = [Path(source) for source in sources if not source.startswith("kafka:")]
    for path in paths:
        if "://" in str(path) or not path.exists():
            raise NoHistory(
                f"{path} does not exist; a stream follows folders and files of this host, or Kafka"
            )
        still = [file for file in ([path] if path.is_file() else path.rglob("*")) if _is_still(file)]
        if still:
            raise NoHistory(f"{still[0]} can't be followed: a stream follows *.jsonl files as they grow")
    if not sources:
        raise NoHistory("no source: give files, folders or kafka://HOST:PORT/TOPIC")
    return sorted(str(path.resolve()) for path in paths), topics


def claimed(sources: Sequence[str], out: Path, checkpoint: Path) -> Checkpoint:
    """The checkpoint of a stream, after a check that it and the output folder can be used.

    Raises:
        UnusableCheckpoint: the checkpoint is of another version or of other sources.
        UnusableOutput: the output folder belongs to something else, or can't be written to.
        NoHistory: a source can't be followed.
        InvalidTopic: the URL of a topic can't be used.
    """
    paths, topics = followed(sources)
    mine = Checkpoint(checkpoint, [*paths, *(str(KafkaTopic.from_url(url)) for url in topics)])
    claim_output(out, mine)
    return mine


def _is_still(file: Path) -> bool:
    """True for a file that a batch would read but that does not grow by lines."""
    return file.name.endswith((".jsonl.gz", ".parquet"))


def _has_read_all(query: StreamingQuery) -> bool:
    """True if the query has looked at its sources, found nothing new, and waits to look again."""
    status = query.status
    return not status["isDataAvailable"] and status["message"].startswith("Waiting for")
