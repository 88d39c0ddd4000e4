"""Reference of fields and kinds for the documentation, generated from the code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rebalanser.history.kinds import KINDS, KindNote
from rebalanser.history.records import Record


def describe() -> str:
    """The fields of a record and the kinds of records, as two tables in Markdown."""
    fields = [
        f"| `{name}` | {_type(schema)} | {schema['description']} |"
        for name, schema in Record.model_json_schema()["properties"].items()
    ]
    kinds = [
        f"| {protocol} | `{kind}` | {note.meaning} | {_keys(note)} |"
        for protocol, notes in KINDS.items()
        for kind, note in notes.items()
    ]
    return "\n".join(
        [
            "| Field | Type | Meaning |",
            "| --- | --- | --- |",
            *fields,
            "",
            "| Protocol | Kind | What happened | In `detail` |",
            "| --- | --- | --- | --- |",
            *kinds,
        ]
    )


def _keys(note: KindNote) -> str:
    """The keys that a kind's detail may have, as text."""
    return ", ".join(f"`{key}`" for key in note.detail) or "nothing"


def _type(schema: Mapping[str, Any]) -> str:
    """A field's JSON type, as text."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(choice) for choice in schema["anyOf"]))
    if "$ref" in schema:
        return "string"
    return str(schema["type"])
