"""The collective that a process waits in is named, as PyTorch's flight recorder knows it."""

from __future__ import annotations

from typing import Any

from tests.processes import Program, free_port
from train.distributed.process_group import described


def entry(name: str, number: int, state: str, size: int = 5) -> dict[str, Any]:
    group = ["0", "default_pg"]
    return {
        "profiling_name": name,
        "collective_seq_id": number,
        "state": state,
        "input_sizes": [[size]],
        "process_group": group,
    }


def test_it_is_the_first_that_has_not_ended_or_the_last_one_where_ends_are_not_seen() -> None:
    nccl = [
        entry("nccl:all_reduce", 1, "completed"),
        entry("nccl:all_gather", 2, "started"),
        entry("nccl:all_reduce", 3, "scheduled"),
    ]
    assert described(nccl) == "nccl:all_gather of [5], the group's number 2"
    assert described(nccl[:1]) == "" == described([])
    gloo = [entry("gloo:all_reduce", 1, "scheduled"), entry("gloo:broadcast", 2, "scheduled", 1000)]
    assert described(gloo) == "gloo:broadcast of [1000], the group's number 2"
    assert described([{"profiling_name": "gloo:barrier"}]) == "gloo:barrier of nothing, the group's number ?"


def test_the_recorder_knows_gloos_collectives() -> None:
    """In a process of its own, as the recorder lives as long as its process."""
    ended = Program("tests.train.distributed.collectives_child", MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port()).end(60)
    assert ended.code == 0, ended.said
    assert ended.out.splitlines()[-1].startswith("gloo:all_reduce of [77], the group's number ")
