"""Parses, unpacks and checks the stored codes of answers; codes in another packing are refused by name.

Codes alone reveal incomplete frames, values out of the codec's range, and the offsets that data sets add to them (`PACKINGS`).
They do not reveal the order of SNAC's seven codes in a frame from one row, since every order has the same ranges: a reader
takes the order that its format documents, says so in `OpenedSource.note` and checks it on the first rows together
(`check_order`); `ReaderOptions.order` overrides it.

Many rows reveal it, since each level has a codebook of its own, of which speech uses some codes more than others: places of one
level share their frequent codes, places of two levels agree only by chance. The known orders differ in the levels at places 2
and 4:

    streams   c0 c1 c2 c2 c1 c2 c2
    levels    c0 c1 c1 c2 c2 c2 c2

so one of the two shares the codes of places 3, 5 and 6, which are of the finest level either way. The unit of measurement is
how often those three agree with each other. Only different rows are compared, as pauses repeat a code within one. An order is
refused on overwhelming evidence alone: where codes are too few, or all equally frequent, it passes.

Tested on codes of residual quantisers with SNAC's strides and 256 or 1,024 codes, fitted to mel frames of recorded speech: of
720 samples in the right order none was refused, of 240 in the other with 64 rows of 25 frames 99 %, of 240 with 64 rows of 100
frames all. Codes of SNAC's published weights have not been seen.

Dimensions: R rows, K streams of the codec, F frames, A = K, 7 places, C codes of a codebook.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni.codec.registry import CODECS, code_orders
from omni.errors import UserError
from train.data.readers.contract import Broken, ReaderOptions
from train.data.rows.row import Codes, Row

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class CodesKind:
    """Shape of a codec's stored codes: the codebook size of each stream, and frames a second (None where runs are merged)."""

    sizes: tuple[int, ...]
    frame_rate: float | None


TOKENS: dict[str, CodesKind] = {
    "cosyvoice": CodesKind((4096,), 50.0),
    "cosyvoice2": CodesKind((6561,), 25.0),
    "hubert": CodesKind((1000,), None),
}
"""Stored codes that no codec here decodes: CosyVoice's tokens of versions 1 and 2, LLaMA-Omni's HuBERT clusters."""


def codes_kinds() -> dict[str, CodesKind]:
    """Kinds of stored codes by name: those of the registered codecs, and `TOKENS`."""
    specs = (CODECS[name] for name in sorted(CODECS))
    return {spec.name: CodesKind(spec.codebook_sizes, spec.frame_rate) for spec in specs} | TOKENS


PACKINGS: dict[str, tuple[int, int]] = {
    "plain": (0, 0),
    "layers": (0, 4096),
    "mini-omni": (0, 4160),
    "mini-omni-joint": (152000, 4160),
    "orpheus": (128266, 4096),
}
"""Offset of the codes at place k of a frame: base + k * step. `mini-omni` are the ids of its streams (64 special ones after
each 4096), `mini-omni-joint` those of its joint table, `orpheus` the vocabulary ids of Orpheus and similar models."""

SHOWN = {"streams": "c0 c1 c2 c2 c1 c2 c2", "levels": "c0 | c1 c1 | c2 c2 c2 c2"}
"""SNAC's orders, for messages."""


def read_codes(value: Any, codec: str, order: str, options: ReaderOptions) -> Codes | None:
    """Read the codes of one answer; None where there are none (null, no number).

    Args:
        value: text of integers (frames may be separated by `#` or lines), a flat list frame by frame, or an array: [F] for a
            codec of one stream, [K, F] for more.
        codec, order: as the format documents them; those of the options come first.

    UserError: broken frames, a code out of range (with the packing that would explain it), no codec named at all.
    """
    import numpy as np
    import torch

    codec = options.codec or codec
    kinds = codes_kinds()
    if not codec:
        raise UserError(
            f"has codes of a codec that the format does not name: say which with --read.codec, one of {', '.join(kinds)}"
        )
    shape = kinds[codec]
    streams, sizes = len(shape.sizes), np.array(shape.sizes)
    frames = _frames(value, codec, streams)  # [F, K]
    if not len(frames):
        return None
    base, step = PACKINGS[options.packing]
    codes = frames - (base + step * np.arange(streams))
    bad = (codes < 0) | (codes >= sizes)
    if bad.any():
        frame, stream = (int(i) for i in np.argwhere(bad)[0])
        code = int(frames[frame, stream])
        shown = "" if options.packing == "plain" else f" as packing {options.packing!r} has it"
        out = f"code {code} at place {stream} of frame {frame} is not in {codec}'s 0 to {sizes[stream] - 1}{shown}"
        raise UserError(f"{out}: {_explain(frames, shape, options.packing)}")
    stored = torch.from_numpy(np.ascontiguousarray(codes.T).astype(np.int32))
    return Codes(codec, stored, (options.order or order) if code_orders(codec) else "streams")


