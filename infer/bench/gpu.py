"""`omni-infer bench --gpu`: checks what differs on a GPU while a model answers, in eight minutes, up to the first that fails.

A check yields pairs of a text and True or False, for a result that is right or wrong, or None, for a mere figure. `real`: use
the sizes of real models; a rehearsal on a CPU uses small ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from infer.bench.random_model import random_codec, random_lm, random_model
from infer.bench.streaming import first_audio, noise, steps_and_readings
from omni.attention import attention
from omni.config import preset
from omni.edit.deltas import Delta, Edits
from omni.generate.rows import Start
from omni.generate.runner import Runner
from omni.generate.sampling import GREEDY
from omni.generate.speech_lm import SpeechLM
from omni.lora.attach import activate, add_adapter, remove_adapter
from omni.lora.config import LoRAConfig
from omni.lora.weights import merge, unmerge
from omni.model.decoder import Hidden
from omni.profiling import seconds_of, timed
from omni.text import Tokenizer

Lines = Iterator[tuple[str, bool | None]]
HALF = torch.bfloat16
SECONDS = 480.0
"""No check begins, and none goes on after a result, when this time is over."""

BETWEEN_STEPS = ("_forward", "begin", "leave")
"""Methods of a runner in which nothing may wait for the device."""


def small_lm(device: torch.device, **options: Any) -> SpeechLM:
    """Nano with random weights in fp32, which are always the same, and no codec."""
    return SpeechLM(random_model(preset("nano"), device, torch.float32), Tokenizer.bytes(), **options)


def said(lm: SpeechLM, **options: Any) -> list[Any]:
    """Tokens and codes of two turns of a session, and of a batch of four."""
    asked: list[tuple[Any, str]] = [(noise(0.5), "A1A2"), ("and then?", "T1A2")]
    with lm.session(max_tokens=12, max_seconds=0.5, **options) as session:
        got = [session.ask(question, task).answer() for question, task in asked]
    got += lm.generate([q for q, _ in asked] * 2, [t for _, t in asked] * 2, max_tokens=12, max_seconds=0.5, **options)
    return [(a.tokens, None if a.codes is None else a.codes.tolist()) for a in got]


def kernels(device: torch.device, real: bool, dtype: torch.dtype = HALF) -> Lines:
    """Checks which attention is chosen once there is a model: not cuDNN's."""
    small_lm(device)
    yield f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}", None
    for name, *sizes in (("clips", 100, 100), ("prefill", 104, 256), ("step", 1, 1024)):
        q, k = (torch.zeros(2, 14, n, 64, device=device, dtype=dtype) for n in sizes)
        for mask in (torch.ones(sizes, dtype=torch.bool, device=device), None):
            chosen = SDPBackend(torch._fused_sdp_choice(q, k, k, mask, 0.0, False))
            yield f"{name}{'' if mask is None else ', with a mask'}: {chosen.name}", chosen != SDPBackend.CUDNN_ATTENTION


def shapes(device: torch.device, real: bool, dtype: torch.dtype = HALF) -> Lines:
    """Checks that attention of a new length costs no plan, and is right where cuDNN's was not a number.

    The first two load the kernels of even and of odd lengths.
    """
    for number, length in enumerate((64, 65, 192, 703, 704, 705) if real else (64,)):
        q = torch.full((2, 14, length, 64), 4.0, device=device, dtype=dtype)
        mask = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        work = partial(attention, q, -q, q, mask)
        first, later, out = seconds_of(work, device), timed(work, device, 5), work()
        right = bool(((out - 4).abs() < 0.1).all())
        yield f"{length}: {first * 1e3:.1f} ms, then {later * 1e3:.2f}", right and (number < 2 or first < later + 0.02)


