"""Simulators of the four protocols, over one kernel: worlds, faults, oracles, and the tests that run them."""
