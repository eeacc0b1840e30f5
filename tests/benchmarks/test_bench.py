"""The tables of `bench` that are made in processes and files of their own: they hold what they say, at a tiny size."""

from __future__ import annotations

import importlib
import json
import math
import sys

import pytest
import torch
import transformers

from benchmarks.checkpoint import checkpoint
from benchmarks.child import ResourceUse, run_apart
from benchmarks.convert import QWEN2_05B, convert, write_model
from benchmarks.names import SECTIONS
from benchmarks.prepare import prepare, sound, write_snac
from benchmarks.reading import KINDS, reading, write_shards
from benchmarks.timing import TimingRow
from benchmarks.training import main
from omni.codec.registry import load_codec
from omni.codec.snac import SNAC_24KHZ
from omni.convert.contract import text_shapes
from omni.convert.huggingface import text_config
from omni.errors import UserError
from train.data.config import PackingConfig
from train.data.rows.parquet import StoredRows

SMALL_LM = dict(QWEN2_05B, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4)
SMALL_SNAC = dict(SNAC_24KHZ, encoder_dim=4, encoder_rates=[2, 4], decoder_dim=32, decoder_rates=[4, 2])
BYTES = 64 << 20
NEAR = BYTES // 2
"""What a process may take besides, and what of a peak may be there before."""


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.long)], ids=["here", "apart"])
def apart(request, monkeypatch) -> None:
    """What is measured in a process of its own runs in this one, with figures that are not measured; and as it is."""

    def here(module, arguments, imports=()):
        assert importlib.import_module(module).main(arguments) == 0
        return ResourceUse(1.0, 2, 1)

    if not request.param:
        for table in ("convert", "prepare"):
            monkeypatch.setattr(f"benchmarks.{table}.run_apart", here)


def values(rows: list[TimingRow]) -> dict[str, float]:
    """The figures by name; each name stands once and each figure is a number."""
    out = {row.name: row.value for row in rows}
    assert len(out) == len(rows) and all(map(math.isfinite, out.values()))
    return out


# --- memory of a process ----------------------------------------------------------------------------------------------


def test_memory_that_a_command_holds_is_its_own():
    taken = run_apart("tests.benchmarks.toys", ["hold", str(BYTES)], ["wave"])
    assert abs(taken.resident - BYTES) < NEAR and abs(taken.anonymous - BYTES) < NEAR


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells files apart")
def test_a_mapped_file_is_resident_and_not_held(tmp_path):
    (tmp_path / "zeros").write_bytes(bytes(BYTES))
    taken = run_apart("tests.benchmarks.toys", ["map", str(tmp_path / "zeros")])
    assert abs(taken.resident - BYTES) < NEAR and abs(taken.anonymous) < NEAR


def test_a_command_that_fails_gives_no_figure():
    with pytest.raises(UserError, match="tests.benchmarks.toys fail 3 ended with 3"):
        run_apart("tests.benchmarks.toys", ["fail", "3"])
    with pytest.raises(UserError, match="tests.train.no_such_toy .* ended with 1"):
        run_apart("tests.train.no_such_toy", [])


# --- checkpoint -------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_table_of_checkpoints_has_what_steps_lose_and_what_saves_take():
    found = values(checkpoint("nano-scratch", torch.device("cpu"), {"layers": 1, "width": 64, "heads": 4}, 1, 1))
    lost, saved = found["steps longer with an asynchronous save"], found["synchronous save"]
    assert found["asynchronous / synchronous save"] == pytest.approx(100 * lost / saved)
    assert found["state"] > 0 and found["1 steps"] > 0 and saved > 0 < found["safetensors' save_file, synced"]


# --- convert ----------------------------------------------------------------------------------------------------------


def test_the_language_model_that_is_converted_has_the_shape_of_qwen2():
    with torch.device("meta"):
        wanted = transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**QWEN2_05B))
    shapes = text_shapes(text_config(QWEN2_05B))
    assert sum(map(math.prod, shapes.values())) == sum(p.numel() for p in wanted.parameters()) == 494_032_768


def test_its_shards_are_those_that_transformers_loads(tmp_path):
    write_model(tmp_path / "lm", SMALL_LM, shards=3)
    assert len(list((tmp_path / "lm").glob("*.safetensors"))) == 3
    model, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "lm", output_loading_info=True)
    assert not any(report.values())
    assert all(p.dtype == torch.bfloat16 and 0.015 < p.float().std() < 0.025 for p in model.parameters() if p.numel() > 1000)


