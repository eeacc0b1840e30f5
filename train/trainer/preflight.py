"""Checks a run before it starts: what its configuration names must exist, and its patterns must match something.

All that is missing is reported at once, before any weights are read: patterns are tried on a model without values, made from
the configuration of the folder that the run starts from.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import torch

from omni.checkpoint.folder import CODEC, check_files
from omni.codec.registry import CODECS
from omni.config import ModelConfig
from omni.errors import UserError
from omni.lora import peft
from omni.lora.attach import add_adapter, targets_of
from omni.model.linears import chosen_linears, tied_names
from omni.model.multitask_projector import SHARING
from omni.model.speech_model import SpeechModel
from omni.stores.reading import local_path
from omni.tasks import find_task
from omni.utils.arguments import match_names
from omni.utils.remote import check_there
from train.checkpoint import retention
from train.checkpoint.upload import check_upload
from train.config.run import FitConfig, plain_config
from train.config.sections import LORA, FabricConfig
from train.console.command import check_folder_to_be
from train.data.augment import noise_files
from train.data.build import sources_held_out
from train.data.config import DataConfig
from train.data.rows.files import ROWS, find_files, missing_parts, sample_rows
from train.data.sources.streams import StreamSource
from train.distributed.sharding import check_divides
from train.objective.config import untrained
from train.trainer.initial_model import check_tokenizer, shape_of
from train.trainer.parts import CALLBACKS

PROCESSES_A_CORE = 4
"""Most processes a core: with more, they wait for each other longer than they compute."""
WORKERS_A_CORE = 8
"""Most data workers a core."""


def check_start(config: FitConfig) -> list[str]:
    """Refuses (UserError, a line for each, with its key) a configuration that names files, folders or parameters that do not
    exist, or tasks that no row can serve; returns notes on rows that lack a part which a task of their source needs."""
    problems = _Problems()
    with problems.of("run_folder"):
        check_folder_to_be(Path(config.run_folder or "."), "run_folder")
    _check_model_files(config, problems)
    _check_data_files(config.data, problems)
    if config.checkpoint.upload is not None:
        with problems.of("checkpoint.upload"):
            check_upload(config.checkpoint.upload)
    for name in config.callbacks:
        with problems.of("callbacks"):
            CALLBACKS.find(name, "callbacks")
        if config.callbacks.count(name) > 1:
            problems.add("callbacks", f"callbacks names {name} twice; leave one out")
    notes = _check_rows(config.data, problems, config.objective.encoder_alone)
    if config.validation.questions:
        with problems.of("validation.questions"):
            sources_held_out(config.data)
    with problems.of("model"):
        shape = shape_of(config.model)
        _check_tools(config, shape, problems)
        _check_teacher(config, shape, problems)
        _check_patterns(config, shape, problems)
        if config.fabric.tensor_parallel > 1:
            with problems.of("fabric.tensor_parallel"):
                check_divides(shape.decoder, config.fabric.tensor_parallel)
    problems.tell()
    return notes


def check_resume(config: FitConfig, configured: FitConfig | None = None) -> None:
    """Refuses a folder that holds anything but a run (`retention.check_run_folder`), and a configuration other than that of
    the run's last checkpoint, before a model is built. `configured` is the configuration before the processes made its
    batch larger."""
    folder = Path(config.run_folder)
    retention.check_run_folder(folder, config.resume == "restart")
    checkpoint = retention.newest(folder / "checkpoints")
    if checkpoint is None or config.resume not in ("auto", "extend"):
        return
    before = retention.read_state(checkpoint)["config"]
    count, now = before.get("data", {}).get("micro_batches"), config.data.micro_batches
    if configured is not None and now != count == configured.data.micro_batches:
        raise UserError(
            f"the processes cannot share data.micro_batches {count} evenly and would take {now}, but the run in {folder} was "
            f"started with {count}; start a number of processes that divides it, or give --resume force"
        )
    retention.check_resumable(folder, (before,), (plain_config(config),), config.resume == "extend")


def check_machine(config: FitConfig) -> None:
    """Refuses (UserError) what this machine lacks: devices, cores for processes and data workers, packages."""
    problems, cores = _Problems(), os.cpu_count() or 1
    with problems.of("fabric"):
        _check_devices(config.fabric)
    rules = {config.optimizer.name, *(group.rule for group in config.optimizer.groups)}
    coded = {
        "optimizer paged_adamw_8bit": "paged_adamw_8bit" in rules,
        "a quantised base": config.lora and config.lora.quantize,
    }
    for user in [user for user, needed in coded.items() if needed and find_spec("bitsandbytes") is None]:
        problems.add(user, f"{user} needs the package bitsandbytes: pip install bitsandbytes")
    if config.log.wandb and find_spec("wandb") is None:
        problems.add("log.wandb", "log.wandb needs the package wandb: pip install wandb, or leave it out")
    workers, most = config.data.workers, max(8, WORKERS_A_CORE * cores)
    if workers > most:
        there = f"there are {cores} core(s) here, for at most {most} workers; give a number from 0 to {most}"
        problems.add("data.workers", f"data.workers is {workers}, but {there}")
    problems.tell()


@dataclass
class _Problems:
    """Collects what is missing, each thing once."""

    lines: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def of(self, key: str) -> Iterator[None]:
        """Notes a UserError of the block under the key that it is about; of several keys with one error, under the first."""
        try:
            yield
        except UserError as error:
            self.add(key, str(error))

    def add(self, key: str, text: str) -> None:
        """Notes a problem under a key, unless it is known."""
        self.lines.setdefault(text, key)

    def tell(self) -> None:
        """Raises all errors that were noted as one UserError; does nothing where there are none."""
        lines = [text if text.startswith(key) else f"{key}: {text}" for text, key in self.lines.items()]
        if len(lines) == 1:
            raise UserError(lines[0])
        if lines:
            raise UserError("\n".join([f"{len(lines)} things are lacking:", *(f"  {line}" for line in lines)]))


def _check_devices(fabric: FabricConfig) -> None:
    """Processes that torchrun or srun has started are not counted."""
    wanted, gpus, mac = fabric.accelerator, torch.cuda.device_count(), torch.backends.mps.is_available()
    if not gpus and (wanted == "cuda" or (wanted == "gpu" and not mac)):
        raise UserError(f"fabric.accelerator is {wanted}, but PyTorch finds no GPU here; use cpu, or auto")
    on_cpu = wanted == "cpu" or (wanted == "auto" and not gpus and not mac)
    if on_cpu and fabric.precision == "16-mixed":
        raise UserError("fabric.precision is 16-mixed, which a CPU does not compute in; use bf16-mixed, or 32-true")
    if on_cpu and (str(fabric.devices) == "-1" or "," in str(fabric.devices)):
        raise UserError(f"fabric.devices is {fabric.devices}; on a CPU give a number of processes, or auto")
    started = not {"TORCHELASTIC_RUN_ID", "SLURM_NTASKS"}.isdisjoint(os.environ)
    if started or fabric.processes is None or wanted not in ("auto", "cpu", "cuda", "gpu") or (mac and wanted != "cpu"):
        return
    on_gpu, listed = gpus > 0 and wanted != "cpu", [int(device) for device in str(fabric.devices).split(",")]
    most = gpus if on_gpu else max(8, PROCESSES_A_CORE * (os.cpu_count() or 1))
    fits = all(0 <= device < most for device in listed) if len(listed) > 1 else 1 <= listed[0] <= most
    if not fits:
        available = f"{gpus} GPU(s)" if on_gpu else f"{os.cpu_count()} core(s), for at most {most} processes"
        raise UserError(f"fabric.devices is {fabric.devices}, but there are {available} here; give a number from 1 to {most}")


# --- files ----------------------------------------------------------------------------------------------------------------


def _check_model_files(config: FitConfig, problems: _Problems) -> None:
    section, lora = config.model, config.lora
    if section.start is not None:
        with problems.of("model"):
            check_files(section.start)
    files = {"tokenizer": (section.tokenizer, "the model's tokenizer.json", Path.is_file)}
    files["codec folder"] = section.codec_folder, "the folder of the codec's weights", Path.is_dir
    for noun, (path, way, fits) in files.items():
        if path is not None:
            with problems.of(f"model.{noun.replace(' ', '_')}"):
                check_there(path, noun, f"{noun} {path} does not exist; give {way}", fits)
    if lora is not None and lora.init_from is not None:
        with problems.of("lora.init_from"):
            peft.check_folder(lora.init_from)


def _check_data_files(data: DataConfig, problems: _Problems) -> None:
    for i, source in enumerate(data.sources):
        for name, path in (*(("path", folder) for folder in source.folders), ("held_out", source.held_out)):
            if isinstance(path, str) and not (source.kind == "stream" and name == "path"):
                with problems.of(f"data.sources.{i}.{name}"):
                    find_files(path)
        with problems.of(f"data.sources.{i}"):
            source.made.check()
    augment = data.augment
    if augment is not None and augment.noise_snr_db is not None and augment.noise_folder is not None:
        with problems.of("data.augment.noise_folder"):
            noise_files(augment.noise_folder)


def _check_rows(data: DataConfig, problems: _Problems, heard_only: bool) -> list[str]:
    """Checks rows of each source that reads files: a task that none of them can serve is an error, that some cannot a note."""
    notes = []
    for i, source in enumerate(data.sources):
        if not source.folders:
            continue
        with problems.of(f"data.sources.{i}"):
            first = source.folders[0]
            rows = StreamSource(first, source.read).sample(ROWS) if source.kind == "stream" else sample_rows(first)
            missing = missing_parts(rows, source.mixtures, heard_only)
            for (task, part), count in missing.items():
                looked = f"{len(rows)} rows looked at in {first}"
                if count == len(rows):
                    way = "" if heard_only else "; the encoder alone needs only their sound (objective.align_first 1)"
                    text = f"none of {looked} has {part}, which task {task} needs: take {task} out, or complete the rows{way}"
                    problems.add(f"data.sources.{i}.tasks", text)
                else:
                    then = "is left out" if data.broken == "skip" else "ends the run"
                    text = f"{count} of {looked} have no {part}, which task {task} needs"
                    notes.append(f"data.sources.{i}: {text}; with data.broken {data.broken} such a row {then}")
    return notes


def _check_tools(config: FitConfig, shape: ModelConfig, problems: _Problems) -> None:
    """Checks tokenizer, codec (which checks the codes of spoken answers, and decodes in validation) and projector's tasks."""
    section = config.model
    with problems.of("model.tokenizer"):
        check_tokenizer(section, shape)
    own = section.start is not None and (local_path(section.start) / CODEC).is_dir()
    drawn = config.data.drawn if not config.objective.encoder_alone else ()
    spoken = sorted(name for name in drawn if find_task(name).audio)
    if spoken and CODECS.find(shape.codec).weights and section.codec_folder is None and not own:
        way = "--codec NAME --talker 4" if shape.codec == "none" else "--codec_folder, or name their folder"
        text = f"task {spoken[0]} answers in speech, but no weights of the codec {shape.codec!r} are given"
        problems.add("model.codec_folder", f"{text}; put them into the model (omni-train convert ... {way})")
    known = shape.projector.tasks
    for task in map(find_task, sorted(config.data.drawn) if shape.projector.kind in SHARING else ()):
        if task.question == "audio" and task.name not in known:
            text = f"data.sources have the task {task.name}, but model.projector.tasks are {', '.join(known)}; name it there"
            problems.add("data.sources", text)


