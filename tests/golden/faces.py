"""What the project shows to the outside, taken as it is now: each function makes one golden file, or compares with it.

All of them work in the folder that they are called in, from the golden folders of `model`, `rows`, `adapter` and `edits`.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import soundfile
import torch
from safetensors import safe_open

import omni
from omni import SpeechLM
from tests.golden import toys
from tests.golden.toys import MODEL, SPEAK, VOICE, done, recipe, tensors_in


def state_dicts() -> dict[str, Any]:
    """Of each configuration: the tensors of the file it is saved as, and that file's digest where every value is known.

    Presets with the keys of their configuration; what is like nano but for some tensors, with these, or null for none.
    """
    found: dict[str, Any] = {}
    nano: dict[str, Any] = {}
    for name, data in toys.configurations().items():
        toys.save_new(Path("new"), data)
        tensors: dict[str, Any] = tensors_in(Path("new") / MODEL)
        toys.refill(Path("new"))
        toys.save_again(Path("new"), Path("again"))
        found[name] = {"sha256": hashlib.sha256((Path("again") / MODEL).read_bytes()).hexdigest()}
        if name in toys.doors().presets:
            kept = {key: part for key, part in read("again/config.json")["model"].items() if key != "layout"}
            found[name] |= {"model": kept, "tensors": tensors}
            nano = tensors if name == "nano" else nano
        else:
            differ = {key: tensors.get(key) for key in sorted({*tensors, *nano}) if tensors.get(key) != nano.get(key)}
            found[name]["unlike nano"] = differ
        shutil.rmtree("new")
    return found


def save_model(folder: Path) -> None:
    """The golden model: the preset nano in small, which answers by codec2."""
    toys.save_new(folder, toys.shrunk(toys.doors().preset("nano"), width=4))
    toys.refill(folder, toys.speaking)


QUICK: dict[str, Any] = {"max_seconds": 0.4, "max_tokens": 10}
SPOKEN = torch.from_numpy(toys.sound(9600).astype("float32") / 32768)


def answers(adapter: str | None = None, edits: str | None = None) -> dict[str, Any]:
    """Ids of every stream for a written question, a spoken one, and a turn that follows it."""
    lm = SpeechLM.from_pretrained("model")
    more: dict[str, Any] = {}
    if adapter is not None:
        more["adapter"] = lm.load_adapter(adapter)
    if edits is not None:
        more["edits"] = toys.doors().load_edits(edits, lm.model)
    found = {
        "text": lm.generate("what is two plus three", "T1A2", **QUICK, **more),
        "sound": lm.generate(SPOKEN, "A1A2", sample_rate=16000, **QUICK, **more),
    }
    with lm.session(**QUICK, **more) as session:
        session.ask(SPOKEN, "A1A2", sample_rate=16000).answer()
        found["second turn"] = session.ask("and twice that", "T1A2").answer()
        session.save("conversation.safetensors")
    return {
        name: {"text": in_a_line(a.tokens), "codes": [in_a_line(stream) for stream in a.codes.tolist()], "ended": a.ended}
        for name, a in found.items()
        if a.codes is not None
    }


def in_a_line(ids: Iterable[int]) -> str:
    """Ids with spaces between."""
    return " ".join(map(str, ids))


def every_answer() -> dict[str, Any]:
    """Those of the model itself, with its adapter, with its edits, and with both."""
    return {
        "model": answers(),
        "adapter": answers(adapter="adapter"),
        "edits": answers(edits="edits"),
        "both": answers(adapter="adapter", edits="edits"),
    }


def prepare_rows(out: Path) -> None:
    """The toy table as rows."""
    toys.write_table(Path("source"))
    done("train data prepare source/table.jsonl", out, "--codec", "codec2", "--keep_answer_audio", "true", *ALONE)


ALONE = ("--workers", "0", "--progress", "off")


def rows_again(source: str, out: str) -> None:
    """Rows that are read and stored once more, as they are."""
    done("train data prepare", source, out, "--question_rate", "0", *ALONE)


def schema_of(folder: Path) -> dict[str, Any]:
    """Files of prepared rows, and names and types of their columns."""
    files = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    table = pq.read_schema(folder / "rows-00000.parquet")
    metadata = {key.decode(): structure(json.loads(value)) for key, value in (table.metadata or {}).items()}
    return {"files": files, "columns": {field.name: str(field.type) for field in table}, "metadata": metadata}


def fields_of(folder: Path) -> list[dict[str, Any]]:
    """Every row as plain data; recordings as their rate, length and digest, in whatever file format they stand."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping) and set(value) == {"bytes", "path"} and value["bytes"]:
            samples, rate = soundfile.read(io.BytesIO(value["bytes"]), dtype="int16")
            return {"rate": rate, "samples": len(samples), "sha256": hashlib.sha256(samples.tobytes()).hexdigest()[:16]}
        if isinstance(value, Mapping):
            return {name: plain(part) for name, part in value.items()}
        if isinstance(value, list) and value and all(isinstance(part, int) for part in value):
            return in_a_line(value)
        return [plain(part) for part in value] if isinstance(value, list) else value

    return [plain(row) for row in pq.read_table(folder / "rows-00000.parquet").to_pylist()]


