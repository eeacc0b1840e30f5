"""Maps old names in files to the present ones.

A file keeps the names that it was written with: of tensors in model folders, checkpoints, PEFT folders and edits, and of keys
in stored configurations. Whoever reads such a file passes its names through here. What a user types is not translated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")

MODULES = {"adapter": "projector"}
"""Old to new first part of the names of parameters and modules."""

KEYS = {
    "ModelConfig.adapter": "projector",
    "ModelSection.adapter": "projector",
    "DataConfig.sound_anew": "augment_cached_audio",
    "Position.lanes": "packer_shards",
    "PackerShard.lane": "packer_shard",
    "PackerShard.lanes": "packer_shards",
    "PackerShard.way": "packer_part",
    "PackerShard.ways": "packer_parts",
}
"""Old `Class.field` of configurations and of a checkpoint's plain state, to the new field."""

PATTERNS = {
    "FitConfig.trainable",
    "LoRASection.targets",
    "LoRASection.trainable",
    "LoRASection.quantize_targets",
    "GroupConfig.pattern",
    "OptimizerConfig.muon_exclude",
    "BalanceSection.separate",
    "EditFitConfig.linears",
}
"""Fields of stored configurations that hold names of parameters or modules, or patterns of such names."""

_FIRST = {new: old for old, new in MODULES.items()}

_NAME = re.compile(r"((?:re:|model\.|average\.|optimizer\.|mend\.|transforms\.)*)([^.\\#]*)(.*)", re.DOTALL)
"""Splits a name: prefixes that a pattern, a checkpoint or an editor puts before it; its first part; and the rest."""


def new_name(name: str) -> str:
    """The new name of a parameter or module, or a pattern of such names; unchanged where it has no new one."""
    return _renamed(name, MODULES)


def first_name(name: str) -> str:
    """The first name of a parameter or module. Checksums and random draws are keyed by it, so that older ones stay valid."""
    return _renamed(name, _FIRST)


def new_names(values: Mapping[str, T]) -> dict[str, T]:
    """Renames the keys of a state dict, or of other values by the names of parameters or modules."""
    return {new_name(name): value for name, value in values.items()}


def new_key(kind: Any, key: str) -> str:
    """The new name of a field of `kind`; unchanged where it has no new one."""
    return KEYS.get(f"{kind.__name__}.{key}", key)


def new_fields(kind: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    """Renames the keys of plain data of `kind`, and the names in its patterns."""
    fields = {new_key(kind, key): value for key, value in data.items()}
    return {key: _new_patterns(value) if f"{kind.__name__}.{key}" in PATTERNS else value for key, value in fields.items()}


def _new_patterns(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_new_patterns(one) for one in value]
    return new_name(value) if isinstance(value, str) else value


def _renamed(name: str, table: Mapping[str, str]) -> str:
    head, first, rest = _NAME.fullmatch(name).groups()  # type: ignore[union-attr]
    return f"{head}{table.get(first, first)}{rest}" if rest else name
