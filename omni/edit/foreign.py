"""Reads hypernetworks saved by eric-mitchell/mend and zjunlp/EasyEdit, without running code in them.

Their archive (`BaseTrainer.save_state` in both, @ e04fdb9 and @ 14cea82) is a `torch.save` of `model`, `opt`, `lr_opt` and
counters. `model` is a state dict: `edit_lrs`, `mend.<linears>.<tensor>` (`gtn.` for `mend.` in older ones of EasyEdit), and the
language model's configuration as an object. `<linears>` is the shape `(I, O)` of all linears that share a network, or the name
of one weight with `#` for dots. The names of the linears, the initialisation of the networks and whether they normalise are
stored elsewhere: in `config.json` of the run (mend), or in the YAML of hyper-parameters (EasyEdit).

Dimensions: I inputs, O outputs of a linear.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from omni.checkpoint.tensors import read_torch
from omni.convert.huggingface import our_name
from omni.edit.config import MendConfig, Sides, TransformConfig
from omni.edit.deltas import find_linears, shape_of
from omni.edit.mend import Mend
from omni.errors import UserError

HARMLESS = re.compile(r"(transformers|transformers_modules)\.[\w.]*Config")
"""Classes of objects in an archive that are not needed; `Unread` replaces them."""

NETS = {"mlp": "both", "mlp1": "x_net", "mlp2": "delta_net"}
TENSORS = {"u": "u", "v": "v", "bias": "bias", "mode_shift.weight": "shift", "mode_scale.weight": "scale"}
ONE_SIDED: dict[frozenset[str], Sides] = {
    frozenset({"mlp"}): "combined",
    frozenset({"mlp1", "mlp2"}): "separate",
    frozenset({"mlp1"}): "x_only",
    frozenset({"mlp2"}): "delta_only",
}


class Unread:
    """Placeholder for an object of an archive that is not needed."""


def read_editor(path: Path, model: nn.Module, *, settings: Path | None = None, rename: Callable[[str], str] = our_name) -> Mend:
    """Reads a hypernetwork for a model's linears. UserError: no such archive, one with other objects in it, linears whose names
    are given nowhere, or that the model does not have.

    Args:
        settings: their `config.json` or YAML; without it the networks are taken as residual and normalising (both default).
        rename: converts their parameters' names to ours.
    """
    options = _settings(settings)
    state = _state(path)
    lrs = state.pop("edit_lrs", None)
    groups: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        at = re.fullmatch(r"(?:mend|gtn)\.([^.]+)\.(.+)", name)
        if at is None:
            raise UserError(f"{path}: tensor {name} is none of MEND's; is it the archive of another method?")
        groups.setdefault(at[1], {})[at[2]] = tensor
    if lrs is None or not groups:
        raise UserError(f"{path} lacks MEND's edit_lrs or networks; is it the archive of another method?")
    shared = next(iter(groups)).startswith("(")
    theirs = options.get("inner_params") or (None if shared else [key.replace("#", ".") for key in groups])
    if not theirs:
        raise UserError(f"{path} does not name the linears it edits; give its config.json or YAML")
    names = [rename(name if name.endswith(".weight") else f"{name}.weight").removesuffix(".weight") for name in theirs]
    shapes = {name: shape_of(part) for name, part in find_linears(model, names).items()}
    if len(shapes) != len(lrs):
        raise UserError(
            f"{path} has factors for {len(lrs)} linears, but {len(shapes)} are named; name those it was trained for"
        )
    config = MendConfig(
        transform=_transform(groups, options, path),
        shared=shared,
        edit_lr=float(options.get("edit_lr", MendConfig.edit_lr)),
        c_edit=float(options.get("cedit", MendConfig.c_edit)),
        c_loc=float(options.get("cloc", MendConfig.c_loc)),
    )
    mend = Mend(shapes, config)
    ours: dict[str, Tensor] = {"edit_lr": lrs.float()}
    for (name, shape), their in zip(shapes.items(), theirs, strict=True):
        group = groups.get(str(shape) if shared else their.removesuffix(".weight").replace(".", "#") + "#weight")
        if group is None:
            raise UserError(
                f"{path} has no network for {their} of shape {shape}, but for {', '.join(groups)}; is it another model's?"
            )
        ours.update({f"transforms.{mend.networks[name][0]}.0.{k}": v for k, v in _tensors(group, path).items()})
    try:
        mend.load_state_dict(ours)
    except RuntimeError as error:
        raise UserError(f"{path} does not fit the named linears ({' '.join(str(error).split())})") from error
    return mend.eval()


def _settings(path: Path | None) -> dict[str, Any]:
    """Reads their settings, with those of `model` and `mend` flattened into one level."""
    if path is None:
        return {}
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no JSON or YAML that can be read ({error})") from error
    if not isinstance(data, dict):
        raise UserError(f"{path} holds no settings; give the run's config.json, or EasyEdit's YAML")
    for section in ("model", "mend"):
        inner = data.pop(section, None)
        data.update(inner if isinstance(inner, dict) else {})
    return data


def _state(path: Path) -> dict[str, Tensor]:
    """The archive's state dict."""
    stand_ins: list[Any] = []
    if path.is_file():
        try:
            asked = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        except (ValueError, RuntimeError, OSError):  # read_torch raises with the reason
            asked = []
        stand_ins = [(Unread, name) for name in asked if HARMLESS.fullmatch(name)]
    with torch.serialization.safe_globals(stand_ins):
        data = read_torch(path)
    model = data.get("model") if isinstance(data, Mapping) else None
    if not isinstance(model, Mapping):
        raise UserError(f"{path} has no `model`; it is no archive of MEND's training")
    return {str(name): tensor for name, tensor in model.items() if isinstance(tensor, Tensor)}


