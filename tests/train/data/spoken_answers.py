"""Answers of an assistant, some with numbers, and when espeak-ng says which of their words.

One half of the sentences is to learn from, the other to measure on.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from train.data.tts import espeak as voice

LEARNT = """\
Water boils at 100 degrees.
Yes, that is right.
The library closes at 6, so you still have time.
I would take the early train, because the later one is often full.
There are 24 hours in a day and 60 minutes in each hour.
Put the bread in the oven for about 35 minutes, then let it cool on a rack.
The capital of Australia is Canberra, although many people think it is Sydney.
You can reach the museum by bus; the number 12 stops right in front of it.
Plants need light, water and air to grow.
Honey keeps for years if the jar is closed.
My favourite season is autumn, when the leaves turn red and gold.
A good way to learn a language is to listen to it every day, even if only for ten minutes.
The moon takes a little over 27 days to travel once around the earth.
Could you tell me what kind of music you like?
Most cats sleep more than half of the day.
First wash the rice, then add two cups of water, and cook it slowly with the lid on.
He was born in 1879 and moved to America in 1933.
That depends on the weather tomorrow.
The shortest way goes through the park, but after dark I would walk along the main street.
Nine times eight is 72.
Sorry, I did not understand the last word.
Snow forms when water vapour freezes high up in the clouds and falls before it can melt.
The bridge was built over four years, opened in the spring, and has carried trains ever since.
Whales are mammals, not fish: they breathe air and feed their young with milk.
It costs 15 dollars for adults and 8 dollars for children.
If your phone gets wet, switch it off at once, dry it with a cloth, and leave it in a warm place overnight.""".splitlines()

MEASURED = """\
No, thank you.
It rained all night.
The answer is 42.
Thunder is the sound of air that a lightning bolt heats and pushes apart.
Your appointment is on Tuesday at a quarter past nine.
Elephants can hear each other over several kilometres, because they use very low sounds.
To make a strong password, use at least 12 characters and no word from a dictionary.
The Nile flows north, through Sudan and Egypt, into the Mediterranean Sea.
I am afraid the shop is closed on Sundays.
There were about 30 guests, most of whom stayed until midnight.
Cut the onions finely, fry them in butter until they are golden, and add the mushrooms last.
Mount Everest is 8849 metres high.
Light travels faster than sound, so you see the flash first and hear the bang later.
What would you like to know?
A marathon is a little more than 42 kilometres long, and the best runners finish it in about two hours.
Some birds fly across whole continents without stopping once.
Remember to bring an umbrella, a warm coat and good shoes.
The first programmable computers filled entire rooms and could do less than a cheap watch can do today.
Mix equal parts of lemon juice and salt.
In winter the lake freezes, and children skate on it after school.
The train from platform 5 leaves in three minutes.
Antarctica holds most of the fresh water of the world.
Sleep matters more than most people think: memory, mood and health all depend on it.
You could plant beans, peas or carrots next to each other, but keep the potatoes away from the tomatoes.
The painting was stolen in 1911 and found again two years later in a hotel room.
Seven plus five makes twelve.""".splitlines()


@dataclass(frozen=True)
class Said:
    """An answer as espeak-ng says it.

    Attributes:
        sound: samples [S] at 22,050 Hz, silence at both ends cut but for 10 ms.
        begun: when each word starts, in seconds, by espeak-ng's own events.
        middle: halfway from there to the next word's event, or to the end.
    """

    text: str
    sound: Tensor
    begun: Tensor
    middle: Tensor

    @property
    def seconds(self) -> float:
        return len(self.sound) / voice.SAMPLE_RATE


def answers(sentences: Sequence[str], count: int, seed: int) -> list[str]:
    """The sentences one by one, then two or three together, of at most 40 words."""
    dice, out = random.Random(seed), list(sentences)
    while len(out) < count:
        text = " ".join(dice.sample(sentences, dice.choice([2, 2, 3])))
        out += [text] if len(text.split()) <= 40 else []
    return out[:count]


class _Event(ctypes.Structure):
    """`espeak_EVENT` of speak_lib.h."""

    _fields_ = [
        *(("type", ctypes.c_int), ("unique", ctypes.c_uint), ("text_position", ctypes.c_int), ("length", ctypes.c_int)),
        *(
            ("audio_position", ctypes.c_int),
            ("sample", ctypes.c_int),
            ("user_data", ctypes.c_void_p),
            ("id", ctypes.c_char * 8),
        ),
    ]


_WORD = 1  # espeakEVENT_WORD
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event))


def say(text: str, rate: int = 175, name: str = "en-us+f3") -> Said:
    """Say an answer. A word without an event (the second of "of the") starts halfway between its neighbours."""
    pieces, events = [], []

    def collect(samples: Any, count: int, found: Any) -> int:
        pieces.append(ctypes.string_at(samples, 2 * count) if samples and count > 0 else b"")
        for event in itertools.takewhile(lambda e: e.type, (found[i] for i in itertools.count())):
            events.append((event.type, event.text_position - 1, event.audio_position / 1000))
        return 0

    callback, words = _CALLBACK(collect), text.encode() + b"\0"
    with voice._lock, voice._opened() as library:
        library.espeak_SetSynthCallback(callback)
        library.espeak_ng_SetRandSeed(ctypes.c_long(1))
        assert library.espeak_SetVoiceByName(name.encode()) == 0
        library.espeak_SetParameter(1, rate, 0)
        library.espeak_Synth(words, ctypes.c_size_t(len(words)), 0, 0, 0, 1, None, None)
    sound = torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.int16).float() / 32768
    loud = (sound.abs() > 0.005).nonzero()
    first, last = max(0, int(loud[0]) - 220), int(loud[-1]) + 221
    begun: list[float] = []
    spans = [found.span() for found in re.finditer(r"\S+", text)]
    starts = [min((t for kind, at, t in events if kind == _WORD and a <= at < b), default=None) for a, b in spans]
    for i, start in enumerate(starts):
        after = next((t for t in starts[i + 1 :] if t is not None), last / voice.SAMPLE_RATE)
        begun.append(start if start is not None else ((begun or [0.0])[-1] + after) / 2)
    middle = [(one + two) / 2 for one, two in zip(begun, [*begun[1:], last / voice.SAMPLE_RATE], strict=True)]
    cut = first / voice.SAMPLE_RATE
    return Said(text, sound[first:last], torch.tensor(begun) - cut, torch.tensor(middle) - cut)
