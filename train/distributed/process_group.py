"""The processes of a run: how they start, meet and agree on what they run, and the small values that they exchange. Who is lost
ends the run, and is named, with the collective that this process waits in, by what PyTorch's flight recorder keeps of the
newest ones."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from torch import Tensor

from omni.errors import LostError, UserError
from omni.files import PASSING, write_whole
from omni.utils.private import flight_recorder, group_timeout
from omni.utils.process import ENDING, say

T = TypeVar("T")

PATIENCE = timedelta(hours=4)
"""Timeout of processes that wait for one of them, as in validation; a process that dies is noticed at once."""
PATIENT = 15.0  # seconds after which a process that waits for the others at the start says so; again after twice as long
START = timedelta(minutes=30)  # longest time that processes wait for each other at their start
LOOKS = (0.0, 1.0, 2.0, 4.0, 8.0)
"""Seconds before each look for a file that another process has written: network file systems show it late."""
NAMING, LEAVING = timedelta(seconds=10), 30.0
"""Time in which the others answer where one is looked for, and seconds in which the process group has to end then."""
AGAIN = "the same command goes on from the last checkpoint, if there is one"
LOST = ("Connection closed by peer", "gloo/transport", "Connection reset by peer", "Timed out waiting", "NCCL communicator",
        "monitoredBarrier")  # fmt: skip
"""Parts of the messages of errors that mean that another process cannot be reached."""


class ProcessGroup:
    """Exchanges small values between the processes of a run, on the CPU (gloo), without waiting for a device.

    Attributes:
        rank, world: number of this process, and how many there are.
        first: true for the process of rank 0, which writes files and shows progress.
        data_rank, data_world: the same of processes with batches of their own, or groups of `tensor` tensor-parallel ones.
        counts: whether this process's sums count, which are those of all of its tensor-parallel group.
        step, phase: of the training, and what this process does, for messages.
        timeout: in which all processes have to come to a step's exchange (`meet`).
    """

    def __init__(self, fabric: Fabric, tensor: int = 1, timeout: float = PATIENCE.total_seconds()) -> None:
        self.rank, self.world = fabric.global_rank, fabric.world_size
        self.first = self.rank == 0
        self.data_rank, self.data_world, self.counts = self.rank // tensor, self.world // tensor, self.rank % tensor == 0
        self.step, self.phase, self.timeout = 0, "start", timedelta(seconds=timeout)
        self.group: Any = None
        self.steps: Any = None  # of what all do at once
        if self.world > 1:
            self.group = dist.new_group(backend="gloo", timeout=PATIENCE)
            self.steps = dist.new_group(backend="gloo", timeout=self.timeout)

    def meet(self, values: Tensor) -> Tensor:
        """Wait for all processes, and sum a float64 tensor on the CPU over them; RuntimeError of PyTorch where one does not
        come in time, which the first process names."""
        if self.world > 1:
            dist.monitored_barrier(self.steps, self.timeout, wait_all_ranks=True)
            dist.all_reduce(values, group=self.steps)
            if hasattr(dist, "set_timeout"):  # of the gradients' exchange; since torch 2.14
                dist.set_timeout(self.timeout)
        return values

    def sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over processes, those of a tensor-parallel group once, in float64 on the CPU."""
        values = values.detach().to("cpu", torch.float64)
        values = values if self.counts else torch.zeros_like(values)
        if self.world > 1:
            dist.all_reduce(values, group=self.steps)
        return values

    def broadcast(self, value: T) -> T:
        """Send the first process's value (plain data) to all of them, and return it."""
        box = [value]
        if self.world > 1:
            dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Collect every process's value (plain data), in the order of ranks, on all of them."""
        box = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(box, value, group=self.group)
        return box

    def raise_if_any_failed(self, error: UserError | None) -> None:
        """Raise a UserError in all processes where one has failed: a process's own error, or else that of the lowest rank."""
        failures = self.gather(None if error is None else (str(error), error.again))
        for rank, failure in enumerate(failures):
            if failure is not None:
                shared = error or UserError(f"{failure[0]} (process {rank})")
                shared.again, shared.shared = shared.again or failure[1], True
                raise shared

    def together(self, work: Callable[[], T]) -> T:
        """Run `work` in every process; the UserError of any is raised in all."""
        result: Any = None
        failure: UserError | None = None
        try:
            result = work()
        except UserError as error:
            failure = error
        self.raise_if_any_failed(failure)
        return result  # type: ignore[no-any-return]

    def run_on_first(self, work: Callable[[], T]) -> T | None:
        """Run `work` in the first process alone and return its result (None in the others). Its UserError is raised in all
        processes, and so is an OSError, as a UserError."""

        def alone() -> T | None:
            try:
                return work() if self.first else None
            except OSError as error:
                file, reason = error.filename or "a file", error.strerror or error
                failure = UserError(f"{file} cannot be read or written ({reason}); fix that and run the same command again")
                failure.again = error.errno in PASSING
                raise failure from error

        return self.together(alone)


