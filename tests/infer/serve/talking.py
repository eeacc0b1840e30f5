"""Teaches a tiny speech language model six spoken questions, and to say again what was heard of its last answer.

It is trained on the very sounds and columns that the server makes of them, until every answer of `cases` is right.

Dimensions: A audio streams, F frames, S samples.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
from tokenizers import models, pre_tokenizers
from torch import Tensor, nn

from omni.audio.resample import resample
from omni.codec.codec2 import Codec2Codec
from omni.config import DecoderConfig, ModelConfig, ProjectorConfig
from omni.encoder.base import collate
from omni.encoder.whisper_config import WhisperConfig
from omni.generate.question import read_question
from omni.generate.speech_lm import SpeechLM
from omni.generate.speech_time import Loudness, SpeechTime, estimate, heard_characters
from omni.layout import Layout
from omni.model.speech_model import SpeechModel
from omni.tasks import TASKS, Turn
from omni.tasks import example as columns_of
from omni.text import Tokenizer
from train.config.sections import OptimizerConfig
from train.data.batching.batch import Batch, assemble
from train.data.batching.examples import Clip, Example
from train.data.tts.espeak import SAMPLE_RATE, synthesise
from train.objective.config import ObjectiveConfig
from train.objective.objective import Objective, targets
from train.optim.optimizer import build_optimizer, set_learning_rate

COUNT, AGAIN = "count to ten", "say it again"
ANSWERS = {
    "what is two plus three": "five",
    "what colour is the sky": "blue",
    "who are you": "a small model",
    "where is the cat": "on the roof",
    "when do we eat": "at noon",
    COUNT: "one two three four five six seven eight nine ten",
}
RATE = 24_000
"""Samples per second of what a client sends."""

ROWS, LENGTH = 8, 160
STEPS, MOST, LOOK = 120, 600, 10
"""Steps at whose half the learning rate begins to fall and at whose end it stays low; steps at most, and between two looks."""

ABOUT = 4
"""Frames by which the words that were heard may be off: while an answer is made, their times are estimates."""

SURE = 0.7
"""Least distance of a right id's logit from the others', so that neither sums in another order nor other silence around a
question changes an answer."""


@dataclass(frozen=True)
class TaughtTurn:
    """One turn: its question, and of an answer that was cut the words and frames that were heard."""

    question: str
    heard: tuple[int, int] | None = None
    task: str = "A1A2"


CONVERSATIONS = (
    ("what is two plus three", AGAIN, "who are you"),
    ("where is the cat", "what colour is the sky", AGAIN),
    (COUNT, "when do we eat", AGAIN),
)
"""Questions of whole conversations."""


@lru_cache
def ask_aloud(question: str) -> np.ndarray:
    """The question as a client sends it, [S] at 24 kHz, int16."""
    sound = resample(synthesise(question, "en-us+f2", rate=190)[0], SAMPLE_RATE, RATE)
    return (sound * (16_000 / sound.abs().max())).numpy().astype(np.int16)


@lru_cache
def spoken(text: str) -> Tensor:
    """The codes [A, F] of an answer: those of its words, one after another."""
    codec = Codec2Codec()
    sounds = (resample(synthesise(word, "en-us", rate=450)[0], SAMPLE_RATE, codec.sample_rate) for word in text.split())
    return torch.cat([codec.encode(sound) for sound in sounds], dim=1)


def split_tokenizer() -> Tokenizer:
    """A tokenizer with one id for each word of questions and answers."""
    said = sorted({word for text in (*ANSWERS, *ANSWERS.values(), AGAIN) for word in text.split()})
    inner = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(["?", *said])}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Tokenizer(inner)


class Lessons:
    """Makes examples of conversations for one model.

    Attributes:
        hard: cases that are not right yet, which are drawn more often.
        clips: the sounds of each question; the first is what a client sends.
        time: speaking time of the model's voice.
        heard: number of words of the count that are heard with so many of its frames.
    """

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.codec, self.tokenizer = Codec2Codec(), split_tokenizer()
        layout = Layout.build(self.codec.codebook_sizes, len(self.tokenizer), specials=8)
        self.config = ModelConfig(
            layout=layout,
            encoder=WhisperConfig(width=64, heads=2, layers=1, hop=320, window_seconds=8),
            projector=ProjectorConfig("mlp", hidden=128, stack=4),
            decoder=DecoderConfig(
                width=96, layers=2, heads=4, kv_heads=4, head_dim=24, mlp_width=256, context=1024, qk_norm=True
            ),
        )
        self.model = SpeechModel(self.config)
        self.hard: list[Example] = []
        self.clips = {question: self._clips(question) for question in (*ANSWERS, AGAIN)}
        said = {*ANSWERS.values(), *" ".join(ANSWERS.values()).split()}
        lengths = [(text, spoken(text).shape[1] / self.codec.frame_rate) for text in sorted(said)]
        self.time = estimate(lengths) or SpeechTime()
        self.heard = self._heard(ANSWERS[COUNT])

    def _clips(self, question: str) -> list[Clip]:
        """The question as it is, and with silence around it and noise over it."""
        sound, made = ask_aloud(question), list[Clip]()
        for before, after, level in ((0.0, 0.0, 0), (0.1, 0.1, 20), (0.06, 0.12, 0), (0.15, 0.05, 60)):
            around = np.pad(sound, (round(before * RATE), round(after * RATE))).astype(np.float32)
            noise = np.random.default_rng(len(made)).normal(0, 1, len(around))
            heard = read_question((around + level * noise).astype(np.int16), "A1A2", self.model, self.tokenizer, RATE).clip
            assert heard is not None
            made.append(Clip(self.config.encoder.features(heard), self.config.encoder.frames(len(heard))))
        return made

    def _heard(self, text: str) -> list[int]:
        """Number of an answer's words that sessions count as heard, for each number of frames before the last."""
        codes, loudness = spoken(text), Loudness(self.codec.sample_rate)
        loudness.push(self.codec.decode(codes))
        speech = loudness.speech()
        times = [(frames + 0.5) / self.codec.frame_rate for frames in range(codes.shape[1])]
        return [len(text[: heard_characters(text, self.time, at, speech, speech[-1][1])].split()) for at in times]

    # --- examples -------------------------------------------------------------------------------------------------

    def example(self, turns: Sequence[TaughtTurn], plain: bool = False) -> Example:
        """The example of a conversation; `plain` with the questions as clients send them."""
        last, made, clips = "", list[Turn](), list[Clip]()
        for one in turns:
            known = self.clips[one.question]
            clip = known[0] if plain or self.dice.random() < 0.5 else self.dice.choice(known)
            text = one.question if one.task == "A1T1" else last if one.question == AGAIN else ANSWERS[one.question]
            codes = None if one.task == "A1T1" else spoken(text)
            if one.heard is not None and codes is not None:
                text, codes = " ".join(text.split()[: one.heard[0]]), codes[:, : one.heard[1]]
            features, ids = -(-clip.frames // self.config.projector.stack), self.tokenizer.encode(text)
            made.append(Turn(one.task, features=features, text=ids, codes=codes, cut=one.heard is not None))
            clips.append(clip)
            last = text
        columns = columns_of(self.config.layout, made)
        task = torch.full((len(columns),), list(TASKS).index(turns[0].task))
        return Example(0, columns, task, tuple(clips), " / ".join(one.question for one in turns))

    def draw(self) -> Example:
        """A random example."""
        dice, share = self.dice, self.dice.random()
        if self.hard and dice.random() < 0.25:
            return dice.choice(self.hard)
        if share < 0.1:  # a transcript
            return self.example([TaughtTurn(dice.choice([*ANSWERS, AGAIN]), task="A1T1")])
        if share < 0.6:  # a cut count, said again
            first = [TaughtTurn(dice.choice(list(ANSWERS)))] if dice.random() < 0.25 else []
            return self.example([*first, self._cut(), TaughtTurn(AGAIN)])
        asked = [TaughtTurn(dice.choice(list(ANSWERS)))]
        while len(asked) < 3 and dice.random() < 0.8:
            asked.append(TaughtTurn(AGAIN if dice.random() < 0.5 else dice.choice(list(ANSWERS))))
        for number, one in enumerate(asked[:-1]):
            if one.question == COUNT and dice.random() < 0.5:
                asked[number] = self._cut()
        return self.example(asked)

    def _cut(self) -> TaughtTurn:
        """A count of which any number of words was heard, with about as many frames as belong to them."""
        words = self.dice.randint(1, self.heard[-1])
        about = [frames for frames, count in enumerate(self.heard) if count == words]
        return TaughtTurn(
            COUNT, (words, min(max(self.dice.randint(about[0] - ABOUT, about[-1] + ABOUT), 1), len(self.heard) - 1))
        )

    def cases(self) -> list[Example]:
        """What must be answered right: each question, each conversation, and the repetition after each cut."""
        talks = [[TaughtTurn(question) for question in talk] for talk in CONVERSATIONS]
        talks += [[TaughtTurn(question), TaughtTurn(AGAIN)] for question in ANSWERS]
        for frames, count in enumerate(self.heard[2:], 2):
            around = {count} | {n for n in (count - 1, count + 1) if (n + frames) % 2}
            talks += [[TaughtTurn(COUNT, (n, frames)), TaughtTurn(AGAIN)] for n in around if 1 <= n <= self.heard[-1]]
        talks += [[TaughtTurn(question, task="A1T1")] for question in (*ANSWERS, AGAIN)]
        return [self.example(talk, plain=True) for talk in talks]

    def batch(self) -> Batch:
        """A batch of rows that are filled with random examples."""
        rows: list[list[Example]] = [[]]
        while True:
            one = self.draw()
            if sum(len(other.columns) for other in rows[-1]) + len(one.columns) <= LENGTH:
                rows[-1].append(one)
            elif len(rows) == ROWS:
                return self.pack(rows)
            elif rows[-1]:
                rows.append([one] if len(one.columns) <= LENGTH else [])

    def pack(self, rows: Sequence[Sequence[Example]]) -> Batch:
        """The batch of these rows."""
        length = max(sum(len(one.columns) for one in row) for row in rows)
        return assemble(rows, length, self.config.layout, self.config.encoder.bands, {})


# --- training ---------------------------------------------------------------------------------------------------------


def learn_to_hear(lessons: Lessons, steps: int = 60) -> None:
    """Train encoder and projector to tell the questions apart."""
    clips = [(number, clip) for number, known in enumerate(lessons.clips.values()) for clip in known]
    inputs, lengths = collate([clip.inputs for _, clip in clips])
    frames = [clip.frames for _, clip in clips]
    counts = [-(-n // lessons.config.projector.stack) for n in frames]
    wanted = torch.tensor([number for number, _ in clips])
    model = lessons.model
    head = nn.Linear(lessons.config.decoder.width, len(lessons.clips))
    params = [*model.encoder.parameters(), *model.projector.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(params, lr=2e-3)
    for _ in range(steps):
        features = model.encode(inputs, lengths, frames).split(counts)
        loss = F.cross_entropy(head(torch.stack([part.mean(0) for part in features])), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def leads(model: SpeechModel, batch: Batch) -> list[float]:
    """Least distance, in each row, by which the logit of a right id is ahead of all others; negative where it is behind."""
    features = model.encode(batch.inputs, batch.input_lengths, batch.frames)
    hidden = model(batch.tokens, features, batch.feature_index, segments=batch.segments, packed=batch.packed)
    least = torch.full((len(batch.tokens),), float("inf"))
    for k, (logits, at) in enumerate(zip(model.decoder.logits(hidden), batch.supervised, strict=True)):
        found, ids = logits.flatten(0, 1)[at], batch.targets[:, k].flatten()[at][:, None]
        lead = found.gather(1, ids)[:, 0] - found.scatter(1, ids, float("-inf")).amax(1)
        least.scatter_reduce_(0, at // batch.tokens.shape[2], lead, "amin")
    return least.tolist()


def teach(seed: int = 0) -> SpeechLM:
    """A model that answers all `Lessons.cases` right.

    Raises:
        AssertionError: it does not after `MOST` steps.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        lessons = Lessons(seed)
        learn_to_hear(lessons)
        learn_to_talk(lessons)
    model = lessons.model.eval().requires_grad_(False)
    return SpeechLM(model, lessons.tokenizer, lessons.codec, speech_time=lessons.time)


def learn_to_talk(lessons: Lessons) -> None:
    """Train projector and decoder on conversations, until all cases are right."""
    model = lessons.model
    model.encoder.requires_grad_(False)
    objective = Objective(model, ObjectiveConfig(stream_weights=(0.25, 0.25, 0.25, 0.25, 1.0)))
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = build_optimizer(trained, OptimizerConfig(name="muon", lr=4e-3, muon_lr=0.02, weight_decay=0.0))
    every = lessons.cases()
    cases = [lessons.pack([[one] for one in every[i : i + 16]]) for i in range(0, len(every), 16)]
    for step in range(1, MOST + 1):
        set_learning_rate(optimizer, max(min(1.0, 2 - 2 * step / STEPS, step / 10), 0.05))
        batch = lessons.batch()
        total = objective(batch, targets(batch)).total
        optimizer.zero_grad(set_to_none=True)
        total.backward()
        optimizer.step()
        if step % LOOK == 0 and step >= STEPS // 2:
            found = [lead for some in cases for lead in leads(model, some)]
            lessons.hard = [one for one, lead in zip(every, found, strict=True) if lead < SURE]
            if not lessons.hard:
                return
    raise AssertionError(f"after {MOST} steps these are not sure to be answered right: {[one.where for one in lessons.hard]}")
