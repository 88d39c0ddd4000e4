"""Takes secrets out of text before anybody reads it: logs, history, messages of errors.

Passwords in URLs and values of fields that are named like a secret are found by their form; what cannot be
found by its form, such as a password that a server repeats in its answer, is told once with
``hide_secret``. A fencing token is no secret.
"""

from __future__ import annotations

import re
import threading
from typing import Final
from urllib.parse import parse_qsl, quote

HIDDEN: Final = "***"

_NAMES: Final = r"(?:pass(?:word|wd|phrase)|pwd|secret|credentials?|authorization|api_?key|private_?key)s?"
_SECRET_NAME: Final = re.compile(rf"(?:.*[-_.])?{_NAMES}", re.IGNORECASE)
_URL: Final = re.compile(r"([a-z][a-z0-9+.\-]{0,30}://[^\s:/@'\"]{0,256}):\S{0,1024}@", re.IGNORECASE)
_ACCOUNT: Final = re.compile(r"([\w.%+\-]{1,64}):(?!//)[^\s@]\S{0,1024}@")
_ASSIGNED: Final = re.compile(
    rf"({_NAMES}['\"]?\s*[=:]\s*)"
    r"(?!None\b|null\b)((?:Bearer|Basic)\s+\S+|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[^\s,;&)}\]]+)",
    re.IGNORECASE,
)
_SHORT: Final = 4

_lock = threading.Lock()
_known: tuple[tuple[str, re.Pattern[str]], ...] = ()


def hide_secret(secret: str | None) -> None:
    """Never let ``secret`` through again, in this process, as it is or quoted as in a URL.

    A secret of fewer than four characters is only hidden where it stands alone: it would be found inside
    ordinary words. None and an empty text are no secrets.
    """
    global _known  # noqa: PLW0603 - replaced as a whole, so that readers need no lock
    if not secret:
        return
    with _lock:
        known = dict(_known)
        for form in (secret, quote(secret), quote(secret, safe=""), repr(secret)[1:-1]):
            pattern = re.escape(form)
            known[form] = re.compile(rf"(?<!\w){pattern}(?!\w)" if len(form) < _SHORT else pattern)
        _known = tuple(sorted(known.items(), key=lambda item: -len(item[0])))


def redact(text: str) -> str:
    """``text`` without its secrets, each replaced by ``***``. Doing it twice changes nothing more."""
    for form, pattern in _known:
        if form in text:
            text = pattern.sub(HIDDEN, text)
    if "@" in text:
        text = _URL.sub(rf"\1:{HIDDEN}@", text)
        text = _ACCOUNT.sub(rf"\1:{HIDDEN}@", text)
    return _ASSIGNED.sub(rf"\1{HIDDEN}", text)


def names_secret(name: str) -> bool:
    """True if a field of this name holds a secret, whatever its value looks like."""
    return _SECRET_NAME.fullmatch(name) is not None


def url_options(query: str) -> dict[str, str]:
    """Parse the options of a URL.

    Raises:
        ValueError: one has no value, as in ``ca=$CA``, which must not mean the system's CAs. The message
            shows no text without an equals sign, as that may be a part of a password.
    """
    options = dict(parse_qsl(query, keep_blank_values=True))
    for name, value in options.items():
        if not value:
            shown = repr(name) if f"{name}=" in query else "without a name"
            raise ValueError(f"option {shown} has no value")
    return options
