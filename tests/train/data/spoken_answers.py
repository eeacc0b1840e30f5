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
The library closes at 6, so you still have time.
There are 24 hours in a day and 60 minutes in each hour.
The capital of Australia is Canberra, although many people think it is Sydney.
Plants need light, water and air to grow.
My favourite season is autumn, when the leaves turn red and gold.
The moon takes a little over 27 days to travel once around the earth.
Most cats sleep more than half of the day.
He was born in 1879 and moved to America in 1933.
The shortest way goes through the park, but after dark I would walk along the main street.
Sorry, I did not understand the last word.
The bridge was built over four years, opened in the spring, and has carried trains ever since.
It costs 15 dollars for adults and 8 dollars for children.
Good morning, how can I help you?
The meeting has been moved to Thursday at half past two.
Bees tell each other where the flowers are by dancing.
Rivers shape the land over thousands of years by carrying stones, sand and mud towards the sea.
Please speak a little louder.
To remove the stain, mix a spoon of vinegar with warm water and rub it gently with a sponge.
She wrote seven novels, two plays and a great number of letters.
The recipe needs 250 grams of flour, three eggs, a pinch of salt and half a litre of milk.
Let me think about that for a moment.
You have three new messages and one missed call.
Read the question twice, underline the important words, and only then begin to write your answer.
Do you want me to set an alarm for 7 tomorrow?
The doctor can see you on Monday, Wednesday or Friday afternoon.
Penguins live in the south and polar bears in the north, so they never meet.
The book has 420 pages, but the letters are large.
Copper turns green when it stays in the rain for many years.
Tea should not be made with boiling water if it is green; 80 degrees are enough.""".splitlines()

MEASURED = """\
No, thank you.
The answer is 42.
Your appointment is on Tuesday at a quarter past nine.
To make a strong password, use at least 12 characters and no word from a dictionary.
I am afraid the shop is closed on Sundays.
Cut the onions finely, fry them in butter until they are golden, and add the mushrooms last.
Light travels faster than sound, so you see the flash first and hear the bang later.
A marathon is a little more than 42 kilometres long, and the best runners finish it in about two hours.
Remember to bring an umbrella, a warm coat and good shoes.
Mix equal parts of lemon juice and salt.
The train from platform 5 leaves in three minutes.
Sleep matters more than most people think: memory, mood and health all depend on it.
The painting was stolen in 1911 and found again two years later in a hotel room.
Bread gets stale faster in the fridge than in a wooden box.
The word comes from Latin, where it meant a field, and reached English by way of French.
A violin has four strings and no frets.
Volcanoes bring up minerals that make the soil around them very fertile.
Two thirds of the earth are covered by water.
Think of a number, double it, add ten, and divide the result by two.
She speaks Spanish, Portuguese and a little Greek.
Nobody was hurt.
Use a soft cloth and a drop of oil.
Spiders are not insects, since they have eight legs.
When the bell rings, everybody leaves through the nearest door, walks to the yard, and waits there to be counted.
Concrete was already known to the Romans, whose harbours still stand after 2000 years.
I have added milk, eggs and coffee to your list.
Owls turn their heads almost all the way round, because they cannot move their eyes.
It may help to divide the work into small steps, to begin with the easiest one, and to take a short break after each.
The temperature will fall to 3 degrees tonight.
Fresh fish smells of the sea, its eyes are clear, and its skin shines.""".splitlines()


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
