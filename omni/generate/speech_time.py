"""Speaking time of a voice (seconds for each character of a text, by its class), and how much of an answer's text was heard by
it.

    letter   an alphabetic character          digit   a digit                       comma   a pause within a sentence
    wide     one of a script without spaces   zero    a 0 after a digit ("2000")    stop    a pause after one
    space    a space without a pause          other   anything else, punctuation itself too

A pause is the space after its punctuation mark, so that the mark at an answer's end brings none; the wide marks, which no space
follows, are pauses themselves. The estimate is kept in a model folder, under `extra` of `config.json`:

    "speech_time": {"version": 1, "seconds": {"letter": 0.0551, "wide": 0.2, ...}}

Text is written ahead of its sound, so its time step is not the time at which a word is spoken. Words are placed by their
speaking time, corrected by the sound itself: the start of speech, pauses in it, which are matched with the punctuation, and,
once the answer has ended, its end. A word counts as heard when its middle was played. Times are in seconds of the answer's
sound.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from omni.errors import UserError

EXTRA = "speech_time"
"""Name of the entry in a model folder's `extra`."""

VERSION = 1

DEFAULT = {
    **{"letter": 0.055, "wide": 0.2, "space": 0.05, "digit": 0.3, "zero": 0.12, "comma": 0.25, "stop": 0.35, "other": 0.04}
}
"""Seconds of each class where nothing was estimated: English at about 15 characters a second."""

PAUSES = ("comma", "stop")

_COMMAS, _STOPS = frozenset(",;:\u2013\u2014"), frozenset(".!?\u2026")
_WIDE_COMMAS, _WIDE_STOPS = frozenset("\uff0c\u3001\uff1b\uff1a"), frozenset("\u3002\uff01\uff1f")
_WIDE = ((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF), (0x3400, 0x9FFF), (0xF900, 0xFAFF))
_HOLD = 20.0  # ridge weight that pulls a class to its default, at the voice's own pace
_FAR = 5.0  # a row whose error is above this many medians is left out


def is_wide(character: str) -> bool:
    """Whether a character is of a script that is written without spaces (Chinese, Japanese, Thai, Lao, Khmer, Burmese)."""
    code = ord(character)
    return code >= 0x20000 or any(low <= code <= high for low, high in _WIDE)


class CharacterReader:
    """Classifies the characters of a text that is given in any pieces."""

    def __init__(self) -> None:
        self._last = self._mark = ""  # the character before, and the last one that was no space

    def classes(self, text: str) -> list[str]:
        """Classes of the next piece's characters."""
        out = []
        for character in text:
            space = character.isspace()
            mark, stops, commas = (self._mark, _STOPS, _COMMAS) if space else (character, _WIDE_STOPS, _WIDE_COMMAS)
            if space and self._last.isspace():
                out.append("other")
            elif mark in stops or mark in commas:
                out.append("stop" if mark in stops else "comma")
            elif space:
                out.append("space")
            elif character.isdigit():
                out.append("zero" if character == "0" and self._last.isdigit() else "digit")
            elif is_wide(character):
                out.append("wide")
            else:
                out.append("letter" if character.isalpha() else "other")
            self._last, self._mark = character, self._mark if space else character
        return out


@dataclass(frozen=True)
class SpeechTime:
    """Seconds per character of each class."""

    seconds: Mapping[str, float] = field(default_factory=lambda: dict(DEFAULT))

    def durations(self, text: str, reader: CharacterReader | None = None) -> list[float]:
        """Seconds of each character of a text, or of the next piece of a text that `reader` classifies."""
        return [self.seconds[name] for name in (reader or CharacterReader()).classes(text)]

    def plain(self) -> dict[str, Any]:
        """Plain data for the model folder, rounded to tenths of a millisecond."""
        return {"version": VERSION, "seconds": {name: round(value, 4) for name, value in self.seconds.items()}}

    @classmethod
    def read(cls, extra: Mapping[str, Any], where: str) -> SpeechTime:
        """Read the estimate in a model folder's `extra`, or the default where there is none. UserError: the entry is not
        in the form of `plain`; `where` is named."""
        if EXTRA not in extra:
            return cls()
        stored = extra[EXTRA]
        try:
            seconds = {name: float(stored["seconds"][name]) for name in DEFAULT}
            good = stored["version"] == VERSION and all(0 <= value < math.inf for value in seconds.values())
        except (TypeError, ValueError, KeyError):
            good = False
        if not good:
            raise UserError(
                f"{where}: extra: {EXTRA} is {repr(stored)[:80]}; it must hold version {VERSION} and the seconds of "
                f"{', '.join(DEFAULT)}; fetch or save the folder again"
            )
        return cls(seconds)


# --- the estimate -----------------------------------------------------------------------------------------------------


