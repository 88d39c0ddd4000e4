"""The crash matrix: what each queue makes of its workers' death and of their pause.

``python benchmarks/crash_matrix.py [--queues NAME,NAME]`` prints a table of what happened, and says which
queues are left out here. Twelve tasks of 3 s, two of them running; every process of the worker is killed with
``kill -9``, and a new worker is started at once. Then, for the last column, one task whose worker is stopped
(SIGSTOP) until another worker has taken it, and goes on while that one works: does the queue take the end of
the first for the task's? The tasks sleep, so all queues are tried at the same time. It takes about five
minutes; nothing is asserted here.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from queues.bodies import SLOW_S
from queues.catalogue import PEERS, Peer
from queues.drive import SETTLE_S, TASKS
from queues.place import PATIENCE_S
from queues.runs import missing, run
from rich.console import Console
from rich.table import Table

BUFFER_S = 1.0
"""Of Skuld's claims: a tenth of their time."""
STARTING_S = 5.0
"""What a new worker may take to start, beside the time of claims."""
CLAIM_S = PATIENCE_S + PATIENCE_S + BUFFER_S + TASKS / 2 * SLOW_S + STARTING_S
"""The lease, the claim's time, its buffer, and the work itself."""
console = Console()


def tried(peer: Peer) -> tuple[dict[str, Any], str] | str:
    """What became of its tasks, and of a stale worker's end; or what went wrong."""
    try:
        return run(peer, "crash"), run(peer, "stale")["stale"]
    except Exception as error:
        return repr(error)


def row(peer: Peer, crash: dict[str, Any], stale: str) -> list[str]:
    """A line of the table."""
    ended = crash["ended"]
    in_time = [f"{sum(at <= limit for at in ended)}" for limit in (CLAIM_S, SETTLE_S)]
    last = f"{max(ended):.0f} s" if ended else "none"
    more = f", {crash['more than twice']} of them more often" if crash["more than twice"] else ""
    return [peer.name, *in_time, last, f"{crash['twice']}{more}", stale]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--queues", default=",".join(each.name for each in PEERS))
    chosen = set(options.parse_args().queues.split(","))
    peers = []
    for peer in PEERS:
        if peer.name in chosen:
            if lack := missing(peer):
                console.print(f"{peer.name} is left out: {lack}")
            else:
                peers.append(peer)
    table = Table(
        "queue", f"ended within {CLAIM_S:.0f} s", f"within {SETTLE_S:.0f} s", "last end",
        "begun twice", "stale end taken", title=f"{TASKS} tasks of {SLOW_S:g} s, the worker killed",
    )  # fmt: skip
    with ThreadPoolExecutor(max(1, len(peers))) as at_once:
        for peer, result in zip(peers, at_once.map(tried, peers), strict=True):
            if isinstance(result, str):
                console.print(f"{peer.name} could not be tried: {result}", markup=False)
            else:
                table.add_row(*row(peer, *result))
    console.print(table)
    for peer in peers:
        console.print(f"{peer.name}: {peer.settings}", markup=False)
    console.print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
