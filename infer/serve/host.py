"""Keeps an engine for the server: starts its process, loads its adapters, and starts it again after a crash."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from omni.engine.process import EngineProcess
from omni.engine.stats import EngineStats
from omni.errors import EngineLost, UserError

LOG = logging.getLogger(__name__)

LOOK = 0.1  # seconds between two looks at the engine
STUCK = 5.0  # seconds without a step, while answers are under way, after which the stepping thread counts as stuck
AGAIN = 1.0  # seconds after which an engine that could not be started is started again


class EngineHost:
    """The engine that answers now.

    Args:
        start: starts an engine.
        adapters: folders of LoRAs, by name, that each engine loads first.

    UserError where the model or an adapter cannot be loaded.
    """

    def __init__(self, start: Callable[[], EngineProcess], adapters: Mapping[str, str] | None = None) -> None:
        self._start, self._adapters = start, dict(adapters or {})
        self._engine = self._make()
        self._seen = (0, time.monotonic())  # steps, and when there were that many first
        self.restarts = 0

    def _make(self) -> EngineProcess:
        engine = self._start()
        try:
            for name, folder in self._adapters.items():
                engine.call("load_adapter", folder, name=name)
        except BaseException:
            engine.close()
            raise
        return engine

    @property
    def alive(self) -> bool:
        return self._engine.alive

    @property
    def listens(self) -> bool:
        """Whether the engine hears questions while they come."""
        return self.alive and self.engine.config.encoder.chunk_samples is not None

    @property
    def engine(self) -> EngineProcess:
        """The engine; EngineLost while there is none."""
        if not self._engine.alive:
            raise EngineLost("the engine has ended and is being started again; ask again in some seconds")
        return self._engine

    def spare(self) -> bool:
        """Whether the engine has time for a transcript; waits for its process."""
        return bool(self.engine.call("engine.spare"))

    def stats(self) -> EngineStats:
        """The engine's figures; waits for its process."""
        stats: EngineStats = self.engine.call("engine.stats")
        return stats

    def stuck(self, stats: EngineStats) -> bool:
        """Whether the engine makes no steps though answers are under way, by figures that were just taken."""
        steps, since = self._seen
        if stats.steps != steps or stats.active == 0:
            self._seen = (stats.steps, time.monotonic())
            return False
        return time.monotonic() - since > STUCK

    async def watch(self, on_lost: Callable[[], None]) -> None:
        """Runs beside the server: tells who waits when the engine is lost, and starts another one."""
        while True:
            await asyncio.sleep(LOOK)
            if self.alive:
                continue
            LOG.error("engine lost: %s", self._engine.lost)
            on_lost()
            while not self.alive:
                try:
                    engine = await asyncio.to_thread(self._make)
                except (UserError, OSError) as error:
                    LOG.error("engine not started: %s", error)
                    await asyncio.sleep(AGAIN)
                    continue
                old, self._engine = self._engine, engine
                self.restarts += 1
                await asyncio.to_thread(old.close)
                LOG.warning("engine started again")

    def close(self) -> None:
        """End the engine."""
        self._engine.close()
