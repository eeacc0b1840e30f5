"""Adapters as data: taken out of a state dict, merged into weights, and read and written as PEFT's folders, which are
`adapter_config.json` and `adapter_model.safetensors`.

Format: https://github.com/huggingface/peft (docs, "PEFT checkpoint format"). Tensors are named
`base_model.model.<linear>.lora_A.weight` [r, in] and `lora_B.weight` [out, r]; `modules_to_save` are stored under their own
names. Linears have the names of our model, with which PEFT finds them in a `SpeechModel`, or those of transformers, with which
it finds them in the text part's folder; both are read.

The file's metadata hold a checksum of the weights that the adapter belongs to; PEFT ignores it.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import StrictBool, StrictInt
from torch import Tensor, nn

from omni.checkpoint.places import ADAPTER_CONFIG
from omni.checkpoint.tensors import PT, FileStamp, open_safetensors, read_safetensors, save_tensors, write_file
from omni.config import ModelConfig
from omni.convert.contract import Foreign, TextConfig
from omni.convert.huggingface import our_name, their_name
from omni.convert.lazy import Lazy, LazyTensors, joined, lazies_of
from omni.errors import UserError
from omni.files import read_json, replacing_folder
from omni.lora.attach import DEFAULT, Adapters, LowRank, adapted, check_known, fits, linears_of
from omni.lora.config import LoRAConfig
from omni.model.linears import TEXT_HEAD, TEXT_TABLE, checksum, dense_weight, is_quantized, text_rows_of
from omni.utils.configuration import configuration, validate
from omni.utils.remote import refuse_remote

CONFIG, WEIGHTS = ADAPTER_CONFIG, "adapter_model.safetensors"
PREFIX = "base_model.model."
CHECKSUM, TEXT_ROWS = "omni_base_checksum", "omni_text_rows"

PLAIN_STARTS = ("gaussian", "orthogonal", "eva")
"""Initialisations (`init_lora_weights`) that do not change the base; others subtract something from it at every loading."""

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
"""Settings of PEFT that change an adapter's computation, with a name for the error."""


def recognise(path: Path) -> bool:
    """Whether this is an adapter's folder."""
    return (path / CONFIG).is_file()


def check_folder(folder: str | os.PathLike[str]) -> None:
    """Refuse a folder that does not hold an adapter (UserError)."""
    refuse_remote(folder, "adapter")
    if not recognise(Path(folder)):
        wrong = f"{folder} is no adapter: {CONFIG} is missing" if os.path.exists(folder) else f"adapter {folder} does not exist"
        raise UserError(f"{wrong}; give a folder that PEFT or a run with lora wrote, or a name in the model's adapters/")


# --- as data ----------------------------------------------------------------------------------------------------------


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
    added = {target: pair for target, part in adapted(model).items() if (pair := part.pairs.get(DEFAULT)) is not None}
    if not added:
        check_known(model, [DEFAULT])
    first = next(iter(added.values()))
    stabilized = all(pair.stabilized for pair in added.values())
    config = LoRAConfig(tuple(added), len(first.a), dropout=first.dropout.p, rank_stabilized=stabilized)
    config = replace(config, alpha=first.scale * config.divisor(config.rank))
    pairs = {
        target: (state[f"{target}.lora.{DEFAULT}.a"], state[f"{target}.lora.{DEFAULT}.b"], pair.scale)
        for target, pair in added.items()
    }
    partial = set[str]()  # of modules that are adapted linears, or have parameters that were not trained
    for key in whole:
        module = key.rpartition(".")[0]
        part = model.get_submodule(module)
        if hasattr(part, "lora") or not all(f"{module}.{name}" in whole for name, _ in part.named_parameters()):
            partial.add(key)
    return AdapterWeights(pairs, config, {key: state[key] for key in whole}, base, text_rows_of(model), frozenset(partial))


@torch.no_grad()
def replace_whole(model: nn.Module, weights: AdapterWeights, where: str) -> None:
    """Copy the parameters that were trained beside an adapter into a model; UserError where one does not fit."""
    own = dict(model.named_parameters())
    for name, value in weights.whole.items():
        if name not in own or not fits(name, value.shape, own[name].shape):
            raise UserError(f"{where}: {name} {list(value.shape)} does not fit the model; it is another model's")
    for name, value in weights.whole.items():
        own[name][: len(value)].copy_(value)


# --- out --------------------------------------------------------------------------------------------------------------


