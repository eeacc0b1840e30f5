"""People answered by a bare loop beside the engine: what this machine allows with public kernels.

One thread of plain calls of PyTorch, with one row of a cache for each answer, and nothing that a service needs: no processes,
events, sampling, limits or slots. Each step takes all rows, since an answer that is ahead only ends sooner; questions that wait
are encoded and prefilled together between two steps. People talk as in `infer.bench.live.people`. A row holds as many positions
as a conversation does, and one that forgets is fed what stays of it, with the question; what the columns say does not matter.

Dimensions: N rows, T columns, K streams, W width, H heads, G key/value heads, S positions, D size of a head.
"""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infer.bench.bare import normed, rotated
from infer.bench.live.manner import BARGE, PAUSE, Heard, Manner
from omni.attention import attention
from omni.generate.history import forgotten_of
from omni.generate.question import Asked, encode_questions
from omni.generate.speech_lm import SpeechLM
from omni.model.blocks import Block
from omni.tasks import TASKS, Turn, prompt

TASK = TASKS["A1A2"]

LOW = 0.16
"""Seconds of sound: rows are stepped while somebody holds less."""

TOGETHER = 2
"""Questions that are encoded and prefilled together at most."""


@dataclass(eq=False)
class _Row:
    """An answer: its person, when it was asked, its position, frames and decoder, and when its sound began to play."""

    person: int
    asked: float
    position: int
    stream: int
    frames: int = 0
    columns: int = 1
    plays: float | None = None


