"""Makes blocks in actors of a Ray cluster; this process returns them in order and stores them, as those of its own pool.

Ray starts an actor again that has died, and gives it its blocks again: a block depends on the source and the settings alone.
Ray Data runs the same actors, but takes the driver about 4 ms a block (actors alone: 0.5), keeps some KB of each until the end,
tries a block that ends its process without end (or, by a setting that is to go, does not say which block it was), and does not
run through `ray://` (Ray 2.60).
"""

from __future__ import annotations

import logging
import os
import pickle
import platform
from collections.abc import Generator, Sequence
from typing import Any

from omni.errors import UserError
from omni.plugins import load_plugins, loaded
from omni.remote import shown
from train.data.prepare.config import PrepareConfig
from train.data.prepare.pool import BlockPool, pooled
from train.data.prepare.worker import BlockMaker, PreparedBlock, Tick
from train.data.readers import OpenedSource, data_path
from train.data.rows.row import features

RETRIES = 10
"""Number of times that a block is given to an actor which dies, after the first."""


def cluster_blocks(
    source: OpenedSource, config: PrepareConfig, starts: range, total: int, tick: Tick, codec: object = None
) -> Generator[PreparedBlock, None, None]:
    """Make blocks as `pool.make_blocks`, on the cluster `config.ray`; each of its processes loads a codec of its own."""
    if starts:
        yield from pooled(RayPool(source, config, len(starts)), starts, total, tick)


class RayPool(BlockPool):
    """Actors of a cluster: `config.workers`, or one for each core (and `threads`) or GPU, and no more than there are blocks.

    Raises:
        UserError: Ray is not installed, no cluster answers, or it has no room for an actor.
    """

    def __init__(self, source: OpenedSource, config: PrepareConfig, blocks: int) -> None:
        self.ray = _ray()
        self.own = not self.ray.is_initialized()
        self.address = config.ray
        if self.own:
            _connect(self.ray, config.ray)
        gpus = 0 if config.device == "cpu" else 1
        needs = {"CPU": config.threads, "GPU": gpus}
        room = self._room(needs)
        count = min(blocks, config.workers or room)
        kind = self.ray.remote(
            num_cpus=config.threads, num_gpus=gpus, max_restarts=-1, max_task_retries=RETRIES
        )(BlockActor)  # fmt: skip
        work = pickle.dumps((source, config, features().arrow_schema))
        self.workers = {number: kind.remote(work, loaded()) for number in range(count)}
        self._pending: dict[Any, tuple[int, int, int]] = {}

    def _room(self, needs: dict[str, int]) -> int:
        """Number of actors that the cluster has room for."""
        has = self.ray.cluster_resources()
        for name, number in needs.items():
            if has.get(name, 0) < number:
                self.close()
                raise UserError(
                    f"ray {self.address!r}: the cluster has {has.get(name, 0):g} {name} and a worker needs {number}: give "
                    f"another --{'threads' if name == 'CPU' else 'device'}, or another cluster"
                )
        return int(min(has[name] // number for name, number in needs.items() if number))

    def send(self, worker: int, start: int, stop: int) -> None:
        self._pending[self.workers[worker].make.remote(start, stop)] = worker, start, stop

    def receive(self) -> Generator[tuple[int, PreparedBlock | tuple[int, float]], None, None]:
        done, _ = self.ray.wait(list(self._pending))
        for one in done:
            worker, start, stop = self._pending.pop(one)
            try:
                made = self.ray.get(one)
            except self.ray.exceptions.RayActorError as error:
                raise UserError(
                    f"items {start} to {stop - 1} end each process that prepares them ({RETRIES + 1} tries), perhaps for want "
                    "of memory: run the same command again to go on, with fewer --workers or on larger machines"
                ) from error
            if isinstance(made, str):
                raise UserError(made)
            yield worker, (stop - start, made.tally.seconds)
            yield worker, made

    def close(self) -> None:
        for worker in getattr(self, "workers", {}).values():
            self.ray.kill(worker)
        if self.own:
            self.ray.shutdown()


class BlockActor:
    """Makes blocks in a process of the cluster."""

    def __init__(self, work: bytes, plugins: Sequence[str]) -> None:
        self.work, self.plugins = work, plugins
        self.maker: BlockMaker | None = None

    def make(self, start: int, stop: int) -> PreparedBlock | str:
        """Make the block of items `start` to `stop`; the text of a UserError where it cannot be made."""
        try:
            if self.maker is None:
                load_plugins(self.plugins)
                source, config, schema = pickle.loads(self.work)
                _bring(source)
                self.maker = BlockMaker(source, config, schema)
            return self.maker.make(start, stop, lambda items, seconds: None)
        except UserError as error:
            return str(error)


def _bring(source: OpenedSource) -> None:
    """Bring data of a store to this machine, where another one has opened them; UserError where its cache is another folder."""
    if source.brought is None or source.brought[0].exists():
        return
    path, address = source.brought
    here = data_path(address)
    if here != path:
        raise UserError(
            f"{shown(address)} is at {here} in the cache of {platform.node()}, and at {path} where the command was started: "
            "set OMNI_CACHE to the same folder on all machines of the cluster"
        )


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise UserError('--ray needs Ray, which is not installed: pip install "omni-speech[ray]"') from error
    return ray


def _connect(ray: Any, address: str) -> None:
    local = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address, logging_level=logging.WARNING, log_to_driver=False, **local)
    except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(
            f"ray {address!r} is no cluster that answers ({why}): start one by `ray start --head`, or give --ray local"
        ) from error
