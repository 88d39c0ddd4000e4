"""The paths of the HTTP interface."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from pydantic import BaseModel
from pydantic_core import from_json

from rebalanser.core.tasks.dispensing import DispensedClaim
from rebalanser.core.tasks.model import MAX_SECONDS, EnqueueAnswer, Enqueued, Status, Stored
from rebalanser.errors import UnknownQueue
from rebalanser.tasks.documents import Content, FullTaskDocument, TaskDocument, UpdateDocument
from rebalanser.tasks.functions import Id
from rebalanser.tasks.http import messages, operations, problems
from rebalanser.tasks.http.claims import ClientClaim, holder_with_token
from rebalanser.tasks.http.dispenser import Dispenser, LongPoll
from rebalanser.tasks.http.messages import (
    MAX_BATCH,
    ChangedCounts,
    ClaimedTask,
    ClaimedTasks,
    ClaimRequest,
    Completion,
    Counts,
    Failure,
    Health,
    HolderRequest,
    Label,
    NewIds,
    NewPause,
    NewTask,
    NewTasks,
    NewUpdate,
    Renewed,
    Resumed,
    Selection,
    Settled,
)
from rebalanser.tasks.http.problems import Problem
from rebalanser.tasks.metrics import QueueCollector
from rebalanser.tasks.pauses import Pause, Pauses
from rebalanser.tasks.queue import Queue

PREFIX: Final = "/v1/queues/{queue}"
NDJSON: Final = "application/x-ndjson"
MAX_PAGE: Final = 1_000_000

TaskPath = Annotated[Id, Path(description="The task's id.")]
SchedulePath = Annotated[str, Path(description="The name of the periodic function.")]
NumberPath = Annotated[int, Path(ge=0, description="The claim's number.")]
AtLeast = Annotated[
    int, Query(ge=0, description="Refuse to answer from a store that has not seen this revision (SK-11).")
]

TURNS: Final = 5
"""Turns of the event loop after which a request knows that its connection has ended."""


class QueueRoutes:
    """Handlers of all paths, on one queue and the dispenser of its claims."""

    def __init__(self, queue: Queue, dispenser: Dispenser) -> None:
        self.queue = queue
        self.dispenser = dispenser
        self.routers = (self._tasks(), self._selections(), self._pauses(), self._claims())

    async def require_queue(self, queue: str) -> None:
        """Refuse a request for another queue. Takes no thread: all threads may wait for the store."""
        if queue != self.queue.name:
            raise UnknownQueue(f"this server serves the queue {self.queue.name!r}, not {queue!r}")

    def _router(self, tag: str, *kinds: problems.ProblemKind) -> APIRouter:
        return APIRouter(
            prefix=PREFIX,
            tags=[tag],
            dependencies=[Depends(self.require_queue), Depends(refuse_ignored)],
            responses=_described(problems.UNKNOWN, problems.INVALID, problems.TOO_LARGE, *kinds),
        )

    def _tasks(self) -> APIRouter:
        queue = self.queue
        router = self._router("tasks")
        exists = _described(problems.EXISTS, problems.FULL)

        @router.post("/ids", status_code=HTTPStatus.CREATED)
        def new_ids(count: Annotated[int, Query(ge=1, le=MAX_BATCH)] = 1) -> NewIds:
            """Get ids for tasks to come: enqueueing a task with one more than once is harmless (SK-3)."""
            return NewIds(ids=tuple(queue.new_id() for _ in range(count)))

        @router.post(
            "/tasks", status_code=HTTPStatus.CREATED, responses=exists | _spooled(messages.EnqueuedTask)
        )
        def enqueue(task: NewTask, response: Response) -> messages.EnqueuedTask:
            """Enqueue a task; it is then stored for good, or in the server's outbox (SK-4)."""
            enqueued = operations.enqueue(queue, task)
            _mark_spooled(response, [enqueued])
            return messages.EnqueuedTask(id=enqueued, answer=enqueued.answer)

        @router.post(
            "/batches", status_code=HTTPStatus.CREATED, responses=exists | _spooled(messages.EnqueuedTasks)
        )
        def enqueue_batch(batch: NewTasks, response: Response) -> messages.EnqueuedTasks:
            """Enqueue many tasks in few transactions: each alone, or all or none (`together`)."""
            enqueued = operations.enqueue_batch(queue, batch.tasks, together=batch.together)
            _mark_spooled(response, enqueued)
            return messages.EnqueuedTasks(
                ids=tuple(enqueued), answers=tuple(each.answer for each in enqueued)
            )

        @router.get("/tasks", response_class=StreamingResponse, responses=_stream_of(TaskDocument))
        def list_tasks(
            status: Annotated[list[Status] | None, Query(description="Only tasks in one of these.")] = None,
            after: Annotated[Id | None, Query(description="Only tasks with greater ids.")] = None,
            limit: Annotated[
                int | None, Query(ge=1, le=MAX_PAGE, description="Maximum number of tasks.")
            ] = None,
            at_least: AtLeast = 0,
            name: Annotated[Label | None, Query(description="Only tasks of this function.")] = None,
            older_than_s: Annotated[
                float,
                Query(
                    ge=0,
                    le=MAX_SECONDS,
                    allow_inf_nan=False,
                    description="Only tasks that were enqueued more than this many seconds ago.",
                ),
            ] = 0.0,
            newest: Annotated[
                bool, Query(description="The newest first, at most 1000; goes with no `after` or `at_least`.")
            ] = False,
        ) -> StreamingResponse:
            """List tasks in the order of their ids, a line of JSON for each, as they are read (SK-12)."""
            statuses = frozenset(status) if status else None
            read = operations.newest_documents if newest else operations.task_documents
            tasks = read(
                queue,
                statuses,
                after=after,
                limit=limit,
                at_least=at_least,
                name=name,
                older_than_s=older_than_s,
            )
            return StreamingResponse(operations.lines(tasks), media_type=NDJSON)

        @router.get("/tasks/{task}")
        def get_task(task: TaskPath, at_least: AtLeast = 0) -> FullTaskDocument:
            """Get a task with its payload, state and result."""
            return operations.full_document(queue, task, at_least)

        @router.get(
            "/tasks/{task}/log", response_class=StreamingResponse, responses=_stream_of(UpdateDocument)
        )
        def get_log(task: TaskPath) -> StreamingResponse:
            """Get what all claims of a task wrote, a line of JSON for each, the earliest first (SK-9)."""
            return StreamingResponse(
                operations.lines(operations.update_documents(queue, task)), media_type=NDJSON
            )

        @router.get("/counts")
        def count() -> Counts:
            """Count the tasks in each status (SK-12)."""
            return Counts(queue=queue.name, counts=queue.count())

        @router.post("/tasks/{task}/cancel")
        def cancel(task: TaskPath) -> Settled:
            """Cancel a task, unless it is complete. Its claim ends."""
            queue.cancel(task)
            return _settled(queue.get(task))

        @router.post("/tasks/{task}/requeue")
        def requeue(task: TaskPath) -> Settled:
            """Requeue a dead or cancelled task, with all its tries (SK-15); any other is unchanged."""
            queue.requeue(task)
            return _settled(queue.get(task))

        return router

    def _selections(self) -> APIRouter:
        queue = self.queue
        router = self._router("tasks")

        @router.post("/cancel")
        def cancel_selected(selected: Selection) -> ChangedCounts:
            """Cancel the tasks that match, waiting and claimed ones unless a status is given.

            They are read page by page; asking again is harmless.
            """
            return operations.cancel(queue, selected)

        @router.post("/requeue")
        def requeue_selected(selected: Selection) -> ChangedCounts:
            """Requeue the tasks that match, with all their tries: dead ones unless a status is given.

            They are read page by page; asking again is harmless.
            """
            return operations.requeue(queue, selected)

        @router.post("/delete")
        def delete_selected(selected: Selection) -> ChangedCounts:
            """Delete the tasks that match, closed ones unless a status is given.

            A task stays as long as one that it is connected to by dependencies does not match. The id of a
            deleted task is forgotten: enqueued again it is a new task.
            """
            return operations.delete(queue, selected)

        return router

    def _pauses(self) -> APIRouter:
        queue = self.queue
        router = self._router("pauses", problems.FULL)

        @router.get("/pauses")
        def pauses() -> Pauses:
            """Get the pauses in force: of the queue, and of its schedules by function (SK-23)."""
            return queue.pauses()

        @router.post("/pause")
        def pause(given: NewPause) -> Pause:
            """Claim no more tasks, in any process, until resumed. Running bodies go on (SK-23)."""
            return queue.pause(given.reason, by=given.by)

        @router.post("/resume")
        def resume() -> Resumed:
            """Claim tasks again (SK-23)."""
            return Resumed(pause=queue.resume())

        @router.post("/schedules/{name}/pause")
        def pause_schedule(name: SchedulePath, given: NewPause) -> Pause:
            """Pause the schedule of a periodic function: ticks meanwhile are missed (SK-23)."""
            return queue.pause(given.reason, schedule=name, by=given.by)

        @router.post("/schedules/{name}/resume")
        def resume_schedule(name: SchedulePath) -> Resumed:
            """Let the ticks of a periodic function come again, from the next one on (SK-23).

            A name by which nothing was ever paused, and of which there is no task, is refused (422).
            """
            return Resumed(pause=queue.resume(schedule=name))

        return router

    def _claims(self) -> APIRouter:
        queue = self.queue
        router = self._router("claims")
        of_claim = "/tasks/{task}/claims/{number}"
        held = partial(ClientClaim, queue, self.dispenser.claim_history)
        fenced = _described(problems.FENCED)

        @router.post("/claims")
        async def claim(given: ClaimRequest, request: Request) -> ClaimedTasks:
            """Claim the best tasks of this server's partitions (SK-5), waiting if there is none."""
            client = self.dispenser.request(given.worker, given.limit, given.wait_s, given.names)
            dispensed = await self._waited(client, request)
            return ClaimedTasks(claims=tuple(_claimed(each, queue.context.ttl_s) for each in dispensed))

        @router.post(f"{of_claim}/renew", responses=fenced)
        def renew(task: TaskPath, number: NumberPath, given: HolderRequest) -> Renewed:
            """Let a claim last for its whole time from now (SK-7)."""
            stored = held(task, number, given.holder).renew()
            return Renewed(**dict(_settled(stored)), ttl_s=queue.context.ttl_s)

        @router.post(f"{of_claim}/update", responses=fenced)
        def update(task: TaskPath, number: NumberPath, given: NewUpdate) -> Settled:
            """Add to a claim's log (SK-9); sending it again is harmless."""
            content = given.content.content()
            return _settled(held(task, number, given.holder).update(given.sequence, content))

        @router.post(f"{of_claim}/complete", responses=fenced)
        def complete(task: TaskPath, number: NumberPath, given: Completion) -> Settled:
            """Complete a task for good (SK-10); sending it again is harmless."""
            result = None if given.result is None else given.result.content()
            return _settled(held(task, number, given.holder).complete(result))

        @router.post(f"{of_claim}/fail", responses=fenced)
        def fail(task: TaskPath, number: NumberPath, given: Failure) -> Settled:
            """End a try that failed (SK-15). Sent again it is refused, as the claim has ended by then."""
            delay_s = None if given.give_up else given.delay_s
            return _settled(held(task, number, given.holder).fail(given.error, delay_s))

        @router.post(f"{of_claim}/release", responses=fenced)
        def release(task: TaskPath, number: NumberPath, given: HolderRequest) -> Settled:
            """Give a claim back unworked; its try is not counted."""
            return _settled(held(task, number, given.holder).release())

        return router

    async def _waited(self, client: LongPoll, request: Request) -> list[DispensedClaim]:
        """Wait for a client's claims, and give them back if it has hung up."""
        dispensed = asyncio.wrap_future(client.future)
        hung_up = asyncio.ensure_future(_hung_up(request))
        is_there = False
        try:
            either: set[asyncio.Future[Any]] = {dispensed, hung_up}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            for _ in range(TURNS):
                await asyncio.sleep(0)
            is_there = not hung_up.done()
        finally:
            hung_up.cancel()
            if not is_there:
                self.dispenser.forget(client)
        return dispensed.result() if is_there else []


