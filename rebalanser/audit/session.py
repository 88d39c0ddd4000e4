"""The Spark session of an audit: the active one, else a new one on this machine.

Every problem with Java, PySpark or the Kafka connector is one ``FixConfiguration`` that says what to install
or set.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rebalanser.errors import FixConfiguration, MissingExtra

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

KAFKA_PACKAGE_VARIABLE: Final = "REBALANSER_SPARK_KAFKA_PACKAGE"
KAFKA_PACKAGE: Final = "org.apache.spark:spark-sql-kafka-0-10_2.13:4.0.0"
"""Default Kafka connector with PySpark 4.0. It need not have PySpark's patch version: for some, a companion
of the connector is not available everywhere, and any 4.0 connector works with any 4.0 PySpark."""
LOCAL: Final = "local[*]"
OLDEST_JAVA: Final = 17
NEWEST_JAVA: Final = 21
"""Newest Java for PySpark 4.0 and 4.1. Later ones lack APIs that Hadoop, Spark's reader of files, uses."""
_WITH_NEWEST_JAVA: Final = re.compile(r"4\.[01]\.")
_JAVA_HINT: Final = "install Java 17 or 21, such as openjdk-17-jre-headless of Debian, or set JAVA_HOME"
_TELLS: Final = re.compile(r"(?<!WARN )\b\w*(?:Exception|Error)\b")
_WORKERS_PYTHON: Final = "PYSPARK_PYTHON"
"""Variable with the interpreter that follows growing files, read at the JVM's start; needs this package."""
_SUBMITTED: Final = "PYSPARK_GATEWAY_PORT"
"""Variable set by ``spark-submit``, which has started the JVM itself."""

