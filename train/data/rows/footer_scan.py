"""Finds the row groups in a Parquet footer without decoding it, compiled: a footer of 10,000 groups takes some 30 ms.

A footer is a `FileMetaData` (apache/parquet-format, `src/main/thrift/parquet.thrift`), written in Thrift's compact protocol
(apache/thrift, `doc/specs/thrift-compact-protocol.md`):

    struct    fields, then the byte 0; a field is a header and a value
    header    one byte, (id - id of the field before) << 4 | kind; where the upper half is 0, the id follows as a zigzag varint
    list      one byte, size << 4 | kind of its elements; where the upper half is 15, the size follows as a varint
    number    zigzag varint; a boolean field has no value besides its kind, a boolean in a list is a byte
    binary    its length as a varint, and its bytes

Nothing in a struct depends on its place in the file, so that a group's bytes can be put into a footer of their own. Sets and
maps, which the format does not use, are refused. Nothing outside the footer is read, whatever its bytes are.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from omni.compiled import compiled_function

BYTE, DOUBLE, BINARY, LIST, STRUCT, UUID = 3, 7, 8, 9, 12, 13
"""Kinds of values besides 1 and 2 (booleans) and 4 to 6 (numbers)."""

NUM_ROWS, ROW_GROUPS = 3, 4
"""Ids of fields of `FileMetaData`."""

GROUP_BYTES, GROUP_ROWS = 2, 3
"""Ids of fields of `RowGroup`: its size before compression, and its number of rows."""

DEEPEST = 64
"""Depth of nested values beyond which a footer is refused; those of the format are less than ten."""


@compiled_function
def _number(data: Any, at: Any) -> Any:
    """Read an unsigned varint of at most 63 bits: its value, and the place after it, -1 where it is broken."""
    value, shift = np.int64(0), np.int64(0)
    while at < len(data) and shift < 63:
        byte = np.int64(data[at])
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    return np.int64(0), np.int64(-1)


@compiled_function
def _field(data: Any, at: Any, before: Any) -> Any:
    """Read a field's header: its kind (0 at the struct's end, -1 where it is broken), its id, and the place after it."""
    if at >= len(data):
        return np.int64(-1), before, at
    byte = np.int64(data[at])
    at += 1
    if byte >> 4 or not byte:
        return byte & 15, before + (byte >> 4), at
    value, at = _number(data, at)
    return byte if at >= 0 else np.int64(-1), (value >> 1) ^ -(value & 1), at


@compiled_function
def _list(data: Any, at: Any) -> Any:
    """Read a list's header: its size, the kind of its elements, and the place after it, -1 where it is broken."""
    if at >= len(data):
        return np.int64(0), np.int64(0), np.int64(-1)
    byte = np.int64(data[at])
    size, at = byte >> 4, at + 1
    if size == 15:
        size, at = _number(data, at)
    return size, byte & 15, at


@compiled_function
def _skip(data: Any, at: Any, kind: Any, kinds: Any, left: Any) -> Any:
    """Find the place after a value of `kind` that begins at `at`; -1 where it is broken.

    `kinds` and `left` are scratch memory [DEEPEST]: the open lists, with their elements' kind and number, and structs (kind 0).
    """
    depth = np.int64(0)
    while True:
        if kind == BINARY:
            size, at = _number(data, at)
            if at < 0 or size > len(data) - at:
                return np.int64(-1)
            at += size
        elif 4 <= kind <= 6:
            while at < len(data) and data[at] > 127:
                at += 1
            at += 1
        elif kind == BYTE:
            at += 1
        elif kind == DOUBLE:
            at += 8
        elif kind == UUID:
            at += 16
        elif kind in (LIST, STRUCT):
            if depth == DEEPEST:
                return np.int64(-1)
            kinds[depth], left[depth] = 0, 0
            if kind == LIST:
                left[depth], kinds[depth], at = _list(data, at)
                if at < 0 or left[depth] > len(data) - at or not kinds[depth]:
                    return np.int64(-1)
            depth += 1
        elif kind != 1 and kind != 2:
            return np.int64(-1)
        if at > len(data):
            return np.int64(-1)
        kind = np.int64(0)
        while depth and not kind:  # the next value of the innermost list or struct that has one
            if not kinds[depth - 1]:
                kind, _, at = _field(data, at, np.int64(0))
                if kind < 0:
                    return np.int64(-1)
            elif left[depth - 1]:
                left[depth - 1] -= 1
                kind = kinds[depth - 1]
                if kind <= 2:
                    kind = np.int64(BYTE)
            if not kind:
                depth -= 1
        if not kind:
            return at


@compiled_function
def scan(data: Any) -> Any:
    """Scan a footer, uint8 without the eight bytes at its end.

    Returns:
        Five int64: the places of the number of rows and after it, of the list of row groups and after it, and 1; their last is
        0 where the footer is broken, or has its fields in another order.
        Of each row group its place, its number of rows, and its size in bytes before compression, int64 [G].
    """
    kinds, left = np.empty(DEEPEST, np.int64), np.empty(DEEPEST, np.int64)
    outline, none = np.zeros(5, np.int64), np.zeros(0, np.int64)
    places, rows, sizes = none, none, none
    at, name = np.int64(0), np.int64(0)
    while True:
        kind, name, at = _field(data, at, name)
        if kind == 0:
            break
        start = at
        if name == ROW_GROUPS and kind == LIST:
            count, kind, at = _list(data, at)
            if at < 0 or kind != STRUCT or count > len(data) - at or outline[3] or not outline[1]:
                return outline, none, none, none
            places, rows, sizes = np.empty(count, np.int64), np.zeros(count, np.int64), np.zeros(count, np.int64)
            for group in range(count):
                places[group] = at
                field = np.int64(0)
                while True:
                    kind, field, at = _field(data, at, field)
                    if kind == 0:
                        break
                    if kind == 6 and field in (GROUP_ROWS, GROUP_BYTES):
                        value, at = _number(data, at)
                        if field == GROUP_ROWS:
                            rows[group] = (value >> 1) ^ -(value & 1)
                        else:
                            sizes[group] = (value >> 1) ^ -(value & 1)
                    elif kind > 0:
                        at = _skip(data, at, kind, kinds, left)
                    if kind < 0 or at < 0:
                        return outline, none, none, none
            outline[2], outline[3] = start, at
        elif kind > 0:
            at = _skip(data, at, kind, kinds, left)
            if name == NUM_ROWS and kind == 6:
                outline[0], outline[1] = start, at
        if kind < 0 or at < 0:
            return outline, none, none, none
    if at == len(data) and outline[3]:
        outline[4] = 1
    return outline, places, rows, sizes
