"""The audit as a stream: the same functions on micro-batches, and findings once each (AU-9).

Each micro-batch takes the state that the one before left: a *watermark* and the records carried over
(:mod:`rebalanser.audit.carry`). Records up to the new watermark are judged together with those carried; later
ones wait, since something that belongs before them may still come. A record is late, and quarantined, if it
is from before the watermark and a later one of its process was judged already. A process whose clock or whose
records lie behind those of all others is not late: its numbers go on where they were, and it is judged at
once. So is one whose clock is ahead of this host's, for which no watermark will come for long.

**Restarting.** Spark repeats a micro-batch that was not finished, with the same records. What a micro-batch
writes lies in folders of its own number, which it makes anew, and it starts from the state of the number
before. So a batch that was half written is written again, the same; one that left a whole state has happened,
and is not repeated. A finding that another batch has told is left out.

A source that falls silent would leave its last records waiting for ever. So after ``delay_s`` seconds without
any the watermark moves up to the newest record, as a step of its own (``N-idle``).

**Time.** Of a micro-batch most is planning, not data. So one aggregation finds out what there is at all, what
can't be found in that is not planned, and intervals and what is carried over are written beside the judging.
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
from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from rebalanser.audit.accesses import accesses, in_turns
from rebalanser.audit.carry import carried
from rebalanser.audit.checkpoint import (
    CARRIED,
    SETTLED,
    TIP,
    Checkpoint,
    State,
    Totals,
    UnusableCheckpoint,
    claim_output,
)
from rebalanser.audit.evidence import with_evidence
from rebalanser.audit.ingest import MAX_RAW, kafka_options, parse_lines, parse_messages, parse_once, read
from rebalanser.audit.judgement import There, judgement
from rebalanser.audit.options import Options
from rebalanser.audit.plans import cut_off
from rebalanser.audit.schema import RECORDS
from rebalanser.audit.sequences import NUMBERED, ROTATED, gaps, processes
from rebalanser.audit.sources import NoHistory, Topic
from rebalanser.audit.tables import ACCESSES, CLOCKS, FINDINGS, GAPS, QUARANTINE, Certainty, EndedBy
from rebalanser.audit.tailing import NAME, HistoryFiles, oldest_unread, planned
from rebalanser.history import GAP, Protocol, Step

__all__ = ["DELAY_S", "LATE", "TABLES", "Stream", "Told", "Totals", "UnusableCheckpoint"]

DELAY_S: Final = 2.0
"""For how long records that belong before others are waited for."""
LATE: Final = "late"
"""The reason in quarantine of a record that came after the watermark had passed it."""
TABLES: Final = {
    "findings": FINDINGS,
    "gaps": GAPS,
    "clocks": CLOCKS,
    "quarantine": QUARANTINE,
    "intervals": ACCESSES,
}
"""What is written, a folder each; in it a folder for each micro-batch that had something to write."""

_POLL_S: Final = 0.2
"""How often the sources are looked at while nothing comes."""
_MOST_FOLDERS: Final = 32
"""From how many folders on what was told is brought together in one."""
_GROWN_S: Final = 0.1
"""By how much two clocks must have been proven further apart to be told again."""
_STANDING: Final = "standing"
_SETTLED, _DUE, _WAITING, _OVERTAKEN = "settled", "due", "waiting", "late"
_LINKED: Final = "linked"
"""Whether a record takes part in counting on: the last number that was judged of a process, and new ones."""
_TIP_SEQUENCE: Final = "tip_sequence"
_GAP: Final = ("process", "first", "last")


@dataclass(frozen=True, slots=True)
class Told:
    """What one micro-batch came to."""

    batch: str
    came: Totals
    """What it added."""
    totals: Totals
    """With all that was before it, since the checkpoint began."""
    watermark: float | None
    """Up to which wall time all is judged, in seconds since 1970."""
    took_s: float


@dataclass(frozen=True, slots=True)
class _New:
    """What came in a micro-batch."""

    records: DataFrame | None = None
    count: int = 0
    newest: float | None = None
    """The newest wall time of a record, by clocks that aren't ahead."""
    bad: int = 0
    """How many rows were no records."""
    quarantine: DataFrame | None = None
    """Those rows, if there are any."""


