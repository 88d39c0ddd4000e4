"""The only threads and clocks: what carries out the protocol's effects in a real process."""
