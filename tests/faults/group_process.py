"""One node of a group in a process of its own: what the fault tests start, stop, kill and pause.

It is told what to do by one JSON object as its argument and by lines on standard input, and tells what
happens as JSON lines on standard output, each with the instant in seconds of the monotonic clock. It ends
when its standard input does, so that no test leaves it behind.
"""

from __future__ import annotations

import ctypes
import json
import os
import sqlite3
import sys
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

from rebalanser import Group, Settings
from rebalanser.errors import Forked, RebalanserError
from rebalanser.testing.waiting import PATIENCE_S
from rebalanser.testing.witness import Witness

if TYPE_CHECKING:
    from rebalanser import Owned
    from rebalanser.core.group import Fact

WRITE_EVERY_S = 0.02
SINK = "CREATE TABLE IF NOT EXISTS sink (resource TEXT PRIMARY KEY, token INTEGER NOT NULL)"
FENCED_WRITE = (
    "INSERT INTO sink VALUES (?, ?) ON CONFLICT (resource) DO UPDATE SET token = excluded.token "
    "WHERE excluded.token >= token"
)


def tell(event: str, **fields: Any) -> None:
    """Write one line, in one piece, so that lines of several threads never mix."""
    line = json.dumps({"event": event, "at": time.monotonic(), **fields})
    os.write(1, line.encode() + b"\n")


def described(owned: list[Owned]) -> dict[str, int]:
    return {each.resource: each.token for each in owned}


class FencedSink:
    """An outside world that checks tokens: a smaller one than it has seen is refused."""

    def __init__(self, path: str) -> None:
        self._path = path
        with closing(self._connected()) as connection:
            connection.execute(SINK)

    def _connected(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=PATIENCE_S, isolation_level=None)
        connection.execute("PRAGMA synchronous = OFF")  # of use to a test only, and held for a moment only
        return connection

    def write_until_refused(self, owned: Owned, left: threading.Event) -> None:
        """Write on and on, without asking whether the resource is still owned: the token alone protects."""
        with closing(self._connected()) as connection:
            while not left.wait(WRITE_EVERY_S):
                if connection.execute(FENCED_WRITE, (owned.resource, owned.token)).rowcount == 0:
                    tell("refused", resource=owned.resource, token=owned.token)
                    return


class Node:
    """The host application of one node."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._start_s: float = order.get("start_s", 0.0)
        self._stop_s: float = order.get("stop_s", 0.0)
        self._stuck = threading.Event()
        self._unstuck = threading.Event()
        self._left: dict[str, threading.Event] = {}
        self._witness = Witness(order["witness"])
        self._sink = FencedSink(order["sink"]) if "sink" in order else None
        self.group = Group(
            order["group"], order["url"], node=order["node"], settings=Settings(**order["settings"])
        )
        self.group.on_start(self.on_start)
        self.group.on_stop(self.on_stop)
        self.group.on_fact(self.on_fact)

    def on_start(self, owned: list[Owned]) -> None:
        tell("start", owned=described(owned))
        for each in owned:
            self._witness.entered(each.resource, self.group.node, each.token)
            left = self._left[each.resource] = threading.Event()
            if self._sink is not None:
                threading.Thread(
                    target=self._sink.write_until_refused, args=(each, left), daemon=True
                ).start()
        time.sleep(self._start_s)
        tell("started", owned=described(owned))

    def on_stop(self, owned: list[Owned]) -> None:
        deadline = min((each.deadline for each in owned), default=None)
        tell("stop", owned=described(owned), deadline=deadline)
        time.sleep(self._stop_s)
        if self._stuck.is_set():
            self._unstuck.wait()
        for each in owned:
            self._left.pop(each.resource).set()
            self._witness.returned(each.resource, self.group.node, each.token)
        tell("stopped", owned=described(owned), deadline=deadline)

    def on_fact(self, fact: Fact) -> None:
        tell("fact", kind=fact.kind.value, node=fact.node, resource=fact.resource, detail=dict(fact.detail))

    def obey(self, line: str) -> None:
        match line.strip():
            case "hold the interpreter's lock":
                tell("obeys")
                ctypes.PyDLL(None).pause()
            case "get stuck":
                self._stuck.set()
                tell("obeys")
            case "fork":
                self._fork()
            case "look":
                tell("looks", mine={r: o.still_mine() for r, o in self.group.resources.items()})

    def _fork(self) -> None:
        """Try everything in a child, and tell what came of it."""
        owned = list(self.group.resources.values())
        child = os.fork()
        if child == 0:
            try:
                refused = [name for name in ("stop", "start", "wait_settled") if self._refuses(name)]
                tell("child", still_mine=[each.still_mine() for each in owned], refused=refused)
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        tell("forked", status=status)

    def _refuses(self, name: str) -> bool:
        try:
            getattr(self.group, name)()
        except Forked:
            return True
        return False


def listen(node: Node) -> None:
    for line in sys.stdin:
        node.obey(line)
    os._exit(3)


def main() -> int:
    node = Node(json.loads(sys.argv[1]))
    threading.Thread(target=listen, args=(node,), daemon=True).start()
    try:
        node.group.run()
    except RebalanserError as error:
        tell("error", type=type(error).__name__, message=str(error))
        return 1
    tell("end")
    return 0


if __name__ == "__main__":
    sys.exit(main())