def rows() -> dict[str, Any]:
    """The rows' files, columns and fields."""
    return {**schema_of(Path("rows")), "rows": fields_of(Path("rows"))}


def fit(name: str, **more: Any) -> dict[str, Any]:
    """Train one of the runs in `toys.RUNS`; which tensors its last checkpoint holds."""
    done("train fit", recipe(name, **more))
    return checkpoint_of(Path(name) / "checkpoints")


def checkpoint_of(folder: Path) -> dict[str, Any]:
    """Files of the checkpoint that is named as the last, and all its tensors; of the training state by parameter."""
    last = folder / (folder / "last").read_text().strip()
    files = sorted(str(file.relative_to(last)) for file in last.rglob("*") if file.is_file())
    tensors = {name: tensors_in(last / name) for name in files if name.endswith(".safetensors")}
    tensors["rng.safetensors"].pop("0.cuda", None)  # where there is a GPU
    state: dict[str, str] = {}
    for name, kind in tensors.pop("tensors/state.safetensors").items():
        part, _, parameter = name.partition(".")
        if part == "optimizer":
            parameter, _, key = parameter.rpartition(".")
            part = f"optimizer...{key}"
        state[parameter] = f"{state[parameter]}, {part} {kind}" if parameter in state else f"{part} {kind}"
    return {"last": last.name, "files": files, "tensors": tensors, "state": state}


def train() -> dict[str, Any]:
    """Make all runs; what their last checkpoints hold, and where the first one ends."""
    runs = {name: fit(name) for name in toys.RUNS}
    return {"end": last_loss(Path("whole")), "runs": runs}


def keep_checkpoint(run: Path, target: Path) -> None:
    """The checkpoint of a run's second step as if it were the last, without the times that it took."""
    step = "step-00000002"
    shutil.copytree(run / "checkpoints" / step, target / "checkpoints" / step)
    (target / "checkpoints" / "last").write_text(f"{step}\n")
    state = target / "checkpoints" / step / "state.json"
    data = read(state)
    timed = {"seconds": 0.0, "saved": [0, 0.0], "meters": [[0.0] * len(sums) for sums in data["meters"]]}
    assert timed.keys() <= data.keys()
    state.write_text(json.dumps(data | timed) + "\n")


def last_loss(run: Path) -> dict[str, float]:
    """Step and loss of the last row of the log."""
    with open(run / "metrics.csv", newline="") as file:
        row = list(csv.DictReader(file))[-1]
    return {"step": float(row["step"]), "loss": float(row["loss"])}


WHISPER = {"mode": "padded", "window_seconds": 30.0}
"""How mini-omni hears."""