def _check_teacher(config: FitConfig, shape: ModelConfig, problems: _Problems) -> None:
    """Checks what the encoder is distilled from; that it is trained is checked with the patterns."""
    weight, lacking = config.objective.distill_weight, list[str]()
    if config.model.init_from is None:
        lacking.append("model.init_from is missing, whose encoder is the teacher: name a model folder")
    if not shape.encoder.streams:
        lacking.append("the encoder hears whole clips, as its teacher: set model.encoder.mode chunked")
    for why in lacking if weight > 0 else ():
        problems.add("objective.distill_weight", str(untrained("distill", weight, why)))


# --- patterns ---------------------------------------------------------------------------------------------------------


def _check_patterns(config: FitConfig, shape: ModelConfig, problems: _Problems) -> None:
    """Checks each pattern by itself."""
    lora, before = config.lora, len(problems.lines)
    with torch.device("meta"):
        model = SpeechModel(shape)
    if lora is not None:
        for pattern in lora.quantize_targets if lora.quantize is not None else ():
            with problems.of("lora.quantize_targets"):
                chosen_linears(model, [pattern])
        for pattern in lora.targets if lora.init_from is None else ():
            with problems.of("lora.targets"):
                targets_of(model, [pattern])
    names, also, learning = [name for name, _ in model.named_parameters()], tied_names(model), set[str]()
    where = "trainable" if lora is None else "lora.trainable"
    for pattern in config.trainable_patterns:
        if pattern != LORA:
            with problems.of(where):
                learning |= match_names([pattern], names, where, also=also)
    if len(problems.lines) > before or (lora is not None and lora.init_from is not None):
        return  # which parameters are trainable is not known
    if lora is not None:
        add_adapter(model, lora)
        learning |= match_names([LORA], [name for name, _ in model.named_parameters()], where)
    weight = config.objective.distill_weight
    if weight > 0 and not any(name.startswith("encoder.") for name in learning):
        why = f"nothing of the encoder is trained: name encoder.* in {'trainable' if lora is None else 'lora.targets'}"
        problems.add("objective.distill_weight", str(untrained("distill", weight, why)))
    for group in config.optimizer.groups:
        with problems.of("optimizer.groups"):
            match_names([group.pattern], sorted(learning), "optimizer.groups", also=also)
