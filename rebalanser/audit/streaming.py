"""The audit as a stream: the same functions on micro-batches, and findings once each (AU-9).

Each micro-batch takes the state that the one before left: a *watermark* and the records carried over
(:mod:`rebalanser.audit.carry`). Records up to the new watermark are judged together with those carried; later
ones wait, since something that belongs before them may still come; earlier ones are late, and quarantined.

**Restarting.** Spark repeats a micro-batch that was not finished, with the same records. What a micro-batch
writes lies in folders of its own number, which it makes anew, and it starts from the state of the number
before. So a batch that was half written is written again, the same; a finding that another batch has told is
left out.

A source that falls silent would leave its last records waiting for ever. So after ``delay_s`` seconds without
any the watermark moves up to the newest record, as a step of its own (``N-idle``).
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Final

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom
from pyspark.sql.streaming.query import StreamingQuery

from rebalanser.audit.accesses import accesses
from rebalanser.audit.carry import carried, newest
from rebalanser.audit.clocks import clocks
from rebalanser.audit.evidence import with_evidence
from rebalanser.audit.ingest import MAX_RAW, kafka_options, parse, parse_lines, parse_messages
from rebalanser.audit.invariants import ALL
from rebalanser.audit.invariants import judged as judged_by
from rebalanser.audit.options import Options
from rebalanser.audit.plans import cut_off
from rebalanser.audit.schema import RECORDS
from rebalanser.audit.sequences import conflicts, gaps, processes
from rebalanser.audit.sources import NoHistory, Topic
from rebalanser.audit.successions import suspects
from rebalanser.audit.tables import ACCESSES, FINDINGS, GAPS, QUARANTINE
from rebalanser.audit.tailing import NAME, HistoryFiles, planned
from rebalanser.errors import FixConfiguration

FORMAT: Final = 1
"""Of the checkpoint; grows when a later release could not go on from it."""
LATE: Final = "late"
"""The reason in quarantine of a record that came after the watermark had passed it."""
TABLES: Final = {"findings": FINDINGS, "gaps": GAPS, "quarantine": QUARANTINE, "intervals": ACCESSES}
"""What is written, a folder each; in it a folder for each micro-batch that had something to write."""

_SETTLED: Final = "settled"
_GAP: Final = ("process", "first", "last")


class UnusableCheckpoint(FixConfiguration):
    """The checkpoint was written by another version, or for other sources."""


@dataclass(frozen=True, slots=True)
class Told:
    """What one micro-batch came to."""

    batch: str
    records: int
    quarantined: int
    late: int
    findings: int
    gaps: int
    watermark: float | None
    """Up to when all is judged, in seconds since 1970."""
    took_s: float


@dataclass(frozen=True, slots=True)
class State:
    """What a micro-batch leaves to the next: records with the columns of ``RECORDS`` and ``settled``."""

    watermark: float | None
    newest: float | None
    records: DataFrame


class Stream:
    """An audit that goes on while the history grows.

    ``sources`` are folders and files of JSONL, or URLs of Kafka topics. Tables are written below ``out``, the
    state below ``checkpoint``: folders of a file system that the driver and all workers see. ``delay_s`` is
    ``on_batch`` is told of each micro-batch, in a thread of Spark's.

    Raises:
        UnusableCheckpoint: the checkpoint is of another version or of other sources.
        NoHistory: a source can't be followed.
        InvalidTopic: the URL of a topic can't be used.
        KafkaUnreachable: no broker answers.
    """

    def __init__(
        self,
        spark: SparkSession,
        sources: Sequence[str],
        *,
        out: Path,
        checkpoint: Path,
        options: Options | None = None,
        delay_s: float = 10.0,
        on_batch: Callable[[Told], None] = lambda _told: None,
    ) -> None:
        self._spark = spark
        self._sources = sorted(sources)
        self._out = out
        self._checkpoint = checkpoint
        self._options = options or Options()
        self._delay_s = delay_s
        self._on_batch = on_batch
        self._turn = threading.Lock()
        self._last_batch: int | None = None
        self._quiet_since = time.monotonic()
        self._ending = threading.Event()
        self._failure: BaseException | None = None
        self._claim_checkpoint()
        self._query: StreamingQuery | None = None

    def start(self) -> None:
        """Begin, or go on where the checkpoint stands."""
        self._last_batch = _last_number(self._checkpoint / "state")
        raw = _followed(self._spark, self._sources, self._checkpoint)
        writer = raw.writeStream.foreachBatch(self._micro_batch)
        self._query = writer.option("checkpointLocation", str(self._checkpoint / "spark")).start()
        threading.Thread(target=self._watch_for_silence, name="rebalanser-audit-idle", daemon=True).start()

    def wait(self, timeout_s: int | None = None) -> bool:
        """Wait until the stream has stopped; whether it has.

        Raises:
            pyspark.errors.StreamingQueryException: a micro-batch failed.
        """
        assert self._query is not None
        ended = (
            self._query.awaitTermination() if timeout_s is None else self._query.awaitTermination(timeout_s)
        )
        if self._failure is not None:
            raise self._failure
        return ended is not False

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

    def _claim_checkpoint(self) -> None:
        """See that the checkpoint is one of this format and these sources, or make it one."""
        mark = self._checkpoint / "rebalanser.json"
        mine = {"format": FORMAT, "sources": self._sources}
        try:
            found = json.loads(mark.read_text())
        except FileNotFoundError:
            if self._checkpoint.exists() and any(self._checkpoint.iterdir()):
                raise UnusableCheckpoint(
                    f"{self._checkpoint} holds something else than a checkpoint"
                ) from None
            self._checkpoint.mkdir(parents=True, exist_ok=True)
            mark.write_text(json.dumps(mine))
            return
        except ValueError as error:
            raise UnusableCheckpoint(f"{mark} can't be read: {error}") from error
        if found.get("format") != FORMAT:
            raise UnusableCheckpoint(
                f"the checkpoint {self._checkpoint} has format {found.get('format')!r}, this version's is "
                f"{FORMAT}: name an empty folder, and the history is read again from its beginning"
            )
        if found.get("sources") != self._sources:
            raise UnusableCheckpoint(
                f"the checkpoint {self._checkpoint} is of {', '.join(found.get('sources', []))}: "
                "name the same sources, or an empty checkpoint folder"
            )

    def _micro_batch(self, raw: DataFrame, number: int) -> None:
        with self._turn:
            before = _load(self._spark, self._checkpoint / "state", below=number)
            self._advance(str(number), raw, before, flush=False)
            _prune(self._checkpoint / "state", number)
            self._last_batch = number
            self._quiet_since = time.monotonic()

    def _watch_for_silence(self) -> None:
        while not self._ending.wait(min(0.5, self._delay_s)):
            quiet_s = time.monotonic() - self._quiet_since
            query = self._query
            if quiet_s < self._delay_s or query is None or query.status["isDataAvailable"]:
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
        states = self._checkpoint / "state"
        if self._last_batch is None or self._ending.is_set():
            return
        name = f"{self._last_batch}-idle"
        if not (states / name / "_SUCCESS").exists():
            before = _load(self._spark, states, below=self._last_batch + 1)
            nothing = self._spark.createDataFrame([], "value string, source string, position long")
            self._advance(name, parse_lines(nothing), before, flush=True)

    def _advance(self, name: str, raw: DataFrame, before: State, *, flush: bool) -> None:
        began = time.monotonic()
        raw.persist(StorageLevel.MEMORY_AND_DISK)
        try:
            told = self._judge(name, raw, before, flush=flush)
        finally:
            raw.unpersist()
        self._on_batch(Told(**told, took_s=time.monotonic() - began))

    def _judge(self, name: str, raw: DataFrame, before: State, *, flush: bool) -> dict[str, Any]:
        ingested = parse(raw)
        is_late = F.col("wall_time") < F.lit(before.watermark)
        counts = ingested.records.agg(
            F.count(F.lit(1)).alias("records"),
            F.count_if(is_late).alias("late"),
            F.max(
                F.when(F.col("wall_time") <= time.time() + self._options.clock_error_s, F.col("wall_time"))
            ),
        ).first()
        assert counts is not None
        records, late, last = counts
        bad = raw.count() - records
        state = _moved_on(before, last, self._delay_s, flush=flush)
        fresh = ingested.records.where(~F.coalesce(is_late, F.lit(False))).withColumn(_SETTLED, F.lit(False))
        everything = cut_off(before.records.unionByName(fresh))
        due = F.lit(True) if state.watermark is None else F.col("wall_time") <= state.watermark
        judged = everything.where(F.col(_SETTLED) | due)
        waiting = everything.where(~(F.col(_SETTLED) | due))
        settled = judged.drop(_SETTLED)
        owned = cut_off(accesses(settled, processes(settled)))
        missing = cut_off(self._new_gaps(name, judged))
        contradicting = cut_off(suspects(owned, self._options))
        apart = cut_off(clocks(settled, contradicting, self._options))
        asked = judged_by(settled, owned, contradicting, self._options, apart)
        found = reduce(DataFrame.unionByName, (conflicts(settled), *(invariant(asked) for invariant in ALL)))
        known = self._told("findings", name).select("id")
        new = with_evidence(
            found.join(known, "id", "left_anti"), settled, missing.unionByName(self._told("gaps", name))
        )
        counted = {
            "findings": self._write("findings", name, new),
            "gaps": self._write("gaps", name, missing),
        }
        if bad or late:
            lately = _late(ingested.records.where(is_late))
            self._write("quarantine", name, ingested.quarantine.unionByName(lately))
        self._write("intervals", name, _over(owned, judged))
        keeping = carried(settled, owned, state.watermark or 0.0).withColumn(_SETTLED, F.lit(True))
        _save(
            self._checkpoint / "state" / name,
            State(state.watermark, state.newest, keeping.unionByName(waiting)),
        )
        return {
            "batch": name, "records": records, "quarantined": bad, "late": late,
            "watermark": state.watermark, **counted,
        }  # fmt: skip

    def _new_gaps(self, name: str, judged: DataFrame) -> DataFrame:
        """Gaps before the numbers that are new, of each process that was known from its last one on."""
        settled = judged.where(_SETTLED).drop(_SETTLED)
        last = newest(settled)
        found = gaps(last.unionByName(judged.where(f"not {_SETTLED}").drop(_SETTLED)))
        known = last.select("process").distinct()
        begun = found.where(F.col("first") == 0).join(known, "process", "left_semi").select(*_GAP)
        told = self._told("gaps", name).select(*_GAP)
        return found.join(begun.unionByName(told), list(_GAP), "left_anti")

    def _told(self, table: str, name: str) -> DataFrame:
        """What other micro-batches wrote to a table."""
        folders = [
            str(folder)
            for folder in sorted((self._out / table).glob("batch=*"))
            if folder.name != f"batch={name}" and (folder / "_SUCCESS").exists()
        ]
        if not folders:
            return self._spark.createDataFrame([], TABLES[table])
        return self._spark.read.schema(TABLES[table]).parquet(*folders)

    def _write(self, table: str, name: str, rows: DataFrame) -> int:
        """Write the rows of a micro-batch in place of what an attempt at it left; how many they are."""
        folder = self._out / table / f"batch={name}"
        shutil.rmtree(folder, ignore_errors=True)
        rows.select(*TABLES[table].fieldNames()).coalesce(1).write.parquet(str(folder))
        count = self._spark.read.schema(TABLES[table]).parquet(str(folder)).count()
        if not count:
            shutil.rmtree(folder, ignore_errors=True)
        return count


def _moved_on(before: State, last: float | None, delay_s: float, *, flush: bool) -> State:
    """The state with its clocks set by the newest record; with ``flush`` nothing is waited for any more."""
    seen = [wall for wall in (before.newest, last) if wall is not None]
    newest_wall = max(seen, default=None)
    if newest_wall is None:
        return before
    reached = newest_wall if flush else newest_wall - delay_s
    watermark = reached if before.watermark is None else max(before.watermark, reached)
    return State(watermark, newest_wall, before.records)


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
    ended = owned.where(F.col("ended_by") == "stop").alias("a")
    fresh = judged.where(f"not {_SETTLED}").alias("r")
    same = (F.col("a.process") == F.col("r.process")) & (
        F.col("a.stop_returned_sequence") == F.col("r.sequence")
    )
    return ended.join(fresh, same, "left_semi")


def _followed(spark: SparkSession, sources: Sequence[str], checkpoint: Path) -> DataFrame:
    """The raw rows of all sources as they come, the files first."""
    topics = [Topic.from_url(source) for source in sources if "://" in source]
    paths = [source for source in sources if "://" not in source]
    for path in paths:
        if not Path(path).exists():
            raise NoHistory(
                f"{path} does not exist; a stream follows folders and files of this host, or Kafka"
            )
    frames = [_files(spark, paths, checkpoint)] if paths else []
    for topic in topics:
        topic.check()
        stream = spark.readStream.format("kafka").options(**kafka_options(topic), startingOffsets="earliest")
        frames.append(parse_messages(stream.load()))
    return reduce(DataFrame.unionByName, frames)


def _files(spark: SparkSession, paths: Sequence[str], checkpoint: Path) -> DataFrame:
    spark.dataSource.register(HistoryFiles)
    lines = spark.readStream.format(NAME).options(
        paths=json.dumps([str(Path(path).resolve()) for path in paths]),
        planned=json.dumps(planned(checkpoint / "spark")),
    )
    return parse_lines(lines.load())


def _states(folder: Path) -> Iterator[tuple[int, bool, Path]]:
    """The whole states, by number, that of an idle step after that of its micro-batch."""
    for path in folder.glob("*"):
        number, _, idle = path.name.partition("-")
        if number.isdigit() and (path / "_SUCCESS").exists():
            yield int(number), bool(idle), path


def _last_number(folder: Path) -> int | None:
    return max((number for number, _, _ in _states(folder)), default=None)


def _load(spark: SparkSession, folder: Path, *, below: int) -> State:
    """The newest state of a micro-batch before number ``below``; an empty one where there is none."""
    states = [state for state in _states(folder) if state[0] < below]
    if not states:
        nothing = spark.createDataFrame([], RECORDS).withColumn(_SETTLED, F.lit(False))
        return State(None, None, nothing)
    *_, path = max(states)
    clocks = json.loads((path / "clocks.json").read_text())
    return State(clocks["watermark"], clocks["newest"], spark.read.parquet(str(path / "records")))


def _save(path: Path, state: State) -> None:
    """Write a state; it counts once it is whole."""
    shutil.rmtree(path, ignore_errors=True)
    state.records.coalesce(2).write.parquet(str(path / "records"))
    (path / "clocks.json").write_text(json.dumps({"watermark": state.watermark, "newest": state.newest}))
    (path / "_SUCCESS").touch()


def _prune(folder: Path, number: int) -> None:
    """Delete the states that no restart can need: Spark repeats the last micro-batch at most."""
    for old, _, path in list(_states(folder)):
        if old < number - 1:
            shutil.rmtree(path, ignore_errors=True)