def _transform(groups: Mapping[str, Mapping[str, Tensor]], settings: Mapping[str, Any], path: Path) -> TransformConfig:
    """Shape of the networks, from their tensors, completed by the settings."""
    mlp_class = settings.get("mlp_class", "IDMLP")
    if mlp_class != "IDMLP":
        raise UserError(f"{path}: mlp_class {mlp_class!r} is not known here; only IDMLP is")
    sides = {frozenset(name.split(".")[0] for name in group if ".layers." in name) for group in groups.values()}
    layers = [int(name.split(".")[2]) for group in groups.values() for name in group if name.endswith(".bias")]
    ranks = [len(tensor) for group in groups.values() for name, tensor in group.items() if name.endswith(".v")]
    mixed = sides == {frozenset({"mlp1"}), frozenset({"mlp2"})}
    if not ranks or not (mixed or (len(sides) == 1 and sides <= ONE_SIDED.keys())):
        raise UserError(f"{path}: its networks {', '.join(sorted(n for side in sides for n in side))} are not MEND's")
    return TransformConfig(
        sides="one_sided" if mixed else ONE_SIDED[next(iter(sides))],
        hidden=max(layers),
        rank=max(ranks),
        init=settings.get("init", "id"),
        norm=bool(settings.get("norm", True)),
    )


def _tensors(group: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Renames one network's tensors to our names; statistics without a sample are nan in theirs, and empty in ours."""
    out: dict[str, Tensor] = {}
    try:
        count = group["k"].nan_to_num(0).round().long().reshape(())
        for side, letter in (("x", "u"), ("delta", "v")):
            out[f"{side}_statistics.mean"] = group[f"{letter}_mean"].float().nan_to_num(0)
            out[f"{side}_statistics.squares"] = group[f"{letter}_s"].float().nan_to_num(0)
            out[f"{side}_statistics.count"] = count
        for name, tensor in group.items():
            if ".layers." in name:
                net, _, number, last = name.split(".", 3)
                out[f"{NETS[net]}.layers.{number}.{TENSORS[last]}"] = tensor.float()
    except (KeyError, ValueError) as error:
        raise UserError(f"{path}: its tensors are not those of MEND ({error} is missing or unknown)") from error
    return out
