"""`omni-infer bench --sessions`: live sessions against the clock, for several numbers of them.

This process is the load (`infer.bench.people`); the engine has its own, so that each one's CPU time can be told from the
other's, which is compared to a bare runner's and codec's with as many rows. What listeners note includes the way to them.
"""

from __future__ import annotations

import asyncio
import gc
import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from infer.bench.figures import LiveFigures, LiveTable
from infer.bench.measure import TASK
from infer.bench.people import LiveLoad, Manner, PlayedAudio
from infer.bench.random_model import bench_dtype, random_model, with_encoder_mode
from infer.device import cpu_threads, is_small
from infer.options import BenchOptions
from omni import plugins
from omni.checkpoint.folder import read_config, save_folder
from omni.checkpoint.places import CODEC
from omni.codec.registry import CODECS
from omni.config import ModelConfig, preset
from omni.cpu.kernels import machine, measure_kernels
from omni.engine.process import EngineProcess
from omni.engine.stats import Percentiles, powers_to
from omni.errors import UserError
from omni.model.int8_model import to_int8
from omni.model.speech_model import SpeechModel
from omni.pretrained import find_model
from omni.stores.reading import local_path
from omni.tasks import Turn, prompt
from omni.text import Tokenizer
from omni.utils.process import say
from omni.utils.profiling import GIB


def live_table(options: BenchOptions, device: torch.device, name: str | None, sound: Tensor) -> LiveTable:
    """Plays all numbers of sessions with a preset of random weights or the options' folder; UserError where they do not fit."""
    numbers = sorted({int(word) for word in (options.sessions or "").split(",")})  # which have been checked
    config = folder_config(options) if name is None else preset(name)
    context = context_of(config, sound, options.answer_seconds)
    _check_memory(config, numbers[-1], context, device, options)
    manner = Manner(sound, options.answer_seconds, options.barge_in, options.nonstop)
    runs: list[LiveFigures] = []
    with _started(options, device, name, numbers[-1], context) as (engine, title):
        for number in numbers:
            say(f"playing {number} sessions for {manner.cycle + options.play_seconds:.0f} s")
            runs.append(asyncio.run(play(engine, manner, context, number, options.play_seconds)))
        return LiveTable(title, 1 / engine.frame_rate, runs)


async def play(
    engine: EngineProcess, manner: Manner, context: int, number: int, seconds: float, warm_up: float | None = None
) -> LiveFigures:  # fmt: skip
    """Plays a number of sessions, and measures for some seconds once all have come: after `warm_up`, a cycle by default."""
    process = psutil.Process(engine.pid)
    bare, load, sampled = engine.call("engine.measure", powers_to(number)), LiveLoad(engine, manner, context, number), []
    try:
        load.invite(number)
        await load.wait(manner.cycle if warm_up is None else warm_up)
        await load.call(engine.call, "engine.clear_stats")
        heard = load.heard = PlayedAudio()
        start, theirs, own, here = time.perf_counter(), sum(process.cpu_times()[:2]), time.process_time(), engine.decoding
        while (passed := time.perf_counter() - start) < seconds:
            await load.wait(min(1.0, seconds / 8, seconds - passed))
            sampled.append(await load.call(engine.call, "engine.stats"))
        passed, here = time.perf_counter() - start, engine.decoding - here  # the engine's work, wherever it is done
        theirs, own = sum(process.cpu_times()[:2]) - theirs + here, time.process_time() - own - here
        load.heard = None
    finally:
        await load.close()
    stats = sampled[-1]
    active, steps = sum(one.active for one in sampled) / len(sampled), stats.steps * stats.rows  # of rows
    alone = bare.cpu(max(active, 1.0)) / max(active, 1.0)
    return LiveFigures(
        loop="nonstop" if manner.nonstop else "closed",
        sessions=number,
        seconds=passed,
        **vars(heard) | {kind: Percentiles.of(getattr(heard, kind)) for kind in ("lateness", "first_audio")},
        step=stats.step,
        active=active,
        rows=stats.rows,
        written=steps / passed,
        engine_cpu=theirs / passed,
        generator_cpu=own / passed,
        overhead=theirs / steps / alone if steps and alone else None,
        waiting=sum(one.waiting for one in sampled) / len(sampled),
    )


