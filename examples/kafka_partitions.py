"""Workers share the partitions of a Kafka topic; the group that says who reads which is on etcd or SQLite.

Start a producer and as many workers as you like, stop some, kill some, start others:

    python examples/kafka_partitions.py --kafka HOST:PORT produce &
    python examples/kafka_partitions.py --kafka HOST:PORT worker --node a &
    python examples/kafka_partitions.py --kafka HOST:PORT worker --node b &

and when the producer has stopped and the workers have caught up, see that every record was counted once:

    python examples/kafka_partitions.py --kafka HOST:PORT check

Kafka could share the partitions itself, by a consumer group. What it does not give is a token to send with
the output: a consumer that was paused while others took its partition over writes once more when it wakes up,
and nobody can tell. Here a worker reads its partitions by ``assign()``, the sink refuses the token of an
earlier owner, and the position is kept in the sink, in the transaction that writes the output.
"""

from __future__ import annotations

import argparse
import os
import signal
import sqlite3
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from confluent_kafka import Consumer, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from consumer_group_sharding import FencedSink, Refused
from stdlib_stream import Batch, lines_of, sources

import rebalanser
from rebalanser.errors import RebalanserError

GROUP = "record-counters"
REQUEST_TIMEOUT_S = 10.0
POLL_S = 0.1
MAX_BATCH = 1000
TICK_S = 0.1


def resource_of(partition: int) -> str:
    """What a partition is called in the group."""
    return f"partition-{partition:04}"


def partition_of(resource: str) -> int:
    """The partition that a resource of the group stands for."""
    return int(resource.rpartition("-")[2])


class Topic:
    """A topic, and where it is."""

    def __init__(self, kafka: str, name: str) -> None:
        self.name = name
        self._kafka = kafka

    def reader(self) -> Consumer:
        """A consumer that is told what to read: it joins no group of Kafka's, and commits nothing."""
        return Consumer(
            {
                "bootstrap.servers": self._kafka,
                "group.id": GROUP,  # has to be given, and is used for nothing
                "enable.auto.commit": False,
                "auto.offset.reset": "error",  # records that are gone are told, not skipped
            }
        )

    def make(self, partitions: int) -> None:
        """Make the topic.

        Raises:
            KafkaException: it cannot be made, or there is one already.
        """
        admin = AdminClient({"bootstrap.servers": self._kafka})
        made = admin.create_topics([NewTopic(self.name, partitions)], request_timeout=REQUEST_TIMEOUT_S)
        made[self.name].result(REQUEST_TIMEOUT_S)

    def partitions(self) -> list[int]:
        """The numbers of its partitions.

        Raises:
            KafkaException: no answer, or there is no such topic.
        """
        found = AdminClient({"bootstrap.servers": self._kafka}).list_topics(timeout=REQUEST_TIMEOUT_S)
        if self.name not in found.topics:
            raise LookupError(f"there is no topic {self.name} at {self._kafka}")
        return sorted(found.topics[self.name].partitions)

    def produce(self, lines_per_s: float, stopped: threading.Event) -> None:
        """Write the lines of the standard library, keyed by their file, until ``stopped`` is set."""
        producer = Producer({"bootstrap.servers": self._kafka, "enable.idempotence": True, "linger.ms": 20})
        written = 0
        for file in sources():
            for line in lines_of(file):
                producer.produce(self.name, key=file.encode(), value=line.encode())
                written += 1
                if written % max(1, round(lines_per_s * TICK_S)) == 0:
                    producer.poll(0)
                    if stopped.wait(TICK_S):
                        producer.flush(REQUEST_TIMEOUT_S)
                        return
        producer.flush(REQUEST_TIMEOUT_S)

    def records(self) -> Iterator[Message]:
        """Every record that the topic holds now, by one reader: what the workers should have counted.

        Raises:
            TimeoutError: a record does not come.
        """
        with closing(self.reader()) as reader:
            for partition in self.partitions():
                there = TopicPartition(self.name, partition)
                first, end = reader.get_watermark_offsets(there, timeout=REQUEST_TIMEOUT_S)
                reader.assign([TopicPartition(self.name, partition, first)])
                while first < end:
                    message = reader.poll(REQUEST_TIMEOUT_S)
                    if message is None:
                        raise TimeoutError(f"no record from partition {partition} of {self.name}")
                    first = offset_of(*good([message])) + 1
                    yield message


def good(messages: list[Message]) -> list[Message]:
    """The messages, if none of them tells of an error.

    Raises:
        KafkaException: the first error.
    """
    for message in messages:
        if (error := message.error()) is not None:
            raise KafkaException(error)
    return messages


def offset_of(message: Message) -> int:
    """Where a message that was read stands."""
    offset = message.offset()
    assert offset is not None
    return offset


