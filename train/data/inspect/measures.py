"""Measures recordings, and checks stored codes: duration, silence, clipping, a digest of the samples; shape and range.

Dimensions: S samples, A audio streams, F frames.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from omni.codec.registry import CODECS, code_orders, load_codec
from omni.errors import UserError
from omni.stores.tries import StoreError
from train.data.readers.codes import CodesKind, codes_kinds
from train.data.rows.reference import UnfitReference
from train.data.rows.row import Codes, Sound

if TYPE_CHECKING:
    from torch import Tensor

    from omni.codec.base import AudioCodec


SILENT_DB = -50.0
"""A window whose root mean square is below this, relative to full scale, is silent."""
WINDOW_SECONDS = 0.02
"""Length of the windows of which the silent ones are counted."""
CLIPPED_LEVEL, CLIPPED_RUN = 0.995, 3
"""Share of full scale, and the number of consecutive samples beyond it, on one side, that are clipping; fewer are a peak."""


class BadSound(UnfitReference):
    """A recording that cannot be read; `kind` is one of `checks.KINDS`: `missing_reference`, `broken_sound`, ..."""


@dataclass(frozen=True)
class Measured:
    """Measures of a recording: its length, the shares of silent windows and of clipped samples, and a digest of samples and
    rate, equal for a WAV and the FLAC made of it."""

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
    """Load samples [S] and their rate: `sample_rate`, or the recording's own for 0; `BadSound` where it cannot be read."""
    with sound_errors():
        rate = sample_rate or sound.info().sample_rate
        return sound.load(rate), rate


@contextmanager
def sound_errors() -> Iterator[None]:
    """A context in which errors of a recording are `BadSound`; a store that cannot be read is none of these."""
    try:
        yield
    except StoreError:
        raise
    except (UserError, OSError) as error:
        raise BadSound(error.kind if isinstance(error, UnfitReference) else "broken_sound", str(error)) from error


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
        runs = side.unfold(0, CLIPPED_RUN, 1).all(1)  # true where a run starts
        for offset in range(CLIPPED_RUN):
            clipped[offset : offset + len(runs)] |= runs
    return float(clipped.float().mean())


def digest(*parts: bytes) -> int:
    """Hash bytes to 64 bits: among ten million different inputs, the probability that any two agree is three in a million."""
    state = blake2b(digest_size=8)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return int.from_bytes(state.digest(), "little")


def text_digest(*texts: str) -> int:
    """Hash texts to 64 bits, regardless of case and whitespace."""
    return digest(*(" ".join(text.casefold().split()).encode() for text in texts))


class BadCodes(UnfitReference):
    """Codes that no model can use; `kind` is `codes_order`, `codes_shape` or `codes_range`."""


class Codecs:
    """Looks up codecs' sizes and rates, and loads the codecs themselves where their weights are given. `folder`: weights of the
    data's codec; None to use `codes_kinds`, which is also used for all other codecs."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._loaded: dict[str, AudioCodec] = {}
        self._foreign: dict[str, bool] = {}

    def load(self, name: str) -> AudioCodec:
        """Load a codec; UserError where it is unknown or its weights do not fit."""
        if name not in self._loaded:
            self._loaded[name] = load_codec(name, self.folder if CODECS.find(name).weights else None)
        return self._loaded[name]

    def facts(self, name: str) -> CodesKind | None:
        """Sizes and rate of a codec; None for an unknown one. UserError where the weights are of no codec at all."""
        if self.folder is None or self.foreign(name) or not CODECS[name].weights:
            return codes_kinds().get(name)
        codec = self.load(name)
        return CodesKind(tuple(codec.codebook_sizes), codec.frame_rate)

    def foreign(self, name: str) -> bool:
        """True where a codec can never be loaded here: there is none of that name, or the weights are another codec's."""
        if name not in self._foreign:
            with_weights = [known for known in sorted(CODECS) if CODECS[known].weights]
            own = self.folder is not None and name in with_weights
            unfit = own and not self._fits(name) and any(self._fits(other) for other in with_weights if other != name)
            self._foreign[name] = name not in CODECS or unfit
        return self._foreign[name]

    def _fits(self, name: str) -> bool:
        with suppress(UserError):
            self.load(name)
        return name in self._loaded

    def seconds(self, codes: Codes) -> float | None:
        """Duration of codes in seconds; None where the codec's rate is not known."""
        facts = self.facts(codes.codec)
        if facts is None or facts.frame_rate is None or codes.frames.ndim != 2:
            return None
        return codes.frames.shape[1] / facts.frame_rate

    def streams(self, codes: Codes) -> Tensor:
        """Check codes, and return their frames [A, F] in the model's order of streams; `BadCodes` where they do not fit."""
        import torch

        frames, orders = codes.frames, code_orders(codes.codec)
        if codes.order != "streams" and codes.order not in orders:
            known = ", ".join(["streams", *orders])
            raise BadCodes("codes_order", f"order {codes.order!r} is unknown for {codes.codec}; known: {known}")
        facts = self.facts(codes.codec)
        if frames.ndim != 2 or frames.shape[1] == 0:
            raise BadCodes("codes_shape", f"codes of shape {list(frames.shape)} hold no frames: drop them or encode again")
        if facts is not None and frames.shape[0] != len(facts.sizes):
            wanted = f"{codes.codec} has {len(facts.sizes)} streams"
            other = " (transposed?)" if frames.shape[1] == len(facts.sizes) else ""
            raise BadCodes("codes_shape", f"codes of shape {list(frames.shape)}, but {wanted}{other}: encode again")
        if codes.order != "streams":
            frames = frames[list(orders[codes.order])]
        if facts is not None:
            sizes = torch.tensor(facts.sizes)[:, None]
            bad = (frames < 0) | (frames >= sizes)
            if bool(bad.any()):
                frame, stream = bad.t().nonzero()[0].tolist()
                raise BadCodes(
                    "codes_range",
                    f"code {int(frames[stream, frame])} of stream {stream}, frame {frame}, is not in {codes.codec}'s 0 to "
                    f"{facts.sizes[stream] - 1} ({int(bad.sum())} such codes): special ids, an offset, or another order",
                )
        return frames
