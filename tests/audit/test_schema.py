"""The Spark schema says what the pydantic model says."""

from __future__ import annotations

import pytest

from rebalanser.audit.schema import RECORD, RECORDS, spark_type, step_of
from rebalanser.history import KINDS, Record

EXPECTED = {"string": {"string"}, "integer": {"bigint"}, "number": {"double"}, "boolean": {"boolean"}}


@pytest.mark.rule("AU-1")
def test_each_field_of_a_record_is_a_column_of_its_type() -> None:
    properties = Record.model_json_schema()["properties"]
    definitions = Record.model_json_schema()["$defs"]
    assert list(properties) == RECORD.names
    for name, told in properties.items():
        options = told.get("anyOf", [definitions[told["$ref"].split("/")[-1]] if "$ref" in told else told])
        kinds = {option["type"] for option in options} - {"null"}
        expected = {"object": {"map<string,string>"}} | EXPECTED
        assert {RECORD[name].dataType.simpleString()} == expected[kinds.pop()], name
    assert RECORDS.names == [*RECORD.names, "step", "source", "position"]


def test_a_type_that_nobody_thought_of_is_refused() -> None:
    with pytest.raises(TypeError, match="no Spark type"):
        spark_type(complex)


@pytest.mark.rule("AU-1")
def test_each_kind_has_the_step_of_its_protocol(spark) -> None:  # type: ignore[no-untyped-def]
    words = [(str(protocol), str(kind)) for protocol, notes in KINDS.items() for kind in notes]
    rows = spark.createDataFrame(
        [*words, ("group", "danced"), ("paxos", "elected")], "protocol string, kind string"
    )
    found = rows.select("protocol", "kind", step_of(rows.protocol, rows.kind).alias("step")).collect()
    steps = {(row["protocol"], row["kind"]): row["step"] for row in found}
    for protocol, notes in KINDS.items():
        for kind, note in notes.items():
            assert steps[str(protocol), str(kind)] == (None if note.step is None else str(note.step))
    assert steps["group", "danced"] is steps["paxos", "elected"] is None