def text_of(message: Message) -> tuple[str, str]:
    """The file and the line that a record holds."""
    return (message.key() or b"").decode(), (message.value() or b"").decode()


def consume(owned: rebalanser.Owned, topic: Topic, sink: FencedSink) -> None:
    """Work on one partition for as long as it is ours. Runs in a thread of its own."""
    try:
        # First the fence, then the position: the owner before may have written until the fence stood.
        position = sink.claim(owned.resource, owned.token)
        with closing(topic.reader()) as reader:
            reader.assign([TopicPartition(topic.name, partition_of(owned.resource), position)])
            while owned.still_mine():
                messages = good(reader.consume(MAX_BATCH, POLL_S))
                if not messages:
                    continue
                after = offset_of(messages[-1]) + 1
                batch = Batch(position, after, tuple(map(text_of, messages)))
                sink.accept(owned.resource, owned.token, batch)
                position = after
    except Refused as refused:
        # Not a failure of this program: the next owner is at work already, and nothing was written.
        print(f"refused: {refused}", flush=True)


def work(registry: str, node: str, topic: Topic, sink: FencedSink) -> None:
    """Take part in the group until SIGINT or SIGTERM; then hand over and leave."""
    group = rebalanser.Group(GROUP, registry, node=node)

    @group.worker
    def on_partition(owned: rebalanser.Owned) -> None:
        print(f"{node}: {owned.resource} arrived with token {owned.token}", flush=True)
        consume(owned, topic, sink)
        print(f"{node}: {owned.resource} is free", flush=True)

    group.run()


def produce(registry: str, topic: Topic, partitions: int, lines_per_s: float) -> None:
    """Make the topic, its partitions known to the group, and fill it until SIGINT or SIGTERM."""
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    topic.make(partitions)
    with rebalanser.Admin(GROUP, registry) as admin:
        admin.add(map(resource_of, range(partitions)))
    topic.produce(lines_per_s, stopped)


def check(topic: Topic, sink_path: Path) -> int:
    """Compare what the workers counted with what the topic holds; 0 if every record was counted once."""
    lines: Counter[str] = Counter()
    words: Counter[str] = Counter()
    for message in topic.records():
        file, line = text_of(message)
        lines[file] += 1
        words[file] += len(line.split())
    with closing(sqlite3.connect(f"file:{sink_path}?mode=ro", uri=True)) as sink:
        counted = {file: counts for file, *counts in sink.execute("SELECT file, lines, words FROM counts")}
        (processed,) = sink.execute("SELECT coalesce(sum(lines), 0) FROM accepted").fetchone()
        (refused,) = sink.execute("SELECT count(*) FROM refused").fetchone()
    wrong = [file for file in lines.keys() | counted if counted.get(file) != [lines[file], words[file]]]
    print(f"records in the topic    {lines.total():>12,}")
    print(f"records counted         {processed:>12,}")
    print(f"files counted wrongly   {len(wrong):>12,}")
    print(f"stale writes refused    {refused:>12,}")
    return 0 if processed == lines.total() and not wrong else 1


def parse_arguments() -> argparse.Namespace:
    """What is to be done, and where."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kafka", default=os.environ.get("KAFKA", "127.0.0.1:9092"), metavar="HOST:PORT")
    parser.add_argument("--topic", default="lines")
    parser.add_argument(
        "--registry", default=os.environ.get("REBALANSER_REGISTRY", "sqlite:///groups.db"), metavar="URL"
    )
    parser.add_argument("--sink", type=Path, default=Path("sink.db"), help="where the output goes")
    commands = parser.add_subparsers(dest="command", required=True)
    producer = commands.add_parser("produce", help="make the topic and fill it")
    producer.add_argument("--partitions", type=int, default=12)
    producer.add_argument("--lines-per-second", type=float, default=5000)
    worker = commands.add_parser("worker", help="take part in the group")
    worker.add_argument("--node", help="a name for this worker; default: its process id")
    commands.add_parser("check", help="compare the output with the topic")
    return parser.parse_args()


def main() -> int:
    """Do what the command line says."""
    arguments = parse_arguments()
    topic = Topic(arguments.kafka, arguments.topic)
    try:
        match arguments.command:
            case "produce":
                produce(arguments.registry, topic, arguments.partitions, arguments.lines_per_second)
            case "worker":
                node = arguments.node or f"worker-{os.getpid()}"
                with closing(FencedSink(arguments.sink, writer=node)) as sink:
                    work(arguments.registry, node, topic, sink)
            case "check":
                return check(topic, arguments.sink)
    except (RebalanserError, KafkaException, LookupError, OSError, sqlite3.Error) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
