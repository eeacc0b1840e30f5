"""Uploads a model folder to the Hugging Face Hub, in one commit: card, weights, tokenizer, codec, adapters, `config.json`.

The card is `README.md` with the hub's front matter, of what model folder, run and reports say. What is not known is left out,
or said to be unknown. Of paths of this machine the last part alone is told.
Front matter: https://huggingface.co/docs/hub/model-cards#model-card-metadata
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import DatasetCard, ModelCard, ModelCardData

from omni.checkpoint.folder import check_files, read_config, read_stored, stored_dtype
from omni.checkpoint.places import ADAPTER_CONFIG, ADAPTERS, CONFIG, WEIGHTS, adapters_in, check_folder
from omni.checkpoint.tensors import open_safetensors
from omni.errors import UserError
from omni.files import read_json
from omni.lora.peft import WEIGHTS as ADAPTER_WEIGHTS
from omni.lora.peft import load_adapter
from omni.stores import hub
from omni.stores.hub import CARD, KINDS, HubAddress, parse_hub
from omni.utils.charts import markdown_table
from omni.utils.configuration import read_yaml
from omni.utils.remote import find_address, refuse_remote
from train.checkpoint.retention import CONFIG as RUN_CONFIG
from train.checkpoint.retention import newest, read_state
from train.checkpoint.upload import CHECKPOINTS
from train.console.progress import counted, duration, short, shown
from train.eval.measures import Figure
from train.eval.report import REPORT, figure_table
from train.eval.run import model_hash
from train.trainer.logs import VALIDATION, read_table

MODEL, ADAPTER = "model", "adapter"
LICENSES = ("LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE")
"""Files of the user's that go with a model."""
EXTRAS = {"codec2": "[nano]", "codec2-1600": "[nano]", "snac": "[snac]"}
"""Extras of the package that a codec needs."""
TEMPLATE = """\
---
{{ card_data }}
---

# {{ name }}

A speech language model of the package `omni-speech`: it takes spoken or written questions and answers in {{ answers }}.

{{ about }}

## Use

```sh
pip install "omni-speech{{ extra }}"
omni-infer ask question.wav --model {{ address }}
```

```python
from omni import SpeechLM

lm = SpeechLM.from_pretrained("{{ address }}")
{%- for adapter in adapters[:1] %}
lm.load_adapter("{{ adapter }}")  # generate(..., adapter="{{ adapter }}")
{%- endfor %}
answer = lm.generate("question.wav")
print(answer.text)
{%- if answers != "text" %}
answer.save("answer.wav")
{%- endif %}
```

The folder holds JSON and safetensors; nothing in it is run when it is read.
{% for title, text in sections %}
## {{ title }}

{{ text }}
{% endfor %}
"""
MARK = "<!-- written by omni-train push: "


@dataclass(frozen=True)
class HubPush:
    """What is to be uploaded: paths or contents by name in the repository, in order, and in words where the card is from;
    `left_out` are files in the folder that are none of the model's."""

    at: HubAddress
    model: Path
    files: dict[str, Path | bytes]
    card: str
    left_out: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The card; "" where it is the hub's."""
        data = self.files.get(CARD, b"")
        return data.decode("utf-8", "replace") if isinstance(data, bytes) else ""

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes by file."""
        return {name: len(data) if isinstance(data, bytes) else data.stat().st_size for name, data in self.files.items()}

    def lines(self) -> list[str]:
        """The files, with their bytes."""
        lines = [f"  {name:<32} {short(size)}B" for name, size in self.sizes.items()]
        left = [f"  left out, no files of the model: {', '.join(self.left_out[:20])}"] if self.left_out else []
        return [*lines, *left, f"  card: {self.card}"]


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
    """What is to be uploaded of a model folder, which is checked as a whole; UserError where it is damaged, has files that
    could run code, or its card cannot be written.

    Args:
        data: license and languages for the card; without a license only where the folder has a card of its own, which is kept.
        reports: output folders of `eval`, for the card.
        run: folder of the run that made it; by default the folder that it is in, where that is one.
    """
    names = sorted(read_stored(model).files)
    bad = [name for name in names if not name.endswith(KINDS)]
    if bad:
        raise UserError(
            f"{model / bad[0]} is neither JSON nor safetensors, and nothing else is read from the hub: "
            f"`omni-train convert {model} TARGET --codec_folder {(model / bad[0]).parent}` writes it as safetensors; push that"
        )
    check_files(model, sums=True)
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
    ordered = [*sorted(names, key=lambda name: (name != WEIGHTS, name)), CONFIG]
    return HubPush(at, model, {CARD: text} | {name: model / name for name in ordered}, card, tuple(left))


def push(upload: HubPush, private: bool, message: str, say: Callable[[str], None]) -> str:
    """Upload; returns the page of the commit. UserError where there is no token, it is not allowed, or goes on failing; or
    `private` is asked for and it is public.

    A repository that is not there is made: public, as by `hf upload`, unless `private` or the organisation's settings say
    otherwise. Nothing is deleted there. `say` is told what is uploaded, and where, before it begins.
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
    if card is not None and f"{card.rstrip()}\n" != _marked(card.rpartition(MARK)[0]):
        files = {name: data for name, data in upload.files.items() if name != CARD}
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
    page = hub.upload(at, list(upload.files.items()), message)
    say(f"done in {duration(time.monotonic() - started)}: {page}")
    return page


