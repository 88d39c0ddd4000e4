"""The reference of fields and kinds that the documentation shows, made from the code itself."""

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
    """What the detail may hold, for people."""
    return ", ".join(f"`{key}`" for key in note.detail) or "nothing"


def _type(schema: Mapping[str, Any]) -> str:
    """A field's JSON type for people."""
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(choice) for choice in schema["anyOf"]))
    if "$ref" in schema:
        return "string"
    return str(schema["type"])
