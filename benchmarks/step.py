"""Measures the training step of a decoder."""

from __future__ import annotations

import torch

from benchmarks.timing import TimingRow
from omni.config import preset
from omni.hardware import peak_flops
from omni.layout import Layout
from omni.model.decoder import Decoder
from omni.profiling import timed
from train.objective.config import ObjectiveConfig
from train.objective.cross_entropy import Heads, HeadTargets, linear_cross_entropy

EXAMPLES = 4
"""Examples in a row of the training step's table."""


def decoder_step(device: torch.device, name: str, rows: int, length: int, compiled: bool, repeat: int = 5) -> list[TimingRow]:
    """Times a whole training step of a preset's decoder and losses on random columns (AdamW, all positions supervised).

    Every row is packed with `EXAMPLES` examples of one length that do not see each other, as training's are.
    """
    config = preset(name)
    layout: Layout = config.layout
    precision = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    with device:  # drawn there: half a billion numbers take a CPU long
        decoder = Decoder(config.decoder, layout)
    run = torch.compile(decoder) if compiled else decoder
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-4, fused=device.type == "cuda")
    tokens = torch.stack([torch.randint(s.size, (rows, length)) for s in layout.streams], dim=1).to(device)
    index = [torch.arange(rows * length, device=device)] * len(layout)
    where = [tokens[:, k].flatten() for k in range(len(layout))]
    scale = torch.full((len(layout),), 1 / (rows * length), device=device)
    cuda = device.type == "cuda"
    chunk, fused = ObjectiveConfig().chunk_on(cuda), compiled and cuda  # as in training
    segments = (torch.arange(length, device=device) * EXAMPLES // length).expand(rows, -1)

    def step() -> None:
        with torch.autocast(device.type, precision, enabled=precision != torch.float32):
            hidden = run(tokens, segments=segments)
            x = hidden.text.flatten(0, 1)
            y = x if hidden.audio is hidden.text else hidden.audio.flatten(0, 1)
            heads = Heads(x, y, decoder.text_weight, decoder.audio_head.weight)
            goals = HeadTargets(decoder.audio_offsets, index, where, scale, chunk, compiled=fused)
            total, _ = linear_cross_entropy(heads, goals)
        total.backward()
        optimizer.step()
        optimizer.zero_grad()

    seconds = timed(step, device, repeat)
    positions = rows * length
    inner = sum(p.numel() for n, p in decoder.named_parameters() if "embedding" not in n)
    if decoder.text_head is None:
        inner += decoder.text_embedding.weight.numel()
    c = config.decoder
    pairs = positions * (length / EXAMPLES) / 2
    flops = 6 * inner * positions + 12 * (c.layers + c.post_layers) * c.heads * c.head_size * pairs
    out = [
        TimingRow("step", seconds * 1e3, "ms"),
        TimingRow("positions", positions / seconds, "/s"),
        TimingRow("stream tokens", positions * len(layout) / seconds, "/s"),
        TimingRow("model FLOP/s", flops / seconds / 1e12, "TFLOP/s"),
    ]
    peak = peak_flops(device)
    return [*out, TimingRow("MFU", flops / seconds / peak * 100, "%")] if peak else out
