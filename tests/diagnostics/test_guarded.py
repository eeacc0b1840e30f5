"""`pytest --guard`: what it watches, what it counts, whom it fails."""

from __future__ import annotations

import re

import pytest

from tests.processes import Program

SUITE = """
import subprocess, sys
import pytest, torch
from omni.config import DecoderConfig
from omni.layout import Layout
from omni.model.decoder import Decoder
from tests.model.conftest import random_tokens
from tests.train.trainer.test_guard import Deaf
from tests.train.toys import ToyModel, toy_config, toy_fit, toy_parts

LAYOUT = Layout.build([12, 12], 20, specials=8)


def train(steps=1, keep=False):
    decoder = Decoder(DecoderConfig(width=16, layers=1, heads=2, kv_heads=2, mlp_width=16, context=32), LAYOUT)
    optimizer = torch.optim.SGD(decoder.parameters(), lr=0.1)
    for _ in range(steps):
        loss = decoder(random_tokens(LAYOUT, 1, 4)).audio.square().mean()
        if keep:
            decoder.kept = [*getattr(decoder, "kept", []), loss]
        loss.backward()
    if steps == 1:
        optimizer.step()


@pytest.fixture(scope="module")
def deaf(tmp_path_factory):
    return toy_fit(toy_config(tmp_path_factory.mktemp("deaf")), toy_parts(objective=Deaf(ToyModel())))


def test_sound(tmp_path):
    toy_fit(toy_config(tmp_path))

def test_deaf_loop(deaf):
    pass

def test_its_own_guard(tmp_path):
    toy_fit(toy_config(tmp_path, guard=True), toy_parts(objective=Deaf(ToyModel())))

def test_process(tmp_path):
    code = "\\n".join((
        "import sys", "from tests.guarded import child", "from tests.train.trainer.test_guard import Deaf",
        "from tests.train.toys import ToyModel, toy_config, toy_fit, toy_parts",
        "with child():", "    toy_fit(toy_config(sys.argv[1]), toy_parts(objective=Deaf(ToyModel())))",
    ))
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr)

def test_kept_graph():
    train(steps=2, keep=True)

def test_left_out():
    train()

@pytest.mark.untrained("*_head.weight")
def test_left_out_on_purpose():
    train()
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("suite") / "test_some.py"
    file.write_text(SUITE)
    options = ["-p", "tests.conftest", "--guard", "-rA", "-p", "no:cacheprovider", "-c", "pyproject.toml", str(file)]
    ended = Program("pytest", *options).end()
    assert ended.code == 1, ended.out + ended.said
    return ended.out


@pytest.mark.long
def test_a_finding_fails_the_test_that_made_it(said: str) -> None:
    outcomes = dict(reversed(pair) for pair in re.findall(r"^(PASSED|FAILED|ERROR) \S*::(\w+)", said, re.MULTILINE))
    failed = {name.removeprefix("test_") for name, outcome in outcomes.items() if outcome != "PASSED"}
    assert failed == {"deaf_loop", "process", "kept_graph", "left_out"} and len(outcomes) == 7
    assert "(3, " in said  # how a process ends whose training gave a finding
    assert "kept[0] keeps the graph of an earlier step" in said and "audio_head.weight" in said
    assert said.count("received no gradient") >= 2 and "text_embedding.weight" in said
    assert "watched in 5 tests and 1 processes that they started; 4 findings" in said
