"""`omni-infer get smol`: puts a model together from a language model and a Whisper, as their makers offer them, and from what
is trained between them, which ships with the package: a projector, the head that reads its features, and LoRA."""

from __future__ import annotations

import hashlib
from pathlib import Path

from infer.options import GetOptions
from infer.quantize import bytes_written
from omni.config import ProjectorConfig
from omni.convert import huggingface, omni_folder
from omni.convert.contract import TextConfig, one_dtype
from omni.convert.grow import Growth, grow
from omni.convert.parts import load_encoder, read_whisper, shorten_window
from omni.errors import UserError
from omni.layout import Layout
from omni.lora import peft
from omni.pretrained import SHIPPED

LANGUAGE_MODEL, COMMIT = "HuggingFaceTB/SmolLM2-135M-Instruct", "12fd25f77366fa6b3b4b768ec3050bf629380bac"
SHA256 = "5af571cbf074e6d21a03528d2330792e532ca608f24ac70a143f6b369968ab8c"
"""Of its model.safetensors."""
FILES = ["*.json", "model.safetensors"]
ENCODER, WINDOW = 1888033870, 6.0
"""Fingerprint of the encoder with which the adapter was trained, Whisper base's, and the window that it heard in."""
PROJECTOR = ProjectorConfig("transformer", hidden=768, stack=4)


def get(options: GetOptions) -> None:
    """Write the model's folder, showing the progress. UserError: parts are missing, or not those that it was trained with."""
    language_model, whisper = fetched_parts() if options.parts is None else local_parts(Path(options.parts))
    text, encoder = huggingface.read(language_model), shorten_window(read_whisper(whisper), WINDOW)
    assert isinstance(text.config, TextConfig)
    if load_encoder(encoder).fingerprint() != ENCODER:
        raise UserError(f"{whisper} is another Whisper than the one that {options.name} was trained with: give Whisper base")
    growth = Growth(Layout.preset("codec2", text.config.size), "none", PROJECTOR)
    model = peft.merged(grow(text, encoder, growth, one_dtype(text)), SHIPPED / options.name)
    with bytes_written("writing", options.quiet) as show:
        omni_folder.write(model, Path(options.out), show)
    print(f"{options.out}: {options.name}, from {language_model} and {whisper}")
    print(f"it answers in writing: omni-infer ask question.wav --model {options.out}")


def local_parts(folder: Path) -> tuple[Path, Path]:
    """The language model's folder `smollm` in a folder, and the Whisper: `whisper/base.pt`, or the hub's folder `whisper`."""
    file = folder / "whisper/base.pt"
    if not (folder / "smollm/config.json").is_file():
        raise UserError(f"--parts {folder} has no smollm/config.json: name the folder that holds smollm and whisper/base.pt")
    return folder / "smollm", file if file.is_file() else folder / "whisper"


def fetched_parts() -> tuple[Path, Path]:
    """The parts from the hub and from OpenAI, kept in their caches. UserError: they are not reached, or not what they were."""
    import huggingface_hub
    import whisper

    cache = Path.home() / ".cache/whisper"
    try:  # with the tokenizer's files and the chat template, which folders of our own do not have
        kept = huggingface_hub.snapshot_download(LANGUAGE_MODEL, revision=COMMIT, allow_patterns=FILES)
        whisper.load_model("base", "cpu", str(cache))  # which compares the SHA-256
    except (OSError, RuntimeError) as error:
        why = " ".join(str(error).split())
        raise UserError(f"{LANGUAGE_MODEL} and Whisper base cannot be fetched ({why}): bring them, and name --parts") from error
    language_model = Path(kept)
    if hashlib.sha256((language_model / "model.safetensors").read_bytes()).hexdigest() != SHA256:
        raise UserError(f"{LANGUAGE_MODEL} has another SHA-256 than {SHA256}: remove it from the hub's cache, and try again")
    return language_model, cache / "base.pt"
