"""The projector, which maps encoder frames to decoder positions, and the head that reads these as tokens of text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni.config import ProjectorConfig, TransformerSettings, from_dict
from omni.encoder.packing import EQUAL_LENGTHS, FEW_LAUNCHES, Near, Packing, pack
from omni.encoder.whisper import EncoderBlock, attend
from omni.errors import UserError
from omni.model.attention import multiplied_in, takes_packed
from omni.model.blocks import SwiGLU
from omni.model.linears import dense_weight, is_quantized
from omni.model.multitask_projector import SHARING
from omni.tasks import TASKS
from omni.utils.hardware import to_device


class ClipBlock(EncoderBlock):
    """Whisper's block with an MLP of any size, and dropout of what each of its parts adds."""

    def __init__(self, width: int, settings: TransformerSettings) -> None:
        super().__init__(width, settings.heads)
        self.mlp = nn.Sequential(nn.Linear(width, settings.mlp), nn.GELU(), nn.Linear(settings.mlp, width))
        self.dropout = nn.Dropout(settings.dropout)

    def forward(self, x: Tensor, packing: Packing, selective: bool = False) -> Tensor:
        y = self.attn_ln(x)
        attended = attend(self.attn.query(y), self.attn.key(y), self.attn.value(y), self.heads, packing)
        x = x + self.dropout(self.attn.out(attended))
        return x + self.dropout(self.mlp(self.mlp_ln(x)))


class ClipTransformer(nn.Module):
    """An MLP of each clip's stacked frames, then transformer blocks over the clip, as large as token embeddings at the end."""

    def __init__(self, inner: int, hidden: int, width: int, settings: TransformerSettings) -> None:
        super().__init__()
        self.width, self.heads, self.near = width, settings.heads, Near(settings.window) if settings.window else None
        self.norm, self.up, self.down = nn.LayerNorm(inner), nn.Linear(inner, hidden), nn.Linear(hidden, width)
        self.blocks = nn.ModuleList(ClipBlock(width, settings) for _ in range(settings.layers))
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(1))  # trained below a head that does not feel it, it would wander to 0

    def forward(self, stacked: Tensor, counts: Sequence[int]) -> Tensor:
        """Features [N, W] of stacked frames [N, C] of clips of `counts`; a clip does not depend on the others."""
        x = self.down(F.gelu(self.up(self.norm(stacked))))
        device, cpu = x.device, x.device.type == "cpu"
        bounds = self.near is None and takes_packed(device, multiplied_in(x), self.width // self.heads)
        ratio = EQUAL_LENGTHS if cpu else FEW_LAUNCHES
        packing = pack([2 * n for n in counts], counts, 0, ratio=ratio, device=device, bounds=bounds, chunks=self.near)
        x = x[packing.output.argsort()]
        for block in self.blocks:
            x = block(x, packing)
        return F.layer_norm(x[packing.output], (self.width,)) * self.scale


class TokenHead(nn.Module):
    """Reads features as tokens of the text stream, or none (CTC): a token's logit is the product of feature and text embedding,
    both normalised, times a learnt temperature; the blank has a linear layer. What it reads is what the decoder takes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blank = nn.Linear(width, 1)
        self.log_temperature = nn.Parameter(torch.zeros(1))
        self.silence = nn.Parameter(torch.zeros(width))

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Of features [N, W], in fp32: vectors [N, W] whose products with the rows of `classifier` are the tokens' logits, and
        the blank's logits [N]."""
        with torch.autocast(features.device.type, enabled=False):
            x = F.normalize(features.float(), dim=-1) * features.shape[1] ** 0.5
            weight = dense_weight(self.blank) if is_quantized(self.blank) else self.blank.weight
            blank = F.linear(x, weight.float(), self.blank.bias.float())
            return x * self.log_temperature.float().exp(), blank[:, 0]

    @staticmethod
    def classifier(embedding: Tensor, dtype: torch.dtype) -> Tensor:
        """The normalised rows [V, W] of the text embedding, which the head does not train."""
        return F.normalize(embedding.detach(), dim=-1).to(dtype)

    @torch.no_grad()
    def likeliest(self, features: Tensor, embedding: Tensor, k: int, classifier: Tensor | None = None) -> tuple[Tensor, ...]:
        """Of features [N, W]: logits [N, k] of the k likeliest tokens, falling, the ids of these [N, k], and the blank's logit
        [N]; `classifier`: where it is made already."""
        x, blank = self(features)
        table = embedding.detach().to(multiplied_in(features)) if classifier is None else classifier
        size = torch.linalg.vector_norm(table, dim=-1).clamp_min(1e-12) if classifier is None else 1.0  # no copy of the table
        logits, ids = zip(*((part.to(table) @ table.T / size).topk(k) for part in x.split(1024)), strict=True)
        return torch.cat(logits).float(), torch.cat(ids), blank

    def read(
        self, features: Tensor, counts: Sequence[int], embedding: Tensor, classifier: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """What the decoder takes in training in place of features [N, W] of clips of `counts`: at a clip's end the embeddings
        of its likeliest tokens, as if these were written; and which of the N it does not see, those before: [N] bool. A clip in
        which nothing is heard is one `silence`. No loss of the decoder reaches the features; the host waits for no device."""
        logits, ids, blank = self.likeliest(features, embedding, 1, classifier)
        best = torch.where(logits[:, 0] > blank, ids[:, 0], -1)
        clip = to_device(torch.arange(len(counts)).repeat_interleave(torch.tensor(counts, dtype=torch.long)), best.device)
        spoken = best >= 0
        spoken[1:] &= (best[1:] != best[:-1]) | (clip[1:] != clip[:-1])
        read = torch.where(spoken[:, None], embedding.detach()[best.clamp_min(0)], self.silence).to(features.dtype)
        order = (2 * clip + spoken).argsort(stable=True)
        last = to_device(torch.tensor(counts).cumsum(0) - 1, best.device)
        return read[order], ~spoken[order].index_fill(0, last, True)


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
                nn.Linear(inner, config.hidden, bias=config.bias), nn.GELU(), nn.Linear(config.hidden, width, bias=config.bias)
            )
        elif config.kind == "transformer":
            settings = from_dict(TransformerSettings, dict(config.settings), "projector.settings")
            self.project = ClipTransformer(inner, config.hidden, width, settings)
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
        if isinstance(self.project, ClipTransformer):
            return self.project(stacked, [-(-n // self.stack) for n in counts])
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
