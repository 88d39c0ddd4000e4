"""The tables as Parquet files, in a folder that is complete or does not exist.

All are written under another name beside the folder and moved there at the end, so that a table that was half
written when the disk filled up or the driver died is never taken for a complete one. The folder is one of any
file system that Spark can write to: a local path, ``hdfs://``, ``s3a://``.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from rebalanser.errors import UnusableOutput

MARKER: Final = "_rebalanser_audit.json"
"""File that marks a folder as the audit's. Spark's readers skip its name."""
FORMAT: Final = 1


class OutputFolder:
    """Output folder of an audit's tables: ``folder`` is a path, or a URI with a scheme.

    Raises:
        UnusableOutput: it holds something else, or can't be written to; nothing was changed.
    """

    def __init__(self, spark: SparkSession, folder: str) -> None:
        self.name = folder
        self._jvm: Any = spark._jvm  # noqa: SLF001 - the only way to Hadoop's file systems
        context: Any = spark.sparkContext
        configuration = context._jsc.hadoopConfiguration()  # noqa: SLF001
        with self._translated("can't be used"):
            given = self._path(folder)
            self._files = given.getFileSystem(configuration)
            self._folder = self._files.makeQualified(given)
        self._check()

    def write(
        self, tables: Mapping[str, DataFrame], about: Mapping[str, Any], step: Callable[[str], None]
    ) -> None:
        """Write each table into a folder of its name, in place of an earlier audit's.

        ``about`` is stored beside them. ``step`` is called as each begins.

        Raises:
            UnusableOutput: there is no room, or no right to write; the earlier tables are still there.
        """
        partial = self._beside("partial")
        try:
            with self._translated("can't be written"):
                self._make(partial)
                for name, table in tables.items():
                    step(f"writing {name}")
                    table.write.parquet(self._path(partial, name).toString())
                self._write_text(self._path(partial, MARKER), json.dumps({"format": FORMAT, **about}))
                self._put_in_place(partial)
        except BaseException:
            self._delete(partial)
            raise

    def _check(self) -> None:
        """Check that the folder may be replaced, and that its parent can be written to."""
        with self._translated("can't be used"):
            there = self._files.exists(self._folder)
            if there and not self._is_ours():
                raise UnusableOutput(
                    f"the output folder {self.name} exists and was not written by an audit; "
                    "name another one, or move it away"
                )
            if self._folder.getParent() is None:
                raise UnusableOutput(f"the output folder {self.name} is the root of its file system")
        probe = self._beside("probe")
        with self._translated("can't be written"):
            self._make(probe)
        self._delete(probe)

    def _is_ours(self) -> bool:
        if not self._files.getFileStatus(self._folder).isDirectory():
            return False
        entries = self._files.listStatus(self._folder)
        return len(entries) == 0 or self._files.exists(self._path(self._folder, MARKER))

    def _put_in_place(self, partial: Any) -> None:
        old = self._beside("old")
        replaced = self._files.exists(self._folder)
        if replaced:
            self._move(self._folder, old)
        try:
            self._move(partial, self._folder)
        except BaseException:
            if replaced:
                self._move(old, self._folder)
            raise
        if replaced:
            self._delete(old)

    def _move(self, source: Any, target: Any) -> None:
        if not self._files.rename(source, target):
            raise UnusableOutput(f"the output folder {self.name} can't be renamed into place")

    def _make(self, path: Any) -> None:
        if not self._files.mkdirs(path):
            raise UnusableOutput(f"the output folder {self.name} can't be created in {path.getParent()}")

    def _delete(self, path: Any) -> None:
        with contextlib.suppress(Py4JJavaError):
            self._files.delete(path, True)

    def _write_text(self, path: Any, text: str) -> None:
        stream = self._files.create(path)
        try:
            stream.write(bytearray(text.encode()))
        finally:
            stream.close()

    def _beside(self, purpose: str) -> Any:
        name = f".{self._folder.getName()}.{purpose}-{uuid.uuid4().hex}"
        return self._path(self._folder.getParent(), name)

    def _path(self, *parts: Any) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(*parts)

    @contextlib.contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        """Report Java's file system errors in one line."""
        try:
            yield
        except (Py4JJavaError, PySparkException, OSError) as error:
            raise UnusableOutput(f"the output folder {self.name} {what}: {reason(error)}") from error


def write_file(path: Path, text: str) -> None:
    """Write a file of this host, completely or not at all.

    Raises:
        UnusableOutput: there is no room, or no right to write; the earlier file is still there.
    """
    partial = path.with_name(f".{path.name}.partial-{uuid.uuid4().hex}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise UnusableOutput(f"{path} can't be written: {reason(error)}") from error


def reason(error: Exception) -> str:
    """Reason why a file could not be read or written, in one line, from Java's and Spark's messages."""
    text = str(error)
    for sign, words in (
        ("No space left on device", "no space is left on the device"),
        ("Disk quota exceeded", "the disk quota is exceeded"),
        ("Permission denied", "permission is denied"),
        ("Read-only file system", "the file system is read-only"),
    ):
        if sign in text:
            return words
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    java = [line.removeprefix(": ") for line in lines if line.startswith(": ")]
    return (causes[-1:] or java or lines or [type(error).__name__])[0]
