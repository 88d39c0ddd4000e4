"""The audit as a stream: the same functions on micro-batches, and findings once each (AU-9).

Each micro-batch takes the state that the one before left: a *watermark* and the records carried over
(``rebalanser.audit.stream_state``). Records up to the new watermark are judged together with those carried;
later ones wait, since something that belongs before them may still come. A record is late, and quarantined,
if it is from before the watermark and a later one of its process was judged already. A process whose clock
or whose records lie behind those of all others is not late: its numbers go on where they were, and it is
judged at once. So is one whose clock is ahead of this host's, for which no watermark will come for long.

**Restarting.** Spark repeats a micro-batch that was not finished, with the same records. What a micro-batch
writes lies in folders of its own number, which it makes anew, and it starts from the state of the number
before. So a batch that was half written is written again, the same; one that left a whole state has happened,
and is not repeated. A finding that another batch has told is left out.

A source that falls silent would leave its last records waiting for ever. So after ``delay_s`` seconds without
any the watermark moves up to the newest record, as a step of its own (``N-idle``).

**Time.** Of a small micro-batch most is planning, not data. So what there is at all is found out as rows are
computed (``observed``), what can't be found in that is not planned, numbers that
are others each time come as rows (``limits``), and intervals and what is carried
over are written beside the judging.
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
from rebalanser.audit.checkpoint import TIP, Checkpoint, State, Totals, UnusableCheckpoint, claim_output
from rebalanser.audit.evaluation import Presence, evaluate, of_accesses
from rebalanser.audit.evidence import with_evidence
from rebalanser.audit.ingest import kafka_options, parse_lines, parse_messages, read
from rebalanser.audit.micro_batch import LATE, Came, Placed, counted_on, place, read_once
from rebalanser.audit.options import Options
from rebalanser.audit.schema import RECORDS
from rebalanser.audit.sequences import ROTATED, gaps
from rebalanser.audit.sources import NoHistory, Topic
from rebalanser.audit.tables import ACCESSES, CLOCKS, FINDINGS, GAPS, QUARANTINE, Certainty
from rebalanser.audit.tailing import NAME, HistoryFiles, oldest_unread, planned

__all__ = ["DELAY_S", "LATE", "TABLES", "Stream", "Told", "Totals", "UnusableCheckpoint"]

DELAY_S: Final = 2.0
"""For how long records that belong before others are waited for."""
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
        # What one micro-batch reads has its bounds, and nobody needs to be asked whether it is crowded.
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
        """One of ``TABLES`` as far as it is written; with ``batch`` what that micro-batch wrote to it."""
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
        state = self._step(name, raw, before, carried_over)
        came = Totals(
            **{
                field: getattr(state.totals, field) - getattr(before.totals, field)
                for field in Totals.model_fields
            }
        )
        self._on_batch(Told(name, came, state.totals, state.watermark, time.monotonic() - began))

    def _step(self, name: str, raw: DataFrame | None, before: State, carried_over: DataFrame) -> State:
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
        """Write what is found; how much of each certainty. Adds to ``told`` where it wrote."""
        proven = self._known("clocks", told.get("clocks", ()))
        evaluation = evaluate(settled, owned, self._options, computed, there=there, proven=proven)
        counts = {} if evaluation.found is None else self._findings(name, evaluation.found, settled, told)
        if evaluation.clocks is not None:
            self._clocks(name, evaluation.clocks, proven, told)
        return counts

    def _reached(self, before: State, newest: float | None, limit: float | None, delay_s: float) -> State:
        """The state with its clocks set by the newest record; all before ``limit`` only has been read."""
        seen = max((wall for wall in (before.newest, newest) if wall is not None), default=None)
        if seen is None:
            return before
        walls = [seen - delay_s, *([] if limit is None else [limit])]
        watermark = max(min(walls), min(walls) if before.watermark is None else before.watermark)
        return before.model_copy(update={"watermark": watermark, "newest": seen})

    def _gaps(self, name: str, placed: Placed, told: dict[str, tuple[str, ...]]) -> int:
        """Write the gaps before the numbers that are new; how many numbers are missing."""
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
        """Write what was found and not told before; how much of each certainty."""
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
        """Write the clocks that are proven to be further apart than was told before."""
        if proven is not None:
            pair = ["group", "host", "behind_host", "cause"]
            known = proven.groupBy(*pair).agg(F.max("behind_s").alias("known_s"))
            grown = F.col("known_s").isNull() | (F.col("behind_s") > F.col("known_s") + _GROWN_S)
            apart = apart.join(known, pair, "left").where(grown)
        self._tell("clocks", name, apart, told)

    def _tell(self, table: str, name: str, rows: DataFrame, told: dict[str, tuple[str, ...]]) -> None:
        """Write rows that are looked up later, and add to ``told`` where they are."""
        written = self._write(table, name, rows)
        if written is not None:
            told[table] = self._gathered(table, name, (*told.get(table, ()), written))

    def _known(self, table: str, folders: Sequence[str]) -> DataFrame | None:
        """What earlier micro-batches told, of findings the id only; None if that is nothing."""
        if not folders:
            return None
        return self._read(StructType([FINDINGS["id"]]) if table == "findings" else TABLES[table], folders)

    def _gathered(self, table: str, name: str, folders: tuple[str, ...]) -> tuple[str, ...]:
        """The folders of what was told, or one that has all of it once they are many."""
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
