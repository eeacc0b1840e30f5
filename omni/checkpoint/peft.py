"""Adapters as PEFT's folders: `adapter_config.json` and `adapter_model.safetensors`.

Format: https://github.com/huggingface/peft (docs, "PEFT checkpoint format"). Tensors are named
`base_model.model.<linear>.lora_A.weight` [r, in] and `lora_B.weight` [out, r]; `modules_to_save` stand there under their own
names. Linears have the names of our model, with which PEFT finds them in a `SpeechModel`, or those of transformers, with which
it finds them in the text part's folder; either is read.

The file's metadata hold a checksum of the weights that the adapter belongs to; PEFT overlooks it.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from omni.checkpoint.foreign import Foreign, Lazy, joined
from omni.checkpoint.huggingface import our_name, their_name
from omni.checkpoint.safe import Written, beside, read_json, read_safetensors, write_file
from omni.errors import UserError
from omni.model.linears import checksum
from omni.model.lora import LoRAConfig, fits
from omni.model.lora_weights import AdapterWeights

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
CHECKSUM = "omni_base_crc32"

REFUSED = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "fan_in_fan_out": "weights stored the other way round",
    "lora_bias": "biases on B",
    "layer_replication": "replicated layers",
    "target_parameters": "targets that are not modules",
    "trainable_token_indices": "single trained tokens",
    "alora_invocation_tokens": "activated LoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "routed adapters",
    "monteclora_config": "Monte-Carlo LoRA",
    "velora_config": "VeLoRA",
    "kasa_config": "KaSA",
}
"""Settings of PEFT that change what an adapter computes, and what they are."""


def recognise(path: Path) -> bool:
    """Whether this is an adapter's folder."""
    return (path / CONFIG).is_file()


# --- out --------------------------------------------------------------------------------------------------------------


def save_adapter(
    folder: str | os.PathLike[str],
    weights: AdapterWeights,
    *,
    names: Literal["omni", "transformers"] = "omni",
    base: str | None = None,
) -> dict[str, Written]:
    """Write an adapter as a folder that PEFT loads: beside its name, then renamed.

    Args:
        names: of the linears; those of transformers are for an adapter of the text part alone.
        base: where the base model is found, for the reader.

    Returns:
        size and CRC-32 of each file.

    Raises:
        UserError: a linear has no name at transformers, or the place cannot be written; nothing half-written is left.
    """
    target = Path(folder)
    named = {(_theirs(name, target) if names == "transformers" else name): pair for name, pair in weights.pairs.items()}
    whole = {(_theirs(name, target) if names == "transformers" else name): t for name, t in weights.whole.items()}
    tensors = {f"{PREFIX}{name}": t for name, t in whole.items()}
    for name, (a, b, _) in named.items():
        tensors |= {f"{PREFIX}{name}.lora_A.weight": a, f"{PREFIX}{name}.lora_B.weight": b}
    tensors = {name: t.detach().to("cpu").contiguous() for name, t in tensors.items()}
    metadata = {"format": "pt"} | ({} if weights.base is None else {CHECKSUM: str(weights.base)})
    settings = _settings(weights.config, named, list(whole), base)
    with beside(target, sum(t.nbytes for t in tensors.values())) as place:
        return {
            WEIGHTS: write_file(place / WEIGHTS, save(tensors, metadata)),
            CONFIG: write_file(place / CONFIG, (json.dumps(settings, indent=2) + "\n").encode()),
        }


def _theirs(name: str, target: Path) -> str:
    theirs = their_name(f"{name}.").removesuffix(".")
    if not theirs.startswith(("model.", "lm_head")):
        raise UserError(
            f"{target}: {name} is no part of a language model at transformers; write this adapter with our own names, or "
            "train one on decoder.blocks.* alone"
        )
    return theirs


def _settings(
    config: LoRAConfig, pairs: Mapping[str, tuple[Tensor, Tensor, float]], whole: list[str], base: str | None
) -> dict[str, Any]:
    ranks = {name: a.shape[0] for name, (a, _, _) in pairs.items() if a.shape[0] != config.rank}
    alphas = {}
    for name, (a, _, scale) in pairs.items():
        alpha = scale * (math.sqrt(a.shape[0]) if config.rank_stabilized else a.shape[0])
        if not math.isclose(alpha, config.alpha, rel_tol=1e-9):
            alphas[name] = alpha
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if float(config.alpha).is_integer() else config.alpha,
        "lora_dropout": config.dropout,
        "use_rslora": config.rank_stabilized,
        "target_modules": list(pairs),
        "modules_to_save": sorted({name.rpartition(".")[0] for name in whole}) or None,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


# --- in ---------------------------------------------------------------------------------------------------------------


