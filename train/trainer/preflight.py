"""Checks a run before it starts: what its configuration names must exist, and its patterns must match something. Makes the
fullest batch that it may meet, by which memory is planned and measured.

All that is missing is reported at once, before any weights are read: patterns are tried on a model without values, made from
the configuration of the folder that the run starts from.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch

from omni.checkpoint.folder import CODEC, check_sizes
from omni.codec.registry import CODECS
from omni.config import ModelConfig
from omni.errors import UserError
from omni.layout import IGNORE
from omni.lora import peft
from omni.lora.attach import add_adapter, targets_of
from omni.model.linears import chosen_linears, tied_names
from omni.model.multitask_projector import SHARING
from omni.model.speech_model import SpeechModel
from omni.stores.reading import local_path
from omni.tasks import TASKS, find_task
from omni.utils.arguments import match_names
from omni.utils.remote import check_there
from train.checkpoint import retention
from train.checkpoint.upload import check_upload
from train.config.run import FitConfig, plain_config
from train.config.sections import LORA, FabricConfig
from train.console.command import check_folder_to_be
from train.data.augment import noise_files
from train.data.batching.batch import Batch
from train.data.build import sources_held_out
from train.data.config import DataConfig, tasks_of
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
                raise UserError(f"callbacks names {name} twice; leave one out")
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
    the run's last checkpoint, before a model is built. `given` is the configuration before the processes made its batch
    larger."""
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


def check_packages(config: FitConfig) -> None:
    """Refuses (UserError) weights or an optimizer in 8 bits or less, or a report to wandb, without their package."""
    rules = {config.optimizer.name, *(group.rule for group in config.optimizer.groups)}
    wanted = {"optimizer paged_adamw_8bit": "paged_adamw_8bit" in rules}
    wanted["a quantised base"] = config.lora is not None and config.lora.quantize is not None
    for user in [user for user, needed in wanted.items() if needed and find_spec("bitsandbytes") is None]:
        raise UserError(f"{user} needs the package bitsandbytes: pip install bitsandbytes")
    if config.log.wandb and find_spec("wandb") is None:
        raise UserError("log.wandb needs the package wandb: pip install wandb, or leave it out")


def check_workers(config: FitConfig) -> None:
    """Refuses (UserError) more data workers than this machine's CPU can run."""
    data = config.data
    most = max(8, WORKERS_A_CORE * (os.cpu_count() or 1))
    if data.workers > most:
        raise UserError(
            f"data.workers is {data.workers}, but there are {os.cpu_count()} core(s) here, for at most {most} workers; give a "
            f"number from 0 to {most}"
        )


class _Problems:
    """Collects what is missing, each thing once."""

    def __init__(self) -> None:
        self.lines: dict[str, str] = {}

    @contextmanager
    def of(self, key: str) -> Iterator[None]:
        """Notes a UserError of the block under the key that it is about; of several keys with one error, under the first."""
        try:
            yield
        except UserError as error:
            self.lines.setdefault(str(error), key)

    def tell(self) -> None:
        """Raises all errors that were noted as one UserError; does nothing where there are none."""
        lines = [text if text.startswith(key) else f"{key}: {text}" for text, key in self.lines.items()]
        if len(lines) == 1:
            raise UserError(lines[0])
        if lines:
            raise UserError("\n".join([f"{len(lines)} things are lacking:", *(f"  {line}" for line in lines)]))


# --- devices --------------------------------------------------------------------------------------------------------------


def check_devices(fabric: FabricConfig) -> None:
    """Refuses (UserError) devices that this machine lacks, and more processes than its CPU can run; processes that torchrun or
    srun has started are not counted."""
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
            check_sizes(section.start)
    if section.tokenizer is not None:
        with problems.of("model.tokenizer"):
            otherwise = f"tokenizer {section.tokenizer} does not exist; give the model's tokenizer.json"
            check_there(section.tokenizer, "tokenizer", otherwise, Path.is_file)
    if section.codec_folder is not None:
        with problems.of("model.codec_folder"):
            otherwise = f"codec folder {section.codec_folder} does not exist; give the folder of the codec's weights"
            check_there(section.codec_folder, "codec folder", otherwise, Path.is_dir)
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
    """Checks some rows of each source that reads files: a task that none of them can serve is an error, that some cannot a
    note."""
    notes = []
    for i, source in enumerate(data.sources):
        if not source.folders:
            continue
        with problems.of(f"data.sources.{i}"):
            stream = source.kind == "stream"
            first = source.folders[0]
            rows = StreamSource(first, source.read).sample(ROWS) if stream else sample_rows(first)
            missing = missing_parts(rows, source.mixtures, heard_only)
            for task, part, count in [(task, part, n) for task, parts in missing.items() for part, n in parts.items()]:
                looked = f"{len(rows)} rows looked at in {first}"
                if count == len(rows):
                    way = "" if heard_only else "; the encoder alone needs only their sound (objective.align_first 1)"
                    text = f"none of {looked} has {part}, which task {task} needs: take {task} out, or complete the rows{way}"
                    problems.lines.setdefault(text, f"data.sources.{i}.tasks")
                    continue
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
        with problems.of("model.codec_folder"):
            raise UserError(
                f"task {spoken[0]} answers in speech, but no weights of the codec {shape.codec!r} are given; name their "
                "folder, or put them into the model folder (omni-train convert ... --codec_folder)"
            )
    projector = shape.projector
    for name in sorted(config.data.drawn) if projector.kind in SHARING else ():
        task = find_task(name)
        if task.question == "audio" and task.name not in projector.tasks:
            with problems.of("data.sources"):
                raise UserError(
                    f"data.sources have the task {name}, but model.projector.tasks are {', '.join(projector.tasks)}; name it "
                    "there"
                )


