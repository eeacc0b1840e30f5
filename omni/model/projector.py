"""The projector, which maps encoder frames to decoder positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from omni.config import ProjectorConfig
from omni.errors import UserError
from omni.model.blocks import SwiGLU
from omni.model.multitask_projector import SHARING
from omni.tasks import TASKS
from omni.utils.hardware import to_device


class Projector(nn.Module):
    """Stacks the frames of a clip and projects them to the decoder's width, gated by task in the multi-task kinds.

    `gated` is mini-omni's `whisperMLP` (`litgpt/model.py` @ 26c31d5): a SwiGLU of its own output width.
    """

    def __init__(self, config: ProjectorConfig, encoder_width: int, width: int) -> None:
        super().__init__()
        self.stack = config.stack
        self.tasks = config.tasks if config.kind in SHARING else ()
        inner = encoder_width * config.stack
        if config.kind == "linear":
            self.project: nn.Module = nn.Linear(inner, width, bias=config.bias)
        elif config.kind == "mlp":
            self.project = nn.Sequential(
                nn.Linear(inner, config.hidden, bias=config.bias),
                nn.GELU(),
                nn.Linear(config.hidden, width, bias=config.bias),
            )
        elif self.tasks:
            self.project = SHARING[config.kind](inner, width, len(self.tasks), **config.settings)
        else:
            self.project = SwiGLU(inner, config.hidden, width, bias=config.bias)

    def forward(self, frames: Tensor, counts: Sequence[int], task: Tensor | Sequence[str] | None = None) -> Tensor:
        """Project frames [sum(counts), C] of clips one after another to features [N, W], N = sum(ceil(counts / stack)).

        Args:
            task: of a multi-task kind, the task of each clip by name, or of each feature by its number in the table of tasks,
                [N] long (below 0 for no task).

        Raises:
            UserError: the projector was not made for a task of that name.
            ValueError: tasks share parts, and none is given.
        """
        stacked = stack_frames(frames, counts, self.stack)
        if not self.tasks:
            return self.project(stacked)
        if task is None:
            raise ValueError("this projector is gated by task: say what each clip is asked as")
        return self.project(stacked, self._task_indices(task, counts, stacked.device))

    def _task_indices(self, task: Tensor | Sequence[str], counts: Sequence[int], device: torch.device) -> Tensor:
        """The index in the projector of each feature's task, [N]; a task that it has no part for counts as the first."""
        if isinstance(task, Tensor):
            own = [self.tasks.index(name) if name in self.tasks else 0 for name in TASKS]
            return to_device(torch.tensor(own), device)[task.clamp_min(0)]
        for name in task:
            if name not in self.tasks:
                raise UserError(
                    f"the model's projector was made for the tasks {', '.join(self.tasks)}; it has no part for {name}: ask as "
                    "one of them, or train it with projector.tasks"
                )
        indices = torch.tensor([self.tasks.index(name) for name in task])
        return indices.repeat_interleave(torch.tensor([-(-n // self.stack) for n in counts])).to(device)


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
    return padded[to_device(torch.cat(groups), frames.device)].view(-1, stack * frames.shape[1])
