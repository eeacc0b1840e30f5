"""Sections of a run's configuration: frozen dataclasses, read without PyTorch."""

from __future__ import annotations

import math
import re
from dataclasses import field, replace
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from omni.codec.registry import CODECS
from omni.config import preset
from omni.errors import UserError
from omni.generate.options import Tokens
from omni.lora.config import LoRAConfig
from omni.pretrained import find_model
from omni.tasks import find_task
from omni.utils.configuration import Share, configuration
from omni.utils.process import importing

LORA = "*.lora.*"
"""Names of adapters' parameters."""


@configuration
class LoRASection(LoRAConfig):
    """Low-rank adapters instead of the weights themselves; see `omni.lora.attach`.

    Attributes:
        targets: names of the linears that get an adapter: shell patterns, or regular expressions after `re:`.
        rank, alpha, dropout: of each pair; its product counts alpha / rank.
        rank_stabilized: it counts alpha / sqrt(rank) instead.
        trainable: names of other parameters that are trained besides, whole.
        init_from: a PEFT folder to start from instead of new adapters; targets, rank and alpha are then its own.
        quantize: hold the base's weights as `nf4` (4 bits, double quantisation) or `int8`; needs bitsandbytes.
        quantize_targets: names of the linears whose weights are quantised.
        merged: also write the model with the adapter in its weights at the end, as a run without lora does.
    """

    trainable: tuple[str, ...] = ()
    init_from: str | None = None
    quantize: Literal["nf4", "int8"] | None = None
    quantize_targets: tuple[str, ...] = ("decoder.blocks.*",)
    merged: bool = True


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


@configuration
class FabricConfig:
    """Devices, processes and precision of the run, by Lightning Fabric.

    Attributes:
        accelerator: `auto`, `cpu`, `gpu`, or another of Fabric's.
        devices: processes per node; a number, a list such as "0,1", or `auto`.
        num_nodes: machines; under torchrun or srun they are counted from the environment.
        strategy: `auto` (one process, or ddp), `ddp`, or `fsdp` (parameters sharded over processes).
        replicas: groups of processes that each hold all parameters, sharded within the group (fsdp alone): as many as nodes
            keeps the gathering of parameters inside a node.
        tensor_parallel: neighbouring processes that share each matrix of the decoder and compute the same batch (fsdp alone).
        precision: `32-true`, `bf16-mixed`, `bf16-true`, `16-mixed`, or `auto`: `bf16-mixed` where the device multiplies bf16
            by itself, else `32-true`; decided when the whole configuration is read. Under
            `bf16-true` adapters, and what is trained beside them, stay in fp32 (see `train.distributed.fabric`).
        checkpointing: what the backward pass computes again instead of keeping it: nothing (`false`), the blocks (`true`;
            least memory, about a third more work), or all in them but products and attention (`selective`).
        compile: compile the transformer blocks with torch.compile.
        deterministic: on a GPU, add in the same order every time, so that a run repeats bit for bit; slower.
        timeout_seconds: in which all processes have to come to a step's exchange; then the run ends (exit code 75), and PyTorch
            names those that did not. Validation, saving and the start may take longer.
    """

    accelerator: str = "auto"
    devices: int | str = "auto"
    num_nodes: PositiveInt = 1
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    replicas: PositiveInt = 1
    tensor_parallel: PositiveInt = 1
    precision: Literal["32-true", "bf16-mixed", "bf16-true", "16-mixed", "auto"] = "32-true"
    checkpointing: bool | Literal["selective"] = False
    compile: bool = False
    deterministic: bool = False
    timeout_seconds: PositiveFloat = 3600.0

    def __post_init__(self) -> None:
        _need(
            re.fullmatch(r"auto|-1|(?!0$)\d+( *, *\d+)*", str(self.devices)) is not None,
            f"fabric.devices is {self.devices!r}; give a number, a list such as '0,1', or auto",
        )
        for name in ("replicas", "tensor_parallel"):
            _need(
                getattr(self, name) == 1 or self.strategy == "fsdp",
                f"fabric.{name} is {getattr(self, name)}, but fabric.strategy is {self.strategy}; set it to fsdp, or leave "
                f"{name} out",
            )

    def decided(self) -> FabricConfig:
        """Replaces precision `auto` by that of this machine, for which PyTorch is imported."""
        if self.precision != "auto":
            return self
        with importing():
            from omni.utils.hardware import multiplies_bf16

        return replace(self, precision="bf16-mixed" if multiplies_bf16(self.accelerator) else "32-true")

    @property
    def processes(self) -> int | None:
        """Processes of the run over all nodes; None where they depend on the machine."""
        listed = str(self.devices).split(",")
        if not all(device.strip().isdecimal() for device in listed):
            return None
        return (len(listed) if len(listed) > 1 else int(listed[0])) * self.num_nodes


