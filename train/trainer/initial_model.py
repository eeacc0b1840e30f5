"""The model that a run starts from: a preset or a model folder, with what the configuration changes, LoRA adapters over a base
that may be quantised, and the teacher of a distilled encoder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from omni.checkpoint.folder import check_full_precision, load_folder, read_config
from omni.checkpoint.places import CODEC
from omni.checkpoint.tensors import NotFinite, finite
from omni.codec.base import AudioCodec
from omni.codec.registry import CODECS, load_if_given
from omni.config import ModelConfig, from_dict, preset, to_dict
from omni.encoder.base import Encoder
from omni.errors import UserError
from omni.layout import Stream
from omni.lora.attach import add_adapter, attach, linears_of
from omni.lora.peft import AdapterWeights, check_base, load_adapter, replace_whole, save_adapter, weights_of
from omni.model.linears import base_checksum, base_weight, quantize
from omni.model.speech_model import SpeechModel
from omni.stores.reading import local_path
from omni.text import Tokenizer
from omni.utils.arguments import match_names
from train.checkpoint.retention import brief, differences
from train.config.run import FitConfig
from train.config.sections import LoRASection, ModelSection
from train.distributed.process_group import ProcessGroup
from train.objective.objective import Teacher

CHUNKS = ("encoder.chunk_ms", "encoder.train_chunk_ms", "encoder.history_ms")
HEADS = ("alignment_head.", "turn_head.")
ADJUSTABLE = ("ctc", "ctc_sounds", "turn", "decoder.context", "encoder.mode", "encoder.long_audio", *CHUNKS)
"""Keys in which a run may differ from the folder it starts from: no weight depends on them but those of `HEADS`. So may the
kind of its projector, whose weights are then drawn."""

BYTES = 256
"""Ids of the byte tokenizer."""


@dataclass(frozen=True)
class Initial:
    """Model, tokenizer and codec that a run starts from.

    Attributes:
        codec: None where its weights are not given.
        codec_folder: the codec's weights, to be copied along.
        extra: plain data of the folder it came from (the files of a converted model), to be handed on.
        padded: in that folder, the encoder hears each clip in its whole window.
    """

    model: SpeechModel
    tokenizer: Tokenizer
    codec: AudioCodec | None
    codec_folder: Path | None
    extra: Mapping[str, Any] = field(default_factory=dict)
    padded: bool = False


def build_initial(section: ModelSection, seed: int, weights: bool = True) -> Initial:
    """Build or read the model; UserError for an unknown preset or key, no fitting tokenizer, or a configuration that does
    not fit `init_from`. Random weights are drawn under `seed`, the same in every process; without `weights` parameters stay
    on the meta device, for a process that another one sends them to."""
    torch.manual_seed(seed)
    codec_folder = Path(section.codec_folder) if section.codec_folder else None
    config, tokenizer = shape_of(section), Tokenizer.from_file(section.tokenizer) if section.tokenizer else None
    if section.start is None:
        check_tokenizer(section, config)
        model = SpeechModel(config) if weights else SpeechModel.unfilled(config)
        codec = load_if_given(config.codec, codec_folder)
        return Initial(model, tokenizer or Tokenizer.bytes(), codec, codec_folder)
    loaded = load_folder(section.start, codec_folder=codec_folder, weights=weights)
    own = local_path(section.start) / CODEC
    if not weights:
        model = SpeechModel.unfilled(config)
    else:
        model = loaded.model.float() if config == loaded.config else _with_weights(config, loaded.model)
    folder, padded = codec_folder or (own if own.is_dir() else None), loaded.config.encoder.fixed_length
    return Initial(model.train(), tokenizer or loaded.tokenizer, loaded.codec, folder, loaded.extra, padded)


def shape_of(section: ModelSection) -> ModelConfig:
    """The configuration of the model that a run trains, without its weights (see `build_initial`). Of a start from a folder
    it is the folder's, or the preset's with the folder's heads on the encoder, with what the section gives; UserError where
    the folder's weights were not made for it."""
    if section.start is None:
        return changed(preset(str(section.preset)), section)
    check_full_precision(section.start, "training")
    base = stored = read_config(section.start)
    if section.preset is not None:
        base = replace(preset(section.preset), ctc=stored.ctc, ctc_sounds=stored.ctc_sounds)
    if section.turn is None:
        section = replace(section, turn=stored.turn)
    config = changed(base, section)
    check_fits(stored, config, str(section.init_from))
    return config


