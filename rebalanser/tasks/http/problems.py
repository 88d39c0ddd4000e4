"""Problem documents for refused requests (RFC 9457)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from rebalanser import errors
from rebalanser.redaction import redact
from rebalanser.runtime.logs import get_logger
from rebalanser.tasks.functions import plain_message

MEDIA_TYPE: Final = "application/problem+json"
RETRY_AFTER_S: Final = 1
MAX_PLACES: Final = 20
"""Maximum number of errors listed in one problem."""
MAX_PLACE: Final = 200
"""Maximum characters of the place of an error."""
MAX_DETAIL: Final = 4000
"""Maximum characters of a detail, which may repeat what a client has sent."""
PATH: Final = "/problems"
_log = get_logger()


class Problem(BaseModel):
    """Problem with a request, or with what it asks for (RFC 9457)."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(description="Reference to the meaning of this kind of problem.")
    title: str
    status: int
    detail: str = Field(default="", description="Explanation of this occurrence.")


@dataclass(frozen=True, slots=True)
class ProblemKind:
    """A kind of problem: its name in ``type``, its status and what it means."""

    name: str
    status: HTTPStatus
    title: str

    @property
    def type(self) -> str:
        """The reference in the document."""
        return f"{PATH}/{self.name}"


FENCED: Final = ProblemKind(
    "fenced", HTTPStatus.CONFLICT, "The claim has ended: its worker must stop, and nothing was written."
)
UPDATE_CONFLICT: Final = ProblemKind(
    "update-conflict", HTTPStatus.CONFLICT, "The update is not the next one, or another has its number."
)
EXISTS: Final = ProblemKind("exists", HTTPStatus.CONFLICT, "The id is taken by a task with other content.")
UNKNOWN: Final = ProblemKind("unknown", HTTPStatus.NOT_FOUND, "There is no such task, queue or path.")
INVALID: Final = ProblemKind("invalid", HTTPStatus.UNPROCESSABLE_ENTITY, "The request is invalid.")
UNAUTHORIZED: Final = ProblemKind(
    "unauthorized", HTTPStatus.UNAUTHORIZED, "The bearer token is missing or wrong."
)
FOREIGN: Final = ProblemKind(
    "foreign-host", HTTPStatus.FORBIDDEN, "Without a token only requests that name this host are answered."
)
TOO_LARGE: Final = ProblemKind(
    "too-large", HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "The request is over a limit of the server or store."
)
TOO_MANY: Final = ProblemKind("too-many", HTTPStatus.TOO_MANY_REQUESTS, "Too many requests: try again later.")
FULL: Final = ProblemKind("full", HTTPStatus.INSUFFICIENT_STORAGE, "The store is over its quota.")
AWAY: Final = ProblemKind(
    "engine-away", HTTPStatus.SERVICE_UNAVAILABLE, "The store is unavailable: nothing was done, try again."
)
OUTCOME_UNKNOWN: Final = ProblemKind(
    "outcome-unknown",
    HTTPStatus.GATEWAY_TIMEOUT,
    "The outcome is unknown: it may have been done, or may still be. The same request again finds out.",
)
UNUSABLE: Final = ProblemKind(
    "unusable-store", HTTPStatus.SERVICE_UNAVAILABLE, "The store, or the outbox, can't be used."
)
INTERNAL: Final = ProblemKind(
    "internal", HTTPStatus.INTERNAL_SERVER_ERROR, "An internal error of the server."
)
OTHER: Final = "other"
KINDS: Final[Mapping[str, ProblemKind]] = {
    each.name: each
    for each in (
        FENCED, UPDATE_CONFLICT, EXISTS, UNKNOWN, INVALID, UNAUTHORIZED, FOREIGN, TOO_LARGE, TOO_MANY, FULL,
        AWAY, OUTCOME_UNKNOWN, UNUSABLE, INTERNAL,
    )
}  # fmt: skip
_OF_ERRORS: Final[tuple[tuple[type[errors.RebalanserError], ProblemKind], ...]] = (
    (errors.Fenced, FENCED),
    (errors.TaskExists, EXISTS),
    (errors.UnknownTask, UNKNOWN),
    (errors.UnknownQueue, UNKNOWN),
    (errors.InvalidTask, INVALID),
    (errors.InvalidName, INVALID),
    (errors.RequestTooLarge, TOO_LARGE),
    (errors.QuotaExceeded, FULL),
    (errors.RegistryRefused, UNUSABLE),
    (errors.UnusableFolder, UNUSABLE),
    (errors.OutcomeUnknown, OUTCOME_UNKNOWN),
    (errors.RetryLater, AWAY),
)
_OF_STATUSES: Final[Mapping[int, ProblemKind]] = {
    HTTPStatus.BAD_REQUEST: INVALID,  # a body that the framework can't parse, such as one that is no UTF-8
    **{each.status: each for each in (UNKNOWN, UNAUTHORIZED, TOO_LARGE, TOO_MANY)},
}


