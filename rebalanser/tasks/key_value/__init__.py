"""Tasks in any registry of keys and values: etcd for many hosts, memory for tests.

Each write is one nested transaction with its own guards, so a batch is a few transactions with an outcome for
each write (``key_value.batches``). The revision of a task's state is that of its key, so
a move is guarded by the unchanged key; the epoch of a partition is guarded in the same way.
``key_value.keys`` is the layout of the keys, and
``key_value.collection`` makes collections of any size atomic.
"""

from rebalanser.tasks.key_value.engine import KeyValueEngine, open_engine

__all__ = ["KeyValueEngine", "open_engine"]
