"""Each script of `benchmarks` runs through at small size, and what it measures with counts what it says."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.apart import ResourceUse, run_apart
from benchmarks.bare import BareLoop
from benchmarks.report import run_checks
from infer.bench.bench import noise
from infer.bench.random_model import random_model
from omni.codec.registry import load_codec
from omni.cpu.int8 import to_int8
from omni.errors import UserError
from omni.generate.question import encode_questions
from omni.generate.speech_lm import SpeechLM
from omni.text import Tokenizer
from tests.infer.conftest import TINY
from tests.realtime.fake_server import FakeServer, running

CPU = torch.device("cpu")
QUICK = ("training objective", "training checkpoint", "data prepare", "data reading")
SLOW = (
    *(f"training {name}" for name in ("data", "balance", "guard", "precision")), "data memory", "convert convert",
    *(f"serving {name}" for name in ("bare", "ways", "listening", "people")), "gpu_serving steps", "gpu_serving questions",
)  # fmt: skip
BYTES = 64 << 20


def figures(script: str, name: str, **own: str) -> dict[str, dict[str, float]]:
    """What a check yields at small size; each title stands once, and each figure is a number."""
    module = importlib.import_module(f"benchmarks.{script}")
    wanted = [*inspect.signature(module.CHECKS[name]).parameters][2:]
    found = list(module.CHECKS[name](CPU, True, **{key: {**getattr(module, "OPTIONS", {}), **own}[key] for key in wanted}))
    assert found and len(dict(found)) == len(found)
    assert all(math.isfinite(value) for _, values in found for value in values.values())
    return dict(found)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("check", [*QUICK, *(pytest.param(name, marks=pytest.mark.long) for name in SLOW)])
def test_a_script_runs_through(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def here(module: str, arguments: Sequence[str], imports: Sequence[str] = ()) -> ResourceUse:
        assert importlib.import_module(module).main(arguments) == 0
        return ResourceUse(1.0, 2, 1)

    for script in ("data", "convert"):
        monkeypatch.setattr(f"benchmarks.{script}.run_apart", here)
    figures(*check.split())


@pytest.mark.long
def test_people_talk_to_a_server() -> None:
    with running(FakeServer()) as url:
        (found,) = figures("sockets", "talk", url=f"{url}/v1").values()
    assert found["answers"] > 0 and not found["errors"]


def test_what_a_check_finds_is_printed_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def one(device: torch.device, small: bool, colour: str) -> Any:
        yield f"small {small}, {colour}", {"ms": 1.5}

    def lost(device: torch.device, small: bool) -> Any:
        yield "before", {"ms": 1.0}
        raise RuntimeError("capture invalidated")

    file = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["x", "--small", "--colour", "red", "--out", str(file)])
    assert run_checks({"lost": lost, "one": one}, "", colour="blue") == 1
    assert "one: small True, red: ms 1.5" in capsys.readouterr().out
    kept = json.loads(file.read_text())["checks"]
    assert kept["one"]["figures"] == {"small True, red": {"ms": 1.5}} and kept["lost"]["figures"] == {"before": {"ms": 1.0}}
    assert kept["lost"]["error"] == "RuntimeError: capture invalidated"


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells files apart")
def test_memory_that_a_command_holds_is_its_own(tmp_path: Path) -> None:
    taken = run_apart("tests.benchmarks.toys", ["hold", str(BYTES)], ["wave"])
    assert abs(taken.resident - BYTES) < BYTES // 2 and abs(taken.anonymous - BYTES) < BYTES // 2
    (tmp_path / "zeros").write_bytes(bytes(BYTES))
    taken = run_apart("tests.benchmarks.toys", ["map", str(tmp_path / "zeros")])
    assert abs(taken.resident - BYTES) < BYTES // 2 and abs(taken.anonymous) < BYTES // 2
    with pytest.raises(UserError, match="tests.benchmarks.toys fail 3 ended with 3"):
        run_apart("tests.benchmarks.toys", ["fail", "3"])


@pytest.mark.parametrize("quantize", [False, True])
@torch.inference_mode()
def test_the_bare_loop_does_the_work_of_the_model(quantize: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of different ages, of which one leaves: hidden states are those of their whole columns."""
    lm = SpeechLM(random_model(TINY, CPU, torch.float32), Tokenizer.bytes(), load_codec(TINY.codec))
    if quantize:
        to_int8(lm.model)
    loop, found = BareLoop(lm, noise(0.3), 3, 64), list[Any]()
    choose = loop.choose
    monkeypatch.setattr(loop, "choose", lambda text, audio, rows: found.append((text, audio)) or choose(text, audio, rows))
    (features,) = encode_questions(lm.model, [loop.asked])
    end, fed = len(loop.columns), [[], [], []]
    loop.prefill(slice(0, 1), [end])
    loop.prefill(slice(1, 3), [end, end])
    for at in ([end], [end + 1, end, end], [end + 2, end + 1, end + 1]):
        for row in range(len(at)):
            fed[row].append(loop.tokens[row].clone())
        loop.step(at)
        text, audio = found[-1]
        for row in range(len(at)):
            columns = torch.cat([loop.columns.tokens, *fed[row]], 1)[None]
            index = torch.cat([loop.columns.feature_index, torch.full((len(fed[row]),), -1)])[None]
            wanted = lm.model.decoder(columns, features, index)
            for ours, theirs in ((text[row], wanted.text), (audio[row], wanted.audio)):
                allowed = (2e-2 if quantize else 1e-5) * float(theirs.abs().max())
                torch.testing.assert_close(ours, theirs[0, -1:], rtol=0, atol=allowed)
    kept = loop.tokens[2].clone()
    loop.move(2, 0, end + 2)
    assert loop.tokens[0].equal(kept) and loop.blocks[0].keys[0, :, : end + 2].equal(loop.blocks[0].keys[2, :, : end + 2])
