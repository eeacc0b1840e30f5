"""Builds an answer one column at a time while the model is sampled: the online counterpart of `omni.layout`.

Dimensions: B batch, K streams, A audio streams (K - 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from omni.errors import UserError
from omni.layout import Layout

_NEVER = 1 << 40


@dataclass(frozen=True)
class Push:
    """Result of one step of the cursor; all tensors over the rows.

    Attributes:
        column: ids that are fed to the model next, [B, K].
        frame: the codes of the finished frame, [B, A]; meaningful where `has_frame`.
        has_frame: [B] bool.
        text: the text token written in this column, [B]; meaningful where `has_text`.
        has_text: [B] bool.
        done: the answer is complete with this column, [B] bool.
    """

    column: Tensor
    frame: Tensor
    has_frame: Tensor
    text: Tensor
    has_text: Tensor
    done: Tensor


@dataclass(frozen=True)
class Cursor:
    """Position of each row in its answer. Immutable: `push` returns the next cursor; nothing here waits for the device.

    Attributes:
        step: number of columns pushed so far, [B].
        text_active, audio_active: streams the row's task answers on, [B] bool.
        text_ended: [B] bool.
        audio_end: index of the frame at which the audio ended (a huge number before), [B].
        history: the last columns of the audio streams, [B, A, max_delay - min_delay + 1], newest last.
        done: [B] bool.
    """

    layout: Layout
    step: Tensor
    text_active: Tensor
    audio_active: Tensor
    text_ended: Tensor
    audio_end: Tensor
    history: Tensor
    done: Tensor

    TENSORS = ("step", "text_active", "audio_active", "text_ended", "audio_end", "history", "done")

    @classmethod
    def start(
        cls,
        layout: Layout,
        text_active: Sequence[bool],
        audio_active: Sequence[bool],
        device: torch.device | str | None = None,
    ) -> Cursor:
        """A cursor before the first column, one row per entry; UserError for a layout with a stream that is `given`."""
        for name, stream in zip(layout.names, layout.streams, strict=True):
            if stream.role == "given":
                raise UserError(
                    f"layout: stream {name} is given from outside, and answers are made of predicted streams only; "
                    "train with it, or make its role 'predicted'"
                )
        rows = len(text_active)
        depth = layout.max_delay - min(s.delay for s in layout.audio) + 1
        false = torch.zeros(rows, dtype=torch.bool, device=device)
        return cls(
            layout=layout,
            step=torch.zeros(rows, dtype=torch.long, device=device),
            text_active=torch.tensor(list(text_active), dtype=torch.bool, device=device),
            audio_active=torch.tensor(list(audio_active), dtype=torch.bool, device=device),
            text_ended=false,
            audio_end=torch.full((rows,), _NEVER, dtype=torch.long, device=device),
            history=torch.zeros(rows, layout.n_audio, depth, dtype=torch.long, device=device),
            done=false.clone(),
        )

    @cached_property
    def constants(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """end [K], pad [K], delays [K] and sizes [K] on the cursor's device (made once, handed on by `push`)."""
        device = self.step.device
        lay = self.layout
        return (
            lay.ids("end").to(device),
            lay.ids("pad").to(device),
            torch.tensor(lay.delays, device=device),
            torch.tensor([s.size for s in lay.streams], device=device),
        )

    def select(self, rows: Sequence[int] | slice | Tensor) -> Cursor:
        """The cursor of some of the rows."""
        index = rows if isinstance(rows, (slice, Tensor)) else torch.tensor(list(rows), device=self.step.device)
        cursor = replace(self, **{name: getattr(self, name)[index] for name in self.TENSORS})
        cursor.__dict__["constants"] = self.constants
        return cursor

    @property
    def needs_text(self) -> Tensor:
        """Rows whose next column takes a sampled text token, [B] bool."""
        return self.text_active & ~self.text_ended & ~self.done

    @property
    def needs_audio(self) -> Tensor:
        """Rows whose next column takes sampled audio, [B] bool."""
        return self.audio_active & ~self.done & (self.step - self.layout.max_delay <= self.audio_end)

    def push(self, sampled: Tensor) -> tuple[Cursor, Push]:
        """Take the sampled ids of each stream, [B, K]; return the next cursor, and what is fed next with the finished frame."""
        lay, a = self.layout, self.layout.n_audio
        end, pad, delays, sizes = self.constants
        live = ~self.done

        frame_index = self.step[:, None] - delays[:a]  # [B, A]: which frame each stream is at
        audio = sampled[:, :a]
        audio_end = self.audio_end
        if lay.fill == "pad":
            ended = (audio == end[:a]) & (frame_index >= 0) & (self.audio_active & live)[:, None]
            here = torch.where(ended, frame_index, _NEVER).amin(1)
            audio_end = torch.minimum(audio_end, here)
            audio = torch.where(frame_index == audio_end[:, None], end[:a], audio)
            audio = torch.where((frame_index < 0) | (frame_index > audio_end[:, None]), pad[:a], audio)
        else:
            last = int(max(range(a), key=lambda k: lay.delays[k]))
            ended = (audio[:, last] == end[last]) & (self.step > 0) & self.audio_active & live
            audio_end = torch.where(ended, torch.minimum(audio_end, frame_index[:, last]), audio_end)
        audio = torch.where((self.audio_active & live)[:, None], audio, pad[:a])

        history = torch.cat([self.history[:, :, 1:], audio[:, :, None]], dim=2)
        depth = history.shape[2]
        back = (delays[:a] - lay.max_delay + depth - 1).expand(len(history), a)
        frame = history.gather(2, back[:, :, None]).squeeze(2)  # token of frame `step - max_delay` on every stream
        newest = self.step - lay.max_delay
        has_frame = (newest >= 0) & (newest < audio_end) & self.audio_active & live
        has_frame = has_frame & (frame < sizes[:a]).all(1)

        text_on = self.text_active & live & ~self.text_ended & (self.step >= delays[a])
        text = torch.where(text_on, sampled[:, a], pad[a])
        text_ends = text_on & (text == end[a])
        text_ended = self.text_ended | text_ends

        audio_done = ~self.audio_active | (newest >= audio_end)
        text_done = ~self.text_active | text_ended
        if lay.fill == "sampled":  # mini-omni stops when the last audio stream has ended, even if the text has not
            text_done = text_done | self.audio_active
        done = self.done | (audio_done & text_done)

        push = Push(
            column=torch.cat([audio, text[:, None]], dim=1),
            frame=frame,
            has_frame=has_frame,
            text=text,
            has_text=text_on & ~text_ends & (text < sizes[a]),
            done=done,
        )
        cursor = replace(self, step=self.step + 1, text_ended=text_ended, audio_end=audio_end, history=history, done=done)
        cursor.__dict__["constants"] = self.constants
        return cursor, push
