"""Programs of tests in new processes, as `python -m NAME ARGUMENTS`: forked from one that has done their imports."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

FORKS: Any = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["tests.train.balance.toys", "tests.diagnostics.failing", "train.data.prepare.rows", "train.commands.dry_run"]
)


class Ended(NamedTuple):
    """A program's exit code, and what it has written to standard output and standard error."""

    code: int
    out: str
    said: str


class Program:
    """A running program. Its environment is this process's, without what names a launcher, and with `variables`; its folder is
    this process's, or `folder`."""

    def __init__(self, name: str, *arguments: str, folder: str = "", **variables: str) -> None:
        self.files = [tempfile.NamedTemporaryFile("r") for _ in "12"]  # noqa: SIM115 (deleted with the program)
        places = [file.name for file in self.files]
        given = name, arguments, environment(**variables), places, folder or os.getcwd()
        self.process = FORKS.Process(target=_run, args=given)
        self.process.start()
        atexit.register(self.process.kill)

    def end(self, seconds: float = 300) -> Ended:
        """Wait for it; what takes longer hangs, and is killed."""
        self.process.join(seconds)
        self.process.kill()
        self.process.join()
        return Ended(self.process.exitcode, *(file.read() for file in self.files))


def _run(name: str, arguments: Sequence[str], variables: dict[str, str], places: Sequence[str], folder: str) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    for number, place in enumerate(places, 1):
        os.dup2(os.open(place, os.O_WRONLY), number)
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def two(name: str, *arguments: str, launcher: str = "torchrun", seconds: float = 300, again: bool = False) -> list[Ended]:
    """Run a program in two processes, as torchrun or srun would start them."""
    return several(2, name, *arguments, launcher=launcher, seconds=seconds, again=again)


def several(
    count: int, name: str, *arguments: str, launcher: str = "torchrun", seconds: float = 300, again: bool = False
) -> list[Ended]:
    """Run a program in so many processes, as torchrun or srun would start them; or start them `again`, in the same launch."""
    main, programs, world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}, [], str(count)
    for rank in map(str, range(count)):
        if launcher == "torchrun":
            variables = {
                "TORCHELASTIC_RUN_ID": "x", "RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world,
                "GROUP_RANK": "0", "TORCHELASTIC_RESTART_COUNT": str(int(again)),
            }  # fmt: skip
        else:
            variables = {
                "SLURM_NTASKS": world, "SLURM_NTASKS_PER_NODE": world, "SLURM_NNODES": "1", "SLURM_JOB_NAME": "train",
                "SLURM_JOB_ID": "7", "SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": "0",
                "SLURM_RESTART_COUNT": str(int(again)),
            }  # fmt: skip
        programs.append(Program(name, *arguments, **main, **variables))
    return [program.end(seconds) for program in programs]


def environment(**variables: str) -> dict[str, str]:
    """This process's environment without what names a launcher."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "TORCHELASTIC", "LOCAL_", "MASTER_"))}
    return {**clean, "OMP_NUM_THREADS": "1", **variables}


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
