"""Documents of tasks: whatever bytes somebody stored can be told."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rebalanser.core.tasks.model import Update
from rebalanser.tasks.documents import Content, UpdateDocument


def told_of(content: bytes) -> Any:
    """The content in a document of a task's log, as it is read from a line of JSON."""
    return json.loads(UpdateDocument.of(Update(0, 0, content)).model_dump_json())["content"]


def lists(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


@pytest.mark.rule("SK-16")
@pytest.mark.parametrize(
    "content",
    [
        lists(300),
        lists(100_000),
        b'{"a":' * 300 + b"1" + b"}" * 300,
        b"NaN",
        b"[Infinity]",
        b'"\\ud800"',
        b"1" * 5000,
        b"\xff",
        b"",
        "[1]".encode("utf-16"),
    ],
)
def test_what_can_not_be_written_as_json_is_told_in_base64(content: bytes) -> None:
    assert told_of(content) == {"value": None, "base64": base64.b64encode(content).decode()}


@pytest.mark.rule("SK-16")
@pytest.mark.parametrize("content", [lists(200), b'{"a": [1, 2.5, "x", null, true]}', b"null", b'"\\u00e4"'])
def test_json_is_told_as_json(content: bytes) -> None:
    assert told_of(content) == {"value": json.loads(content), "base64": None}


@given(st.binary())
def test_any_bytes_can_be_told(content: bytes) -> None:
    told = Content.of(content)
    assert told.base64 is None or base64.b64decode(told.base64) == content
    told_of(content)