async def refuse_ignored(request: Request) -> None:
    """Refuse what would be ignored: parameters and fields that the path does not have, and repeated ones.

    A request with a misspelt parameter would choose other tasks.
    """
    path = request.scope["route"].dependant
    known = [each.alias for each in path.query_params]
    there = f"there are: {', '.join(known)}" if known else "this path takes none"
    given = Counter(name for name, _ in request.query_params.multi_items())
    problems = {
        ("query", name): f"there is no such parameter; {there}"
        if name not in known
        else f"it is given {number} times: give it once"
        for name, number in given.items()
        if name not in known or (number > 1 and name not in _REPEATED)
    }
    if not path.body_params and (body := await request.body()):
        with suppress(ValueError):
            fields = from_json(body)
            if isinstance(fields, dict):
                message = f"this path takes no body; its parameters: {', '.join(known) or 'none'}"
                problems |= dict.fromkeys((("body", name) for name in fields), message)
    if problems:
        raise RequestValidationError(
            [{"type": "ignored", "loc": place, "msg": message} for place, message in problems.items()]
        )


_REPEATED: Final = frozenset({"status"})
"""Parameters that may be given more than once."""


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _settled(stored: Stored) -> Settled:
    return Settled(task=stored.head.id, status=stored.state.status, revision=stored.revision)


