"""The page's course of a conversation, run by node without a browser: what is understood while somebody speaks."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "infer/serve/page"

SCRIPT = """
const made = (tag) => ({
  tag, dataset: {}, children: [], textContent: '', hidden: false, scrollHeight: 0, scrollTop: 0, clientHeight: 0,
  classes: new Set(),
  classList: null,
  append(...all) { this.children.push(...all); },
  replaceChildren(...all) { this.textContent = ''; this.children = all; },
  setAttribute() {}, addEventListener() {},
  remove() { log.children = log.children.filter((child) => child !== this); },
});
const element = (tag) => {
  const one = made(tag);
  one.classList = { toggle: (name, on) => (on ? one.classes.add(name) : one.classes.delete(name)) };
  return one;
};
globalThis.document = { createElement: element };
const log = element('div');
const { Captions } = await import('./captions.js');
const { Conversation } = await import('./conversation.js');
const player = { items: new Set(), stop() {}, duck() {} };
const captions = new Captions(log, { replay() {}, save() {} });
const input = { cut: () => new Int16Array(5), isActive: true, handsFree: true };
const conversation = new Conversation({ send() {}, player, captions, input, onNotice() {}, onChange() {} });
const shown = () => log.children.map(({ children: [, words] }) => [words.textContent, [...words.classes]]);
const seen = [];
for (const event of JSON.parse(process.argv[2])) {
  conversation.receive(event);
  seen.push(shown());
}
console.log(JSON.stringify(seen));
"""

PARTIAL = "omni.input_audio_transcription.partial"
WRITTEN = "conversation.item.input_audio_transcription"


def play(tmp_path: Path, *events: dict[str, object]) -> list[list[list[object]]]:
    """After each event, the words of all turns and the classes of their elements."""
    if shutil.which("node") is None:
        pytest.skip("there is no node")
    for file in PAGE.glob("*.js"):
        shutil.copy(file, tmp_path / file.name)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "run.js").write_text(SCRIPT)
    done = subprocess.run(["node", "run.js", json.dumps(events)], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found: list[list[list[object]]] = json.loads(done.stdout)
    return found


def partial(item: str, text: str) -> dict[str, object]:
    return {"type": PARTIAL, "item_id": item, "transcript": text}


def test_what_is_understood_is_replaced_by_the_transcript(tmp_path: Path) -> None:
    faint = ["partial"]
    seen = play(
        tmp_path,
        {"type": "input_audio_buffer.speech_started", "item_id": "a", "audio_start_ms": 0},
        partial("a", "what"),
        partial("a", "what is to"),
        {"type": "input_audio_buffer.speech_stopped", "item_id": "a", "audio_end_ms": 900},
        {"type": "input_audio_buffer.committed", "item_id": "a"},
        {"type": f"{WRITTEN}.delta", "item_id": "a", "delta": "what is"},
        {"type": f"{WRITTEN}.delta", "item_id": "a", "delta": " two"},
        {"type": f"{WRITTEN}.completed", "item_id": "a", "transcript": "what is two"},
    )
    assert seen == [
        [], [["what", faint]], [["what is to", faint]], [["what is to", faint]], [["what is to", faint]],
        [["what is", []]], [["what is two", []]], [["what is two", []]],
    ]  # fmt: skip


def test_a_turn_that_is_dropped_or_not_written_down_leaves_none_of_it(tmp_path: Path) -> None:
    seen = play(
        tmp_path,
        partial("a", "mm"),
        {"type": "input_audio_buffer.cleared"},
        partial("b", "who"),
        {"type": "input_audio_buffer.committed", "item_id": "b"},
        {"type": "input_audio_buffer.cleared"},
        {"type": f"{WRITTEN}.failed", "item_id": "b"},
    )
    assert [[words for words, _ in turns] for turns in seen] == [["mm"], [], ["who"], ["who"], ["who"], [""]]
    assert seen[-1] == [["", []]]
