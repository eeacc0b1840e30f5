"""Names of the checkpoint formats; `omni.convert.formats` reads and writes them."""

from __future__ import annotations

KINDS = {
    "omni": "a model folder of this project",
    "mini-omni": "a mini-omni or mini-omni2 folder",
    "whisper": "a Whisper: OpenAI's .pt or a Hugging Face folder",
    "snac": "a SNAC codec's folder",
    "mimi": "a Mimi codec's folder",
    "hf": "a language model's Hugging Face folder",
}
"""Descriptions of the formats, for help and messages, in the order in which a path is tried: specific before general."""

FLOATS = ("float32", "bfloat16", "float16")
"""Types that weights may have."""