def _claimed(dispensed: DispensedClaim, ttl_s: float) -> ClaimedTask:
    stored = dispensed.claimed.stored
    return ClaimedTask(
        task=stored.head.id,
        name=stored.head.name,
        payload=Content.of(dispensed.payload),
        number=dispensed.claimed.held.number,
        holder=holder_with_token(dispensed.claimed),
        token=stored.revision,
        ttl_s=ttl_s,
        waited_s=dispensed.waited_s,
        failures=stored.state.failures,
        retries=stored.head.retries,
        timeout_s=stored.head.timeout_s,
    )


def _mark_spooled(response: Response, enqueued: Sequence[Enqueued[Any]]) -> None:
    """Answer 202 if the store does not have all of it yet."""
    if any(each.answer is EnqueueAnswer.SPOOLED for each in enqueued):
        response.status_code = HTTPStatus.ACCEPTED


def _spooled(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    description = "In the server's outbox, or some of it; the store gets it when it is back."
    return {int(HTTPStatus.ACCEPTED): {"model": model, "description": description}}


def _described(*kinds: problems.ProblemKind) -> dict[int | str, dict[str, Any]]:
    """Describe the problems that a path can answer."""
    always = (
        problems.UNAUTHORIZED, problems.FOREIGN, problems.TOO_MANY, problems.INTERNAL, problems.AWAY,
        problems.OUTCOME_UNKNOWN,
    )  # fmt: skip
    return {int(kind.status): {"model": Problem, "description": kind.title} for kind in (*kinds, *always)}


def _stream_of(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    reference = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {200: {"model": model, "description": "Lines of JSON", "content": {NDJSON: {"schema": reference}}}}


def application(server: QueueRoutes, version: str, *, is_guarded: bool) -> FastAPI:
    """Build the application with all its paths; if ``is_guarded``, its description asks for a token."""
    app = FastAPI(title="Rebalanser tasks", version=version, docs_url=None, redoc_url=None)
    problems.add_handlers(app)
    for router in server.routers:
        app.include_router(router)

    @app.get("/health", tags=["server"])
    async def health() -> Health:
        """Ask whether the server answers, how many partitions it owns, what fails, and if it is paused."""
        owned = server.dispenser.owned(server.queue.partition_count)
        queue = server.queue
        troubles = tuple(f"{each.loop}: {each.kind}" for each in queue.troubles)
        pause = queue.known_pause
        since = None if pause is None else pause.since
        return Health(queue=queue.name, partitions=owned, troubles=troubles, paused_since=since)

    registry = CollectorRegistry()
    registry.register(QueueCollector(server.queue))

    @app.get("/metrics", include_in_schema=False)  # its format is that of Prometheus, not of JSON
    async def metrics() -> Response:
        """Get the metrics of this server's process."""
        text = await asyncio.to_thread(generate_latest, registry)  # others may keep the framework's threads
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    @app.get(
        f"{problems.PATH}/{{name}}", tags=["server"], responses=_described(problems.UNKNOWN, problems.INVALID)
    )
    async def explain(name: str) -> Problem:
        """Ask what a kind of problem means: where the `type` of a problem document points to."""
        kind = problems.KINDS.get(name)
        if kind is None:
            raise problems.ProblemRaised(problems.UNKNOWN, f"there is no kind of problem {name!r}")
        return Problem(type=kind.type, title=kind.title, status=kind.status)

    described: dict[str, Any] = {}

    def describe() -> dict[str, Any]:
        if not described:
            described.update(_description(app, is_guarded))
        return described

    app.openapi = describe  # type: ignore[method-assign] # the framework's own way to change it
    return app


def _description(app: FastAPI, is_guarded: bool) -> Mapping[str, Any]:
    """Return the OpenAPI document: problems by their media type, streams as streams, the token if any."""
    document = get_openapi(title=app.title, version=app.version, description=__doc__, routes=app.routes)
    for path in document["paths"].values():
        for operation in path.values():
            for status, answer in operation["responses"].items():
                content = answer.get("content", {})
                if NDJSON in content:
                    content.pop("application/json", None)
                elif int(status) >= HTTPStatus.BAD_REQUEST and "application/json" in content:
                    content[problems.MEDIA_TYPE] = content.pop("application/json")
    if is_guarded:
        schemes = document["components"].setdefault("securitySchemes", {})
        schemes["token"] = {"type": "http", "scheme": "bearer"}
        for name, path in document["paths"].items():
            for operation in path.values() if name.startswith("/v1/") else ():
                operation["security"] = [{"token": []}]
    return document
