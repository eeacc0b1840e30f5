"""TTS for rows that have text only, by espeak-ng, flite, a program, a plug-in's voice, a Python callable, or several of these.

flite (Black and Lenzo 2001) is a program that is started for every text; it and its voices are free (a BSD-like licence of
Carnegie Mellon University): `apt install flite`. English only.

Dimensions: S samples.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
import random
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol

from omni.audio.io import audio_info, read_audio
from omni.errors import UserError, closest
from omni.plugins import Registry
from omni.utils.configuration import Share, configuration, span
from train.data.rows.row import Sound
from train.data.seeding import seeded_rng
from train.data.sources.mixture import check_weights
from train.data.tts.espeak import check_voice, languages, synthesise


class Voice(Protocol):
    """Turns text into sound: a pure function of its arguments, if the program or callable behind it is one."""

    def say(self, text: str, language: str, seed: int) -> Sound:
        """Speak the text in a language (BCP 47); `seed` chooses among voices. UserError where it cannot be spoken."""

    def speaker(self, language: str, seed: int) -> str:
        """Name of the voice that `say` speaks by for that seed; "" where it is not known."""
        return ""


@configuration
class SpeakingConfig:
    """How questions are spoken. A range is lowest and highest, drawn evenly: rate and pitch for a row, all else for a question.

    Attributes:
        rate: words per minute, of espeak and flite; null for 130 to 200 where a voice is drawn, and else the voice's own.
        pitch: 0 to 100, 50 is the voice's own, of espeak and flite; null for 25 to 75 where a voice is drawn, else its own.
        silence: seconds before and after a question.
        pause: share of the questions that pause once, after a random word.
        hesitant: share of the questions that are spoken in two parts, each with an intonation of its own.
        hesitation: seconds of silence between these.
    """

    rate: Annotated[tuple[int, int] | None, span(80, 450)] = None
    pitch: Annotated[tuple[int, int] | None, span(0, 100)] = None
    silence: Annotated[tuple[float, float], span(0, 10)] = (0.0, 0.0)
    pause: Share = 0.0
    hesitant: Share = 0.0
    hesitation: Annotated[tuple[float, float], span(0, 10)] = (0.2, 1.0)


@dataclass(frozen=True, eq=False)
class SpeakingVoice:
    """A voice with silence around what it says and pauses inside: these depend on the text and the seed alone."""

    voice: Voice
    config: SpeakingConfig

    def speaker(self, language: str, seed: int) -> str:
        return self.voice.speaker(language, seed)

    def say(self, text: str, language: str, seed: int) -> Sound:
        """Speak the text, see `Voice.say`; a pause is a comma, which every program knows."""
        import torch

        rng, halting = seeded_rng(seed, "speaking", text), seeded_rng(seed, "hesitant", text)
        words = text.split()
        if len(words) > 1 and rng.random() < self.config.pause:
            index = rng.randrange(len(words) - 1)
            words[index] += "," * words[index][-1].isalnum()
        parts = [words]
        if len(words) > 1 and halting.random() < self.config.hesitant:
            index = halting.randrange(1, len(words))
            parts = [words[:index], words[index:]]
        sounds = [self.voice.say(" ".join(part), language, seed) for part in parts]
        rate = sounds[0].sample_rate
        before, after = (round(rng.uniform(*self.config.silence) * rate) for _ in range(2))
        between = round(halting.uniform(*self.config.hesitation) * rate)
        padding = [(before if i == 0 else between, after if i == len(sounds) - 1 else 0) for i in range(len(sounds))]
        pieces = [torch.nn.functional.pad(sound.load(rate), pad) for sound, pad in zip(sounds, padding, strict=True)]
        return Sound(torch.cat(pieces), rate)


FLITE_VOICES = ("kal", "kal16", "awb", "rms", "slt")
"""Voices of flite 2.2 that read any text: `kal` is of 8 kHz, and rms keeps its pitch whatever is asked."""

TIMEOUT = 600.0
"""Seconds that a program may take for one text."""

_VARIANTS = ("f1", "f2", "f3", "f4", "f5", "m1", "m2", "m3", "m4", "m5", "m6", "m7", "m8")


VOICES: Registry[Callable[..., Any]] = Registry("voice")
"""Voices of plug-ins by name."""


def register_voice(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator for a callable that speaks a text. It takes the text, and `language` (BCP 47) and `seed` where it has
    parameters of these names; it returns samples [S] and their rate in Hz."""
    if isinstance(name, str) and (":" in name or name in ("espeak", "flite")):
        raise UserError(f"voice {name!r}: a name has no colon, and espeak and flite are taken; give it another")
    return VOICES.register(name)


def make_voice(spec: str | Mapping[str, float], speaking: SpeakingConfig | None = None) -> Voice:
    """Make the voice of a setting, see `PrepareConfig.voice`; UserError for a setting that names none. `speaking`: ranges of
    rate and pitch; None for the voices' own."""
    check_spec(spec)
    if not isinstance(spec, str):
        return MixedVoice({part: make_voice(part, speaking) for part in spec}, spec)
    engine, _, rest = spec.partition(":")
    if engine == "espeak":
        return EspeakVoice(rest, speaking)
    if engine == "flite":
        return FliteVoice(rest, speaking)
    if engine == "command":
        return CommandVoice(rest)
    return CallableVoice(spec, VOICES[spec] if spec in VOICES else imported(spec))


