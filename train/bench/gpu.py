"""Ten checks of behaviour that differs on a GPU (`omni-train bench --gpu`), each in its own process with a time limit.

A check yields pairs of a text and True or False, for a result that is right or wrong, or None, for a mere figure. `real`: use
the sizes of real models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from omni.codec.mimi import MimiCodec
from omni.codec.snac import SnacCodec
from omni.config import preset
from omni.edit.deltas import Delta, Edits
from omni.generate.rows import Start
from omni.generate.runner import Runner
from omni.generate.sampling import GREEDY
from omni.generate.speech_lm import SpeechLM
from omni.hardware import peak_flops
from omni.lora.attach import activate, add_adapter, remove_adapter
from omni.lora.config import LoRAConfig
from omni.lora.weights import merge, unmerge
from omni.model.decoder import Hidden
from omni.model.speech_model import SpeechModel
from omni.profiling import seconds_of, timed
from omni.text import Tokenizer
from train.bench.child import commands, repeat
from train.config.parse import read_fit_config
from train.objective.cross_entropy import Heads, HeadTargets, linear_cross_entropy
from train.objective.flops import StepFlops
from train.objective.objective import targets
from train.plan.step import build_workbench, take_step
from train.plan.worst_batch import worst_batch

Lines = Iterator[tuple[str, bool | None]]
HALF = torch.bfloat16


def random_lm(device: torch.device, name: str = "nano", dtype: torch.dtype = torch.float32, **options: Any) -> SpeechLM:
    """A preset with random weights and no codec."""
    torch.manual_seed(0)
    with torch.device(device):
        model = SpeechModel(preset(name)).to(dtype).eval().requires_grad_(False)
    return SpeechLM(model, Tokenizer.bytes(), **options)


def said(lm: SpeechLM, **options: Any) -> list[Any]:
    """Tokens and codes of two turns of a session, and of a batch of four."""
    asked: Any = [(torch.arange(8000).div(7).sin() * 0.3, "A1A2"), ("and then?", "T1A2")]
    with lm.session(max_tokens=12, **options) as session:
        got = [session.answer(question, task) for question, task in asked]
    got += lm.generate_batch([q for q, _ in asked] * 2, [t for _, t in asked] * 2, max_tokens=12, **options)
    return [(a.tokens, None if a.codes is None else a.codes.tolist()) for a in got]


def kernels(device: torch.device, real: bool) -> Lines:
    """Checks which attention is chosen once there is a model: not cuDNN's, which plans every shape again and has given NaN."""
    random_lm(device)
    yield f"{torch.cuda.get_device_name()}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}", None
    for name, *sizes in (("training", 2048, 2048), ("clips", 100, 100), ("prefill", 104, 256), ("step", 1, 1024)):
        q, k = (torch.zeros(2, 14, n, 64, device=device, dtype=HALF) for n in sizes)
        for mask in (torch.ones(sizes, dtype=torch.bool, device=device), None):
            chosen = SDPBackend(torch._fused_sdp_choice(q, k, k, mask, 0.0, mask is None))
            yield f"{name}{'' if mask is None else ', with a mask'}: {chosen.name}", chosen != SDPBackend.CUDNN_ATTENTION


def attention(device: torch.device, real: bool) -> Lines:
    """Times attention, first and later calls by shape, with and without cuDNN, and with a dense mask against none; checks
    gradients where they were NaN."""

    def run(length: int, masked: bool, value: float) -> Tensor:
        mask = torch.ones(2, 1, length, length, dtype=torch.bool, device=device).tril() if masked else None
        q = torch.full((2, 14, length, 64), value, device=device, dtype=HALF).requires_grad_()
        F.scaled_dot_product_attention(q, -q.detach(), q, mask, is_causal=not masked).sum().backward()
        return q.grad if q.grad is not None else q

    for cudnn in (True, False):
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        for length, masked in ((64, True), (192, True), (704, True), (2048, True), (2048, False))[: 5 if real else 2]:
            work = partial(run, length, masked, 1.0)
            first, later, finite = seconds_of(work, device), timed(work, device, 5), run(length, masked, 4.0).isfinite().all()
            text = f"cuDNN {cudnn}, {'mask' if masked else 'causal'}, {length}: {first * 1e3:.1f} ms, then {later * 1e3:.2f}"
            yield f"{text}; finite gradients: {bool(finite)}", None if cudnn else bool(finite) and first < later + 0.05
    if real:
        from torch.nn.attention.varlen import varlen_attn

        x, ends = (
            torch.randn(4096, 14, 64, device=device, dtype=HALF),
            torch.arange(0, 4097, 512, device=device, dtype=torch.int32),
        )
        yield (
            f"packed, 8 x 512: {timed(partial(varlen_attn, x, x, x, ends, ends, 512, 512), device, 5) * 1e3:.2f} ms forward",
            None,
        )


