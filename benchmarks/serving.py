"""The engine beside other ways of answering, in one run: bare loops, encoders, text assist, questions heard while they come.

python -m benchmarks.serving [CHECK ...] [--preset PRESET] [--quantize int8] [--dtype bfloat16] [--out FILE] [--small]
python -m benchmarks.serving people [--sessions 64,96] [--seconds 60] [--answer_seconds 4] [--nonstop yes]

Random weights. `people` plays live sessions, and as many people whom a bare loop of PyTorch's kernels answers (on a CPU).
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.bare import BareLoop, answer
from benchmarks.people import BarePeople
from benchmarks.report import Figures, in_ms, run_checks
from infer.bench.bench import TASK, first_audio, first_sound, noise, steps_and_readings, whole_answer
from infer.bench.live import context_of, play, random_folder
from infer.bench.people import PlayedAudio, Workload
from infer.bench.random_model import preset_lm
from infer.loading import cpu_threads
from omni.audio.io import SAMPLE_RATE
from omni.config import preset as named
from omni.cpu import is_int8, use_fast
from omni.encoder.whisper_config import EncoderMode
from omni.engine.process import EngineProcess
from omni.engine.stats import Percentiles
from omni.generate.speech_lm import SpeechLM
from omni.utils.profiling import seconds_of

PIECE = 0.02
"""Seconds of a piece of a question, which comes when it would be spoken."""


@contextmanager
def model(device: torch.device, name: str, quantize: str, dtype: str, mode: EncoderMode = "variable") -> Iterator[SpeechLM]:
    """A model of random weights with the forms of products that are fastest here, and as many threads as suit it."""
    lm = preset_lm(name, device, dtype or None, quantize, mode)
    try:
        with cpu_threads(None, lm.model):
            if device.type == "cpu":
                use_fast(lm.model)
            yield lm
    finally:
        lm.engine.close()


def bare(device: torch.device, small: bool, preset: str, quantize: str, dtype: str) -> Figures:
    """First sound, real-time factor and step of the engine, and of bare loops that answer the same question (on a CPU)."""
    seconds, repeat = (0.3, 1) if small else (4.0, 3)
    sound, assist = noise(0.3 if small else 2.0), preset != "nano"
    with model(device, preset, quantize, dtype) as lm:
        assert lm.codec is not None
        frames, rows = round(seconds * lm.codec.frame_rate), 2 if assist else 1
        first, whole = first_audio(lm, sound, assist, repeat).total, whole_answer(lm, sound, assist, seconds, repeat)
        step, reading, *_ = steps_and_readings(lm, rows, device.type == "cuda", 3)
        factor = whole.real_time_factor or float("nan")
        yield (
            "engine",
            {"first s": first, "real-time factor": factor, "step ms": step * 1e3, "steps / readings": reading / step},
        )
        lm.engine.close()  # whose threads would slow the loops
        fbgemm = [True] * (is_int8(lm.model) and "fbgemm" in torch.backends.quantized.supported_engines)
        for other in [False, *fbgemm] if device.type == "cpu" else []:
            loop = BareLoop(lm, sound, rows, 512 if small else 1024, other)
            firsts, factors = zip(*[answer(loop, frames) for _ in range(repeat + 1)][1:], strict=True)
            with torch.inference_mode():
                at = [256] * rows
                taken = statistics.median(seconds_of(partial(loop.step, at), device) for _ in range(20))
            own = {"first s": statistics.median(firsts), "real-time factor": statistics.median(factors), "step ms": taken * 1e3}
            shares = {"first, loop / engine": own["first s"] / first, "step, loop / engine": taken / step}
            yield "a loop by fbgemm" if other else "a bare loop", own | shares


def ways(device: torch.device, small: bool, preset: str, quantize: str, dtype: str) -> Figures:
    """Answers with the padded encoder (where sizes are released ones), with and without text assist; two rows over one."""
    seconds, repeat = (0.3, 1) if small else (4.0, 3)
    sound = noise(0.3 if small else 2.0)
    modes: tuple[EncoderMode, ...] = ("variable", *["padded"] * (preset != "nano"))  # type: ignore[arg-type]
    for mode in modes:
        with model(device, preset, quantize, dtype, mode) as lm:
            for assist in (False, True):
                first, whole = first_audio(lm, sound, assist, repeat), whole_answer(lm, sound, assist, seconds, repeat)
                name = f"{mode} encoder, {'text assist' if assist else 'one row'}"
                factor = whole.real_time_factor or float("nan")
                yield name, {"first s": first.total, "encoder s": first.encode, "real-time factor": factor}
            if mode == "variable":
                single, double = (steps_and_readings(lm, rows, device.type == "cuda", 3)[0] for rows in (1, 2))
                yield "step", {"one row ms": single * 1e3, "two rows ms": double * 1e3, "two / one": double / single}


# --- questions that are heard while they come -------------------------------------------------------------------------


def listening(device: torch.device, small: bool, preset: str, quantize: str, dtype: str) -> Figures:
    """First sound after questions of 1, 4 and 16 s, heard while they came and given whole; what hearing takes of real time."""
    firsts = []
    with model(device, preset, quantize, dtype, "chunked") as lm:
        for seconds in (0.2, 0.6) if small else (1.0, 4.0, 16.0):
            sound = noise(seconds)
            heard = [_heard(lm, sound) for _ in range(2 if small else 4)][1:]
            first, hearing, busy = (statistics.median(values) for values in zip(*heard, strict=True))
            whole = statistics.median([_whole(lm, sound) for _ in range(2 if small else 4)][1:])
            firsts.append(first)
            shares = {"hearing, share of real time": hearing, "the same of processors": busy}
            yield f"question of {seconds:g} s", {"heard s": first, "whole s": whole, **shares}
    yield "longest / shortest question", {"heard": firsts[-1] / firsts[0]}


def _heard(lm: SpeechLM, sound: Tensor) -> tuple[float, float, float]:
    """Seconds to the first sound; those that hearing a second took of the engine, and of processors, while it came."""
    with lm.session() as session:
        coming, before = session.listen(TASK, sample_rate=SAMPLE_RATE), lm.engine.stats().hearing
        start, busy = time.perf_counter(), time.process_time()
        for number, piece in enumerate(sound.split(round(PIECE * SAMPLE_RATE)), 1):
            time.sleep(max(0.0, start + number * PIECE - time.perf_counter()))
            coming.push(piece)
        busy, hearing, length = time.process_time() - busy, lm.engine.stats().hearing - before, len(sound) / SAMPLE_RATE
        return first_sound(session, coming)[0], hearing / length, busy / length


def _whole(lm: SpeechLM, sound: Tensor) -> float:
    with lm.session() as session:
        return first_sound(session, sound)[0]


# --- live sessions ----------------------------------------------------------------------------------------------------


def people(
    device: torch.device, small: bool, preset: str, sessions: str, seconds: str, answer_seconds: str, nonstop: str
) -> Figures:
    """Live sessions, and as many people whom the bare loop answers, one after the other; CPU for a row's column of both."""
    config, played = named(preset), 1.0 if small else float(seconds)
    manner = Workload(
        noise(0.3 if small else 2.0), 0.4 if small else float(answer_seconds), 0.0 if nonstop else 0.1, bool(nonstop)
    )
    context = context_of(config, manner.question, manner.answer_seconds)
    counts = [2] if small else [int(word) for word in sessions.split(",")]
    with tempfile.TemporaryDirectory() as temporary:
        folder = str(Path(temporary) / preset)
        random_folder(folder, config, torch.float32)
        reference = SpeechLM.from_pretrained(folder, kernels="reference")
        with cpu_threads(None, reference.model) as threads, EngineProcess(
            folder, slots=max(counts), context=context, threads=threads, device="cpu"
        ) as engine:  # fmt: skip
            for number in counts:
                run = asyncio.run(play(engine, manner, context, number, played))
                own = run.engine_cpu / run.written if run.written else float("nan")
                yield f"{number} sessions, engine", _times(run.lateness, run.first_audio, run.underruns, own)
                loop = BarePeople(reference, manner, number, context, seed=number)
                loop.play(manner.cycle)
                loop.heard, cpu, written = PlayedAudio(), time.process_time(), loop.written
                loop.play(played)
                cost = (time.process_time() - cpu) / max(loop.written - written, 1)
                late, first = (Percentiles.of(values) for values in (loop.heard.lateness, loop.heard.first_audio))
                figures = _times(late, first, loop.heard.underruns, cost)
                yield f"{number} sessions, a bare loop", figures | {"CPU, engine / loop": own / cost}


def _times(late: Percentiles, first: Percentiles, underruns: int, cost: float) -> dict[str, float]:
    """Milliseconds by their names, and CPU milliseconds for a row's column."""
    return {**in_ms("late", late), **in_ms("first audio", first), "underruns": underruns, "CPU ms": cost * 1e3}


CHECKS = {check.__name__: check for check in (bare, ways, listening, people)}
OPTIONS = {"preset": "nano", "quantize": "", "dtype": ""}
OPTIONS |= {"sessions": "64,96,128", "seconds": "60", "answer_seconds": "4", "nonstop": ""}

if __name__ == "__main__":
    sys.exit(run_checks(CHECKS, __doc__.partition("\n")[0], **OPTIONS))