@contextmanager
def lost_named(group: ProcessGroup) -> Iterator[None]:
    """A context in which errors that mean that another process cannot be reached become one line. LostError: with the processes
    that PyTorch names, and the collective in which this one waited."""
    try:
        yield
    except Exception as error:
        if not is_lost(error):
            raise
        # NCCL may wait for a process that is lost: this one ends all the same.
        end = threading.Timer(LEAVING, lambda: os._exit(LostError.code) if dist.is_initialized() else None)
        end.daemon = True
        end.start()
        waited = last_collective()
        absent = ""
        if "Timed out" in str(error) and "monitoredBarrier" not in str(error):
            try:  # which processes do not answer, in PyTorch's words; the first process knows
                dist.monitored_barrier(group.group, NAMING, wait_all_ranks=True)
            except RuntimeError as named:
                absent = f"; {_reason(named)}"
        text = f"{_reason(error)}{absent}{waited and f'; it waited in {waited}'}"
        raise LostError(f"step {group.step}, process {group.rank}, {group.phase}: {text}; {AGAIN}") from error


def is_lost(error: BaseException | None) -> bool:
    """True where an error, or one that led to it, says that another process cannot be reached."""
    while error is not None:
        names = [base.__name__ for base in type(error).__mro__]
        if "DistError" in names or ("RuntimeError" in names and any(part in str(error) for part in LOST)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _reason(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300]


def last_collective() -> str:
    """The collective that waits, such as `gloo:all_reduce of [1000], the group's number 12`; "" where none is known."""
    description = ""
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):  # gloo's, and NCCL's
        with suppress(AttributeError, RuntimeError, ValueError, TypeError):
            description = described(json.loads(flight_recorder(name)).get("entries", [])) or description
    return description


def described(entries: list[Mapping[str, Any]]) -> str:
    """The first of the recorder's entries that has started and not ended; the last one where the recorder does not see ends."""
    ends = any(entry.get("state") == "completed" for entry in entries)
    waiting = [entry for entry in entries if entry.get("state") != "completed"] if ends else entries[-1:]
    if not waiting:
        return ""
    entry = waiting[0]
    sizes = " and ".join(map(str, entry.get("input_sizes") or [])) or "nothing"
    return f"{entry.get('profiling_name', 'a collective')} of {sizes}, the group's number {entry.get('collective_seq_id', '?')}"


# --- the start --------------------------------------------------------------------------------------------------------


def launch(fabric: Fabric, plain: Mapping[str, Any] | None = None) -> None:
    """Start the run's other processes, or meet those that a launcher has started; under `fabric run` they have met already.
    Under torchrun the process group is made over a part of its store that is new at each restart (see `fresh`). UserError where
    processes have different configurations (`plain`), the first one's address is unknown, or its port is taken."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives kept: NCCL's default, which gloo has to be told
    around = getattr(fabric.strategy, "cluster_environment", None)
    address, port = (str(getattr(around, name, "")) for name in ("main_address", "main_port"))
    with _meeting(fabric.world_size, address, port):
        if fabric.world_size > 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            _meet_again(fabric)
        if not int(os.environ.get("LT_CLI_USED", "0")):
            fabric.launch()
    if plain is not None and fabric.world_size > 1:
        gathered: list[Any] = [None] * fabric.world_size
        dist.all_gather_object(gathered, (socket.gethostname(), dict(plain)))
        _check_same(gathered)


def _meet_again(fabric: Fabric) -> None:
    """Make the process group over a part of torchrun's store that is new at each restart."""
    device, rank, world = fabric.device, int(os.environ["RANK"]), fabric.world_size
    if device.type == "cuda":  # NCCL connects at once
        torch.cuda.set_device(device)
    dist.init_process_group(
        dist.get_default_backend_for_device(device),
        store=fresh(rank, world),
        rank=rank,
        world_size=world,
        timeout=group_timeout(fabric.strategy),
        device_id=None if device.type == "cpu" else device,
    )