@configuration
class ModelSection:
    """The model that is trained: a preset or a model folder, and fields that differ from it.

    Attributes:
        preset: name of a preset, such as `nano` or `qwen2-0.5b-omni`; random weights.
        init_from: a model folder to start from (configuration, weights, tokenizer, codec), or the name of one that ships.
            What else is given here must fit it.
        tokenizer: a `tokenizer.json`; by default the folder's, or one id per byte where the text stream has 256 ids.
        codec_folder: weights of the codec, where it has any; by default the folder's.
        layout, encoder, projector, decoder: fields that differ from the preset; see `omni.config.ModelConfig`.
        codec: name of the audio codec; where it is not the preset's, and no `layout.streams` are given, the audio streams are
            its codebooks.
        ctc, ctc_sounds: ids of the alignment head on the encoder, each with its blank; 0 for none. Where ctc is `tokens`, the
            head reads the projector's features as ids of the text stream.
        turn: a head on the encoder's frames for voice and the end of a question (`encoder.mode: chunked`).
    """

    preset: str | None = None
    init_from: str | None = None
    tokenizer: str | None = None
    codec_folder: str | None = None
    layout: dict[str, Any] = field(default_factory=dict)
    encoder: dict[str, Any] = field(default_factory=dict)
    projector: dict[str, Any] = field(default_factory=dict)
    decoder: dict[str, Any] = field(default_factory=dict)
    codec: str | None = None
    ctc: int | Literal["tokens"] | None = None
    ctc_sounds: int | None = None
    turn: bool | None = None

    def __post_init__(self) -> None:
        _need(
            self.preset is not None or self.init_from is not None,
            "model has neither preset nor init_from; name a preset (such as nano) or a model folder",
        )
        for name in ("init_from", "tokenizer", "codec_folder"):
            _need(getattr(self, name) != "", f"model.{name} is empty; give a path, or leave it out")

    @property
    def start(self) -> str | None:
        """The model folder to start from."""
        return None if self.init_from is None else find_model(self.init_from)

    @property
    def streams(self) -> int | None:
        """Number of streams of the layout; None where it is not known before a model folder is read."""
        streams = self.layout.get("streams")
        if isinstance(streams, (list, tuple)):
            return len(streams)
        if self.codec is not None:
            return len(CODECS.find(self.codec, "model.codec").codebook_sizes) + 1
        return None if self.preset is None else len(preset(self.preset).layout)


LARGEST_SEED = 2**63 - 1
"""Largest seed that PyTorch takes."""

Rate = Annotated[float, Field(ge=0, le=1e3)]
"""A learning rate or weight decay."""

Beta = Annotated[float, Field(ge=0, lt=1)]

Rule = Literal["adamw", "muon", "paged_adamw_8bit"]


@configuration
class GroupConfig:
    """Parameters with settings of their own.

    Attributes:
        pattern: names of the parameters, as in `trainable`.
        lr: learning rate of those that AdamW trains (under Muon: tables, heads, norms, biases); the optimizer's own where
            absent.
        muon_lr: learning rate of those that Muon trains; the optimizer's own where absent.
        weight_decay: their weight decay; the optimizer's own where absent.
        rule: as the optimizer's `name`, which holds where it is absent.
    """

    pattern: str
    lr: Rate | None = None
    muon_lr: Rate | None = None
    weight_decay: Rate | None = None
    rule: Rule | None = None


@configuration
class OptimizerConfig:
    """The optimizer.

    Attributes:
        name: `adamw`, `paged_adamw_8bit` (AdamW with its state in 8 bits, by bitsandbytes; on a GPU it is paged to the host's
            memory), or `muon` (Muon for hidden matrices, AdamW for the rest).
        lr: peak learning rate of AdamW.
        betas: of AdamW.
        weight_decay: decoupled; for parameters of two or more dimensions.
        muon_lr: peak learning rate of Muon (Nesterov momentum 0.95, five Newton-Schulz steps); tables and heads are AdamW's.
        groups: parameters with settings of their own; the first matching pattern decides.
    """

    name: Rule = "adamw"
    lr: Rate = 1e-3
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    weight_decay: Rate = 0.01
    muon_lr: Rate = 0.02
    groups: tuple[GroupConfig, ...] = ()

    def rates(self, ratio: float) -> str:
        """The options that set the learning rates of a batch `ratio` times as large, by its root (Malladi et al. 2022)."""
        names = ("lr", "muon_lr") if self.name == "muon" else ("lr",)
        return " ".join(f"--optimizer.{name} {getattr(self, name) * math.sqrt(ratio):.3g}" for name in names)


@configuration
class ScheduleConfig:
    """The learning rate over the run, as a factor of each group's own.

    Attributes:
        name: `cosine`, `linear`, `constant`, or `wsd` (warm up, stay, decay).
        warmup_steps: steps of linear rise.
        final: factor at the end (not for `constant`).
        decay: share of the budget that `wsd` decays over.
    """

    name: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    warmup_steps: NonNegativeInt = 0
    final: Share = 0.0
    decay: Annotated[float, Field(gt=0, le=1)] = 0.2


