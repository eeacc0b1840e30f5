"""The model card that `push` writes: `README.md` with the hub's front matter, of what model folder, run and reports say.

What is not known is left out, or said to be unknown. Of paths of this machine the last part alone is told.
Front matter: https://huggingface.co/docs/hub/model-cards#model-card-metadata
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omni.checkpoint.bounds import load_json, open_safetensors
from omni.checkpoint.folder import read_config, stored_dtype
from omni.checkpoint.places import WEIGHTS
from omni.codec.registry import CODECS
from omni.config import ModelConfig
from omni.errors import UserError
from omni.files import read_json
from omni.stores.hub import CARD
from train.checkpoint.retention import CONFIG, newest, read_state
from train.checkpoint.upload import CHECKPOINTS
from train.console.command import read_yaml
from train.console.progress import counted, duration, percent, short, shown
from train.eval.measures import MEASURES
from train.eval.measures import shown as shown_measure
from train.eval.report import REPORT
from train.eval.run import model_hash
from train.trainer.logs import VALIDATION, read_table

LIBRARY = "omni-speech"
EXTRAS = {"codec2": "[nano]", "snac": "[snac]"}
"""Extras of the package that a codec needs."""
UNKNOWN = "unknown"
MARK = "<!-- written by omni-train push: "
"""Start of the last line of a card; the hash of what is before follows, so that a card that somebody edited is known."""
AGAIN = "evaluate the model again"


@dataclass(frozen=True)
class CardOptions:
    """What the user says about a model.

    Attributes:
        license: an identifier that the hub knows, such as `apache-2.0`, or `other`.
        license_name, license_link: of a license that is `other`.
        languages: such as `en`.
        reports: output folders of `eval`.
    """

    license: str
    license_name: str = ""
    license_link: str = ""
    languages: tuple[str, ...] = ()
    reports: tuple[Path, ...] = ()


@dataclass(frozen=True)
class DataSource:
    """A source of a run's data.

    Attributes:
        rows, seconds: of questions and answers; None where nothing tells them.
        license: "" where nothing tells it.
        dataset: its name at the hub, where it is from there.
    """

    name: str
    tasks: tuple[str, ...] = ()
    rows: int | None = None
    seconds: float | None = None
    license: str = ""
    languages: tuple[str, ...] = ()
    dataset: str = ""


def written_here(card: str) -> bool:
    """Whether `push` wrote a card, and nobody has edited it since."""
    body, _, mark = card.rstrip().rpartition("\n")
    return mark == _mark(f"{body}\n")


def _mark(body: str) -> str:
    return f"{MARK}{hashlib.sha256(body.encode()).hexdigest()[:16]} -->"


def write_card(model: Path, address: str, options: CardOptions, run: Path | None = None, adapters: Sequence[str] = ()) -> str:
    """The text of a model's card.

    Args:
        address: where the model will be.
        run: folder of the run that made it.
        adapters: names of those in its folder.

    Raises:
        UserError: the run's configuration, or a report, cannot be read, or is of another model.
    """
    config, settings = read_config(model), {} if run is None else _settings(run)
    sources = [] if run is None else list(_sources(run, settings))
    name = address.rpartition("/")[2].partition("@")[0]
    parts = [f"# {name}", _about(model, config, adapters), _use(address, config, adapters), _trained(settings, run)]
    parts += [_data(sources), *_figures(run, settings), *(_evaluation(model, folder) for folder in options.reports)]
    if options.license == "other" and not (options.license_name or options.license_link):
        parts.append("## License\n\nThe author has named no license: ask before you use it.")
    body = f"---\n{_front_matter(options, settings, sources)}\n---\n\n" + "\n\n".join(part for part in parts if part) + "\n\n"
    return f"{body}{_mark(body)}\n"


def _front_matter(options: CardOptions, settings: Mapping[str, Any], sources: Iterable[DataSource]) -> str:
    from huggingface_hub import ModelCardData

    sources = list(sources)
    languages = options.languages or tuple(dict.fromkeys(one for source in sources for one in source.languages))
    start = str(_at(settings, "model", "init_from") or "")
    data = ModelCardData(
        license=options.license,
        license_name=options.license_name or None,
        license_link=options.license_link or None,
        language=list(languages) or None,
        library_name=LIBRARY,
        pipeline_tag=_pipeline(set().union(*(source.tasks for source in sources))),
        base_model=start.removeprefix("hf://").partition("@")[0] if start.startswith("hf://") else None,
        datasets=sorted({source.dataset for source in sources if source.dataset}) or None,
    )
    return str(data.to_yaml())


def _pipeline(tasks: set[str]) -> str:
    """The hub's name for what a model does, of the tasks that it was trained on."""
    if tasks and tasks <= {"A1T1"}:
        return "automatic-speech-recognition"
    if tasks and tasks <= {"T1A1"}:
        return "text-to-speech"
    if tasks and all(task.endswith(("T1", "T2")) for task in tasks):
        return "audio-text-to-text"
    return "audio-to-audio"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# --- the model ----------------------------------------------------------------------------------------------------------


