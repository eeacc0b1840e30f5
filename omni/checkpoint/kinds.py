"""The kinds of files that weights come in, by name; `omni.checkpoint.formats` reads and writes them."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

KINDS = {
    "omni": "a model folder of this project",
    "mini-omni": "a mini-omni or mini-omni2 folder",
    "whisper": "a Whisper: OpenAI's .pt or a Hugging Face folder",
    "snac": "a SNAC codec's folder",
    "mimi": "a Mimi codec's folder",
    "hf": "a language model's Hugging Face folder",
}
"""What each kind is, for help and messages; in the order in which a path is tried: the particular before the general."""

FLOATS = ("float32", "bfloat16", "float16")
"""Types that weights may have."""


def closest(word: str, known: Iterable[str]) -> str:
    """`did you mean 'x'? known: ...`, for messages."""
    names = list(known)
    close = get_close_matches(word, names, n=1, cutoff=0.4)
    return (f"did you mean {close[0]!r}? " if close else "") + f"known: {', '.join(names)}"
