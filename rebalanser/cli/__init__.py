"""The command line over ``Group`` and ``Admin``.

Every command takes ``--registry URL`` and ``--json``. Answers go to standard output, everything else to
standard error. Exit codes:

=====  ==========================================================================================
0      success
1      the answer of ``status --exit-code``, ``check`` or ``audit --fail-on-findings`` is no
2      wrong usage of the command; of ``plan`` also: a resource would have no owner
3      a person must change something first: the name, the settings, the registry
4      a temporary failure: try again later
70     a bug of Rebalanser; please report it
130    interrupted by Ctrl-C
=====  ==========================================================================================

With ``--json`` an error is an object too, with ``error``, ``kind`` and ``exit_code``.
"""

from rebalanser.cli.app import application, main

__all__ = ["application", "main"]
