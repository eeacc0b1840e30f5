"""Saves and resumes a run, and keeps its newest and best checkpoints. They are written while the run trains on, from copies of
the state on the host, by a thread."""

from __future__ import annotations

import math
import os
import socket
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from lightning_fabric import Fabric
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from omni.checkpoint.tensors import NotFinite, file_layout
from omni.config import from_dict
from omni.errors import UserError
from omni.files import pages, write_json
from omni.utils.profiling import GIB, free_memory, high_water
from train.checkpoint import retention, state
from train.checkpoint.state import CheckpointContent
from train.checkpoint.upload import Uploads, bring_back, in_background
from train.config.run import FitConfig, plain_config
from train.config.sections import BudgetConfig
from train.console.progress import counted
from train.data.batching.loader import States, merge
from train.distributed.fabric import launch_names, restarted
from train.distributed.process_group import ProcessGroup
from train.optim.optimizer import check_larger, due, extension, used


class Checkpointer:
    """Writes and reads the checkpoints of a run. All processes must call its methods alike.

    Args:
        balance, meter: with `state_dict`, `load_state_dict` and `tally`, or None; with `state` and `restore`.
        rows: sizes of the stored sources, and the checksum of the weights below adapters.

    Attributes:
        parent: folder of the checkpoints.
        training: the tensors of the run; `position`: its state beside them, which `resume` replaces.
        saved: the last checkpoint that was written, or is being written, or was read.
        asynchronous: checkpoints may be written beside the steps; false once a machine had no memory for that.
        observers: whose `on_save` is called with the step and the folder, the last one first.
        uploads: copies checkpoints and the model to a store; None without, and in other processes than the first.
    """

    def __init__(
        self,
        config: FitConfig,
        folder: Path,
        fabric: Fabric,
        group: ProcessGroup,
        training: state.Training,
        balance: Any,
        meter: Any,
        packer_shards: range,
        rows: Mapping[str, int],
    ) -> None:
        self.config, self.plain, self.folder, self.fabric, self.group = config, plain_config(config), folder, fabric, group
        self.training, self.balance, self.meter, self.packer_shards = training, balance, meter, packer_shards
        self.parent = folder / "checkpoints"
        self.position = state.Position(rows=dict(rows))
        self.start_clock()
        self.saved: Path | None = None
        self.asynchronous = config.checkpoint.asynchronous
        self.say: Callable[[str], None] = lambda text: None
        self.observers: Sequence[Any] = ()
        self.saves = ProcessGroup(fabric)  # of their own: messages of saves and of steps must not meet
        self._copy: StateCopy | None = None
        self.writing: Future[None] | None = None
        upload = config.checkpoint.upload
        self.uploads = Uploads(upload) if upload is not None and group.first else None
        self._with_figures = False  # the last checkpoint was begun after the validation of its step

    # --- resuming -----------------------------------------------------------------------------------------------------

    def resume(self) -> list[str]:
        """Continue from the last checkpoint, if there is one and it is of this run (else UserError); returns lines about an
        extended schedule, and about optimizer state that starts again."""
        mode = self.config.resume
        if mode == "restart" and self._cleared():
            return []
        self.group.run_on_first(lambda: retention.delete_unfinished(self.parent))
        checkpoint = self.group.broadcast(self.group.run_on_first(lambda: retention.newest(self.parent)))
        lines = []
        if checkpoint is None and self.config.checkpoint.upload is not None:
            upload = self.config.checkpoint.upload
            came = self.group.broadcast(self.group.run_on_first(lambda: bring_back(upload, self.parent)))
            checkpoint = self.group.broadcast(self.group.run_on_first(lambda: retention.newest(self.parent)))
            lines = [f"going on from {came}"] if came is not None else []
        if checkpoint is None:
            if mode == "extend":
                raise UserError(f"--resume extend needs an earlier run, but {self.folder} has no checkpoint; leave it out")
            return []
        before, rows = retention.read_state(checkpoint), self.position.rows
        stored = before["config"]
        if mode != "force":
            now = (self.plain, rows)
            retention.check_resumable(self.folder, (stored, before.get("rows", rows)), now, mode == "extend")
        budget = from_dict(BudgetConfig, stored["budget"], "budget") if mode == "extend" else None
        if budget is not None:
            check_larger(budget, self.config.budget)
        optimizer = self.training.optimizer
        settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        fresh: list[str] = []
        self.position = position = replace(state.load(checkpoint, self.training, self.group, fresh), rows=rows)
        self.group.together(lambda: state.check_weights(checkpoint, self.training))
        if fresh:
            rules = ", ".join(sorted({str(group.get("rule")) for group in optimizer.param_groups}))
            whose = f"{counted(len(fresh), 'parameter')}, which another rule trained before (now: {rules})"
            lines.append(f"the optimizer's state starts again for {whose}")
        for group, own in zip(optimizer.param_groups, settings, strict=True):
            group.update(own)
        if position.scaler:
            self.fabric.strategy.precision.load_state_dict(position.scaler)
        self.meter.restore(position.meters)
        self._resume_balance(checkpoint, stored)
        self.saved = checkpoint
        if budget is not None:
            rate = max(group["base_lr"] for group in optimizer.param_groups)
            line = extension(self.config.schedule, budget, self.config.budget, position.step, position.seconds, rate)
            lines += [line] if line is not None else []
        return lines

    def _cleared(self) -> bool:
        """Deletes an earlier run's files; False where this launch did so, before its processes were started again."""
        again = any(self.group.gather(restarted(os.environ)))
        work = lambda: retention.restart(self.folder, launch_names(os.environ), again)  # noqa: E731
        return bool(self.group.broadcast(self.group.run_on_first(work)))

    def _resume_balance(self, checkpoint: Path, stored_config: Mapping[str, Any]) -> None:
        if self.balance is None:
            return
        stored = state.load_balance(checkpoint, self.training.objective, self.group)
        old, new = ({key: of.get(key) for key in ("balance", "trainable")} for of in (stored_config, self.plain))
        if retention.differences(old, new):  # possible under --resume force only
            warnings.warn("balance or trainable has changed: the balance of the tasks starts again", stacklevel=2)
        elif stored is not None:
            self.balance.load_state_dict(stored)
            self.balance.tally = self.position.tally

    # --- saving -------------------------------------------------------------------------------------------------------

    @property
    def is_saved(self) -> bool:
        """True where the state after the present step is in a checkpoint."""
        return self.saved is not None and self.saved.name == retention.name_of(self.position.step)

    @property
    def is_due(self) -> bool:
        """True where `checkpoint.every_steps` or `every_minutes` has passed since the last checkpoint."""
        plan, position = self.config.checkpoint, self.position
        return due(position.step, position.seconds, *position.saved, plan.every_steps, plan.every_minutes)

    @property
    def used(self) -> float:
        """Share of the budget that the run has used."""
        position = self.position
        return used(self.config.budget, position.step, position.seconds, self.config.reached(position.figures))

    def start_clock(self) -> None:
        """Begins to count the time of this start of the run."""
        self.before, self.started = self.position.seconds, time.perf_counter()

    def clock(self) -> float:
        """Seconds that the run has taken, over all its starts."""
        return self.before + time.perf_counter() - self.started

    def save(self, beside: bool = False) -> None:
        """Write a checkpoint of the present step, unless there is one. With `beside` it may return once the state is copied;
        `wait` and the next `save` wait for the rest. UserError where the loss is no number any more (the last good checkpoint
        is named), and for no room or right to write."""
        position, self.group.phase = self.position, "writing checkpoint"
        if self.is_saved:
            if not beside:
                self.wait()
            return
        self.wait()
        position.meters = self.meter.state()
        loss = sum(sums[0] for sums in position.meters)
        self.check_finite("loss", loss)
        position.seconds = self.group.broadcast(self.clock())
        position.saved = (position.step, position.seconds)
        if position.validated[0] != position.step:
            position.figures = {}
        position.scaler = self.fabric.strategy.precision.state_dict()
        shards = merge(self.group.gather(self.own_shards()))  # other processes' states here may date from the last start
        whole, balance = replace(position, packer_shards=shards), None
        if self.balance is not None:
            balance, whole.tally = self.balance.state_dict(), self.balance.tally
        held = state.capture(self.parent, whole, self.plain, self.training, self.group, balance)
        self._with_figures = position.validated[0] == position.step
        copied = self._copied(held) if beside and self.asynchronous else None
        if copied is None:
            if not beside:
                self._release()  # the last save of a run
            self._write(held)
        else:
            self.writing = in_background(lambda: self._write(copied))
        self.saved = held.target
        for observer in reversed(self.observers):
            observer.on_save(position.step, held.target)

    def _copied(self, held: CheckpointContent) -> CheckpointContent | None:
        """A copy of the state on the host; None where a machine has no memory for it, in all processes alike."""
        device = self.fabric.device
        short = None
        if self._copy is None:
            tensors = (*held.tensors.values(), *(held.balance or {}).values())
            size = sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)
            short = lacking_memory(size * (1 + held.sharded), device.type != "cuda", self.group)  # of shards, their file's too
            self._copy = StateCopy(device)
        copied, failure = None, None
        if short is None:
            try:
                copied = self._copy.take(held)
            except (RuntimeError, OSError, MemoryError) as error:
                failure = " ".join(str(error).split())[:200]
            short = next((f"no copy of the state ({why})" for why in self.group.gather(failure) if why is not None), None)
        if short is None:
            return copied
        self.asynchronous = False
        self._release()
        self.say(f"checkpoints are written between the steps: {short}")
        return None

    def _write(self, held: CheckpointContent) -> None:
        if self.fabric.device.type == "cuda":
            torch.cuda.set_device(self.fabric.device)  # a thread starts with the first one
        state.write(held, self.saves)
        if self.uploads is not None:
            self.uploads.add(held.target)
        self.saves.run_on_first(self._prune)

    def _release(self) -> None:
        if self._copy is not None:
            self._copy.release()
            self._copy = None

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is on the disk. UserError: it cannot be written; in all processes
        alike, and again each time."""
        if self.writing is not None:
            self.writing.result()
            self.writing = None

    def close(self, finish: bool) -> None:
        """End the run's saves, whatever became of them; unless they are to `finish`, what is being written stays unfinished if
        the process ends first."""
        if self.writing is not None and finish:
            self.writing.exception()
        self.writing = None

    def checked(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches of steps; in place of the next one a failure of the last save is raised, once it is known."""
        for batch in batches:
            self.tell_uploads()
            if self.writing is not None and self.writing.done():
                self.writing.result()
            yield batch

    def tell_uploads(self, wait: bool = False) -> None:
        """Say what was uploaded, or was not; with `wait`, wait for what still is."""
        if self.uploads is None:
            return
        last = self.uploads.last
        if wait and last is not None and not last.done():
            self.say(f"uploading to {self.uploads.address}")
            try:
                futures.wait([last])
            except KeyboardInterrupt:
                self.say(f"the upload was broken off; everything is in {self.folder}")
        while self.uploads.lines:
            self.say(self.uploads.lines.popleft())

    def check_finite(self, name: str, value: float) -> None:
        """Refuse to go on from a value that is not finite: UserError naming the last good checkpoint, and what may help."""
        if math.isfinite(value):
            return
        self.wait()
        good = retention.newest(self.parent)
        where = f"the last good checkpoint is {good}" if good is not None else "no checkpoint was written yet"
        groups, precision, limit = self.training.optimizer.param_groups, self.config.fabric.precision, self.config.clip
        keys = {"optimizer.muon_lr" if group.get("rule") == "muon" else "optimizer.lr" for group in groups}
        ways = [f"a lower {' and '.join(sorted(keys))}"]
        ways += ["clip 1.0"] * (limit is None or limit > 1)
        ways += ["fabric.precision bf16-mixed"] * (precision in ("bf16-true", "16-mixed"))
        raise UserError(f"the {name} is {value} at step {self.position.step}; {where}; try {' or '.join(ways)}")

    def refused(self, error: NotFinite) -> UserError:
        """The error of a model that is not exported because of a tensor that is not finite."""
        way = f"; {retention.way_back(self.saved)}" if self.saved is not None else ""
        if len(retention.checkpoints(self.parent)) > 1:
            way += ", and where that ends in the same way, that one too"
        return UserError(f"the model is not exported: {error}, after checkpoint {self.saved}{way}")

    def own_shards(self) -> States:
        """States of this process's packers; of a tensor-parallel group, in its first process alone."""
        shards = self.position.packer_shards if self.group.counts else {}
        return {key: shard for key, shard in shards.items() if shard["packer_shard"] in self.packer_shards}

    def is_best(self, value: float | None) -> bool:
        """True where a value of `checkpoint.metric` is among the best so far."""
        self.wait()
        keep = self.config.checkpoint
        if value is None or not math.isfinite(value) or keep.keep_best < 1:
            return False
        best = self.group.broadcast(self.group.run_on_first(lambda: retention.best(self.parent, keep))) or []
        return len(best) < keep.keep_best or (value > best[-1][0] if keep.good == "max" else value < best[-1][0])

    def add_figures(self) -> None:
        """Add the validation's figures to the checkpoint of their step, where that was begun before them."""
        saved, figures = self.saved, {"figures": self.position.figures, "validated": self.position.validated}
        if saved is None or not self.is_saved or self._with_figures:
            return

        def annotate() -> None:
            write_json(saved / retention.STATE, {**retention.read_state(saved), **figures}, indent=None)
            self._prune()

        self.wait()
        self.group.run_on_first(annotate)

    def _prune(self) -> None:
        """Deletes all checkpoints but the newest and the best."""
        keep, folders = self.config.checkpoint, retention.checkpoints(self.parent)
        best = [folder for _, folder in retention.best(self.parent, keep)]
        for folder in folders:
            if folder not in (*folders[-keep.keep_last :], *best):
                retention.discard(folder)