def graphs(device: torch.device, real: bool) -> Lines:
    """Checks that captured steps answer as plain ones do, and do not wait for the device."""
    forward = Runner._forward

    def strict(self: Runner, plan: Any) -> None:
        torch.cuda.set_sync_debug_mode("error")
        forward(self, plan)
        torch.cuda.set_sync_debug_mode("default")

    with patch.object(Runner, "_forward", strict):
        yield (
            "a session and a batch, with the tokens of plain steps",
            said(random_lm(device)) == said(random_lm(device, graph=False)),
        )


def changes(device: torch.device, real: bool) -> Lines:
    """Checks answers after changes between captured steps: edits, adapters, threads and a second GPU."""
    lm, plain = random_lm(device), random_lm(device, graph=False)
    for seed in range(5):
        torch.manual_seed(seed)
        up, low = (torch.randn(3, lm.config.decoder.width, device=device) for _ in "ab")
        edits = Edits({"decoder.blocks.1.attention.q": Delta(up, low, 0.05)})
        yield f"edits of session {seed + 1}", said(lm, edits=edits) == said(plain, edits=edits) != said(plain)
    for each in (lm, plain):
        add_adapter(each.model, LoRAConfig(("decoder.blocks.*",), rank=2), "x")
        for name, p in each.model.to(device).requires_grad_(False).named_parameters():
            p.copy_(torch.arange(p.numel(), device=device).view_as(p).sin() * 0.1 if name.endswith((".a", ".b")) else p)
    order: Any = [(activate, "x"), (activate,), (activate, "x"), (merge,), (unmerge,), (remove_adapter, "x")]
    for change, *names in order:
        change(lm.model, *names), change(plain.model, *names)
        yield f"after {change.__name__} {' '.join(names)}", said(lm) == said(plain)
    wanted = said(plain)
    with ThreadPoolExecutor(4) as pool:
        yield "4 threads, 12 questions", all(got == wanted for got in pool.map(lambda _: said(lm), range(12)))
    for other in range(1, torch.cuda.device_count()):
        yield f"a model on GPU {other}", said(random_lm(torch.device("cuda", other))) == wanted


def steps(device: torch.device, real: bool) -> Lines:
    """Times a decoding step by rows and slots, plain and compiled, beside the time that a copy of the weights' bytes takes."""
    lm = random_lm(device, "qwen2-0.5b-omni" if real else "nano", HALF)
    decoder, table = lm.model.decoder, torch.zeros(1 << (28 if real else 12), device=device)
    read = sum(p.numel() * 2 for p in (*decoder.blocks.parameters(), decoder.text_weight, decoder.audio_head.weight))
    copied = timed(table.clone, device, 3) * read / (table.numel() * 8)
    for compiled, rows, slots in [*product((False, True), (1, 64, 256), (256, 2048))][: None if real else 1]:
        runner = Runner(lm.model, rows, slots, compile=compiled)
        hidden = Hidden(*[torch.randn(rows, 1, lm.config.decoder.width, device=device, dtype=HALF)] * 2)
        runner.begin(range(rows), hidden, [Start(True, True, slots - 60, (GREEDY,) * len(lm.layout))] * rows)
        held, first, taken = torch.cuda.memory_allocated(), seconds_of(runner.step, device), timed(runner.step, device, 20)
        text = f"{rows} rows, {slots} slots{', compiled' * compiled}: {taken * 1e3:.2f} ms, {copied / taken:.2f} of a copy"
        yield f"{text}; first {first * 1e3:.0f} ms, {(torch.cuda.memory_allocated() - held) >> 20} MiB", None


