"""Tries requests to stores again where their failure may pass, and tells users about those that do not."""

from __future__ import annotations

import logging
import math
import os
import random
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from omni.errors import UserError
from omni.files import FULL, PASSING
from omni.utils.remote import shown

LOG = logging.getLogger(__name__)

TRIES = 6
"""Most tries of a request."""
FIRST_WAIT, LONGEST_WAIT = 0.5, 20.0  # seconds before the second try, about, doubled for each further one; and the most
PASSING_STATUS = (408, 425, 429, *range(500, 600))
"""Status codes of HTTP that may be over at another try: timeouts, throttling, errors of the server."""
CHANGED_STATUS = (412, 416)  # status codes of a request for a range of an object that is no longer the one that was listed
PASSING_ERRORS = {
    *("FSTimeoutError", "TimeoutError", "ConnectionError", "HTTPClientError", "IncompleteRead", "IncompleteReadError"),
    *("ResponseStreamingError", "ResponseParserError", "ClientConnectionError", "ClientPayloadError", "TransportError"),
    "ProtocolError",
}
"""Names of errors, or of their bases, of fsspec and of the libraries below it that may pass: they say nothing of a status."""
NO_CREDENTIALS = {
    *("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "DefaultCredentialsError", "TokenRetrievalError")
}
"""Names of errors of drivers that found no credentials."""
CREDENTIALS = {
    "s3": "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for a public bucket FSSPEC_S3_ANON=true",
    "gs": "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS; for a public bucket "
    "FSSPEC_GS_TOKEN=anon",
    "hf": "run `hf auth login`, or set HF_TOKEN",
}
"""Where credentials are looked for, by scheme."""

_rng = random.SystemRandom()  # of its own: seeds of a run are not touched

Result = TypeVar("Result")


class StoreError(UserError):
    """A request that a store refused, or did not answer, whatever its data are."""


class ChangedError(StoreError):
    """An object that is not any more what it was when it was listed."""


class MissingError(StoreError):
    """An object, a folder or a bucket that is not there."""


def stall_seconds() -> float:
    """Seconds without a byte after which a request counts as failed: `OMNI_STORE_TIMEOUT`, 15 by default."""
    return number_of("OMNI_STORE_TIMEOUT", 15, lambda seconds: 0 < seconds < 3600, "seconds above 0")


def number_of(variable: str, default: float, fits: Callable[[float], bool], noun: str) -> float:
    """The number in a variable of the environment; UserError where it is none, or does not fit."""
    setting = os.environ.get(variable) or str(default)
    try:
        value = float(setting)
    except ValueError:
        value = math.nan
    if not fits(value):
        raise UserError(f"{variable} is {setting!r:.40}; give {noun}, such as {default:g}")
    return value


def tried(work: Callable[[], Result], address: str, doing: str = "read", tries: int = TRIES) -> Result:
    """The result of a request, which is made again, after longer and longer waits, while its failure may pass. StoreError: the
    last failure, with the address and what to do; `again` is true where it may still pass. ChangedError: the object has
    changed.

    The first failure of a request that is made again is a line in the log.

    Args:
        doing: participle for the message: `read`, `listed`, `made` or `written`.
        tries: most of them.
    """
    for number in range(1, tries + 1):
        try:
            return work()
        except UserError:
            raise
        except Exception as error:
            if not may_pass(error) or number == tries:
                raise refusal(error, address, doing, number) from error
            wait = min(LONGEST_WAIT, FIRST_WAIT * 2 ** (number - 1)) * _rng.uniform(0.5, 1.5)
            level = logging.WARNING if number == 1 else logging.DEBUG
            LOG.log(level, "%s was not %s (%s): again in %.1f s", shown(address), doing, reason(error), wait)
            time.sleep(wait)
    raise AssertionError


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that led to it, each once."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def status_of(error: BaseException) -> int | None:
    """The HTTP status that an error of a store is about, None where there was no answer."""
    for cause in _chain(error):
        response: Any = getattr(cause, "response", None)
        if isinstance(response, dict):  # botocore
            response = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        values = (response, getattr(response, "status_code", ""), getattr(cause, "status", ""), getattr(cause, "code", ""))
        for status in (int(str(value)) for value in values if str(value).isdigit()):
            if 100 <= status < 600:
                return status
    return None


def may_pass(error: BaseException) -> bool:
    """Whether a request that failed so may succeed at another try."""
    chain = list(_chain(error))
    if any((isinstance(cause, OSError) and cause.errno in FULL) or "Cert" in type(cause).__name__ for cause in chain):
        return False
    if any(PASSING_ERRORS & {base.__name__ for base in type(cause).__mro__} for cause in chain):
        return True
    status = status_of(error)
    if status is not None:
        return status in PASSING_STATUS
    return isinstance(error, OSError) and error.errno in PASSING


def reason(error: BaseException) -> str:
    """One line that says why a request failed: of the first of its errors that says more than an address. What follows a
    question mark in an address may be a signature, and is left out."""
    texts = [re.sub(r"(://[^\s?]*\?)[^\s'\")]+", r"\1…", " ".join(str(cause).split())) for cause in _chain(error)]
    said = [text[:200] or type(cause).__name__ for text, cause in zip(texts, _chain(error), strict=True)]
    status, text = status_of(error), next((line for line in said if "://" not in line or " " in line), said[0])
    return text if status is None or str(status) in text else f"{text}, status {status}"


def refusal(error: BaseException, address: str, doing: str, tries: int) -> StoreError:
    """The error for a request that failed for good."""
    where, status, names = shown(address), status_of(error), {type(cause).__name__ for cause in _chain(error)}
    if status in CHANGED_STATUS or "FileExpired" in names:
        return ChangedError(f"{where} has changed, or was replaced, since it was listed: run the same command again")
    scheme = address.partition("://")[0]
    way = CREDENTIALS.get(scheme, "give an address that needs no password")
    if names & NO_CREDENTIALS:
        return StoreError(f"{where} cannot be {doing}: there are no credentials ({reason(error)}); {way}")
    if isinstance(error, PermissionError) or status in (401, 403):
        return StoreError(f"{where} cannot be {doing}: it is not allowed ({reason(error)}); ask for the right to, or {way}")
    if isinstance(error, OSError) and error.errno in FULL:
        return StoreError(f"{where} cannot be {doing}: no space left on the disk; free some")
    if status == 404 or (isinstance(error, FileNotFoundError) and not may_pass(error)):
        lacks = "its bucket does not exist" if "bucket does not exist" in str(error) else "check the name"
        return MissingError(f"{where} is not there: {lacks}")
    failure = StoreError(
        f"{where} cannot be {doing}: {reason(error)}{f', {tries} times' if tries > 1 else ''}; check the address and the "
        "network, and run the same command again"
    )
    failure.again = may_pass(error)
    return failure
