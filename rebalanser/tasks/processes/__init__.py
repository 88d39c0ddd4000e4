"""Bodies in child processes, which can be killed (SK-15)."""
