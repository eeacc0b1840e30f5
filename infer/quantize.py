"""`omni-infer quantize`: writes a model folder in int8, and says how far its predictions are from full precision's on a text.

V text ids, T tokens.
"""

from __future__ import annotations

import ast
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import omni
from infer.options import QuantizeOptions
from omni.checkpoint.places import WEIGHTS
from omni.convert.lazy import WriteCallback
from omni.convert.omni_folder import quantize_folder
from omni.generate.speech_lm import SpeechLM
from omni.pretrained import find_model

TOKENS, COLUMNS = 4096, 256
"""Tokens of a text that are compared, and how many of them are one sequence."""

KL, SAME, PERPLEXITY = 0.01, 0.93, 0.005
"""Bounds of a good model in int8. Of SmolLM2-135M bfloat16 has 0.0014 and 0.965."""

UNKNOWN = 1000
"""Perplexity of a text that a model does not know; what int8 changes of it is not judged."""


def quantize(options: QuantizeOptions) -> None:
    """Write the folder, showing the progress, and print what it holds and how far it is from the original; UserError as
    `quantize_folder` raises it."""
    source, target = Path(find_model(options.model)), Path(options.out)
    before, started = (source / WEIGHTS).stat().st_size if (source / WEIGHTS).is_file() else 0, time.monotonic()
    with bytes_written("quantising", options.quiet) as show:
        files = quantize_folder(source, target, on_progress=show)
    size, seconds = files[WEIGHTS].bytes, time.monotonic() - started
    print(f"{target}: {source} in int8")
    for name, stamp in sorted(files.items()):
        print(f"  {name:<28}{stamp.bytes:>16,} bytes   crc32 {stamp.crc32:08x}")
    print(f"weights of {before / 1e9:.3g} GB became {size / 1e9:.3g} GB ({size / before:.1%}) in {seconds:.1f} s")
    if options.text == "none":
        return
    text = own_text() if options.text is None else Path(options.text).read_text("utf-8")
    full, ours = (SpeechLM.from_pretrained(folder, dtype="float32", kernels="reference") for folder in (source, target))
    difference = compare(full, ours, torch.tensor(full.tokenizer.encode(text)[:TOKENS]))
    where = "the descriptions in this package" if options.text is None else options.text
    print(f"beside float32, on {difference.tokens:,} tokens of {where}: {difference.line()}")


@contextmanager
def bytes_written(what: str, quiet: bool) -> Iterator[WriteCallback]:
    """A bar on a terminal, of the bytes that are written."""
    with tqdm(desc=what, unit="B", unit_scale=True, leave=False, disable=quiet or None) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


def own_text() -> str:
    """A text that is always there: what the package's modules say of themselves."""
    files = sorted(Path(omni.__file__).parent.rglob("*.py"))
    return "\n".join(ast.get_docstring(ast.parse(file.read_text("utf-8"))) or "" for file in files)


class Difference(NamedTuple):
    """Of a model from another: KL divergence in nat a token, share of tokens whose likeliest next one is the same, and the
    relative change of the perplexity, which is `before` of the other."""

    tokens: int
    kl: float
    same: float
    perplexity: float
    before: float

    def line(self) -> str:
        """The figures, and whether they are good."""
        judged = self.before < UNKNOWN
        perplexity = f"perplexity {self.before:,.1f} {self.perplexity:+.2%}"
        known = f"KL {self.kl:.5f} nat, same likeliest token {self.same:.1%}, {perplexity}"
        last = f"at most {PERPLEXITY:+.1%}" if judged else "a text it does not know"
        bounds = f"at most {KL}, at least {SAME:.0%}, {last}"
        good = self.kl <= KL and self.same >= SAME and (self.perplexity <= PERPLEXITY or not judged)
        return f"{known}; " + (f"good ({bounds})" if good else f"NOT good ({bounds}): compare its answers before you use it")


def compare(full: SpeechLM, ours: SpeechLM, ids: Tensor) -> Difference:
    """How far a model's predictions along a text's ids [T] are from those in full precision."""
    kl, same, nats, before, predicted = 0.0, 0, 0.0, 0.0, 0
    for part in ids.split(min(COLUMNS, full.config.decoder.context)):
        target, own = log_probabilities(full, part), log_probabilities(ours, part)
        kl += float(F.kl_div(own, target, reduction="sum", log_target=True))
        same += int((target.argmax(-1) == own.argmax(-1)).sum())
        said = torch.stack([target, own])[:, :-1].gather(2, part[1:, None].expand(2, -1, 1)).sum((1, 2))
        before, nats, predicted = before - float(said[0]), nats + float(said[0] - said[1]), predicted + len(part) - 1
    change, perplexity = math.exp(nats / predicted) - 1, math.exp(before / predicted)
    return Difference(len(ids), kl / len(ids), same / len(ids), change, perplexity)


@torch.no_grad()
def log_probabilities(lm: SpeechLM, ids: Tensor) -> Tensor:
    """Log-probabilities [T, V] of what follows each of a text's ids [T], beside silent audio streams."""
    tokens = lm.layout.ids("pad")[:, None].repeat(1, len(ids))
    tokens[lm.layout.n_audio] = ids
    logits = lm.model.decoder.text_logits(lm.model(tokens[None]))[0, :, : lm.layout.text.size]
    return logits.float().log_softmax(-1)
