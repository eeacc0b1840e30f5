"""Reads WebDataset shards (.tar) and Parquet files through Hugging Face `datasets`, here or in a store, without a copy.

A record of a WebDataset shard has a field for each of its files, by what follows the first dot of the name (`question.wav`,
`txt`), and `__key__`; those of its `json` are fields too. They are known by the first five records of a shard: what these lack
is not read. A shard is read from its start on: to go on at a record, those before it are read and dropped.
"""

from __future__ import annotations

import fnmatch
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni.errors import UserError
from omni.files import refuse_pointer
from omni.stores.drivers import StoredObject, bare, list_objects, parent
from omni.stores.reading import looked_up
from omni.utils.remote import check_there, find_address, shown
from train.data.readers.record import Record, finite
from train.data.rows.places import DataFile

if TYPE_CHECKING:
    import datasets

TAR = ".tar"
KINDS = (TAR, ".parquet")

_DAMAGE = (tarfile.TarError, EOFError, zlib.error, ValueError, TypeError, LookupError, ArithmeticError, RuntimeError)
"""Errors of a shard's content; so is an OSError without a number, which is pyarrow's."""

_ABSENT = (FileNotFoundError, PermissionError, ConnectionError, TimeoutError)


class ShardError(UserError):
    """A shard that cannot be read now, whatever it holds; another try may read it."""


def find_shards(path: str) -> list[DataFile]:
    """The shards at `path`: a file, all in a folder and below it, or those that a pattern in the last part fits (`a-*.tar`).

    They are sorted by name. UserError where there are none, or of both kinds.
    """
    address = find_address(path)
    place, shards = shown(address) if address else path, list[DataFile]()
    name = (address or path).rstrip("/").rpartition("/")[2]
    pattern = name if any(c in name for c in "*[") and not (address is None and Path(path).exists()) else ""
    if address is not None:
        if not pattern and bare(address).endswith(KINDS):
            shards = [looked_up(address)]
        else:
            found = list_objects(parent(address) if pattern else address, deep=not pattern)
            shards += (one for one in found if not pattern or fnmatch.fnmatchcase(one.name, pattern))
    elif pattern:
        shards += sorted(Path(path).parent.glob(pattern))
    else:
        check_there(path, "data", f"data {path} does not exist: name a shard, a folder of shards, or a pattern such as a-*.tar")
        shards += sorted(Path(path).rglob("*")) if Path(path).is_dir() else [Path(path)]
    shards = [one for one in shards if suffix(one) in KINDS and not one.name.startswith(".")]
    kinds = {suffix(one) for one in shards}
    if len(kinds) != 1:
        held = "shards of both kinds" if kinds else "no shard"
        raise UserError(f"data {place} has {held} (.tar of WebDataset, .parquet): name those to read, such as by a-*.tar")
    return shards


def suffix(shard: DataFile) -> str:
    return Path(shard.name).suffix


def read_shard(shard: DataFile, start: int = 0) -> Iterator[Record]:
    """The records of a shard from number `start` on; where it is damaged, the last one has the error.

    Raises:
        ShardError: it cannot be read now, or is not any more what was listed.
    """
    number = start
    try:
        rows = _opened(shard)
        # One by one, a data set is shared by the workers of a torch loader; in batches, each reads it all.
        for batch in (rows.skip(start) if start else rows).iter(batch_size=1):
            yield Record(f"{shard} row {number}", finite(_flat({name: values[0] for name, values in batch.items()})))
            number += 1
    except UserError as error:
        raise ShardError(str(error)) from error
    except (*_DAMAGE, OSError) as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        if isinstance(error, _ABSENT) or (isinstance(error, OSError) and error.errno is not None):
            raise ShardError(
                f"{shard} cannot be read ({said}): see that it is there, and run the same command again"
            ) from error
        why = f"it and what follows in its file cannot be read ({said}): make the file again"
        yield Record(f"{shard} row {number}", {}, why)


def _opened(shard: DataFile) -> datasets.IterableDataset:
    """Open a shard; sounds come as they are stored."""
    from datasets import Features, Value

    if isinstance(shard, StoredObject):
        from omni.stores.filesystem import url_of

        url = url_of(shard)
    else:
        refuse_pointer(shard)
        url = str(shard.resolve()).replace("[", "[[]")
    # Its builders, since `load_dataset` sends a request to the hub for each.
    if suffix(shard) == ".parquet":
        from datasets.packaged_modules.parquet.parquet import Parquet

        return Parquet(data_files={"train": [url]}, hash="").as_streaming_dataset("train").decode(False)
    from datasets.packaged_modules.webdataset.webdataset import WebDataset

    builder = WebDataset(data_files={"train": [url]}, hash="")
    features = builder.as_streaming_dataset("train").features or {}
    # What is typed as sound, `datasets` would encode again, for which it takes torchcodec; bytes stay as they are.
    builder.info.features = Features(
        {name: Value("binary") if hasattr(kind, "decode_example") else kind for name, kind in features.items()}
    )
    return builder.as_streaming_dataset("train")


def _flat(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields as readers take them: those of `json` beside the others, and bytes as recordings."""
    inner = fields.get("json")
    outer = {name: {"bytes": one, "path": None} if isinstance(one, bytes) else one for name, one in fields.items()}
    return {**inner, **outer} if isinstance(inner, Mapping) else outer
