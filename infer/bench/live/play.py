"""`omni-infer bench --sessions`: live sessions against the clock, for several numbers of them.

This process is the load generator (`infer.bench.live.people`); the engine has a process of its own (`omni.engine.process`), so
that each one's CPU time can be told from the other's. What a listener notes includes the way through the pipe. Before each
number of sessions the engine measures a bare runner and codec with as many rows, to which its CPU time is compared.
"""

from __future__ import annotations

import copy
import gc
import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch
from torch import Tensor

from infer.bench.live.bare_people import BarePeople
from infer.bench.live.figures import BareFigures, LiveFigures, LiveTable, Loop, counted, percentiles
from infer.bench.live.manner import Heard, Manner
from infer.bench.live.people import LiveLoad
from infer.bench.random_model import RANDOM, random_model, with_encoder_mode
from infer.device import SMALL_MODEL, bytes_of, cpu_threads
from infer.options import BenchOptions
from infer.progress import WorkBar
from omni import plugins
from omni.checkpoint.folder import read_config, save_folder
from omni.checkpoint.places import CODEC, WEIGHTS
from omni.codec.registry import CODECS
from omni.config import ModelConfig
from omni.engine.measure import StepCosts, powers_to
from omni.engine.process import EngineProcess
from omni.engine.stats import EngineStats
from omni.errors import UserError
from omni.generate.speech_lm import SpeechLM
from omni.hardware import find_dtype
from omni.kernels import machine, measure_kernels
from omni.model.int8_model import is_int8, to_int8
from omni.profiling import GIB
from omni.stores.reading import local_path
from omni.tasks import TASKS, Turn, prompt
from omni.text import Tokenizer

TASK = TASKS["A1A2"]

RANDOM_CODECS = "infer.bench.live.random_codecs"
"""Plugin for this process and the engine's, which loads what is loaded here."""

TURNS = 4
"""Questions with their answers that a conversation holds before it forgets."""


def parse_numbers(given: str) -> tuple[int, ...]:
    """The numbers of `--sessions`, each once, from the lowest; they have been checked."""
    return tuple(sorted({int(word) for word in given.split(",")}))


@dataclass(frozen=True)
class _Subject:
    """A model to play with: its folder, what an `EngineProcess` is told besides, and its name for titles."""

    name: str
    folder: str
    config: ModelConfig
    threads: int
    dtype: str | None


def live_table(options: BenchOptions, device: torch.device, preset: tuple[str, ModelConfig] | None, sound: Tensor) -> LiveTable:
    """Play all numbers of sessions with a preset of random weights, or with the model folder of the options.

    Raises:
        UserError: they do not fit, or the model does not speak.
    """
    numbers = parse_numbers(options.sessions or "")
    if preset is None:
        assert options.model is not None
        config, folder = read_config(options.model), local_path(options.model)
        if CODECS.find(config.codec).weights and options.codec_folder is None and not (folder / CODEC).is_dir():
            raise UserError(
                f"{folder} has no weights of the codec {config.codec!r}, so nobody can hear its answers; name their folder "
                "with --codec_folder"
            )
    else:
        config = preset[1]
    slots = numbers[-1] * (1 if options.rate is None else 2)
    context = _context(config, sound, options.answer_seconds)
    _check_memory(config, slots, context, device, options)
    with ExitStack() as stack:
        if preset is None:
            subject = _folder(options, config, device)
        else:
            subject = stack.enter_context(_random_folder(options, *preset, device))
        lm = _bare_model(options, subject, device) if options.bare else None
        engine = stack.enter_context(_engine(options, subject, device, slots, context))
        what = repr(engine).partition("SpeechLM(")[2].rpartition("), process")[0]
        of = f"{subject.threads} thread{'s' * (subject.threads > 1)}"
        title = f"live sessions: {subject.name} ({what}, {of}), {machine()['processor']}"
        manner = Manner(sound, options.answer_seconds, options.barge_in, options.nonstop)
        loops: list[Loop] = ["nonstop" if options.nonstop else "closed"]
        loops += ["open"] if options.rate is not None else []
        each = (manner.cycle + options.play_seconds) * (2 if lm is not None else 1)
        bar = stack.enter_context(WorkBar(f"{subject.name}, live", unit="s"))
        runs: list[LiveFigures] = []
        gc.collect()
        stack.callback(gc.unfreeze)
        gc.freeze()  # else what is imported is looked through while chunks wait to be noted
        for loop in loops:
            for number in numbers:
                progress = _Progress(bar, each * len(runs), each * len(loops) * len(numbers), f"{number} {loop}")
                rate = None if loop != "open" or options.rate is None else options.rate * number
                found = _play(engine, manner, context, number, loop, rate, options.play_seconds, progress)
                if lm is not None and loop != "open":
                    found = replace(found, bare=_play_bare(lm, subject, manner, context, number, options, progress))
                runs.append(found)
        return LiveTable(title, 1 / engine.frame_rate, runs)