def estimate(spoken: Iterable[tuple[str, float]]) -> SpeechTime | None:
    """Estimates speaking time by least squares over answers: texts and the lengths of their sound, in seconds.

    A class that is rare in the answers stays near its default, at the voice's own pace. The constant part of all sounds,
    silence at both ends, is estimated too and not counted as speaking time. Answers that fit much worse than most are left
    out: their text is not the one that is spoken. None where no answer has text and sound.
    """
    rows = [(text, seconds) for text, seconds in spoken if text.strip() and 0 < seconds < math.inf]
    if not rows:
        return None
    counters = [Counter(CharacterReader().classes(text.strip())) for text, _ in rows]
    counts = torch.tensor([[1.0, *(counter[name] for name in DEFAULT)] for counter in counters], dtype=torch.float64)
    seconds = torch.tensor([seconds for _, seconds in rows], dtype=torch.float64)
    default = torch.tensor([0.0, *DEFAULT.values()], dtype=torch.float64)
    default *= (seconds.sum() / (counts @ default).sum()).clamp(0.1, 10)
    hold = _HOLD * torch.eye(len(default), dtype=torch.float64)
    for _ in range(2):  # ridge regression, weighted: a row's error grows with the root of its length
        weighted = counts / seconds[:, None]
        value = torch.linalg.solve(weighted.T @ counts + hold, weighted.T @ seconds + hold @ default)
        error = (counts @ value - seconds).abs() / seconds.sqrt()
        near = error <= _FAR * error.median().clamp(min=0.01)
        counts, seconds = counts[near], seconds[near]
    return SpeechTime(dict(zip(DEFAULT, value[1:].clamp(min=0).tolist(), strict=True)))


WINDOW = 0.01
"""Seconds of a window over which loudness is measured."""

_QUIET = 0.03  # share of the loudest window's level, below which a window is silence
_PAUSE = 0.1  # seconds of silence that make a pause
_SPREAD, _LEAST = 0.14, 0.1  # error of an estimated time: a part that grows with its root, and a constant
_SKIP = {"comma": 1.0, "stop": 3.0}  # cost of punctuation without a pause
_SKIP_PAUSE = 2.0  # cost of a pause without punctuation
_WAIT, _PATIENCE = 0.2, 1.0  # shortest pause that is waited for, in seconds, and for how many standard deviations
_WAITING = 32  # chunks of sound that are collected and measured together
_BACK = 4  # most marks, and pauses, in a row that may stay unmatched


class Loudness:
    """Loudness of the sound handed over so far, window by window; measured on request, or when many chunks are pending.

    NumPy measures it, in the listener's thread alone: PyTorch's would start CPU threads there, at the cost of those that step.
    """

    def __init__(self, sample_rate: int) -> None:
        self.window = max(1, round(sample_rate * WINDOW))
        self.step = self.window / sample_rate
        self._levels: list[float] = []
        self._loudest = 0.0
        self._rest = [np.zeros(0, np.float32)]  # not measured yet

    def push(self, samples: Tensor) -> None:
        """Take the next samples [S]."""
        self._rest.append(np.array(samples.numpy(force=True), np.float32))
        if len(self._rest) > _WAITING:
            self.levels()

    def levels(self) -> list[float]:
        """Level of each whole window."""
        known = np.concatenate(self._rest)
        whole = len(known) // self.window * self.window
        levels = np.sqrt(np.square(known[:whole].reshape(-1, self.window)).mean(1)).tolist()
        self._levels += levels
        self._loudest = max([self._loudest, *levels])
        self._rest = [known[whole:]]
        return self._levels

    def speech(self) -> list[tuple[float, float]]:
        """Start and end of each stretch of speech, with a pause between each and the next."""
        levels = self.levels()
        limit = _QUIET * self._loudest
        out: list[tuple[float, float]] = []
        for i, level in enumerate(levels):
            if level > limit:
                start, end = i * self.step, (i + 1) * self.step
                if out and start - out[-1][1] < _PAUSE:
                    start = out.pop()[0]
                out.append((start, end))
        return out

    def silence(self) -> float:
        """Seconds of silence at the end of the sound; all of it where nothing has sounded."""
        levels = self.levels()
        limit, count = _QUIET * self._loudest, 0
        while count < len(levels) and levels[-1 - count] <= limit:
            count += 1
        return count * self.step


def heard_characters(
    text: str, time: SpeechTime, played: float, speech: Sequence[tuple[float, float]] = (), end: float | None = None
) -> int:
    """Number of a text's characters that were heard: whole words, with their punctuation.

    Args:
        text: all of the text that is known.
        played: seconds of the sound that were heard.
        speech: stretches of speech in the sound that is known, see `Loudness.speech`.
        end: where speech ends, once the text is whole and said to its end.
    """
    if end is not None and played >= end:
        return len(text)
    times = align_text(text, time, speech, end)
    heard = 0
    for first, last in words(text):
        if (times[first] + times[last]) / 2 > played:
            break
        heard = last
    return heard