# --- the card -----------------------------------------------------------------------------------------------------------


def _marked(body: str) -> str:
    """A card with its last line: the hash of what is before, by which a card that somebody edited is known."""
    return f"{body}{MARK}{hashlib.sha256(body.encode()).hexdigest()[:16]} -->\n"


def write_card(
    model: Path, address: str, data: ModelCardData, reports: Sequence[Path], run: Path | None, adapters: Sequence[str]
) -> str:
    """The text of the card of a model that will be at `address`, whose `data` is license and languages: the rest is filled in.
    UserError where the run's configuration, or a report of `eval`, cannot be read, or is of another model."""
    settings: Any = read_yaml(run / RUN_CONFIG) if run is not None else {}
    checkpoint = newest(run / CHECKPOINTS) if run is not None else None
    state: Mapping[str, Any] = read_state(checkpoint) if checkpoint is not None else {}
    counts, start = state.get("rows", {}), str(_at(settings, "model", "init_from") or "")
    listed = enumerate(_at(settings, "data", "sources") or ())
    sources = [_source(entry, counts.get(f"the number of rows of data.sources[{number}]")) for number, entry in listed]
    tasks = {task for source in sources for task in source["tasks"]}
    data.language = data.language or list(dict.fromkeys(code for source in sources for code in source["languages"])) or None
    data.library_name, data.pipeline_tag = "omni-speech", "text-to-speech" if tasks == {"T1A1"} else "audio-to-audio"
    if (codec := read_config(model).codec) == "none" or (tasks and all(task.endswith(("T1", "T2")) for task in tasks)):
        data.pipeline_tag = "automatic-speech-recognition" if tasks == {"A1T1"} else "audio-text-to-text"
    data.base_model = start.removeprefix("hf://").partition("@")[0] if start.startswith("hf://") else None
    data.datasets = sorted({source["dataset"] for source in sources} - {""}) or None
    sections: list[tuple[str, str]] = [] if run is None else [("Training", _training(settings, state))]
    if sources:
        cells = [source["cells"] for source in sources]
        sections.append(("Data", markdown_table(("source", "rows", "speech", "license", "tasks"), cells)))
    sections += [] if run is None else _figures(run, settings)
    sections += [("Evaluation", _evaluation(model, folder)) for folder in reports]
    if data.license == "other" and not (data.license_name or data.license_link):
        sections.append(("License", "The author has named no license: ask before you use it."))
    card = ModelCard.from_template(
        data, template_str=TEMPLATE, name=address.rpartition("/")[2].partition("@")[0], address=address, sections=sections,
        about=_about(model, adapters), extra=EXTRAS.get(codec or "", ""), adapters=adapters,
        answers="text" if codec == "none" else "text and speech",
    )  # fmt: skip
    return _marked(f"{card}\n")


def _about(model: Path, adapters: Sequence[str]) -> str:
    config, file, dtype = read_config(model), open_safetensors(model / WEIGHTS), stored_dtype(model)
    values = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    decoder, heads = config.decoder, f"{config.decoder.heads} heads ({config.decoder.kv_heads} of keys and values)"
    rows = [
        ("decoder", f"{decoder.layers} layers of {decoder.width}, {heads}"),
        ("encoder", f"{config.encoder.layers} layers of {config.encoder.width}"),
        ("streams", f"{config.layout.n_audio} of audio codes, one of text"),
        ("codec", config.codec or "none"),
        ("weights", f"{short(values)} values, {str(dtype).removeprefix('torch.') if dtype is not None else 'mixed'}"),
        ("adapters", ", ".join(adapters)),
    ]
    return markdown_table(("", ""), [row for row in rows if row[1]])


def _at(settings: Any, *keys: str) -> Any:
    for key in keys:
        settings = settings.get(key) if isinstance(settings, Mapping) else None
    return settings


def _name(path: str) -> str:
    """A file's or folder's name without the folders of this machine; addresses of the hub and of the web whole."""
    return path.partition("?")[0] if path.startswith(("hf://", "https://")) else path.rstrip("/").rpartition("/")[2] or path


