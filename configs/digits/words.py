"""Caches words spoken by other programs' voices in a folder: starting a program takes longer than training on its speech.

One file for each voice, `<hash of voice and bandwidth>.safetensors`: for each word its samples [S] (int16) at the bandwidth,
and the voice in its metadata. Words that are not cached are spoken on demand; both give the same samples.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from omni.audio.io import SAMPLE_RATE
from omni.audio.resample import resample
from omni.checkpoint.tensors import save_tensors
from omni.errors import UserError
from omni.files import replacing
from train.console.progress import Progress, Screen
from train.data.tts.voices import make_voice

_SCALE = 32767


@lru_cache(maxsize=16384)
def say_word(voice: str, word: str, rate: int, folder: str | None = None) -> Tensor:
    """Speak a word [S] at 16 kHz in a voice (see `PrepareConfig.voice`), band-limited by recording at `rate` samples a second;
    silence around it stays. Memory holds as many words as 40 voices with 400 words each, 30 kB a word. `folder`: of cached
    words. UserError: the voice cannot say it, or a file of the folder is no cache of words."""
    kept = _words(str(_file(Path(folder), voice, rate))) if folder else None
    said = kept[1].get_tensor(word) if kept is not None and word in kept[0] else _record(voice, word, rate)
    return resample(said.float() / _SCALE, rate, SAMPLE_RATE)


def keep_words(wanted: Mapping[str, Iterable[str]], rate: int, folder: str, progress: Progress = "auto") -> int:
    """Speak and cache the words that the folder lacks, as many voices at a time as there are cores. A voice's words are written
    together, under another name and renamed: an interruption loses the voices in progress. `wanted`: words by voice. Returns
    number of words that were spoken. UserError: a voice cannot say a word, or a file of the folder is no cache of words."""
    root = Path(folder)
    kept = {voice: _words(str(_file(root, voice, rate))) for voice in wanted}
    lacking = {voice: sorted(set(words) - (kept[voice] or [set()])[0]) for voice, words in wanted.items()}
    lacking = {voice: words for voice, words in lacking.items() if words}
    total = sum(map(len, lacking.values()))
    if not total:
        return 0
    root.mkdir(parents=True, exist_ok=True)
    screen = Screen(progress, total=total, unit=" words", desc="voices speak, once", mininterval=0.2)
    screen.say(
        f"speaking {total} words in {len(lacking)} voice{'s' * (len(lacking) > 1)}; {folder} keeps them for the next run"
    )
    stopped, counting = threading.Event(), threading.Lock()

    def speak(voice: str) -> None:
        said: dict[str, Tensor] = {}
        for word in lacking[voice]:
            if stopped.is_set():
                return
            said[word] = _record(voice, word, rate)
            with counting:
                if screen.bar is not None:
                    screen.bar.update()
        _keep(_file(root, voice, rate), voice, rate, said)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            for done in as_completed([pool.submit(speak, voice) for voice in lacking]):
                done.result()
        except BaseException:
            stopped.set()
            raise
        finally:
            screen.close()
    _words.cache_clear()
    return total


def _record(voice: str, word: str, rate: int) -> Tensor:
    """Speak a word [S] (int16) at `rate` samples a second, by way of 16 kHz like the recordings it is mixed with."""
    sound = resample(make_voice(voice).say(word, "en", 0).load(SAMPLE_RATE), SAMPLE_RATE, rate)
    return (sound * _SCALE).round().clamp(-_SCALE, _SCALE).to(torch.int16)


def _file(folder: Path, voice: str, rate: int) -> Path:
    return folder / f"{hashlib.blake2b(f'{rate} {voice}'.encode(), digest_size=10).hexdigest()}.safetensors"


@lru_cache(maxsize=1024)
def _words(file: str) -> tuple[frozenset[str], Any] | None:
    """Words of a file, and its open reader; None where there is no file."""
    try:
        reader = safe_open(file, "pt")
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} is no file of spoken words ({error}); delete it, and the words are spoken again") from error
    return frozenset(reader.keys()), reader


def _keep(file: Path, voice: str, rate: int, said: Mapping[str, Tensor]) -> None:
    """Add spoken words to a voice's file."""
    kept = _words(str(file))
    words = {word: kept[1].get_tensor(word) for word in kept[0]} if kept is not None else {}
    with replacing(file) as part:
        save_tensors({**words, **said}, part, {"voice": voice, "rate": str(rate)})