@configuration
class BudgetConfig:
    """Length of the run: it ends when the first of these is spent.

    Attributes:
        steps: optimizer steps.
        minutes: wall-clock time, validation and saving included; the learning rate follows its share that has passed,
            so that such a run is not repeatable bit for bit.
        until: value of `checkpoint.metric` with which a validation ends the run.
        expected: steps that this should take. The schedule runs over them where no limit is nearer, and the run goes on at its
            end.
    """

    steps: PositiveInt | None = None
    minutes: PositiveFloat | None = None
    until: NonNegativeFloat | None = None
    expected: PositiveInt | None = None

    def __post_init__(self) -> None:
        _need(
            self.steps is not None or self.minutes is not None,
            "budget has neither steps nor minutes; say how long to train, such as --budget.steps 1000",
        )


FIGURES = ("exact_match", "wer", "code_accuracy", "ended", "loss")
"""Figures of a validation; some also by task, kind of question or stream (`exact_match/A1A2`, `loss/text`). See
`train.eval.held_out` and, for the loss, `train.trainer.validation`."""


LOWER_IS_BETTER = ("wer", "loss")


@configuration
class CheckpointConfig:
    """When the training state is saved, and what is kept. It is always saved at the end and when the run is stopped.

    Attributes:
        every_steps, every_minutes: how often; both may be given.
        keep_last: newest checkpoints kept.
        keep_best: best checkpoints kept, by the validation's figure `metric`.
        metric: a figure of the validation: `exact_match`, `wer`, `code_accuracy`, `ended`, `loss` (of the held-out rows; where
            answers are open and no answer is the only right one), or one of a part (`exact_match/A1A2`, `loss/text`). Low
            values of `wer` and `loss` are good, high ones of the others.
        asynchronous: copy the state and train on while the copy is written. A machine without memory for the copy, and the last
            save, write it between the steps.
        upload: address of a folder in a store (`s3://bucket/runs/name`) that finished checkpoints and the finished model are
            copied to, beside the steps. Where the run folder has no checkpoint, the last one there is gone on from.
    """

    every_steps: PositiveInt | None = None
    every_minutes: PositiveFloat | None = 15.0
    keep_last: PositiveInt = 2
    keep_best: NonNegativeInt = 1
    metric: str = "exact_match"
    asynchronous: bool = True
    upload: str | None = None

    def __post_init__(self) -> None:
        figure, slash, part = self.metric.partition("/")
        _need(
            figure in FIGURES,
            f"checkpoint.metric {self.metric!r} is unknown; known: {', '.join(FIGURES)}, or one of a part, such as "
            f"{FIGURES[0]}/A1A2",
        )
        where = f"checkpoint.metric is {self.metric}"
        if re.fullmatch(r"[A-Z]\d[A-Z]\d", part):
            find_task(part, where)
        elif slash and figure == "loss":
            _need(
                re.fullmatch(r"text|alignment|distill|audio\d*", part) is not None,
                f"{where}, but there is no stream or task {part!r}; use loss/text, loss/audio, loss/audio0 or loss/A1A2",
            )

    @property
    def good(self) -> Literal["max", "min"]:
        """`max` or `min`: the better values of the metric."""
        return "min" if self.metric.partition("/")[0] in LOWER_IS_BETTER else "max"


@configuration
class ValidationConfig:
    """Held-out rows of the data's sources: their loss, and free-running generation on their questions.

    Attributes:
        every_steps, every_minutes: how often besides the end, when the budget is spent.
        questions: number of held-out rows, 0 for no validation.
        tasks: tasks as which they are asked; a row is left out of a task that it lacks a part for. Their loss is of the tasks
            that their source trains. An empty list asks none, and measures the loss alone.
        rows: questions generated side by side.
        max_seconds: longest spoken answer.
        max_tokens: most tokens of an answer that is only written, its end included.
    """

    every_steps: PositiveInt | None = None
    every_minutes: PositiveFloat | None = None
    questions: NonNegativeInt = 64
    tasks: tuple[str, ...] = ("A1A2",)
    rows: PositiveInt = 32
    max_seconds: PositiveFloat = 10.0
    max_tokens: Tokens = 64

    def __post_init__(self) -> None:
        for task in self.tasks:
            find_task(task, "validation.tasks")

    @property
    def answering(self) -> dict[str, Any]:
        """Keywords of `train.eval.held_out.evaluate`."""
        return {"rows": self.rows, "max_seconds": self.max_seconds, "max_tokens": self.max_tokens}

    @property
    def asks(self) -> bool:
        """True where questions are answered."""
        return self.questions > 0 and bool(self.tasks)


@configuration
class LogConfig:
    """Reports of the run. Tables, TensorBoard files, `curves.png` and `highest_loss.jsonl` are always written.

    Attributes:
        every: steps between two rows of the log (each the mean since the last). The screen also shows the first three steps and
            a line every 30 s.
        progress: `bar`, `lines` (one line a row of the log), `off`, or `auto`: a bar on a terminal, lines elsewhere.
        wandb: project at Weights & Biases to report to as well; needs the package `wandb`.
    """

    every: PositiveInt = 10
    progress: Literal["auto", "bar", "lines", "off"] = "auto"
    wandb: str | None = None
