"""Deterministic speech by espeak-ng: the same samples for the same text, whatever was spoken before.

The library keeps state from one utterance to the next (phases, flutter, noise), so that a sentence never sounds the same twice.
Here every utterance opens the library again and closes it (half a millisecond), with its noise seeded: a sound depends on text
and voice alone, as exact resume requires. Nothing stays open between utterances, so a process may fork at any time.

espeak-ng (GPL-3) is an optional part, called as the library that the package `espeakng-loader` contains. The functions called
are those of its `speak_lib.h` and `espeak_ng.h`, version 1.52.
"""

from __future__ import annotations

import ctypes
import difflib
import functools
import hashlib
import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from omni.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

SAMPLE_RATE = 22050

_SYNCHRONOUS, _UTF8 = 2, 1  # espeak_AUDIO_OUTPUT, espeakCHARS_*
_RATE, _PITCH, _PITCH_RANGE = 1, 3, 4  # espeak_PARAMETER
_IPA = 2  # espeakPHONEMES_IPA; the separator is in bits 8 to 23
_PROSODY = str.maketrans("", "", "\u02c8\u02cc\u02d0")  # primary and secondary stress, length
_LANGUAGE = re.compile(r"\([^)]*\)")  # marks phonemes of another language: "(hi)n_..."
_NOISE_SEED = 1
_SILENCE = 0.005  # amplitude below which a sample counts as silent
_MARGIN = 220  # samples of silence kept on either side when trimmed: 10 ms
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)

_lock = threading.Lock()  # the library has one global state per process


def _new_lock() -> None:
    global _lock
    _lock = threading.Lock()  # a fork may have copied it while another thread held it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)


def synthesise(
    text: str, voice: str = "en-us+f3", rate: int = 175, pitch: int = 50, pitch_range: int = 50, trim: bool = True
) -> tuple[Tensor, int]:
    """Speak `text`: samples [S] in [-1, 1] (float32) and their rate, 22,050 Hz.

    UserError: an unknown voice (the closest is named), an empty text, or no espeak-ng.

    Args:
        voice: a language, then "+" and a variant: `en-us+f3`; see `languages` and `variants`.
        rate: words per minute, 80 to 450.
        pitch, pitch_range: 0 to 100, 50 is the voice's own.
        trim: cut silence at both ends, but for 10 ms.
    """
    import numpy as np
    import torch

    check_voice(voice)
    if not text.strip():
        raise UserError("there is no text to say: give at least one word")
    pieces: list[bytes] = []
    failed: list[BaseException] = []

    def collect(samples: ctypes._Pointer[ctypes.c_short], count: int, _: int) -> int:
        if samples and count > 0 and not failed:
            pieces.append(ctypes.string_at(samples, 2 * count))
        return int(bool(failed))  # 1 ends the text

    callback = _CALLBACK(collect)
    language, plus, variant = voice.partition("+")
    name = _language_files()[language].name.lower() + plus + variant  # a name that the library finds in either `_home`
    words = text.encode() + b"\0"
    with _lock, _opened() as library:
        library.espeak_SetSynthCallback(callback)
        library.espeak_ng_SetRandSeed(ctypes.c_long(_NOISE_SEED))
        ctypes.CDLL(None).srand(_NOISE_SEED)  # the breath noise of some voices uses the C library's generator
        if library.espeak_SetVoiceByName(name.encode()) != 0:
            raise UserError(f"espeak-ng cannot load the voice {voice!r}: reinstall espeakng-loader")
        for parameter, value in ((_RATE, rate), (_PITCH, pitch), (_PITCH_RANGE, pitch_range)):
            library.espeak_SetParameter(parameter, int(value), 0)
        with _kept(failed):
            library.espeak_Synth(words, ctypes.c_size_t(len(words)), 0, 0, 0, _UTF8, None, None)
    if failed:
        raise failed[0]
    audio = np.frombuffer(b"".join(pieces), np.int16).astype(np.float32) / 32768
    if trim:
        loud = np.flatnonzero(np.abs(audio) > _SILENCE)
        audio = audio[max(0, loud[0] - _MARGIN) : loud[-1] + 1 + _MARGIN] if len(loud) else audio[:0]
    if not len(audio):
        raise UserError(f"espeak-ng says nothing for {text!r}: give it words")
    return torch.from_numpy(audio.copy()), SAMPLE_RATE


@functools.lru_cache(maxsize=65536)
def phonemes(word: str, language: str = "en-us") -> tuple[str, ...]:
    """Phonemes of a word as espeak-ng reads it, in the International Phonetic Alphabet, without stress and length. UserError:
    an unknown language (the closest is named), or no espeak-ng."""
    check_voice(language)
    text = ctypes.c_char_p(word.encode() + b"\0")
    rest = ctypes.cast(text, ctypes.c_void_p)
    raw: list[str] = []
    with _lock, _opened() as library:
        if library.espeak_SetVoiceByName(_language_files()[language].name.lower().encode()) != 0:
            raise UserError(f"espeak-ng cannot load the voice {language!r}: reinstall espeakng-loader")
        library.espeak_TextToPhonemes.restype = ctypes.c_char_p
        while rest.value:  # one clause after the other
            clause = library.espeak_TextToPhonemes(ctypes.byref(rest), _UTF8, _IPA | ord("_") << 8)
            raw += _LANGUAGE.sub("_", (clause or b"").decode()).replace(" ", "_").split("_")
    return tuple(sound for sound in (part.translate(_PROSODY).strip() for part in raw) if sound)


