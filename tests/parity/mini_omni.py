"""`python -m tests.parity.mini_omni CHECKOUT`: our model and generation against gpt-omni/mini-omni's own code.

Random weights are made by the checkout's own classes and saved as its checkpoints are; ours reads them through the converter.
Then each side says what it sees (`ours`, `theirs`: prompts, features, logits, gradients, tokens, frames), and what they say is
compared, name by name. Sizes:

    released    groups of heads, gated adapter, no post-adapter: the released model made small (or, with --full, its real size)
    post        a post-adapter of two blocks, every head with its own keys, no biases
    linear      one key for all heads, a linear adapter, heads of another size than width / heads
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import whisper
from torch import Tensor

from omni import SpeechLM
from omni.checkpoint.folder import load_folder
from omni.checkpoint.places import TOKENIZER
from omni.codec.snac import to_levels
from omni.convert import mini_omni
from omni.convert import omni_folder as streamed
from omni.convert.lazy import Lazy
from omni.convert.mini_omni import split
from omni.layout import Layout
from omni.model.speech_model import SpeechModel
from omni.tasks import Columns, Turn, prompt
from omni.text import Tokenizer
from tests.generate.session_toys import inside
from tests.parity.checkout import Checkout, open_checkout, quiet
from tests.parity.report import BOUND, compare, show
from tests.parity.weights import FULL, SIZES, make_checkpoint
from tests.test_layout import undelayed

LAYOUT = Layout.preset("mini-omni")
TEXT_ROWS, AUDIO_ROWS = LAYOUT.text.vocabulary, LAYOUT.audio[0].vocabulary
TASKS = ("A1A2", "A1T2", "A1T1", "T1A2", "T1T2", "batch of two")
SPOKEN = ("A1A2", "T1A2", "batch of two")
QUESTION = "What is your name? naïve"
SECONDS = (0.02, 0.7, 1.94, 2.0, 29.999)

FIRST_COLUMN = (
    "theirs never looks for the text's end in the first column and goes on after it, ours is an empty text then: the ends that "
    "are tried come later"
)

Rows = dict[str, Tensor]
"""Rows of the heads that stand for the ends: of the text (`text`) and of the last audio stream (`audio6`)."""


@dataclass(frozen=True)
class Setting:
    """One comparison: `folder` is the checkpoint, as theirs is laid out; `steps` columns are answered at most."""

    checkout: Checkout
    folder: Path
    settings: dict[str, Any]
    steps: int

    @property
    def question(self) -> Tensor:
        return sound(1.94)


def sound(seconds: float) -> Tensor:
    """Noise under a slow hum at 16 kHz: no two pieces alike."""
    generator = torch.Generator().manual_seed(5)
    t = torch.arange(round(seconds * 16000)) / 16000
    return (0.1 * torch.randn(len(t), generator=generator) * (1 + torch.sin(9 * t))).float()


def batch() -> tuple[Tensor, list[int], list[str]]:
    """Columns [2, 8, 24] of local ids, features per row, and tasks: one row hears, the other reads."""
    generator = torch.Generator().manual_seed(6)
    columns = torch.stack([torch.randint(s.vocabulary, (2, 24), generator=generator) for s in LAYOUT.streams], dim=1)
    return columns, [9, 0], ["A1A2", "T1A2"]


def joint(columns: Tensor) -> Tensor:
    """Local ids [..., 8, C] to theirs, of one table."""
    shift = torch.tensor([TEXT_ROWS + AUDIO_ROWS * i for i in range(7)] + [0])
    return columns + shift[:, None]


def weighting(logits: Sequence[Tensor]) -> Tensor:
    """A number that depends on every logit."""
    generator = torch.Generator().manual_seed(7)
    return sum((x * torch.randn(x.shape, generator=generator)).sum() / x.shape[-1] ** 0.5 for x in logits)  # type: ignore[return-value]


def theirs(s: Setting, ends: dict[str, Rows]) -> Iterator[tuple[str, Any]]:
    """What the checkout's code says; `ends` are rows with which a task's answer ends (see `find_ends`)."""
    with quiet():
        config = s.checkout.config.Config.from_file(s.folder / "model_config.yaml")
        gpt = s.checkout.model.GPT(config).eval()
    gpt.load_state_dict(torch.load(s.folder / "lit_model.pth", weights_only=True, mmap=True))
    gpt.device = torch.device("cpu")
    ear = whisper.load_model(str(s.folder / "small.pt"), "cpu")
    words = s.checkout.tokenizer.Tokenizer(s.folder)

    for seconds in SECONDS:
        mel, length = s.checkout.inference.load_audio(sound(seconds))
        yield f"features of {seconds:g} s", ear.embed_audio(mel[None])[0][:length].detach()
    prompts = {task: s.checkout.prompt(task, QUESTION if task[0] == "T" else s.question, ear, words) for task in TASKS}
    for task, (_, ids) in prompts.items():
        yield f"prompt {task}", torch.stack(ids, dim=1).tolist()

    columns, lengths, tasks = batch()
    ids = list(joint(columns).unbind(1))
    heard = ear.embed_audio(s.checkout.inference.load_audio(s.question)[0][None])[:, : lengths[0]].detach().expand(2, -1, -1)
    audio, text = gpt(heard, ids, None, whisper_lens=lengths, task=tasks)
    for k, logits in enumerate([*audio, text]):
        yield f"logits {LAYOUT.names[k]}", logits.detach()
    weighting([*audio, text]).backward()
    found = {name: Lazy.of(p.grad) for name, p in gpt.named_parameters()}
    source = mini_omni.read(s.folder, tokenizer=s.folder / TOKENIZER)
    for name, grad in split(found, source.config)[0].items():  # type: ignore[arg-type]
        yield f"gradient {name}", grad()
    gpt.zero_grad(set_to_none=True)
    del found, audio, text

    with torch.inference_mode():
        gpt.set_kv_cache(batch_size=2)
        pieces = []
        for low, high in ((0, 15), (15, 16), (16, 20), (20, 24)):
            piece = [x[:, low:high] for x in ids]
            place = torch.arange(low, high)
            audio, text = gpt(heard if low == 0 else None, piece, place, whisper_lens=lengths, task=tasks)
            pieces.append([*audio, text])
        gpt.clear_kv_cache()
        clear_post(gpt)
        for k, parts in enumerate(zip(*pieces, strict=True)):
            yield f"cached logits {LAYOUT.names[k]}", torch.cat(parts, dim=1)

    for task, (features, ids) in prompts.items():
        yield from their_answer(s, gpt, task, features, ids)
        if task in ends:
            audio_head = gpt.transformer.post_adapter_audio_lm_head if config.post_adapter else gpt.lm_head
            first = 0 if config.post_adapter else TEXT_ROWS
            rows = {"text": gpt.lm_head.weight[151936], "audio6": audio_head.weight[first + AUDIO_ROWS * 6 + 4096]}
            before = replace_rows(rows, ends[task])
            yield from their_answer(s, gpt, task, features, ids, "ending ")
            replace_rows(rows, before)


def their_answer(
    s: Setting, gpt: Any, task: str, features: Tensor | None, ids: list[Tensor], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """The same of theirs; see `our_answer`."""
    torch.manual_seed(0)
    out = s.checkout.answer(task, gpt, features, ids, s.steps)
    clear_post(gpt)
    columns = list(zip(*out, strict=True))
    yield f"{prefix}tokens {task}", columns
    yield f"{prefix}end {task}", ending(columns, len(columns) < s.steps)
    if task in SPOKEN:
        flat = s.checkout.snac.reconscruct_snac(out)
        frames = [flat[i : i + 8] for i in range(0, len(flat), 8)]
        whole = [f for f in frames if max(f[1:]) < 4096]  # ours leaves a frame with a special id out
        whole = whole[: s.steps - LAYOUT.max_delay - 1]
        levels = s.checkout.snac.reconstruct_tensors([x for f in whole for x in f], "cpu")
        yield f"{prefix}frames {task}", [level[0].tolist() for level in levels]


def ending(columns: Sequence[tuple[int, ...]], ended: bool) -> str:
    """How an answer ends, in words."""
    text = next((f", its text after {i}" for i, column in enumerate(columns) if column[-1] == 151936), "")
    return (f"after {len(columns)} columns" if ended else "none") + text


def clear_post(gpt: Any) -> None:
    """What `clear_kv_cache` forgets."""
    for block in gpt.transformer.post_adapter if gpt.config.post_adapter else ():
        block.attn.kv_cache = None


def their_delay(checkout: Checkout) -> Iterator[tuple[str, Any]]:
    """Frames out of columns by theirs, whole (`reconscruct_snac`) and while streaming (`get_snac`)."""
    codes, columns = delayed()
    streams = [row[: codes.shape[1] + 7].tolist() for row in columns]
    flat = checkout.snac.get_snac([list(x) for x in streams], 10, 4) + checkout.snac.get_snac([list(x) for x in streams], 14, 4)
    yield "delay: first 8 frames while streaming", [flat[i + 1 : i + 8] for i in range(0, len(flat), 8)]
    flat = checkout.snac.reconscruct_snac(streams)
    yield "delay: frames of whole columns", [flat[i + 1 : i + 8] for i in range(0, len(flat), 8)]
    yield "delay: levels of SNAC", [level[0].tolist() for level in checkout.snac.reconstruct_tensors(flat, "cpu")]


def delayed() -> tuple[Tensor, Tensor]:
    """Random codes [7, F] and the columns [8, C] that our layout makes of them."""
    codes = torch.randint(4096, (7, 12), generator=torch.Generator().manual_seed(8))
    return codes, LAYOUT.delayed(torch.arange(5), codes)[0]


def our_delay() -> Iterator[tuple[str, Any]]:
    codes, columns = delayed()
    assert torch.equal(undelayed(LAYOUT, columns)[1], codes)
    yield "delay: first 8 frames while streaming", codes.T[:8].tolist()
    yield "delay: frames of whole columns", codes.T.tolist()
    yield "delay: levels of SNAC", [level.tolist() for level in to_levels(codes)]


def load_ours(s: Setting, target: Path) -> SpeechModel:
    """The checkpoint through our converter."""
    streamed.write(mini_omni.read(s.folder, tokenizer=s.folder / TOKENIZER), target)
    return load_folder(target).model


def ours(s: Setting, model: SpeechModel, ends: dict[str, Rows]) -> Iterator[tuple[str, Any]]:
    """What our code says of the same; names as in `theirs`."""
    lm = SpeechLM(model, Tokenizer.from_file(s.folder / "tokenizer.json"))

    for seconds in SECONDS:
        yield f"features of {seconds:g} s", encode(model, sound(seconds))
    for task in TASKS:
        rows = ["A1A2", "A1T2"] if task == "batch of two" else [task]
        columns = torch.stack([columns_of(s, lm, row).tokens for row in rows])
        yield f"prompt {task}", joint(columns).tolist()

    columns, lengths, _ = batch()
    heard = encode(model, s.question)[: lengths[0]]
    index = torch.full((2, 24), -1)
    index[0, 1 : 1 + lengths[0]] = torch.arange(lengths[0])
    logits = model.decoder.logits(model(columns, model.projector(heard, [lengths[0]]), index))
    for k, x in enumerate(logits):
        yield f"logits {LAYOUT.names[k]}", x.detach()
    weighting(logits).backward()
    for name, p in model.named_parameters():
        if not name.startswith("encoder."):
            yield f"gradient {name}", p.grad
    model.zero_grad(set_to_none=True)
    del logits

    with torch.inference_mode():
        cache, pieces = model.make_cache(2, 24), []
        features = model.projector(heard, [lengths[0]])
        for low, high in ((0, 15), (15, 16), (16, 20), (20, 24)):
            place = torch.arange(low, high).expand(2, -1)
            hidden = model(columns[:, :, low:high], features, index[:, low:high], input_pos=place, cache=cache)
            pieces.append(model.decoder.logits(hidden))
        for k, parts in enumerate(zip(*pieces, strict=True)):
            yield f"cached logits {LAYOUT.names[k]}", torch.cat(parts, dim=1)

    for task in TASKS:
        yield from our_answer(s, lm, task)
        if task in ends:
            before = patch(model, ends[task])
            yield from our_answer(s, lm, task, "ending ")
            patch(model, before)


def encode(model: SpeechModel, clip: Tensor) -> Tensor:
    """Encoder frames [T, C] of a clip."""
    mel = model.encoder.config.features(clip)
    return model.encoder.run(mel[None], [mel.shape[1]], [model.encoder.config.frames(len(clip))]).detach()


def columns_of(s: Setting, lm: SpeechLM, task: str) -> Columns:
    """Our prompt."""
    if task[0] == "T":
        return prompt(LAYOUT, Turn(task, question=tuple(lm.tokenizer.encode(QUESTION))))
    return prompt(LAYOUT, Turn(task, features=lm.config.features(len(s.question))))


def our_answer(s: Setting, lm: SpeechLM, task: str, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Columns of an answer without the one that ends it, whether it ended, and its frames as SNAC's levels."""
    columns, frames, ended = write(s, lm, task)
    yield f"{prefix}tokens {task}", columns if task in SPOKEN else [column[7:] for column in columns]
    yield f"{prefix}end {task}", ending(columns, ended)
    if task in SPOKEN:
        yield f"{prefix}frames {task}", [level.tolist() for level in to_levels(frames)]


