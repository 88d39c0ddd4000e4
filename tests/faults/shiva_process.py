"""The command line in a process that kills or stops itself at one step.

``shiva_process.py MODULE:CLASS.METHOD before|after N SIGNAL ARGUMENTS…``: at the N-th call of that method the
process sends itself the signal, before the call begins or after it is done.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys

from rebalanser.cli import main


def strike_at(place: str, when: str, number: int, blow: signal.Signals) -> None:
    module, _, path = place.partition(":")
    owner_name, _, name = path.partition(".")
    owner = getattr(importlib.import_module(module), owner_name)
    method = getattr(owner, name)
    calls = 0

    @functools.wraps(method)
    def struck(*arguments: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        its_turn = calls == number
        if its_turn and when == "before":
            os.kill(os.getpid(), blow)
        answer = method(*arguments, **options)
        if its_turn and when == "after":
            os.kill(os.getpid(), blow)
        return answer

    setattr(owner, name, struck)


if __name__ == "__main__":
    place, when, number, blow, *arguments = sys.argv[1:]
    strike_at(place, when, int(number), signal.Signals[blow])
    sys.exit(main(arguments))
