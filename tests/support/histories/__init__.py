"""Histories that never happened: healthy ones, and ones in which it is known what is wrong.

**Theory of operation.** A seed makes a ``World``: hosts whose clocks are off, processes that write the
product's own ``Record``, a registry that counts revisions, and a true time that only
the world knows. A healthy life (``histories.healthy``) passes in it, and dramas are
played beside it, each with a resource of its own, so that what must be found of one doesn't depend on the
others. A drama is a defect or, as important, a near miss of which nothing may be found. What must be found is
``Planted``, in the audit's words. Last, spoilers (``histories.pages``) double,
shuffle, tear and mix the lines, which changes no other finding.

``tell`` makes one history, ``write_pages`` writes many into few files, and
``support.histories.large``, which needs Spark, makes healthy ones of any size for benchmarks.
"""

from support.histories.pages import Pages, write_pages
from support.histories.planted import Defect, Drama, Planted
from support.histories.story import DRAMAS, SPOILING, Story, tell
from support.histories.world import CLOCK_ERROR_S, World

__all__ = [
    "CLOCK_ERROR_S",
    "DRAMAS",
    "SPOILING",
    "Defect",
    "Drama",
    "Pages",
    "Planted",
    "Story",
    "World",
    "tell",
    "write_pages",
]
