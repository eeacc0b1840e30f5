"""Tensors of a model in int8, made of one in full precision piece by piece, and the model that holds them.

    <linear>.weight  int8 [N, K]    <linear>.scale  float32 [N]    <linear>.bias  as it was
    <table>.weight   int8 [V, W]    <table>.scale   float32 [V]    all others as they were

Each row is rounded by itself (`omni.model.int8`), so a weight in pieces gives the same as a whole one, and never more than a
piece of it is held in full precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property

import torch
from torch import Tensor

from omni.checkpoint.bounds import finite
from omni.config import ModelConfig
from omni.convert.lazy import FLOATS, Lazy, type_name
from omni.errors import UserError
from omni.model.int8 import MOST, largest_of, whole_numbers
from omni.model.int8_model import check_linears, empty_int8
from omni.model.linears import TEXT_HEAD, crc_of, name_crc
from omni.model.speech_model import SpeechModel, Unfilled, check_state

PIECE = 2 << 20
"""Bytes of a weight in full precision that are held at once; rounding them takes twice as much besides."""


class RoundedRows:
    """A weight [N, K] in full precision, whose int8 rows and scales are computed as they are read."""

    def __init__(self, name: str, source: Lazy, where: str, rows: int | None = None) -> None:
        """`rows`: of the weight that its checksum counts, see `omni.model.linears.checksum_of`; all by default."""
        self.name, self.source, self.where = name, source, where
        self.counted = source.length if rows is None else min(rows, source.length)
        self._checksum = 0

    @cached_property
    def largest(self) -> Tensor:
        """The largest |w| of each row, [N]; UserError where a row is not finite."""
        out, value = torch.empty(self.source.length), name_crc(self.name.removesuffix(".weight"))
        for start, rows in self._pieces(0, self.source.length):
            if not finite(rows):
                raise not_finite(self.name, self.where)
            out[start : start + len(rows)] = largest_of(rows)
            if start < self.counted:
                value = crc_of(rows[: self.counted - start].to(torch.bfloat16), value)
        self._checksum = value
        return out

    @property
    def checksum(self) -> int:
        """`omni.model.linears.checksum_of` the weight in full precision."""
        _ = self.largest
        return self._checksum

    @property
    def weight(self) -> Lazy:
        """The int8 rows."""
        return Lazy(self.source.shape, torch.int8, self._weight)

    @property
    def scale(self) -> Lazy:
        """The scales [N]."""
        return Lazy(self.source.shape[:1], torch.float32, lambda start, stop: self.largest[start:stop] / MOST)

    def _weight(self, start: int, stop: int) -> Tensor:
        out = torch.empty(stop - start, *self.source.shape[1:], dtype=torch.int8)
        for first, rows in self._pieces(start, stop):
            place = first - start
            out[place : place + len(rows)] = whole_numbers(rows, self.largest[first : first + len(rows)])
        return out

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Groups of rows of at most `PIECE` bytes (or of one row), with the number of the first."""
        step = max(1, PIECE * self.source.length // max(1, self.source.nbytes))
        for first in range(start, stop, step):
            yield first, self.source.read(first, min(first + step, stop))


def not_finite(name: str, where: object) -> UserError:
    """The error for a tensor with NaN or infinity."""
    return UserError(
        f"{where}: tensor {name} holds numbers that are not finite, so the model can answer nothing; take the weights of an "
        "earlier step, or fetch them again"
    )


def int8_tensors(
    config: ModelConfig, state: Mapping[str, Lazy], where: str
) -> tuple[dict[str, Lazy], Callable[[], dict[str, int]]]:
    """The tensors in int8 of a model in full precision, none of them read yet.

    Returns:
        the tensors, and the checksums of the linears' weights in full precision, which are known after the scales were read.

    Raises:
        UserError: a tensor is missing, of another shape, not part of the configuration or no floating-point weight, or a
            module cannot be replaced (`omni.model.int8_model.check_linears`).
    """
    model = _skeleton(config)
    check_state(state, model.state_dict(), where)  # type: ignore[arg-type]
    for name, tensor in state.items():
        if tensor.dtype not in FLOATS:
            raise UserError(
                f"{where}: tensor {name} is {type_name(tensor.dtype)}, not in full precision; quantise the original model"
            )
    linears = [f"{name}.weight" for name in check_linears(model)]
    text_rows, rounded = config.layout.text.size, dict[str, RoundedRows]()
    for name in empty_int8(model):
        counted = text_rows if name == f"{TEXT_HEAD}.weight" else None
        rounded[name] = RoundedRows(name, state[name], where, counted)
    out = dict(state)
    for name, rows in rounded.items():
        out[name], out[f"{name.removesuffix('weight')}scale"] = rows.weight, rows.scale
    return out, lambda: {name.removesuffix(".weight"): rounded[name].checksum for name in linears}


def model_in_int8(config: ModelConfig, state: Mapping[str, Tensor], checksums: Mapping[str, int], where: str) -> SpeechModel:
    """The model of tensors in int8 (not copied).

    Raises:
        UserError: a tensor is missing, of another shape or type, or not part of the configuration.
    """
    model = _skeleton(config)
    norm = state.get("decoder.norm.weight")
    held = empty_int8(model, checksums, torch.float32 if norm is None else norm.dtype)
    check_state(state, model.state_dict(), where)
    wanted = {**dict.fromkeys(held, torch.int8), **dict.fromkeys(held.values(), torch.float32)}
    for name, tensor in state.items():
        kind = wanted.get(name)
        if tensor.dtype != kind if kind is not None else tensor.dtype not in FLOATS:
            raise UserError(
                f"{where}: tensor {name} is {type_name(tensor.dtype)}, which does not fit a model in int8; quantise the "
                "original model again"
            )
    model.load_state_dict(state, assign=True)
    model.decoder.reset_buffers()
    return model


def _skeleton(config: ModelConfig) -> SpeechModel:
    with Unfilled():
        return SpeechModel(config)
