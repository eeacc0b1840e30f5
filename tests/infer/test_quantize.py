"""`omni-infer quantize`: the folder answers as the model does under `--quantize int8`; what cannot be is refused in a line."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from unittest.mock import ANY

import pytest
import torch
import torch.nn.functional as F

from infer.quantize import Difference, compare, log_probabilities
from omni.checkpoint.folder import load_folder
from omni.cpu.int8 import is_int8
from omni.generate.speech_lm import SpeechLM
from omni.utils.hardware import find_device
from tests.infer.conftest import write_question


@pytest.fixture
def model(folder: Path, tmp_path: Path) -> Path:
    return shutil.copytree(folder, tmp_path / "model")


def test_the_folder_answers_as_the_model_does_in_int8(run, model, tmp_path):
    write_question(tmp_path / "q.wav")
    done = run("quantize", "model", "small")
    size = (tmp_path / "small" / "model.safetensors").stat().st_size
    assert done.code == 0 and not done.err
    assert "small: model in int8" in done.text and f"{size:,} bytes" in done.text and "weights of" in done.text
    asked = ["ask", "q.wav", "--max_seconds", "0.5", "--json"]
    answers = {}
    for name, words in {"small": [], "again": ["--quantize", "int8"], "model": ["--quantize", "int8"], "full": []}.items():
        place = {"again": "small", "full": "model"}.get(name, name)
        found = run(*asked, "--model", place, "--out", f"{name}.wav", *words)
        assert found.code == 0, found.err
        answers[name] = (json.loads(found.out)["text"], (tmp_path / f"{name}.wav").read_bytes())
    assert answers["small"] == answers["again"] == answers["model"] != answers["full"]
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["model", "small"]


def test_it_says_how_far_int8_is_from_the_original(run, model, tmp_path):
    """On the package's own text or the user's, and that it is not good where it is not; or nothing."""
    done = run("quantize", "model", "small")
    assert re.search(r"4,096 tokens of the descriptions .* KL 0\.0\d+ nat, .* token 9.*, perplexity \S+ .0\.", done.text)
    assert re.search(r"; good .* a text it does not know", done.text)
    (tmp_path / "text.txt").write_text("What it does not know. " * 50)
    full, far = (SpeechLM.from_pretrained(model, kernels="reference") for _ in range(2))
    assert compare(full, full, torch.arange(32)) == (32, pytest.approx(0, abs=1e-6), 1, 0, ANY)
    far.model.decoder.blocks[0].mlp.down.weight.data.normal_()
    logits = [log_probabilities(lm, torch.arange(32)) for lm in (full, far)]
    found, losses = compare(full, far, torch.arange(32)), [F.cross_entropy(x[:-1], torch.arange(1, 32)) for x in logits]
    assert found.kl == pytest.approx(float(F.kl_div(logits[1], logits[0].exp(), reduction="batchmean")), rel=1e-4)
    assert found.perplexity == pytest.approx(float((losses[1] - losses[0]).exp()) - 1, rel=1e-4) and "NOT good" in found.line()
    assert found.before == pytest.approx(float(losses[0].exp()), rel=1e-4)
    assert "; good" in Difference(9, 0, 1, 0.02, 1001).line() and "NOT good" in Difference(9, 0, 1, 0.02, 999).line()
    assert "1,150 tokens of text.txt" in run("quantize", "model", "own", "--text", "text.txt").text
    assert "float32" not in run("quantize", "model", "none", "--text", "none").text
    (tmp_path / "text.txt").write_text("short")
    for words in (["text.txt"], ["missing.txt"]):
        done = run("quantize", "model", "refused", "--text", *words)
        assert done.code == 2 and words[0] in done.err and not (tmp_path / "refused").exists()


def test_an_older_folder_is_replaced_when_asked_to(run, model, tmp_path):
    assert run("quantize", "model", "small").code == 0
    before = (tmp_path / "small").stat().st_ino
    assert run("quantize", "model", "small", "--overwrite", "--quiet").code == 0
    assert (tmp_path / "small").stat().st_ino != before
    assert sorted(p.name for p in (tmp_path / "small").iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    (tmp_path / "empty").mkdir()
    assert run("quantize", "model", "empty").code == 0 and is_int8(load_folder(tmp_path / "empty").model)


REFUSED = {
    "exists": (["model", "small"], "small exists; give another name, or --overwrite"),
    "itself": (["model", "model", "--overwrite"], "model holds model, which would be lost"),
    "no model folder": (["model", "other", "--overwrite"], "other holds no config.json"),
    "twice": (["small", "new"], "small is quantised already (int8)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(run, model, tmp_path, name):
    words, said = REFUSED[name]
    assert run("quantize", "model", "small", "--quiet").code == 0
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    done = run("quantize", *words)
    assert done.code == 2 and said in done.err and done.err.count("\n") == 1 and not done.out
    assert sorted(tmp_path.rglob("*")) == before


def test_a_writing_that_breaks_off_leaves_nothing(run, model, tmp_path, monkeypatch):
    def full(*given: object, **more: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("omni.convert.omni_folder.save_tensors", full)
    done = run("quantize", "model", "small")
    assert done.code == 2 and "small cannot be written" in done.err and "nothing was left there" in done.err
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.long
def test_every_table_of_a_bench_is_for_the_format_asked_for(run, folder, tmp_path, monkeypatch):
    assert run("quantize", folder, "small").code == 0
    words = ["--repeat", "1", "--seconds", "0.2", "--answer_seconds", "0.2", "--json"]
    for model, more, said in (
        ("small", [], "int8 with float32, cpu), 1 thread)"),
        (folder, ["--quantize", "int8", "--dtype", "bf16"], "int8 with bfloat16, cpu), 1 thread)"),
        (folder, ["--dtype", "bfloat16"], "streams, bfloat16, cpu), 1 thread)"),
    ):
        done = run("bench", "--model", model, *words, *more)
        assert done.code == 0, done.err
        tables = json.loads(done.out)["tables"]
        assert len(tables) == 2 and all(said in table["title"] for table in tables)
    done = run("bench", "--dtype", "float64")
    assert done.code == 2 and "dtype 'float64' is unknown" in done.err


def test_auto_is_the_cpu_for_int8(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert find_device("auto").type == "cuda" and find_device("auto", "int8").type == "cpu"
