"""Writes figures: to CSV and TensorBoard always, to Weights & Biases on request, and the examples with the highest loss, by
which broken rows are found: a wrong transcript, the codes of another sound. Only the first process writes."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor

from omni.errors import UserError, in_one_line
from omni.files import replacing, write_whole
from train.checkpoint.checkpointer import Checkpointer
from train.checkpoint.retention import CONFIG
from train.console.progress import figures_line
from train.data.batching.batch import Batch
from train.data.batching.loader import Counts, Trained
from train.distributed.process_group import ProcessGroup
from train.objective.objective import Losses, PlainLosses
from train.trainer.parts import Figures, Observer, Outcome

METRICS, VALIDATION, BALANCE, UNUSED = "metrics.csv", "validation.csv", "balance.csv", "unused.csv"
KINDS = ("weight", "norm", "cosine", "absent", "zero")
"""Kinds of the balance's figures; the names of tasks follow: `weight/A1T1`."""
SHOWN_LOSSES = ("loss/text", "loss/audio", "loss/alignment", "loss/shuffled", "loss/distill")
"""Parts of a held-out loss that the screen shows."""


class CsvTable:
    """A CSV file that grows by whole rows and survives being killed at any byte.

    Rows later than `upto`, which a resumed run will write again, are dropped, and with them a last row cut short. Columns of
    `kinds` are sorted in this order by what is before their first /; others come first.
    """

    def __init__(self, path: Path, upto: int, kinds: Sequence[str] = ()) -> None:
        self.path, self.kinds = path, kinds
        self.columns: list[str] = ["step"]
        rows = read_table(path)
        if rows:
            self.columns = list(rows[0])
            self._rewrite([row for row in rows if row["step"] <= upto])

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        """Append a row. A figure not seen before becomes a new column of the whole file."""
        row = {"step": float(step), **figures}
        if not self.path.exists() or not set(row) <= set(self.columns):
            self.columns += [name for name in row if name not in self.columns]
            order = {prefix: i for i, prefix in enumerate(self.kinds)}
            self.columns.sort(key=lambda column: order.get(column.partition("/")[0], -1))
            self._rewrite([*read_table(self.path), row])
            return
        with open(self.path, "ab", buffering=0) as file:
            file.write(self._line(row).encode())  # one call, so that a row is whole or missing

    def _line(self, row: Mapping[str, float]) -> str:
        cells = ["" if name not in row or row[name] != row[name] else f"{row[name]:.9g}" for name in self.columns]
        return ",".join(cells) + "\n"

    def _rewrite(self, rows: list[dict[str, float]]) -> None:
        write_whole(self.path, ",".join(self.columns) + "\n" + "".join(self._line(row) for row in rows))


def read_table(path: Path) -> list[dict[str, float]]:
    """The rows of a CSV file of numbers; empty cells and a last row cut short are left out."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    lines = text[: text.rfind("\n") + 1].splitlines()
    whole = (cells for cells in csv.DictReader(lines) if None not in cells and None not in cells.values())
    return [{name: float(cell) if cell else math.nan for name, cell in cells.items()} for cells in whole]


class Logs:
    """Writes a run's figures to all of its logs."""

    def __init__(self, folder: Path, upto: int, wandb_project: str | None = None, config: Any = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.tables = {name: CsvTable(folder / name, upto) for name in (METRICS, VALIDATION)}
        self.tables[BALANCE] = CsvTable(folder / BALANCE, upto, KINDS)
        self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=upto + 1 if upto else 0)
        self.wandb: Any = None
        if wandb_project:
            import wandb

            run = {"name": folder.name, "id": run_id(folder), "resume": "allow", "dir": str(folder)}
            try:
                self.wandb = wandb.init(project=wandb_project, config=config, **run)
            except Exception as error:  # of its own kinds: no key, no network, no such project
                way = "run `wandb login`, set WANDB_API_KEY, or WANDB_MODE=offline to send it later by `wandb sync`"
                reason = f"Weights & Biases cannot be reached ({in_one_line(error)[:200]})"
                raise UserError(f"log.wandb is {wandb_project!r}, and {reason}: {way}") from error

    def write(self, table: str, step: int, figures: Mapping[str, float]) -> None:
        """Writes a row of `METRICS`, `VALIDATION` or `BALANCE`."""
        group = "train" if table == METRICS else table.removesuffix(".csv")
        self.tables[table].add(step, figures)
        for name, value in figures.items():
            self.board.add_scalar(f"{group}/{name}", value, step)
        self.board.flush()
        if self.wandb is not None:
            self.wandb.log({f"{group}/{name}": value for name, value in figures.items()}, step=step)

    def image(self, name: str, file: Path, step: int) -> None:
        """Show a PNG of the run folder in TensorBoard, and at Weights & Biases, too."""
        import numpy as np
        from PIL import Image

        pixels = np.asarray(Image.open(file).convert("RGB"))
        self.board.add_image(name, pixels, step, dataformats="HWC")
        if self.wandb is not None:
            import wandb

            self.wandb.log({name: wandb.Image(pixels)}, step=step)

    def close(self) -> None:
        self.board.close()
        if self.wandb is not None:
            self.wandb.finish()