def test_the_table_of_conversions_has_memory_and_rate_of_each(apart):
    found = values(convert(SMALL_LM, encoder="tiny", shards=2))
    ways = ("from Hugging Face", "to .pth", "from .pth")
    figures = ("read", "peak RSS / read", "peak RSS without files / read", "written")
    assert list(found) == [f"{way}: {figure}" for way in ways for figure in figures]
    rows = 152000 + 7 * 4160
    assert found["from .pth: read"] > 2 * 2 * rows * 16 / 1e9 > found["from Hugging Face: read"]  # two joint tables in bf16
    for way in ways:
        assert found[f"{way}: peak RSS / read"] > 0 and found[f"{way}: written"] > 0


# --- data prepare -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seconds", "rate"), [(0.16, 8000), (0.5, 24000)])
def test_the_sound_that_is_prepared_is_one(seconds, rate):
    made = sound(seconds, rate, 3)
    assert made.shape == (round(seconds * rate),) and 0.05 < made.abs().max() <= 1
    assert torch.equal(made, sound(seconds, rate, 3)) and not torch.equal(made, sound(seconds, rate, 4))


def test_the_random_snac_is_read_as_a_released_one(tmp_path):
    state = torch.get_rng_state()
    folder = write_snac(tmp_path / "snac", SMALL_SNAC)
    assert torch.equal(torch.get_rng_state(), state)
    codec = load_codec("snac", folder)
    assert codec.encode(sound(0.1, codec.sample_rate, 0)).shape[0] == len(codec.codebook_sizes) == 7


def test_the_table_of_preparing_has_rates_memory_and_their_ratios(apart):
    threads = torch.get_num_threads()
    found = values(prepare(2, 0.3, (2, 35), 1, SMALL_SNAC))
    assert torch.get_num_threads() == threads
    for name, besides in (("SNAC's size", ""), ("Codec2", ", questions read and stored besides")):
        alone = found[f"{name}: answers encoded by the codec alone, one core"]
        prepared = found[f"{name}: answers prepared, one core{besides}"]
        assert found[f"{name}: rate, prepared / codec alone"] == pytest.approx(prepared / alone) and prepared > 0
    few, many = (found[f"{count} short rows: peak RSS"] for count in (2, 35))
    assert found["peak RSS, 35 / 2 rows"] == pytest.approx(many / few)
    assert len(found) == 3 + 3 + 2 * 3 + 2


# --- reading ----------------------------------------------------------------------------------------------------------


def test_shards_hold_the_same_few_rows_again_and_again(tmp_path):
    assert write_shards(tmp_path / "data", 300, 140) == 3
    rows, files = StoredRows(tmp_path / "data"), sorted((tmp_path / "data").glob("*.parquet"))
    assert len(rows) == 300 and len(files) == 3
    for file, first in zip(files, (0, 140, 280), strict=True):
        assert rows.where(first) == f"{file} row 0"
        assert [rows[first + i].id for i in (0, 1, 19)] == ["0", "1", "19"]
    assert rows[KINDS].turns[0].question_text == rows[0].turns[0].question_text != rows[1].turns[0].question_text


def test_the_table_of_reading_has_rates_and_first_batches_of_each_size():
    found = values(reading((10, 70), shard=30, steps=1, repeat=1, packing=PackingConfig(2, 128, 3)))
    names = ("rows packed a minute", "first batch", "first batch, resumed")
    sizes = ("10 rows in 1 file", "70 rows in 3 files")
    kinds = ("rows packed a minute", "bytes read / bytes needed")
    orders = [f"order {order}, with an index: {name}" for order in ("random", "sequential") for name in kinds]
    assert list(found) == [f"{size}: {name}" for size in sizes for name in names] + ["first batch, 70 / 10 rows", *orders]
    first = [found[f"{size}: first batch"] for size in sizes]
    assert found["first batch, 70 / 10 rows"] == pytest.approx(first[1] / first[0])
    assert all(value > 0 for value in found.values())
    assert 0.5 < found[orders[3]] < 2  # each group is read once an epoch


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_sections_by_their_names(monkeypatch, capsys):
    names = ("convert", "prepare", "reading")
    for size, name in enumerate(names):
        monkeypatch.setattr(f"benchmarks.{name}.{name}", lambda size=size: [TimingRow("size", size, "x")])
    assert set(names) < set(SECTIONS) and main(["--only", f"[{','.join(names)}]", "--json"]) == 0
    tables = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [table["rows"] for table in tables] == [{"size": 0}, {"size": 1}, {"size": 2}]
    assert len({table["table"] for table in tables}) == 3
