"""The order of SNAC's codes is held against the codes of the first rows: right ones pass, the other order is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from omni.codec.registry import code_orders
from omni.errors import UserError
from tests.train.data.readers.toys import snac_text, voice_assistant, write_json, write_parquet
from train.commands.data import run_prepare as main
from train.data.readers import ReaderOptions, open_source
from train.data.readers.codes import FEWEST_FRAMES, FEWEST_ROWS, lean
from train.data.rows.row import Row

Frames = np.ndarray
"""[F, 7] in the order of the model's streams."""

ROWS = 40


@cache
def of_speakers() -> list[Frames]:
    """Codes of three levels of which each uses some more than others, and each row its own part of them, as speakers do."""
    draw = np.random.default_rng(1)
    common = [draw.permutation(4096) for _ in range(3)]
    out = []
    for _ in range(ROWS):
        ranks = np.minimum(draw.zipf(1.3, (60, 7)) * draw.integers(1, 40) - 1, 4095)
        out.append(np.stack([common[level][ranks[:, k]] for k, level in enumerate((0, 1, 2, 2, 1, 2, 2))], 1))
    return out


def voice_assistants(folder: Path, rows: list[Frames]) -> Path:
    return write_parquet(
        folder / "a.parquet", [voice_assistant(i) | {"answer_snac": snac_text(row.tolist())} for i, row in enumerate(rows)]
    )


def lucys(folder: Path, rows: list[Frames]) -> Path:
    talks = []
    for i, row in enumerate(rows):
        (folder / f"{i}.snac").write_text("\n".join(" ".join(map(str, frame)) for frame in row.tolist()))
        said = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Two.", "codec": f"{i}.snac"}]
        talks.append({"conversations": [said[0] | {"wavpath": ""}, said[1]]})
    return write_json(folder / "lucy.json", talks)


LEVELS = np.argsort(code_orders("snac")["levels"])
"""The model's stream at each place."""


def levels(rows: list[Frames]) -> list[Frames]:
    return [row[:, LEVELS] for row in rows]


WRITE = {"streams": voice_assistants, "levels": lucys}
"""By the order that each documents."""


@pytest.mark.parametrize("order", ["streams", "levels"])
def test_the_other_order_is_refused_and_the_documented_one_taken(tmp_path, order):
    streams = of_speakers()
    right, wrong = (streams, levels(streams)) if order == "streams" else (levels(streams), streams)
    (tmp_path / "right").mkdir(), (tmp_path / "wrong").mkdir()
    taken = list(open_source(WRITE[order](tmp_path / "right", right)))
    path, other = WRITE[order](tmp_path / "wrong", wrong), "levels" if order == "streams" else "streams"
    with pytest.raises(UserError) as error:
        open_source(path)
    said = str(error.value)
    assert f"of {ROWS} rows (" in said and f"{path} row 0 to {path} row {ROWS - 1}" in said and "\n" not in said
    assert f"order {other!r}" in said and f"say --read.order {other}, or --read.order {order} where" in said
    for name in (order, other):  # whoever says it is believed
        assert {row.turns[0].answer_codes.order for row in open_source(path, ReaderOptions(order=name))} == {name}
    for row, frames in zip(taken, streams, strict=True):
        assert isinstance(row, Row) and row.turns[0].answer_codes is not None
        stored = row.turns[0].answer_codes.frames.numpy().T
        assert np.array_equal(stored, frames if order == "streams" else frames[:, LEVELS])


def test_a_preparation_stops_before_it_makes_anything(tmp_path):
    path = voice_assistants(tmp_path, levels(of_speakers()))
    with pytest.raises(UserError, match="seem to be in the order 'levels'"):
        main([str(path), str(tmp_path / "out"), "--workers", "0", "--progress", "off"])
    assert {file.name for file in tmp_path.iterdir()} == {"a.parquet"}


def every(place: Callable[[np.random.Generator], Frames]) -> list[Frames]:
    draw = np.random.default_rng(2)
    return [place(draw) for _ in range(ROWS)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "rows",
    [
        every(lambda draw: draw.integers(0, 4096, (60, 7))),  # all codes alike
        every(lambda draw: np.tile(np.arange(7), (60, 1))),  # no places of one level
        every(lambda draw: np.where(draw.random((60, 7)) < 0.9, 5, draw.integers(0, 4096, (60, 7)))),  # a pause alike on all
        levels(of_speakers())[: FEWEST_ROWS - 1],
        [row[: FEWEST_FRAMES // ROWS - 1] for row in levels(of_speakers())],
    ],
    ids=["even", "apart", "paused", "few rows", "few frames"],
)
def test_without_evidence_nothing_is_refused(tmp_path, rows):
    (tmp_path / "lucy").mkdir()
    for write, folder in ((voice_assistants, tmp_path), (lucys, tmp_path / "lucy")):
        for order in (lambda rows: rows, levels):
            assert len(open_source(write(folder, order(rows)))) == len(rows)


def test_the_measure_is_that_of_pairs_of_rows_counted_one_by_one():
    """Slow and plain: every place of every frame of one row against those of another."""
    rows = [row[:6] for row in of_speakers()[:7]]

    def agree(rows: list[Frames], pairs: list[tuple[int, int]]) -> float:
        met = tried = 0
        for i, a in enumerate(rows):
            for j, b in enumerate(rows):
                if i != j:
                    met += sum(int(x == y) for p, q in pairs for x in a[:, p] for y in b[:, q])
                    tried += len(pairs) * len(a) * len(b)
        return 4096 * met / tried - 1

    def value(rows: list[Frames]) -> float:
        second, fourth = (agree(rows, [(place, k) for k in (3, 5, 6)]) for place in (2, 4))
        return (fourth - second) / agree(rows, [(3, 5), (3, 6), (5, 6)])

    found, error = lean([row.T for row in rows], "streams")
    without = np.array([value(rows[:i] + rows[i + 1 :]) for i in range(len(rows))])
    assert found == pytest.approx(value(rows))
    assert error == pytest.approx(np.sqrt((len(rows) - 1) * without.var()))
    assert lean([row.T for row in rows], "levels") == pytest.approx((-found, error))
