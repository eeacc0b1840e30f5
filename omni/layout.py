"""The layout: parallel streams, their ids and delays. Only this module knows ids and delays.

A speech language model reads and writes *columns*: one id per stream and time step. The audio streams come first, the
text stream last. Every stream has its own vocabulary, and all ids are local to it:

    [0, size)                    ordinary ids (codes of a codebook, or tokens of the tokenizer)
    size + 0 ... size + 4        end, pad, input, answer, asr (on text) or split (on audio)
    ... size + specials          markers of further tasks (on text), and reserved

The answer of the preset `codec2` (4 audio streams with delays 1..4, text "no" and two frames of sound, `fill: pad`):

    column    0    1    2    3    4    5    6
    audio0    .   a0   a1  end    .    .    .
    audio1    .    .   b0   b1  end    .    .         .   pad: forced, not part of the loss
    audio2    .    .    .   c0   c1  end    .         end supervised once per stream
    audio3    .    .    .    .   d0   d1  end         frame t is finished at column t + 4
    text      n    o  end    .    .    .    .

An answer that its listener interrupted is laid out as a whole answer of the part that was heard: each stream ends right at the
cut. The same answer, cut after one frame and the text "n" (`delayed(..., cut=True)`; a star marks cells that are trained, and
no end is: a model trained on these ends would stop early):

    column    0    1    2    3    4    5
    audio0    .   a0*  end   .    .    .
    audio1    .    .   b0*  end   .    .
    audio2    .    .    .   c0*  end   .
    audio3    .    .    .    .   d0*  end
    text      n*  end   .    .    .    .

`delayed` with its `valid` mask serves training; `Cursor` builds the same columns one at a time while the model
is sampled. mini-omni's order and ids: gpt-omni/mini-omni @ 26c31d5, `inference.py` and `utils/snac_utils.py`.

Dimensions: B batch, K streams, A audio streams (K - 1), C columns, F frames.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from omni.errors import UserError
from omni.utils.configuration import configuration

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LARGEST, LONGEST_DELAY, MOST_STREAMS = 1 << 28, 10_000, 256
"""Upper limits: ids of a stream, time steps of a delay (many minutes of sound), and streams of a layout."""

IGNORE = -100
"""Target of a position that is left out of the loss (the default of `torch.nn.functional.cross_entropy`)."""

SPECIALS = {
    "audio": {"end": 0, "pad": 1, "input": 2, "answer": 3, "split": 4},
    "text": {"end": 0, "pad": 1, "input": 2, "answer": 3, "asr": 4},
}
"""Offset of each special id from the stream's size, by the stream's kind; `omni.tasks.register_task` adds markers to text."""


@configuration
class Stream:
    """One parallel stream.

    Attributes:
        kind: of its ids, `text` or `audio`.
        size: number of ordinary ids.
        specials: number of ids kept after them (at least 5); the table has `size + specials` rows, or `rows`.
        delay: time steps between the start of an answer and the stream's first real token (at most 10,000, and less than the
            decoder's context).
        role: `predicted` by the model, or `given` from outside (a user's stream in a duplex model; for training: `Cursor`
            refuses it).
        rows: rows of the embedding table, where a checkpoint pads it; 0 means `size + specials`.
        end: of a text stream, the ordinary id that ends an answer, as a language model's own; None for the first special id.
    """

    kind: Literal["audio", "text"]
    size: Annotated[int, Field(ge=1, le=LARGEST)]
    specials: Annotated[int, Field(ge=5, le=LARGEST)] = 64
    delay: Annotated[int, Field(ge=0, le=LONGEST_DELAY)] = 0
    role: Literal["predicted", "given"] = "predicted"
    rows: Annotated[int, Field(ge=0, le=LARGEST)] = 0
    end: Annotated[int, Field(ge=0)] | None = None

    def __post_init__(self) -> None:
        if self.end is not None and (self.kind == "audio" or self.end >= self.size):
            raise UserError(f"layout: end {self.end} of a stream of {self.kind} is none of its {self.size} ids of text")
        if self.rows and self.rows < self.size + self.specials:
            raise UserError(f"layout: {self.rows} table rows cannot hold {self.size} ids and {self.specials} special ids")

    @property
    def vocabulary(self) -> int:
        """Rows of the stream's embedding table and head."""
        return self.rows or self.size + self.specials

    def special(self, name: str) -> int:
        """Id of a special token, one of `SPECIALS`; UserError where the stream keeps too few of them for it."""
        known = SPECIALS[self.kind]
        if name == "end" and self.end is not None:
            return self.end
        if known[name] >= self.specials:
            raise UserError(
                f"layout: {name!r} is special id {known[name]} of a {self.kind} stream, and this one keeps {self.specials} of "
                "them: give the task a lower offset, or the layout more specials"
            )
        return self.size + known[name]