def training(device: torch.device, real: bool) -> Lines:
    """Times steps of mini-omni's last stage on the fullest batches, with and without checkpointing; checks the weights."""
    config, shape = read_fit_config(["mini-omni/stage3"])[0], preset("qwen2-0.5b-omni" if real else "nano")
    bench = build_workbench(config, shape, device)
    for rows, again in ((2, True), (8, False), (16, False))[: None if real else 1]:
        packing = replace(config.data.packing, rows=rows, length=2048 if real else 64)
        batch = worst_batch(replace(config.data, packing=packing), shape).to(device)
        bench.objective.model.set_checkpointing(again)
        taken = timed(partial(take_step, bench, [batch], targets(batch).to(device), 1), device, 3)
        share = StepFlops(bench.objective.model)(batch, targets(batch)) / taken / (peak_flops(device) or float("nan"))
        text = f"{rows} x {packing.length}, checkpointing {again}: {taken * 1e3:.0f} ms, MFU {share:.1%}, weights finite"
        yield f"{text}, {torch.cuda.max_memory_allocated() >> 20} MiB", all(bool(p.isfinite().all()) for p in bench.learning)


def loss(device: torch.device, real: bool) -> Lines:
    """Times the heads' loss by the size of its chunks, and the gradient of features gathered against that of copied ones."""
    size, rows, width = (152000, 8192, 896) if real else (64, 16, 8)
    x, weight = (torch.randn(n, width, device=device, dtype=HALF).mul_(0.1).requires_grad_() for n in (rows, size))
    at, one = torch.arange(rows, device=device), torch.ones(1, device=device)
    for chunk in range(25, 30):
        goals = HeadTargets((0,), [at], [at % size], one, 1 << chunk)
        work = partial(linear_cross_entropy, Heads(x, x, weight, weight[:0]), goals)
        yield f"chunks of 2^{chunk}: {timed(lambda w=work: w()[0].backward(), device, 3) * 1e3:.1f} ms", None  # type: ignore[misc]
    few, index = x[: rows // 4], torch.where(at % 4 == 0, at // 4, 0)
    for name, place in (("gathered", lambda: few[index]), ("copied", lambda: x.detach().index_copy(0, at[::4], few))):
        yield f"features {name}: {timed(lambda p=place: p().sum().backward(), device, 3) * 1e3:.2f} ms", None  # type: ignore[misc]


def codecs(device: torch.device, real: bool) -> Lines:
    """Times SNAC and Mimi (frames a second in a stream and as a whole), and checks TF32 against the CPU."""
    for kind in (SnacCodec, MimiCodec)[: None if real else 1]:
        codec, host, g = kind.random(device=device), kind.random(), torch.Generator().manual_seed(0)
        codes = torch.stack([torch.randint(n, (64 if real else 3,), generator=g) for n in codec.codebook_sizes])
        pushed, wanted = timed(partial(codec.stream().push, codes[:, :1]), device, 9), host.decode(codes)
        whole = timed(partial(codec.decode, codes), device, 2) / codes.shape[1]
        far = float((codec.decode(codes).cpu() - wanted).abs().max() / wanted.abs().max())
        yield f"{codec.name}: {1 / pushed:.0f} frames/s in a stream, {1 / whole:.0f} as a whole, off by {far:.1e}", far < 1e-4


CHECKS: dict[str, tuple[Callable[[torch.device, bool], Lines], float]] = {
    f.__name__: (f, limit)
    for f, limit in ((kernels, 20), (attention, 35), (graphs, 40), (changes, 60), (steps, 80), (training, 70), (loss, 25),
                     (repeat, 70), (codecs, 30), (commands, 50))
}  # fmt: skip
"""The checks by name, each with its limit in seconds: eight minutes together."""