def words(text: str) -> list[tuple[int, int]]:
    """Start and end (exclusive) of each word in the text. A character of a script without spaces is a word."""
    out: list[tuple[int, int]] = []
    for match in re.finditer(r"\S+", text):
        start = match.start()
        for i in range(match.start() + 1, match.end()):
            if is_wide(text[i]):
                out.append((start, i))
                start = i
        out.append((start, match.end()))
    return out


def align_text(
    text: str, time: SpeechTime, speech: Sequence[tuple[float, float]] = (), end: float | None = None
) -> list[float]:
    """Times at which each character starts, and the last one ends: one more than there are characters, never decreasing.

    Arguments as for `heard_characters`.
    """
    classes = CharacterReader().classes(text)
    starts = [0.0, *accumulate(time.seconds[name] for name in classes)]
    length = starts[len(text.rstrip())]  # a space after the last word is not spoken
    start = speech[0][0] if speech else 0.0
    if end is not None and length > 0:
        pace = max(end - start, 0.0) / length
        starts = [pace * t for t in starts]
    starts = [start + t for t in starts]
    indices = [i for i, name in enumerate(classes[: len(text.rstrip())]) if name in PAUSES and time.seconds[name] >= _PAUSE]
    marks = [(starts[i], starts[i + 1], _SKIP[classes[i]]) for i in indices]
    pauses = [(before[1], after[0]) for before, after in pairwise(speech)]
    known, last = [(start, start)], -1
    for last, pause in matched(start, marks, pauses):
        known += [(marks[last][0], pauses[pause][0]), (marks[last][1], pauses[pause][1])]
    if end is not None:
        known.append((max(starts[len(text.rstrip())], known[-1][0]), max(end, known[-1][1])))
    elif speech:  # the next mark with a long pause: its pause may not have been spoken yet
        for i in indices[last + 1 :]:
            if time.seconds[classes[i]] >= _WAIT:
                reached = _between(known, starts[i])
                latest = reached + _PATIENCE * _error(starts[i] - known[-1][0])
                if reached < speech[-1][1]:
                    known.append((starts[i], min(speech[-1][1], latest)))
                break
    return [_between(known, t) for t in starts]


def matched(
    start: float, marks: Sequence[tuple[float, float, float]], pauses: Sequence[tuple[float, float]]
) -> list[tuple[int, int]]:
    """Matches punctuation marks with pauses: the pairs (mark, pause) of least cost, both in order.

    Args:
        start: time at which speech starts, by estimate and in the sound.
        marks: estimated start and end of each mark's pause, and the cost of leaving it without one.
        pauses: start and end of the pauses in the sound.
    """
    best: dict[tuple[int, int], tuple[float, tuple[int, int]]] = {(-1, -1): (0.0, (-1, -1))}
    for m, mark in enumerate(marks):
        for p, pause in enumerate(pauses):
            ways = []
            for i in range(max(-1, m - 1 - _BACK), m):
                for j in range(max(-1, p - 1 - _BACK), p):
                    if (i, j) in best:
                        guess = mark[0] - (marks[i][1] if i >= 0 else start)
                        real = pause[0] - (pauses[j][1] if j >= 0 else start)
                        cost = (guess - real) ** 2 / (2 * _error(guess) ** 2)
                        cost += sum(skipped[2] for skipped in marks[i + 1 : m]) + _SKIP_PAUSE * (p - 1 - j)
                        ways.append((best[i, j][0] + cost, (i, j)))
            if ways:
                best[m, p] = min(ways)
    if not pauses:
        return []
    at = min(best, key=lambda pair: best[pair][0] + _SKIP_PAUSE * (len(pauses) - 1 - pair[1]))
    out = []
    while at != (-1, -1):
        out.append(at)
        at = best[at][1]
    return out[::-1]


def _error(seconds: float) -> float:
    """Standard deviation of the error of an estimate of that many seconds."""
    return math.hypot(_SPREAD * math.sqrt(max(seconds, 0.0)), _LEAST)


def _between(known: Sequence[tuple[float, float]], t: float) -> float:
    """Maps an estimated time to the sound: linear between known pairs, at the estimated pace after the last."""
    after = bisect_right(known, (t, math.inf))
    if after == 0 or after == len(known):
        near = known[max(after - 1, 0)]
        return near[1] + t - near[0]
    (a, x), (b, y) = known[after - 1], known[after]
    return x + (t - a) / (b - a) * (y - x)