# Java never compiles a method beyond 8,000 bytes of bytecode unless told to, and what Spark makes of a whole
# stage often is one: interpreted, reading takes three times as long. A Java that does not know that need not.
_JAVA_OPTIONS: Final = "-XX:+IgnoreUnrecognizedVMOptions -XX:-DontCompileHugeMethods"
# Debugging would note the line of Python that made each column, and constraint propagation infer conditions
# that are all written out: both only cost time here, seconds for each audit. An audit has more pieces of code
# than the hundred that Spark keeps: each audit, and each micro-batch, would compile all of them anew.
_SETTINGS: Final[Mapping[str, str]] = {
    "spark.app.name": "rebalanser audit",
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    "spark.driver.extraJavaOptions": _JAVA_OPTIONS,
    "spark.executor.extraJavaOptions": _JAVA_OPTIONS,
    "spark.log.level": "ERROR",
    "spark.serializer": "org.apache.spark.serializer.KryoSerializer",
    "spark.sql.adaptive.enabled": "true",
    "spark.sql.codegen.cache.maxEntries": "2000",
    "spark.sql.constraintPropagation.enabled": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


class SparkUnusable(FixConfiguration):
    """Spark cannot run here; the message says what is missing or incompatible, and how to get it."""


class KafkaConnectorMissing(SparkUnusable):
    """The package with which Spark reads Kafka could not be downloaded."""


def session(
    master: str | None = None,
    *,
    kafka: bool = False,
    memory: str | None = None,
    local_dir: Path | str | None = None,
    conf: Mapping[str, str] | None = None,
) -> SparkSession:
    """Return the active Spark session, else that of ``spark-submit``, else a new one (AU-10).

    An existing session is used as it is: its creator set its master, memory and packages. A new one runs on
    ``master``, by default on all cores of this machine.

    Args:
        master: Spark's name of a cluster, such as ``spark://HOST:7077``.
        kafka: True to read Kafka, which takes a connector: the Maven coordinates in
            ``REBALANSER_SPARK_KAFKA_PACKAGE``, by default ``KAFKA_PACKAGE``.
        memory: of the driver, such as ``4g``; by default half of this machine's, 8 GiB at most.
        local_dir: folder of the data that Spark exchanges between tasks; by default the temporary folder.
        conf: further settings of Spark, which override all others.

    Raises:
        MissingExtra: PySpark is not installed.
        SparkUnusable: there is no Java, or none that fits this PySpark, or Spark did not start.
        KafkaConnectorMissing: the connector could not be downloaded.
    """
    try:
        from pyspark import SparkContext  # noqa: PLC0415 - the extra may be missing
        from pyspark.sql import SparkSession  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtra(
            f"the audit needs packages that are not installed ({error}); pip install 'rebalanser[spark]'"
        ) from error
    if (active := SparkSession.getActiveSession()) is not None:
        return active
    if SparkContext._active_spark_context is not None or _SUBMITTED in os.environ:  # noqa: SLF001
        return SparkSession.builder.getOrCreate()
    check_java()
    settings = _settings(master or LOCAL, kafka, memory, local_dir) | dict(conf or {})
    if local_cores(settings["spark.master"]) is not None:
        os.environ.setdefault(_WORKERS_PYTHON, sys.executable)
    return _started(settings)


def check_java() -> int:
    """The major version of the Java that Spark will run on.

    Raises:
        SparkUnusable: there is none, or it does not fit the installed PySpark.
    """
    pyspark = importlib.metadata.version("pyspark")
    command = _java_command()
    if command is None:
        where = (
            f"JAVA_HOME is {os.environ['JAVA_HOME']}"
            if "JAVA_HOME" in os.environ
            else "there is no java on the PATH"
        )
        raise SparkUnusable(f"Spark needs Java ({where}): {_JAVA_HINT}")
    version = _java_version(command)
    if version is None:
        raise SparkUnusable(f"{command} does not report its version: {_JAVA_HINT}")
    too_new = version > NEWEST_JAVA and _WITH_NEWEST_JAVA.match(pyspark) is not None
    if version < OLDEST_JAVA or too_new:
        age = "new" if too_new else "old"
        raise SparkUnusable(f"Java {version} ({command}) is too {age} for PySpark {pyspark}: {_JAVA_HINT}")
    return version


def local_cores(master: str) -> int | None:
    """Number of tasks that run at once on a local master; None on a cluster."""
    inside = re.fullmatch(r"local(?:\[(\*|\d+)(?:,.*)?\])?", master)
    if inside is None:
        return None
    wanted = inside[1] or "1"
    return len(os.sched_getaffinity(0)) if wanted == "*" else int(wanted)


def default_memory_mib() -> int:
    """Half of the memory of this machine or its container, in MiB: at least 1 GiB and at most 8 GiB."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(max(total // 2 >> 20, 1024), 8192)


def _settings(master: str, kafka: bool, memory: str | None, local_dir: Path | str | None) -> dict[str, str]:
    settings = dict(_SETTINGS)
    settings["spark.master"] = master
    settings["spark.driver.memory"] = memory or f"{default_memory_mib()}m"
    cores = local_cores(master)
    if cores is not None:
        settings["spark.sql.shuffle.partitions"] = str(max(2, cores))
        settings["spark.sql.adaptive.enabled"] = "false"
        settings["spark.driver.bindAddress"] = settings["spark.driver.host"] = "127.0.0.1"
    if local_dir is not None:
        settings["spark.local.dir"] = str(local_dir)
    if kafka:
        settings["spark.jars.packages"] = os.environ.get(KAFKA_PACKAGE_VARIABLE) or KAFKA_PACKAGE
    return settings


def _java_command() -> str | None:
    """The Java that Spark's own start script would use; None if there is none."""
    home = os.environ.get("JAVA_HOME")
    return shutil.which(str(Path(home) / "bin" / "java")) if home else shutil.which("java")


@cache
def _java_version(command: str) -> int | None:
    """The major version that ``command -version`` prints: 8 for ``1.8.0_402``, 17 for ``17.0.15``."""
    try:
        told = subprocess.run(  # noqa: S603 - the Java that was found
            [command, "-version"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    version = re.search(r'version "(?:1\.)?(\d+)', told.stderr + told.stdout)
    return int(version[1]) if version else None


def _started(settings: Mapping[str, str]) -> SparkSession:
    """A session in a JVM of ours, which shows its warnings only if it does not start."""
    from pyspark import SparkConf, SparkContext  # noqa: PLC0415 - the extra may be missing
    from pyspark.java_gateway import launch_gateway  # noqa: PLC0415
    from pyspark.sql import SparkSession  # noqa: PLC0415

    conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
    with tempfile.TemporaryFile(mode="w+", errors="replace") as told:
        try:
            # A JVM whose session was stopped is used again: PySpark has one for each Python process.
            gateway = SparkContext._gateway or launch_gateway(  # type: ignore[no-untyped-call]  # noqa: SLF001
                conf, {"stderr": told}
            )
            SparkContext(conf=conf, gateway=gateway)
        except Exception as error:
            told.seek(0)
            raise _why_not_started(settings, told.read(), error) from error
    return SparkSession.builder.getOrCreate()


def _why_not_started(settings: Mapping[str, str], told: str, error: Exception) -> SparkUnusable:
    """The error for a JVM that did not start, with its last output in one line."""
    if (package := settings.get("spark.jars.packages")) and (missing := _unresolved(told)):
        return KafkaConnectorMissing(
            f"Spark needs {package} to read Kafka, and could not download it ({missing}): check the network, "
            f"or set {KAFKA_PACKAGE_VARIABLE} to the Maven coordinates of a version that your repository has"
        )
    lines = [line.strip() for line in told.splitlines() if _TELLS.search(line)] or [_first_line(error)]
    return SparkUnusable(f"Spark did not start on {settings['spark.master']}: {lines[0]}")


def _unresolved(told: str) -> str | None:
    """The message of Ivy, Spark's package manager, on what it could not find; None if there is none."""
    names = re.findall(r":: (\S+#\S+?): (?:not found|java\.\S+)", told)
    if names:
        return ", ".join(dict.fromkeys(names)) + " not found"
    broken = re.search(r"(?:download failed|unresolved dependency|Provided Maven Coordinates)[^\n]*", told)
    return broken[0].strip() if broken else None


def _first_line(error: Exception) -> str:
    cause = getattr(error, "java_exception", None)
    text = str(cause if cause is not None else error).strip()
    return text.splitlines()[0] if text else type(error).__name__