def without_waits(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method with an error for whatever in it waits for the device."""

    @wraps(method)
    def strict(*args: Any, **values: Any) -> Any:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return method(*args, **values)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    return strict


def graphs(device: torch.device, real: bool, dtype: torch.dtype = HALF) -> Lines:
    """Checks that captured steps answer as plain ones do, and that nothing waits for the device between steps."""
    with ExitStack() as stack:
        for name in BETWEEN_STEPS:
            stack.enter_context(patch.object(Runner, name, without_waits(getattr(Runner, name))))
        for options in ({}, {"temperature": 0.8, "top_k": 40, "repetition_penalty": 1.1, "seed": 3}):
            got, wanted = (said_with(small_lm(device, graph=graph), options) for graph in (None, False))
            yield f"a session and a batch {options or 'greedy'}, with the tokens of plain steps", got == wanted


def said_with(lm: SpeechLM, options: dict[str, Any]) -> list[Any]:
    return said(lm, **options)


def changes(device: torch.device, real: bool, dtype: torch.dtype = HALF) -> Lines:
    """Checks answers after changes between captured steps: edits, adapters, threads and a second GPU."""
    lm, plain = small_lm(device), small_lm(device, graph=False)
    g, width = torch.Generator().manual_seed(0), lm.config.decoder.width
    for number in range(5):
        up, low = (torch.randn(3, width, generator=g).to(device) for _ in "ab")
        edits = Edits({"decoder.blocks.1.attention.out": Delta(up, low, 0.5)})
        yield f"edits of session {number + 1}", said(lm, edits=edits) == said(plain, edits=edits)
    for each in (lm, plain):
        add_adapter(each.model, LoRAConfig(("decoder.blocks.*",), rank=2), "x")
        with torch.no_grad():
            for name, p in each.model.requires_grad_(False).named_parameters():
                if ".lora." in name:
                    p.copy_(torch.arange(p.numel(), device=device).view_as(p).sin() * 0.1)
    order: Any = [(activate,), (activate, "x"), (merge,), (unmerge,), (remove_adapter, "x")]
    for change, *names in order:
        for each in (lm, plain):
            change(each.model, *names)
        yield f"after {change.__name__} {' '.join(names)}", said(lm) == said(plain)
    wanted = said(plain)
    with ThreadPoolExecutor(4) as pool:
        yield "4 threads, 12 questions", all(got == wanted for got in pool.map(lambda _: said(lm), range(12 if real else 4)))
    for other in range(1, torch.cuda.device_count()):
        yield f"a model on GPU {other}", said(small_lm(torch.device("cuda", other))) == wanted


def steps(device: torch.device, real: bool, dtype: torch.dtype = HALF) -> Lines:
    """Times a step by rows and slots, plain and compiled."""
    model = random_model(preset("qwen2-0.5b-omni" if real else "nano"), device, dtype)
    for rows, slots in ((1, 256), (1, 2048), (64, 256), (64, 2048), (256, 2048)) if real else ((2, 256),):
        for compiled in (False, True) if real else (False,):
            runner = Runner(model, rows, slots, compile=compiled)
            hidden: Any = Hidden(*[torch.randn(rows, 1, model.config.decoder.width, device=device, dtype=dtype)] * 2)
            runner.begin(range(rows), hidden, [Start(True, True, slots - 60, (GREEDY,) * len(model.layout))] * rows)
            first, taken = seconds_of(runner.step, device), timed(runner.step, device, 20)
            text = f"{rows} rows, {slots} slots{', compiled' * compiled}: {taken * 1e3:.2f} ms, the first {first * 1e3:.0f}"
            yield text, None
            del runner


def codecs(device: torch.device, real: bool, dtype: torch.dtype = HALF) -> Lines:
    """Times SNAC and Mimi in a stream and as a whole, and compares their sound with the CPU's."""
    for name in ("snac", "mimi") if real else ("codec2",):
        codec, host = random_codec(name, device), random_codec(name, torch.device("cpu"))
        g = torch.Generator().manual_seed(0)
        codes = torch.stack([torch.randint(n, (64 if real else 3,), generator=g) for n in codec.codebook_sizes])
        wanted, frames = host.decode(codes), codes.shape[1]
        pushed, whole = (timed(partial(work, one), device, 2) for work, one in ((_stream, codec), (_whole(codes), codec)))
        far = float((codec.decode(codes).cpu() - wanted).abs().max() / wanted.abs().max())
        found = f"{1 / pushed:.0f} frames/s in a stream, {frames / whole:.0f} as a whole, off by {far:.1e}"
        yield f"{name}: {found}", far < 1e-4 if codec.deterministic else None


def _whole(codes: Tensor) -> Callable[[Any], Tensor]:
    return lambda codec: codec.decode(codes)


def _stream(codec: Any) -> Tensor:
    return codec.stream().push(torch.zeros(len(codec.codebook_sizes), 1, dtype=torch.long))


def answers(device: torch.device, real: bool, dtype: torch.dtype = HALF) -> Lines:
    """Measures first audio and steps against readings of the weights at mini-omni's size."""
    lm = random_lm(preset("qwen2-0.5b-omni" if real else "nano"), device, dtype if real else torch.float32, compile=real)
    first = first_audio(lm, noise(2.0 if real else 0.5), False, 2)
    yield f"first exact sample after {first.total * 1e3:.0f} ms, of which codec {first.codec * 1e3:.0f}", None
    found = steps_and_readings(lm, noise(0.5), False, real, 3, 50 if real else 2)
    yield f"a step takes {found.seconds * 1e3:.2f} ms; steps / readings {found.ratio:.2f}", None


CHECKS: dict[str, Callable[[torch.device, bool, torch.dtype], Lines]] = {
    check.__name__: check for check in (kernels, shapes, graphs, changes, steps, codecs, answers)
}
"""The checks by name, in the order in which a failure tells most."""


def check_gpu(
    device: torch.device, real: bool = True, show: Callable[[str], None] = print, dtype: torch.dtype | None = None
) -> bool:
    """Run the checks up to the first that fails; returns whether none did. An error fails a check.

    Args:
        dtype: of what is timed, bfloat16 by default; tokens are compared in float32.
    """
    start = time.monotonic()
    for name, check in CHECKS.items():
        try:
            for text, right in check(device, real, dtype or HALF):
                show(f"{name}: {text}{'' if right is None else ': right' if right else ': WRONG'}")
                if right is False:
                    return False
                if time.monotonic() - start > SECONDS:
                    show(f"{name}: {SECONDS:.0f} s are over; the rest was not run")
                    return True
        except Exception as error:
            show(f"{name}: WRONG: {type(error).__name__}: {error}")
            return False
    return True