@dataclass
class _Progress:
    bar: WorkBar
    before: float
    total: float
    note: str

    def tell(self, spent: float) -> None:
        self.bar(self.before + spent, self.total, self.note)

    def wait(self, load: LiveLoad, seconds: float, spent: float) -> None:
        """Wait, `spent` seconds after this number of sessions was begun; raises what went wrong in the load meanwhile."""
        end = time.perf_counter() + seconds
        while (left := end - time.perf_counter()) > 0:
            self.bar(self.before + spent + seconds - left, self.total, self.note)
            time.sleep(min(left, 0.25))
            if load.failure is not None:
                raise load.failure


def _play(
    engine: EngineProcess,
    manner: Manner,
    context: int,
    number: int,
    loop: Loop,
    rate: float | None,
    seconds: float,
    progress: _Progress,
) -> LiveFigures:
    """Play a number of sessions, or callers at a rate, and measure once all have come."""
    bare: StepCosts = engine.call("engine.measure", powers_to(number))
    process, sampled = psutil.Process(engine.pid), list[EngineStats]()
    every = min(1.0, seconds / 8)
    with LiveLoad(engine, manner, context, seed=number) as load:
        if rate is None:
            load.invite(number)
        else:
            load.expect(rate)
        progress.wait(load, manner.cycle, 0.0)
        engine.call("engine.clear_stats")
        heard = load.heard = Heard()
        start, theirs, own, here = time.perf_counter(), _cpu(process), time.process_time(), engine.decoding
        while (passed := time.perf_counter() - start) < seconds:
            progress.wait(load, min(every, seconds - passed), manner.cycle + passed)
            sampled.append(engine.call("engine.stats"))
        passed = time.perf_counter() - start
        here = engine.decoding - here  # the engine's work, wherever it is done
        theirs, own = _cpu(process) - theirs + here, time.process_time() - own - here
        load.heard = None
    if load.failure is not None:
        raise load.failure
    stats, active = sampled[-1], sum(one.active for one in sampled) / len(sampled)
    steps = stats.steps * stats.rows  # of rows
    alone = bare.cpu(max(active, 1.0)) / max(active, 1.0)
    return LiveFigures(
        loop=loop,
        sessions=number,
        seconds=passed,
        **counted(heard),
        lateness_in_engine=stats.lateness,
        underruns_in_engine=stats.underruns,
        step=stats.step,
        active=active,
        rows=stats.rows,
        written=steps / passed,
        engine_cpu=theirs / passed,
        generator_cpu=own / passed,
        cost=theirs / passed / number,
        overhead=theirs / steps / alone if steps and alone else None,
        waiting=sum(one.waiting for one in sampled) / len(sampled),
    )


def _bare_model(options: BenchOptions, subject: _Subject, device: torch.device) -> SpeechLM:
    """The model with PyTorch's own kernels; UserError where the bare loop cannot play with it."""
    if device.type != "cpu":
        raise UserError(f"--bare plays on a CPU, and the device is {device}; give --device cpu, or leave --bare out")
    lm = SpeechLM.from_pretrained(subject.folder, dtype=subject.dtype, kernels="reference", codec_folder=options.codec_folder)
    if is_int8(lm.model):
        raise UserError(f"--bare plays in full precision, and {subject.folder} is in int8; leave it out")
    return lm