def save_adapter(
    folder: str | os.PathLike[str],
    weights: AdapterWeights,
    *,
    names: Literal["omni", "transformers"] = "omni",
    base: str | None = None,
) -> dict[str, FileStamp]:
    """Write an adapter as a folder that PEFT loads: beside its name, then renamed. Returns size and CRC-32 of each file.
    UserError: a linear has no name at transformers, or the place cannot be written; nothing half-written is left.

    Args:
        names: of the linears; those of transformers are for an adapter of the text part alone.
        base: where the base model is found, for the reader.
    """
    target, theirs = Path(folder), names == "transformers"
    rows, named = (weights.text_rows, partial(_theirs, target)) if theirs else (None, str)
    pairs = {named(name): (a, b[:rows] if name == TEXT_HEAD else b, scale) for name, (a, b, scale) in weights.pairs.items()}
    tensors = dict[str, Tensor]()
    for name, tensor in weights.whole.items():
        ours, _, last = name.rpartition(".")
        inside = ".base_layer" if ours in weights.pairs else ""
        tensors[f"{PREFIX}{named(ours)}{inside}.{last}"] = tensor[:rows] if ours in (TEXT_HEAD, TEXT_TABLE) else tensor
    modules = {named(name.rpartition(".")[0]) for name in weights.whole.keys() - weights.partial - weights.copies}
    for name, (a, b, _) in pairs.items():
        tensors |= {f"{PREFIX}{name}.lora_A.weight": a, f"{PREFIX}{name}.lora_B.weight": b}
    tensors = {name: t.detach().to("cpu").contiguous() for name, t in tensors.items()}
    known = {CHECKSUM: weights.base, TEXT_ROWS: weights.text_rows}
    notes = {key: str(value) for key, value in known.items() if value is not None}
    settings = _settings(weights.config, pairs, sorted(modules), base)
    with replacing_folder(target, sum(t.nbytes for t in tensors.values())) as staging:
        return {
            WEIGHTS: save_tensors(tensors, staging / WEIGHTS, {**PT, **notes}),
            CONFIG: write_file(staging / CONFIG, (json.dumps(settings, indent=2) + "\n").encode()),
        }


def rows_left_out(weights: AdapterWeights) -> str:
    """Description of the rows that an adapter under transformers' names cannot hold, those of our own ids; "" for none."""
    heads = [b for name, (_, b, _) in weights.pairs.items() if name == TEXT_HEAD]
    tables = [t for name, t in weights.whole.items() if name.rpartition(".")[0] in (TEXT_HEAD, TEXT_TABLE)]
    rows = max((len(t) for t in (*heads, *tables)), default=0) - (weights.text_rows or math.inf)
    return f"{rows} rows of the text head or table, those of our own ids" if rows > 0 else ""


def _theirs(target: Path, name: str) -> str:
    theirs = their_name(f"{name}.").removesuffix(".")
    if not theirs.startswith(("model.", "lm_head")):
        raise UserError(
            f"{target}: {name} is no part of a language model at transformers; write this adapter with our own names, or "
            "train one on decoder.blocks.* alone"
        )
    return theirs


def _settings(
    config: LoRAConfig, pairs: Mapping[str, tuple[Tensor, Tensor, float]], modules: list[str], base: str | None
) -> dict[str, Any]:
    ranks = {name: a.shape[0] for name, (a, _, _) in pairs.items() if a.shape[0] != config.rank}
    alphas = {name: scale * config.divisor(len(a)) for name, (a, _, scale) in pairs.items()}
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": int(config.alpha) if float(config.alpha).is_integer() else config.alpha,
        "lora_dropout": config.dropout,
        "use_rslora": config.rank_stabilized,
        "target_modules": list(pairs),
        "modules_to_save": modules or None,
        "rank_pattern": ranks,
        "alpha_pattern": {n: alpha for n, alpha in alphas.items() if not math.isclose(alpha, config.alpha, rel_tol=1e-9)},
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


# --- in ---------------------------------------------------------------------------------------------------------------