@configuration
class ChatFormat:
    """The words of a language model's own chat format, as ids of the text stream; `omni.convert.chat` takes them from its
    template. A conversation is `start`, or `system` around a system message; then each question between the two parts of
    `question`, and each answer up to its end and `after`."""

    question: tuple[tuple[int, ...], tuple[int, ...]]
    start: tuple[int, ...] = ()
    system: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    after: tuple[int, ...] = ()


@configuration
class Layout:
    """All streams of a model, and what fills cells outside of the answer. See the drawing at the top of this module.

    Attributes:
        streams: the audio streams, then the text stream.
        features: encoder features `replace` the audio streams' embeddings where they are, or `add` to all.
        chat: a language model's own chat format around questions and answers; None for the markers of `omni.tasks`.
        fill: ids of a predicted stream before its delay and after its end. `pad`: pad is forced when serving and left out
            of the loss. `sampled`: the model's own samples are fed back (mini-omni's weights); the loss then trains pad. Text
            after its end is pad in both.
        talker: the decoder's post blocks alone hear and speak the audio streams, beside the text head's states and the text's
            embedding (Qwen2.5-Omni's talker): the same is written, spoken or not; a later turn sees what was written.
    """

    streams: Annotated[tuple[Stream, ...], Field(max_length=MOST_STREAMS)]
    features: Literal["replace", "add"] = "replace"
    fill: Literal["pad", "sampled"] = "pad"
    chat: ChatFormat | None = None
    talker: bool = False

    def __post_init__(self) -> None:
        kinds = [s.kind for s in self.streams]
        if kinds.count("text") != 1 or kinds[-1] != "text":
            raise UserError(f"layout: streams are {kinds}; there must be one text stream, and it comes last")
        if len(kinds) < 2:
            raise UserError("layout: there is no audio stream; a speech model needs at least one")
        if self.streams[-1].role != "predicted":
            raise UserError("layout: the text stream cannot be 'given'; only audio streams can")

    @classmethod
    def build(
        cls,
        codebook_sizes: Sequence[int],
        text_size: int,
        *,
        delays: Sequence[int] | None = None,
        specials: int = 64,
        text_rows: int = 0,
        features: Literal["replace", "add"] = "replace",
        fill: Literal["pad", "sampled"] = "pad",
    ) -> Layout:
        """A layout of one audio stream per codebook and a text stream without delay; audio stream i is delayed by i + 1."""
        delays = range(1, len(codebook_sizes) + 1) if delays is None else delays
        audio = [Stream("audio", n, specials, d) for n, d in zip(codebook_sizes, delays, strict=True)]
        return cls((*audio, Stream("text", text_size, specials, rows=text_rows)), features, fill)

    @classmethod
    def preset(cls, name: str, text_size: int | None = None) -> Layout:
        """`mini-omni` (7 SNAC streams, delays 1..7, sampled fill), `snac` (the same, padded fill), `mimi`, `codec2-1600` (8
        streams) or `codec2` (4)."""
        if name not in _PRESETS:
            raise UserError(f"layout preset {name!r} is unknown; known: {', '.join(_PRESETS)}")
        sizes, specials, size, rows, fill = _PRESETS[name]
        return cls.build(sizes, text_size or size, specials=specials, text_rows=0 if text_size else rows, fill=fill)

    # --- what the streams are -------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.streams)

    @property
    def n_audio(self) -> int:
        return len(self.streams) - 1

    @property
    def audio(self) -> tuple[Stream, ...]:
        return self.streams[:-1]

    @property
    def text(self) -> Stream:
        return self.streams[-1]

    @cached_property
    def codebook_sizes(self) -> tuple[int, ...]:
        return tuple(s.size for s in self.audio)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return (*(f"audio{i}" for i in range(self.n_audio)), "text")

    @cached_property
    def delays(self) -> tuple[int, ...]:
        return tuple(s.delay for s in self.streams)

    @cached_property
    def max_delay(self) -> int:
        """Largest delay of an audio stream: frame t is finished at column `t + max_delay`."""
        return max(s.delay for s in self.audio)

    def written(self, tokens: Tensor) -> Tensor:
        """Where text stands in columns [..., K, C]: [..., C] bool."""
        return tokens[..., -1, :] != self.text.special("pad")

    def ids(self, name: str) -> Tensor:
        """One special id per stream, [K]. Audio streams have `answer` for a marker of text, text has `pad` for `split`."""
        import torch

        instead = {"audio": "answer", "text": "pad"} if any(name in known for known in SPECIALS.values()) else {}
        return torch.tensor([s.special(name if name in SPECIALS[s.kind] else instead.get(s.kind, name)) for s in self.streams])

    def allowed(self) -> Tensor:
        """Ids that may be sampled under `fill: pad`, [K, largest vocabulary] bool: the ordinary ones and `end`."""
        import torch

        out = torch.zeros(len(self), max(s.vocabulary for s in self.streams), dtype=torch.bool)
        for k, s in enumerate(self.streams):
            out[k, : s.vocabulary if self.fill == "sampled" else s.size + (s.end is None)] = True
        return out

    # --- offline: a whole answer -----------------------------------------------------------------------------------

    def delayed(self, text: Tensor | None, codes: Tensor | None, *, cut: bool = False) -> tuple[Tensor, Tensor]:
        """Lay out a whole answer.

        Args:
            text: token ids [T], or None where the text stream is silent.
            codes: frames [A, F], or None where the audio streams are silent.
            cut: text and codes are the part that was heard of an interrupted answer: its ends, and what follows them, are not
                trained.

        Returns:
            tokens [K, C] and valid [K, C] bool, true where a token is trained.
        """
        import numpy as np
        import torch

        lengths: list[int | None] = [None if codes is None else codes.shape[1]] * self.n_audio
        lengths.append(None if text is None else len(text))
        if codes is not None:
            self.check_codes(codes)
        columns = max([s.delay + n + 1 for s, n in zip(self.streams, lengths, strict=True) if n is not None], default=0)
        # NumPy fills: of PyTorch's small operations each lets another thread run, and waits for it.
        tokens, valid = np.empty((len(self), columns), np.int64), np.zeros((len(self), columns), bool)
        tokens[:] = self.ids("pad").numpy()[:, None]
        frames, words = (None if part is None else part.numpy(force=True) for part in (codes, text))
        for k, (s, n) in enumerate(zip(self.streams, lengths, strict=True)):
            real = words if k == self.n_audio else None if frames is None else frames[k]
            if n is None or real is None:
                continue
            tokens[k, s.delay : s.delay + n] = real
            tokens[k, s.delay + n] = s.special("end")
            if s.role == "given":
                continue
            last = s.delay + n + (not cut)
            if self.fill == "sampled" and s.kind == "audio":
                valid[k, : last if cut else columns] = True
            else:
                valid[k, s.delay : last] = True
        return torch.from_numpy(tokens), torch.from_numpy(valid)

    def check_codes(self, codes: Tensor) -> None:
        """Refuse codes of another shape or out of range (UserError)."""
        import numpy as np

        if codes.ndim != 2 or codes.shape[0] != self.n_audio:
            raise UserError(f"codes of shape {tuple(codes.shape)} do not fit a layout of {self.n_audio} audio streams")
        if codes.numel() == 0:
            return
        values = codes.numpy(force=True)
        bad = (values < 0) | (values >= np.array(self.codebook_sizes)[:, None])
        if bad.any():
            k, f = np.argwhere(bad)[0].tolist()
            raise UserError(
                f"code {int(codes[k, f])} of audio stream {k}, frame {f}, is outside [0, {self.codebook_sizes[k]}); "
                "were the codes made with another codec, or stored in another order?"
            )

    # --- looking ---------------------------------------------------------------------------------------------------

    def draw(
        self,
        tokens: Tensor,
        valid: Tensor | None = None,
        decode: Callable[[int], str] | None = None,
        width: int = 6,
        *,
        feature_index: Tensor | None = None,
    ) -> str:
        """Draw columns as text, one line a stream.

        A star marks a cell that is trained; `.` is pad, `~` encoder features on the audio streams.

        Args:
            tokens: [K, C].
            valid: which cells are trained, [K, C] bool.
            decode: turns a text id into its string.
            width: characters of a cell.
            feature_index: which feature a column takes, [C], -1 for none.
        """
        heard = [False] * tokens.shape[1] if feature_index is None else (feature_index >= 0).tolist()
        lines = ["column".ljust(8) + "".join(str(c).rjust(width + 1) for c in range(tokens.shape[1]))]
        for k, s in enumerate(self.streams):
            cells = []
            for c, token in enumerate(tokens[k].tolist()):
                if heard[c] and s.kind == "audio":
                    cell = "~"
                elif token == IGNORE:
                    cell = ""
                elif token >= s.size:
                    names = {offset: name for name, offset in SPECIALS[s.kind].items()} | {1: "."}
                    cell = names.get(token - s.size, f"s{token - s.size}")
                elif s.kind == "text" and decode is not None:
                    cell = repr(decode(token))[1:-1] or str(token)
                else:
                    cell = str(token)
                mark = "*" if valid is not None and bool(valid[k, c]) else " "
                cells.append(cell[:width].rjust(width) + mark)
            lines.append(self.names[k].ljust(8) + "".join(cells))
        return "\n".join(line.rstrip() for line in lines)


