"""Workers share the partitions of a stream, and write what they make of it through a fenced sink.

Start a producer and as many workers as you like, stop some, kill some, start others:

    python examples/consumer_group_sharding.py produce &
    python examples/consumer_group_sharding.py worker --node a &
    python examples/consumer_group_sharding.py worker --node b &

and when the producer has stopped and the workers have caught up, see that no line was lost and none was
counted twice:

    python examples/consumer_group_sharding.py check

Everything meets in the file ``groups.db``. With several hosts the only thing to change is the registry, as
in ``--registry etcd://10.0.0.1:2379,10.0.0.2:2379,10.0.0.3:2379 worker --node a`` (and, of course, a stream
and a sink that all of them can reach).
"""

from __future__ import annotations

import argparse
import os
import signal
import sqlite3
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar

from stdlib_stream import Batch, Stream

import rebalanser
from rebalanser.errors import RebalanserError

GROUP = "line-counters"
IDLE_S = 0.1

SCHEMA = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
CREATE TABLE IF NOT EXISTS fence (partition TEXT PRIMARY KEY, token INTEGER, position INTEGER);
CREATE TABLE IF NOT EXISTS counts (file TEXT PRIMARY KEY, lines INTEGER, words INTEGER);
CREATE TABLE IF NOT EXISTS accepted (
    partition TEXT, first INTEGER, last INTEGER, lines INTEGER, token INTEGER, writer TEXT
);
CREATE TABLE IF NOT EXISTS refused (partition TEXT, token INTEGER, stored_token INTEGER, writer TEXT);
"""

ResultT = TypeVar("ResultT")


class Refused(Exception):
    """The partition has another owner now: its token is larger. Stop touching the partition."""


class FencedSink:
    """Where the output goes: a database that knows of each partition the newest owner's token.

    A process can be paused at any moment and for any time, also between asking ``still_mine()`` and writing.
    So it is the sink that has the last word: output, position and token change together in one transaction,
    and a token smaller than the stored one changes nothing. For the same reason it does not matter here that
    a power failure may undo the last transactions (``synchronous = NORMAL``): they are undone as a whole.
    """

    def __init__(self, path: Path, writer: str) -> None:
        self._writer = writer
        # One connection for all threads of this process. They take turns, which SQLite has them do anyway.
        self.lock = threading.RLock()
        self._database = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
        self._database.executescript(SCHEMA)

    def close(self) -> None:
        """Close the connection."""
        with self.lock:
            self._database.close()

    def claim(self, partition: str, token: int) -> int:
        """Put up the fence, and say where the partition goes on.

        The order matters. A position read before the fence stands may be out of date at once: the owner
        before could still write, with a token that nothing larger has replaced yet.

        Raises:
            Refused: there is a newer owner already.
        """
        return self._shim(partition, token, lambda _database, position: position)

    def accept(self, partition: str, token: int, batch: Batch) -> None:
        """Add the counts of a batch, and move the position behind it.

        Raises:
            Refused: there is a newer owner; nothing was written.
        """
        lines = Counter(file for file, _ in batch.records)
        words: Counter[str] = Counter()
        for file, text in batch.records:
            words[file] += len(text.split())

        def write(database: sqlite3.Connection, _position: int) -> None:
            database.executemany(
                "INSERT INTO counts VALUES (?, ?, ?) ON CONFLICT (file) DO UPDATE "
                "SET lines = lines + excluded.lines, words = words + excluded.words",
                [(file, lines[file], words[file]) for file in lines],
            )
            database.execute(
                "INSERT INTO accepted VALUES (?, ?, ?, ?, ?, ?)",
                (partition, batch.first, batch.last, len(batch.records), token, self._writer),
            )
            database.execute("UPDATE fence SET position = ? WHERE partition = ?", (batch.last, partition))

        self._shim(partition, token, write)

    def is_stale(self, token: int, stored_token: int) -> bool:
        """Whether a write with ``token`` comes from an owner that has been replaced."""
        return token < stored_token

    def _shim(
        self, partition: str, token: int, write: Callable[[sqlite3.Connection, int], ResultT]
    ) -> ResultT:
        with self._transaction() as database:
            row = database.execute("SELECT token, position FROM fence WHERE partition = ?", (partition,))
            stored_token, position = row.fetchone() or (0, 0)
            if not self.is_stale(token, stored_token):
                database.execute(
                    "INSERT INTO fence VALUES (?, ?, ?) "
                    "ON CONFLICT (partition) DO UPDATE SET token = excluded.token",
                    (partition, token, position),
                )
                return write(database, position)
            database.execute(
                "INSERT INTO refused VALUES (?, ?, ?, ?)", (partition, token, stored_token, self._writer)
            )
        raise Refused(f"{partition}: token {token} is older than {stored_token}")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing; IMMEDIATE, so that nobody writes between the check and the output."""
        with self.lock:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")


