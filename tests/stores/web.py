"""A web server on this machine: files with ETags, ranges and conditions, with TLS where a certificate is given."""

from __future__ import annotations

import hashlib
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Web:
    """The server's files, by path, and how it answers.

    Attributes:
        ranges: it knows ranges.
        failing: number of requests that it still answers by status 500.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.ranges, self.failing, self.address = True, 0, ""


@contextmanager
def web(certificate: Path | None = None) -> Iterator[Web]:
    held = Web()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET(False)

        def do_GET(self, body: bool = True) -> None:
            data = held.files.get(self.path.partition("?")[0])
            status, named = (404, {}) if data is None else (200, {})
            if held.failing:
                held.failing -= 1
                status, data = 500, b""
            data = data or b""
            tag = f'"{hashlib.md5(data).hexdigest()}"'
            if status == 200:
                named = {"ETag": tag}
                if self.headers.get("If-Match", tag) != tag:
                    status, data = 412, b""
                elif held.ranges and self.headers.get("Range"):
                    first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
                    status, part = 206, data[int(first) : int(last or len(data)) + 1]
                    named |= {"Content-Range": f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"}
                    data = part
            self.send_response(status)
            for name, value in (named | {"Content-Length": str(len(data))}).items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    held.address = f"http://127.0.0.1:{server.server_port}"
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        held.address = f"https://localhost:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield held
    finally:
        server.shutdown()
