"""Pure decisions of all protocols: events in, effects out; no clock, thread, randomness, I/O or logging."""