def check_spec(spec: str | Mapping[str, float]) -> None:
    """Refuse a setting that names no voice (UserError), without loading anything."""
    if not isinstance(spec, str):
        check_weights("voice", spec)
        for part in spec:
            check_spec(part)
        return
    engine, colon, rest = spec.partition(":")
    if engine in ("espeak", "flite") and (rest or not colon):
        if engine == "flite" and rest and rest not in FLITE_VOICES:  # it would speak by another one
            raise UserError(f"voice {spec}: flite has no such voice; {closest(rest, FLITE_VOICES)}")
        return
    if engine == "command":
        CommandVoice(rest)
        return
    if spec.lstrip().startswith(("{", "[")):
        raise UserError(f"voice {spec}: give several voices with a number each, their weight: '{{espeak: 3, flite: 1}}'")
    if spec not in VOICES and not (engine and rest):
        raise UserError(
            f"voice {spec!r} is unknown; use espeak, espeak:en-us+f3, flite, 'command:prog {{text}} {{out}}', module:callable "
            f"or the name of a plug-in's ({', '.join(VOICES) or 'none is loaded: --plugin'})"
        )


class MixedVoice:
    """One of several voices for each seed, by weight."""

    def __init__(self, voices: Mapping[str, Voice], weights: Mapping[str, float]) -> None:
        self.voices, self.weights = voices, [weights[name] for name in voices]

    def say(self, text: str, language: str, seed: int) -> Sound:
        return self.voices[self._drawn(seed)].say(text, language, seed)

    def speaker(self, language: str, seed: int) -> str:
        name = self._drawn(seed)
        return self.voices[name].speaker(language, seed) or name

    def _drawn(self, seed: int) -> str:
        return seeded_rng(seed, "voice").choices(list(self.voices), self.weights)[0]


class _Drawn(NamedTuple):
    """A voice with its rate in words per minute and its pitch; pitch range is espeak-ng's."""

    voice: str
    rate: int = 175
    pitch: int = 50
    pitch_range: int = 50


def _drawn(voices: Sequence[str], rng: random.Random, speaking: SpeakingConfig) -> _Drawn:
    """Draw the settings of one of the voices: its own, unless one of several is drawn or ranges are given."""
    if len(voices) > 1:
        rates, pitches, ranges = speaking.rate or (130, 200), speaking.pitch or (25, 75), (25, 75)
        return _Drawn(rng.choice(voices), *(rng.randint(*limits) for limits in (rates, pitches, ranges)))
    rate, pitch = (rng.randint(*limits) if limits else own for limits, own in ((speaking.rate, 175), (speaking.pitch, 50)))
    return _Drawn(voices[0], rate, pitch)


class EspeakVoice:
    """Speaks by espeak-ng: the voice `name`, a variant of the row's language (`+f3`), or, for "", a different voice per seed.
    UserError where there is no such voice, or no espeak-ng."""

    def __init__(self, name: str = "", speaking: SpeakingConfig | None = None) -> None:
        check_voice(f"en{name}" if name.startswith("+") else name or "en-us")
        self.name, self.speaking = name, speaking or SpeakingConfig()

    def say(self, text: str, language: str, seed: int) -> Sound:
        return Sound(*synthesise(text, *self._settings(language, seed)))

    def speaker(self, language: str, seed: int) -> str:
        return f"espeak:{self._settings(language, seed).voice}"

    def _settings(self, language: str, seed: int) -> _Drawn:
        rng = seeded_rng(seed, "espeak")
        if self.name:
            voice = _accents(language)[0] + self.name if self.name.startswith("+") else self.name
            return _drawn([voice], rng, self.speaking)
        accent = rng.choice(_accents(language))
        return _drawn([f"{accent}+{variant}" for variant in _VARIANTS], rng, self.speaking)


class FliteVoice:
    """Speaks by flite: the voice `name`, or, for "", a different voice per seed. UserError where there is no flite."""

    def __init__(self, name: str = "", speaking: SpeakingConfig | None = None) -> None:
        if shutil.which("flite") is None:
            raise UserError("voice flite: there is no program flite on the PATH: apt install flite, or take another voice")
        self.voices, self.speaking = [name] if name else FLITE_VOICES, speaking or SpeakingConfig()

    def say(self, text: str, language: str, seed: int) -> Sound:
        if (language or "en").lower().replace("_", "-").partition("-")[0] != "en":
            raise UserError(f"flite speaks English, not {language!r}: give another voice, or the rows another language")
        drawn = self._settings(seed)
        stretch, shift = 175 / drawn.rate, 2 ** ((drawn.pitch - 50) / 100)  # half an octave down to half an octave up
        settings = f"--setf duration_stretch={stretch:.4f} --setf f0_shift={shift:.4f}"
        return CommandVoice(f"flite -voice {drawn.voice} {settings} -t {{text}} -o {{out}}").say(text, language, seed)

    def speaker(self, language: str, seed: int) -> str:
        return f"flite:{self._settings(seed).voice}"

    def _settings(self, seed: int) -> _Drawn:
        return _drawn(self.voices, seeded_rng(seed, "flite"), self.speaking)