def load_adapter(folder: str | os.PathLike[str]) -> AdapterWeights:
    """Read an adapter's folder. UserError: a file is missing or truncated, it is no LoRA or one with settings that are not
    known here, or its tensors do not belong together; a pickle (`adapter_model.bin`)."""
    path = Path(folder)
    check_folder(path)
    settings = read_json(path / CONFIG)
    peft_type = settings.get("peft_type")
    if peft_type != "LORA":
        raise UserError(f"{path / CONFIG}: peft_type is {peft_type!r}; only LORA is known here")
    for key, feature in REFUSED.items():
        if settings.get(key):
            raise UserError(f"{path / CONFIG}: {key} is {settings[key]!r} ({feature}), which is not known here")
    start = settings.get("init_lora_weights")
    if isinstance(start, str) and start not in PLAIN_STARTS:
        raise UserError(
            f"{path / CONFIG}: init_lora_weights is {start!r}, so the adapter belongs to a base that PEFT changes when it is "
            "loaded; save it with save_pretrained(..., path_initial_model_for_weight_conversion=...), which makes it plain LoRA"
        )
    if not (path / WEIGHTS).is_file() and (path / "adapter_model.bin").is_file():
        raise UserError(f"{path}: adapter_model.bin is a pickle, which could run code; save it with safe_serialization")
    known = {entry.name: settings[entry.name] for entry in fields(PeftSettings) if settings.get(entry.name) is not None}
    read = validate(PeftSettings, known, lambda key: f"{path / CONFIG}: ")
    try:
        config = LoRAConfig(("*",), read.r, read.lora_alpha, read.lora_dropout, read.use_rslora)
    except UserError as error:
        raise UserError(f"{path / CONFIG}: {error}") from error
    tensors = {name: lazy() for name, lazy in read_safetensors(path / WEIGHTS).items()}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
            problem = "values that are not finite" if tensor.is_floating_point() else f"the type {tensor.dtype}"
            raise UserError(f"{path / WEIGHTS}: {name} has {problem}; make the adapter again")
    pairs, whole, copies = _sort(tensors, config, read, path)
    modules = settings.get("modules_to_save") or ()
    unnamed = frozenset(n for n in whole if not any(_matches(re.escape(our_name(m)), n.rpartition(".")[0]) for m in modules))
    notes = open_safetensors(path / WEIGHTS).metadata() or {}
    base, rows = (int(notes[key]) if notes.get(key, "").isdigit() else None for key in (CHECKSUM, TEXT_ROWS))
    return AdapterWeights(pairs, replace(config, targets=tuple(pairs)), whole, base, rows, unnamed, copies)


@configuration
class PeftSettings:
    """What is read of `adapter_config.json`, under PEFT's names."""

    r: StrictInt
    lora_alpha: float
    lora_dropout: float = 0.0
    use_rslora: StrictBool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)