def exports() -> dict[str, Any]:
    """Folders in other projects' formats: files, settings, names and shapes."""
    done("train convert model hugging --kind hf --quiet")
    qwen = toys.shrunk(toys.doors().preset("qwen2-0.5b-omni"))
    theirs = toys.doors().preset("qwen2-0.5b-omni")["layout"]["streams"]
    qwen |= {"layout": {**qwen["layout"], "streams": theirs}, "encoder": {**qwen["encoder"], **WHISPER}}
    toys.save_new(Path("qwen"), qwen)
    done("train convert qwen mini-omni --kind mini-omni --quiet")
    found: dict[str, Any] = {
        "huggingface": {"config.json": read("hugging/config.json"), MODEL: tensors_in(Path("hugging") / MODEL)},
        "mini-omni": {},
        "adapter": {"adapter_config.json": read("lora/adapter/adapter_config.json")},
    }
    found["adapter"]["adapter_model.safetensors"] = tensors_in(Path("lora/adapter/adapter_model.safetensors"))
    found["mini-omni"]["model_config.yaml"] = Path("mini-omni/model_config.yaml").read_text().splitlines()
    for name in ("lit_model.pth", "small.pt"):
        state = torch.load(Path("mini-omni") / name, weights_only=True)
        found["mini-omni"][name] = {"keys": sorted(state)} if name == "small.pt" else {}
        tensors = state["model_state_dict"] if name == "small.pt" else state
        found["mini-omni"][name] |= {key: f"{t.dtype} {list(t.shape)}" for key, t in sorted(tensors.items())}
    for name, folder in (("huggingface", "hugging"), ("mini-omni", "mini-omni"), ("adapter", "lora/adapter")):
        found[name]["files"] = sorted(os.listdir(folder))
    shutil.rmtree("mini-omni")
    shutil.rmtree("qwen")
    return found


def structure(value: Any) -> Any:
    """Keys and types of plain data, without its values; a list's entries as those that differ."""
    if isinstance(value, Mapping):
        return {name: structure(part) for name, part in sorted(value.items())}
    if isinstance(value, list):
        kinds = {json.dumps(structure(part)): structure(part) for part in value}
        return [kinds[kind] for kind in sorted(kinds)]
    return "null" if value is None else type(value).__name__


def read(file: str | Path) -> Any:
    """The data of a JSON file, or of every line of one of JSON lines."""
    text = Path(file).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line] if Path(file).suffix == ".jsonl" else json.loads(text)


def teach(out: str) -> None:
    """The golden edits: two facts in eight steps."""
    Path("facts.jsonl").write_text("".join(json.dumps(fact) + "\n" for fact in toys.FACTS))
    words = ("--finetune.each", "2", "--finetune.rank", "2", "--finetune.steps", "8", "--finetune.lr", "0.05")
    done("train edit apply model facts.jsonl", out, *SPEAK, *words)


def written(folder: str, names: Iterable[str]) -> dict[str, Any]:
    """The structure of a folder's files."""
    return {f"{folder}/{name}": structure(read(Path(folder) / name)) for name in names}


def json_outputs() -> dict[str, Any]:
    """Everything that a command prints or writes as JSON, by keys and types; the runs of `toys.RUNS` must be there."""
    toys.write_sound(Path("question.wav"), 9600)
    short = "--max_seconds 0.2 --max_tokens 6"
    found: dict[str, Any] = {}
    asked = done(f"infer ask question.wav --model model --json --out answer.wav --device cpu {short}")
    found["infer ask --json"] = structure(json.loads(asked))
    bench = done("infer bench --model model --json --seconds 0.3 --answer_seconds 0.2 --repeat 1 --threads 1 --device cpu")
    found["infer bench --json"] = structure(json.loads(bench))
    found["infer bench --json"]["load"] = "float or null"
    plan = done("train plan", recipe("whole"), "--json", "--gpu", "H100", "--gpu_gib", "80")
    found["train plan --json"] = structure(json.loads(plan))
    found |= data_outputs() | eval_outputs(short) | edit_outputs()
    found["train fit: state.json"] = structure(read("muon/checkpoints/step-00000001/state.json"))
    lora = next(Path("lora/checkpoints").glob("step-*4/state.json"))
    found["train fit: state.json: config.lora"] = structure(read(lora)["config"]["lora"])
    found["train fit: validation/step-*.jsonl"] = structure(read(next(Path("whole/validation").glob("*.jsonl"))))
    found["model: config.json"] = structure(read("whole/model/config.json"))
    done("train validate whole/model --config", recipe("whole"), "--answers", "asked.jsonl")
    found["train validate --answers"] = structure(read("asked.jsonl"))
    config = recipe("compared", budget={"steps": 1}, balance={"method": "equal"}, validation=JUDGED)
    done("train balance", config, "--methods", "equal,dwa", "--seeds", "1", "--out", "balance")
    found |= written("balance", ["balance.json"])
    return found


JUDGED = {"questions": 1, "tasks": ["A1T1"], "max_seconds": 0.2}