@functools.cache
def _accents(language: str) -> tuple[str, ...]:
    """espeak-ng's accents of a language, its main accent first."""
    wanted = (language or "en").lower().replace("_", "-")
    for name in (wanted, wanted.partition("-")[0]):
        main = "en-us" if name == "en" else name
        accents = [accent for accent in languages() if accent == name or accent.startswith(name + "-")]
        # Left out: accents with a script of their own (en-shaw), which ordinary text is not in, and island accents.
        accents = [accent for accent in accents if accent == main or accent in _ENGLISH or name.partition("-")[0] != "en"]
        if accents:
            return (main, *(accent for accent in accents if accent != main)) if main in accents else tuple(accents)
    raise UserError(f"espeak-ng does not speak the language {language!r}: give another voice, or the rows another language")


_ENGLISH = ("en-us", "en-gb", "en-gb-scotland", "en-gb-x-rp", "en-gb-x-gbclan", "en-gb-x-gbcwmd", "en-us-nyc", "en-029")


class CommandVoice(Voice):
    """Speaks by a program called once for every text; its line is split like a shell's, but no shell runs it."""

    def __init__(self, line: str) -> None:
        try:
            self.words = shlex.split(line)
        except ValueError as error:
            raise UserError(f"voice command:{line}: {error}; quote it as on a command line") from error
        for placeholder in ("{text}", "{out}"):
            if not any(placeholder in word for word in self.words[1:]):
                raise UserError(f"voice command:{line}: it has no {placeholder}; write 'command:prog {{text}} {{out}}'")

    def say(self, text: str, language: str, seed: int) -> Sound:
        with tempfile.TemporaryDirectory(prefix="omni-voice-") as folder:
            out = Path(folder) / "said.wav"
            values = {"{text}": text, "{out}": str(out), "{language}": language, "{seed}": str(seed)}
            words = [re.sub("|".join(values), lambda match: values[match[0]], word) for word in self.words]  # in one pass
            try:
                done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT, check=False)
            except (FileNotFoundError, PermissionError) as error:
                raise UserError(
                    f"voice command {words[0]!r} cannot be run ({error.strerror}): install it, or fix its path"
                ) from error
            except ValueError as error:  # the text has NUL or half a surrogate pair
                raise UserError(f"voice command {words[0]!r} cannot be given this text ({error}): fix it") from error
            except subprocess.TimeoutExpired as error:
                raise UserError(f"voice command {words[0]!r} took more than {TIMEOUT:.0f} s: say less at once") from error
            if done.returncode:
                said = done.stderr.decode(errors="replace").strip().splitlines()
                why = f": {said[-1]}" if said else ""
                raise UserError(f"voice command {words[0]!r} ended with {done.returncode}{why}")
            if not out.is_file():
                raise UserError(f"voice command {words[0]!r} wrote no file to {{out}}: let it write a WAV there")
            rate = audio_info(out).sample_rate
            return Sound(read_audio(out, rate), rate)


def imported(spec: str) -> Callable[..., Any]:
    """The callable `module:name`; UserError where there is none."""
    try:
        value = pkgutil.resolve_name(spec)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"voice {spec!r} cannot be imported ({error}): name a module on the path and its callable") from error
    if not callable(value):
        raise UserError(f"voice {spec!r} is a {type(value).__name__}, not a callable: name a function of a text")
    return value  # type: ignore[no-any-return]


class CallableVoice(Voice):
    """Speaks by a Python callable; `spec` names it in messages."""

    def __init__(self, spec: str, function: Callable[..., Any]) -> None:
        self.spec, self.function, self.extra = spec, function, set[str]()
        with suppress(TypeError, ValueError):  # it has no signature
            parameters = inspect.signature(function).parameters.values()
            self.extra = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}

    def say(self, text: str, language: str, seed: int) -> Sound:
        import numpy as np

        from omni.audio.waveform import as_waveform, whole_rate

        arguments, name = {"language": language, "seed": seed}, f"voice {self.spec}"
        try:
            samples, rate = self.function(text, **{key: value for key, value in arguments.items() if key in self.extra})
            if np.ndim(samples) != 1:
                raise UserError(f"{name} returned samples of shape {list(np.shape(samples))}; they must be one row [S]")
            waveform = as_waveform(samples.detach() if hasattr(samples, "detach") else samples, name)
            return Sound(waveform, whole_rate(rate, name))
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # external code: any of its errors concerns this text only
            why = " ".join(str(error).split())
            raise UserError(
                f"{name} failed with {type(error).__name__}: {why}; it returns samples [S] and their rate"
            ) from error
