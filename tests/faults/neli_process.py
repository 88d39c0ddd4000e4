"""One process of a NELI group: what the fault tests start, stop, kill and pause.

It is told what to do by one JSON object as its argument and by lines on standard input, and tells what
happens as JSON lines on standard output. It asks ``is_leader`` a thousand times a second, unless it is told
otherwise, and keeps the first and last instant of the answer yes in a file, which outlives it. It ends when
its standard input does.
"""

from __future__ import annotations

import json
import mmap
import os
import sqlite3
import struct
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from rebalanser.core.neli.settings import NeliSettings
from rebalanser.errors import RebalanserError
from rebalanser.neli import Neli
from rebalanser.testing.waiting import PATIENCE_S
from rebalanser_kafka.neli import candidate
from rebalanser_kafka.neli.consumer import GroupConsumer

SPAN = struct.Struct("dd")
SAMPLE_EVERY_S = 0.001
WRITE_EVERY_S = 0.02
SINK = "CREATE TABLE IF NOT EXISTS sink (role TEXT PRIMARY KEY, token INTEGER NOT NULL)"
FENCED_WRITE = (
    "INSERT INTO sink VALUES (?, ?) ON CONFLICT (role) DO UPDATE SET token = excluded.token "
    "WHERE excluded.token >= token"
)
unstuck = threading.Event()


def tell(event: str, **fields: Any) -> None:
    """Write one line, in one piece, so that lines of several threads never mix."""
    os.write(1, json.dumps({"event": event, "at": time.monotonic(), **fields}).encode() + b"\n")


class StickyConsumer(GroupConsumer):
    """A consumer whose poll hangs when the test says so, as on a machine that swaps."""

    def poll(self, timeout_s: float) -> None:
        unstuck.wait()
        super().poll(timeout_s)


def sample(neli: Neli, role: str, path: Path, every_s: float) -> None:
    """Keep the span of the answer yes: after the first was given, before the last was asked for."""
    path.write_bytes(bytes(SPAN.size))
    leading = False
    with path.open("r+b") as file, mmap.mmap(file.fileno(), SPAN.size) as span:
        since = until = 0.0
        while True:
            before = time.monotonic()
            if neli.is_leader(role):
                since, until = (since, before) if leading else (time.monotonic(), before)
                span[:] = SPAN.pack(since, until)
                leading = True
            elif leading:
                tell("led", role=role, since=since, until=until)
                span[:] = SPAN.pack(0.0, 0.0)
                leading = False
            time.sleep(every_s)


def write_until_refused(path: str, role: str, token: int) -> None:
    """Write on and on, without asking whether the role is still led: the sink alone protects."""
    with closing(sqlite3.connect(path, timeout=PATIENCE_S, isolation_level=None)) as sink:
        sink.execute(SINK)
        while sink.execute(FENCED_WRITE, (role, token)).rowcount:
            time.sleep(WRITE_EVERY_S)
    tell("refused", role=role, token=token)


def listen(neli: Neli) -> None:
    for line in sys.stdin:
        match line.strip():
            case "stop":
                neli.request_stop()
            case "get stuck":
                unstuck.clear()
            case "go on":
                unstuck.set()
    os._exit(3)


def main() -> int:
    order = json.loads(sys.argv[1])
    unstuck.set()
    candidate.GroupConsumer = StickyConsumer  # type: ignore[attr-defined]
    neli = Neli(
        order["topic"],
        order["group"],
        [order["role"]],
        kafka=order["kafka"],
        mode=order["mode"],
        settings=NeliSettings(**order["settings"]),
        partitions=1,
    )

    @neli.on_induced
    def induced(role: int | str, token: int) -> None:
        tell("induced", role=role, token=token)
        if "sink" in order:
            writing = (order["sink"], str(role), token)
            threading.Thread(target=write_until_refused, args=writing, daemon=True).start()

    neli.on_lapsed(lambda role, token: tell("lapsed", role=role, token=token))
    neli.on_fenced(lambda role, token: tell("fenced", role=role, token=token))
    neli.on_fact(lambda fact: tell("fact", kind=fact.kind.value, detail=dict(fact.detail)))
    threading.Thread(target=listen, args=(neli,), daemon=True).start()
    sampling = (neli, order["role"], Path(order["span"]), order.get("sample_every_s", SAMPLE_EVERY_S))
    threading.Thread(target=sample, args=sampling, daemon=True).start()
    try:
        neli.run()
    except RebalanserError as error:
        tell("error", type=type(error).__name__, message=str(error))
        return 1
    tell("end")
    return 0


if __name__ == "__main__":
    sys.exit(main())
