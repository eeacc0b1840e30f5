"""Starts the processes of a run, has them meet, and checks that all of them are about the same run."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from lightning_fabric import Fabric

from omni.errors import LostError, UserError
from omni.files import write_whole
from omni.utils.private import group_timeout
from omni.utils.process import ENDING, say
from train.distributed.process_group import AGAIN, ProcessGroup, keep_collectives

PATIENT = 15.0
"""Seconds after which a process that waits for the others at the start says so; again after twice as long."""
START = timedelta(minutes=30)
"""Longest time that processes wait for each other at their start."""
LOOKS = (0.0, 1.0, 2.0, 4.0, 8.0)
"""Seconds before each look for a file that another process has written: network file systems show it late."""


def launch(fabric: Fabric, plain: Mapping[str, Any] | None = None) -> None:
    """Start the run's other processes, or meet those that a launcher has started; under `fabric run` they have met already.

    Under torchrun the process group is made over a part of its store that is new at each restart (see `fresh`). UserError
    where processes have different configurations (`plain`), the first one's address is unknown, or its port is taken.
    """
    keep_collectives()
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
    """The part of torchrun's store that belongs to this start of the processes alone; all of them must call it.

    torchrun (torch 2.14) keeps the store when it restarts its processes: without this they would find the addresses of those
    that have died. A number of restarts does not tell starts apart, because each node counts its own. So every process sends
    the first one a new word, and is told the prefix in answer to it.
    """
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


# --- the meeting ------------------------------------------------------------------------------------------------------


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


# --- agreement --------------------------------------------------------------------------------------------------------


def _check_same(gathered: Sequence[Any]) -> None:
    """Refuses (UserError, in all processes) configurations that are not the first one's."""
    first = _flat(gathered[0][1])
    for rank, (host, plain) in enumerate(gathered):
        here = _flat(plain)
        for key in (key for key in {**first, **here} if first.get(key) != here.get(key)):
            error = UserError(
                f"process {rank} (host {host}) has {key} {here.get(key)!r:.60}, and the first process {first.get(key)!r:.60}; "
                "start all with the same configuration"
            )
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
    name = group.broadcast(f".shared-{uuid4().hex}")
    if group.first:
        write_whole(folder / name, "")
    group.broadcast(None)  # it is written
    sees = False
    for seconds in LOOKS:
        time.sleep(seconds)
        if sees := (folder / name).exists():
            break
    gathered = group.gather((socket.gethostname(), sees))
    if group.first:
        (folder / name).unlink(missing_ok=True)
    for rank, (host, visible) in enumerate(gathered):
        if not visible:
            error = UserError(
                f"run_folder: process {rank} (host {host}) does not see {folder.absolute()} of the first process (host "
                f"{gathered[0][0]}); name a folder that all nodes share"
            )
            error.shared = True
            raise error
