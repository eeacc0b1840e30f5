"""`omni-train push MODEL hf://owner/name`: upload a model folder to the Hugging Face Hub, with a model card."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from omni.errors import UserError
from omni.stores.hub import CARD
from omni.utils.process import importing
from train.console.options import Parser, given_path


def main(argv: Sequence[str]) -> int:
    """Runs the command; prints what is uploaded, and where it is then."""
    parser = _parser()
    chosen = parser.read(argv)
    with importing():
        from huggingface_hub import ModelCardData

        from train.hub.push import collect_files, find_folder, hub_address, push

    at, model = hub_address(chosen["address"]), find_folder(chosen["model"])
    if chosen["license"] != "other" and (chosen["license_name"] or chosen["license_link"]):
        raise UserError("--license_name and --license_link are for --license other; the hub knows the others")
    words: dict[str, Any] = {key: chosen[key] or None for key in ("license", "license_name", "license_link")}
    data = ModelCardData(language=[one.strip() for one in chosen["language"].split(",") if one.strip()] or None, **words)
    what = collect_files(model, at, data, chosen["report"] or (), chosen["run"])
    if chosen["dry_run"]:
        print(f"would upload {model} to {at}:", file=sys.stderr)
        print("\n".join(what.lines()), file=sys.stderr)
        print(what.text, end="")
        return 0
    push(what, chosen["private"], chosen["message"], lambda line: print(line, flush=True))
    print(f'read it by SpeechLM.from_pretrained("{at}"), or --model {at}')
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="omni-train push",
        description="Upload a model folder to the Hugging Face Hub, with its adapters and a model card, in one commit. A token "
        f"is looked for as `hf` does (`hf auth login`, HF_TOKEN). A {CARD} in the folder, and one that was edited at the hub, "
        "are kept; otherwise it is written from the run: model, data, figures. `--dry_run` shows it.",
    )
    parser.add_argument("model", type=given_path, help="a model folder, or the folder of a finished run")
    parser.add_argument("address", help="hf://owner/name, or hf://owner/name@branch; made where it is not there")
    parser.add_argument("--license", default="", help="such as apache-2.0, or other; needed where the folder has no card")
    parser.add_argument("--license_name", default="", help="of a license that the hub does not know (--license other)")
    parser.add_argument("--license_link", default="", help="where its text is")
    parser.add_argument("--language", default="", help="languages that it speaks: en, or en,de (default: of the data's cards)")
    parser.add_argument("--report", type=given_path, nargs="+", help="output folders of `eval`, for the card")
    parser.add_argument("--run", type=given_path, help="folder of the run that made it (default: where the model is)")
    parser.add_argument("--private", action="store_true", help="make a new repository private (default: public)")
    parser.add_argument("--message", default="Upload a model of omni-speech", help="of the commit")
    parser.add_argument("--dry_run", action="store_true", help="show files and card, and upload nothing")
    return parser