class BarePeople:
    """A number of people and the loop that answers them.

    Args:
        lm: with PyTorch's kernels (`kernels="reference"`).
        context: positions of a row; conversations forget as in `omni.generate.history.fit`.

    Attributes:
        heard: what is noted at present.
        written: number of columns that were written, of all rows.
    """

    def __init__(self, lm: SpeechLM, manner: Manner, number: int, context: int, seed: int = 0) -> None:
        model, codec = lm.model, lm.codec
        assert codec is not None
        self.model, self.decoder, self.codec, self.manner, self.context = model, model.decoder, codec, manner, context
        self.heard: Heard | None = None
        self.written = 0
        turn = Turn(TASK, features=model.config.features(len(manner.question)))
        self._asked, columns = Asked(turn, manner.question), prompt(model.layout, turn)
        self._prompt, self._index = columns.tokens[None], columns.feature_index
        self._delay, self._features = model.layout.max_delay, turn.features
        self._most = round(manner.answer_seconds * codec.frame_rate)
        self._turns: list[list[int]] = [[] for _ in range(number)]  # columns of each person's turns
        length = context + self._most + self._delay + 1
        self._pad = model.layout.ids("pad")[None, :, None]
        self._blocks = [_Rows(block, number, length) for block in (*self.decoder.blocks, *self.decoder.post_blocks)]
        angle = torch.arange(length)[:, None] * self.decoder.rope
        self._rope = tuple(torch.cat([f, f], -1)[:, None] for f in (angle.cos(), angle.sin()))  # [S, 1, D]
        self._tokens = torch.zeros(number, len(model.layout), 1, dtype=torch.long)
        self._sizes = torch.tensor(codec.codebook_sizes)
        self._batch, self._rows = codec.batch(), list[_Row]()
        self._random, self._pending = random.Random(seed), list[tuple[float, int]]()
        begin = time.perf_counter()
        self._numbers = [0] * number  # of each person's plans: what was planned before another question is left out
        self._plans = [(begin + self._random.uniform(0, manner.cycle), person, "ask", 0) for person in range(number)]
        heapq.heapify(self._plans)

    @torch.inference_mode()
    def play(self, seconds: float, tell: Callable[[float], None]) -> float:
        """Answer them for some seconds, and tell how many have passed now and then; returns the mean number of rows."""
        begin, told, work, between = time.perf_counter(), 0.0, 0.0, 0
        last = begin
        while (now := time.perf_counter()) - begin < seconds:
            work += len(self._rows) * (now - last)
            last = now
            if now - begin >= told + 0.5:
                told = now - begin
                tell(told)
            self._take(now)
            least = min((self._holds(row, now) for row in self._rows), default=float("inf"))
            if self._pending and (not self._rows or between >= 2):
                between = 0
                self._enter()
            elif least < LOW:
                between += 1
                self._step()
            elif self._pending:
                between = 0
                self._enter()
            else:
                next_ = self._plans[0][0] - now if self._plans else 1.0
                time.sleep(max(0.0, min(least - LOW, next_, 0.5)))
        return work / seconds

    # --- people -------------------------------------------------------------------------------------------------------

    def _take(self, now: float) -> None:
        """What people do by now: ask, or speak into an answer."""
        while self._plans and self._plans[0][0] <= now:
            at, person, what, number = heapq.heappop(self._plans)
            if number != self._numbers[person]:
                continue
            self._numbers[person] += 1
            if what == "ask":
                self._pending.append((at, person))
                self._note("questions")
                continue
            self._note("interrupted")
            for row in [row for row in self._rows if row.person == person]:  # else it is written, and still plays
                self._leave(row)
            self._plan(person, self.manner.speaking)

    def _plan(self, person: int, seconds: float, what: str = "ask") -> None:
        heapq.heappush(self._plans, (time.perf_counter() + seconds, person, what, self._numbers[person]))

    def _holds(self, row: _Row, now: float) -> float:
        """Seconds of sound that its listener has left; below zero before the first."""
        return -1.0 if row.plays is None else row.frames / self.codec.frame_rate - (now - row.plays)

    def _hear(self, row: _Row, now: float) -> None:
        """Note that the next frame came; the first sound is of two."""
        start = row.frames / self.codec.frame_rate
        row.frames += 1
        if row.frames == 1:
            return
        if row.plays is None:
            row.plays = now
            self._note("first_audio", now - row.asked)
            if self._random.random() < self.manner.barge_in:
                self._plan(row.person, self._random.uniform(*BARGE) * self.manner.answer_seconds, "interrupt")
            return
        late = now - (row.plays + start)
        self._note("lateness", late)
        if late > 0:
            row.plays += late
            self._note("underruns")

    def _note(self, what: str, value: float | None = None) -> None:
        if self.heard is not None and value is not None:
            getattr(self.heard, what).append(value)
        elif self.heard is not None:
            setattr(self.heard, what, getattr(self.heard, what) + 1)

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _enter(self) -> None:
        """Encode and prefill the question that waits longest, and others that feed as many columns."""
        kept = {person: self._kept(self._turns[person]) for _, person in self._pending}
        again = {person: sum(turns) if len(turns) < len(self._turns[person]) else 0 for person, turns in kept.items()}
        stays = again[self._pending[0][1]]
        some = [(asked, person) for asked, person in self._pending if again[person] == stays][:TOGETHER]
        self._pending = [one for one in self._pending if one not in some]
        for _, person in some:
            self._turns[person] = kept[person]
        features = [f for f in encode_questions(self.model, [self._asked] * len(some)) if f is not None]
        tokens = torch.cat([self._pad.expand(len(some), -1, stays), self._prompt.expand(len(some), -1, -1)], 2)
        index = torch.stack([torch.where(self._index >= 0, self._index + n * self._features, -1) for n in range(len(some))])
        x = self.decoder.embed(tokens, torch.cat(features), F.pad(index, (stays, 0), value=-1))
        ends = [sum(self._turns[person]) + len(self._index) for _, person in some]
        position = torch.tensor(ends)[:, None] + torch.arange(-x.shape[1], 0)  # [N, T]
        mask = (torch.arange(max(ends)) <= position[:, :, None])[:, None]  # [N, 1, T, S]
        rows = slice(len(self._rows), len(self._rows) + len(some))
        self._write(*self._hidden(x, rows, position, mask, max(ends)), rows)
        for (asked, person), end in zip(some, ends, strict=True):
            self._rows.append(_Row(person, asked, end, self._batch.open()))

    def _kept(self, turns: list[int]) -> list[int]:
        """Columns of the turns of a conversation that are left when the next question comes."""
        question = len(self._index)
        kept = turns[forgotten_of(turns, question, self.context) :]
        while kept and sum(kept) + question > self.context - self.context // 4:
            del kept[0]
        return kept

    def _step(self) -> None:
        """Write the next column of all rows, and decode the frames that it completes."""
        rows, count = list(self._rows), len(self._rows)
        self.written += count
        position = torch.tensor([row.position for row in rows])
        end = int(position.max()) + 1
        mask = (torch.arange(end) <= position[:, None])[:, None, None]  # [N, 1, 1, S]
        x = self.decoder.embed(self._tokens[:count])
        self._write(*self._hidden(x, slice(0, count), position[:, None], mask, end), slice(0, count))
        codes, sounding = torch.minimum(self._tokens[:count, :-1, 0], self._sizes - 1), []
        for n, row in enumerate(rows):
            row.position, row.columns = row.position + 1, row.columns + 1
            if row.columns > self._delay:
                sounding.append(n)
        if sounding:
            self._batch.push([rows[n].stream for n in sounding], codes[sounding][:, :, None])
        now = time.perf_counter()
        for row in [rows[n] for n in sounding]:
            self._hear(row, now)
            if row.frames >= self._most:
                self._note("answers")
                self._leave(row)
                pause = 0.0 if self.manner.nonstop else max(self._holds(row, now), 0.0) + self._random.uniform(*PAUSE)
                self._plan(row.person, pause + self.manner.speaking)

    def _hidden(self, x: Tensor, rows: slice, position: Tensor, mask: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Hidden states [N, 1, W] of the last columns, for the text head and for the audio head."""
        decoder, (cos, sin) = self.decoder, (part[position] for part in self._rope)  # [N, T, 1, D]
        for block in self._blocks[: len(decoder.blocks)]:
            x = block(x, rows, position, mask, end, cos, sin)
        text = audio = normed(decoder.norm, x[:, -1:])
        if decoder.post_norm is not None:
            for block in self._blocks[len(decoder.blocks) :]:
                x = block(x, rows, position, mask, end, cos, sin)
            audio = normed(decoder.post_norm, x[:, -1:])
        return text, audio

    def _write(self, text: Tensor, audio: Tensor, rows: slice) -> None:
        """Choose the likeliest tokens as the next columns."""
        streams = self.decoder.split_audio(F.linear(audio, self.decoder.audio_weight))
        chosen = [logits.argmax(-1) for logits in streams]
        self._tokens[rows] = torch.stack([*chosen, F.linear(text, self.decoder.text_weight).argmax(-1)], 1)

    def _leave(self, row: _Row) -> None:
        """Let an answer go; the last row takes its place."""
        place, last = self._rows.index(row), len(self._rows) - 1
        self._batch.close(row.stream)
        self._turns[row.person].append(len(self._index) + row.columns)
        moved = self._rows.pop()
        if moved is not row:
            self._rows[place] = moved
            self._tokens[place] = self._tokens[last]
            for block in self._blocks:
                block.move(last, place, moved.position)


class _Rows:
    """A block with its keys and values [N, G, S, D]."""

    def __init__(self, block: nn.Module, number: int, length: int) -> None:
        assert isinstance(block, Block)
        part, mlp = block.attention, block.mlp
        self.block, self.part = block, part
        qkv: list[Tensor] = [part.q.weight, part.k.weight, part.v.weight]
        self.qkv = torch.cat(qkv)
        biases: list[Tensor] = [one.bias for one in (part.q, part.k, part.v) if one.bias is not None]
        self.bias = torch.cat(biases) if biases else None
        self.gate_up = torch.cat([mlp.gate.weight, mlp.up.weight])
        shape, numbers = (number, part.kv_heads, length, part.head_dim), self.qkv.dtype
        self.keys, self.values = (torch.zeros(shape, dtype=numbers) for _ in "kv")

    def __call__(self, x: Tensor, rows: slice, position: Tensor, mask: Tensor, end: int, cos: Tensor, sin: Tensor) -> Tensor:
        block, part, (count, columns, _) = self.block, self.part, x.shape
        qkv = F.linear(normed(block.attention_norm, x), self.qkv, self.bias).view(count, columns, -1, part.head_dim)
        q, k, v = qkv.split([part.heads, part.kv_heads, part.kv_heads], 2)
        if part.q_norm is not None and part.k_norm is not None:
            q, k = normed(part.q_norm, q), normed(part.k_norm, k)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        keys, values = self.keys[rows], self.values[rows]
        if columns > 1:
            for n, low in enumerate(position[:, 0].tolist()):
                keys[n, :, low : low + columns], values[n, :, low : low + columns] = k[n].transpose(0, 1), v[n].transpose(0, 1)
        else:
            every = torch.arange(count)
            keys[every, :, position[:, 0]], values[every, :, position[:, 0]] = k[:, 0], v[:, 0]
        y = attention(q.transpose(1, 2), keys[:, :, :end], values[:, :, :end], mask, grouped=True)
        x = x + part.out(y.transpose(1, 2).flatten(2))
        gate, up = F.linear(normed(block.mlp_norm, x), self.gate_up).chunk(2, -1)
        return x + block.mlp.down(F.silu(gate) * up)

    def move(self, source: int, target: int, positions: int) -> None:
        """Copy a row's first positions to another one."""
        for held in (self.keys, self.values):
            held[target, :, :positions] = held[source, :, :positions]