def data_outputs() -> dict[str, Any]:
    """Of `train data`."""
    found = written("prepared", ["report.json", "settings.json"])
    done("train data stats rows --out stats --model model --progress off")
    found |= written("stats", ["stats.json"])
    shutil.copytree("rows", "doubled")
    shutil.copy("rows/rows-00000.parquet", "doubled/rows-00001.parquet")
    code, text = toys.command("train data validate doubled --report v/report.json --findings v/findings.jsonl --progress off")
    assert code in (0, 1), text
    found |= written("v", ["report.json", "findings.jsonl"])
    Path("rules.yaml").write_text("answer_chars: {min: 4}\n")
    done("train data filter rows kept --rules rules.yaml --progress off")
    found |= written("kept", ["report.json", "dropped.jsonl"])
    return found


def eval_outputs(short: str) -> dict[str, Any]:
    """Of `train eval`: of somebody's rows, of VoiceBench's, and of two evaluations side by side."""
    words = f"{short} --timed 1 --batch 2 --progress off"
    done(f"train eval model source/table.jsonl --out e1 --text --text_before model --limit 5 {words}")
    found = written("e1", ["run.json", "report.json", "answers.jsonl", "timings.jsonl", "text.jsonl", "text_before.jsonl"])
    bench = {"prompt": "one and two", "reference": "three", "key": 1}
    Path("source/bench.jsonl").write_text(json.dumps({"audio": "qa.wav", **bench}) + "\n")
    done(f"train eval model source/bench.jsonl --out e2 --read.format voicebench {words}")
    found |= written("e2", ["report.json", "voicebench.jsonl"])
    done("train eval --compare e1 e1 --out both")
    return found | written("both", sorted(file.name for file in Path("both").glob("*.json")))


def edit_outputs() -> dict[str, Any]:
    """Of `train edit`."""
    words = ("--voices", "1", "--max_seconds", "0.2", *SPEAK)
    done("train edit eval model taught facts.jsonl judged", *words)
    found = written("taught", ["edits.json"]) | written("judged", ["report.json", "answers.jsonl"])
    config = {
        "model": "model", "out": "editor", "data": {"sources": toys.RECIPE["data"]["sources"]}, "steps": 1, "accumulate": 1,
        "others": 1, "rephrase": VOICE, "mend": {"transform": {"rank": 2}},
    }  # fmt: skip
    Path("editor.yaml").write_text(json.dumps(config))
    done("train edit fit editor.yaml")
    done("train edit merge model taught merged")
    found |= written("editor", sorted(str(f.relative_to("editor")) for f in Path("editor").rglob("*.json")))
    return found | written("merged", ["config.json"])


def tensor_files() -> dict[str, Any]:
    """Names, types and shapes of the other files of tensors: edits, an editor, a conversation, and the head of this one."""
    answers()
    files = [*Path("editor").rglob("*.safetensors"), Path("taught/edits.safetensors"), Path("conversation.safetensors")]
    found: dict[str, Any] = {str(file): tensors_in(file) for file in sorted(files)}
    with safe_open("conversation.safetensors", framework="pt") as file:
        head = {key: structure(json.loads(value)) for key, value in file.metadata().items()}
    return {**found, "conversation.safetensors: head": head}


def csv_headers() -> dict[str, list[str]]:
    """The first line of every CSV file that a command writes."""
    files = ["prepared/broken.csv", "muon/metrics.csv", "muon/validation.csv", "muon/balance.csv", "muon/unused.csv"]
    found = {}
    for name in [*files, "whole/metrics.csv", "whole/validation.csv"]:
        with open(name, newline="", encoding="utf-8") as file:
            found[name] = next(csv.reader(file))
    return found


DOORS = {
    "train": "fit demo validate plan doctor convert push eval balance data edit",
    "train data": "prepare answers validate stats listen filter",
    "train edit": "apply eval merge revert fit",
    "infer": "ask bench quantize",
}


def helps() -> dict[str, str]:
    """What `--help` says of every command, 100 columns wide."""
    lines = [*DOORS, *(f"{door} {name}" for door, names in DOORS.items() for name in names.split()), "train eval --compare A B"]
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    try:
        texts = {line: done(line, "--help") for line in sorted(lines)}
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before
    whole = texts["train fit"]
    return {line: "as train fit" if text == whole and line != "train fit" else text for line, text in texts.items()}


def public_names() -> dict[str, list[str]]:
    """What `omni` offers."""
    return {"__all__": sorted(omni.__all__), "dir": dir(omni)}
