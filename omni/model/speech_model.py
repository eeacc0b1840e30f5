"""The whole model: speech encoder, projector and decoder in one module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from omni.config import ModelConfig
from omni.encoder import whisper  # noqa: F401 (registers it)
from omni.encoder.base import build_encoder
from omni.errors import UserError
from omni.layout import Layout
from omni.model.attention import choose_kernels
from omni.model.decoder import Decoder, Hidden
from omni.model.kv_cache import KVCache
from omni.model.projector import ClipTransformer, Projector, TokenHead
from omni.model.reading import LOOKED_AT, Ids, choose, readings
from omni.model.recompute import Recompute


class SpeechModel(nn.Module):
    """Turns sound into features in `encode`, and columns of tokens and features into hidden states in `forward`.

    Dimensions: B batch, K streams, T time, N features, W width of the decoder.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        choose_kernels()  # before anything is compiled
        self.config = config
        self.encoder = build_encoder(config.encoder)
        self.projector = Projector(config.projector, config.encoder.width, config.decoder.width)
        self.decoder = Decoder(config.decoder, config.layout)
        self.alignment_head: nn.Module | None = TokenHead(config.decoder.width) if config.ctc == "tokens" else None
        if config.ctc_ids:
            self.alignment_head = nn.Linear(config.encoder.width, config.ctc_ids)
        self.turn_head = nn.Linear(config.encoder.width, 2) if config.turn else None  # voice, end
        self.start_projector()

    @torch.no_grad()
    def start_projector(self) -> None:
        """Set the size at which the projector `transformer` starts: its features are read like token embeddings."""
        table, project = self.decoder.text_embedding.weight, self.projector.project
        if isinstance(project, ClipTransformer) and not table.is_meta:
            project.scale.fill_(table.float().square().mean().sqrt() / self.config.feature_factor)

    @classmethod
    def from_state(cls, config: ModelConfig, state: Mapping[str, Tensor], where: str = "weights") -> SpeechModel:
        """Makes a model of given tensors (not copied), without drawing random ones first.

        Raises:
            UserError: a tensor is missing, of another shape, or not part of the configuration.
        """
        model = cls.unfilled(config)
        check_state(state, model.state_dict(), where)
        model.load_state_dict(state, assign=True)
        return model

    @classmethod
    def unfilled(cls, config: ModelConfig) -> SpeechModel:
        """Makes a model whose parameters are on the meta device; its buffers are not."""
        with Unfilled():
            model = cls(config)
        model.decoder.reset_buffers()
        return model

    @property
    def layout(self) -> Layout:
        return self.config.layout

    @property
    def device(self) -> torch.device:
        return self.decoder.norm.weight.device

    def set_checkpointing(self, recompute: Recompute) -> None:
        """Set what the blocks of encoder and decoder compute again in the backward pass (non-reentrant checkpointing)."""
        self.encoder.checkpointing = recompute
        self.decoder.checkpointing = recompute

    def set_chunk(self, milliseconds: int) -> None:
        """Set how much of a sound the encoder hears at once, 0 for whole clips; see `EncoderConfig.with_chunk`.

        Raises:
            UserError: it hears whole clips only, or its frames do not divide the chunk.
        """
        self.encoder.config = self.config.encoder.with_chunk(milliseconds)
        self.config = replace(self.config, encoder=self.encoder.config)

    def encode(
        self, inputs: Tensor, input_lengths: Sequence[int], frames: Sequence[int], task: Tensor | Sequence[str] | None = None
    ) -> Tensor:
        """Features [N, W] of clips one after another, as `forward` takes them, of what `Encoder.run` takes; task: see
        `Projector.forward`."""
        return torch.cat(self.hear(self.projector(self.encoder.run(inputs, input_lengths, frames), frames, task), frames))

    def hear(self, features: Tensor, frames: Sequence[int]) -> list[Tensor]:
        """What the decoder sees of the projector's features [N, W] of clips of so many frames: [n, W] of each; of a head
        `tokens` what is `heard`, as if it were written."""
        head, clips = self.alignment_head, features.split(self._counts(frames))
        if not isinstance(head, TokenHead):
            return list(clips)
        table = self.decoder.text_table.detach()  # whole, where processes share it
        taken = [table[list(ids)] if ids else head.silence[None] for ids in self.heard(features, frames, table)]
        taken = [new if clip.isfinite().all() else clip for new, clip in zip(taken, clips, strict=True)]
        return [clip.to(features.dtype) / self.config.feature_factor for clip in taken]

    def heard(self, features: Tensor, frames: Sequence[int], table: Tensor | None = None) -> list[Ids]:
        """Ids of the text that a head `tokens` and the language model read in each clip; `table`: `text_table`, if at hand."""
        assert isinstance(self.alignment_head, TokenHead)
        tokens = self.alignment_head.likeliest(features, self.decoder.text_table if table is None else table, LOOKED_AT)
        clips = zip(*(part.cpu().split(self._counts(frames)) for part in tokens), strict=True)
        return [choose(self.decoder, readings(*clip)) for clip in clips]

    def written(self, features: Tensor) -> Ids:
        """Ids of the text that the features of a clip are, where a head `tokens` has read it; none of silence."""
        part = slice(0, 8)  # values by which rows of the table are told apart
        rows = self.decoder.text_table[:, part].detach().to(features.dtype) / self.config.feature_factor
        return tuple(int(token) for feature in features for token in (rows == feature[part]).all(1).nonzero()[:1])

    def read(self, features: Tensor, frames: Sequence[int], classifier: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """What `forward` takes in training as `features` and `left_out` of the projector's features [N, W] of clips of so many
        frames: of a head `tokens` what it reads (`TokenHead.read`), else these, and nothing is left out."""
        if not isinstance(self.alignment_head, TokenHead):
            return features, None
        counts, table = self._counts(frames), self.decoder.text_table
        taken, left_out = self.alignment_head.read(features, counts, table, classifier)
        return taken / self.config.feature_factor, left_out

    def _counts(self, frames: Sequence[int]) -> list[int]:
        return [-(-n // self.projector.stack) for n in frames]

    @property
    def hears_clips(self) -> bool:
        """Whether a feature depends on all of its clip."""
        return isinstance(self.projector.project, ClipTransformer) or isinstance(self.alignment_head, TokenHead)

    def forward(self, tokens: Tensor, *others: Any, **options: Any) -> Hidden:
        """Hidden states of columns of tokens, as of `Decoder.forward`."""
        hidden: Hidden = self.decoder(tokens, *others, **options)
        return hidden

    def make_cache(self, rows: int, length: int, *, chunk: int = 1) -> KVCache:
        """A cache for `rows` sequences of up to `length` positions; `chunk` is the longest prefill piece under a window."""
        c, weight = self.config.decoder, self.decoder.norm.weight
        shape = c.layers + c.post_layers, rows, length, c.kv_heads, c.head_size
        return KVCache(*shape, window=c.window, chunk=chunk, dtype=weight.dtype, device=weight.device)


class Unfilled(TorchFunctionMode):
    """While entered, modules are built on the meta device: `torch.empty` gives meta tensors, and initialisations are skipped.

    Under `torch.device("meta")` the random draws would import the compiler (over a second).
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        values = dict(kwargs or {})
        tensor = args[0] if args else values.get("tensor")  # `nn.init` names it
        if func is torch.empty and values.get("device") is None:
            values["device"] = "meta"
        elif isinstance(tensor, Tensor) and tensor.is_meta and getattr(func, "__name__", "") in _FILLING:
            return tensor
        return func(*args, **values)


_FILLING = ("normal_", "uniform_", "kaiming_uniform_", "fill_", "zero_", "ones_", "zeros_")


def check_state(state: Mapping[str, Any], wanted: Mapping[str, Tensor], where: str) -> None:
    """Refuse weights that do not fit: UserError naming the first tensor that is missing, of another shape, or extra."""
    for name, tensor in wanted.items():
        if name not in state:
            raise UserError(f"{where}: tensor {name} is missing; the weights belong to another configuration")
        if state[name].shape != tensor.shape:
            raise UserError(
                f"{where}: tensor {name} has shape {list(state[name].shape)}, the configuration asks for "
                f"{list(tensor.shape)}; the weights belong to another configuration"
            )
    for name in state:
        if name not in wanted:
            raise UserError(f"{where}: tensor {name} is not part of this configuration; the weights belong to another one")
