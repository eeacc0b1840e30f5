"""What an encoder's stream keeps of the frames that it has heard."""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor


class StreamingKeyValues:
    """Keys and values of a clip's last frames in one layer, in memory of twice their size: each is copied few times.

    Args:
        history: how many frames before a chunk it hears; None for all.
    """

    def __init__(self, history: int | None) -> None:
        self.history, self.start, self.end = history, 0, 0
        self.memory: Tensor | None = None
        self.shared = False  # with another, so that it is not written

    def copy(self) -> StreamingKeyValues:
        """Another one, which copies what is held once more is heard."""
        found = copy(self)
        found.shared = True
        return found

    def add(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Takes those of a chunk `[1, H, T, D / H]`; returns those of the frames before that it hears, and its own."""
        count, memory = key.shape[2], self.memory
        self.start = self.start if self.history is None else max(self.start, self.end - self.history)
        if memory is None or self.shared or self.end + count > memory.shape[3]:
            held = self.end - self.start
            with torch.inference_mode(False):  # what comes next may be written in another mode
                self.memory = key.new_empty((2, *key.shape[:2], 2 * (held + count), key.shape[3]))
            if memory is not None:
                self.memory[:, :, :, :held] = memory[:, :, :, self.start : self.end]
            memory, self.start, self.end, self.shared = self.memory, 0, held, False
        end = self.end + count
        memory[0, :, :, self.end : end], memory[1, :, :, self.end : end] = key, value
        self.end = end
        return memory[0, :, :, self.start : end], memory[1, :, :, self.start : end]
