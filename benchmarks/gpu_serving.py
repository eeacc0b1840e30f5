"""What serving mini-omni's shape costs on a GPU: steps by rows, SNAC by streams, questions, live sessions.

python -m benchmarks.gpu_serving [CHECK ...] [--out FILE] [--small]
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from benchmarks.report import Figures, run_checks
from infer.bench.bench import TASK, noise
from infer.bench.live import LiveFigures, context_of, play, random_folder
from infer.bench.people import Workload
from infer.bench.random_model import random_codec, random_model, with_encoder_mode
from omni.config import preset
from omni.engine.process import EngineProcess
from omni.generate.options import GREEDY
from omni.generate.question import Asked, encode_questions
from omni.generate.rows import Start
from omni.generate.runner import Runner, pack, prefill
from omni.generate.sampling import Sampling
from omni.model.decoder import Hidden
from omni.model.speech_model import SpeechModel
from omni.tasks import Turn, prompt
from omni.utils.profiling import seconds_of, timed

SAMPLED = Sampling(0.8, 40)
STEPS = (
    (1, 256, GREEDY), (64, 640, GREEDY), (256, 640, GREEDY), (512, 640, GREEDY), (512, 640, SAMPLED), (1024, 640, GREEDY),
    (1024, 2048, GREEDY),
)  # fmt: skip
"""Rows, positions of each, and how ids are chosen."""
WARM_UP, PLAYED = (45.0, 20.0, 20.0), 20.0
"""Seconds of 64, 256 and 512 live sessions before they are measured, while steps are captured at each width, and measured."""


def serving_model(device: torch.device, small: bool) -> SpeechModel:
    """A model of random weights, fused on a GPU, in bf16 unless it is small."""
    config = with_encoder_mode(preset("nano" if small else "qwen2-0.5b-omni"), "variable")
    return random_model(config, device, torch.float32 if small else torch.bfloat16)


def steps(device: torch.device, small: bool) -> Figures:
    """A step of the decoder by rows and positions: its time, the first with its capture, and what reading the ids takes."""
    model = serving_model(device, small)
    dtype = next(model.parameters()).dtype
    for rows, slots, sampling in STEPS[: 2 if small else None]:
        runner = Runner(model, rows, slots)
        hidden = Hidden(*[torch.randn(rows, 1, model.config.decoder.width, device=device, dtype=dtype)] * 2)
        runner.begin(range(rows), hidden, [Start(True, True, slots - 60, (sampling,) * len(model.layout))] * rows)
        first, taken = seconds_of(runner.step, device), timed(runner.step, device, 20)
        read = seconds_of(partial(runner.results, flush=True), device)
        name = f"{rows} x {slots}{', sampled' * (sampling is SAMPLED)}"
        yield name, {"ms": taken * 1e3, "first ms": first * 1e3, "reading ms": read * 1e3}
        del runner


def codec(device: torch.device, small: bool) -> Figures:
    """A frame of sound for some streams at once."""
    coder = random_codec("codec2" if small else "snac", device)
    generator = torch.Generator().manual_seed(0)
    for count in (1, 16, 64, 256, 512)[: 2 if small else None]:
        batch = coder.batch()
        streams = [batch.open() for _ in range(count)]
        frames = torch.stack([torch.randint(size, (count, 1), generator=generator) for size in coder.codebook_sizes], 1)
        for _ in range(6):  # until no stream is young
            batch.push(streams, frames)
        yield f"{coder.name}, {count} streams", {"ms": 1e3 * timed(partial(batch.push, streams, frames), device, 8)}


def questions(device: torch.device, small: bool) -> Figures:
    """Encoder and prefill of questions of 2 s that come together."""
    model, sound = serving_model(device, small), noise(2.0)
    turn = Turn(TASK, features=model.config.features(len(sound)))
    columns = prompt(model.layout, turn)
    for count in (1, 4, 16)[: 2 if small else None]:
        asked = [Asked(turn, sound, model.config.encoder.prepare(sound))] * count
        with torch.inference_mode():
            features = [sound for sound in encode_questions(model, asked) if sound is not None]
            encoded = timed(partial(encode_questions, model, asked), device, 8)
        cache, packed = model.make_cache(count, 640), pack(model.layout, [columns] * count, features)

        def fill(cache: object = cache, packed: object = packed, count: int = count) -> None:
            cache.reset()  # type: ignore[attr-defined]
            prefill(model, cache, range(count), packed)  # type: ignore[arg-type]

        yield f"{count} of {len(columns)} columns", {"encode ms": encoded * 1e3, "prefill ms": timed(fill, device, 8) * 1e3}


def live(device: torch.device, small: bool) -> Figures:
    """Sessions against the clock, once every width of a step has been captured."""
    counts, warm, played = ((4, 8), (3.0, 3.0), 3.0) if small else ((64, 256, 512), WARM_UP, PLAYED)
    name, manner = "nano" if small else "qwen2-0.5b-omni", Workload(noise(2.0), 4.0, 0.1, False)
    context, dtype = context_of(preset(name), manner.question, manner.answer_seconds), "float32" if small else "bfloat16"
    with tempfile.TemporaryDirectory() as folder:
        random_folder(f"{folder}/{name}", preset(name), torch.float32 if small else torch.bfloat16)
        own: Any = {"slots": counts[-1], "context": context, "device": str(device), "dtype": dtype}
        with EngineProcess(f"{folder}/{name}", **own) as engine:
            for number, before in zip(counts, warm, strict=True):
                run = asyncio.run(play(engine, manner, context, number, played, before))
                yield f"{number} sessions", _figures(run)


def _figures(run: LiveFigures) -> dict[str, float]:
    """Numbers of a run, with percentiles by their names."""
    figures = dict[str, float]()
    for name, value in asdict(run).items():
        if isinstance(value, dict):
            figures |= {f"{name} {key}": part for key, part in value.items() if part is not None}
        elif isinstance(value, int | float):
            figures[name] = value
    return figures


CHECKS = {check.__name__: check for check in (steps, codec, questions, live)}

if __name__ == "__main__":
    sys.exit(run_checks(CHECKS, __doc__.partition("\n")[0]))
