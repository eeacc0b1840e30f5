"""Checks stored codes against their codec's shape and range, without its weights where these are not given.

Dimensions: A audio streams, F frames.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from omni.codec.registry import CODECS, code_orders, load_codec
from omni.errors import UserError
from train.data.readers.codes import CodesKind, codes_kinds
from train.data.rows.row import Codes

if TYPE_CHECKING:
    from torch import Tensor

    from omni.codec.base import AudioCodec


def _has_weights(name: str) -> bool:
    return name not in sorted(CODECS) or bool(CODECS.find(name).weights)


class BadCodes(ValueError):
    """Codes that no model can use; `kind` is `codes_order`, `codes_shape` or `codes_range`."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Codecs:
    """Looks up codecs' sizes and rates, and loads the codecs themselves where their weights are given.

    Args:
        folder: weights of the data's codec; None to use `codes_kinds`, which is also used for all other codecs.
    """

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
        if self.folder is None or not _has_weights(name) or self.foreign(name):
            return codes_kinds().get(name)
        codec = self.load(name)
        return CodesKind(tuple(codec.codebook_sizes), codec.frame_rate)

    def foreign(self, name: str) -> bool:
        """True where a codec can never be loaded here: there is none of that name, or the weights are another codec's."""
        if name not in self._foreign:
            self._foreign[name] = name not in sorted(CODECS) or self._of_another(name)
        return self._foreign[name]

    def _of_another(self, name: str) -> bool:
        if self.folder is None or not _has_weights(name) or self._fits(name):
            return False
        return any(self._fits(other) for other in sorted(CODECS) if other != name and _has_weights(other))

    def _fits(self, name: str) -> bool:
        try:
            self.load(name)
        except UserError:
            return False
        return True

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