def _play_bare(
    lm: SpeechLM,
    subject: _Subject,
    manner: Manner,
    context: int,
    number: int,
    options: BenchOptions,
    progress: _Progress,
) -> BareFigures:
    """Let a bare loop answer as many people for as long."""
    before, begun = torch.get_num_threads(), manner.cycle + options.play_seconds
    torch.set_num_threads(subject.threads)
    try:
        people = BarePeople(lm, manner, number, context, seed=number)
        people.play(manner.cycle, lambda passed: progress.tell(begun + passed))
        heard, cpu, start, written = Heard(), time.process_time(), time.perf_counter(), people.written
        people.heard = heard
        active = people.play(options.play_seconds, lambda passed: progress.tell(begun + manner.cycle + passed))
        passed = time.perf_counter() - start
        cpu, rate = (time.process_time() - cpu) / passed, (people.written - written) / passed
    finally:
        torch.set_num_threads(before)
    return BareFigures(percentiles(heard.lateness), heard.underruns, percentiles(heard.first_audio), active, cpu, rate)


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


# --- the model ------------------------------------------------------------------------------------------------------


def _context(config: ModelConfig, sound: Tensor, answer_seconds: float) -> int:
    """Positions of a conversation of some turns; UserError where the model's do not hold one."""
    question = len(prompt(config.layout, Turn(TASK, features=config.features(len(sound)))))
    answer = math.ceil(answer_seconds * CODECS.find(config.codec).frame_rate) + config.layout.max_delay + 1
    if question + answer > config.decoder.context:
        raise UserError(
            f"a question of {question} positions and an answer of {answer} do not fit the model's context of "
            f"{config.decoder.context}; lower --answer_seconds or --seconds"
        )
    return min(config.decoder.context, TURNS * (question + answer))


def _check_memory(config: ModelConfig, slots: int, context: int, device: torch.device, options: BenchOptions) -> None:
    """UserError where the cache of all sessions takes more memory than is free."""
    c = config.decoder
    numbers = find_dtype(options.dtype)
    width = 2 if numbers not in (None, torch.float32) or (numbers is None and device.type == "cuda") else 4
    wanted = 2 * (c.layers + c.post_layers) * slots * context * c.kv_heads * c.head_size * width
    wanted *= 2 if options.bare else 1
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    if wanted > free:
        raise UserError(
            f"--sessions {options.sessions}: the cache of {slots} rows of {context} positions takes {wanted / GIB:.1f} GiB, "
            f"and {free / GIB:.1f} GiB are free; play fewer, or lower --answer_seconds"
        )


def _folder(options: BenchOptions, config: ModelConfig, device: torch.device) -> _Subject:
    assert options.model is not None
    weights = Path(options.model) / WEIGHTS
    small = device.type == "cpu" and weights.is_file() and weights.stat().st_size < SMALL_MODEL
    threads = options.threads or (1 if small else torch.get_num_threads())
    return _Subject(str(options.model), options.model, config, threads, options.dtype)


@contextmanager
def _random_folder(options: BenchOptions, name: str, config: ModelConfig, device: torch.device) -> Iterator[_Subject]:
    """A temporary model folder of random weights, whose products are measured first."""
    dtype = find_dtype(options.dtype) or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    config = with_encoder_mode(config, "variable")
    if CODECS.find(config.codec).weights:
        plugins.load_plugins([RANDOM_CODECS], "plugins")
        config = replace(config, codec=RANDOM + config.codec)
    with tempfile.TemporaryDirectory(prefix="omni-bench-") as place:
        folder = str(Path(place) / name)
        model = random_model(config, torch.device("cpu"), dtype)
        with cpu_threads(options.threads, model) as threads:
            if options.kernels == "measured" and device.type == "cpu":
                measure_kernels(to_int8(copy.deepcopy(model)) if options.quantize else model)
        if bytes_of(model) < SMALL_MODEL and device.type != "cpu":
            threads = torch.get_num_threads()
        save_folder(folder, config, model.state_dict(), Tokenizer.bytes())
        del model
        yield _Subject(f"{name}, random weights", folder, config, threads, str(dtype))


def _engine(options: BenchOptions, subject: _Subject, device: torch.device, slots: int, context: int) -> EngineProcess:
    engine = EngineProcess(
        subject.folder,
        slots=slots,
        context=context,
        threads=subject.threads,
        device=str(device),
        dtype=subject.dtype,
        quantize=options.quantize,
        kernels=options.kernels,
        codec_folder=options.codec_folder,
        compile=device.type == "cuda" and options.model is None,
    )
    if engine.codec is None:
        engine.close()
        raise UserError(f"{subject.folder} has no codec, so nobody can hear its answers; name its folder with --codec_folder")
    return engine
