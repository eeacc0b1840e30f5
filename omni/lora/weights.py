"""Merges adapters into weights that are written, and extracts them as data (see `omni.lora.attach`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from omni.convert.lazy import Lazy, LazyTensors, lazies_of
from omni.errors import UserError
from omni.lora.attach import DEFAULT, Adapters, LowRank, adapted, check_known, fits, linears_of
from omni.lora.config import LoRAConfig
from omni.model.linears import dense_weight, is_quantized, text_rows_of


def merged_state(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of `merged_lazies`, merged."""
    return dict(LazyTensors(merged_lazies(model, lazies_of(state))))


def merged_lazies(model: nn.Module, state: Mapping[str, Lazy]) -> dict[str, Lazy]:
    """Makes a state dict of plain weights, in which the active adapters are merged and no adapter is left; each is merged when
    it is read.

    Args:
        model: gives the active adapters, their scales, and the quantisation of a base.
        state: values, which may be newer than the model's (a running average, shards gathered).
    """
    values, parts, linears = LazyTensors(state), adapted(model), linears_of(model)
    coded = [target for target, linear in linears.items() if is_quantized(linear)]
    # Neither adapters nor entries that a quantised weight adds are plain.
    beside = tuple(f"{target}.lora." for target in parts)
    inside = {key for key in state for target in coded if key.startswith(f"{target}.") and key != f"{target}.bias"}
    out = {name: lazy for name, lazy in state.items() if name not in inside and not name.startswith(beside)}
    for target in [name for name in linears if name in parts or name in coded]:
        linear, name = linears[target], f"{target}.weight"
        shape, dtype = (linear.out_features, linear.in_features), torch.float32
        if target not in coded:
            shape, dtype = state[name].shape, state[name].dtype  # type: ignore[assignment]
        out[name] = Lazy.once(shape, dtype, partial(_merged_weight, target, linear, parts.get(target), values))
    return out


@torch.no_grad()
def _merged_weight(target: str, linear: nn.Linear, part: Adapters | None, state: Mapping[str, Tensor]) -> Tensor:
    """The weight of a linear with its active adapters in it, of the values in a state."""
    own = dense_weight(linear).float().cpu() if is_quantized(linear) else state[f"{target}.weight"]
    total = own.float()
    for name in part.active.names if part is not None else ():
        pair = part.pair(name)  # type: ignore[union-attr]
        if pair is not None:
            down, up = (state[f"{target}.lora.{name}.{half}"].float().to(total.device) for half in "ab")
            total = total + (up @ down) * pair.scale
    return total.to(own.dtype)


@dataclass(frozen=True)
class AdapterWeights:
    """An adapter as data.

    Attributes:
        pairs: A [r, in], B [out, r] and scale by the linear's name.
        config: its configuration, with full names as targets.
        whole: parameters that were trained besides, by name, which take the place of the model's.
        base: checksum of the weights it belongs to (`omni.model.linears.checksum`), None where it is not known.
        text_rows: rows of its base's text head, without our special ids (`omni.model.linears.text_rows_of`), where known.
        partial: names in `whole` of modules that have further parameters, which were not trained.
        copies: names in `whole` of weights that are stored without being asked for, as PEFT stores those of a head; they may
            equal the base's.
    """

    pairs: Mapping[str, tuple[Tensor, Tensor, float]]
    config: LoRAConfig
    whole: Mapping[str, Tensor] = field(default_factory=dict)
    base: int | None = None
    text_rows: int | None = None
    partial: frozenset[str] = frozenset()
    copies: frozenset[str] = frozenset()

    def to(self, dtype: torch.dtype) -> AdapterWeights:
        """A copy with its tensors in another number format."""
        pairs = {name: (a.to(dtype), b.to(dtype), scale) for name, (a, b, scale) in self.pairs.items()}
        return replace(self, pairs=pairs, whole={name: tensor.to(dtype) for name, tensor in self.whole.items()})

    def modules(self) -> dict[str, LowRank]:
        """Pairs to `attach`."""
        out = {}
        for name, (a, b, scale) in self.pairs.items():
            pair = LowRank(a.shape[1], b.shape[0], replace(self.config, rank=a.shape[0]), torch.device("meta"))
            pair.scale, pair.a, pair.b = scale, nn.Parameter(a.clone()), nn.Parameter(b.clone())
            out[name] = pair
        return out


def weights_of(
    model: nn.Module, state: Mapping[str, Tensor], whole: Sequence[str] = (), base: int | None = None
) -> AdapterWeights:
    """Extracts the adapter that was added without a name from a state dict.

    Args:
        state: values, which may be newer than the model's.
        whole: parameters that were trained beside it.
        base: see `AdapterWeights`.
    """
    added = {target: pair for target, part in adapted(model).items() if (pair := part.pair(DEFAULT)) is not None}
    if not added:
        check_known(model, [DEFAULT])
    first = next(iter(added.values()))
    stabilized = all(pair.stabilized for pair in added.values())
    rank = first.a.shape[0]
    alpha = first.scale * (math.sqrt(rank) if stabilized else rank)
    config = LoRAConfig(tuple(added), rank, alpha, first.dropout.p, stabilized)
    pairs = {
        target: (state[f"{target}.lora.{DEFAULT}.a"], state[f"{target}.lora.{DEFAULT}.b"], pair.scale)
        for target, pair in added.items()
    }
    partial = frozenset(key for key in whole if not _is_complete(model, key.rpartition(".")[0], whole))
    return AdapterWeights(pairs, config, {key: state[key] for key in whole}, base, text_rows_of(model), partial)


def _is_complete(model: nn.Module, module: str, whole: Sequence[str]) -> bool:
    """Whether all parameters of a module, which is no adapted linear, are among the trained ones (`whole`)."""
    part = model.get_submodule(module)
    return not hasattr(part, "lora") and all(f"{module}.{name}" in whole for name, _ in part.named_parameters())


@torch.no_grad()
def replace_whole(model: nn.Module, weights: AdapterWeights, where: str) -> None:
    """Copy the parameters that were trained beside an adapter into a model; UserError where one does not fit."""
    own = dict(model.named_parameters())
    for name, value in weights.whole.items():
        if name not in own or not fits(name, value.shape, own[name].shape):
            raise UserError(f"{where}: {name} {list(value.shape)} does not fit the model; it is another model's")
    for name, value in weights.whole.items():
        own[name][: len(value)].copy_(value)
