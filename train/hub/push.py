"""Uploads a model folder to the Hugging Face Hub, in one commit: card, weights, tokenizer, codec, adapters, `config.json`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import ModelCardData

from omni.checkpoint.folder import check_whole, listed_names
from omni.checkpoint.places import ADAPTER_CONFIG, ADAPTERS, CONFIG, WEIGHTS, adapters_in, check_folder
from omni.errors import UserError
from omni.lora.peft import WEIGHTS as ADAPTER_WEIGHTS
from omni.lora.peft import load_adapter
from omni.stores import hub
from omni.stores.hub import CARD, KINDS, HubAddress, parse_hub
from omni.utils.remote import find_address, refuse_remote
from train.checkpoint.retention import CONFIG as RUN_CONFIG
from train.console.progress import counted, duration, short
from train.hub.card import write_card, written_here

MODEL, ADAPTER = "model", "adapter"
LICENSES = ("LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE")
"""Files of the user's that go with a model."""


@dataclass(frozen=True)
class HubPush:
    """What is to be uploaded.

    Attributes:
        files: names in the repository, and paths or contents, in order.
        card: where the card is from, for people.
        left_out: files in the folder that are none of the model's.
    """

    at: HubAddress
    model: Path
    files: tuple[tuple[str, Path | bytes], ...]
    card: str
    left_out: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The card; "" where it is the hub's."""
        data = dict(self.files).get(CARD, b"")
        return data.decode("utf-8", "replace") if isinstance(data, bytes) else ""

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes by file."""
        return {name: len(data) if isinstance(data, bytes) else data.stat().st_size for name, data in self.files}

    def lines(self) -> list[str]:
        """The files, with their bytes."""
        lines = [f"  {name:<32} {short(size)}B" for name, size in self.sizes.items()]
        left = [f"  left out, no files of the model: {', '.join(self.left_out[:20])}"] if self.left_out else []
        return [*lines, f"  card: {self.card}", *left]


def find_folder(folder: Path) -> Path:
    """The model folder that is meant: the given one, or `model` in a run's folder; UserError where there is none."""
    refuse_remote(folder, "model")
    if (folder / CONFIG).is_file() or not (folder / RUN_CONFIG).is_file():
        check_folder(folder)
        return folder
    if not (folder / MODEL / CONFIG).is_file() and (folder / ADAPTER).is_dir():
        raise UserError(
            f"{folder} has made an adapter alone: merge it (`omni-train convert MODEL TARGET --lora {folder / ADAPTER}`), or "
            f"copy it into the model's folder as {ADAPTERS}/NAME, and push that"
        )
    if not (folder / MODEL).is_dir():
        raise UserError(f"{folder} has no finished model yet: the run writes {folder / MODEL} when it ends")
    check_folder(folder / MODEL)
    return folder / MODEL


def hub_address(text: str) -> HubAddress:
    """The repository that an address names; UserError where it names none that can be written to."""
    at = parse_hub(find_address(text) or text)
    if at is None or at.inner:
        raise UserError(f"{text!r:.200} is no repository at the hub; give hf://owner/name, or hf://owner/name@branch")
    return at


def collect_files(
    model: Path, at: HubAddress, data: ModelCardData, reports: Sequence[Path] = (), run: Path | None = None
) -> HubPush:
    """What is to be uploaded of a model folder, which is checked as a whole.

    Args:
        data: license and languages for the card; without a license only where the folder has a card of its own, which is kept.
        reports: output folders of `eval`, for the card.
        run: folder of the run that made it; by default the folder that it is in, where that is one.

    Raises:
        UserError: the folder is damaged, has files that could run code, or the card cannot be written.
    """
    names = listed_names(model)
    bad = [name for name in names if not name.endswith(KINDS)]
    if bad:
        raise UserError(
            f"{model / bad[0]} is neither JSON nor safetensors, and nothing else is read from the hub: "
            f"`omni-train convert {model} TARGET --codec_folder {(model / bad[0]).parent}` writes it as safetensors; push that"
        )
    check_whole(model)
    adapters = adapters_in(model)
    for name, adapter in adapters.items():
        load_adapter(adapter)
        names += [f"{ADAPTERS}/{name}/{file}" for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)]
    names += [name for name in LICENSES if (model / name).is_file()]
    if (model / CARD).is_file():
        card, text = f"{model / CARD}, as it is", (model / CARD).read_bytes()
    else:
        if not data.license:
            raise UserError(
                f"--license is needed, such as apache-2.0, cc-by-4.0 or other: {model} has no {CARD} of its own that names one"
            )
        folder = model.resolve().parent
        run = folder if run is None and model.name == MODEL and (folder / RUN_CONFIG).is_file() else run
        card = f"written from {run}" if run is not None else "written from the model folder, of a run that is not known"
        text = write_card(model, at.address, data, reports, run, list(adapters)).encode()
    known = {*names, CONFIG, CARD}
    left = sorted(name for p in model.rglob("*") if p.is_file() and (name := p.relative_to(model).as_posix()) not in known)
    files: list[tuple[str, Path | bytes]] = [(CARD, text)]
    files += [(name, model / name) for name in sorted(names, key=lambda name: (name != WEIGHTS, name))]
    files.append((CONFIG, model / CONFIG))
    return HubPush(at, model, tuple(files), card, tuple(left))


def push(upload: HubPush, private: bool, message: str, say: Callable[[str], None]) -> str:
    """Upload; returns the page of the commit.

    A repository that is not there is made: public, as by `hf upload`, unless `private` or the organisation's settings say
    otherwise. Nothing is deleted there. `say` is told what is uploaded, and where, before it begins.

    Raises:
        UserError: there is no token, it is not allowed, or goes on failing; or `private` is asked for and it is public.
    """
    at = upload.at
    user = hub.account(at)
    known = hub.is_private(at)
    if private and known is False:
        raise UserError(f"{at} is there already, and is public: make it private on {at.page}/settings, or leave --private out")
    card = None
    if known is not None and upload.card.startswith("written"):
        with suppress(hub.MissingError):  # a branch that is not there yet
            card = hub.read_card(at)
    if card is not None and not written_here(card):
        files = tuple(file for file in upload.files if file[0] != CARD)
        upload = replace(upload, files=files, card="the one at the hub, which was edited there, is kept")
    if upload.text:
        hub.check_card(at, upload.text)
    made = "" if known is not None else ", a new repository"
    if known is None:
        hub.create_repository(at, True if private else None)
        known = hub.is_private(at)
    is_private = private if known is None else known
    say(
        f"uploading {counted(len(upload.files), 'file')}, {short(sum(upload.sizes.values()))}B, of {upload.model}\n"
        f"to {at.page}, branch {at.revision or 'main'}{made}, {'private' if is_private else 'PUBLIC'}, as {user}"
    )
    say("\n".join(upload.lines()))
    started = time.monotonic()
    hub.create_branch(at)
    page = hub.upload(at, upload.files, message)
    say(f"done in {duration(time.monotonic() - started)}: {page}")
    return page