class ProblemRaised(Exception):
    """A request is refused for a reason that is no error of the library."""

    def __init__(self, kind: ProblemKind, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


def kind_of(error: errors.RebalanserError) -> ProblemKind:
    """Return the kind of problem that an error is."""
    return next((kind for error_type, kind in _OF_ERRORS if isinstance(error, error_type)), INTERNAL)


def document(
    kind: ProblemKind, detail: str, headers: Mapping[str, str] | None = None, **more: Any
) -> JSONResponse:
    """Return the answer with a problem document."""
    shown = redact(" ".join(detail.split()))[:MAX_DETAIL]
    problem = Problem(type=kind.type, title=kind.title, status=kind.status, detail=shown, **more)
    extra = dict(headers or {})
    if kind in {AWAY, TOO_MANY}:
        extra.setdefault("Retry-After", str(RETRY_AFTER_S))
    if kind is UNAUTHORIZED:
        extra["WWW-Authenticate"] = "Bearer"
    return JSONResponse(problem.model_dump(), kind.status, extra, MEDIA_TYPE)


async def send_problem(
    kind: ProblemKind,
    detail: str,
    scope: Scope,
    receive: Receive,
    send: Send,
    headers: Mapping[str, str] | None = None,
) -> None:
    """Answer with a problem before the request has reached the application."""
    await document(kind, detail, headers)(scope, receive, send)


def _message_of(error: Mapping[str, Any]) -> str:
    """Return the error at one place of a request, and what to send instead if that is known."""
    kind, place = error["type"], tuple(error["loc"])
    if kind == "model_attributes_type" and place == ("body",):
        return (
            "the body is not read as JSON: send a JSON object, with the header Content-Type: application/json"
        )
    if place[-2:-1] in {("payload",), ("content",), ("result",)} and kind == "extra_forbidden":
        return f'wrap it: "{place[-2]}" is {{"value": JSON}} or {{"base64": TEXT}}'
    if kind == "extra_forbidden":
        return "there is no such field; /openapi.json has all fields"
    return plain_message(str(error["msg"]))


def add_handlers(app: FastAPI) -> None:
    """Answer all exceptions with problem documents."""

    @app.exception_handler(errors.RebalanserError)
    async def library_error(_request: Request, error: errors.RebalanserError) -> JSONResponse:
        kind = kind_of(error)
        if kind is INTERNAL:
            _log.error("a request failed", action="http_failed", error=repr(error))
        return document(kind, str(error))

    @app.exception_handler(ProblemRaised)
    async def refusal(_request: Request, error: ProblemRaised) -> JSONResponse:
        return document(error.kind, str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid_request(_request: Request, error: RequestValidationError) -> JSONResponse:
        places = [
            {"place": ".".join(map(str, each["loc"]))[:MAX_PLACE], "message": _message_of(each)}
            for each in error.errors()[:MAX_PLACES]
        ]
        detail = "; ".join(f"{each['place']}: {each['message']}" for each in places)
        return document(INVALID, detail, errors=places)

    @app.exception_handler(HTTPException)
    async def framework_error(_request: Request, error: HTTPException) -> JSONResponse:
        status = HTTPStatus(error.status_code)
        kind = _OF_STATUSES.get(status, ProblemKind(OTHER, status, status.phrase))
        return document(kind, str(error.detail), error.headers)

    @app.exception_handler(Exception)
    async def fault(_request: Request, error: Exception) -> JSONResponse:
        return document(INTERNAL, type(error).__name__)
