"""Hears where a question ends: a model's encoder and turn head, over sound that is still coming.

    listener = TurnListener.from_folder(folder)       # None for a model without a turn head
    frames = listener.encoder.stream().push(samples)
    probabilities = listener.probabilities(frames)    # [T, 2] of voice and of end, for each encoder frame
    ended(probabilities, RULES["medium"])             # [T] bool: the turn may be answered

S samples of 16 kHz sound, T encoder frames.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from safetensors import safe_open
from torch import Tensor, nn

from omni.checkpoint.folder import load_folder, read_config
from omni.checkpoint.places import WEIGHTS
from omni.encoder.base import Encoder, build_encoder
from omni.errors import UserError
from omni.model.speech_model import SpeechModel, Unfilled, check_state
from omni.stores.reading import local_path

VOICE, END = 0, 1
"""Columns of the head."""


@dataclass(frozen=True)
class EndRule:
    """When a turn has ended: where the end's probability has been at least `threshold` for `frames` encoder frames."""

    threshold: float
    frames: int = 2


HANGOVER = 0.1
"""Seconds by which voice activity may find the end of speech too late."""

RULES = {"low": EndRule(0.8), "medium": EndRule(0.4), "high": EndRule(0.2), "auto": EndRule(0.4)}
"""By eagerness, as the Realtime API names it; chosen on the nano model, see docs/training.md."""


def ended(probabilities: Tensor, rule: EndRule) -> Tensor:
    """Frames [T] bool, of probabilities [T, 2], at which a turn has ended."""
    sure = (probabilities[:, END] >= rule.threshold).int()
    before = torch.nn.functional.pad(sure.cumsum(0), (rule.frames, 0))
    return (before[rule.frames :] - before[: -rule.frames]) == rule.frames


class TurnListener:
    """Encoder and turn head of a model; any number of streams."""

    def __init__(self, encoder: Encoder, head: nn.Module) -> None:
        self.encoder, self.head = encoder.eval(), head.eval()

    @classmethod
    def of(cls, model: SpeechModel) -> TurnListener:
        """The listener of a model; UserError where it has no turn head."""
        if model.turn_head is None:
            raise UserError("the model has no turn head: train one with model.turn (and encoder.mode chunked)")
        return cls(model.encoder, model.turn_head)

    @classmethod
    def from_folder(cls, folder: str | os.PathLike[str]) -> TurnListener | None:
        """The listener of a model folder in float32, its other weights left unread; None where it has no turn head."""
        config, file = read_config(folder), local_path(folder) / WEIGHTS
        if not config.turn:
            return None
        with Unfilled():
            encoder, head = build_encoder(config.encoder), nn.Linear(config.encoder.width, 2)
        parts = nn.ModuleDict({"encoder": encoder, "turn_head": head})
        with safe_open(file, "pt") as stored:
            names = [name for name in stored.keys() if name.partition(".")[0] in parts]  # noqa: SIM118
            if "turn_head.scale" in names:  # in int8
                return cls.of(load_folder(folder, mute=True).model)
            state = {name: stored.get_tensor(name) for name in names}
        check_state(state, parts.state_dict(), str(file))
        parts.load_state_dict(state, assign=True)
        return cls(encoder.float(), head.float())

    @property
    def frames_per_second(self) -> float:
        return self.encoder.config.frames_per_second

    @torch.no_grad()
    def probabilities(self, frames: Tensor) -> Tensor:
        """Probabilities [T, 2] of voice and end, float32, of encoder frames [T, D], one by one: a product of other rows would
        be rounded otherwise."""
        return torch.cat([self.head(frame).float().sigmoid() for frame in frames.split(1)])


class TurnFrames:
    """Probabilities [T, 2] of voice and of end, of the first frames of a sound that is encoded elsewhere while it comes.

    They may come late: a frame's probabilities hold for its time in the sound, not for when they are known. `rate`: frames per
    second of the sound."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.known = torch.zeros(0, 2)

    def put(self, first: int, new: Tensor) -> None:
        """Takes the probabilities of the frames from `first` on."""
        self.known = torch.cat([self.known[:first], new])

    def ended(self, second: float, voiced: float, rule: EndRule) -> bool:
        """Whether the turn has ended, at a second of the sound whose last speech was at `voiced`: frames before that speech do
        not say so."""
        frames = min(int(second * self.rate), len(self.known))
        if frames < rule.frames or frames / self.rate < voiced - HANGOVER:
            return False
        return bool(ended(self.known[frames - rule.frames : frames], rule)[-1])