def _sort(
    tensors: Mapping[str, Tensor], config: LoRAConfig, read: PeftSettings, path: Path
) -> tuple[dict[str, tuple[Tensor, Tensor, float]], dict[str, Tensor], frozenset[str]]:
    halves: dict[str, dict[str, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    copies = set[str]()
    for full, tensor in tensors.items():
        match = re.fullmatch(r"(.+)\.lora_([AB])(?:\.\w+)?\.weight", full.removeprefix(PREFIX))
        if match is not None:
            halves.setdefault(match[1], {})[match[2]] = tensor
        elif "lora_" in full:
            raise UserError(f"{path / WEIGHTS}: {full} is of a kind of LoRA that is not known here")
        else:
            name = our_name(full.removeprefix(PREFIX).replace(".modules_to_save", "").replace(".base_layer", ""))
            whole[name] = tensor
            if full.endswith(".base_layer.weight"):
                copies.add(name)
    pairs = {}
    for name, half in halves.items():
        for missing in {"A", "B"} - half.keys():
            raise UserError(f"{path / WEIGHTS}: {PREFIX}{name}.lora_{missing}.weight is missing; fetch the folder again")
        a, b = half["A"], half["B"]
        if a.ndim != 2 or b.ndim != 2 or not a.shape[0] or a.shape[0] != b.shape[1]:
            raise UserError(
                f"{path / WEIGHTS}: lora_A {list(a.shape)} and lora_B {list(b.shape)} of {name} do not fit each other"
            )
        rank = _own(read.rank_pattern, name, f"{path / CONFIG}: rank_pattern", config.rank)
        alpha = _own(read.alpha_pattern, name, f"{path / CONFIG}: alpha_pattern", config.alpha)
        if a.shape[0] != rank:
            raise UserError(f"{path}: lora_A of {name} is {list(a.shape)}, but {CONFIG} gives it the rank {rank}")
        pairs[our_name(f"{name}.").removesuffix(".")] = (a, b, alpha / config.divisor(len(a)))
    if not pairs:
        raise UserError(f"{path / WEIGHTS} holds no lora_A and lora_B; it is no adapter")
    return pairs, whole, frozenset(copies)


def _own(patterns: Mapping[str, float], name: str, where: str, default: float) -> float:
    """The value that a pattern gives a linear; `default` where none matches it."""
    for pattern, value in patterns.items():
        try:
            if _matches(pattern, name):
                return value
        except re.error as error:
            raise UserError(f"{where} has {pattern!r}, which is not a regular expression ({error})") from error
    return default


def _matches(key: str, name: str) -> bool:
    """Whether a pattern matches a module's name, by PEFT's rule."""
    return re.match(rf"(.*\.)?({key})$", name) is not None


def check_base(weights: AdapterWeights, read: Callable[[str], Tensor | int], where: str) -> None:
    """Refuse an adapter that was made for other weights (UserError); one without a checksum passes. `read`: see
    `omni.model.linears.checksum`."""
    if weights.base is not None and checksum(weights.pairs, read, weights.text_rows) != weights.base:
        raise UserError(
            f"{where}: the adapter was made for other weights than these (their checksum differs); give the base model that it "
            "was trained on"
        )


# --- merged -----------------------------------------------------------------------------------------------------------


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
        if name in part.pairs:  # type: ignore[union-attr]
            down, up = (state[f"{target}.lora.{name}.{half}"].float().to(total.device) for half in "ab")
            total = total + (up @ down) * part.pairs[name].scale  # type: ignore[union-attr]
    return total.to(own.dtype)


def merged(model: Foreign, folder: Path) -> Foreign:
    """Merges an adapter into the weights of a checkpoint, which are still read piece by piece. UserError: the adapter is of
    another model."""
    weights = load_adapter(folder)
    model = _parted(model, weights)
    tensors = dict(model.tensors)
    for name in weights.pairs:
        if f"{name}.weight" not in tensors:
            raise UserError(f"{folder}: the adapter adds to {name}, which {model.path} does not have; it is another model's")
    check_base(weights, lambda name: model.tensors[f"{name}.weight"](), str(folder))
    for name, tensor in weights.whole.items():
        if name not in tensors or not fits(name, tensor.shape, tensors[name].shape):
            raise UserError(f"{folder}: {name} {list(tensor.shape)} does not fit {model.path}; it is another model's")
        own, first = tensors[name], Lazy.of(tensor).to(tensors[name].dtype, name)
        tensors[name] = first if first.shape == own.shape else joined([first, own.rows(first.length, own.length)])
    for name, (a, b, scale) in weights.pairs.items():
        tensors[f"{name}.weight"] = _with(tensors[f"{name}.weight"], a, b, scale, f"{folder}: {name}")
    return replace(model, tensors=tensors)


def _parted(model: Foreign, weights: AdapterWeights) -> Foreign:
    """Unties a model's text head from its text embedding where an adapter changes only one of them, as PEFT does, which adds
    its changes to the named module alone."""
    config = model.config
    touched = {name.removesuffix(".weight") for name in (*weights.pairs, *weights.whole)} & {TEXT_HEAD, TEXT_TABLE}
    if not isinstance(config, (ModelConfig, TextConfig)) or not config.decoder.tie_text or not touched:
        return model
    tensors = {**model.tensors, f"{TEXT_HEAD}.weight": model.tensors[f"{TEXT_TABLE}.weight"]}
    return replace(model, tensors=tensors, config=replace(config, decoder=replace(config.decoder, tie_text=False)))


def _with(weight: Lazy, a: Tensor, b: Tensor, scale: float, name: str) -> Lazy:
    """weight + scale * B A, row by row; rows that B lacks (ids that a head was grown by) stay."""
    rows, columns = weight.shape
    if not fits(name, (b.shape[0], a.shape[1]), (rows, columns)):
        raise UserError(f"{name} goes from {a.shape[1]} to {b.shape[0]} features, the model's from {columns} to {rows}")

    def read(start: int, stop: int) -> Tensor:
        own = weight.read(start, stop)
        up = b[start:stop].float()
        out = own.float() if own.dtype != torch.float32 else own.clone()
        out[: len(up)] += (up @ a.float()) * scale
        return out.to(weight.dtype)

    return Lazy(weight.shape, weight.dtype, read)
