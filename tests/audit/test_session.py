"""Where the Spark session comes from, and what is said when there can be none."""

from __future__ import annotations

import builtins
import os
from typing import TYPE_CHECKING, Any

import pytest

from rebalanser.audit import session as subject
from rebalanser.audit.session import KafkaConnectorMissing, SparkUnusable, check_java
from rebalanser.errors import FixConfiguration, MissingExtra

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession


pytestmark = pytest.mark.slow


@pytest.mark.rule("AU-10")
def test_a_session_that_is_there_is_taken_as_it_is(spark: SparkSession) -> None:
    assert subject.session("spark://elsewhere:7077") is spark


def test_the_session_is_quiet_and_in_utc(spark: SparkSession) -> None:
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.sparkContext.getConf().get("spark.ui.enabled") == "false"
    assert spark.conf.get("spark.sql.shuffle.partitions") == "2"


def a_java(folder: Path, told: str) -> None:
    command = folder / "bin" / "java"
    command.parent.mkdir()
    command.write_text(f"#!/bin/sh\necho '{told}' >&2\n")
    command.chmod(0o755)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ('java version "1.8.0_402"', "Java 8 .* too old for PySpark"),
        ('openjdk version "11.0.2" 2019-01-15', "Java 11 .* too old for PySpark"),
        ('openjdk version "25" 2025-09-16', "Java 25 .* too new for PySpark"),
        ("what?", "does not report its version"),
    ],
)
def test_a_java_that_does_not_fit_is_refused_with_the_ones_that_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: str, words: str
) -> None:
    a_java(tmp_path, told)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setattr(subject.importlib.metadata, "version", lambda _: "4.0.5")
    with pytest.raises(SparkUnusable, match=f"{words}.*install Java 17 or 21") as refused:
        check_java()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("version", [17, 21])
def test_a_java_that_fits_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: int) -> None:
    a_java(tmp_path, f'openjdk version "{version}.0.2" 2024-01-16')
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert check_java() == version


@pytest.mark.parametrize("home", [None, "/nowhere"])
def test_no_java_is_told_with_how_to_get_one(monkeypatch: pytest.MonkeyPatch, home: str | None) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    if home is None:
        monkeypatch.delenv("JAVA_HOME", raising=False)
    else:
        monkeypatch.setenv("JAVA_HOME", home)
    with pytest.raises(SparkUnusable, match=r"Spark needs Java .*openjdk-17-jre-headless"):
        check_java()


def test_without_pyspark_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_pyspark(name: str, *rest: Any, **named: Any) -> Any:
        if name.startswith("pyspark"):
            raise ImportError("No module named 'pyspark'")
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without_pyspark)
    with pytest.raises(MissingExtra, match=r"rebalanser\[spark\]"):
        subject.session()


@pytest.mark.parametrize(
    ("told", "error", "words"),
    [
        (
            ":: org.apache.spark#spark-sql-kafka-0-10_2.13;4.0.99: not found\n",
            KafkaConnectorMissing,
            "4.0.99 not found.*REBALANSER_SPARK_KAFKA_PACKAGE",
        ),
        ("Error: java.net.ConnectException: refused\n", SparkUnusable, "ConnectException: refused"),
        ("", SparkUnusable, "Spark did not start on local: gone"),
    ],
)
def test_what_kept_spark_from_starting_is_one_line(
    told: str, error: type[FixConfiguration], words: str
) -> None:
    settings = {"spark.master": "local", "spark.jars.packages": "a:b:1"}
    why = subject._why_not_started(settings, told, RuntimeError("gone"))
    assert type(why) is error
    with pytest.raises(error, match=words):
        raise why


@pytest.mark.parametrize(
    ("master", "cores"),
    [
        ("local", 1),
        ("local[3]", 3),
        ("local[4,2]", 4),
        ("local[*]", len(os.sched_getaffinity(0))),
        ("yarn", None),
    ],
)
def test_cores_of_a_master(master: str, cores: int | None) -> None:
    assert subject.local_cores(master) == cores


def test_half_of_the_memory_is_left_to_others() -> None:
    assert 1024 <= subject.default_memory_mib() <= 8192
