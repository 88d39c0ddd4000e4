"""Fields that two classes have in common: dataclasses, or models with ``model_fields``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any


def fields_for(target: type, source: object) -> dict[str, Any]:
    """Return the fields of an object that another class has too, for its constructor."""
    kind: type = type(source)
    return {name: getattr(source, name) for name in _shared(target, kind)}


@functools.cache
def _shared(target: type, source: type) -> tuple[str, ...]:
    known = set(_names(target))
    return tuple(name for name in _names(source) if name in known)


def _names(kind: Any) -> Iterable[str]:
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    names: Iterable[str] = kind.model_fields
    return names
