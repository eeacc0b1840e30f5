"""Judge: the OpenAI Agents SDK for JavaScript in a page of Chromium, over WebRTC or a WebSocket.

The page is served at http://localhost:PAGE, an origin that the server must let in. Its key is a client secret, which the OpenAI
library gets for it. The SDK is taken from $JUDGES/node, where setup.sh installs it ($JUDGES is /tmp/judges by default).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from judging import arguments
from openai import OpenAI
from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
MODULES = Path(os.environ.get("JUDGES", "/tmp/judges")) / "node" / "node_modules"
CHROMIUM = "/usr/bin/chromium"
FLAGS = (
    "--no-sandbox",
    "--headless=new",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--autoplay-policy=no-user-gesture-required",
)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def build(folder: Path, files: list[Path]) -> None:
    """Put the page, its script with the SDK in it, and the questions into a folder."""
    (folder / "index.html").write_text('<!doctype html><title>Judge</title><script src="page.js"></script>', encoding="utf-8")
    flags = ("--bundle", f"--outfile={folder / 'page.js'}", "--log-level=error")
    environment = {**os.environ, "NODE_PATH": str(MODULES)}
    subprocess.run([MODULES / ".bin" / "esbuild", HERE / "page.mjs", *flags], check=True, env=environment)
    for file in files:
        (folder / file.name).write_bytes(file.read_bytes())


def secret(options: argparse.Namespace) -> str:
    client = OpenAI(api_key=options.key, base_url=options.url.replace("ws", "http", 1))
    return client.realtime.client_secrets.create(session={"type": "realtime"}).value


def converse(options: argparse.Namespace) -> tuple[dict, bool]:
    """The page's report, and whether something raised in it."""
    version = json.loads((MODULES / "@openai" / "agents-realtime" / "package.json").read_text(encoding="utf-8"))["version"]
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        build(Path(folder), options.files)
        server = ThreadingHTTPServer(("127.0.0.1", options.page), functools.partial(Quiet, directory=folder))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = browser.new_page()
        page.goto(f"http://localhost:{options.page}/")
        names = [file.name for file in options.files]
        given = [options.transport, version, options.url, secret(options), names, options.limit]
        found = page.evaluate("given => judge(...given)", given)
        browser.close()
        server.shutdown()
        return found


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--transport", choices=("webrtc", "websocket"), default="webrtc")
    parser.add_argument("--page", type=int, default=8330, help="port of the page")
    report, raised = converse(parser.parse_args())
    print(json.dumps(report, ensure_ascii=False, indent=1))
    sys.exit(raised)