@functools.cache
def languages() -> tuple[str, ...]:
    """Available languages and accents, such as `en-us` and `en-gb-scotland`."""
    return tuple(sorted(_language_files()))


@functools.cache
def variants() -> tuple[str, ...]:
    """Available variants, such as `f3`, `m1` and `klatt`: one follows the language after a "+"."""
    return tuple(sorted(path.name for path in (_installed()[1] / "voices" / "!v").iterdir()))


@functools.cache
def check_voice(voice: str) -> None:
    """Refuse a voice that does not exist (UserError naming the closest)."""
    language, plus, variant = voice.partition("+")
    for noun, name, known in (("language", language, languages()), ("variant", variant, variants() if plus else ("",))):
        if name not in known:
            close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.0)[0]
            raise UserError(f"voice {voice!r}: espeak-ng has no {noun} {name!r}; did you mean {close!r}?")


# --- the library and its folder ---------------------------------------------------------------------------------------


@contextmanager
def _opened() -> Iterator[ctypes.CDLL]:
    """Open the library in its initial state, and close it at the end; the caller holds the lock."""
    if os.name != "posix":
        raise UserError("speech by espeak-ng needs Linux or macOS")
    library = ctypes.CDLL(_installed()[0], mode=os.RTLD_LOCAL | os.RTLD_NOW)
    try:
        if library.espeak_Initialize(_SYNCHRONOUS, 0, os.fsencode(_home()), 0) != SAMPLE_RATE:
            raise UserError(f"espeak-ng cannot read its data in {_home()}: reinstall espeakng-loader")
        yield library
        library.espeak_Terminate()
    finally:
        ctypes.CDLL(None).dlclose(ctypes.c_void_p(library._handle))


@contextmanager
def _kept(failed: list[BaseException]) -> Iterator[None]:
    """Keeps what callbacks raise, which ctypes drops otherwise. The callback cannot catch it: a signal's handler is run before
    its first line."""
    before = sys.unraisablehook

    def keep(args: sys.UnraisableHookArgs) -> None:
        if args.exc_value is not None and "ctypes callback" in (args.err_msg or ""):
            failed.append(args.exc_value)
        else:
            before(args)

    sys.unraisablehook = keep
    try:
        yield
    finally:
        sys.unraisablehook = before


@functools.cache
def _installed() -> tuple[str, Path]:
    """The library, and the folder of its data; UserError where the package is not installed."""
    try:
        import espeakng_loader
    except ImportError as error:
        raise UserError('speech by espeak-ng needs the package espeakng-loader: pip install "omni-speech[demo]"') from error
    return str(espeakng_loader.get_library_path()), Path(espeakng_loader.get_data_path())


@functools.cache
def _language_files() -> dict[str, Path]:
    """Voice file of each language. A file may name several, each with a priority: the lowest number is the language's own."""
    best: dict[str, tuple[int, Path]] = {}
    for path in sorted(path for path in (_installed()[1] / "lang").rglob("*") if path.is_file()):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            words = line.split()
            if len(words) > 1 and words[0] == "language":
                priority = int(words[2]) if len(words) > 2 and words[2].isdigit() else 5  # DEFAULT_LANGUAGE_PRIORITY
                if priority < best.get(words[1].lower(), (1 << 30,))[0]:
                    best[words[1].lower()] = (priority, path)
    return {language: path for language, (_, path) in best.items()}


@functools.cache
def _home() -> Path:
    """Data folder for espeak-ng: links to its own data, with each language's file also in the place that is searched first. A
    voice is then found by opening one file; otherwise the library lists some 250 voice files at every opening, which takes
    longer than speaking. Where no such folder can be made, its own folder is used, only slower."""
    data = _installed()[1]
    plain = data.parent
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "omni"
    home = cache / f"espeak-ng-{hashlib.blake2b(os.fsencode(data), digest_size=6).hexdigest()}"
    if len(os.fsencode(home)) > 120:  # the library's buffer for paths in it has 160 bytes
        return plain
    try:
        if not home.is_dir():
            cache.mkdir(parents=True, exist_ok=True)
            beside = Path(tempfile.mkdtemp(dir=cache))
            _link(data, beside / "espeak-ng-data")
            try:
                beside.rename(home)
            except OSError:  # another process has made it meanwhile
                shutil.rmtree(beside)
        return home if (home / "espeak-ng-data" / "phontab").is_file() else plain
    except OSError:
        return plain


def _link(source: Path, target: Path) -> None:
    (target / "voices").mkdir(parents=True)
    for path in source.iterdir():
        if path.name != "voices":
            (target / path.name).symlink_to(path)
    for path in {source / "voices" / "!v", *_language_files().values()}:
        (target / "voices" / path.name.lower()).symlink_to(path)