_PRESETS: dict[str, tuple[list[int], int, int, int, Literal["pad", "sampled"]]] = {
    "mini-omni": ([4096] * 7, 64, 151936, 152000, "sampled"),
    "snac": ([4096] * 7, 64, 151936, 152000, "pad"),
    "mimi": ([2048] * 8, 64, 151936, 152000, "pad"),
    "codec2": ([512, 512, 16, 64], 8, 256, 0, "pad"),
    "codec2-1600": ([512, 128, 128, 512, 256, 256, 256, 256], 8, 256, 0, "pad"),
}
"""Codebooks, special ids, ids and rows of the text, and fill of each preset."""


# --- online: an answer as it is sampled --------------------------------------------------------------------------------

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
        cls, layout: Layout, text_active: Sequence[bool], audio_active: Sequence[bool], device: torch.device | str | None = None
    ) -> Cursor:
        """A cursor before the first column, one row per entry; UserError for a layout with a stream that is `given`."""
        import torch

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
        import torch

        device, lay = self.step.device, self.layout
        return (
            lay.ids("end").to(device),
            lay.ids("pad").to(device),
            torch.tensor(lay.delays, device=device),
            torch.tensor([s.size for s in lay.streams], device=device),
        )

    def select(self, rows: slice | Tensor) -> Cursor:
        """The cursor of some of the rows."""
        cursor = replace(self, **{name: getattr(self, name)[rows] for name in self.TENSORS})
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
        import torch

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
