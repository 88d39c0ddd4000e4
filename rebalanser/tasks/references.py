"""The place of a function, by which another process finds it: ``MODULE:QUALIFIED.NAME``."""

from __future__ import annotations

import importlib
import sys
from operator import attrgetter

from rebalanser.errors import InvalidHandlers
from rebalanser.runtime.handlers import name_of
from rebalanser.tasks.functions import TaskBody
from rebalanser.tasks.options import TaskOptions


def reference_of(body: TaskBody) -> str:
    """Where the function of a body is.

    Raises:
        InvalidHandlers: it is not what its module has under its name: only what stands at the top of a
            module, or in a class there, can be imported elsewhere.
    """
    function = body.function
    module = getattr(function, "__module__", None)
    path = getattr(function, "__qualname__", None)
    if module is not None and path is not None:
        found = _found(sys.modules.get(module), path)
        if found is function or getattr(found, "body", None) is body:
            return f"{module}:{path}"
    raise InvalidHandlers(
        f"task {body.name!r}: no other process can import {name_of(function)}; "
        "a function whose bodies run in processes stands at the top of a module"
    )


def body_at(reference: str, name: str) -> TaskBody:
    """The function at a place, to be called as the task ``name``.

    Raises:
        InvalidHandlers: there is no such function.
    """
    module, _, path = reference.partition(":")
    found = _found(importlib.import_module(module), path)
    body = getattr(found, "body", None)
    if isinstance(body, TaskBody):
        return body
    if not callable(found):
        raise InvalidHandlers(f"task {name!r}: there is no function {reference} in a process of its own")
    return TaskBody(found, name, TaskOptions())


def _found(module: object, path: str) -> object:
    try:
        return attrgetter(path)(module)
    except AttributeError:
        return None