def _check_teacher(config: FitConfig, shape: ModelConfig, problems: _Problems) -> None:
    """Checks what the encoder is distilled from; that it is trained is checked with the patterns."""
    weight, key = config.objective.distill_weight, "objective.distill_weight"
    if weight > 0 and config.model.init_from is None:
        with problems.of(key):
            raise untrained("distill", weight, "model.init_from is missing, whose encoder is the teacher: name a model folder")
    if weight > 0 and not shape.encoder.streams:
        with problems.of(key):
            raise untrained("distill", weight, "the encoder hears whole clips, as its teacher: set model.encoder.mode chunked")


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
        way = "trainable" if lora is None else "lora.targets"
        with problems.of("objective.distill_weight"):
            raise untrained("distill", weight, f"nothing of the encoder is trained: name encoder.* in {way}")
    for group in config.optimizer.groups:
        with problems.of("optimizer.groups"):
            match_names([group.pattern], sorted(learning), "optimizer.groups", also=also)


# --- the fullest batch ------------------------------------------------------------------------------------------------


PROMPT = 4
"""Columns of a spoken question's example beside the question itself: input, end, the marker, and one of the answer."""

PADDED_COLUMNS = 256
"""Columns of an example where every clip costs the encoder its whole window, however short (`EncoderConfig.fixed_length`)."""


def worst_batch(data: DataConfig, shape: ModelConfig) -> Batch:
    """A batch that no batch of the run exceeds: all rows full, every stream that any task of the mixture trains supervised in
    every column, and, where any task asks by speech, clips as long as the window and the rows have room for.

    Columns of data belong to a sound or to an answer, these to both: answers cost little beside the decoder's columns, since
    logits are made in chunks. Where clips have a fixed length there is one to `PADDED_COLUMNS` columns.
    """
    rows, length, layout = data.packing.rows, data.packing.length, shape.layout
    tasks = tasks_of(data)
    trained = torch.tensor([any(t.trained(layout)[k] for t in tasks) for k in range(len(layout))])
    tokens = layout.ids("pad")[None, :, None].repeat(rows, 1, length)
    targets = torch.where(trained[None, :, None], torch.zeros_like(tokens), torch.full_like(tokens, IGNORE))
    index = torch.full((rows, length), -1)
    segments = torch.zeros(rows, length, dtype=torch.long)
    frames: list[int] = []
    heard = clips_of(length, shape) if any(task.question == "audio" for task in tasks) else []
    features = 0
    for row in range(rows):
        start = 0
        for number, count in enumerate(heard):
            index[row, start + 1 : start + 1 + count] = torch.arange(features, features + count)
            segments[row, start:] = number
            frames.append(min(count * shape.projector.stack, shape.encoder.positions))
            features += count
            start += count + PROMPT
    lengths = [shape.encoder.feature_frames(n) for n in frames]
    spelt = shape.ctc > 1 and data.alignment != "none"
    return Batch(
        tokens=tokens,
        targets=targets,
        feature_index=index,
        segments=segments,
        task=torch.full((rows, length), list(TASKS).index(tasks[-1].name)),
        inputs=torch.zeros(len(frames), shape.encoder.bands, max(lengths, default=0)),
        input_lengths=lengths,
        frames=frames,
        transcripts=[_transcript(max(1, n // 4), shape) if spelt else [] for n in frames],
        examples=rows * max(1, len(heard)),
        positions=rows * length,
        state={},
    )


def _transcript(count: int, shape: ModelConfig) -> list[int]:
    """`count` ids of each spelling."""
    sounds = shape.ctc_sounds - 1
    return [1 + i % (shape.ctc - 1) for i in range(count)] + [shape.ctc + 1 + i % sounds for i in range(count) if sounds > 0]


def clips_of(length: int, shape: ModelConfig) -> list[int]:
    """Number of features of each clip of a full row."""
    longest = math.ceil(shape.encoder.positions / shape.projector.stack)
    each = min(longest + PROMPT, PADDED_COLUMNS if shape.encoder.fixed_length else length, length)
    whole, rest = divmod(length, each)
    columns = [each] * whole + ([rest] if rest > PROMPT else [])
    return [max(1, n - PROMPT) for n in columns if n > PROMPT]
