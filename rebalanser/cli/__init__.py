"""The command line: faces over :class:`~rebalanser.Group` and :class:`~rebalanser.Admin`.

Every command takes ``--registry URL`` and ``--json``. Answers go to standard output, everything else to
standard error. Exit codes:

=====  ==========================================================================================
0      done
1      the answer is no: of ``status --exit-code``, ``check`` or ``audit --fail-on-findings``
2      the command is not used as its help says
3      a person must change something: the name, the settings, the registry
4      nothing is wrong with the command: try again later
70     a fault of Rebalanser itself; please report it
130    interrupted by Ctrl-C
=====  ==========================================================================================

With ``--json`` an error is an object too, with ``error``, ``kind`` and ``exit_code``.
"""

from rebalanser.cli.app import application, main

__all__ = ["application", "main"]
