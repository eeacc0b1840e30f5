"""The bench counts what it says it counts. Sizes are tiny here, and no figure is asked to be fast."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from infer.bench import bench as bench_module
from infer.bench import streaming
from infer.bench.bare import bare_loops
from infer.bench.memory_rate import WeightReader
from infer.bench.random_model import TimedCodec, random_lm, random_model
from infer.bench.streaming import first_audio, noise, rows_in_real_time, steps_and_readings, weights_of_a_step, whole_answer
from omni.codec.snac import SnacCodec
from omni.config import ModelConfig, preset
from omni.generate.question import encode_questions
from omni.generate.speech_lm import SpeechLM
from omni.layout import Layout
from omni.model import int8
from omni.model.int8_model import to_int8
from omni.text import Tokenizer
from tests.infer.conftest import ROOT, TINY

CPU = torch.device("cpu")

SNAC = dataclasses.replace(TINY, layout=Layout.build([64] * 7, 300), codec="snac")


def tiny_snac() -> SnacCodec:
    """Frames of 1,024 samples, 23 a second."""
    rates = [8, 8, 4]
    return SnacCodec.random(encoder_dim=4, encoder_rates=rates, decoder_dim=32, decoder_rates=rates, codebook_size=64)


@pytest.fixture
def configs(monkeypatch) -> dict[str, ModelConfig]:
    """Tiny models under the presets' names."""
    known = {"nano": TINY, "qwen2-0.5b-omni": SNAC}
    monkeypatch.setattr(bench_module, "preset", lambda name: known[name])
    monkeypatch.setattr(bench_module, "NANO_BATCHES", (1, 3))
    real = TimedCodec.__init__
    monkeypatch.setattr("infer.bench.random_model.random_codec", lambda name, device: tiny_snac() if name == "snac" else None)
    from omni.codec.registry import load_codec

    monkeypatch.setattr(TimedCodec, "__init__", lambda self, inner: real(self, inner or load_codec("codec2")))
    return known


def make(config: ModelConfig) -> SpeechLM:
    codec = tiny_snac() if config.codec == "snac" else None
    if codec is None:
        return random_lm(config, CPU, torch.float32)
    return SpeechLM(random_model(config, CPU, torch.float32), Tokenizer.bytes(), TimedCodec(codec))


@pytest.fixture(params=["codec2", "snac"])
def lm(request) -> SpeechLM:
    return make(TINY if request.param == "codec2" else SNAC)


@pytest.mark.parametrize("assist", [False, True])
def test_random_models_never_end_an_answer(lm, assist):
    answer = lm.generate(noise(0.3), max_seconds=0.5, text_assist=assist)
    assert answer.ended == "length" and len(answer.tokens) == answer.timings.steps


@pytest.mark.parametrize("assist", [False, True])
def test_the_parts_of_first_audio_make_its_whole(lm, assist):
    found = first_audio(lm, noise(0.3), assist, repeat=1)
    parts = (found.encode, found.prefill, found.steps, found.codec)
    assert min(found.encode, found.prefill, found.codec) > 0 and found.steps >= 0, parts
    assert sum(parts) == pytest.approx(found.total)
    assert found.frame >= found.total


def test_steps_until_sound_are_those_that_a_session_takes(lm):
    """Counted by hand: ever more columns, until their frames give sound without a flush."""
    found = first_audio(lm, noise(0.3), False, repeat=1).columns
    wanted = next(n for n in itertools.count(1) if _sounds_after(lm, n))
    assert found == wanted - 1  # the prefill writes the first column


def _sounds_after(lm: SpeechLM, columns: int) -> bool:
    frames = max(columns - lm.layout.max_delay, 0)
    codes = torch.zeros(lm.layout.n_audio, frames, dtype=torch.long)
    return len(lm.codec.stream().push(codes)) > 0