def _about(model: Path, config: ModelConfig, adapters: Sequence[str]) -> str:
    file, dtype = open_safetensors(model / WEIGHTS), stored_dtype(model)
    values = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    decoder, encoder, codec = config.decoder, config.encoder, CODECS.get(config.codec) if config.codec else None
    sound = f", {codec.sample_rate} Hz, {codec.frame_rate:.4g} frames a second" if codec is not None else ""
    rows = [
        (
            "decoder",
            f"{decoder.layers} layers of {decoder.width}, {decoder.heads} heads ({decoder.kv_heads} of keys and values)",
        ),
        ("encoder", f"{encoder.layers} layers of {encoder.width}"),
        ("streams", f"{config.layout.n_audio} of audio codes, one of text"),
        ("codec", f"{config.codec or 'none'}{sound}"),
        ("weights", f"{short(values)} values, {str(dtype).removeprefix('torch.') if dtype is not None else 'mixed'}"),
        *([("adapters", ", ".join(adapters))] if adapters else []),
    ]
    text = "A speech language model of the package `omni-speech`: it takes spoken or written questions and answers in text and"
    return f"{text} speech.\n\n{_table(('', ''), rows)}"


def _use(address: str, config: ModelConfig, adapters: Sequence[str]) -> str:
    adapted = f'\nlm.load_adapter("{adapters[0]}")  # generate(..., adapter="{adapters[0]}")' if adapters else ""
    return f"""## Use

```sh
pip install "omni-speech{EXTRAS.get(config.codec or "", "")}"
omni-infer ask question.wav --model {address}
```

```python
from omni import SpeechLM

lm = SpeechLM.from_pretrained("{address}"){adapted}
answer = lm.generate("question.wav")
print(answer.text)
answer.save("answer.wav")
```

The folder holds JSON and safetensors; nothing in it is run when it is read."""


# --- the run ------------------------------------------------------------------------------------------------------------


def _settings(run: Path) -> Mapping[str, Any]:
    found = read_yaml(run / CONFIG)
    return found if isinstance(found, Mapping) else {}


def _at(settings: Any, *keys: str) -> Any:
    for key in keys:
        settings = settings.get(key) if isinstance(settings, Mapping) else None
    return settings


def _name(path: str) -> str:
    """A file's or folder's name without the folders of this machine; addresses of the hub and of the web whole."""
    if path.startswith(("hf://", "https://")):
        return path.partition("?")[0]
    return path.rstrip("/").rpartition("/")[2] or path


def _trained(settings: Mapping[str, Any], run: Path | None) -> str:
    if run is None:
        return ""
    state = _state(run)
    start, preset = _at(settings, "model", "init_from"), _at(settings, "model", "preset")
    rows = [("start", f"`{_name(str(start))}`" if start else f"random weights of the preset {preset}")]
    if state:
        rows.append(("steps", f"{state['step']:,}"))
    if state.get("seconds"):
        processes = state.get("processes")
        rows.append(
            ("time", duration(state["seconds"]) + (f" in {processes} process{'es' * (processes > 1)}" if processes else ""))
        )
    for title, keys in {"precision": ("fabric", "precision"), "optimizer": ("optimizer", "name")}.items():
        if _at(settings, *keys):
            rows.append((title, str(_at(settings, *keys))))
    trainable = _at(settings, "trainable")
    if isinstance(trainable, list) and trainable != ["*"]:
        rows.append(("trainable", ", ".join(f"`{one}`" for one in trainable)))
    return f"## Training\n\n{_table(('', ''), rows)}"


def _state(run: Path) -> Mapping[str, Any]:
    """The state of the run's last checkpoint; empty where there is none that can be read."""
    place = newest(run / CHECKPOINTS)
    with suppress(UserError):
        return {} if place is None else read_state(place)
    return {}


def _sources(run: Path, settings: Mapping[str, Any]) -> Iterable[DataSource]:
    counts = _state(run).get("rows", {})
    for number, source in enumerate(_at(settings, "data", "sources") or ()):
        tasks = tuple(name for name, weight in (_at(source, "tasks") or {}).items() if weight)
        path, kind = str(_at(source, "path") or ""), str(_at(source, "kind") or UNKNOWN)
        rows = counts.get(f"the number of rows of data.sources[{number}]")
        yield _stored(path, tasks, rows) if path else DataSource(f"{kind}, made while training", tasks, rows)


