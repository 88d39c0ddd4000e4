"""One node process of a benchmark: obeys lines on standard input, tells events as JSON lines.

Times are ``time.monotonic()``, which all processes of a host share.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from collections.abc import Mapping, Sequence

import rebalanser
import rebalanser.group
from rebalanser.core.group import Answered, Effect, Event, Node
from rebalanser.core.group.messages import Alive, Joined, Published
from rebalanser.registry import Capabilities, GroupStore, Registry, RegistryUrl, open_backend
from rebalanser.registry.contract import LeaseAge, Reply, Request, Sink, Target, Watch

_printing = threading.Lock()


class CountingRegistry(Registry):
    """A registry that counts the requests it passes on."""

    sent = 0

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    @property
    def capabilities(self) -> Capabilities:
        """What the registry behind can do."""
        return self._registry.capabilities

    def execute(self, request: Request, timeout_s: float) -> Reply:
        """Count a request and pass it on."""
        CountingRegistry.sent += 1
        return self._registry.execute(request, timeout_s)

    def watch(self, target: Target, from_revision: int, sink: Sink) -> Watch:
        """Watch the registry behind."""
        return self._registry.watch(target, from_revision, sink)

    def lease_ages(self, leases: Sequence[int], timeout_s: float) -> Mapping[int, LeaseAge]:
        """Ask the registry behind."""
        return self._registry.lease_ages(leases, timeout_s)

    def close(self) -> None:
        """Close the registry behind."""
        self._registry.close()


def open_counted(url: str | RegistryUrl, timeout_s: float) -> Registry | GroupStore:
    """Open a store; if it is a registry, its requests are counted."""
    opened = open_backend(url, timeout_s)
    return CountingRegistry(opened) if isinstance(opened, Registry) else opened


class Heartbeats:
    """Longest seconds between two proofs of life of a node of this process, and of a turn of its loop."""

    def __init__(self) -> None:
        self._gap_s = self._turn_s = 0.0
        self._proven: dict[Node, float] = {}
        handle = Node.handle

        def timed(node: Node, event: Event, now: float) -> list[Effect]:
            if isinstance(event, Answered) and isinstance(event.outcome, Alive | Joined):
                if isinstance(event.outcome, Alive):
                    self._gap_s = max(self._gap_s, now - self._proven.get(node, now))
                self._proven[node] = now
            began_s = time.thread_time()
            effects = handle(node, event, now)
            self._turn_s = max(self._turn_s, time.thread_time() - began_s)
            if isinstance(event, Answered) and isinstance(event.outcome, Published):
                tell("published")
            return effects

        Node.handle = timed  # type: ignore[method-assign]

    def taken(self) -> dict[str, float]:
        """Both since the last call; a proof that is still waited for counts as if it came now."""
        now = time.monotonic()
        open_s = max((now - at for node, at in tuple(self._proven.items()) if node.session), default=0.0)
        taken = {"gap_s": max(self._gap_s, open_s), "turn_s": self._turn_s}
        self._gap_s = self._turn_s = 0.0
        return taken


def tell(event: str, **fields: object) -> None:
    """Print one event."""
    with _printing:
        print(json.dumps({"event": event, "at": time.monotonic(), **fields}), flush=True)


def cpu_s() -> float:
    """Processor time of this process so far, in seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Take part in a group as told."""
    url, name, label, lease_ttl_s = sys.argv[1:5]
    heartbeats = Heartbeats()
    rebalanser.group.open_backend = open_counted
    group = rebalanser.Group(
        name, url, node=label, settings=rebalanser.Settings(lease_ttl_s=float(lease_ttl_s))
    )

    @group.on_start
    def start(owned: list[rebalanser.Owned]) -> None:
        tell("started", resources=[each.resource for each in owned])

    @group.on_stop
    def stop(owned: list[rebalanser.Owned]) -> None:
        tell("stopped", resources=[each.resource for each in owned])

    tell("ready", pid=os.getpid())
    for line in sys.stdin:
        command = line.strip()
        if command == "start":
            tell("starting")
            group.start()
            tell("registered")
        elif command == "stop":
            tell("stopping")
            group.stop()
            tell("left")
        elif command == "usage":
            tell("usage", cpu_s=cpu_s(), requests=CountingRegistry.sent, **heartbeats.taken())


if __name__ == "__main__":
    main()
