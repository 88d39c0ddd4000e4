"""Task queues behind one small face, so that they can be measured and killed in the same way.

``queues.catalogue`` names them. Each ``on_*.py`` opens one of them, from what ``queues.place`` tells:
its bodies, and what a driver needs: ``prepare``, ``enqueue``, ``worker`` and ``is_finished``.
``python -m queues.drive NAME ACTION`` is such a driver; it needs only what that queue needs, so that the
packages of the others may live in an environment of their own.
"""