@dataclass
class LogWriter(Observer):
    """Writes rows, validations and pictures to the run's logs, and its configuration, once a step of this start is done or none
    is left, to its folder.

    Attributes:
        logs: None in all processes but the first.
        balance: figures of the balance of the tasks since the last row, where there is one.
        draw: refreshes the pictures in the run folder; names and files.
        stored: the configuration is written.
    """

    logs: Logs | None
    checkpointer: Checkpointer
    balance: Callable[[], Mapping[str, float]]
    draw: Callable[[], dict[str, Path]] | None = None
    stored: bool = False

    def on_step(self, step: int, figures: Mapping[str, float]) -> None:
        self.on_steps_end()

    def on_steps_end(self) -> None:
        if not self.stored:
            text = yaml.safe_dump(self.checkpointer.plain, sort_keys=False, allow_unicode=True)
            self.checkpointer.group.run_on_first(lambda: write_whole(self.checkpointer.folder / CONFIG, text))
            self.stored = True

    def on_log(self, step: int, figures: Figures) -> None:
        balance = self.balance()
        if self.logs is not None:
            self.logs.write(METRICS, step, figures)
            if balance:
                self.logs.write(BALANCE, step, balance)

    def on_validation(self, step: int, figures: Mapping[str, float]) -> None:
        def work() -> None:
            if self.logs is not None:
                self.logs.write(VALIDATION, step, {**figures, "seconds": self.checkpointer.position.seconds})
            shown = {k: v for k, v in figures.items() if not k.startswith("loss/") or k in SHOWN_LOSSES}
            self.checkpointer.say(f"validation at step {step}: {figures_line(shown)}")
            self._draw(step)

        self.checkpointer.group.run_on_first(work)

    def on_end(self, outcome: Outcome) -> None:
        if not outcome.signal:
            self.checkpointer.group.run_on_first(lambda: self._draw(outcome.step))

    def _draw(self, step: int) -> None:
        if self.draw is not None and self.logs is not None:
            for name, file in self.draw().items():
                self.logs.image(name, file, step)

    def close(self) -> None:
        if self.logs is not None:
            self.logs.close()


@dataclass
class DataCounts(Observer):
    """Counts what is trained of each source, and the rows that are left out because they are too long or broken, over all
    processes; says each source, task and reason when it first happens."""

    checkpointer: Checkpointer
    number: int = 0
    counts: Counts = field(default_factory=Counts)

    def on_step(self, step: int, figures: Mapping[str, float]) -> None:
        """Refuses data of which too many are broken (UserError), in all processes alike."""
        if figures:
            self.counts.check(self.checkpointer.config.data.broken_limit)

    def on_log(self, step: int, figures: Figures) -> None:
        """Adds rows, seconds of sound and tokens by source, and rows left out, since the start of the run; `unused.csv` is
        written again where more rows are left out."""
        own, counters, group = self.checkpointer.own_shards().values(), ("skipped", "broken"), self.checkpointer.group
        for source, of in self.trained().items():
            name = re.sub(r"data\.sources\[(\d+)\].*", r"source\1", source)
            figures |= {f"rows/{name}": of.rows, f"seconds/{name}": of.milliseconds / 1000, f"tokens/{name}": of.tokens}
        each = group.gather([sum(shard.get(counter, 0) for shard in own) for counter in counters])
        totals = [sum(of) for of in zip(*each, strict=True)]
        if sum(totals) != self.number:
            self.number, known = sum(totals), self.counts.unused
            every = group.gather([shard.get("counts", {}) for shard in own])
            self.counts = Counts.joined(counts for of in every for counts in of)
            for key, line in self.counts.lines().items():
                if key not in known:
                    self.checkpointer.say(f"{line}; see {self.checkpointer.folder / UNUSED}")
            if self.counts.unused:
                group.run_on_first(lambda: write_whole(self.checkpointer.folder / UNUSED, self.counts.table()))
        figures |= {f"rows_{counter}": number for counter, number in zip(counters, totals, strict=True) if number}

    def trained(self) -> dict[str, Trained]:
        """Rows, sound and tokens trained of each source since the start of the run, in order; all processes must call it."""
        shards = self.checkpointer.own_shards().values()
        own = [{"trained": shard.get("counts", {}).get("trained", ())} for shard in shards]
        sums = Counts.joined(counts for of in self.checkpointer.group.gather(own) for counts in of).trained
        return dict(sorted(sums.items()))