def _stored(path: str, tasks: tuple[str, ...], rows: int | None) -> DataSource:
    """A source of prepared rows, by the report of their preparation and by the cards beside them and their origin."""
    report: Any = {}
    with suppress(OSError, ValueError):
        report = load_json(Path(path) / REPORT)
    report = report if isinstance(report, Mapping) else {}
    origin = str(report.get("source") or "")
    seconds = [report.get(f"{side}_seconds") for side in ("question", "answer")]
    licences = [_told_by_card(Path(place)) for place in (path, origin) if place and "://" not in place]
    hub = next((place for place in (path, origin) if place.startswith("hf://datasets/")), "")
    dataset = "/".join(hub.removeprefix("hf://datasets/").partition("@")[0].split("/")[:2])
    return DataSource(
        f"{_name(path)}, of {_name(origin)}" if origin and _name(origin) != _name(path) else _name(path),
        tasks,
        rows if rows is not None else report.get("rows"),
        sum(one for one in seconds if one) if any(one is not None for one in seconds) else None,
        next((license for license, _ in licences if license), ""),
        next((languages for _, languages in licences if languages), ()),
        dataset,
    )


def _told_by_card(place: Path) -> tuple[str, tuple[str, ...]]:
    """License and languages of a data set, by the front matter of its `README.md`, which comes with those of the hub."""
    from huggingface_hub import DatasetCard

    data: Mapping[str, Any] = {}
    with suppress(OSError, ValueError, TypeError):
        data = DatasetCard.load(place / CARD, ignore_metadata_errors=True).data.to_dict()

    def listed(key: str) -> tuple[str, ...]:
        value = data.get(key) or ()
        return (value,) if isinstance(value, str) else tuple(str(one) for one in value)

    return ", ".join(listed("license")), listed("language")


def _data(sources: Sequence[DataSource]) -> str:
    if not sources:
        return ""
    rows = [
        (
            source.name,
            UNKNOWN if source.rows is None else f"{source.rows:,}",
            UNKNOWN if source.seconds is None else duration(source.seconds),
            source.license or UNKNOWN,
            ", ".join(source.tasks) or UNKNOWN,
        )
        for source in sources
    ]
    return f"## Data\n\n{_table(('source', 'rows', 'speech', 'license', 'tasks'), rows)}"


def _figures(run: Path | None, settings: Mapping[str, Any]) -> Iterable[str]:
    table = [] if run is None else read_table(run / VALIDATION)
    if not table:
        return
    last = table[-1]
    rows = [
        (name.replace("_", " "), shown(name, value))
        for name, value in last.items()
        if name not in ("step", "seconds") and math.isfinite(value)
    ]
    number = _at(settings, "validation", "questions")
    of = f", on {counted(number, 'held-out row')} of its data" if number else ""
    yield f"## Validation\n\nThe run's own, at step {last['step']:.0f}{of}.\n\n{_table(('figure', 'value'), rows)}"


def _evaluation(model: Path, folder: Path) -> str:
    """The figures of an evaluation; UserError where it is of another model, or has not ended."""
    if not (folder / REPORT).is_file():
        raise UserError(f"--report {folder} holds no finished evaluation (it has no {REPORT}); name the --out of one")
    found = read_json(folder / REPORT, AGAIN)
    if found.get("model_hash") != model_hash(model):
        raise UserError(
            f"--report {folder} is of another model ({found.get('model')!r:.200}): evaluate {model}, or leave the report out"
        )
    rows = []
    for name, value in found.get("figures", {}).items():
        known = name in MEASURES
        one, low, high = (_shown(name, value.get(key), known) for key in ("value", "low", "high"))
        title = MEASURES[name].title if known else name.replace("_", " ")
        rows.append((title, one, f"{low} to {high}", str(value.get("questions", ""))))
    asr = f", heard by {_name(str(found['ear']))}" if found.get("ear") else ""
    asked = counted(int(found.get("answered", 0)), "question")
    text = f"{asked} of `{_name(str(found.get('data')))}`, asked as {found.get('task')}"
    broken = len(found.get("broken", ()))
    left = f" {counted(broken, 'broken row')} left out." if broken else ""
    return f"## Evaluation\n\n{text}{asr}.{left}\n\n{_table(('figure', 'value', '95 % interval', 'questions'), rows)}"


def _shown(name: str, value: float | None, known: bool) -> str:
    if value is None:
        return "-"
    return shown_measure(name, value) if known else percent(value, 2) if 0 <= value <= 1 else f"{value:.4g}"