def consume(owned: rebalanser.Owned, stream: Stream, sink: FencedSink) -> None:
    """Work on one partition for as long as it is ours. Runs in a thread of its own."""
    try:
        position = sink.claim(owned.resource, owned.token)
        while owned.still_mine():
            batch = stream.read(owned.resource, position)
            if not batch.records:
                # Waiting on this event instead of sleeping: the partition can be handed over at once.
                owned.stop_requested.wait(IDLE_S)
                continue
            sink.accept(owned.resource, owned.token, batch)
            position = batch.last
    except Refused as refused:
        # Not a failure of this program: the next owner is at work already, and nothing was written.
        print(f"refused: {refused}", flush=True)


def work(registry: str, node: str, stream: Stream, sink: FencedSink) -> None:
    """Take part in the group until SIGINT or SIGTERM; then hand over and leave."""
    group = rebalanser.Group(GROUP, registry, node=node)

    @group.worker
    def on_partition(owned: rebalanser.Owned) -> None:
        print(f"{node}: {owned.resource} arrived with token {owned.token}", flush=True)
        consume(owned, stream, sink)
        print(f"{node}: {owned.resource} is free", flush=True)

    group.run()


def produce(registry: str, stream: Stream, lines_per_s: float) -> None:
    """Make the partitions known to the group, then fill them until SIGINT or SIGTERM."""
    with rebalanser.Admin(GROUP, registry) as admin:
        admin.add(stream.partitions)
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    print("filling the stream until Ctrl-C", file=sys.stderr, flush=True)
    stream.produce(lines_per_s, stopped)


def check(stream: Stream, sink_path: Path) -> int:
    """Print what became of the stream; 0 if every line was counted exactly once."""
    from comparison import compare  # noqa: PLC0415 - the workers need none of it

    found = compare(stream, sink_path)
    print("\n".join(found.lines()))
    return 0 if found.exact else 1


def parse_arguments() -> argparse.Namespace:
    """What is to be done, and where."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--registry", default=os.environ.get("REBALANSER_REGISTRY", "sqlite:///groups.db"), metavar="URL"
    )
    parser.add_argument("--folder", type=Path, default=Path("stream"), help="of the stream and the sink")
    commands = parser.add_subparsers(dest="command", required=True)
    producer = commands.add_parser("produce", help="fill the stream")
    producer.add_argument("--lines-per-second", type=float, default=5000)
    worker = commands.add_parser("worker", help="take part in the group")
    worker.add_argument("--node", help="a name for this worker; default: host, process id and a random part")
    commands.add_parser("check", help="compare the output with a direct count")
    return parser.parse_args()


def main() -> int:
    """Do what the command line says."""
    arguments = parse_arguments()
    stream = Stream(arguments.folder)
    sink_path = arguments.folder / "sink.db"
    try:
        match arguments.command:
            case "produce":
                produce(arguments.registry, stream, arguments.lines_per_second)
            case "worker":
                arguments.folder.mkdir(parents=True, exist_ok=True)
                node = arguments.node or f"worker-{os.getpid()}"
                with closing(FencedSink(sink_path, writer=node)) as sink:
                    work(arguments.registry, node, stream, sink)
            case "check":
                return check(stream, sink_path)
    except (RebalanserError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