def run_id(folder: Path) -> str:
    """The id that Weights & Biases resumes a run by: its folder's name and a hash of its path, as names are used again."""
    return f"{folder.name}-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]}"


HIGHEST = "highest_loss.jsonl"
COUNT = 20
"""Examples that the file names."""
WINDOW = 1000
"""Steps after which an example is forgotten: at the start of a run the loss of every row is high."""


class NamedLoss(NamedTuple):
    """Mean loss per target of an example (nats), its row and tasks, its number of targets, and the step that it was in."""

    loss: float
    row: str
    task: str
    targets: int
    step: int


class HighestLosses(Observer):
    """The `count` examples with the highest mean loss per target of the last `WINDOW` steps, over all processes; `step` is
    the one that is taken.

    A row that several steps had is one of them once for each task, as it was last. Losses stay on the device until a row.
    """

    def __init__(self, count: int, folder: Path, group: ProcessGroup) -> None:
        self.count, self.file, self.group = count, folder / HIGHEST, group
        self.options = (PlainLosses(by_example=True),) if count else ()  # last arguments of the objective
        self.step = 0
        self.named: dict[tuple[str, str], NamedLoss] = {}
        self._waiting: deque[tuple[int, Tensor, Sequence[tuple[str, str]]]] = deque()

    def on_step_begin(self, step: int) -> None:
        self.step = step

    def add(self, losses: Losses, batch: Batch) -> None:
        """Adds the examples of a micro-batch; none where the objective gave no losses by example."""
        if losses.by_example is not None:
            self._waiting.append((self.step, losses.by_example, batch.names.each))
            while self._waiting[0][0] <= self.step - WINDOW:
                self._waiting.popleft()

    def on_log(self, step: int, figures: Figures) -> None:
        """Writes the file, in the first process. Waits for the device."""
        if not self.count:
            return
        new = [example for of in self.group.gather(self._highest()) for example in of]
        self._waiting.clear()
        for example in sorted(new, key=lambda example: example.step):
            self.named[example.row, example.task] = example
        self.named = {key: example for key, example in self.named.items() if example.step > self.step - WINDOW}
        if new and self.group.first:
            # Without waiting for the disk: the next row of the log writes it again.
            with replacing(self.file) as path, open(path, "w", encoding="utf-8") as part:
                for example in nlargest(self.count, self.named.values()):
                    loss = round(example.loss, 4) if math.isfinite(example.loss) else None
                    part.write(json.dumps(example._asdict() | {"loss": loss}) + "\n")

    def _highest(self) -> list[NamedLoss]:
        """The highest of this process since the last row."""
        if not self._waiting:
            return []
        sums, counts = torch.cat([values for _, values, _ in self._waiting], dim=1)
        means = (sums / counts.clamp_min(1)).nan_to_num(math.inf)
        top = means.topk(min(self.count, len(means)))
        columns = torch.stack([x.double() for x in (top.values, counts[top.indices], top.indices)]).tolist()
        names = [(*name, step) for step, _, names in self._waiting for name in names]
        named = [(loss, round(targets), *names[round(at)]) for loss, targets, at in zip(*columns, strict=True) if targets]
        return [NamedLoss(loss, row, task, targets, step) for loss, targets, row, task, step in named]
