"""State of a stream on disk, from which it continues after its driver was killed at any point (AU-9).

A state is a folder, named after the micro-batch that left it. It counts once its last file, ``_SUCCESS``,
exists; until then the micro-batch has not happened, and its output elsewhere is written anew. ``N-idle`` is
the state of the step that judges the waiting records after micro-batch ``N``, when no more come.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pydantic import BaseModel, ConfigDict, ValidationError
from pyspark.sql.types import BooleanType, StructField, StructType

from rebalanser.audit.outputs import reason
from rebalanser.audit.schema import RECORDS
from rebalanser.errors import FixConfiguration, UnusableOutput
from rebalanser.redaction import redact

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FORMAT: Final = 2
"""Version of the checkpoint; grows when a later release could not continue from it."""
MARK: Final = "rebalanser.json"
OUTPUT_MARK: Final = "_rebalanser_stream.json"
"""File in the output folder that names its checkpoint. Spark's readers skip its name."""
SETTLED: Final = "settled"
"""Column: true if a carried record was judged before; else it waits for the watermark."""
TIP: Final = "tip"
"""Column: true if a carried record is the last judged one of its process."""
CARRIED: Final = StructType(
    [*RECORDS, StructField(SETTLED, BooleanType(), False), StructField(TIP, BooleanType(), False)]
)
_LOCK: Final = "lock"
_WHOLE: Final = "_SUCCESS"
_ABOUT: Final = "about.json"
_KNOWN: Final = "known"


class UnusableCheckpoint(FixConfiguration):
    """The checkpoint was written by another version, or for other sources, or another stream uses it."""


class Totals(BaseModel):
    """Counts of records and findings since the checkpoint began."""

    model_config = ConfigDict(frozen=True)

    records: int = 0
    late: int = 0
    quarantined: int = 0
    missing: int = 0
    certain: int = 0
    fenced: int = 0
    possible: int = 0

    def __add__(self, other: Totals) -> Totals:
        return Totals(**{name: getattr(self, name) + getattr(other, name) for name in Totals.model_fields})

    @property
    def findings(self) -> int:
        """Number of findings of all kinds."""
        return self.certain + self.fenced + self.possible


class StreamState(BaseModel):
    """State that one micro-batch leaves to the next, beside records. Times are seconds since 1970."""

    model_config = ConfigDict(frozen=True)

    watermark: float | None = None
    newest: float | None = None
    told: dict[str, tuple[str, ...]] = {}
    """The folders with the rows reported so far, for each table in which rows are looked up later."""
    totals: Totals = Totals()


