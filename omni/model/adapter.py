"""From encoder frames to decoder positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from omni.config import AdapterConfig
from omni.model.blocks import SwiGLU


class Adapter(nn.Module):
    """Stack frames of a clip, then project them to the decoder's width.

    `gated` is mini-omni's `whisperMLP` (`litgpt/model.py` @ 26c31d5): a SwiGLU of its own output width.
    """

    def __init__(self, config: AdapterConfig, encoder_width: int, width: int) -> None:
        super().__init__()
        self.stack = config.stack
        inner = encoder_width * config.stack
        if config.kind == "linear":
            self.project: nn.Module = nn.Linear(inner, width, bias=config.bias)
        elif config.kind == "mlp":
            self.project = nn.Sequential(
                nn.Linear(inner, config.hidden, bias=config.bias),
                nn.GELU(),
                nn.Linear(config.hidden, width, bias=config.bias),
            )
        else:
            self.project = SwiGLU(inner, config.hidden, width, bias=config.bias)

    def forward(self, frames: Tensor, counts: Sequence[int]) -> Tensor:
        """frames [sum(counts), C] of clips one after another; features [sum(ceil(counts / stack)), W]."""
        return self.project(stack_frames(frames, counts, self.stack))


def stack_frames(frames: Tensor, counts: Sequence[int], stack: int) -> Tensor:
    """Join every `stack` frames of a clip into one; a clip's last group is filled with zeros. [N, C] to [N', stack * C]."""
    if stack == 1:
        return frames
    groups, start = [], 0
    for n in counts:
        index = torch.arange(-(-n // stack) * stack)
        groups.append(torch.where(index < n, index + start, sum(counts)))
        start += n
    padded = torch.cat([frames, frames.new_zeros(1, frames.shape[1])])
    return padded[torch.cat(groups).to(frames.device, non_blocking=True)].view(-1, stack * frames.shape[1])