# --- beside the steps -----------------------------------------------------------------------------------------------------


SHARE = 0.9  # largest share of a machine's free memory that copies may take

PIECE, THREADS = 16 << 20, 4  # bytes that a thread copies at once, and the most threads, which use a processor's memory fully


class StateCopy:
    """Host memory for a copy of the training state, kept from one checkpoint to the next; pinned where the state is on a GPU.
    Tensors of one file are copied to the places that they have in the file, which is written from there without another copy
    (`omni.files.LargeFile`). Shards are copied by PyTorch's stager."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._blocks: dict[str, Tensor] = {}
        self._stager: DefaultStager | None = None

    def take(self, held: CheckpointContent) -> CheckpointContent:
        """Copies what a checkpoint will hold; the copy is complete, and valid until the next one, when this returns.
        RuntimeError, OSError: no memory."""
        tensors = self._staged(held.tensors) if held.sharded else self._copied("tensors", held.tensors)
        balance = None if held.balance is None else self._copied("balance", held.balance)
        if self.cuda:
            torch.cuda.synchronize()
        return replace(held, tensors=tensors, balance=balance)

    def _staged(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self._stager is None or torch.__version__ < "2.13":  # before, a stager serves once
            options = StagingOptions(
                use_pinned_memory=self.cuda, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=self.cuda
            )
            self._stager = DefaultStager(options)
        staged = self._stager.stage(dict(tensors))
        assert isinstance(staged, dict)
        return staged

    @torch.no_grad()
    def _copied(self, file: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not tensors:
            return {}
        _, offsets, size = file_layout(tensors)
        block, out = self._block(file, size), {}
        pieces: list[tuple[Any, Any]] = []
        for name, offset in offsets.items():
            tensor = tensors[name]
            out[name] = block[offset : offset + tensor.nbytes].view(tensor.dtype).reshape(tensor.shape)
            if tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.nbytes:
                both = (t.detach().reshape(-1).view(torch.uint8).numpy() for t in (out[name], tensor))
                pieces += zip(*([t[at : at + PIECE] for at in range(0, len(t), PIECE)] for t in both), strict=True)
            else:
                out[name].copy_(tensor, non_blocking=self.cuda)
        # Each by one thread: PyTorch's threads wait for each other at every tensor, long where cores are shared.
        with ThreadPoolExecutor(min(THREADS, torch.get_num_threads())) as pool:
            deque(pool.map(lambda piece: np.copyto(*piece), pieces), maxlen=0)
        return out

    def _block(self, file: str, size: int) -> Tensor:
        block = self._blocks.get(file)
        if block is None or len(block) < size:
            self._unpin(self._blocks.pop(file, None))
            self._blocks[file] = block = torch.frombuffer(pages(size), dtype=torch.uint8)
            if self.cuda:  # where pinning is refused, copies are only slower
                torch.cuda.cudart().cudaHostRegister(block.data_ptr(), block.nbytes, 0)
        return block

    def _unpin(self, block: Tensor | None) -> None:
        if self.cuda and block is not None:
            torch.cuda.cudart().cudaHostUnregister(block.data_ptr())

    def release(self) -> None:
        """Gives the memory back."""
        for file in list(self._blocks):
            self._unpin(self._blocks.pop(file))
        if self._stager is not None:
            self._stager.close()
            self._stager = None


def lacking_memory(needed: int, on_cpu: bool, group: ProcessGroup) -> str | None:
    """Says where a machine has no room for its processes' copies (`needed` bytes of this one), and why; None where all have.
    Steps `on_cpu` take its memory as well: as much as they have taken at most so far. All processes must call it."""
    growth = max(0, high_water() - int(psutil.Process().memory_info().rss)) if on_cpu else 0
    needs = group.gather((socket.gethostname(), needed, growth, free_memory()))
    for host in sorted({host for host, *_ in needs}):
        sizes, more, rooms = zip(*(rest for name, *rest in needs if name == host), strict=True)
        free = max(0.0, min(rooms) - sum(more))
        if sum(sizes) > SHARE * free:
            return f"a copy of the state takes {sum(sizes) / GIB:.2f} GiB, and {free / GIB:.2f} GiB are free on {host}"
    return None
