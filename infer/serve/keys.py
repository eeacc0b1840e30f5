"""Access: keys, short-lived client secrets, and origins.

A key comes in the `Authorization` header, or, from a browser, in the WebSocket's subprotocol `openai-insecure-api-key.KEY`.
A client secret is signed and kept nowhere: each server that has the same keys knows it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from itsdangerous import BadData, URLSafeSerializer

from infer.serve.bounds import Quota
from infer.serve.realtime.protocol import Denied
from infer.serve.settings import ServerLimits
from omni.errors import UserError

SUBPROTOCOL = "openai-insecure-api-key."  # start of the WebSocket subprotocol that brings a key
LONGEST_SECRET = 7200  # seconds for which a client secret may be valid at most; 600 by default, as OpenAI's

LOOPBACK = ("127.0.0.1", "::1", "localhost")

LONGEST_TOKEN = 4096  # characters of a client secret, which travels in a header
SECRET = "ek_"  # start of a client secret, by which OpenAI's clients know one


def is_local(host: str) -> bool:
    """Whether a `Host` header names this machine by its loopback interface."""
    name = ""
    with suppress(ValueError):
        name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
        return ip_address(name).is_loopback
    return name == "localhost"


def read_keys(path: str | Path) -> tuple[str, ...]:
    """Keys of a file, one a line; empty lines and those that begin with `#` are left out. UserError where it cannot be read,
    has no key, or one that is too short, has spaces, or begins as client secrets do."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--key_file {str(path)!r} cannot be read: {getattr(error, 'strerror', None) or 'it is no text'}"
        ) from error
    keys = []
    for number, line in enumerate(lines, 1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if len(key) < 16 or not key.isascii() or any(c.isspace() or c == "," for c in key) or key.startswith(SECRET):
            wanted = f"16 ASCII characters or more, without spaces or commas, that do not begin with {SECRET}"
            raise UserError(f"--key_file {str(path)!r}: line {number} is no key; use {wanted}")
        keys.append(key)
    if not keys:
        raise UserError(f"--key_file {str(path)!r} has no key; write one a line")
    return tuple(keys)


class Keys:
    """The keys of a server, none where everybody may connect, with their usage and sessions."""

    def __init__(self, keys: Iterable[str], limits: ServerLimits) -> None:
        self._keys = {hashlib.sha256(key.encode()).digest(): f"key-{number}" for number, key in enumerate(keys, 1)}
        self._limits, self.needed = limits, bool(self._keys)
        signing = sorted(self._keys) or [secrets.token_bytes(32)]
        self._signer = URLSafeSerializer(
            b"".join(signing), salt="client secret", signer_kwargs={"digest_method": hashlib.sha256}
        )
        self.usage = defaultdict[str, Quota](lambda: Quota(limits, key=True))
        self.sessions: Counter[str] = Counter()

    def owner(self, key: str | None) -> tuple[str, Mapping[str, Any]]:
        """Name of the key's owner, and the configuration that a secret brings; Denied without a key that is known and valid."""
        if key is not None and key.startswith(SECRET):
            try:
                owner, expires, session = self._signer.loads(key.removeprefix(SECRET))
            except (BadData, ValueError):
                raise Denied("this client secret is not known here", "invalid_api_key", status=401) from None
            if expires < time.time():
                raise Denied("this client secret has expired; ask for another one", "invalid_api_key", status=401)
            return owner, session
        if not self.needed:
            return "anyone", {}
        if key is None:
            raise Denied("this server needs a key: Authorization: Bearer KEY", "missing_api_key", status=401)
        digest = hashlib.sha256(key.encode()).digest()
        for known, name in self._keys.items():
            if hmac.compare_digest(known, digest):
                return name, {}
        raise Denied("this key is not known here", "invalid_api_key", status=401)

    def make_secret(self, owner: str, session: Mapping[str, Any], seconds: int) -> tuple[str, int]:
        """A client secret, and when it expires, by `time.time`; Denied where the configuration in it is too long."""
        expires = int(time.time()) + seconds
        value = SECRET + str(self._signer.dumps([owner, expires, dict(session)]))
        if len(value) > LONGEST_TOKEN:
            problem = "the session is too long for a client secret; set the rest by session.update"
            raise Denied(problem, "session_too_long", status=400)
        return value, expires

    def enter(self, owner: str) -> None:
        """Count a session; Denied where the owner has too many, or has no sound left."""
        if self.sessions[owner] >= self._limits.key_sessions:
            problem = f"this key has {self._limits.key_sessions} sessions open, as many as it may; close one"
            raise Denied(problem, "session_limit_reached", status=429)
        self.usage[owner].count(seconds=1)
        self.sessions[owner] += 1


def key_of(headers: Mapping[str, str], protocols: Sequence[str] = ()) -> str | None:
    """The key that a request brings."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return value.strip()
    for protocol in protocols:
        if protocol.startswith(SUBPROTOCOL):
            return protocol.removeprefix(SUBPROTOCOL)
    return None


def check_origin(headers: Mapping[str, str], allowed: Sequence[str], open_access: bool) -> None:
    """Refuse pages of other sites, and, where nobody needs a key, names that were bent to this machine (DNS rebinding)."""
    host = headers.get("host", "")
    if open_access and not is_local(host):
        raise Denied("without keys this server answers to localhost alone", "invalid_host", status=403)
    origin = headers.get("origin")
    if origin is None or origin in allowed:
        return
    if origin.partition("://")[2] != host:
        problem = "pages of other origins may not connect; the server's --origins names those that may"
        raise Denied(problem, "invalid_origin", status=403)
