"""Fields that two classes have in common."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel

from rebalanser.core.fields import fields_for


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table."""

    key: str
    parts: tuple[str, ...]
    secret: str = "s"


class Document(BaseModel):
    """A document of a row."""

    key: str
    parts: tuple[str, ...]
    size: int = 0


def test_a_document_gets_the_fields_that_it_has_and_no_others() -> None:
    assert fields_for(Document, Row("a", ("b",))) == {"key": "a", "parts": ("b",)}


def test_a_row_gets_the_fields_of_a_document() -> None:
    assert fields_for(Row, Document(key="a", parts=("b",), size=3)) == {"key": "a", "parts": ("b",)}


def test_values_are_passed_on_as_they_are() -> None:
    parts = ("b", "c")
    assert fields_for(Document, Row("a", parts))["parts"] is parts