def codes_seconds(codes: Codes) -> float | None:
    """Duration of codes in seconds; None where their codec's rate is not known."""
    shape = codes_kinds().get(codes.codec)
    return None if shape is None or shape.frame_rate is None else codes.frames.shape[-1] / shape.frame_rate


def check_duration(codes: Codes | None, seconds: float | None) -> None:
    """Refuse codes whose duration differs from their recording's by more than half a second and a tenth of it (UserError)."""
    lasting = codes_seconds(codes) if codes else None
    if codes and lasting is not None and seconds is not None and abs(lasting - seconds) > max(0.5, 0.1 * seconds):
        raise UserError(
            f"its {codes.codec} codes last {lasting:.2f} s and the recording they belong to {seconds:.2f} s: they are "
            "of another recording, or of another codec; fix the paths"
        )


def _frames(value: Any, codec: str, streams: int) -> np.ndarray:
    """Parse a value into integers [F, K] as they are stored, offsets included."""
    import numpy as np

    if value is None:
        return np.zeros((0, streams), np.int64)
    if isinstance(value, np.ndarray):
        return _from_array(value, codec, streams)
    codes = _from_text(value, codec, streams) if isinstance(value, str) else value
    if not isinstance(codes, Sequence) or set(map(type, codes)) - {int}:
        raise UserError("its codes are neither a list of integers nor their text: write them frame by frame")
    if len(codes) % streams:
        raise UserError(
            f"{len(codes)} codes are no whole frames: {codec} has {streams} to a frame, so the last frame is cut off or the "
            "codes are of another codec"
        )
    try:
        return np.asarray(codes, dtype=np.int64).reshape(-1, streams)
    except OverflowError as error:
        raise UserError(
            f"code {str(max(codes, key=abs))[:40]} is of no codec, nor in any packing: fix or drop the row"
        ) from error


def _from_text(text: str, codec: str, streams: int) -> list[int]:
    """Parse `# 1 2 3 4 5 6 7 # 8 ...`, a frame a line, or integers alone; `<1><2>` for units."""
    parts = re.split(r"[#\n]", text.translate(dict.fromkeys(map(ord, "<>[],"), " ")))
    try:
        frames = [list(map(int, words)) for part in parts if (words := part.split())]
    except ValueError as error:
        raise UserError(f"its codes hold what is no integer of a code ({error}): fix or drop it") from error
    for number, frame in enumerate(frames if len(frames) > 1 else []):
        if len(frame) % streams or ("#" in text and len(frame) != streams):
            raise UserError(f"frame {number} has {len(frame)} codes, {codec} has {streams}: it is cut off, or of another codec")
    return [code for frame in frames for code in frame]


def _from_array(array: np.ndarray, codec: str, streams: int) -> np.ndarray:
    import numpy as np

    if array.dtype.kind not in "iu":
        raise UserError(f"its codes are {array.dtype}, not integers: save them as integers")
    squeezed = array.reshape(-1, 1) if streams == 1 and array.size == max(array.shape, default=0) else array.T
    if squeezed.ndim != 2 or squeezed.shape[1] != streams:
        raise UserError(
            f"its codes are {list(array.shape)}, not [{streams} streams, frames] as {codec} has them: transpose or repack"
        )
    return squeezed.astype(np.int64)


def _explain(frames: np.ndarray, shape: CodesKind, packing: str) -> str:
    """Name the packing that fits codes out of range, for a message."""
    import numpy as np

    streams, sizes = len(shape.sizes), np.array(shape.sizes)
    fitting = []
    for name, (base, step) in PACKINGS.items():
        rest = frames - (base + step * np.arange(streams))
        if name != packing and ((rest >= 0) & (rest < sizes)).all() and (streams > 1 or step == 0):
            fitting.append(f"{name!r} ({base} + {step} x place added)")
    if fitting:
        return f"all of them fit packing {' or '.join(fitting)}; say so with --read.packing if that is how they were made"
    low, high, size = int(frames.min()), int(frames.max()), int(sizes.max())
    if size <= high < size + 64 and low >= 0:
        return "from there on they are special ids (end, pad, ...) of a model's stream: strip them first"
    return f"they reach from {low} to {high}: they are of another codec, or packed in a way unknown here"


