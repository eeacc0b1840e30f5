"""Configuration of a run: frozen dataclasses that one YAML file fills, completely and without inheritance.

Every key can also be given on the command line (`--optimizer.lr 3e-4`). Keys are explained here, and by
`omni-train fit --help`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field, replace
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat

from omni.config import preset
from omni.errors import UserError
from omni.plugins import load_plugins
from omni.utils.configuration import configuration, plain
from train.balance.config import BalanceConfig, check_balance
from train.config.sections import (
    LARGEST_SEED,
    LORA,
    BudgetConfig,
    CheckpointConfig,
    FabricConfig,
    LogConfig,
    LoRASection,
    ModelSection,
    OptimizerConfig,
    ScheduleConfig,
    ValidationConfig,
    _need,
)
from train.data.config import DataConfig
from train.objective.config import NO_ALIGNMENT_HEAD, NO_TURN_HEAD, ObjectiveConfig, check_stream_weights, untrained


@configuration
class FitConfig:
    """A training run.

    Attributes:
        run_folder: where everything is written; by default `runs/` and the file's name.
        seed: of the weights; the data have their own.
        resume: `auto` continues from the run folder's last checkpoint if its configuration is this one, `extend` if only the
            budget is larger, `force` whatever its configuration was, `restart` deletes the earlier run's checkpoints and logs.
        trainable: names of the trainable parameters: shell patterns, or regular expressions after `re:`.
        lora: train low-rank adapters, and of the rest only what `lora.trainable` names.
        balance: combine the tasks of a step otherwise than by the sum of their losses (docs/balance.md).
        ema: decay of a running average of the weights, which is then validated and exported.
        clip: largest norm of the gradients; null for no clipping.
        guard: watch every step for mistakes with graphs and gradients (docs/gradients.md): for a model or data of your own.
        callbacks: names of registered callbacks, which are called after steps, validations and checkpoints, and at the end.
        plugins: modules of one's own that register codecs, encoders, tasks and the like (docs/extending.md); no stored
            configuration names them.
    """

    budget: BudgetConfig
    model: ModelSection
    data: DataConfig
    run_folder: str = ""
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED)] = 0
    resume: Literal["auto", "extend", "force", "restart"] = "auto"
    trainable: tuple[str, ...] = ("*",)
    lora: LoRASection | None = None
    balance: BalanceConfig | None = None
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    clip: PositiveFloat | None = 1.0
    guard: bool = False
    fabric: FabricConfig = field(default_factory=FabricConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    log: LogConfig = field(default_factory=LogConfig)
    callbacks: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        load_plugins(self.plugins, "plugins")
        _need(
            self.lora is None or self.trainable == ("*",),
            "trainable and lora are both given; name what is trained beside the adapters under lora.trainable",
        )
        if self.balance is not None:
            streams = self.model.streams if self.balance.tasks == "streams" else None
            check_balance(self.balance, self.data, self.fabric.precision, self.fabric.processes, streams)
        if self.model.preset is not None:
            preset(self.model.preset)  # raises where there is none of that name
        self._check_sharded()
        self._check_streams()
        object.__setattr__(self, "fabric", self.fabric.decided())  # last: PyTorch takes seconds to import

    def _check_sharded(self) -> None:
        """Refuses what slices of matrices do not go with."""
        features = {"lora": self.lora, "balance": self.balance, "guard": self.guard or None}
        features["fabric.precision 16-mixed"] = True if self.fabric.precision == "16-mixed" else None
        for name in (name for name, value in features.items() if value is not None and self.fabric.tensor_parallel > 1):
            raise UserError(f"fabric.tensor_parallel does not go with {name}; leave one of them out")
        rules = {self.optimizer.name, *(group.rule for group in self.optimizer.groups)}
        _need(
            self.fabric.strategy != "fsdp" or "muon" not in rules,
            "optimizer muon with fabric.strategy fsdp: Muon needs whole matrices, and fsdp gives each process a slice; use "
            "optimizer.name adamw, or strategy ddp",
        )

    def _check_streams(self) -> None:
        """Refuses weights and metrics of streams that the model lacks, as far as no model folder needs to be read."""
        metric, streams, weights = self.checkpoint.metric, self.model.streams, self.objective.stream_weights
        if streams is None:
            return
        if weights is not None:
            check_stream_weights(weights, streams)
        named = re.fullmatch(r"loss/audio(\d+)", metric)
        _need(
            named is None or int(named[1]) < streams - 1,
            f"checkpoint.metric is {metric}, but the model has {streams - 1} audio streams, counted from 0; name one",
        )

    def shared_by(self, processes: int) -> tuple[FitConfig, str | None]:
        """The configuration with micro-batches that so many processes share evenly, more than given where they must be, and a
        line about the larger batch, or None. A balance of tasks leaves their number alone."""
        configured = self.data.micro_batches
        count = -(-configured // processes) * processes
        if count == configured or self.balance is not None:
            return self, None
        line = (
            f"the batch is {count} micro-batches a step instead of {configured}, as {processes} processes share them: "
            f"{count / configured:.3g} times as large; by the root of that it would go with "
            f"{self.optimizer.rates(count / configured)}"
        )
        return replace(self, data=replace(self.data, micro_batches=count)), line

    def check_head(self) -> None:
        """Refuses a loss on a head that the model lacks, as far as no model folder needs to be read."""
        objective, model = self.objective, self.model
        if objective.ctc_weight > 0 and (self.data.alignment == "none" or model.ctc == 0):
            ids = model.ctc
            if ids is None and model.init_from is None and model.preset is not None:
                ids = preset(model.preset).ctc
            if ids == 0:
                raise untrained("ctc", objective.ctc_weight, NO_ALIGNMENT_HEAD)
        if objective.turn_weight > 0 and (model.turn is False or (model.turn is None and model.init_from is None)):
            raise untrained("turn", objective.turn_weight, NO_TURN_HEAD)

    def reached(self, figures: Mapping[str, float]) -> bool:
        """Whether these figures of a validation end the run (`budget.until`)."""
        until, value = self.budget.until, figures.get(self.checkpoint.metric)
        return until is not None and value is not None and (value >= until if self.checkpoint.good == "max" else value <= until)

    @property
    def trainable_patterns(self) -> tuple[str, ...]:
        """Names of the trainable parameters, as patterns."""
        return self.trainable if self.lora is None else (LORA, *self.lora.trainable)


def plain_config(config: FitConfig) -> dict[str, Any]:
    """The configuration as plain data (mappings, lists, numbers and texts), without the names of plug-ins and callbacks."""
    return {key: value for key, value in plain(config).items() if key not in ("plugins", "callbacks")}
