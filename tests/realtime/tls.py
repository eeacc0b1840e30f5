"""Certificates of servers that the commands talk to."""

from __future__ import annotations

import ssl

from omni.errors import UserError


def trusting(file: str) -> ssl.SSLContext:
    """TLS that trusts a certificate, or those of its authority, besides the usual ones; UserError where there is none."""
    context = ssl.create_default_context()
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(file)
    except OSError as error:  # ssl's errors are some
        reason = getattr(error, "reason", None) or error.strerror or error
        raise UserError(f"--certificate {file!r} cannot be read: {reason}; give a PEM file with a certificate") from error
    return context


def connection_error(error: BaseException) -> str:
    """Why there is no connection, in one line."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}; name it by --certificate FILE, where you trust it"
    return str(error) or type(error).__name__
