"""A web server that says which worker it is on, and how often it was asked: the application that is placed.

It knows nothing of Shiva but the variables that a worker gives to every application.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from types import FrameType

asked = count(1)


class Handler(BaseHTTPRequestHandler):
    """Answers every GET."""

    def do_GET(self) -> None:
        """Say where this process runs, and by which token."""
        answer = {
            "application": os.environ["SHIVA_APPLICATION"],
            "worker": os.environ["SHIVA_WORKER"],
            "token": int(os.environ["SHIVA_TOKEN"]),
            "asked": next(asked),
        }
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def end(_number: int, _frame: FrameType | None) -> None:
    """SIGTERM: the worker stops the application, or has died itself."""
    sys.exit(0)


def main() -> None:
    """Serve until SIGTERM."""
    signal.signal(signal.SIGTERM, end)
    with ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler) as server:
        # What is printed is kept by the worker: `rebalanser shiva logs` shows it.
        print(f"listening on {server.server_address[1]} on {os.environ['SHIVA_WORKER']}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
