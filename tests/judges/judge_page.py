"""Judge of the server's own page in Chromium: it asks with a WAV as the microphone, hears the answer, interrupts, types, and is
refused the microphone. What the page shows of a question while it is spoken is noted. With --pictures it leaves pictures of
four states in two themes.

What comes out of the page is recorded before the loudspeaker and compared with what the server has sent.
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

from judge_browser import CHROMIUM, FLAGS
from judging import arguments
from playwright.sync_api import Page, sync_playwright

WATCHER = """
window.partials = [];
addEventListener('DOMContentLoaded', () => new MutationObserver(() => {
  for (const words of document.querySelectorAll('#captions .partial')) {
    if (window.partials.at(-1) !== words.textContent) window.partials.push(words.textContent);
  }
}).observe(document.body, { subtree: true, childList: true, characterData: true, attributes: true }));
"""

MICROPHONE = """
const files = %s, sounds = [];
navigator.mediaDevices.getUserMedia = async () => {
  const context = new AudioContext();
  await context.resume();
  const out = context.createMediaStreamDestination();
  for (const file of files) {
    const bytes = Uint8Array.from(atob(file), (character) => character.charCodeAt(0));
    sounds.push(await context.decodeAudioData(bytes.buffer));
  }
  window.say = (number) => new Promise((done) => {
    const source = context.createBufferSource();
    source.buffer = sounds[number];
    source.connect(out);
    source.onended = done;
    source.start();
  });
  return out.stream;
};
"""

RECORDER = """
const connect = AudioNode.prototype.connect;
window.played = [];
AudioNode.prototype.connect = function (to, ...rest) {
  if (to === this.context.destination) {
    const tap = this.context.createScriptProcessor(1024, 1, 1); // the page's policy allows no worklet of others
    tap.onaudioprocess = (event) => window.played.push(...event.inputBuffer.getChannelData(0));
    connect.call(this, tap);
    connect.call(tap, to);
  }
  return connect.call(this, to, ...rest);
};
window.events = [];
const Socket = WebSocket;
window.WebSocket = class extends Socket {
  constructor(...given) {
    super(...given);
    this.addEventListener('message', (event) => window.events.push(JSON.parse(event.data)));
  }
};
"""


DELTA = "response.output_audio.delta"


class Visitor:
    """One page, and what came over its socket."""

    def __init__(self, page: Page, address: str) -> None:
        self.page = page
        self.faults: list[str] = []
        page.on("console", lambda said: self.faults.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.outside: list[str] = []
        page.on("request", lambda request: self.outside.append(request.url) if self._is_outside(request.url, address) else None)
        page.goto(address)

    @staticmethod
    def _is_outside(url: str, address: str) -> bool:
        return not url.startswith((address, "blob:", "data:"))

    def connected(self) -> None:
        self.page.wait_for_selector("[data-connection=open]", timeout=10_000)

    def events(self) -> list[dict[str, Any]]:
        return self.page.evaluate("window.events")

    def count(self, kind: str) -> int:
        return sum(event["type"] == kind for event in self.events())

    def until(self, kind: str, count: int = 1) -> None:
        """Wait until so many events of a kind have come."""
        for _ in range(600):
            if sum(event["type"] == kind for event in self.events()) >= count:
                return
            self.page.wait_for_timeout(33)
        raise TimeoutError(f"{count} x {kind} did not come: {[event['type'] for event in self.events()][-20:]}")

    def hold(self, number: int) -> None:
        """Hold the talk button while a question is said."""
        box = self.page.locator("#talk").bounding_box()
        assert box is not None
        self.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        self.page.mouse.down()
        self.page.wait_for_timeout(900 if not self.page.evaluate("!!window.say") else 300)
        self.page.evaluate(f"window.say({number})")
        self.page.mouse.up()


def sent(events: list[dict[str, Any]]) -> list[float]:
    """Samples of all sound that came."""
    data = b"".join(base64.b64decode(event["delta"]) for event in events if event["type"] == "response.output_audio.delta")
    return [int.from_bytes(data[i : i + 2], "little", signed=True) / 32768 for i in range(0, len(data), 2)]


def likeness(heard: list[float], wanted: list[float]) -> float:
    """Largest correlation of what was heard with what was sent, by the envelopes of 10 ms."""

    def envelope(sound: list[float]) -> list[float]:
        return [sum(map(abs, sound[i : i + 240])) for i in range(0, len(sound) - 239, 240)]

    a, b = envelope(heard), envelope(wanted)
    best = 0.0
    norm = sum(x * x for x in b) ** 0.5
    for shift in range(max(len(a) - len(b) // 2, 0)):
        part = a[shift : shift + len(b)]
        size = sum(x * x for x in part) ** 0.5
        if size and norm:
            best = max(best, sum(x * y for x, y in zip(part, b)) / size / norm)  # noqa: B905
    return best


def converse(visitor: Visitor) -> dict[str, Any]:
    """Ask, interrupt and type; returns what was seen."""
    page = visitor.page
    visitor.connected()
    visitor.hold(0)
    visitor.until("response.done")
    page.wait_for_timeout(700)
    told = {"likeness": round(likeness(page.evaluate("window.played"), sent(visitor.events())), 3)}
    page.click(".switch")  # hands-free
    page.locator("#talk").click()
    page.wait_for_timeout(600)
    count = visitor.count(DELTA)
    page.evaluate("window.say(3)")
    visitor.until(DELTA, count + 1)
    page.wait_for_timeout(300)
    page.evaluate("window.say(4)")  # interrupts
    visitor.until("conversation.item.truncated")
    visitor.until("response.done", 3)
    page.fill("#text", "what is one plus two")
    page.press("#text", "Enter")
    visitor.until("response.done", 4)
    page.wait_for_timeout(1200)
    answers = [e["response"] for e in visitor.events() if e["type"] == "response.done"]
    told |= {
        "statuses": [answer["status"] for answer in answers],
        "answers": [part["transcript"] for answer in answers for item in answer["output"] for part in item["content"]],
        "partials": page.evaluate("window.partials"),
        "struck": page.locator("#captions del").all_inner_texts(),
        "errors": [event["error"]["message"] for event in visitor.events() if event["type"] == "error"],
        "underruns": page.evaluate("window.omniPage.underruns()"),
        "faults": visitor.faults,
        "outside": visitor.outside,
    }
    return told


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--pictures", type=Path, help="folder for pictures of the page")
    options = parser.parse_args()
    address = options.url.replace("ws", "http", 1).removesuffix("/v1") + "/"
    files = json.dumps([base64.b64encode(file.read_bytes()).decode() for file in options.files])
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        context = browser.new_context(viewport={"width": 900, "height": 820})
        context.add_init_script(RECORDER)
        context.add_init_script(WATCHER)
        context.add_init_script(MICROPHONE % files)
        told = converse(Visitor(context.new_page(), address))
        if options.pictures is not None:
            for theme in ("light", "dark"):
                draw(browser, address, files, options.pictures, theme)
        refused = browser.new_context()
        refused.add_init_script(
            "navigator.mediaDevices.getUserMedia = async () => { throw new DOMException('', 'NotAllowedError'); };"
        )
        visitor = Visitor(refused.new_page(), address)
        visitor.connected()
        visitor.page.locator("#talk").click()
        visitor.page.wait_for_selector("#notice:not([hidden])", timeout=5000)
        told["refused"] = visitor.page.inner_text("#notice-text")
        browser.close()
    print(json.dumps(told, ensure_ascii=False, indent=1))
    return int(bool(told["errors"] or told["faults"] or told["outside"]))


def draw(browser: Any, address: str, files: str, folder: Path, theme: str) -> None:
    """Pictures of the page at rest, while an answer plays, and after an interruption."""
    context = browser.new_context(viewport={"width": 900, "height": 720}, color_scheme=theme)
    context.add_init_script(RECORDER)
    context.add_init_script(MICROPHONE % files)
    visitor = Visitor(context.new_page(), address)
    visitor.connected()
    page = visitor.page
    page.screenshot(path=folder / f"serve-idle-{theme}.png")
    visitor.hold(0)
    visitor.until("response.done")
    page.wait_for_timeout(600)
    page.click(".switch")
    page.locator("#talk").click()
    page.wait_for_timeout(500)
    count = visitor.count(DELTA)
    page.evaluate("void window.say(3)")
    page.wait_for_timeout(1800)
    page.screenshot(path=folder / f"serve-hearing-{theme}.png")
    visitor.until(DELTA, count + 1)
    page.wait_for_timeout(150)
    page.screenshot(path=folder / f"serve-speaking-{theme}.png")
    page.evaluate("window.say(4)")
    visitor.until("response.done", 3)
    page.wait_for_timeout(900)
    page.screenshot(path=folder / f"serve-interrupted-{theme}.png")
    context.close()


if __name__ == "__main__":
    sys.exit(main())
