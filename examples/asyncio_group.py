"""With asyncio: every owned resource has a task of its own. Two nodes in one process, for a few seconds.

    python examples/asyncio_group.py --seconds 5

A node joins while the other is at work, and takes half of the feeds over. On its own a node would just be
``await group.run()``, which takes part until SIGINT or SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
from pathlib import Path

import rebalanser

FEEDS = [f"feed-{number}" for number in range(6)]
POLL_S = 0.5


def node(name: str, registry: str) -> rebalanser.AsyncGroup:
    """A node of the group that polls the feeds it owns."""
    group = rebalanser.AsyncGroup("feeds", registry, node=name)

    @group.worker
    async def poll(owned: rebalanser.Owned) -> None:
        print(f"{name} begins to poll {owned.resource} (token {owned.token})")
        while owned.still_mine():
            # A request to the feed would be here. Waiting like this ends at once when the feed has to go.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(owned.until_stop_requested(), POLL_S)
        print(f"{name} has left {owned.resource}")

    return group


async def run(registry: str, seconds: float) -> None:
    """Run one node, then two, then one again."""
    async with node("a", registry) as first:
        await first.wait_settled()
        await asyncio.sleep(seconds / 3)
        async with node("b", registry) as second:
            await second.wait_settled()
            await first.wait_settled()
            print(f"a owns {sorted(first.resources)}, b owns {sorted(second.resources)}")
            await asyncio.sleep(seconds / 3)
        await first.wait_settled()
        await asyncio.sleep(seconds / 3)


def main() -> None:
    """Add the feeds, and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--registry", metavar="URL", help="default: a SQLite file that is deleted afterwards")
    parser.add_argument("--seconds", type=float, default=6)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        registry = arguments.registry or f"sqlite:///{Path(folder) / 'groups.db'}"
        with rebalanser.Admin("feeds", registry) as admin:
            admin.add(FEEDS)
        asyncio.run(run(registry, arguments.seconds))


if __name__ == "__main__":
    main()
