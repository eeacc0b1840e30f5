"""What a recording is like: how long, how silent, how clipped, and a digest that is the same for the same samples.

Dimensions: S samples.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from omni.audio.io import AudioInfo, audio_info, read_audio
from omni.errors import UserError
from omni.remote import refuse_remote
from train.data.rows.row import Sound, inside

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

SILENT_DB = -50.0
"""A window whose root mean square is below this, relative to full scale, is silent."""
WINDOW_SECONDS = 0.02
"""Length of these windows."""
CLIPPED_LEVEL, CLIPPED_RUN = 0.995, 3
"""So many samples in a row on one side beyond this share of full scale are clipped; a peak that only touches it is not."""


class BadSound(UserError):
    """A recording that cannot be heard; `kind` says why: `escaping_reference`, `missing_reference` or `broken_sound`."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True)
class Measured:
    """Measures of a recording.

    Attributes:
        seconds: its length.
        silence: share of the windows that are silent.
        clipping: share of the samples that are clipped.
        digest: of its samples and rate: equal for a WAV and the FLAC made of it.
    """

    seconds: float
    silence: float
    clipping: float
    digest: int


def measure(sound: Sound) -> Measured:
    """Measure a recording at its own rate; `BadSound` where it cannot be read."""
    import torch

    samples, rate = load(sound)
    pcm = samples.mul(32768).round().clamp(-32768, 32767).to(torch.int16)
    return Measured(
        seconds=len(samples) / rate,
        silence=silence_share(samples, rate),
        clipping=clipped_share(samples),
        digest=digest(str(rate).encode(), pcm.numpy().tobytes()),
    )


def load(sound: Sound, sample_rate: int = 0) -> tuple[Tensor, int]:
    """Samples [S] and their rate, which is the recording's own where none is asked for; `BadSound` where it cannot be read."""
    if sound.samples is not None:
        return sound.load(sample_rate or sound.sample_rate), sample_rate or sound.sample_rate
    source = _source(sound)
    try:
        rate = sample_rate or audio_info(source).sample_rate
        return read_audio(source, rate), rate
    except UserError as error:
        raise BadSound("broken_sound", str(error)) from error


def head(sound: Sound) -> AudioInfo:
    """What the recording's header says, without decoding it; `BadSound` where it cannot be read."""
    if sound.samples is not None:
        return AudioInfo(sound.sample_rate, len(sound.samples), 1, "samples")
    try:
        info = audio_info(_source(sound))
    except BadSound:
        raise
    except UserError as error:
        raise BadSound("broken_sound", str(error)) from error
    return info


def stored_bytes(sound: Sound) -> bytes:
    """The recording's file as bytes; `BadSound` where a reference leads nowhere."""
    source = _source(sound)
    if isinstance(source, bytes):
        return source
    try:
        with open(source, "rb") as file:
            return file.read()
    except OSError as error:
        raise BadSound("broken_sound", f"{source} cannot be read: {error.strerror}") from error


def _source(sound: Sound) -> bytes | str:
    if sound.data:
        return sound.data
    name = sound.path or ""
    shown = repr(name if len(name) <= 200 else name[:197] + "...")
    if "\0" in name:
        raise BadSound("missing_reference", f"audio {shown} is no path, it holds NUL: name a file in the data's folder")
    try:
        refuse_remote(name, "audio", sound.folder or ".")
    except UserError as error:
        raise BadSound("missing_reference", str(error)) from error
    try:
        path = inside(sound.folder, name)
        there = path.is_file()
    except UserError as error:
        raise BadSound("escaping_reference", str(error)) from error
    except (OSError, RuntimeError) as error:  # too long, no access, links in a circle
        why = (error.strerror if isinstance(error, OSError) else None) or "links in a circle"
        text = f"audio {shown} is no path here ({why}): name a file in the data's folder"
        raise BadSound("missing_reference", text) from error
    if not there:
        raise BadSound("missing_reference", f"audio {shown} is not in the data's folder {sound.folder}: copy it there")
    return str(path)


def silence_share(samples: Tensor, rate: int) -> float:
    """Share of the windows of a sound [S] that are silent; the last one may be shorter."""
    import torch

    size = max(1, round(WINDOW_SECONDS * rate))
    padding = -len(samples) % size
    power = torch.nn.functional.pad(samples, (0, padding)).view(-1, size).square().sum(1)
    counts = torch.full((len(power),), float(size))
    counts[-1] -= padding
    return float((power / counts < 10 ** (SILENT_DB / 10)).float().mean())


def clipped_share(samples: Tensor) -> float:
    """Share of the samples of a sound [S] that are clipped."""
    import torch

    if len(samples) < CLIPPED_RUN:
        return 0.0
    clipped = torch.zeros(len(samples), dtype=torch.bool)
    for side in (samples >= CLIPPED_LEVEL, samples <= -CLIPPED_LEVEL):
        runs = side.unfold(0, CLIPPED_RUN, 1).all(1)  # whether a run starts here
        for offset in range(CLIPPED_RUN):
            clipped[offset : offset + len(runs)] |= runs
    return float(clipped.float().mean())


def digest(*parts: bytes) -> int:
    """64 bits that stand for some bytes: among ten million different ones, two agree with a chance of three in a million."""
    state = blake2b(digest_size=8)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return int.from_bytes(state.digest(), "little")


def text_digest(*texts: str) -> int:
    """The same of texts, whatever their case and spacing."""
    return digest(*(" ".join(text.casefold().split()).encode() for text in texts))


class Digests:
    """64-bit digests, each with the number of the row it is of."""

    def __init__(self) -> None:
        self._values = array("Q")
        self._rows = array("Q")

    def add(self, value: int, row: int) -> None:
        """Take another; rows come in their order."""
        self._values.append(value)
        self._rows.append(row)

    def __len__(self) -> int:
        return len(self._values)

    def repeats(self) -> Iterator[tuple[int, int]]:
        """Rows with a digest that an earlier row has, and the first such row; in order."""
        import numpy as np

        values, rows = self._arrays()
        order = np.argsort(values, kind="stable")  # equal digests stay in the order of their rows
        values, rows = values[order], rows[order]
        first = np.ones(len(values), dtype=bool)
        first[1:] = values[1:] != values[:-1]
        leaders = rows[np.maximum.accumulate(np.where(first, np.arange(len(values)), 0))]
        again = rows != leaders
        yield from sorted(zip(rows[again].tolist(), leaders[again].tolist(), strict=True))

    def shared(self, other: Digests) -> Iterator[tuple[int, int]]:
        """Rows with a digest that `other` has, and the first row there; in order."""
        import numpy as np

        theirs, their_rows = other._arrays()
        order = np.argsort(theirs, kind="stable")
        theirs, their_rows = theirs[order], their_rows[order]
        values, rows = self._arrays()
        place = np.searchsorted(theirs, values)
        if not len(theirs):
            return
        found = theirs[np.minimum(place, len(theirs) - 1)] == values
        yield from zip(rows[found].tolist(), their_rows[place[found]].tolist(), strict=True)

    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        import numpy as np

        return np.frombuffer(self._values, np.uint64), np.frombuffer(self._rows, np.uint64)