class Checkpoint:
    """The folder of a stream's state. One stream at a time has it, from ``lock`` to ``unlock``.

    Raises:
        UnusableCheckpoint: it is of another version or other sources, or can't be written to.
    """

    def __init__(self, folder: Path, sources: Sequence[str]) -> None:
        self.folder = folder
        self.id = _claimed(folder, [redact(source) for source in sources])
        self._states = folder / "state"
        self._descriptor: int | None = None

    @property
    def spark(self) -> Path:
        """The folder of Spark's own state of the query."""
        return self.folder / "spark"

    def lock(self) -> None:
        """Lock this checkpoint against other streams, until this process ends at the latest.

        Raises:
            UnusableCheckpoint: another stream uses it.
        """
        descriptor = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            raise UnusableCheckpoint(
                f"another stream uses the checkpoint {self.folder}: stop it first"
            ) from error
        self._descriptor = descriptor

    def unlock(self) -> None:
        """Release the checkpoint for other streams. Unlocking twice does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def last(self) -> int | None:
        """Number of the last micro-batch that left a complete state; None if there is none."""
        return max((number for number, _, _ in self._whole()), default=None)

    def has(self, name: str) -> bool:
        """True if the state of that name is complete."""
        return (self._states / name / _WHOLE).exists()

    def load(self, spark: SparkSession, *, below: int) -> tuple[StreamState, DataFrame]:
        """The newest state of a micro-batch before number ``below``; an empty one if there is none."""
        found = [path for number, _, path in sorted(self._whole()) if number < below]
        if not found:
            return StreamState(), spark.createDataFrame([], CARRIED)
        state = StreamState.model_validate_json((found[-1] / _ABOUT).read_text())
        return state, spark.read.schema(CARRIED).parquet(str(found[-1] / "records"))

    def carry(self, name: str, records: DataFrame) -> None:
        """Write the records of a state, in place of those that an earlier attempt left."""
        path = self._states / name
        shutil.rmtree(path, ignore_errors=True)
        records.select(*CARRIED.names).write.parquet(str(path / "records"))

    def save(self, name: str, state: StreamState) -> None:
        """Write the rest of a state whose records are written; it counts once this returns."""
        path = self._states / name
        (path / _ABOUT).write_text(state.model_dump_json())
        (path / _WHOLE).touch()

    def known(self, table: str, name: str) -> Path:
        """The folder into which the micro-batch ``name`` can merge all rows reported to a table so far."""
        return self.folder / _KNOWN / f"{table}-{name}"

    def prune(self, number: int) -> None:
        """Delete states that no restart can need: Spark repeats at most the last micro-batch."""
        for old, _, path in list(self._whole()):
            if old < number - 1:
                shutil.rmtree(path, ignore_errors=True)
        needed = {
            folder
            for _, _, path in self._whole()
            for folders in StreamState.model_validate_json((path / _ABOUT).read_text()).told.values()
            for folder in folders
        }
        for path in (self.folder / _KNOWN).glob("*"):
            if str(path) not in needed:
                shutil.rmtree(path, ignore_errors=True)

    def happened(self, name: str) -> bool:
        """True if the step ``name`` left a complete state, which may have been deleted since."""
        number = key_of(name)
        reached = max(((n, idle) for n, idle, _ in self._whole()), default=(-1, False))
        return number is not None and number <= reached and (self.has(name) or number[0] < reached[0])

    def _whole(self) -> Iterator[tuple[int, bool, Path]]:
        """The complete states, by number, that of an idle step after that of its micro-batch."""
        for path in self._states.glob("*"):
            key = key_of(path.name)
            if key is not None and (path / _WHOLE).exists():
                yield (*key, path)


def key_of(name: str) -> tuple[int, bool] | None:
    """Sort key of steps: the number, then true for the idle step after it; None for other names."""
    number, _, idle = name.partition("-")
    return (int(number), bool(idle)) if number.isdigit() else None


def claim_output(out: Path, checkpoint: Checkpoint) -> None:
    """Check that the output folder is this checkpoint's and can be written to, or claim it.

    Raises:
        UnusableOutput: it belongs to something else, or can't be written to.
    """
    mark = out / OUTPUT_MARK
    try:
        out.mkdir(parents=True, exist_ok=True)
        if mark.exists():
            whose = json.loads(mark.read_text()).get("checkpoint")
        elif any(out.iterdir()):
            whose = None
        else:
            mark.write_text(json.dumps({"checkpoint": checkpoint.id}))
            return
        probe = out / f".{uuid.uuid4().hex}"
        probe.touch()
        probe.unlink()
    except (OSError, ValueError, AttributeError) as error:
        raise UnusableOutput(f"the output folder {out} can't be used: {reason(error)}") from error
    if whose != checkpoint.id:
        raise UnusableOutput(
            f"the output folder {out} was not written by the stream of the checkpoint {checkpoint.folder}; "
            "name another one, or move it away"
        )


def _claimed(folder: Path, sources: Sequence[str]) -> str:
    """The id of a checkpoint, which must be of this format and these sources; a new one is made so."""
    mark = folder / MARK
    mine = {"format": FORMAT, "sources": list(sources)}
    try:
        found = json.loads(mark.read_text()) if mark.exists() else None
        if found is None:
            partial = mark.with_suffix(".partial")
            if folder.exists() and any(path != partial for path in folder.iterdir()):
                raise UnusableCheckpoint(
                    f"{folder} contains other files; name an empty folder for the checkpoint"
                )
            name = uuid.uuid4().hex
            folder.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps({**mine, "id": name}))
            partial.rename(mark)
            return name
    except (OSError, ValueError, ValidationError) as error:
        raise UnusableCheckpoint(f"the checkpoint {folder} can't be used: {reason(error)}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        other = found.get("format") if isinstance(found, dict) else None
        raise UnusableCheckpoint(
            f"the checkpoint {folder} has format {other!r}, but this version needs {FORMAT}: name an "
            "empty folder for the checkpoint and for the output; the stream then reads the history from "
            "its beginning"
        )
    if found.get("sources") != mine["sources"]:
        raise UnusableCheckpoint(
            f"the checkpoint {folder} belongs to {', '.join(map(str, found.get('sources', [])))}: "
            "name the same sources, or an empty checkpoint folder"
        )
    return str(found.get("id"))
