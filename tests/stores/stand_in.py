"""A server on this machine that speaks S3 (moto), with faults: errors, stalls, answers that are cut short. It counts requests.

`python -m tests.stores.stand_in FOLDER` serves a folder as the bucket `speech` until it is ended, and says how to reach it.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from omni.stores import tries

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


class StandIn:
    """The server.

    Attributes:
        errors, stalls, cuts: shares of the requests that are answered by status 503, not answered for `stall` seconds, and
            answered by half of what they ask for.
        stall: seconds.
        denied: the body of answers by status 403, None without such.
        broken: decides which requests are answered by status 503.
        delay: seconds that each answer takes besides.
        seen: counts of requests, by method and whether they list.
        faults: counts of the faults.
    """

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Quiet(WSGIRequestHandler):
            protocol_version = "HTTP/1.1"

            def log(self, *args: Any) -> None:
                pass

        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=Quiet)
        self.address = f"http://127.0.0.1:{self._server.port}"
        self.seen, self.faults = Counter[str](), Counter[str]()
        self._dice = random.Random(1)
        self.heal()
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def heal(self) -> None:
        """Have no faults any more."""
        self.errors = self.stalls = self.cuts = self.delay = 0.0
        self.stall = 3.0
        self.broken: Callable[[dict[str, Any]], bool] | None = None
        self.denied: bytes | None = None
        self.seen.clear()
        self.faults.clear()

    def close(self) -> None:
        self._server.shutdown()

    def _answer(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        listing = environ["REQUEST_METHOD"] == "GET" and "list-type" in environ.get("QUERY_STRING", "")
        self.seen["LIST" if listing else environ["REQUEST_METHOD"]] += 1
        time.sleep(self.delay)
        dice = self._dice.random()
        if self.denied is not None:
            self._drain(environ)
            start("403 Forbidden", [("Content-Length", str(len(self.denied))), ("Content-Type", "application/xml")])
            return [self.denied if environ["REQUEST_METHOD"] != "HEAD" else b""]
        if dice < self.errors or (self.broken is not None and self.broken(environ)):
            self.faults["errors"] += 1
            self._drain(environ)
            start("503 Slow Down", [("Content-Length", "0")])
            return [b""]
        if dice < self.errors + self.stalls:
            self.faults["stalls"] += 1
            time.sleep(self.stall)
        told: list[Any] = []
        pieces = [b"".join(self._app(environ, lambda *args: told.extend(args[:2])))]
        if dice > 1 - self.cuts and environ["REQUEST_METHOD"] == "GET" and len(pieces[0]) > 1:
            self.faults["cuts"] += 1
            told[1] = [pair for pair in told[1] if pair[0].lower() != "content-length"]
            told[1].append(("Content-Length", str(len(pieces[0]))))
            pieces = [pieces[0][: len(pieces[0]) // 2]]
            environ["wsgi.input"] = None
            told[1].append(("Connection", "close"))
        start(*told)
        return pieces

    @staticmethod
    def _drain(environ: dict[str, Any]) -> None:
        size = int(environ.get("CONTENT_LENGTH") or 0)
        while size > 0 and (data := environ["wsgi.input"].read(min(size, 1 << 16))):
            size -= len(data)


@contextmanager
def serving() -> Iterator[StandIn]:
    server = StandIn()
    try:
        yield server
    finally:
        server.close()


def client(server: StandIn) -> Any:
    """A boto3 client of the server."""
    import boto3

    return boto3.client(
        "s3", endpoint_url=server.address, region_name="us-east-1", aws_access_key_id="test", aws_secret_access_key="test"
    )


def put_folder(s3: Any, folder: Path, bucket: str, prefix: str = "") -> None:
    """Put the files of a folder, and of those below it, into a bucket."""
    for file in sorted(folder.rglob("*")):
        if file.is_file() and not file.name.startswith("."):
            s3.put_object(Bucket=bucket, Key=prefix + file.relative_to(folder).as_posix(), Body=file.read_bytes())


@dataclass(frozen=True)
class Bucket:
    """A bucket of the server. `address` is where files of it are."""

    server: StandIn
    s3: Any
    name: str

    def address(self, key: str = "") -> str:
        return f"s3://{self.name}/{key}".rstrip("/")

    def put(self, key: str, data: bytes = b"") -> str:
        """Put an object; returns its address."""
        self.s3.put_object(Bucket=self.name, Key=key, Body=data)
        return self.address(key)

    def put_all(self, folder: Path, prefix: str) -> str:
        """Put the files of a folder, and of those below it; returns the address of the folder."""
        put_folder(self.s3, folder, self.name, f"{prefix}/")
        return self.address(prefix)

    def keys(self) -> list[str]:
        return [one["Key"] for one in self.s3.list_objects_v2(Bucket=self.name).get("Contents", [])]


_numbers = count()


def new_bucket(server: StandIn, patch: pytest.MonkeyPatch) -> Bucket:
    """A new bucket; the process is told where the server is, and tries again at once."""
    server.heal()
    for name, value in (KEYS | {"AWS_ENDPOINT_URL": server.address}).items():
        patch.setenv(name, value)
    patch.setattr(tries, "FIRST_WAIT", 0.01)
    bucket = Bucket(server, client(server), f"bucket-{os.getpid()}-{next(_numbers)}")
    bucket.s3.create_bucket(Bucket=bucket.name)
    server.heal()
    return bucket


if __name__ == "__main__":
    with serving() as stand_in:
        s3 = client(stand_in)
        s3.create_bucket(Bucket="speech")
        if sys.argv[1:]:
            put_folder(s3, Path(sys.argv[1]), "speech")
        for name, value in (KEYS | {"AWS_ENDPOINT_URL": stand_in.address}).items():
            print(f"export {name}={value}", flush=True)
        while os.getppid() != 1:
            time.sleep(1)
