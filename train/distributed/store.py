"""The key-value store of a run's processes: a connection of one's own to it, and one name for all of them after a restart."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist

START = timedelta(minutes=30)
"""Longest time that processes wait for each other at their start."""


def outlives(environ: Mapping[str, str]) -> bool:
    """True where torchrun keeps the store, before the run's processes and after them; else the first of them does."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def connect(prefix: str, timeout: timedelta = START) -> dist.Store:
    """Connects to the store of the processes; its keys get a prefix.

    Raises:
        torch.distributed.DistStoreError: it does not answer in time.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.PrefixStore(prefix, dist.TCPStore(address, port, is_master=False, timeout=timeout))


def fresh(rank: int, world: int) -> dist.Store:
    """The part of torchrun's store that belongs to this start of the processes alone; all of them must call it.

    torchrun (torch 2.14) keeps the store when it restarts its processes: without this they would find the addresses of those
    that have died. A number of restarts does not tell starts apart, because each node counts its own. So every process sends
    the first one a new word, and is told the prefix in answer to it.
    """
    store = connect("omni")
    if rank:
        word = uuid4().hex
        store.set(f"word/{rank}", word)
        prefix = store.get(f"answer/{word}").decode()
        store.add(f"{prefix}/joined", 1)
    else:
        prefix, answered = uuid4().hex, dict[int, str]()
        while store.add(f"{prefix}/joined", 0) < world - 1:
            for other in range(1, world):
                if store.check([f"word/{other}"]):
                    word = store.get(f"word/{other}").decode()
                    if answered.get(other) != word:
                        answered[other] = word
                        store.set(f"answer/{word}", prefix)
            time.sleep(0.02)
    return dist.PrefixStore(prefix, store)
