"""Serves the page of `rooflab watch`, and its state, on the loopback address of this machine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from rooflab.bench.learn.learn_data import FOLDER
from rooflab.bench.watch.watch_runs import FileWatch

HOST = "127.0.0.1"
BEAT_S = 10.0  # seconds between two lines to a client; a line that cannot be sent shows that the client has left
HERE, TYPES = Path(__file__).parent, {".html": "html", ".js": "javascript", ".css": "css"}
PARTS = (HERE / "watch.js", HERE / "watch.css", FOLDER / "shared.js", FOLDER / "learn.css")
FILES = {"/": HERE / "watch.html"} | {f"/{part.name}": part for part in PARTS}
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:"
HEADERS = {"Cache-Control": "no-store", "Content-Security-Policy": POLICY}


class PageHandler(BaseHTTPRequestHandler):
    """Answers GET requests for the page's files, for `/state`, and for `/events`, which sends each new state."""

    def __init__(self, watch: FileWatch, *arguments: object):
        self._watch = watch
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        """Answers one request.  Refuses a request for another host: a page of another site may have sent it."""
        port = self.connection.getsockname()[1]
        if self.headers.get("Host") not in (f"{HOST}:{port}", f"localhost:{port}"):
            self._send(403, "text/plain", b"expected a request for this machine\n")
        elif self.path == "/events":
            with suppress(OSError):  # the client has left
                self._send(200, "text/event-stream")
                for text in self._watch.updates(BEAT_S):
                    self.wfile.write(b"data: " + text + b"\n\n" if text else b": no change\n\n")
        elif self.path == "/state":
            self._send(200, "application/json", self._watch.text)
        elif file := FILES.get(self.path):
            self._send(200, f"text/{TYPES[file.suffix]}; charset=utf-8", file.read_bytes())
        else:
            self._send(404, "text/plain", b"expected /, /state or /events\n")

    def _send(self, status: int, kind: str, body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing: the terminal shows the address alone."""


@contextmanager
def serving(watch: FileWatch, port: int) -> Iterator[str]:
    """Serves the page on `port` (0: any free one), and yields its address.  Raises `OSError` if the port is taken."""
    with ThreadingHTTPServer((HOST, port), partial(PageHandler, watch)) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://{HOST}:{server.server_address[1]}/"
        finally:
            server.shutdown()
