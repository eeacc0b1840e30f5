"""The bench counts what it says it counts. Sizes are tiny here, and no figure is asked to be fast."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest
import torch

from infer.bench import bench as bench_module
from infer.bench import random_model as random_models
from infer.bench.bench import READERS, first_audio, noise, readings, steps_and_readings, weights_of_a_step, whole_answer
from infer.bench.random_model import random_model
from omni.codec.base import AudioCodec
from omni.codec.registry import load_codec
from omni.codec.snac import SnacCodec
from omni.config import ModelConfig, preset
from omni.generate.speech_lm import SpeechLM
from omni.layout import Layout
from omni.text import Tokenizer
from tests.infer.conftest import TINY

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
    for module in (bench_module, random_models):
        monkeypatch.setattr(module, "preset", lambda name: known[name])
    monkeypatch.setattr(random_models, "random_codec", lambda name, _: codec(name))
    return known


def codec(name: str) -> AudioCodec:
    return tiny_snac() if name == "snac" else load_codec(name)


def make(config: ModelConfig) -> SpeechLM:
    return SpeechLM(random_model(config, CPU, torch.float32), Tokenizer.bytes(), codec(config.codec))


@pytest.fixture(params=["codec2", "snac"])
def lm(request) -> SpeechLM:
    return make(TINY if request.param == "codec2" else SNAC)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("assist", [False, True])
def test_random_models_never_end_an_answer(lm, assist):
    answer = lm.generate(noise(0.3), max_seconds=0.5, text_assist=assist)
    assert answer.ended == "length" and len(answer.tokens) == answer.timings.steps


@pytest.mark.sampled(1)
@pytest.mark.parametrize("assist", [False, True])
def test_the_parts_of_first_audio_make_its_whole(lm, assist):
    found = first_audio(lm, noise(0.3), assist, repeat=1)
    parts = (found.encode, found.prefill, found.steps, found.codec)
    assert min(found.encode, found.prefill, found.codec) > 0 and found.steps >= 0, parts
    assert sum(parts) == pytest.approx(found.total)


def test_steps_until_sound_are_those_that_a_session_takes(lm):
    """Counted by hand: ever more columns, until their frames give sound without a flush."""
    found = first_audio(lm, noise(0.3), False, repeat=1).columns
    wanted = next(n for n in itertools.count(1) if _sounds_after(lm, n))
    assert found == wanted - 1  # the prefill writes the first column


def _sounds_after(lm: SpeechLM, columns: int) -> bool:
    frames = max(columns - lm.layout.max_delay, 0)
    codes = torch.zeros(lm.layout.n_audio, frames, dtype=torch.long)
    return len(lm.codec.stream().push(codes)) > 0


@pytest.mark.sampled(1)
def test_a_whole_answer_is_as_long_as_asked(lm):
    figures = whole_answer(lm, noise(0.3), False, 0.5, repeat=2)
    frames = -(-0.5 * lm.codec.frame_rate // 1)
    assert figures.sound == pytest.approx(frames / lm.codec.frame_rate)
    assert figures.real_time_factor == figures.total / figures.sound
    assert bench_module.codec_alone(lm, 2) > 0


def test_steps_and_readings_are_of_the_same_weights(lm):
    decoder, found = lm.model.decoder, steps_and_readings(lm, 2, False, rounds=2)
    tables = (decoder.text_embedding.weight, decoder.audio_embedding.weight)
    wanted = [p for p in decoder.parameters() if p.ndim == 2 and all(p is not table for table in tables)]
    assert {id(p) for p in weights_of_a_step(lm)} == {id(p) for p in wanted}
    step, reading, how, size = found
    assert size == 4 * sum(p.numel() for p in wanted) and min(step, reading) > 0 and how in READERS


def test_a_tied_text_head_is_read_though_it_is_a_table():
    model = preset("qwen3-0.6b")
    decoder = dataclasses.replace(TINY.decoder, tie_text=True, qk_norm=model.decoder.qk_norm)
    lm = make(dataclasses.replace(TINY, decoder=decoder))
    assert any(p is lm.model.decoder.text_embedding.weight for p in weights_of_a_step(lm))


def test_every_reader_reads_every_element():
    for reader, matrix in itertools.product(READERS.values(), (torch.rand(5, 7) + 0.1, torch.rand(3, 2) + 0.1)):
        before = reader(matrix).clone()
        for i, j in itertools.product(*map(range, matrix.shape)):
            changed = matrix.clone()
            changed[i, j] += 1
            assert not torch.equal(reader(changed), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_as_many_bytes_are_read_as_weights_have(dtype):
    (flat,) = readings([torch.ones(4096, 64, dtype=dtype)])["sum"].args
    assert flat.nbytes == 4096 * 64 * dtype.itemsize


def test_the_command_prints_every_table(configs, run):
    words = ["bench", "--repeat", "1", "--seconds", "0.3", "--answer_seconds", "0.2"]
    done = run(*words, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.text)
    assert [table["title"].split(":")[0] for table in found["tables"]] == ["streaming", "steps"] * 2
    assert all(isinstance(row["value"], (int, float)) for table in found["tables"] for row in table["rows"])
    shown = run(*words, "--preset", "nano")
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


def test_a_bad_question_is_found_before_a_model_is_built(configs, run, monkeypatch):
    monkeypatch.setattr(random_models, "random_model", lambda *_, **__: pytest.fail("a model was built"))
    done = run("bench", "--question", "none.wav")
    assert done.code == 2 and "none.wav" in done.err
