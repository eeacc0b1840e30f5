"""TTS for rows that have text only, by espeak-ng, a program, a plug-in's voice, or a Python callable.

Dimensions: S samples.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from omni.audio.io import audio_info, read_audio
from omni.errors import UserError
from omni.plugins import Registry
from train.data.rows.row import Sound
from train.data.seeding import dice

if TYPE_CHECKING:
    from torch import Tensor

RATES = (1000, 384000)
"""Lowest and highest sample rate of a voice, in Hz."""

TIMEOUT = 600.0
"""Seconds that a program may take for one text."""

_MAIN_ACCENTS = {"en": "en-us"}
_VARIANTS = ("f1", "f2", "f3", "f4", "f5", "m1", "m2", "m3", "m4", "m5", "m6", "m7", "m8")


class Voice(Protocol):
    """Turns text into sound: a pure function of its arguments, if the program or callable behind it is one."""

    def say(self, text: str, language: str, seed: int) -> Sound:
        """Speak the text in a language (BCP 47); `seed` chooses among voices. UserError where it cannot be spoken."""


VOICES: Registry[Callable[..., Any]] = Registry("voice", "a function of a text", callable)
"""Voices of plug-ins by name."""


def register_voice(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator for a callable that speaks a text.

    It takes the text, and `language` (BCP 47) and `seed` where it has parameters of these names; it returns samples [S] and
    their rate in Hz.
    """
    if isinstance(name, str) and (":" in name or name == "espeak"):
        raise UserError(f"voice {name!r}: a name has no colon, and espeak is taken; give it another")
    return VOICES.register(name)


def make_voice(spec: str) -> Voice:
    """Make the voice of a setting, see `PrepareConfig.voice`; UserError for a setting that names none."""
    check_spec(spec)
    kind, _, rest = spec.partition(":")
    if kind == "espeak":
        return EspeakVoice(rest)
    if kind == "command":
        return CommandVoice(rest)
    return CallableVoice(spec, VOICES[spec] if spec in VOICES else imported(spec))


def check_spec(spec: str) -> None:
    """Refuse a setting that names no voice (UserError), without loading anything."""
    kind, colon, rest = spec.partition(":")
    if kind == "espeak" and (rest or not colon):
        return
    if kind == "command":
        CommandVoice(rest)
        return
    if spec not in VOICES and not (kind and rest):
        raise UserError(
            f"voice {spec!r} is unknown; use espeak, espeak:en-us+f3, 'command:prog {{text}} {{out}}', module:callable or "
            f"the name of a plug-in's ({', '.join(VOICES) or 'none is loaded: --plugin'})"
        )


class EspeakVoice:
    """Speaks by espeak-ng: the voice `name`, a variant of the row's language (`+f3`), or, for "", a different voice per seed.

    UserError where there is no such voice, or no espeak-ng.
    """

    def __init__(self, name: str = "") -> None:
        from train.data.tts.espeak import check_voice

        check_voice(f"en{name}" if name.startswith("+") else name or "en-us")
        self.name = name

    def say(self, text: str, language: str, seed: int) -> Sound:
        from train.data.tts.espeak import synthesise

        if self.name:
            voice = _accents(language)[0] + self.name if self.name.startswith("+") else self.name
            return Sound(*synthesise(text, voice))
        rng = dice(seed, "espeak")
        voice = f"{rng.choice(_accents(language))}+{rng.choice(_VARIANTS)}"
        samples, rate = synthesise(text, voice, rng.randint(130, 200), rng.randint(25, 75), rng.randint(25, 75))
        return Sound(samples, rate)


@functools.cache
def _accents(language: str) -> tuple[str, ...]:
    """espeak-ng's accents of a language, its main accent first."""
    from train.data.tts.espeak import languages

    wanted = (language or "en").lower().replace("_", "-")
    for name in (wanted, wanted.partition("-")[0]):
        main = _MAIN_ACCENTS.get(name, name)
        found = [one for one in languages() if one == name or one.startswith(name + "-")]
        # Left out: accents with a script of their own (en-shaw), which ordinary text is not in, and island accents.
        found = [one for one in found if one == main or one in _ENGLISH or name.partition("-")[0] != "en"]
        if found:
            return (main, *(one for one in found if one != main)) if main in found else tuple(found)
    raise UserError(f"espeak-ng does not speak the language {language!r}: give another voice, or the rows another language")