def fresh(rank: int, world: int) -> dist.Store:
    """The part of torchrun's store that belongs to this start of the processes alone; all of them must call it. torchrun (torch
    2.14) keeps the store when it restarts its processes: without this they would find the addresses of those that have died. A
    number of restarts does not tell starts apart, because each node counts its own. So every process sends the first one a new
    word, and is told the prefix in answer to it."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.PrefixStore("omni", dist.TCPStore(address, port, is_master=False, timeout=START))
    if rank:
        word = uuid4().hex
        store.set(f"word/{rank}", word)
        prefix = store.get(f"answer/{word}").decode()
        store.add(f"{prefix}/joined", 1)
    else:
        prefix, answered = uuid4().hex, dict[int, str]()
        while store.add(f"{prefix}/joined", 0) < world - 1:
            for other in range(1, world):
                if store.check([f"word/{other}"]) and answered.get(other) != (word := store.get(f"word/{other}").decode()):
                    answered[other] = word
                    store.set(f"answer/{word}", prefix)
            time.sleep(0.02)
    return dist.PrefixStore(prefix, store)


@contextmanager
def _meeting(world: int, address: str, port: str) -> Iterator[None]:
    """While processes wait for each other: signals end this one at once, where they have not changed anything yet, and a line
    says for whom it waits."""
    try:
        socket.getaddrinfo(address or "localhost", None)
    except OSError as error:
        raise UserError(f"MASTER_ADDR {address} is not known here ({error.strerror}); give the first node's name") from error
    over, endpoint = threading.Event(), f"{address}:{port}"
    threading.Thread(target=partial(_say_waiting, over, world, endpoint), daemon=True).start()
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        signals = [n for n in (*ENDING, signal.SIGINT) if signal.getsignal(n) != signal.SIG_IGN]
        before = {number: signal.signal(number, signal.SIG_DFL) for number in signals}
    try:
        yield
    except dist.DistNetworkError as error:
        if "EADDRINUSE" in str(error):
            raise UserError(
                f"port {port} of {address} is taken, by another run perhaps; give a free one, such as MASTER_PORT=29501"
            ) from error
        raise
    except dist.DistStoreError as error:
        raise LostError(f"not all of the {world} processes came to {endpoint} within {START}; {AGAIN}") from error
    finally:
        over.set()
        for number, handler in before.items():
            signal.signal(number, handler)


def _say_waiting(over: threading.Event, world: int, endpoint: str) -> None:
    waited, rank = PATIENT, os.environ.get("RANK", os.environ.get("SLURM_PROCID", os.environ.get("LOCAL_RANK", "0")))
    hint = ""
    if "SLURM_JOB_ID" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ:
        hint = f"; Slurm's job {os.environ['SLURM_JOB_ID']} has {world} tasks, which srun starts"
    while not over.wait(waited / (1 if waited == PATIENT else 2)):
        say(f"process {rank}: waiting for the others of {world} processes at {endpoint}, for {round(waited)} s{hint}")
        waited *= 2


def _check_same(gathered: Sequence[Any]) -> None:
    """Refuses (UserError, in all processes) configurations that are not the first one's."""
    first = _flat(gathered[0][1])
    for rank, (host, plain) in enumerate(gathered):
        here = _flat(plain)
        for key in (key for key in {**first, **here} if first.get(key) != here.get(key)):
            values = f"{key} {here.get(key)!r:.60}, and the first process {first.get(key)!r:.60}"
            error = UserError(f"process {rank} (host {host}) has {values}; start all with the same configuration")
            error.shared = True
            raise error


def _flat(plain: Any, key: str = "") -> dict[str, Any]:
    """Values by dotted keys."""
    if not isinstance(plain, Mapping) or not plain:
        return {key: plain}
    return {k: v for name, part in plain.items() for k, v in _flat(part, f"{key}.{name}".removeprefix(".")).items()}


def check_shared(folder: Path, group: ProcessGroup) -> None:
    """Refuses (UserError, in all processes) a run folder that not all processes see; it exists for the first one."""
    if group.world == 1:
        return
    name, host = group.broadcast((f".shared-{uuid4().hex}", socket.gethostname()))
    if group.first:
        write_whole(folder / name, "")
    group.broadcast(None)  # it is written

    def look() -> None:
        for seconds in LOOKS:
            time.sleep(seconds)
            if (folder / name).exists():
                return
        here, there = f"process {group.rank} (host {socket.gethostname()})", f"the first process (host {host})"
        raise UserError(f"run_folder: {here} does not see {folder.absolute()} of {there}; name a folder that all nodes share")

    try:
        group.together(look)
    finally:
        if group.first:
            (folder / name).unlink(missing_ok=True)
