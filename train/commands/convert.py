"""`python -m train convert SOURCE TARGET`: weights of other projects into ours, and out again."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jsonargparse

from omni.convert.kinds import FLOATS, KINDS
from omni.errors import UserError, closest
from omni.process import importing
from omni.remote import check_there
from train.console.progress import duration
from train.convert.target import check_target


@dataclass(frozen=True)
class Options:
    """What `convert` can be told.

    Attributes:
        kind: what SOURCE is, where that is not recognised; of a model folder: what TARGET becomes.
        dtype: float32, bfloat16 or float16 for all weights; by default as they are.
        overwrite: replace a TARGET that an earlier conversion or training wrote.
        drop_vision: of a mini-omni2: leave its vision adapter aside and keep what hears and speaks.
        lora: an adapter's folder (PEFT's format), merged into the weights on the way.
        into: a model folder whose encoder is replaced by SOURCE, a Whisper; TARGET is the folder with both.
        keep_text: keep a language model as text: the smallest audio parts (codec2, zeros, a nano encoder), untrained.
        encoder: a Whisper's file or folder, or the name of a size for random weights.
        encoder_mode: padded (30 s window then cut, as Whisper was trained: its default) or variable (the audio there is).
        codec: the codec that the model will speak: snac (default), codec2, mimi, mimi-16 or mimi-32.
        codec_folder: the codec's weights, put into the model folder.
        layout: how streams stand: mini-omni, snac or codec2; by default the codec's (of mimi, one delayed stream a codebook).
        combine: whether streams' embeddings are summed (text is then unchanged) or averaged (as mini-omni does).
        adapter: linear, mlp or gated (mini-omni's).
        adapter_hidden: inner size of mlp and gated; by default the language model's.
        adapter_stack: encoder frames in one position.
        init: how new tables, heads and ids begin: mean, normal or zero.
        seed: of all that is drawn.
        tokenizer: a tokenizer.json, where the folder's own is not there.
        quiet: show nothing while it works.
    """

    kind: str | None = None
    dtype: str | None = None
    overwrite: bool = False
    drop_vision: bool = False
    lora: Path | None = None
    into: Path | None = None
    keep_text: bool = False
    encoder: str | None = None
    encoder_mode: Literal["padded", "variable"] | None = None
    codec: str | None = None
    codec_folder: Path | None = None
    layout: str | None = None
    combine: Literal["sum", "mean"] = "sum"
    adapter: Literal["linear", "mlp", "gated"] = "gated"
    adapter_hidden: int | None = None
    adapter_stack: int = 1
    init: str = "mean"
    seed: int = 0
    tokenizer: Path | None = None
    quiet: bool = False


def main(argv: Sequence[str]) -> int:
    """The command."""
    source, target, options = parse(argv)
    check(source, target, options)
    with importing():
        from train.convert.convert import Bar, convert

    started = time.monotonic()
    with Bar(not options.quiet) as bar:
        what, files = convert(source, target, options, bar)
    size, seconds = sum(f.bytes for f in files.values()), time.monotonic() - started
    print(f"{target}: {what}")
    for name, stamp in sorted(files.items()):
        print(f"  {name:<28}{stamp.bytes:>16,} bytes   crc32 {stamp.crc32:08x}")
    odd = [tensor for _, stamp in sorted(files.items()) for tensor in stamp.odd]
    if odd:
        which = odd[0] if len(odd) == 1 else f"{len(odd)} tensors (the first is {odd[0]})"
        print(f"warning: NaN or infinity in {which}: fetch {source} again, or ask who trained it", file=sys.stderr)
    print(f"{size / 1e9:.2f} GB in {duration(seconds)} ({size / 1e6 / max(seconds, 1e-3):.0f} MB/s)")
    return 0


def parse(argv: Sequence[str]) -> tuple[Path, Path, Options]:
    """Source, target and options; UserError where they make no sense."""
    formats = ", ".join(f"{name} ({what})" for name, what in KINDS.items())
    parser = jsonargparse.ArgumentParser(
        prog="python -m train convert", description=f"{__doc__} Kinds: {formats}.", exit_on_error=False, default_env=False
    )
    parser.add_argument("source", type=Path, help="a file or folder of weights")
    parser.add_argument("target", type=Path, help="the folder to write")
    for flag, text in _FLAGS.items():
        parser.add_argument(f"--{flag}", action="store_true", help=text)
    parser.add_class_arguments(Options, None, skip=set(_FLAGS))
    known = {name.strip("-").replace("-", "_") for name in parser._option_string_actions}
    for argument in argv:
        name = argument.split("=")[0]
        if name.startswith("--") and name[2:].split(".help")[0] not in known:
            raise UserError(f"unknown option {name}; {closest(name[2:], sorted(known - {'h', 'help'}))}")
    try:
        values = vars(parser.instantiate(parser.parse_args(list(argv))))
    except jsonargparse.ArgumentError as error:
        raise UserError(" ".join(str(error).split())) from error
    source, target = values.pop("source"), values.pop("target")
    return source, target, Options(**values)


_FLAGS = {
    "overwrite": "replace a TARGET that an earlier conversion or training wrote",
    "keep_text": "keep a language model as text: the smallest audio parts (codec2, zeros, a nano encoder), untrained",
    "drop_vision": "of a mini-omni2: leave its vision adapter aside and keep what hears and speaks",
    "quiet": "show nothing while it works",
}


def check(source: Path, target: Path, options: Options) -> None:
    """UserError for what can be refused before any weights are looked at."""
    check_target(source, target, options)
    check_there(source, "model", f"{source} does not exist; give a model's file or folder")
    if options.kind is not None and options.kind not in KINDS:
        raise UserError(f"--kind {options.kind!r} is unknown; {closest(options.kind, KINDS)}")
    if options.dtype is not None and options.dtype not in FLOATS:
        raise UserError(f"--dtype {options.dtype!r} is unknown; {closest(options.dtype, FLOATS)}")