def load_array(path: Path) -> np.ndarray:
    """Load the array of an .npy file; UserError for another file, or one of Python objects (which is never unpickled)."""
    import numpy as np

    try:
        loaded = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        why = str(error).partition("\n")[0]
        raise UserError(f"codes {path} are no whole .npy file of numbers ({why}): save them again") from error
    if not isinstance(loaded, np.ndarray):
        raise UserError(f"codes {path} are an archive of arrays: save one array with numpy.save")
    return loaded


ROWS = 64
"""Number of first rows that are tested."""

FEWEST_ROWS, FEWEST_FRAMES = 16, 400
"""Fewest rows and frames that are tested: fewer are no evidence."""

SURE = 6.0
"""Standard errors by which the evidence must exceed 0."""

_FINE = ((3, 5), (3, 6), (5, 6))
_SECOND, _FOURTH = tuple((2, k) for k in (3, 5, 6)), tuple((4, k) for k in (3, 5, 6))


def check_order(items: Iterable[Row | Broken], said: str, format: str) -> None:
    """Refuse SNAC codes that are in another order than the one their format documents (UserError).

    Args:
        items: the first `ROWS` of a data set; those without such codes do not count.
        said: the documented order.
    """
    import numpy as np

    rows, frames = [], []
    for item in items:
        codes = [] if isinstance(item, Broken) else [turn.answer_codes for turn in item.turns if turn.answer_codes is not None]
        arrays = [code.frames.numpy() for code in codes if code.codec == "snac" and code.order == said]
        if arrays:
            rows.append(item.where)
            frames.append(np.concatenate(arrays, axis=1))
    total = sum(part.shape[1] for part in frames)
    if len(rows) < FEWEST_ROWS or total < FEWEST_FRAMES:
        return
    value, error = lean(frames, said)
    if value > max(0.5, SURE * error):
        other = next(name for name in SHOWN if name != said)
        raise UserError(
            f"the SNAC codes of {len(rows)} rows ({total} frames), {rows[0]} to {rows[-1]}, seem to be in the order "
            f"{other!r} ({SHOWN[other]}), not in {said!r} ({SHOWN[said]}) as {format} documents it: say --read.order {other}, "
            f"or --read.order {said} where they are right all the same"
        )


def lean(frames: Sequence[np.ndarray], said: str) -> tuple[float, float]:
    """Evidence in the codes [7, F] of R rows for the other order than `said`, and its standard error. About -1 where `said` is
    right and 1 where the other is; 0 where the codes do not decide. The error is the jackknife's over rows (infinite where no
    code is more frequent than others)."""
    import numpy as np

    size = CODECS.find("snac").codebook_sizes[0]
    counts = np.stack([[np.bincount(stream, minlength=size) for stream in part] for part in frames]).astype(float)  # [R, 7, C]
    total = counts.sum(0)

    def excess(pairs: Sequence[tuple[int, int]]) -> np.ndarray:
        """Excess of the agreement of two rows at these places over chance, [1 + R]: of all rows, then without each."""
        first, second = (list(part) for part in zip(*pairs, strict=True))
        within = np.einsum("rpc,rpc->r", counts[:, first], counts[:, second])
        rest = total - counts
        every = np.sum(total[first] * total[second]) - within.sum()
        without = np.einsum("rpc,rpc->r", rest[:, first], rest[:, second]) - (within.sum() - within)
        lengths = counts[:, 0].sum(-1)
        tried = len(pairs) * np.append(
            lengths.sum() ** 2 - (lengths**2).sum(), (lengths.sum() - lengths) ** 2 - ((lengths**2).sum() - lengths**2)
        )
        return size * np.append(every, without) / tried - 1

    fine, second, fourth = excess(_FINE), excess(_SECOND), excess(_FOURTH)
    if fine.min() <= 0:
        return 0.0, float("inf")
    values = ((fourth - second) if said == "streams" else (second - fourth)) / fine
    spread = values[1:] - values[1:].mean()
    return float(values[0]), float(np.sqrt((len(frames) - 1) / len(frames) * (spread**2).sum()))
