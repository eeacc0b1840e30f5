"""From anybody's data set to documented rows in Parquet shards: read, spoken, encoded, stored.

`engine.prepare` is the whole. A preparation works in a folder beside its output, `OUT.preparing`, which becomes OUT by one
rename once everything is there, so that an OUT is always whole. Items of the source are cut into blocks of a fixed size
(`blocks`), made in any number of processes (`pool`), and taken in their order (`engine`): what is stored depends on the source
and the settings alone. Every finished shard leaves a note of the items it covers (`shards`), where an interrupted preparation
goes on; `lock` keeps two of them apart, `settings` refuses to go on with other settings.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train.data.prepare.config import PrepareConfig
    from train.data.prepare.engine import prepare
    from train.data.prepare.tally import Tally

_PLACES = {
    "PrepareConfig": "train.data.prepare.config", "Tally": "train.data.prepare.tally", "prepare": "train.data.prepare.engine",
}  # fmt: skip

__all__ = ["PrepareConfig", "Tally", "prepare"]


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is asked for: a configuration names voices, and needs no more of this package."""
    if name not in _PLACES:
        raise AttributeError(f"module 'train.data.prepare' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
