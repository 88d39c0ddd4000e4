"""The Spark types of a record, derived from the pydantic model that is the schema's source (AU-1)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType, NoneType, UnionType
from typing import Final, Literal, Union, get_args, get_origin

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - Spark's own custom
from pyspark.sql.types import (
    BooleanType,
    DataType,
    DoubleType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from rebalanser.audit.tables import SOURCE_COLUMNS
from rebalanser.history import KINDS, Record

_TYPES: Final[Mapping[type, DataType]] = MappingProxyType(
    {str: StringType(), int: LongType(), float: DoubleType(), bool: BooleanType()}
)
_DETAIL: Final = MapType(StringType(), StringType())


def spark_type(annotation: object) -> DataType:
    """The Spark type that holds every value of a field so annotated; an enumeration is text.

    Raises:
        TypeError: no type is known for it.
    """
    origin = get_origin(annotation)
    if origin in {Union, UnionType}:
        (only,) = (part for part in get_args(annotation) if part is not NoneType)
        return spark_type(only)
    if origin is Literal:
        return spark_type(type(get_args(annotation)[0]))
    if origin is dict:
        return _DETAIL
    if isinstance(annotation, type):
        if issubclass(annotation, Enum):
            return StringType()
        if annotation in _TYPES:
            return _TYPES[annotation]
    raise TypeError(f"no Spark type is known for {annotation!r}")


RECORD: Final = StructType(
    [StructField(name, spark_type(field.annotation)) for name, field in Record.model_fields.items()]
)
"""One column for each field of ``Record``, with its name.

``detail`` is a map of texts: a number or truth value in it is its text in the JSON. All columns may be null
here; ingest ensures that those of required fields are not.
"""

RECORDS: Final = StructType([*RECORD, StructField("step", StringType()), *SOURCE_COLUMNS])
"""Columns of a record for the audit's functions: with its ``Step`` and its source."""


def step_of(protocol: Column, kind: Column) -> Column:
    """The step of a kind in its protocol, null if it is none: a chain of comparisons, in no order."""
    chain = F.lit(None).cast("string")
    for name, notes in KINDS.items():
        steps: dict[str, list[str]] = {}
        for word, note in notes.items():
            if note.step is not None:
                steps.setdefault(str(note.step), []).append(str(word))
        of_protocol = F.lit(None).cast("string")
        for step, words in steps.items():
            of_protocol = F.when(kind.isin(words), F.lit(step)).otherwise(of_protocol)
        chain = F.when(protocol == str(name), of_protocol).otherwise(chain)
    return chain
