"""``rebalanser tasks worker`` and ``serve``, which run until a signal, and ``schedules`` and ``trigger``."""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final
from zoneinfo import ZoneInfo

import typer
from pydantic import ValidationError

from rebalanser.cli.arguments import parse_seconds
from rebalanser.cli.options import JsonOption, RegistryOptions, VerboseOption
from rebalanser.cli.output import Face, counted
from rebalanser.cli.tasks_options import (
    CreateOption,
    KeepCancelledOption,
    KeepCompletedOption,
    KeepDeadOption,
    OutboxOption,
    QueueArgument,
    opened,
    pause_line,
    retained,
)
from rebalanser.core.tasks.model import EnqueueAnswer, Enqueued
from rebalanser.errors import InvalidHandlers, InvalidSettings, InvalidTask, MissingExtra
from rebalanser.redaction import redact
from rebalanser.runtime.clock import SystemClock
from rebalanser.runtime.logs import configure_cli_logging
from rebalanser.tasks.async_queue import AsyncQueue, AsyncQueues
from rebalanser.tasks.functions import NO_OPTIONS
from rebalanser.tasks.metrics import Measurable, QueueCollector
from rebalanser.tasks.pauses import Pauses
from rebalanser.tasks.queue import BodyPlace, Queue, Queues

GC_THRESHOLD: Final = 5000
"""Number of new objects that starts Python's garbage collector for young objects; its default is 700."""

SHORTEST_TTL_S: Final = 0.1

if TYPE_CHECKING:
    from types import ModuleType


PlaceArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:QUEUE",
        show_default=False,
        help="The module, imported from the working directory too, and the name of the queue in it.",
    ),
]


PlacesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="MODULE:QUEUE...",
        show_default=False,
        help="Modules, imported from the working directory too, and queues in them, all of one registry.",
    ),
]


def worker(
    places: PlacesArgument,
    concurrency: Annotated[
        int, typer.Option(min=1, metavar="N", help="Maximum number of tasks at a time.")
    ] = 1,
    processes: Annotated[
        bool,
        typer.Option(
            "--processes",
            help="Run each body in a process of its own, which is killed at its timeout.",
        ),
    ] = False,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            metavar="PORT",
            show_default=False,
            help="Serve the worker's metrics for Prometheus at this port, under /metrics.",
        ),
    ] = None,
    metrics_host: Annotated[
        str,
        typer.Option(metavar="ADDRESS", help="The address to serve metrics at; reading them needs no token."),
    ] = "127.0.0.1",
    keep_completed: KeepCompletedOption = None,
    keep_dead: KeepDeadOption = None,
    keep_cancelled: KeepCancelledOption = None,
    verbose: VerboseOption = 0,
    json: JsonOption = False,
) -> None:
    """Run the tasks of queues until Ctrl-C or SIGTERM; running tasks then have 30 seconds to end.

    Several queues share --concurrency: a task of a later one begins only while no earlier one has a task that
    is ready. The queues name their registry, so there is no --registry.
    """
    configure_cli_logging(json, verbose)
    queues = [_queue_of(place) for place in places]
    for each in queues:
        each.retention = retained(each.retention, keep_completed, keep_dead, keep_cancelled)
    collect_rarely()
    plain = [each for each in queues if isinstance(each, Queue)]
    coroutines = [each for each in queues if isinstance(each, AsyncQueue)]
    if coroutines and processes:
        raise typer.BadParameter(f"{' '.join(places)} has an AsyncQueue, whose bodies run in its event loop")
    if coroutines and plain:
        raise typer.BadParameter("the queues of one worker must be all a Queue, or all an AsyncQueue")
    bodies: BodyPlace = "processes" if processes else "threads"
    if coroutines:
        several = AsyncQueues(*coroutines) if len(coroutines) > 1 else coroutines[0]
        _say_what_is_worked_on(coroutines, concurrency, json)
        asyncio.run(_run(several, coroutines, concurrency, metrics_host, metrics_port))
        return
    together = Queues(*plain) if len(plain) > 1 else plain[0]
    _say_what_is_worked_on(plain, concurrency, json)
    with ExitStack() as stack:
        for queue in plain:
            stack.enter_context(queue)
        stack.enter_context(metrics_served(plain, metrics_host, metrics_port))
        together.run(concurrency, bodies=bodies)