class Stream:
    """An audit that goes on while the history grows.

    ``sources`` are folders and files of JSONL, or URLs of Kafka topics. Tables are written below ``out``, the
    state below ``checkpoint``: folders of a file system that the driver and all workers see. ``delay_s`` is
    for how long records that belong before others are waited for. ``on_batch`` is told of each micro-batch,
    in a thread of Spark's.

    Raises:
        UnusableCheckpoint: the checkpoint is of another version or of other sources.
        UnusableOutput: the output folder is somebody else's, or can't be written to.
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
            checkpoint, [*self._paths, *(str(Topic.from_url(url)) for url in self._topics)]
        )
        claim_output(out, self._checkpoint)
        self._options = options or Options()
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
        """Begin, or go on where the checkpoint stands.

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
        """Wait until the stream has stopped by itself, which it does when it fails; whether it has.

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
        """Read what there is now, and judge it up to the watermark."""
        assert self._query is not None
        self._query.processAllAvailable()

    def settle(self) -> None:
        """Read what there is now and judge all of it, without waiting out the delay."""
        self.read_all()
        with self._turn:
            self._idle()

    def stop(self) -> None:
        """Stop once the present micro-batch is done; what waits is in the checkpoint. Twice is fine."""
        self._ending.set()
        with self._turn:
            query, self._query = self._query, None
        if query is not None:
            query.stop()
        self._beside.shutdown()
        self._checkpoint.unlock()

    def totals(self) -> Totals:
        """What came and was found since the checkpoint began."""
        last = self._checkpoint.last()
        return Totals() if last is None else self._checkpoint.load(self._spark, below=last + 1)[0].totals

    def table(self, name: str, batch: str | None = None) -> DataFrame:
        """One of :data:`TABLES` as far as it is written; with ``batch`` what that micro-batch wrote to it."""
        folders = self._folders(name) if batch is None else [self._folder(name, batch)]
        return self._read(TABLES[name], [str(folder) for folder in folders if folder.exists()])

    def findings_of(self, batch: str) -> Iterator[dict[str, Any]]:
        """What a micro-batch found, without the parties and the evidence. Spark is not asked for it."""
        columns = [name for name in FINDINGS.names if name not in {"parties", "evidence"}]
        for file in sorted(self._folder("findings", batch).glob("*.parquet")):
            for rows in ParquetFile(file).iter_batches(columns=columns):
                yield from rows.to_pylist()

    def _raw(self) -> DataFrame:
        """The raw rows of all sources as they come, the files first."""
        frames = [self._files()] if self._paths else []
        for url in self._topics:
            read(self._spark, [url])  # which says in one line what is wrong with the address or the topic
            topic = Topic.from_url(url)
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
        """Judge what waits, once after each micro-batch."""
        if self._last_batch is None or self._ending.is_set():
            return
        name = f"{self._last_batch}-idle"
        if not self._checkpoint.has(name):
            self._advance(name, None, below=self._last_batch + 1)

    def _advance(self, name: str, raw: DataFrame | None, *, below: int) -> None:
        """One step: with what came in a micro-batch, or with nothing and all that waits."""
        began = time.monotonic()
        before, carried_over = self._checkpoint.load(self._spark, below=below)
        if raw is not None:
            raw.persist(StorageLevel.MEMORY_AND_DISK)
        try:
            state = self._step(name, raw, before, carried_over)
        finally:
            if raw is not None:
                raw.unpersist()
        came = Totals(
            **{
                field: getattr(state.totals, field) - getattr(before.totals, field)
                for field in Totals.model_fields
            }
        )
        self._on_batch(Told(name, came, state.totals, state.watermark, time.monotonic() - began))

    def _step(self, name: str, raw: DataFrame | None, before: State, carried_over: DataFrame) -> State:
        new = _New() if raw is None else self._ingested(raw)
        limit = None if raw is None else oldest_unread(self._checkpoint.spark, int(name), self._paths)
        state = self._reached(before, new.newest, limit, 0.0 if raw is None else self._delay_s)
        everything = cut_off(self._standing(new.records, carried_over, before, state.watermark))
        there = _look(everything)
        judged = everything.where(F.col(_STANDING).isin(_SETTLED, _DUE))
        settled = judged.select(*RECORDS.names)
        whole = cut_off(accesses(settled, processes(settled)))
        owned = in_turns(whole, settled, lambda _words, frame: cut_off(frame))
        carried_on = _carried_over(everything, settled, whole, state.watermark)
        carrying = self._beside.submit(self._checkpoint.carry, name, carried_on)
        writing = self._beside.submit(self._write, "intervals", name, _over(owned, judged))
        told, missing = dict(before.told), 0
        if there["irregular"]:
            missing, told["gaps"] = self._gaps(name, judged, told.get("gaps", ()))
        counts = self._judge(name, settled, owned, there, told)
        if new.bad or there["late"]:
            lately = _late(everything.where(F.col(_STANDING) == _OVERTAKEN))
            unread = () if new.quarantine is None else (new.quarantine,)
            self._write("quarantine", name, reduce(DataFrame.unionByName, unread, lately))
        writing.result()
        carrying.result()
        came = Totals(
            records=new.count - there["late"],
            late=there["late"],
            quarantined=new.bad,
            missing=missing,
            **counts,
        )
        state = state.model_copy(update={"told": told, "totals": before.totals + came})
        self._checkpoint.save(name, state)
        return state

    def _judge(
        self, name: str, settled: DataFrame, owned: DataFrame, there: Row, told: dict[str, tuple[str, ...]]
    ) -> dict[str, int]:
        """Write what is found; how much of each certainty. Adds to ``told`` where it wrote."""
        proven = self._known("clocks", told.get("clocks", ()))
        judged = judgement(
            settled,
            owned,
            self._options,
            _kept,
            there=There(
                allocations=there["allocations"],
                elections=there["elections"],
                tasks=there["tasks"],
                twice=there["twice"],
            ),
            proven=proven,
        )
        counts, told["findings"] = self._findings(name, judged.found, settled, told)
        if judged.compared:
            told["clocks"] = self._clocks(name, judged.clocks, proven, told.get("clocks", ()))
        return counts

    def _ingested(self, raw: DataFrame) -> _New:
        """Tell what came."""
        newest = F.max(F.when(~self._is_ahead(), F.col("wall_time")))
        asked = {"records": F.count(F.lit(1)), "newest": newest}
        ingested = parse_once(raw, **asked)
        if ingested.totals is not None:
            return _New(ingested.records, ingested.totals["records"], ingested.totals["newest"])
        records = cut_off(ingested.records)
        row = records.agg(*(each.alias(name) for name, each in asked.items())).first()
        assert row is not None
        bad = raw.count() - row["records"]
        return _New(records, row["records"], row["newest"], bad, ingested.quarantine)

    def _is_ahead(self) -> Column:
        """Whether a record is from the future, so that its clock tells nothing of how far all others are."""
        return F.col("wall_time") > F.lit(time.time() + self._options.clock_error_s)

    def _reached(self, before: State, newest: float | None, limit: float | None, delay_s: float) -> State:
        """The state with its clocks set by the newest record; all before ``limit`` only has been read."""
        seen = max((wall for wall in (before.newest, newest) if wall is not None), default=None)
        if seen is None:
            return before
        walls = [seen - delay_s, *([] if limit is None else [limit])]
        watermark = max(min(walls), min(walls) if before.watermark is None else before.watermark)
        return before.model_copy(update={"watermark": watermark, "newest": seen})

    def _standing(
        self, records: DataFrame | None, carried_over: DataFrame, before: State, watermark: float | None
    ) -> DataFrame:
        """All records there are, with what is to become of each; without ``records`` nothing waits longer."""
        tips = carried_over.where(TIP).groupBy(*NUMBERED).agg(F.max("sequence").alias(_TIP_SEQUENCE))
        everything = carried_over
        if records is not None:
            fresh = records.withColumns({SETTLED: F.lit(False), TIP: F.lit(False)})
            everything = everything.unionByName(fresh)
        wall, is_onward = F.col("wall_time"), F.col("sequence") > F.col(_TIP_SEQUENCE)
        overtaken = (
            (wall < F.lit(before.watermark)) & ~is_onward & (F.col("sequence") != F.col(_TIP_SEQUENCE))
        )
        due = F.lit(True) if records is None else (wall <= F.lit(watermark)) | self._is_ahead()
        standing = (
            F.when(F.col(SETTLED), _SETTLED).when(overtaken, _OVERTAKEN).when(due, _DUE).otherwise(_WAITING)
        )
        linked = F.col(TIP) | ((standing == _DUE) & F.coalesce(is_onward, F.lit(True)))
        return everything.join(F.broadcast(tips), list(NUMBERED), "left").select(
            *CARRIED.names, standing.alias(_STANDING), linked.alias(_LINKED)
        )

    def _gaps(self, name: str, judged: DataFrame, told: tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
        """Write the gaps before the numbers that are new; how many numbers are missing, and what is told."""
        found = gaps(judged.where(_LINKED).select(*RECORDS.names))
        known = judged.where(TIP).select("process").distinct()
        begun = found.where("first = 0").join(known, "process", "left_semi").select(*_GAP)
        others = begun.unionByName(self._known("gaps", told).select(*_GAP))
        written = self._write("gaps", name, cut_off(found.join(others, list(_GAP), "left_anti")))
        if written is None:
            return 0, told
        rows = self._read(GAPS, [written]).where(F.col("reason") != ROTATED).agg(F.sum("missing")).first()
        assert rows is not None
        return rows[0] or 0, self._gathered("gaps", name, (*told, written))

    def _findings(
        self, name: str, found: DataFrame, settled: DataFrame, told: dict[str, tuple[str, ...]]
    ) -> tuple[dict[str, int], tuple[str, ...]]:
        """Write what was found and not told before; how much of each certainty, and what is told."""
        before = told.get("findings", ())
        fixed = cut_off(found)
        if fixed.isEmpty():
            return {}, before
        new = cut_off(fixed.join(self._known("findings", before).select("id"), "id", "left_anti"))
        missing = self._known("gaps", told.get("gaps", ()))
        written = self._write("findings", name, with_evidence(new.select(*FINDINGS.names), settled, missing))
        if written is None:
            return {}, before
        fenced = F.coalesce("fenced", F.lit(False))
        kinds = F.when(F.col("certainty") != Certainty.CERTAIN, "possible").when(fenced, "fenced")
        rows = self._read(FINDINGS, [written]).groupBy(kinds.otherwise("certain").alias("class")).count()
        counts = {row["class"]: row["count"] for row in rows.collect()}
        return counts, self._gathered("findings", name, (*before, written))

    def _clocks(
        self, name: str, apart: DataFrame, proven: DataFrame, told: tuple[str, ...]
    ) -> tuple[str, ...]:
        """Write the clocks that are proven to be further apart than was told before; what is told."""
        pair = ["group", "host", "behind_host", "cause"]
        known = proven.groupBy(*pair).agg(F.max("behind_s").alias("known_s"))
        grown = F.col("known_s").isNull() | (F.col("behind_s") > F.col("known_s") + _GROWN_S)
        written = self._write("clocks", name, apart.join(known, pair, "left").where(grown))
        return told if written is None else self._gathered("clocks", name, (*told, written))

    def _known(self, table: str, folders: Sequence[str]) -> DataFrame:
        """What earlier micro-batches told, of findings the id only."""
        return self._read(StructType([FINDINGS["id"]]) if table == "findings" else TABLES[table], folders)

    def _gathered(self, table: str, name: str, folders: tuple[str, ...]) -> tuple[str, ...]:
        """The folders of what was told, or one that has all of it once they are many."""
        if len(folders) <= _MOST_FOLDERS:
            return folders
        one = self._checkpoint.known(table, name)
        shutil.rmtree(one, ignore_errors=True)
        self._known(table, folders).coalesce(1).write.parquet(str(one))
        return (str(one),)

    def _read(self, schema: StructType, folders: Sequence[str]) -> DataFrame:
        if not folders:
            return self._spark.createDataFrame([], schema)
        return self._spark.read.schema(schema).parquet(*folders)

    def _write(self, table: str, name: str, rows: DataFrame) -> str | None:
        """Write the rows of a micro-batch in place of what an attempt at it left; where, if there are any."""
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
        """Delete what a micro-batch wrote that left no state, since its driver was killed in it."""
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
        Topic.from_url(topic)
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
        raise NoHistory("no source was named: give files, folders or kafka://HOST:PORT/TOPIC")
    return sorted(str(path.resolve()) for path in paths), topics


def claimed(sources: Sequence[str], out: Path, checkpoint: Path) -> Checkpoint:
    """The checkpoint of a stream, once it is clear that it and the output folder can be used.

    Raises:
        UnusableCheckpoint: the checkpoint is of another version or of other sources.
        UnusableOutput: the output folder is somebody else's, or can't be written to.
        NoHistory: a source can't be followed.
        InvalidTopic: the URL of a topic can't be used.
    """
    paths, topics = followed(sources)
    mine = Checkpoint(checkpoint, [*paths, *(str(Topic.from_url(url)) for url in topics)])
    claim_output(out, mine)
    return mine


def _is_still(file: Path) -> bool:
    """Whether a batch would read a file that does not grow by lines."""
    return file.name.endswith((".jsonl.gz", ".parquet"))


def _has_read_all(query: StreamingQuery) -> bool:
    """Whether the query has looked at its sources, found nothing new, and waits to look again."""
    status = query.status
    return not status["isDataAvailable"] and status["message"].startswith("Waiting for")


def _kept(_words: str | None, frame: DataFrame) -> DataFrame:
    return cut_off(frame)


def _look(everything: DataFrame) -> Row:
    """What there is among the records, found out in one go: one row."""
    standing, linked = F.col(_STANDING), F.col(_LINKED)
    is_due = standing == _DUE
    counted = is_due | (standing == _SETTLED)
    bit = F.expr("shiftleft(1L, cast(sequence & 63 as int))")
    of_allocations = F.col("step").isin(Step.PUBLISHED, Step.ADOPTED)
    of_words = everything.groupBy(*NUMBERED, F.shiftright("sequence", 6).alias("word")).agg(
        F.bit_or(F.when(linked, bit)).alias("linked_bits"),
        F.bit_or(F.when(counted, bit)).alias("bits"),
        F.count_if(counted).alias("counted"),
        F.min(F.when(linked, F.col("sequence"))).alias("first"),
        F.max(F.when(linked, F.col("sequence"))).alias("last"),
        F.bool_or(TIP).alias("known"),
        F.count_if(standing == _OVERTAKEN).alias("late"),
        F.bool_or(is_due & (F.col("kind") == GAP)).alias("gap"),
        F.bool_or(is_due & of_allocations).alias("allocations"),
        F.bool_or(is_due & (F.col("step") == Step.ELECTED)).alias("elections"),
        F.bool_or(counted & (F.col("protocol") == Protocol.SKULD)).alias("tasks"),
    )
    flags = ("gap", "allocations", "elections", "tasks")
    of_processes = of_words.groupBy(*NUMBERED).agg(
        F.sum(F.bit_count("linked_bits")).alias("seen"),
        F.min("first").alias("first"),
        F.max("last").alias("last"),
        F.bool_or("known").alias("known"),
        (F.sum("counted") > F.sum(F.bit_count("bits"))).alias("twice"),
        F.sum("late").alias("late"),
        *(F.bool_or(flag).alias(flag) for flag in flags),
    )
    has_gap = (F.col("seen") <= F.col("last") - F.col("first")) | (~F.col("known") & (F.col("first") > 0))
    yes = {"irregular": has_gap | F.col("gap"), "twice": F.col("twice")} | {
        flag: F.col(flag) for flag in flags
    }
    row = of_processes.agg(
        F.coalesce(F.sum("late"), F.lit(0)).alias("late"),
        *(F.coalesce(F.bool_or(flag), F.lit(False)).alias(name) for name, flag in yes.items()),
    ).first()
    assert row is not None
    return row


def _carried_over(
    everything: DataFrame, settled: DataFrame, owned: DataFrame, watermark: float | None
) -> DataFrame:
    """What the next micro-batch needs: what may have to be judged with later records, and what waits."""
    kept = carried(settled, owned, watermark or 0.0).withColumn(SETTLED, F.lit(True))
    waiting = everything.where(F.col(_STANDING) == _WAITING).withColumn(TIP, F.lit(False))
    return kept.unionByName(waiting.select(*RECORDS.names, TIP, SETTLED))


def _late(records: DataFrame) -> DataFrame:
    """Records that came too late, as rows of quarantine."""
    return records.select(
        "source",
        "position",
        F.lit(LATE).alias("reason"),
        F.format_string("of %.3f, which is before the watermark", "wall_time").alias("detail"),
        F.left(F.to_json(F.struct(*RECORDS.names)), F.lit(MAX_RAW)).alias("raw"),
    )


def _over(owned: DataFrame, judged: DataFrame) -> DataFrame:
    """The accesses that new records have brought to their end."""
    ended = owned.where(F.col("ended_by") == EndedBy.STOP)
    stops = judged.where((F.col(_STANDING) == _DUE) & (F.col("step") == Step.STOP_RETURNED)).select(
        "process", F.col("sequence").alias("stop_returned_sequence")
    )
    return ended.join(stops, ["process", "stop_returned_sequence"], "left_semi")