def write(s: Setting, lm: SpeechLM, task: str) -> tuple[list[tuple[int, ...]], Tensor, bool]:
    """The columns of an answer, at most `steps`, its frames [7, F], and whether it ended."""
    question: Any = QUESTION if task[0] == "T" else s.question
    most = s.steps - (LAYOUT.max_delay + 1 if task in SPOKEN else 0)  # so that the limit is `steps` columns
    with lm.session(max_tokens=most, text_assist=task == "batch of two") as session:
        for _ in session.ask(question, "A1A2" if task == "batch of two" else task):
            pass
        running = inside(session)._last
        assert running is not None
        reply = running.reply
    ended = reply.reason == "end"
    return reply.columns[:-1] if ended else reply.columns, torch.tensor(reply.frames).reshape(-1, 7).T, ended


def patch(model: SpeechModel, ends: Rows) -> Rows:
    """Give the heads other rows for the end of the text and of the last audio stream; those that stood there."""
    return replace_rows({"text": model.decoder.head_weight(7)[151936], "audio6": model.decoder.head_weight(6)[4096]}, ends)


@torch.no_grad()
def replace_rows(rows: Rows, others: Rows) -> Rows:
    before = {name: row.clone() for name, row in rows.items()}
    for name, row in rows.items():
        row.copy_(others[name])
    return before