def _say_what_is_worked_on(queues: Sequence[Queue | AsyncQueue], concurrency: int, json: bool) -> None:
    names, url = [each.name for each in queues], redact(queues[0].url)
    Face(url, json).answer(
        {"event": "working", "queues": names, "url": url, "concurrency": concurrency},
        f"working on {', '.join(names)} at {url}, {counted(concurrency, 'task')} at a time; Ctrl-C stops it",
    )
    sys.stdout.flush()


def collect_rarely() -> None:
    """Let Python's garbage collector run less often; this process belongs to the command.

    A batch of claims creates some thousand objects without cycles, and imported modules stay anyway.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, *gc.get_threshold()[1:])


async def _run(
    together: AsyncQueue | AsyncQueues,
    queues: Sequence[AsyncQueue],
    concurrency: int,
    metrics_host: str,
    metrics_port: int | None,
) -> None:
    async with AsyncExitStack() as stack:
        for queue in queues:
            await stack.enter_async_context(queue)
        stack.enter_context(metrics_served(queues, metrics_host, metrics_port))
        await together.run(concurrency)


@contextmanager
def metrics_served(queues: Sequence[Measurable], host: str, port: int | None) -> Iterator[None]:
    """Serve the metrics of the process that works on queues, if there is a port for that.

    Raises:
        MissingExtra: ``prometheus_client`` is not installed.
        InvalidSettings: the address can't be bound.
    """
    if port is None:
        yield
        return
    collector = QueueCollector(*queues)
    from prometheus_client import CollectorRegistry, start_http_server  # noqa: PLC0415 - an extra

    registry = CollectorRegistry()
    registry.register(collector)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise InvalidSettings(f"metrics can't be served at {host}:{port}: {error}") from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def schedules(place: PlaceArgument, json: JsonOption = False) -> None:
    """List the schedules of a queue's periodic functions, with the next tick of each.

    Schedules are read from the module, and pauses from the store. The queue names its registry, so there is
    no --registry.
    """
    face = Face.of(None, json)
    queue, now = _queue_of(place), SystemClock().wall()
    if not queue.schedules:
        face.remark(f"{place} has no periodic function")
    paused = _pauses(queue).schedules if queue.schedules else {}
    for each in queue.schedules:
        following = datetime.fromtimestamp(each.next_tick(now), ZoneInfo(each.time_zone)).isoformat(sep=" ")
        pause = paused.get(each.name)
        document = {
            "name": each.name,
            "expression": each.expression,
            "time_zone": each.time_zone,
            "next": following,
            "pause": None if pause is None else pause.model_dump(),
        }
        line = f"{each.name}: {each.expression} ({each.time_zone}), next {following}"
        face.answer(document, line, *([] if pause is None else [pause_line("  it", pause, now)]))


def _pauses(queue: Queue | AsyncQueue) -> Pauses:
    """Read the pauses, and close the queue."""
    if isinstance(queue, AsyncQueue):
        return asyncio.run(_read_pauses(queue))
    with queue:
        return queue.pauses()


async def _read_pauses(queue: AsyncQueue) -> Pauses:
    async with queue:
        return await queue.pauses()


def trigger(
    place: PlaceArgument,
    name: Annotated[
        str, typer.Argument(metavar="NAME", show_default=False, help="The name of a periodic function.")
    ],
    json: JsonOption = False,
) -> None:
    """Enqueue a task of a periodic function now, beside those of its schedule.

    If its tasks are unique and one is open, print that one's id and `duplicate`. The queue names its
    registry, so there is no --registry.
    """
    face = Face.of(None, json)
    queue = _queue_of(place)
    names = [each.name for each in queue.schedules]
    if name not in names:
        there = f"there are: {', '.join(names)}" if names else "it has no periodic function at all"
        raise InvalidTask(f"{place} has no periodic function {name!r}; {there}")
    if isinstance(queue, AsyncQueue):
        (task,) = asyncio.run(_enqueued(queue, name))
    else:
        with queue:
            task = queue.commit_one(queue.build_enqueue(queue.functions[name], (), {}))
    lines = (task, task.answer) if task.answer is EnqueueAnswer.DUPLICATE else (task,)
    face.answer({"queue": queue.name, "id": task, "answer": task.answer}, *lines)


async def _enqueued(queue: AsyncQueue, name: str) -> list[Enqueued[Any]]:
    async with queue:
        return await queue.enqueue_calls(queue.functions[name], [((), {})], NO_OPTIONS)


def _parse_ttl(text: str) -> float:
    ttl_s = parse_seconds(text)
    if ttl_s < SHORTEST_TTL_S:
        raise typer.BadParameter(f"a claim lasts at least {SHORTEST_TTL_S:g} seconds, not {text}")
    return ttl_s


def serve(
    on: RegistryOptions,
    queue: QueueArgument,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="PORT", help="The port; 0 for any free one.")
    ] = 8642,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            show_default=False,
            help="A file with the bearer token that clients must send; required beyond loopback.",
        ),
    ] = None,
    claim_ttl: Annotated[
        float,
        typer.Option(
            parser=_parse_ttl,
            metavar="SPAN",
            help="Lifetime of a claim unless it is renewed, in seconds, or such as 2m.",
        ),
    ] = "30",  # type: ignore[assignment] # typer parses the default too
    max_body: Annotated[
        int, typer.Option(min=1, metavar="BYTES", help="Maximum size of a request's body.")
    ] = 8 * 1024 * 1024,
    rate: Annotated[
        str,
        typer.Option(metavar="N/TIME", help="Maximum number of requests per address, such as 1000/second."),
    ] = "1000/second",
    keep_completed: KeepCompletedOption = None,
    keep_dead: KeepDeadOption = None,
    keep_cancelled: KeepCancelledOption = None,
    create: CreateOption = False,
    outbox: OutboxOption = None,
    verbose: VerboseOption = 0,
) -> None:
    """Serve a queue over HTTP until Ctrl-C or SIGTERM: on SQLite all of it, else the partitions it owns."""
    try:
        from rebalanser.tasks.http import serving  # noqa: PLC0415 - what it needs is an extra
    except ImportError as error:
        raise MissingExtra(
            f"tasks serve needs packages that are not installed ({error}); pip install 'rebalanser[web]'"
        ) from error
    face = on.face(verbose)
    token = None if token_file is None else serving.read_token(token_file)
    try:
        options = serving.ServingOptions(
            host=host, port=port, token=token, max_body_bytes=max_body, rate=rate
        )
    except ValidationError as error:
        raise InvalidSettings(str(error)) from error

    def started(url: str) -> None:
        document = {"event": "serving", "queue": queue, "url": url}
        face.answer(document, f"serving the queue {queue} at {url}; Ctrl-C stops it")
        sys.stdout.flush()

    with opened(face, queue, create=create, claim_ttl_s=claim_ttl, outbox=outbox) as tasks:
        tasks.retention = retained(tasks.retention, keep_completed, keep_dead, keep_cancelled)
        serving.serve(tasks, options, started)


def _queue_of(place: str) -> Queue | AsyncQueue:
    """Import the queue at ``MODULE:QUEUE``.

    Raises:
        InvalidHandlers: the module can't be imported, or has no queue of this name.
    """
    module_name, colon, attribute = place.partition(":")
    if not (module_name and colon and attribute):
        raise typer.BadParameter(f"{place!r} is not MODULE:QUEUE")
    module = _module(module_name)
    found = getattr(module, attribute, None)
    if isinstance(found, Queue | AsyncQueue):
        return found
    queues = sorted(name for name, value in vars(module).items() if isinstance(value, Queue | AsyncQueue))
    there = f"it has: {', '.join(queues)}" if queues else "it has no Queue at all"
    raise InvalidHandlers(f"{attribute!r} in {module_name} is not a rebalanser.tasks.Queue; {there}")


def _module(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:  # noqa: PTH109 - sys.path holds texts
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    try:
        return importlib.import_module(name)
    except Exception as error:  # an import runs any code
        raise InvalidHandlers(
            f"the module {name!r} can't be imported: {type(error).__name__}: {error}"
        ) from error
