"""Questions whose sound is still coming: pieces of samples, gathered until they end.

What is wrong with a piece is said when it comes, and a sound that is too long is refused as soon as it is.

S samples of a piece.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterable, Callable, Iterator
from typing import Any

import numpy as np

from omni.audio.waveform import as_piece, is_waveform, whole_rate
from omni.errors import UserError


class Withdrawn(Exception):
    """The answer was cancelled before its question was whole."""


def is_coming(question: Any) -> bool:
    """Whether a question is an iterator of pieces, or an asynchronous one; an open file, which is one of lines, is not."""
    if is_waveform(question) or isinstance(question, (str, bytes, os.PathLike)) or hasattr(question, "read"):
        return False
    return isinstance(question, (Iterator, AsyncIterable))


class Incoming:
    """Gathers the pieces of one question.

    Args:
        sample_rate: of the pieces, in Hz.
        most: seconds of the longest question.

    Attributes:
        withdrawn: its answer was cancelled; nothing more is taken.

    Raises:
        UserError: a sample rate that is none.
    """

    def __init__(self, sample_rate: Any, most: float) -> None:
        self.rate, self.most = whole_rate(sample_rate), most
        self.withdrawn = False
        self._pieces: list[np.ndarray] = []
        self._count = self._samples = 0
        self._two: int | None = None  # dimension of the pieces that has two channels

    @property
    def seconds(self) -> float:
        """Length of the sound so far."""
        return self._samples / self.rate

    def add(self, piece: Any) -> np.ndarray:
        """Take the next piece: samples [S], or of two channels, as a tensor, an array or a list; the caller may use its memory
        again. Returns it as float32, full scale being 1, [S] or [2, S].

        Raises:
            UserError: it is no sound, of another kind than those before, not finite, too loud, or makes the sound too long; it
                names the piece, counted from 1.
            Withdrawn: the answer was cancelled meanwhile.
        """
        if self.withdrawn:
            raise Withdrawn
        self._count += 1
        name = f"piece {self._count} of the question"
        array, scaled = as_piece(piece, name, self.check_room, self._two)
        if not array.size:
            return scaled.reshape(-1)
        if self._pieces and _kind(array) != _kind(self._pieces[0]):
            raise UserError(f"{name} is {_kind(array)}, and those before are {_kind(self._pieces[0])}; give all in one form")
        if not self._pieces and array.ndim == 2:
            self._two = int(np.shape(piece)[0] != 2)
        self._pieces.append(array)
        self._samples += array.shape[-1]
        return scaled

    def check_room(self, samples: int) -> None:
        """UserError where so many samples more are too many."""
        if (samples := self._samples + samples) > self.most * self.rate:
            raise UserError(
                f"the question lasts {samples / self.rate:.8g} s by its piece {self._count}, and at most {self.most:g} s are "
                f"taken; end it before, or correct the sample rate, {self.rate} Hz"
            )

    def check(self) -> None:
        """UserError where there was no sound, Withdrawn where the answer was cancelled."""
        if self.withdrawn:
            raise Withdrawn
        if not self._pieces:
            what = "ended without a piece of sound" if not self._count else f"gave {self._count} pieces without samples"
            raise UserError(f"the question {what}; give at least some milliseconds of sound")

    def forget(self) -> None:
        """Free the pieces."""
        self._pieces = []

    def whole(self) -> np.ndarray:
        """All pieces as one sound, [S] or [2, S]; raises as `check`."""
        self.check()
        return np.concatenate(self._pieces, axis=-1)

    def gather(self, pieces: Iterator[Any]) -> np.ndarray:
        """Take all pieces of an iterator, which is closed where they are not taken to its end; returns `whole`."""
        take_all(pieces, self.add)
        return self.whole()


def take_all(pieces: Iterator[Any], take: Callable[[Any], object]) -> None:
    """Give all pieces of an iterator to a function; the iterator is closed where they are not taken to its end."""
    try:
        for piece in pieces:
            take(piece)
    finally:
        close = getattr(pieces, "close", None)
        if close is not None:
            close()


async def take_all_async(pieces: AsyncIterable[Any], take: Callable[[Any], object]) -> None:
    """`take_all` of an asynchronous iterator."""
    iterator = aiter(pieces)
    try:
        async for piece in iterator:
            take(piece)
    finally:
        close = getattr(iterator, "aclose", None)
        if close is not None:
            await close()


def _kind(array: np.ndarray) -> str:
    numbers = "floating-point numbers" if array.dtype.kind == "f" else str(array.dtype)
    return f"{numbers} of {'two channels' if array.ndim == 2 else 'one channel'}"
