"""The demo's worker: that of the example, which can be stopped at the worst moment, and is watched.

On SIGUSR1 it stops itself (SIGSTOP) right before its next write, a batch in its hands, as a host does that
is suspended, swaps or is migrated just then. The group does not know; the demo wakes it up much later.
"""

from __future__ import annotations

import argparse
import signal
import threading
from contextlib import closing
from pathlib import Path

from consumer_group_sharding import GROUP, FencedSink, consume
from stdlib_stream import Batch, Stream

import rebalanser
from rebalanser.testing.witness import Witness


class StoppableSink(FencedSink):
    """A sink that stops the process between reading and writing, when asked to; its fence can be off."""

    def __init__(self, path: Path, writer: str, *, fenced: bool) -> None:
        super().__init__(path, writer)
        self._fenced = fenced
        self.stop_asked = False

    def accept(self, partition: str, token: int, batch: Batch) -> None:
        """Accept the batch, now or after a very long pause."""
        # The lock is held so that no other thread is stopped within a transaction, which would hold up the
        # other processes: SQLite's locks, unlike leases, do not end.
        with self.lock:
            if self.stop_asked:
                self.stop_asked = False
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            super().accept(partition, token, batch)

    def is_stale(self, token: int, stored_token: int) -> bool:
        """Whether the fence is on and the write stale."""
        return self._fenced and super().is_stale(token, stored_token)


def main() -> None:
    """Take part until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--registry", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--without-fence", action="store_true")
    arguments = parser.parse_args()

    stream = Stream(arguments.folder)
    witness = Witness(arguments.folder / "witness.jsonl")
    group = rebalanser.Group(GROUP, arguments.registry, node=arguments.node)
    with closing(
        StoppableSink(arguments.folder / "sink.db", writer=arguments.node, fenced=not arguments.without_fence)
    ) as sink:

        def stop_before_next_write(*_: object) -> None:
            sink.stop_asked = True

        signal.signal(signal.SIGUSR1, stop_before_next_write)

        @group.worker
        def on_partition(owned: rebalanser.Owned) -> None:
            with witness.watching(owned.resource, arguments.node, owned.token):
                consume(owned, stream, sink)

        group.run()


if __name__ == "__main__":
    main()
