"""Stock clients of the Realtime API hold a conversation with a server of the demonstration's model: spoken turns that need
those before, one that interrupts an answer, and one more. What is not installed is skipped and said (`make judges`)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.infer.serve.test_proxy import answers
from tests.judges.questions import QUESTIONS, speak
from tests.processes import free_port

ROOT = Path(__file__).parents[2]
JUDGES = Path(os.environ.get("JUDGES", ROOT / ".judges"))
MODEL = Path(os.environ.get("OMNI_JUDGED_MODEL", ROOT / "runs/nano/model"))
"""What is judged; by default what the demonstration left in this checkout."""

GOOD = 0.9
"""Share of right answers in the demonstration's report from which on answers are judged: how long it trains is capped, however
slow the machine is."""

PAGE = 8330
CHROMIUM = shutil.which("chromium")

ANSWERS = ("five", "twice five is ten", "twice five is ten", "one zero seven six", "eight nine", "eight nine")

CLIENTS = {
    "openai": ["venv-openai/bin/python", "judge_openai.py"],
    "openai manual": ["venv-openai/bin/python", "judge_openai.py", "--turns", "manual"],
    "openai semantic": ["venv-openai/bin/python", "judge_openai.py", "--turns", "semantic_vad"],
    "openai-agents": ["venv-openai/bin/python", "judge_openai_agents.py"],
    "pipecat": ["venv-pipecat/bin/python", "judge_pipecat.py"],
    "livekit": ["venv-livekit/bin/python", "judge_livekit.py"],
    "agents-js": ["node", "judge_agents.mjs"],
    "chromium websocket": ["venv-openai/bin/python", "judge_browser.py", "--transport", "websocket"],
    "page": ["venv-openai/bin/python", "judge_page.py"],
    "chromium webrtc": ["venv-openai/bin/python", "judge_browser.py", "--transport", "webrtc"],
}

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not MODEL.is_dir(), reason=f"there is no model in {MODEL}; `make demo` trains it"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving(str(MODEL)) as url:
        yield url


@contextmanager
def serving(model: str) -> Iterator[str]:
    port = free_port()
    words = ["-m", "infer", "serve", model, "--port", str(port), "--origins", f"http://localhost:{PAGE}"]
    process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        answers(f"http://127.0.0.1:{port}/ready")
        yield f"ws://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return speak(tmp_path_factory.mktemp("questions"))


@pytest.mark.parametrize("name", CLIENTS)
def test_a_stock_client_holds_a_conversation(name: str, server: str, questions: list[Path]) -> None:
    words = command(name, server, questions)
    try:
        hold(name, words)
    except (AssertionError, subprocess.TimeoutExpired) as error:  # in real time: other work may have come between
        print(f"{name} is asked once more: {error}", file=sys.stderr)
        hold(name, words)


def test_the_page_shows_what_it_hears_while_somebody_speaks(questions: list[Path]) -> None:
    """With the model that ships, which hears in chunks."""
    with serving("nano") as url:
        done = subprocess.run(command("page", url, questions), capture_output=True, text=True, timeout=180)
    assert done.stdout.strip(), done.stderr[-2000:]
    told = json.loads(done.stdout[done.stdout.index("{") :])
    assert done.returncode == 0 and told["errors"] == [] and told["statuses"].count("completed") >= 3, told
    assert any(text.startswith(("what is", "read back")) for text in told["partials"]), told["partials"]
    assert len({*told["partials"]}) >= 3, told


def command(name: str, server: str, questions: list[Path]) -> list[str]:
    """The command of a judge; skips what is not installed."""
    program, script, *options = CLIENTS[name]
    if program == "node":
        found, where = shutil.which("node"), JUDGES / "node/node_modules/@openai/agents"
    else:
        found = where = JUDGES / program
    if found is None or not Path(where).exists():
        pytest.skip(f"{name} is not installed in {JUDGES}: make judges")
    if ("chromium" in name or name == "page") and CHROMIUM is None:
        pytest.skip("chromium is not installed (Debian's package chromium)")
    return [str(found), str(ROOT / "tests/judges" / script), server, "key-of-anyone", *map(str, questions), *options]


def hold(name: str, words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=180, env={**os.environ, "JUDGES": str(JUDGES)})
    assert done.stdout.strip(), done.stderr[-2000:]
    told = json.loads(done.stdout[done.stdout.index("{") :])
    assert done.returncode == 0 and told["errors"] == [], told
    (check_page if name == "page" else check)(told)


def is_good() -> bool:
    report = MODEL.parent / "report.json"
    return report.is_file() and json.loads(report.read_text())["figures"]["exact_match"] >= GOOD


def check_page(told: dict[str, Any]) -> None:
    """What the visitor of the page was told and heard."""
    assert told["statuses"] == ["completed", "cancelled", "completed", "completed"], told
    assert told["likeness"] > 0.9 and told["struck"] and not told["outside"], told
    assert "microphone" in told["refused"].lower(), told


def check(told: dict[str, Any]) -> None:
    """The turns of a judge: all were answered in sound, one was interrupted, and most of those that were not are right."""
    turns = told["turns"][-len(QUESTIONS) :]  # some clients begin with a written one
    said = [(turn["transcript"] or "").strip() for turn in turns]
    assert len(turns) == len(QUESTIONS) and all(turn["audio_seconds"] > 0.2 for turn in turns), turns
    if is_good():  # another model may answer too briefly to be interrupted
        assert [turn["interrupted"] for turn in turns] == [number == 3 for number in range(6)], turns
        right = sum(one == wanted for one, wanted in zip(said, ANSWERS, strict=True))
        assert right >= 3, said  # of the five that were not interrupted; two of them are of the kind that is right least often
    history = [(item.get("text") or "").strip() for item in told["history"] if item["role"] == "assistant"]
    assert history and history[-1] == said[-1], history