_ENGLISH = ("en-us", "en-gb", "en-gb-scotland", "en-gb-x-rp", "en-gb-x-gbclan", "en-gb-x-gbcwmd", "en-us-nyc", "en-029")


class CommandVoice:
    """Speaks by a program called once for every text; its line is split like a shell's, but no shell runs it."""

    def __init__(self, line: str) -> None:
        try:
            self.words = shlex.split(line)
        except ValueError as error:
            raise UserError(f"voice command:{line}: {error}; quote it as on a command line") from error
        for place in ("{text}", "{out}"):
            if not any(place in word for word in self.words[1:]):
                raise UserError(f"voice command:{line}: it has no {place}; write 'command:prog {{text}} {{out}}'")

    def say(self, text: str, language: str, seed: int) -> Sound:
        with tempfile.TemporaryDirectory(prefix="omni-voice-") as folder:
            out = Path(folder) / "said.wav"
            values = {"{text}": text, "{out}": str(out), "{language}": language, "{seed}": str(seed)}
            words = [_filled(word, values) for word in self.words]
            try:
                done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT, check=False)
            except (FileNotFoundError, PermissionError) as error:
                raise UserError(
                    f"voice command {words[0]!r} cannot be run ({error.strerror}): install it, or check its path"
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


def _filled(word: str, values: dict[str, str]) -> str:
    """Fill a word's placeholders, each once: placeholders within an inserted text are not filled."""
    for place, value in values.items():
        if place in word:
            before, _, after = word.partition(place)
            return _filled(before, values) + value + _filled(after, values)
    return word


def imported(spec: str) -> Callable[..., Any]:
    """The callable `module:name`; UserError where there is none."""
    module, _, name = spec.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"voice {spec!r} cannot be imported ({error}): name a module on the path and a callable in it"
        ) from error
    if not callable(found):
        raise UserError(f"voice {spec!r} is a {type(found).__name__}, not a callable: name a function of a text")
    return found  # type: ignore[no-any-return]


class CallableVoice:
    """Speaks by a Python callable; `spec` names it in messages."""

    def __init__(self, spec: str, function: Callable[..., Any]) -> None:
        self.spec, self.function, self.extra = spec, function, _taken(function)

    def say(self, text: str, language: str, seed: int) -> Sound:
        from omni.audio.waveform import whole_rate

        given = {"language": language, "seed": seed}
        try:
            made = self.function(text, **{name: given[name] for name in self.extra})
        except (Exception, SystemExit) as error:  # external code: any of its errors concerns this text only
            raise UserError(f"voice {self.spec} failed with {type(error).__name__}: {' '.join(str(error).split())}") from error
        if not (isinstance(made, tuple) and len(made) == 2):
            raise UserError(f"voice {self.spec} returned {type(made).__name__}: it must return (samples, sample rate)")
        try:
            rate = whole_rate(made[1], f"voice {self.spec}")
            if not RATES[0] <= rate <= RATES[1]:
                raise UserError(f"voice {self.spec} returned a rate of {rate} Hz; it must lie from {RATES[0]} to {RATES[1]}")
            return Sound(_samples(made[0], f"voice {self.spec}"), rate)
        except UserError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"voice {self.spec} returned no samples [S] and rate: {' '.join(str(error).split())}") from error


def _taken(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names among `language` and `seed` that a callable has parameters for."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return ()
    named = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    return tuple(name for name in ("language", "seed") if name in named)


def _samples(made: Any, name: str) -> Tensor:
    """Samples [S] (float32), scaled by their type as those of questions are; UserError where they are none, or not one row."""
    import numpy as np

    from omni.audio.waveform import as_waveform

    shape = np.shape(made)
    if len(shape) != 1:
        raise UserError(f"{name} returned samples of shape {list(shape)}; they must be one row [S]")
    return as_waveform(made.detach() if hasattr(made, "detach") else made, name)
