"""procrastinate on PostgreSQL, which syncs every commit by default."""

from __future__ import annotations

import sys

from procrastinate import App, JobContext, PsycopgConnector, RetryStrategy

from queues import bodies
from queues.place import PATIENCE_S, url, variant

IS_DEFAULT = variant() == "default"
WORKER_DEFAULTS = (
    {} if IS_DEFAULT else {"update_heartbeat_interval": 2.0, "stalled_worker_timeout": float(PATIENCE_S)}
)
app = App(connector=PsycopgConnector(conninfo=url()), worker_defaults=WORKER_DEFAULTS)
BODIES = {
    each.__name__: app.task(name=each.__name__, retry=False if IS_DEFAULT else RetryStrategy(max_attempts=3))(
        each
    )
    for each in (bodies.nothing, bodies.stamp, bodies.slow, bodies.held)
}

if not IS_DEFAULT:

    @app.periodic(cron=f"* * * * * */{PATIENCE_S}")
    @app.task(queueing_lock="retry_stalled", pass_context=True)
    async def retry_stalled(context: JobContext, timestamp: int) -> None:  # noqa: ARG001
        """What the documentation has a user add, so that jobs of dead workers are tried again."""
        manager = context.app.job_manager
        for job in await manager.get_stalled_jobs(seconds_since_heartbeat=PATIENCE_S):
            await manager.retry_job(job)


def prepare() -> None:
    """Make its tables."""
    app.open()
    app.schema_manager.apply_schema()


def enqueue(body: str, *arguments: str) -> int:
    """Enqueue a call; a handle of it."""
    named = {"name": arguments[0]} if arguments else {}
    job: int = BODIES[body].defer(**named)
    return job


def enqueue_many(body: str, count: int) -> None:
    """Enqueue so many calls in one statement."""
    BODIES[body].batch_defer(*({} for _ in range(count)))


def worker(concurrency: int) -> list[str]:
    """The command of a worker that runs so many tasks at a time."""
    command = ["--app", "queues.on_procrastinate.app", "worker", "--concurrency", str(concurrency)]
    return [sys.executable, "-m", "procrastinate", *command]


def is_finished(handle: int) -> bool:
    """Whether the queue holds that the task has ended well."""
    return app.job_manager.get_job_status(handle).value == "succeeded"
