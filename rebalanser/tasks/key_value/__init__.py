"""Tasks in any registry of keys and values: etcd for many hosts, memory for tests.

Each write is one nested transaction with guards of its own, so a batch is a few transactions with an outcome
for each write (:mod:`~rebalanser.tasks.key_value.batches`). A task's state stands under the revision of its
key, so the guard of a move is that its key is unchanged; the epoch of a partition is guarded in the same
way. What lies where is said in :mod:`~rebalanser.tasks.key_value.keys`, how collections of any size are all
or none in :mod:`~rebalanser.tasks.key_value.collection`.
"""

from rebalanser.tasks.key_value.engine import KeyValueEngine, open_engine

__all__ = ["KeyValueEngine", "open_engine"]
