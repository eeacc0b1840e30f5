"""Which lines of libraries are dropped: exactly these."""

from __future__ import annotations

import logging

import pytest

from omni.utils import process


class Kept(logging.Handler):
    """Collects lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.mark.parametrize("name", list(process.LINES))
def test_one_line_of_a_library_is_dropped_and_no_other(name: str) -> None:
    logger, kept = logging.getLogger(name), Kept()
    before = list(logger.filters)
    logger.addHandler(kept)
    try:
        process.silence(name)
        process.silence(name)
        logger.warning(f"{process.LINES[name]}: %s", "why")
        logger.warning("something else")
        assert kept.lines == ["something else"] and len(logger.filters) <= len(before) + 1
    finally:
        logger.filters[:] = before
        logger.removeHandler(kept)