def changed(base: ModelConfig, section: ModelSection) -> ModelConfig:
    """A configuration with the fields that the section gives; an unknown one is a UserError that names the closest."""
    if section.codec not in (None, base.codec) and "streams" not in section.layout:
        sizes = CODECS.find(str(section.codec), "model.codec").codebook_sizes
        if tuple(sizes) != base.layout.codebook_sizes:  # one stream a codebook, each delayed by one more
            audio = [Stream("audio", size, base.layout.audio[0].specials, i + 1) for i, size in enumerate(sizes)]
            base = replace(base, layout=replace(base.layout, streams=(*audio, base.layout.text)))
    data = to_dict(base)
    if "kind" in section.encoder and section.encoder["kind"] != base.encoder.kind:
        data["encoder"] = {}
    for name in ("layout", "encoder", "projector", "decoder"):
        _merge(data[name], getattr(section, name))
    for name in ("codec", "ctc", "ctc_sounds", "turn"):
        if getattr(section, name) is not None:
            data[name] = getattr(section, name)
    if section.ctc == 0 and section.ctc_sounds is None:
        data["ctc_sounds"] = 0
    return from_dict(ModelConfig, data, "model")


def _merge(data: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, Mapping) and isinstance(data.get(key), dict):
            _merge(data[key], value)
        else:
            data[key] = value


def check_fits(stored: ModelConfig, wanted: ModelConfig, folder: str) -> None:
    """Refuse a configuration that the weights of a folder were not made for (UserError naming the first field)."""
    if wanted.projector.kind != stored.projector.kind:
        stored = replace(stored, projector=wanted.projector)
    for key, old, new in differences(to_dict(stored), to_dict(wanted)):
        if key.partition("[")[0] not in ADJUSTABLE:  # train_chunk_ms[0]
            raise UserError(
                f"model.{key} is {brief(new)}, but the weights in {folder} are of a model with {brief(old)}; leave it out, or "
                "start from another folder"
            )


def _with_weights(config: ModelConfig, source: SpeechModel) -> SpeechModel:
    """A model of `config` with the weights of `source`; an alignment head of other ids, a new turn head, and a projector
    of another kind stay random."""
    model = SpeechModel(config)
    own, before = model.state_dict(), source.config
    heads = (config.ctc, config.ctc_sounds) != (before.ctc, before.ctc_sounds)
    new = (HEADS[0],) * heads + ("projector.",) * (config.projector != before.projector)
    weights = {name: t for name, t in source.state_dict().items() if name in own and not name.startswith(new)}
    missing = [name for name in own if name not in weights and not name.startswith((*HEADS, *new))]
    assert not missing, missing  # check_fits lets only these differ
    model.load_state_dict(weights, strict=False)
    if config.projector != before.projector:
        model.start_projector()
    return model


def check_tokenizer(section: ModelSection, config: ModelConfig) -> None:
    """Refuse a model from a preset without a tokenizer, where the text stream has other ids than bytes (UserError)."""
    if section.init_from is None and section.tokenizer is None and config.layout.text.size != BYTES:
        raise UserError(
            f"model.tokenizer is missing: the text stream has {config.layout.text.size} ids, and only one of {BYTES} can do "
            "without; give the model's tokenizer.json"
        )


ADAPTER = "adapter"
"""The folder of a run's adapter."""


