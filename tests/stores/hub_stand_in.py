"""A server on this machine that speaks the Hugging Face Hub's interface as `huggingface_hub` asks it, with faults.

`python -m tests.stores.hub_stand_in` serves an empty hub until it is ended, and says how to reach it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

TOKEN = "hf_mine"


@dataclass
class Repository:
    """`commits` are files by name, by commit; `branches` are commits by name."""

    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.commit("main", {".gitattributes": b""}, "initial commit")

    def commit(self, branch: str, files: dict[str, bytes], message: str = "") -> str:
        """Adds files to a branch in one commit; returns its id."""
        before = self.commits[self.branches[branch]] if branch in self.branches else {}
        name = hashlib.sha1(f"{len(self.commits)} {branch} {sorted(files)}".encode()).hexdigest()
        self.commits[name] = before | files
        self.branches[branch] = name
        self.messages.append(message)
        return name

    def at(self, revision: str) -> str | None:
        return self.branches.get(revision) or (revision if revision in self.commits else None)


class HubStandIn:
    """The hub.

    Attributes:
        repos: by `owner/name`.
        stored: large files that were sent, by SHA-256.
        storage: the address of these, another host's than the hub's own `address`, as it is there.
        large: bytes from which a file is large; all safetensors are.
        seen: methods and paths of the requests, in order.
        faults: decides what happens to a request, by method and path: a status, `cut` for half an answer, None for an answer.
        closed: owners in whose names nobody may write.
    """

    def __init__(self) -> None:
        self.repos: dict[str, Repository] = {}
        self.stored: dict[str, bytes] = {}
        self.large, self.address, self.storage = 1 << 20, "", ""
        self.seen: list[str] = []
        self.faults: Callable[[str, str], int | str | None] = lambda method, path: None
        self.closed = {"others"}

    def fail(self, pattern: str, times: int, what: int | str = 500) -> None:
        """The next requests, `times` of them, whose method and path match are answered by a status, or cut."""
        left = [times]

        def fault(method: str, path: str) -> int | str | None:
            if left[0] and re.search(pattern, f"{method} {path}"):
                left[0] -= 1
                return what
            return None

        self.faults = fault


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubStandIn

    def log_message(self, *args: object) -> None:
        pass

    def answer(self, status: int, body: Any = b"", **named: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(data))} | named).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if self.cut else data)
        if self.cut:
            self.close_connection = True
            self.wfile.flush()
            self.connection.close()

    def handle_one(self) -> None:
        path = self.path.partition("?")[0]
        self.data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                self.data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        fault = self.hub.faults(self.command, path)
        self.cut = fault == "cut"
        self.hub.seen.append(f"{self.command} {path}")
        if isinstance(fault, int):
            return self.answer(fault, {"error": "the stand-in fails"})
        for pattern, method in ROUTES:
            found = re.fullmatch(pattern, f"{self.command} {path}")
            if found:
                return getattr(self, method)(*map(unquote, found.groups()))
        return self.answer(404, X_Error_Code="EntryNotFound")

    do_GET = do_HEAD = do_POST = do_PUT = handle_one

    @property
    def known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def repo(self, name: str, write: bool = False) -> Repository | None:
        """The repository; None where the request is answered already."""
        found = self.hub.repos.get(name)
        if self.headers.get("Authorization") and not self.known:
            self.answer(401, X_Error_Message="Invalid credentials in Authorization header")
        elif found is None or (found.private and not self.known):
            self.answer(404 if self.known else 401, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        elif write and (not self.known or name.split("/")[0] in self.hub.closed):
            self.answer(403, X_Error_Message="you may not write here")
        else:
            return found
        return None

    def whoami(self) -> None:
        self.answer(200, {"name": "me", "type": "user", "orgs": []}) if self.known else self.answer(401)

    def create(self) -> None:
        asked = json.loads(self.data)
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        if not self.known or name.split("/")[0] in self.hub.closed:
            return self.answer(403, X_Error_Message="you may not make repositories here")
        status = 409 if name in self.hub.repos else 200
        if status == 200:
            self.hub.repos[name] = Repository(asked.get("visibility") == "private")
        return self.answer(status, {"url": f"{self.hub.address}/{name}"})

    def info(self, name: str, revision: str = "main") -> None:
        repo = self.repo(name)
        if repo is None:
            return
        commit = repo.at(revision)
        if commit is None:
            return self.answer(404, X_Error_Code="RevisionNotFound")
        found = {"id": name, "modelId": name, "sha": commit, "private": repo.private, "tags": [], "siblings": []}
        return self.answer(200, found)

    def tree(self, name: str, revision: str) -> None:
        repo = self.repo(name)
        if repo is None:
            return
        files = repo.commits[repo.at(revision) or ""]
        found = []
        for path, data in files.items():
            one = {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            if self.is_large(path, len(data)):
                one["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 100}
            found.append(one)
        self.answer(200, found)

    def is_large(self, path: str, size: int) -> bool:
        return path.endswith((".safetensors", ".bin")) or size >= self.hub.large

    def resolve(self, name: str, revision: str, path: str) -> None:
        repo = self.repo(name)
        if repo is None:
            return
        commit = repo.at(revision)
        if commit is None:
            return self.answer(404, X_Error_Code="RevisionNotFound")
        data = repo.commits[commit].get(path)
        if data is None:
            return self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
        if not self.is_large(path, len(data)):
            return self.answer(200, data, X_Repo_Commit=commit, ETag=f'"{hashlib.sha1(data).hexdigest()}"')
        oid = hashlib.sha256(data).hexdigest()
        self.hub.stored[oid] = data
        named = {"X_Linked_ETag": f'"{oid}"', "X_Linked_Size": str(len(data)), "Location": f"{self.hub.storage}/lfs/{oid}"}
        return self.answer(302, b"", X_Repo_Commit=commit, **named)

    def lfs(self, oid: str) -> None:
        data = self.hub.stored[oid]
        if self.headers.get("Range"):
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            part = data[int(first) : int(last) + 1 if last else len(data)]
            where = f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"
            return self.answer(206, part, ETag=f'"{oid}"', Content_Range=where)
        return self.answer(200, data, ETag=f'"{oid}"')

    def validate(self) -> None:
        import yaml

        card = json.loads(self.data)["content"]
        front = yaml.safe_load(card.split("---\n")[1]) if card.startswith("---\n") else {}
        right = isinstance(front, dict) and re.fullmatch(r"[a-z0-9.-]+", str(front.get("license", "other")))
        self.answer(200, {"warnings": []}) if right else self.answer(400, {"errors": [{"message": '"license" must be known'}]})

    def preupload(self, name: str, revision: str) -> None:
        repo = self.repo(name, write=True)
        if repo is None:
            return
        if repo.at(revision) is None:
            return self.answer(404, X_Error_Code="RevisionNotFound")
        held, found = repo.commits[repo.at(revision) or ""], []
        for one in json.loads(self.data)["files"]:
            path, data = one["path"], held.get(one["path"])
            large = self.is_large(path, one["size"])
            oid = None
            if data is not None:
                git = hashlib.sha1(f"blob {len(data)}\0".encode() + data)
                oid = hashlib.sha256(data).hexdigest() if large else git.hexdigest()
            found.append({"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": oid})
        return self.answer(200, {"files": found})

    def batch(self, name: str) -> None:
        if self.repo(name, write=True) is None:
            return
        found = []
        for one in json.loads(self.data)["objects"]:
            upload = {"href": f"{self.hub.storage}/lfs/{one['oid']}"}
            found.append(dict(one) if one["oid"] in self.hub.stored else one | {"actions": {"upload": upload}})
        self.answer(200, {"transfer": "basic", "objects": found})

    def store(self, oid: str) -> None:
        if hashlib.sha256(self.data).hexdigest() != oid:
            return self.answer(400)
        self.hub.stored[oid] = self.data
        return self.answer(200)

    def commit(self, name: str, revision: str) -> None:
        repo = self.repo(name, write=True)
        if repo is None:
            return
        files, message = {}, ""
        for line in self.data.splitlines():
            one = json.loads(line)
            value = one["value"]
            if one["key"] == "header":
                message = value["summary"]
            elif one["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                files[value["path"]] = self.hub.stored[value["oid"]]
        made = repo.commit(revision, files, message)
        self.answer(200, {"commitUrl": f"{self.hub.address}/{name}/commit/{made}", "commitOid": made})

    def branch(self, name: str, branch: str) -> None:
        repo = self.repo(name, write=True)
        if repo is None:
            return
        status = 409 if branch in repo.branches else 200
        repo.branches.setdefault(branch, repo.branches["main"])
        self.answer(status)


NAME = r"([\w.-]+/[\w.-]+)"
ROUTES = (
    (r"GET /api/whoami-v2", "whoami"),
    (r"POST /api/repos/create", "create"),
    (r"POST /api/validate-yaml", "validate"),
    (rf"GET /api/models/{NAME}", "info"),
    (rf"GET /api/models/{NAME}/revision/([^/]+)", "info"),
    (rf"GET /api/models/{NAME}/tree/([^/]+)", "tree"),
    (rf"POST /api/models/{NAME}/preupload/([^/]+)", "preupload"),
    (rf"POST /api/models/{NAME}/commit/([^/]+)", "commit"),
    (rf"POST /api/models/{NAME}/branch/([^/]+)", "branch"),
    (rf"POST /{NAME}\.git/info/lfs/objects/batch", "batch"),
    (rf"(?:GET|HEAD) /{NAME}/resolve/([^/]+)/(.+)", "resolve"),
    (r"(?:GET|HEAD) /lfs/(\w+)", "lfs"),
    (r"PUT /lfs/(\w+)", "store"),
)


@contextmanager
def serving_hub() -> Iterator[HubStandIn]:
    hub = HubStandIn()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    hub.address, hub.storage = (f"http://{host}:{server.server_port}" for host in ("127.0.0.1", "localhost"))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()


if __name__ == "__main__":
    with serving_hub() as stand_in:
        for name, value in {"HF_ENDPOINT": stand_in.address, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}.items():
            print(f"export {name}={value}", flush=True)
        sys.stdout.flush()
        while os.getppid() != 1:
            time.sleep(1)
