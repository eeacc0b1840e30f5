"""Keeps what was said: a WAV file of each question and each answer, and the conversation, from which a session continues."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from infer.turns.settings import PCM_RATE
from omni.audio.wav import write_audio
from omni.generate.session import Session

CONVERSATION = "conversation.safetensors"


class ChatFolder:
    """Writes into a folder: `question-1.wav`, `answer-1.wav`, ..., and `conversation.safetensors`.

    Raises:
        UserError: something cannot be written.
    """

    def __init__(self, folder: str) -> None:
        self.place = Path(folder)
        self.place.mkdir(exist_ok=True)

    def question(self, number: int, pieces: Sequence[np.ndarray]) -> None:
        """Write a question, samples int16 at `PCM_RATE`."""
        sound = np.concatenate([np.zeros(0, np.int16), *pieces])
        self._write(f"question-{number}.wav", torch.from_numpy(sound.astype(np.float32) / 32768), PCM_RATE)

    def answer(self, number: int, chunks: Sequence[torch.Tensor], rate: int, played: float | None) -> None:
        """Write an answer, samples float32; as far as it was heard where `played` is given, in seconds."""
        sound = torch.cat([torch.zeros(0), *chunks])
        self._write(f"answer-{number}.wav", sound if played is None else sound[: round(played * rate)], rate)

    def _write(self, name: str, sound: torch.Tensor, rate: int) -> None:
        if len(sound):
            write_audio(self.place / name, sound, rate)

    def conversation(self, session: Session) -> None:
        """Write the conversation, where it has a turn."""
        if session.turns:
            session.save(self.place / CONVERSATION)