def _training(settings: Mapping[str, Any], state: Mapping[str, Any]) -> str:
    start, trainable = _at(settings, "model", "init_from"), _at(settings, "trainable") or ["*"]
    rows = {
        "start": f"`{_name(str(start))}`" if start else f"random weights of the preset {_at(settings, 'model', 'preset')}",
        "steps": f"{state['step']:,}" if state else None,
        "time": f"{duration(state['seconds'])} in {counted(state['processes'], 'process')}" if state else None,
        "precision": _at(settings, "fabric", "precision"),
        "optimizer": _at(settings, "optimizer", "name"),
        "trainable": ", ".join(f"`{pattern}`" for pattern in trainable) if trainable != ["*"] else None,
    }
    return markdown_table(("", ""), [(title, str(text)) for title, text in rows.items() if text])


def _source(source: Any, rows: int | None) -> dict[str, Any]:
    """The cells of the row of a source of a run's data, and its tasks, languages and name at the hub: of prepared rows by the
    report of their preparation, and by the cards beside them and their origin."""
    path, tasks = str(_at(source, "path") or ""), [name for name, weight in (_at(source, "tasks") or {}).items() if weight]
    report: Any = {}
    with suppress(OSError, ValueError):
        report = read_json(Path(path) / REPORT) if path else {}
    origin, rows = str(_at(report, "source") or ""), _at(report, "rows") if rows is None else rows
    name = f"{_name(path)}, of {_name(origin)}" if origin and _name(origin) != _name(path) else _name(path)
    seconds = [length for side in ("question", "answer") if (length := _at(report, f"{side}_seconds")) is not None]
    cards = [_card_data(Path(path_or_url)) for path_or_url in (path, origin) if path_or_url and "://" not in path_or_url]
    license, languages = [next((card[key] for card in cards if card[key]), ()) for key in ("license", "language")]
    hub = next((path_or_url for path_or_url in (path, origin) if path_or_url.startswith("hf://datasets/")), "")
    dataset = "/".join(hub.removeprefix("hf://datasets/").partition("@")[0].split("/")[:2])
    cells = (
        name or f"{_at(source, 'kind')}, made while training",
        "" if rows is None else f"{rows:,}",
        duration(sum(seconds)) if seconds else "",
        ", ".join(license),
        ", ".join(tasks),
    )
    return {"cells": [cell or "unknown" for cell in cells], "tasks": tasks, "languages": languages, "dataset": dataset}


def _card_data(folder: Path) -> dict[str, tuple[str, ...]]:
    """License and language of a data set, by the front matter of its `README.md`, which comes with those of the hub."""
    data: Mapping[str, Any] = {}
    with suppress(OSError, ValueError, TypeError):
        data = DatasetCard.load(folder / CARD, ignore_metadata_errors=True).data.to_dict()
    values = {key: data.get(key) or () for key in ("license", "language")}
    return {key: (value,) if isinstance(value, str) else tuple(map(str, value)) for key, value in values.items()}


def _figures(run: Path, settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    table, number = read_table(run / VALIDATION), _at(settings, "validation", "questions")
    last = {name: value for name, value in table[-1].items() if math.isfinite(value)} if table else {}
    rows = [(name.replace("_", " "), shown(name, x)) for name, x in last.items() if name not in ("step", "seconds")]
    of = ", on held-out rows of its data" if number else ""
    text = f"The run's own, at step {last.get('step', 0):.0f}{of}.\n\n{markdown_table(('figure', 'value'), rows)}"
    return [("Validation", text)] if table else []


def _evaluation(model: Path, folder: Path) -> str:
    """The figures of an evaluation; UserError where it is of another model, or has not ended."""
    if not (folder / REPORT).is_file():
        raise UserError(f"--report {folder} holds no finished evaluation (it has no {REPORT}); name the --out of one")
    report = read_json(folder / REPORT, "evaluate the model again")
    if report.get("model_hash") != model_hash(model):
        of = f"{report.get('model')!r:.200}"
        raise UserError(f"--report {folder} is of another model ({of}): evaluate {model}, or leave the report out")
    figures = {}
    for name, values in report["figures"].items():
        numbers: Any = {key: math.nan if value is None else value for key, value in values.items()}
        figures[name] = Figure(**numbers)
    columns, rows = figure_table(figures)
    ear = f", heard by {_name(report['ear'])}" if report.get("ear") else ""
    text = f"{counted(report['answered'], 'question')} of `{_name(report['data'])}`, asked as {report['task']}{ear}."
    text += f" {counted(len(report['broken']), 'broken row')} left out." if report["broken"] else ""
    return f"{text}\n\n{markdown_table(columns[:4], [row[:4] for row in rows])}"  # which is better is left out