@torch.no_grad()
def find_ends(s: Setting, model: SpeechModel, task: str) -> Rows:
    """Rows with which the text of an answer ends after a while, and its sound later: the states that come then, lengthened,
    and turned away from those that come first."""
    lm = SpeechLM(model, Tokenizer.bytes())
    rows = {"text": torch.zeros(model.config.decoder.width), "audio6": torch.zeros(model.config.decoder.width)}
    before = patch(model, rows)
    for name, stream, column in (("text", 7, s.steps // 4), ("audio6", 6, 2 * s.steps // 3)):
        if name == "audio6" and task not in SPOKEN:
            continue
        written = torch.tensor(write(s, lm, task)[0][:column]).T
        asked = task
        if task == "batch of two":
            asked = "A1T2" if name == "text" else "A1A2"
            if name == "text":  # its second row writes the text, and hears silence
                written[:7] = LAYOUT.ids("pad")[:7, None]
        question = columns_of(s, lm, asked)
        tokens = torch.cat([question.tokens, written], dim=1)
        index = torch.cat([question.feature_index, torch.full((written.shape[1],), -1)])
        features = model.projector(encode(model, s.question), question.features) if question.features else None
        hidden = model(tokens[None], features, index[None])
        states = (hidden.text if name == "text" else hidden.audio)[0, len(question) - 1 :]
        early = torch.linalg.qr(states[:12].T).Q  # not before the 12th column, and never in the prompt's own
        state = states[-1] - early @ (early.T @ states[-1])
        rows[name] = state * 1.2 * model.decoder.logits(hidden)[stream][0, -1].max() / state.square().sum()
        patch(model, rows)
    patch(model, before)
    return rows


def run(checkout: Checkout, name: str, settings: dict[str, Any], steps: int, ear: Path | None, full: bool) -> bool:
    """One size: ours says everything first, then theirs, so that only one model is in memory at a time."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "theirs"
        settings = make_checkpoint(checkout, folder, settings, ear, full)
        gc.collect()
        s = Setting(checkout, folder, settings, steps)
        model = load_ours(s, Path(temporary) / "ours")
        ends = {} if full else {task: find_ends(s, model, task) for task in TASKS}
        said = dict(ours(s, model, ends))
        del model
        gc.collect()
        good = show(name, compare(theirs(s, ends), said))
    print(f"  ({time.monotonic() - started:.0f} s)")
    return good


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.parity.mini_omni", description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="a checkout of gpt-omni/mini-omni")
    parser.add_argument("--whisper", type=Path, help="an OpenAI .pt file; by default a random Whisper")
    parser.add_argument(
        "--full", action="store_true", help="the released model's size (0.7 billion random weights), one setting"
    )
    parser.add_argument("--steps", type=int, default=100, help="columns to answer")
    parser.add_argument("--only", choices=SIZES, help="one of the small sizes")
    options = parser.parse_args(list(argv))
    if options.steps < 20:
        parser.error("--steps must be at least 20")
    checkout = open_checkout(options.checkout.resolve())
    print(f"{checkout.path}: compared with largest relative difference {BOUND:.0e}; all else must be equal")
    for note in (*checkout.notes, FIRST_COLUMN):
        print(f"  note: {note}")
    sizes = {"released, real size": FULL} if options.full else SIZES
    if options.only is not None:
        sizes = {options.only: SIZES[options.only]}
    good = show("delay", compare(their_delay(checkout), dict(our_delay())))
    for name, settings in sizes.items():
        good &= run(checkout, name, settings, options.steps, options.whisper, options.full)
    print("\nall equal" if good else "\nsome differ: see MISS above")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
