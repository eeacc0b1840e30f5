"""The part of torchrun's store that belongs to one start of the processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from time import sleep

import pytest
import torch.distributed as dist

from tests.processes import free_port
from train.distributed.process_group import fresh


def test_a_start_shares_its_keys_with_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the first process, or another one, is late: the others have left words and answers from the start before."""
    port = free_port()
    server = dist.TCPStore("127.0.0.1", int(port), is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)

    def start(rank: int, number: int, late: int) -> dist.Store:
        sleep(0.2 * (rank == late))
        store = fresh(rank, 3)
        assert not store.check([f"address of {rank}"])
        store.set(f"address of {rank}", str(number))
        return store

    for number, late in enumerate((-1, 0, 1, 2)):
        with ThreadPoolExecutor(3) as pool:
            stores = list(pool.map(lambda rank, number=number, late=late: start(rank, number, late), range(3)))
        assert [store.get(f"address of {rank}") for store in stores for rank in range(3)] == [str(number).encode()] * 9
    del server