def test_a_whole_answer_is_as_long_as_asked(lm):
    figures = whole_answer(lm, noise(0.3), False, 0.5, repeat=2)
    frames = -(-0.5 * lm.codec.frame_rate // 1)
    assert figures.sound == pytest.approx(frames / lm.codec.frame_rate)
    assert figures.real_time_factor == figures.total / figures.sound
    assert 0 < figures.codec < figures.total


def test_steps_and_readings_are_of_the_same_weights(lm):
    decoder, found = lm.model.decoder, steps_and_readings(lm, noise(0.3), True, False, rounds=2, each=2)
    tables = (decoder.text_embedding.weight, decoder.audio_embedding.weight)
    wanted = [p for p in decoder.parameters() if p.ndim == 2 and all(p is not table for table in tables)]
    assert {id(p) for p in weights_of_a_step(lm)} == {id(p) for p in wanted}
    assert found.bytes == 4 * sum(p.numel() for p in wanted)
    assert found.ratio == found.reading / found.seconds > 0
    assert 0 < found.products < found.seconds and found.one_row > 0
    assert steps_and_readings(lm, noise(0.3), False, False, rounds=1, each=1).one_row is None


@pytest.mark.parametrize("quantize", [False, True])
def test_the_products_alone_are_those_of_a_step(lm, quantize, monkeypatch):
    """Every matrix that a step reads, once."""
    if quantize:
        to_int8(lm.model)
    seen: list[int] = []
    together, linear = int8.raw_product, F.linear
    monkeypatch.setattr(int8, "raw_product", lambda x, w: seen.append(len(w.scale) * x.shape[1]) or together(x, w))
    monkeypatch.setattr(F, "linear", lambda x, w, *bias: seen.append(w.numel()) or linear(x, w, *bias))
    streaming._products(lm, 2)()
    assert sum(seen) == sum(w.numel() for w in weights_of_a_step(lm))


def test_a_tied_text_head_is_read_though_it_is_a_table():
    model = preset("qwen3-0.6b")
    decoder = dataclasses.replace(TINY.decoder, tie_text=True, qk_norm=model.decoder.qk_norm)
    lm = make(dataclasses.replace(TINY, decoder=decoder))
    assert any(p is lm.model.decoder.text_embedding.weight for p in weights_of_a_step(lm))


def test_every_reader_reads_every_element():
    matrices = [torch.rand(5, 7) + 0.1, torch.rand(3, 2) + 0.1]
    reader = WeightReader(matrices)
    assert reader.bytes == 4 * 41
    from infer.bench.memory_rate import _READERS

    for one in _READERS.values():
        for matrix in matrices:
            before = one(matrix).clone()
            for i, j in itertools.product(*map(range, matrix.shape)):
                changed = matrix.clone()
                changed[i, j] += 1
                assert not torch.equal(one(changed), before)
    for _ in range(3):
        reader.read()
    assert reader.fastest[1] == min(sorted(taken)[1] for taken in reader._seconds.values())


def test_rows_in_real_time_stop_where_a_step_takes_longer_than_a_frame(lm, monkeypatch):
    seconds = {1: 0.001, 2: 0.002, 4: 10.0, 8: 0.001}
    runs = iter([s for s in seconds.values() for _ in range(9)])
    monkeypatch.setattr("omni.profiling.seconds_of", lambda work, device: next(runs))
    taken, fits = rows_in_real_time(lm, noise(0.3), tuple(seconds), compile=False)
    assert taken == {1: 0.001, 2: 0.002, 4: 10.0} and fits == 2


@pytest.mark.parametrize("quantize", [False, True])
def test_bare_loops_do_the_work_of_the_model(quantize):
    lm = make(dataclasses.replace(SNAC, decoder=dataclasses.replace(SNAC.decoder, qk_norm=True, post_layers=1)))
    if quantize:
        to_int8(lm.model)
    loops = bare_loops(lm, noise(0.5), True, 0.5)
    fbgemm = quantize and "fbgemm" in torch.backends.quantized.supported_engines
    assert [*loops] == ["a bare loop", "one by fbgemm"][: 1 + fbgemm]
    for name, loop in loops.items():
        with torch.inference_mode():
            tokens = loop.column(*loop.prefill())
            text, audio = loop.hidden(lm.model.decoder.embed(tokens), len(loop.columns))
            asked = loop.columns
            (features,) = encode_questions(lm.model, [loop.asked])
            columns = torch.cat([asked.tokens[None], tokens[:1]], 2)
            index = torch.cat([asked.feature_index, torch.tensor([-1])])[None]
            hidden = lm.model.decoder(columns, features, index)
        tolerance = {"one by fbgemm": 5e-2}.get(name, 2e-2 if quantize else 1e-5)  # its rows are rounded elsewhere, or together
        torch.testing.assert_close(text[:1], hidden.text[:, -1:], rtol=0, atol=tolerance * float(hidden.text.abs().max()))
        torch.testing.assert_close(audio[1:], hidden.audio[:, -1:], rtol=0, atol=tolerance * float(hidden.audio.abs().max()))


PEAK = """
import torch
from omni.profiling import HighWater
memory = HighWater(torch.device("cpu"))
size = memory.bytes + (64 << 20)  # past any earlier peak of this process
block = b"1" * size
del block
print(memory.bytes - size)
"""


@pytest.mark.long
def test_peak_memory_sees_what_is_gone_again():
    """In a process of its own: here, others give memory back meanwhile."""
    done = subprocess.run([sys.executable, "-c", PEAK], cwd=ROOT, capture_output=True, text=True, check=True)
    assert abs(int(done.stdout)) < 16 << 20  # the kernel counts pages in batches


def test_the_command_prints_every_table(configs, run):
    words = ["bench", "--repeat", "1", "--seconds", "0.3", "--answer_seconds", "0.2", "--full"]
    done = run(*words, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.text)
    titles = [table["title"].split(":")[0] for table in found["tables"]]
    once = ["streaming", "steps", "memory", "streaming", "streaming"]
    assert titles == [*once[:2], "sessions", *once[2:], *once]
    judged = [row["name"] for table in found["tables"] for row in table["rows"] if row["met"] is not None]
    assert judged == [
        "first exact sample",
        "real-time factor",
        "first exact sample",
        "steps / readings",
        "text assist / one row",
        "peak beyond the weights",
    ]
    assert all(isinstance(row["value"], (int, float)) for table in found["tables"] for row in table["rows"])
    shown = run("bench", "--repeat", "1", "--seconds", "0.3", "--answer_seconds", "0.2", "--preset", "nano")
    assert shown.code == 0 and "first exact sample" in shown.text and "threads" in shown.text


@pytest.mark.long
@pytest.mark.parametrize(
    "more",
    [
        ("--quantize", "int8"),
        pytest.param(("--dtype", "bfloat16", "--kernels", "reference"), marks=pytest.mark.long),
    ],
)
def test_the_command_measures_a_folder(folder, run, more):
    done = run("bench", "--model", folder, "--repeat", "1", "--answer_seconds", "0.2", "--json", *more)
    assert done.code == 0, done.err
    assert str(folder) in json.loads(done.text)["tables"][0]["title"]


@pytest.mark.parametrize(("name", "value", "met"), [("steps / readings", 0.9, True), ("steps / readings", 0.7, False),
                                                    ("first exact sample", 0.9, False), ("memory", 0.7, True)])  # fmt: skip
def test_targets_are_met_from_the_right_side(name, value, met):
    assert bench_module.FigureRow(name, value, target=0.8).met is met
    assert bench_module.FigureRow(name, value).met is None


def test_a_bad_question_is_found_before_a_model_is_built(configs, run, monkeypatch):
    monkeypatch.setattr(bench_module, "random_lm", lambda *_, **__: pytest.fail("a model was built"))
    done = run("bench", "--question", "none.wav")
    assert done.code == 2 and "none.wav" in done.err


def test_the_codec_s_time_begins_when_the_device_is_free(monkeypatch):
    """A device with ten seconds of steps under way; whoever waits for it gets them done."""
    now, queued = [0.0], [10.0]

    def wait(device):
        now[0], queued[0] = now[0] + queued[0], 0.0

    class Slow(type(tiny_snac())):  # type: ignore[misc]
        def stream(self, seed=0):
            stream = super().stream(seed)
            push = stream.push

            def slow_push(codes):
                wait(self.device)
                now[0] += 2.0
                return push(codes)

            stream.push = slow_push
            return stream

    inner = tiny_snac()
    inner.__class__ = Slow
    monkeypatch.setattr("infer.bench.random_model.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("infer.bench.random_model.synchronize", wait)
    codec = TimedCodec(inner)
    codec.stream().push(torch.zeros(7, 1, dtype=torch.long))
    assert codec.seconds == 2.0
