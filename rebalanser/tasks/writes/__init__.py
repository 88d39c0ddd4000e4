"""Writes of a process to its queue: in batches, each retried until its outcome is known."""
