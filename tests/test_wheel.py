"""The wheel by itself, in another folder: console scripts, recipes and a model come with it, whatever files lie there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from omni.checkpoint.folder import save_folder
from omni.checkpoint.places import ADAPTER_CONFIG, ADAPTERS, CONFIG, TOKENIZER, WEIGHTS
from omni.text import Tokenizer
from tests.infer.conftest import TINY, tiny_model

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built of a copy of what it is made of, and installed into a folder of its own."""
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"
    for name in ("omni", "train", "infer", "configs"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    nano = source / "omni/pretrained/nano"
    shutil.rmtree(nano / ADAPTERS, ignore_errors=True)
    save_folder(place / "tiny", TINY, tiny_model().state_dict(), Tokenizer.bytes())  # whatever model ships, or none
    shutil.copytree(place / "tiny", nano, dirs_exist_ok=True)
    (nano / ADAPTERS / "slt").mkdir(parents=True)
    (nano / ADAPTERS / "slt" / ADAPTER_CONFIG).write_text("{}")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    built = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(place), str(source)]
    subprocess.run([*pip, *built], check=True, capture_output=True)
    (wheel,) = place.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(place / "site"), str(wheel)], check=True, capture_output=True)
    return place / "site"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a user's own `train.py` and `omni` in it."""
    (tmp_path / "train.py").write_text("print('my own training')")
    (tmp_path / "omni.py").write_text("raise RuntimeError('my own omni')")
    return tmp_path


def run(site: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_recipes_come_with_it_and_nothing_else_does(installed: Path) -> None:
    shipped, ours = (
        {str(file.relative_to(place)) for file in place.rglob("*.*") if file.suffix != ".pyc"}
        for place in (installed / "train/recipes", ROOT / "configs")
    )
    assert shipped == ours
    (dist,) = installed.glob("*.dist-info")
    names = {line.split(",")[0].split("/")[0] for line in (dist / "RECORD").read_text().splitlines()}
    assert names == {"omni", "train", "infer", dist.name, "..", "bin"} - ({"..", "bin"} - names)


@pytest.mark.long
def test_the_scripts_run_the_package_whatever_lies_in_the_folder(installed: Path, folder: Path) -> None:
    script = str(installed / "bin" / "omni-train")
    printed = run(installed, folder, script, "fit", "nano", "--print_config")
    assert printed.returncode == 0 and "spoken-digits" in printed.stdout, printed.stderr
    (folder / "mine.yaml").write_text(printed.stdout)
    assert run(installed, folder, script, "fit", "mine.yaml", "--print_config").stdout == printed.stdout
    stage = run(installed, folder, script, "fit", "voiceassistant/stage1", "--print_config")
    assert stage.returncode == 0 and "qwen2-0.5b" not in stage.stderr
    missing = run(installed, folder, script, "fit", "nana")
    assert missing.returncode == 2 and "did you mean nano?" in missing.stderr
    theirs = run(installed, folder, sys.executable, "-m", "train", "fit", "nano")
    assert theirs.stdout == "my own training\n"


@pytest.mark.long
def test_the_model_that_comes_with_it_answers_the_question_that_does(installed: Path, folder: Path) -> None:
    nano = installed / "omni/pretrained/nano"
    files = {file.relative_to(nano).as_posix() for file in nano.rglob("*.*")}
    assert files == {"README.md", "question.wav", CONFIG, WEIGHTS, TOKENIZER, f"{ADAPTERS}/slt/{ADAPTER_CONFIG}"}
    words = (str(installed / "bin" / "omni-infer"), "ask", "question.wav", "--max_seconds", "0.2")
    asked = run(installed, folder, *words)
    assert asked.returncode == 0 and (folder / "answer.wav").is_file(), asked.stderr
    told = (
        "model: the one that ships with omni-speech (--model names another)",
        "question.wav: the one that ships with omni-speech",
    )
    assert asked.stderr.splitlines() == list(told)
    (nano / WEIGHTS).rename(installed / "weights")
    asked = run(installed, folder, *words)
    (installed / "weights").rename(nano / WEIGHTS)
    assert asked.returncode == 2 and "runs/nano/model" in asked.stderr and "omni-train demo" in asked.stderr


@pytest.mark.long
def test_a_run_from_the_wheel_leaves_a_model_that_answers(installed: Path, folder: Path) -> None:
    """Data workers and all processes of a run find the package too."""
    small = ("--model.encoder.layers=1", "--model.decoder.layers=1", "--data.packing.rows=1", "--validation.questions=0")
    script = str(installed / "bin" / "omni-train")
    trained = run(installed, folder, script, "fit", "nano-scratch", "--budget", "{steps: 1}", "--data.workers=1", *small)
    assert trained.returncode == 0, trained.stderr
    words = ("ask", "--text", "what is two plus three", "--max_seconds", "0.2", "--model", "runs/nano-scratch/model")
    answered = run(installed, folder, str(installed / "bin" / "omni-infer"), *words)
    assert answered.returncode == 0 and (folder / "answer.wav").is_file(), answered.stderr


def test_nothing_of_the_machine_is_in_it(installed: Path) -> None:
    (wheel,) = installed.parent.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.startswith(("tests", "docs", "configs", "runs"))]
