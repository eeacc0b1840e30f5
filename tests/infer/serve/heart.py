"""A model that knows a small game by heart: six spoken questions, of which three need the turn before. It takes half a minute.

    what is two plus three   five          and twice that           ten after five, four after two
    what is one plus one     two           say it again             what was heard of the answer before
    count to nine            one ... nine  what was the last word   the last word that was heard of it

Answers before the last are cut at random, as by listeners who interrupt them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from omni.audio.resample import resample
from omni.codec.registry import load_codec
from omni.config import DecoderConfig, ModelConfig, ProjectorConfig
from omni.encoder.whisper_config import WhisperConfig
from omni.generate.speech_lm import SpeechLM
from omni.layout import Layout
from omni.model.speech_model import SpeechModel
from omni.tasks import Turn, example
from omni.text import Tokenizer
from tests.generate.test_overfit import collate
from train.data.tts.espeak import synthesise

NINE = "one two three four five six seven eight nine"
FIVE, TWO, COUNT = "what is two plus three", "what is one plus one", "count to nine"
TWICE, AGAIN, LAST = "and twice that", "say it again", "what was the last word"
FIRST = {FIVE: "five", TWO: "two", COUNT: NINE}

CONFIG = ModelConfig(
    layout=Layout.preset("codec2"),
    encoder=WhisperConfig(width=64, heads=2, layers=2),
    projector=ProjectorConfig("mlp", hidden=96, stack=2),
    decoder=DecoderConfig(width=96, layers=3, heads=3, kv_heads=1, mlp_width=256, context=1024, qk_norm=True),
)

VARIANTS, BATCH, STEPS = 6, 6, 420


@cache
def spoken(text: str, rate: int) -> Tensor:
    """Samples [S] at 16 kHz."""
    sound, given = synthesise(text, "en-us", rate)
    return resample(0.5 * sound / sound.abs().max(), given, 16_000)


def asked(text: str) -> np.ndarray:
    """A question [S] at 24 kHz, as tests ask it."""
    return resample(spoken(text, 170), 16_000, 24_000).numpy()


@dataclass(frozen=True)
class Heard:
    """A question as the encoder hears it: frames [N, W]."""

    frames: Tensor
    features: int


def variants(model: SpeechModel, text: str, generator: torch.Generator) -> list[Heard]:
    """A question with other silences around it, at other levels, in faint noise."""
    out = []
    for _ in range(VARIANTS):
        around = (torch.rand(2, generator=generator) * torch.tensor([2400, 4000])).long()
        clip = F.pad(spoken(text, 170), (int(around[0]), int(around[1])))
        clip = clip * (0.5 + torch.rand(1, generator=generator)) + 0.001 * torch.randn(len(clip), generator=generator)
        config = model.encoder.config
        mel = config.features(clip)
        with torch.no_grad():
            frames = model.encoder(mel[None], [mel.shape[1]], [config.frames(len(clip))])
        out.append(Heard(frames, model.config.features(len(clip))))
    return out


@cache
def said(text: str) -> Tensor:
    """Codes [A, F] of an answer."""
    codec = load_codec("codec2")
    return codec.encode(resample(spoken(text, 220), 16_000, codec.sample_rate))


def conversation(chance: random.Random) -> list[tuple[str, str, int | None]]:
    """Questions, answers, and the frames that were heard (None for all) of one conversation."""
    question = chance.choice(list(FIRST))
    turns: list[tuple[str, str, int | None]] = []
    answer = FIRST[question]
    while True:
        cut = None
        if chance.random() < (0.7 if answer == NINE else 0.15):
            cut = chance.randrange(said(answer).shape[1])
        turns.append((question, answer, cut))
        if len(turns) == 4 or chance.random() < 0.25:
            turns[-1] = (question, answer, None)
            return turns
        heard = heard_of(answer, cut)
        ways = [AGAIN, LAST] if heard else [FIVE, TWO, COUNT]
        ways += [TWICE] * 2 if heard in ("five", "two") else []
        question = chance.choice([*ways, chance.choice(list(FIRST))])
        last = heard.rpartition(" ")[2]
        answer = {**FIRST, AGAIN: heard, LAST: last, TWICE: "ten" if heard == "five" else "four"}[question]


def heard_of(answer: str, frames: int | None) -> str:
    """The words of an answer that were heard in its first frames."""
    words = answer.split()
    if frames is None:
        return answer
    return " ".join(words[: int(len(words) * frames / said(answer).shape[1])])


def learn(seconds: float = 30.0) -> SpeechLM:
    """The model, trained on one core in about that time."""
    torch.manual_seed(0)
    model = SpeechModel(CONFIG)
    tokenizer, layout = Tokenizer.bytes(), CONFIG.layout
    generator, chance = torch.Generator().manual_seed(0), random.Random(0)
    sounds = {text: variants(model, text, generator) for text in (FIVE, TWO, COUNT, TWICE, AGAIN, LAST)}
    trained = [*model.decoder.parameters(), *model.projector.parameters()]
    optimizer = torch.optim.AdamW(trained, lr=4e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=STEPS, pct_start=0.1)
    for _ in range(STEPS):
        examples, clips = [], list[Heard]()
        for _ in range(BATCH):
            turns = []
            for question, answer, cut in conversation(chance):
                clip = chance.choice(sounds[question])
                clips.append(clip)
                heard = heard_of(answer, cut)
                turn = Turn("A1A2", clip.features, text=tokenizer.encode(heard), codes=said(answer)[:, :cut])
                turns.append(replace(turn, cut=cut is not None))
            examples.append(example(layout, turns))
        tokens, targets, index = collate(layout, examples)
        features = model.projector(torch.cat([clip.frames for clip in clips]), [len(clip.frames) for clip in clips])
        logits = model.decoder.logits(model(tokens, features, index))
        losses = [F.cross_entropy(x.flatten(0, 1), targets[:, k].flatten()) for k, x in enumerate(logits)]
        loss = sum(losses[:-1]) / (len(losses) - 1) + 2 * losses[-1]
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
    return SpeechLM(model.eval().requires_grad_(False), tokenizer, load_codec("codec2"))
