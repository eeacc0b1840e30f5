"""Builds the teacher of a run that distils its encoder: the weights of `model.init_from`, at every start of the run."""

from __future__ import annotations

import zlib

from omni.encoder.base import Encoder
from omni.model.linears import crc_of
from omni.model.speech_model import SpeechModel
from omni.utils.patterns import match_names
from train.config.run import FitConfig
from train.distributed.process_group import ProcessGroup
from train.objective.distillation import Teacher, frozen


def teacher_of(config: FitConfig, model: SpeechModel, padded: bool) -> Teacher | None:
    """The teacher, which is a copy of the encoder where its own weights are trained; None where nothing is distilled.

    Args:
        model: with the weights that the run starts from, and without adapters.
        padded: see `Initial.padded`.
    """
    if config.objective.distill_weight == 0:
        return None
    names = [name for name, _ in model.named_parameters()]
    trained = match_names(config.trainable_patterns, names, "trainable", strict=False)
    own = any(name.startswith("encoder.") for name in trained)
    return Teacher(frozen(model.encoder) if own else None, padded)


def teacher_checksum(encoder: Encoder, group: ProcessGroup) -> int:
    """CRC-32 of an encoder's weights, of which all processes but the first may lack the values."""

    def found() -> int:
        value = 0
        for name, tensor in encoder.state_dict().items():
            value = crc_of(tensor, zlib.crc32(name.encode(), value))
        return value

    value: int = group.broadcast(group.run_on_first(found) or 0)
    return value