def apply_lora(
    model: nn.Module, section: LoRASection, dtype: torch.dtype = torch.float32, group: ProcessGroup | None = None
) -> int:
    """Attaches the adapters of a run to a model, in fp32; returns the checksum of the weights below
    (`omni.model.linears.base_checksum`), which are then quantised if asked. UserError for a pattern that matches no linear,
    or an adapter of another model.

    Args:
        dtype: type in which weights of 4 bits are multiplied (`train.distributed.fabric.quantized_type`).
        group: the processes that all call this; all but the first may have the weights on the meta device.
    """
    linears = linears_of(model)
    adapter = load_adapter(section.init_from) if section.init_from is not None else None
    targets = list(adapter.pairs) if adapter is not None else list(section.targets)
    where = f"lora.init_from {section.init_from}" if adapter is not None else "lora.targets"
    chosen = match_names(targets, list(linears), where, noun="linear")
    check = partial(_checked, model, section, adapter, chosen)
    base = check() if group is None else group.broadcast(group.together(check))
    if section.quantize is not None:
        share = group.broadcast if group is not None and group.world > 1 else None
        names = quantize(model, section.quantize, section.quantize_targets, dtype, share)
        held = {name: linear for name, linear in linears_of(model).items() if name in names}
        biases = [f"{name}.bias" for name, linear in held.items() if linear.bias is not None]
        for name in match_names(section.trainable, biases, "lora.trainable", strict=False):  # bitsandbytes casts them in place
            held[name.removesuffix(".bias")].compute_dtype = torch.float32  # type: ignore[assignment]
    if adapter is not None:
        attach(model, {name: pair.float() for name, pair in adapter.modules().items()})
    else:
        add_adapter(model, section)
    return base


def _checked(model: nn.Module, section: LoRASection, adapter: AdapterWeights | None, chosen: Iterable[str]) -> int:
    """Checks the weights below a given adapter and takes what it has beside its pairs; returns their checksum, 0 on meta."""
    if any(p.is_meta for p in model.parameters()):
        return 0
    base, linears = base_checksum(model, chosen), linears_of(model)
    if adapter is not None:
        check_base(adapter, lambda name: base_weight(linears[name]), f"lora.init_from {section.init_from}")
        replace_whole(model, adapter, f"lora.init_from {section.init_from}")
    return base


def save_lora(folder: Path, model: nn.Module, state: Mapping[str, Tensor], base: int, base_model: str | None) -> Path:
    """Write the adapter of a run as a PEFT folder: its pairs and what was trained beside them, of a `state` with all values,
    with the checksum of the weights below, and the address or folder of the `base_model`. NotFinite where a value is not."""
    whole = [name for name, p in model.named_parameters() if p.requires_grad and ".lora." not in name]
    weights = weights_of(model, state, whole, base)
    pairs = {f"{name}.{factor}": t for name, (a, b, _) in weights.pairs.items() for factor, t in (("A", a), ("B", b))}
    for name, tensor in (pairs | dict(weights.whole)).items():
        if not finite(tensor):
            raise NotFinite(name)
    save_adapter(folder / ADAPTER, weights, base=base_model)
    return folder / ADAPTER


def teacher_of(config: FitConfig, model: SpeechModel, padded: bool) -> Teacher | None:
    """The teacher, which is a copy of the encoder where its own weights are trained; None where nothing is distilled.

    Args:
        model: with the weights that the run starts from, and without adapters.
        padded: see `Initial.padded`.
    """
    if config.objective.distill_weight == 0:
        return None
    return Teacher(model.encoder if trains_encoder(config, model) else None, padded)


def trains_encoder(config: FitConfig, model: SpeechModel) -> bool:
    """Whether a run trains weights of the encoder, or adapters on it where the model has them by now."""
    names = [name for name, _ in model.encoder.named_parameters(prefix="encoder")]
    return bool(match_names(config.trainable_patterns, names, "trainable", strict=False))


def encoder_checksum(encoder: Encoder, group: ProcessGroup) -> int:
    """`Encoder.fingerprint` of an encoder of which all processes but the first may lack the weights."""
    return group.broadcast(encoder.fingerprint() if group.first else 0)
