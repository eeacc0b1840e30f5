"""Attaches a run's LoRA adapters to the model it starts from, quantises the base where asked, and saves the adapters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from omni.checkpoint.bounds import NotFinite, finite
from omni.lora.attach import add_adapter, attach, linear_of, linears_of
from omni.lora.peft import check_base, load_adapter, save_adapter
from omni.lora.weights import AdapterWeights, base_checksum, base_weight, replace_whole, weights_of
from omni.model.quantize import quantize
from omni.utils.patterns import match_names
from train.config.sections import LoRASection
from train.distributed.process_group import ProcessGroup

ADAPTER = "adapter"
"""The folder of a run's adapter."""


def apply(model: nn.Module, section: LoRASection, dtype: torch.dtype = torch.float32, group: ProcessGroup | None = None) -> int:
    """Attaches the adapters of a run to a model, in fp32.

    Args:
        dtype: type in which weights of 4 bits are multiplied (`train.distributed.precision.quantized_type`).
        group: the processes that all call this; all but the first may have the weights on the meta device.

    Returns:
        the checksum of the weights below them (`omni.lora.weights.base_checksum`), which are then quantised if asked.

    Raises:
        UserError: a pattern that matches no linear, an adapter of another model, or no bitsandbytes.
    """
    linears = linears_of(model)
    given = load_adapter(section.init_from) if section.init_from is not None else None
    targets = list(given.pairs) if given is not None else list(section.targets)
    chosen = match_names(
        targets, list(linears), f"lora.init_from {section.init_from}" if given else "lora.targets", what="linear"
    )
    base = (
        _checked(model, section, given, chosen)
        if group is None
        else group.broadcast(group.together(lambda: _checked(model, section, given, chosen)))
    )
    if section.quantize is not None:
        share = group.broadcast if group is not None and group.world > 1 else None
        names = quantize(model, section.quantize, section.quantize_targets, dtype, share)
        held = {name: linear_of(model, name) for name in names}
        biases = [f"{name}.bias" for name, linear in held.items() if linear.bias is not None]
        for name in match_names(section.trainable, biases, "lora.trainable", strict=False):  # bitsandbytes casts them in place
            held[name.removesuffix(".bias")].compute_dtype = torch.float32  # type: ignore[assignment]
    if given is not None:
        attach(model, {name: pair.float() for name, pair in given.modules().items()})
    else:
        add_adapter(model, section)
    return base


def _checked(model: nn.Module, section: LoRASection, given: AdapterWeights | None, chosen: Iterable[str]) -> int:
    """Checks the weights below a given adapter and takes what it has beside its pairs; returns their checksum, 0 on meta."""
    if any(p.is_meta for p in model.parameters()):
        return 0
    base, linears = base_checksum(model, chosen), linears_of(model)
    if given is not None:
        check_base(given, lambda name: base_weight(linears[name]), f"lora.init_from {section.init_from}")
        replace_whole(model, given, f"lora.init_from {section.init_from}")
    return base


def save(folder: Path, model: nn.Module, state: Mapping[str, Tensor], base: int, place: str | None) -> Path:
    """Write the adapter of a run as a PEFT folder: its pairs, and what was trained beside them.

    Args:
        state: all values, adapters' included.
        base: checksum of the weights below.
        place: where the base model is found.

    Raises:
        NotFinite: a value is not finite.
    """
    whole = [name for name, p in model.named_parameters() if p.requires_grad and ".lora." not in name]
    weights = weights_of(model, state, whole, base)
    pairs = {f"{name}.{which}": t for name, (a, b, _) in weights.pairs.items() for which, t in (("A", a), ("B", b))}
    for name, tensor in (pairs | dict(weights.whole)).items():
        if not finite(tensor):
            raise NotFinite(name)
    save_adapter(folder / ADAPTER, weights, base=place)
    return folder / ADAPTER