def load_adapter(folder: str | os.PathLike[str]) -> AdapterWeights:
    """Read an adapter's folder.

    Raises:
        UserError: a file is missing or truncated, it is no LoRA or one with settings that are not known here, or its tensors
            do not belong together; a pickle (`adapter_model.bin`).
    """
    path = Path(folder)
    if not (path / CONFIG).is_file():
        raise UserError(f"{path} is no adapter: {CONFIG} is missing; give a folder that PEFT or a run with lora wrote")
    settings = read_json(path / CONFIG)
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise UserError(f"{path / CONFIG}: peft_type is {kind!r}; only LORA is known here")
    for key, what in REFUSED.items():
        if settings.get(key):
            raise UserError(f"{path / CONFIG}: {key} is {settings[key]!r} ({what}), which is not known here")
    if not (path / WEIGHTS).is_file() and (path / "adapter_model.bin").is_file():
        raise UserError(f"{path}: adapter_model.bin is a pickle, which could run code; save it with safe_serialization")
    tensors = {name: lazy() for name, lazy in read_safetensors(path / WEIGHTS).items()}
    try:
        config = LoRAConfig(
            targets=("*",),
            rank=int(settings["r"]),
            alpha=float(settings["lora_alpha"]),
            dropout=float(settings.get("lora_dropout") or 0),
            rank_stabilized=bool(settings.get("use_rslora", False)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path / CONFIG}: r, lora_alpha and lora_dropout do not make an adapter ({error})") from error
    pairs, whole = _sort(tensors, config, settings, path)
    return AdapterWeights(pairs, replace(config, targets=tuple(pairs)), whole, _stored_checksum(path / WEIGHTS))


def _sort(
    tensors: Mapping[str, Tensor], config: LoRAConfig, settings: Mapping[str, Any], path: Path
) -> tuple[dict[str, tuple[Tensor, Tensor, float]], dict[str, Tensor]]:
    halves: dict[str, dict[str, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    for full, tensor in tensors.items():
        found = re.fullmatch(r"(.+)\.lora_([AB])(?:\.\w+)?\.weight", full.removeprefix(PREFIX))
        if found is not None:
            halves.setdefault(found[1], {})[found[2]] = tensor
        elif "lora_" in full:
            raise UserError(f"{path / WEIGHTS}: {full} is of a kind of LoRA that is not known here")
        else:
            whole[our_name(full.removeprefix(PREFIX).replace(".modules_to_save", "").replace(".base_layer", ""))] = tensor
    pairs = {}
    for name, half in halves.items():
        if half.keys() != {"A", "B"}:
            missing = "A" if "B" in half else "B"
            raise UserError(f"{path / WEIGHTS}: {PREFIX}{name}.lora_{missing}.weight is missing; fetch the folder again")
        a, b = half["A"], half["B"]
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
            raise UserError(
                f"{path / WEIGHTS}: lora_A {list(a.shape)} and lora_B {list(b.shape)} of {name} do not fit each other"
            )
        alpha = next((v for key, v in (settings.get("alpha_pattern") or {}).items() if _matches(key, name)), config.alpha)
        if not isinstance(alpha, (int, float)):
            raise UserError(f"{path / CONFIG}: alpha_pattern gives {name} {alpha!r}; it must be a number")
        scale = alpha / (math.sqrt(a.shape[0]) if config.rank_stabilized else a.shape[0])
        pairs[our_name(f"{name}.").removesuffix(".")] = (a, b, scale)
    if not pairs:
        raise UserError(f"{path / WEIGHTS} holds no lora_A and lora_B; it is no adapter")
    return pairs, whole


def _matches(key: str, name: str) -> bool:
    """How PEFT looks up its patterns by module."""
    return re.match(rf"(.*\.)?({key})$", name) is not None


def _stored_checksum(path: Path) -> int | None:
    with safe_open(path, "pt") as file:
        value = (file.metadata() or {}).get(CHECKSUM, "")
    return int(value) if value.isdigit() else None


def check_base(weights: AdapterWeights, read: Callable[[str], Tensor], where: str) -> None:
    """Refuse an adapter that was made for other weights (UserError); one without a checksum passes."""
    if weights.base is not None and checksum(weights.pairs, read) != weights.base:
        raise UserError(
            f"{where}: the adapter was made for other weights than these (their checksum differs); give the base model that it "
            "was trained on"
        )


def merged(model: Foreign, folder: Path) -> Foreign:
    """A checkpoint with an adapter merged into its weights, which are still read piece by piece.

    Raises:
        UserError: the adapter is of another model.
    """
    weights = load_adapter(folder)
    tensors = dict(model.tensors)
    for name in weights.pairs:
        if f"{name}.weight" not in tensors:
            raise UserError(f"{folder}: the adapter adds to {name}, which {model.place} does not have; it is another model's")
    check_base(weights, lambda name: model.tensors[f"{name}.weight"](), str(folder))
    for name, tensor in weights.whole.items():
        if name not in tensors or not fits(name, tensor.shape, tensors[name].shape):
            raise UserError(f"{folder}: {name} {list(tensor.shape)} does not fit {model.place}; it is another model's")
        tensors[name] = _first_rows(Lazy.of(tensor).to(tensors[name].dtype, name), tensors[name])
    for name, (a, b, scale) in weights.pairs.items():
        tensors[f"{name}.weight"] = _with(tensors[f"{name}.weight"], a, b, scale, f"{folder}: {name}")
    return replace(model, tensors=tensors)


def _first_rows(given: Lazy, own: Lazy) -> Lazy:
    """A tensor in place of another one, whose further rows stay."""
    return given if given.shape == own.shape else joined([given, own.rows(given.length, own.length)])


def _with(weight: Lazy, a: Tensor, b: Tensor, scale: float, what: str) -> Lazy:
    """weight + scale * B A, row by row; rows that B lacks (ids that a head was grown by) stay."""
    rows, columns = weight.shape
    if not fits(what, (b.shape[0], a.shape[1]), (rows, columns)):
        raise UserError(f"{what} goes from {a.shape[1]} to {b.shape[0]} features, the model's from {columns} to {rows}")

    def read(start: int, stop: int) -> Tensor:
        own = weight.read(start, stop)
        up = b[start:stop].float()
        out = own.float() if own.dtype != torch.float32 else own.clone()
        out[: len(up)] += (up @ a.float()) * scale
        return out.to(weight.dtype)

    return Lazy(weight.shape, weight.dtype, read)
