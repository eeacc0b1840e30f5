"""Streams of WebDataset shards and Parquet files: the rows that `data prepare` makes, exact over stops, for any workers."""

from __future__ import annotations

import io
import json
import tarfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
import torch

from omni.errors import UserError
from tests.train.data.batching.test_loader import check_resumes, plainly_stored, same_steps, take
from tests.train.data.toys import MODELS, TOKENIZER, codec_of
from train.data.batching.examples import Unusable
from train.data.batching.loader import Pipeline, StepLoader
from train.data.build import build_pipeline
from train.data.config import DataConfig, PackingConfig, SourceConfig
from train.data.prepare.prepare import prepare
from train.data.prepare.rows import PrepareConfig
from train.data.readers import ReaderOptions, open_source
from train.data.readers.containers import ShardError, read_shard
from train.data.rows.parquet import StoredRows
from train.data.sources.streams import StreamSource

MODEL = MODELS["codec2"]
SHARDS = (5, 4, 7)
COLUMNS = {"question_audio": "question.flac", "answer_audio": "answer.wav", "id": "__key__", "question_text": "asked"}


def sound(samples: int, kind: str, rate: int) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, np.random.default_rng(samples).uniform(-0.5, 0.5, samples), rate, format=kind, subtype="PCM_16")
    return out.getvalue()


def records() -> list[dict[str, Any]]:
    """A question and an answer each, spoken and written."""
    return [
        {
            "id": f"r{n:02d}",
            "question_audio": sound(1600 + 40 * n, "FLAC", 16000),
            "answer_audio": sound(800 + 33 * n, "WAV", 8000),
            "question_text": f"what is {n}?",
            "answer_text": f"it is {n}",
        }
        for n in range(sum(SHARDS))
    ]


