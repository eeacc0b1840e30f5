"""Loads private copies of a C library, so that its static variables belong to one user.

The dynamic loader knows a library by its file: opening the same file twice gives the same memory. A copy of
the file is another library, with fresh static state. The copy's file is removed as soon as it is loaded.
"""

from __future__ import annotations

import ctypes
import functools
import os
import tempfile
from pathlib import Path

from omni.errors import UserError


class _SymbolInfo(ctypes.Structure):
    """`Dl_info` of `dladdr(3)`."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def library_of(extension: str, symbol: str) -> str:
    """Path of the shared library that gives `symbol` to the extension module file `extension`.

    Asking the loader finds a library bundled in a wheel and one of the system alike. Raises UserError where
    there is no such symbol, or no POSIX loader.
    """
    if os.name != "posix":
        raise UserError(f"private copies of the library behind {extension} need Linux or macOS: run there")
    function = getattr(ctypes.CDLL(extension), symbol, None)
    info = _SymbolInfo()
    if function is not None:
        ctypes.CDLL(None).dladdr(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(info))
    if info.file is None:
        raise UserError(f"{extension} reaches no function {symbol}: reinstall the package it belongs to")
    return os.fsdecode(info.file)


def load_private(path: str) -> ctypes.CDLL:
    """Loads a fresh copy of the shared library `path`; release it with `unload`.

    Raises UserError when the folder for temporary files cannot hold the copy.
    """
    # Deep binding: the copy calls itself even where the original was loaded into the global scope.
    mode = os.RTLD_LOCAL | os.RTLD_NOW | getattr(os, "RTLD_DEEPBIND", 0)
    copy = None
    try:
        descriptor, copy = tempfile.mkstemp(prefix="omni-", suffix=f"-{os.path.basename(path)}")
        with open(descriptor, "wb") as file:
            # Written from memory: a file that the kernel copies from the original takes ten times as long to unmap.
            file.write(_contents(path))
        return ctypes.CDLL(copy, mode=mode)
    except OSError as error:
        folder = os.path.dirname(copy) if copy else "a temporary folder"
        raise UserError(
            f"cannot load a copy of {os.path.basename(path)} from {folder} ({error}): "
            "point TMPDIR at a folder with room that allows execution"
        ) from error
    finally:
        if copy is not None:
            os.unlink(copy)


def unload(library: ctypes.CDLL) -> None:
    """Unmaps a library loaded by `load_private`; nothing of it may be used afterwards."""
    ctypes.CDLL(None).dlclose(ctypes.c_void_p(library._handle))


@functools.cache
def _contents(path: str) -> bytes:
    return Path(path).read_bytes()
