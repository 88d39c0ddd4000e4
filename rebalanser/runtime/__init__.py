"""Carries out the protocol's effects in a real process; the only package with threads and clocks."""