def write_tar(file: Path, some: list[dict[str, Any]]) -> None:
    with tarfile.open(file, "w") as tar:
        for one in some:
            said = json.dumps({"asked": one["question_text"], "answer_text": one["answer_text"]}).encode()
            for name, data in (("question.flac", one["question_audio"]), ("answer.wav", one["answer_audio"]), ("json", said)):
                member = tarfile.TarInfo(f"{one['id']}.{name}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def write_parquet(file: Path, some: list[dict[str, Any]]) -> None:
    """As the hub has them: recordings are of `datasets`' type, which the file's metadata say."""
    import datasets

    kinds = {name: datasets.Audio() if name.endswith("audio") else datasets.Value("string") for name in some[0]}
    schema = datasets.Features(kinds).arrow_schema
    plain = [{name: {"bytes": v, "path": None} if isinstance(v, bytes) else v for name, v in one.items()} for one in some]
    pq.write_table(pa.Table.from_pylist(plain, schema), file, row_group_size=3)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same records as WebDataset shards, as Parquet files, and as prepared rows."""
    folder, first, rest = tmp_path_factory.mktemp("data"), 0, records()
    for kind in ("tar", "parquet", "one"):
        (folder / kind).mkdir()
    write_parquet(folder / "one" / "all.parquet", rest)
    for number, count in enumerate(SHARDS):
        write_tar(folder / "tar" / f"s-{number}.tar", rest[first : first + count])
        write_parquet(folder / "parquet" / f"s-{number}.parquet", rest[first : first + count])
        first += count
    (folder / "tar" / "notes.txt").write_text("not a shard")
    prepare(folder / "one" / "all.parquet", folder / "rows", PrepareConfig(question_rate=0, workers=0))
    return {name: folder / name for name in ("tar", "parquet", "rows")}


def options(kind: str) -> ReaderOptions | None:
    return ReaderOptions(columns=COLUMNS) if kind == "tar" else None


def pipeline(path: Path | str, kind: str, more: Sequence[SourceConfig] = (), broken: Any = "error", **changes: Any) -> Pipeline:
    settings: dict[str, Any] = {"tasks": {"A1A2": 0.6, "A1T1": 0.4}, "read": options(kind), "window": 3}
    source = SourceConfig("stream", path=str(path), **{**settings, **changes})
    config = DataConfig((source, *more), packing=PackingConfig(rows=2, length=160, buffer=4), broken=broken, seed=5)
    return build_pipeline(config, MODEL, TOKENIZER, codec_of(MODEL))


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_its_rows_are_those_that_data_prepare_makes(data: dict[str, Path], kind: str) -> None:
    stored = {row.id: row for row in StoredRows(data["rows"])}
    source = StreamSource(str(data[kind]), options(kind), "toy4", 4)
    rows = [source.row(number) for number in range(sum(SHARDS))]
    assert sorted(row.id for row in rows) == sorted(stored) and [row.id for row in rows] != sorted(stored)
    for row in rows:
        (turn,), (wanted,) = row.turns, stored[row.id].turns
        assert (turn.question_text, turn.answer_text, row.language) == (wanted.question_text, wanted.answer_text, "en")
        assert turn.question_audio is not None and wanted.question_audio is not None
        assert torch.equal(turn.question_audio.load(16000), wanted.question_audio.load(16000))
        assert row.where.startswith(f"{data[kind]}/s-") and " row " in row.where


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("mixed", "kind"), [(False, "tar"), (False, "parquet"), (True, "parquet"), (True, "tar")])
def test_stopped_at_any_step_it_goes_on_as_if_it_had_not(data: dict[str, Path], kind: str, mixed: bool) -> None:
    more = (SourceConfig("stored", path=str(data["rows"]), tasks={"T1T2": 1.0}, weight=0.5),) if mixed else ()
    wanted, states = check_resumes(lambda **state: StepLoader(pipeline(data[kind], kind, more), 2, **state), 4, range(1, 4))
    without = {key: {**state, "streams": {}} for key, state in states[2].items()}  # found from the beginning
    same_steps(take(StepLoader(pipeline(data[kind], kind, more), 2, start_step=3, states=without), 1), wanted[3:])
    assert all(state["streams"]["0"][-1][0] > 0 for state in states[-1].values())


@pytest.mark.long
def test_a_run_of_two_workers_goes_on_alike_with_any_number(data: dict[str, Path]) -> None:
    whole = StepLoader(pipeline(data["tar"], "tar"), 2, workers=2)
    for _ in range(3):
        next(whole)
    states = plainly_stored(whole.states)
    wanted = take(whole, 3)
    same_steps(take(StepLoader(pipeline(data["tar"], "tar"), 2, workers=0, start_step=3, states=states), 3), wanted)


def test_broken_rows_are_counted_and_a_damaged_shard_ends_there(data: dict[str, Path], tmp_path: Path) -> None:
    some = records()
    some[1]["question_audio"] = b"no sound"
    write_tar(tmp_path / "a.tar", some[:4])
    write_tar(tmp_path / "b.tar", records())
    whole = (tmp_path / "b.tar").read_bytes()
    (tmp_path / "b.tar").write_bytes(whole[: len(whole) // 2])
    pipe = pipeline(tmp_path, "tar", broken="skip", window=100)
    found = [pipe.fetch(number) for number in range(30)]
    unused = Counter(str(one) for one in found if isinstance(one, Unusable))
    assert all(one.reason == "the row cannot be read" for one in found if isinstance(one, Unusable))
    assert sum("a.tar row 1: " in why for why in unused) == 1
    (cut,) = [why for why in unused if "b.tar" in why]
    assert "and what follows in its file cannot be read" in cut and "make the file again" in cut
    good = {one.where for one in found if not isinstance(one, Unusable)}
    assert {where for where in good if "b.tar" in where} and len([where for where in good if "a.tar" in where]) == 3
    with pytest.raises(UserError, match=r"[ab]\.tar row \d+: "):
        strict = pipeline(tmp_path, "tar")
        for number in range(30):
            strict.fetch(number)


def test_a_broken_file_of_a_shard_is_one_broken_row_and_damage_is_not_taken_for_its_end(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", records())
    whole = bytearray((tmp_path / "a.tar").read_bytes())
    said = whole.index(b'{"asked": "what is 3?"')
    whole[said : said + 2] = b"\xff\xff"
    (tmp_path / "json.tar").write_bytes(whole)
    errors = [record.error for record in read_shard(tmp_path / "json.tar")]
    assert len(errors) == 16 and [i for i, why in enumerate(errors) if "its file 'json' cannot be read" in why] == [3]
    header = whole.index(b"r09.question.flac")
    whole[header : header + 3] = b"\xff\xff\xff"
    (tmp_path / "header.tar").write_bytes(whole)
    errors = [record.error for record in read_shard(tmp_path / "header.tar")]
    assert len(errors) == 9 and f"at byte {header} is neither" in errors[-1] and not any(errors[4:8])


def test_a_shard_that_is_gone_ends_the_run_even_where_broken_rows_are_skipped(data: dict[str, Path], tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"s-{number}.tar").write_bytes((data["tar"] / f"s-{number}.tar").read_bytes())
    pipe = pipeline(tmp_path, "tar", broken="skip")
    for shard in tmp_path.glob("*.tar"):
        shard.unlink()
    with pytest.raises(ShardError, match=r"s-\d\.tar cannot be read \(.*see that it is there"):
        pipe.fetch(0)


@pytest.mark.parametrize(
    ("path", "read", "message"),
    [
        ("none", None, "data .*none does not exist: name a shard, a folder of shards, or a pattern such as"),
        (".", None, "has shards of both kinds"),
        ("tar", {"columns": {"answer_text": "said"}}, "tar has no column 'said': it has asked"),
        ("tar", {"format": "librispeech"}, "read.format 'librispeech' makes no rows of single records, and is not streamed"),
    ],
)
def test_data_that_cannot_be_streamed_are_refused(
    data: dict[str, Path], path: str, read: Mapping[str, Any] | None, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        StreamSource(str(data["tar"].parent / path), None if read is None else ReaderOptions(**read))


def test_data_prepare_reads_webdataset_shards_as_it_reads_a_table(data: dict[str, Path], tmp_path: Path) -> None:
    """Also a shard that is cut short, up to there."""
    config = PrepareConfig(read=ReaderOptions(columns=COLUMNS), question_rate=0, workers=0)
    prepare(data["tar"], tmp_path / "rows", config)
    found, wanted = pq.read_table(tmp_path / "rows" / "rows-00000.parquet"), pq.read_table(data["rows"] / "rows-00000.parquet")
    assert found.sort_by("id") == wanted.sort_by("id")
    whole = (data["tar"] / "s-2.tar").read_bytes()
    (tmp_path / "cut.tar").write_bytes(whole[: len(whole) * 6 // 7])
    done = prepare(tmp_path / "cut.tar", tmp_path / "some", config)
    assert done.broken == 1 and 4 <= done.rows < 7
    source = open_source(data["tar"], ReaderOptions(columns=COLUMNS))
    assert len(source) == 16 and [row.id for row in source.iterate(3, 11)] == [row.id for row in source][3:11]


def test_batches_of_a_bucket_are_those_of_the_folder(bucket: Any, data: dict[str, Path]) -> None:
    """Requests fail now and then; a folder in the bucket is listed once."""
    address = bucket.put_all(data["tar"], "shards/of")
    pipes = [pipeline(path, "tar") for path in (f"{address}/s-*.tar", data["tar"])]
    bucket.server.errors, bucket.server.cuts = 0.05, 0.05
    for pipe in pipes:
        pipe.names = ["stream"]
    there, here = (take(StepLoader(pipe, 1), 2) for pipe in pipes)
    for ours, wanted in zip(there, here, strict=True):
        assert torch.equal(ours[0].tokens, wanted[0].tokens)
    assert bucket.server.seen["LIST"] == 1
    assert pipes[0].mixture.sources[0].row(0).where.startswith(f"{address}/s-")