def context_of(config: ModelConfig, sound: Tensor, answer_seconds: float) -> int:
    """Positions of a conversation of four turns before it forgets; UserError where the model's do not hold one."""
    question = len(prompt(config.layout, Turn(TASK, features=config.features(len(sound)))))
    answer = math.ceil(answer_seconds * CODECS.find(config.codec).frame_rate) + config.layout.max_delay + 1
    if question + answer > config.decoder.context:
        raise UserError(
            f"a question of {question} positions and an answer of {answer} do not fit the model's context of "
            f"{config.decoder.context}; lower --answer_seconds or --seconds"
        )
    return min(config.decoder.context, 4 * (question + answer))


def folder_config(options: BenchOptions) -> ModelConfig:
    """A model folder's configuration; UserError where nobody can hear its answers."""
    folder = local_path(find_model(options.model or ""))
    config = read_config(folder)
    if CODECS.find(config.codec).weights and options.codec_folder is None and not (folder / CODEC).is_dir():
        raise UserError(f"{folder} has no weights of the codec {config.codec!r}; name their folder with --codec_folder")
    return config


def _check_memory(config: ModelConfig, slots: int, context: int, device: torch.device, options: BenchOptions) -> None:
    """UserError where the cache of all sessions takes more memory than is free."""
    c, width = config.decoder, bench_dtype(options.dtype, device).itemsize
    wanted = 2 * (c.layers + c.post_layers) * slots * context * c.kv_heads * c.head_size * width
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    if wanted > free:
        raise UserError(
            f"--sessions {options.sessions}: the cache of {slots} rows of {context} positions takes {wanted / GIB:.1f} GiB, "
            f"and {free / GIB:.1f} GiB are free; play fewer, or lower --answer_seconds"
        )


@contextmanager
def _started(
    options: BenchOptions, device: torch.device, name: str | None, slots: int, context: int
) -> Iterator[tuple[EngineProcess, str]]:
    """The engine of a preset with random weights, whose products are measured first, or of the options' folder; and a title."""
    with ExitStack() as stack:
        folder, dtype = options.model or "", options.dtype
        if name is not None:
            folder = str(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="omni-bench-"))) / name)
            model = random_folder(folder, preset(name), kind := bench_dtype(dtype, device))
            dtype = str(kind).removeprefix("torch.")
            if options.kernels == "measured" and device.type == "cpu":
                with cpu_threads(options.threads, model):
                    measure_kernels(to_int8(model) if options.quantize else model)
            del model
        threads = options.threads or (1 if device.type == "cpu" and is_small(folder) else torch.get_num_threads())
        own: Any = {key: getattr(options, key) for key in ("quantize", "kernels", "codec_folder")}
        own |= {"device": str(device), "dtype": dtype, "compile": device.type == "cuda" and name is not None}
        engine = stack.enter_context(EngineProcess(folder, slots=slots, context=context, threads=threads, **own))
        of = f"{threads} thread{'s' * (threads > 1)}"
        gc.collect()
        stack.callback(gc.unfreeze)
        gc.freeze()  # else what is imported is looked through while chunks wait to be noted
        yield engine, f"live sessions: {name or folder} ({engine.facts.shown}, {of}), {machine()['processor']}"


def random_folder(folder: str, config: ModelConfig, dtype: torch.dtype) -> SpeechModel:
    """Writes a model folder of random weights, whose codec has some too; returns the model."""
    config = with_encoder_mode(config, "variable")
    if CODECS.find(config.codec).weights:
        plugins.load_plugins(["infer.bench.random_codecs"], "plugins")  # loaded in the engine's process as well
        config = replace(config, codec=f"random-{config.codec}")
    model = random_model(config, torch.device("cpu"), dtype)
    save_folder(folder, config, model.state_dict(), Tokenizer.bytes())
    return model
