"""Law 2: the layout's online cursor equals its offline delay, against a slow reference."""

from __future__ import annotations

import pytest
import torch

from omni.errors import UserError
from omni.layout import Cursor, Layout, Stream

LAYOUTS = {
    "codec2": Layout.preset("codec2"),
    "snac": Layout.preset("snac"),
    "mini-omni": Layout.preset("mini-omni"),
    "uneven": Layout((Stream("audio", 9, 8, 3), Stream("audio", 5, 5, 0), Stream("text", 20, 6, delay=2))),
    "same": Layout.build([7, 7], 11, delays=[0, 0], specials=5),
}


def slow_delay(layout: Layout, text: list[int] | None, frames: list[list[int]] | None) -> list[list[int]]:
    """Columns of an answer, cell by cell from the definition: what is not a token or an end is pad."""
    lengths = {"audio": None if frames is None else len(frames[0]), "text": None if text is None else len(text)}
    width = max(s.delay + n + 1 for s in layout.streams if (n := lengths[s.kind]) is not None)
    rows = []
    for k, s in enumerate(layout.streams):
        row = []
        for c in range(width):
            i, n = c - s.delay, lengths[s.kind]
            if n is None or i < 0 or i > n:
                row.append(s.size + 1)
            elif i == n:
                row.append(s.size)
            else:
                row.append(text[i] if s.kind == "text" else frames[k][i])
        rows.append(row)
    return rows


def undelayed(layout: Layout, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `Layout.delayed`: tokens [K, C] to text [T] and codes [A, F] of the frames that are whole."""
    rows = []
    for k, s in enumerate(layout.streams):
        row = tokens[k, s.delay :]
        ends = (row >= s.size).nonzero()
        rows.append(row[: int(ends[0])] if len(ends) else row)
    frames = min(len(row) for row in rows[:-1])
    return rows[-1], torch.stack([row[:frames] for row in rows[:-1]])


def random_answer(layout: Layout, words: int | None, frames: int | None, seed: int):
    g = torch.Generator().manual_seed(seed)
    text = None if words is None else torch.randint(layout.text.size, (words,), generator=g)
    codes = None
    if frames is not None:
        codes = torch.stack([torch.randint(s.size, (frames,), generator=g) for s in layout.audio])
    return text, codes


CASES = [(3, 5), (6, 2), (0, 4), (4, 0), (0, 0), (4, None), (None, 3), (30, 1), (1, 12)]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("words, frames", CASES)
def test_offline_delay_equals_slow_reference_and_has_an_inverse(name, words, frames):
    layout = LAYOUTS[name]
    text, codes = random_answer(layout, words, frames, seed=1)
    tokens, _ = layout.delayed(text, codes)
    said = None if text is None else text.tolist()
    assert tokens.tolist() == slow_delay(layout, said, None if codes is None else codes.tolist())
    back_text, back_codes = undelayed(layout, tokens)
    assert back_text.tolist() == ([] if text is None else text.tolist())
    assert back_codes.tolist() == ([[]] * layout.n_audio if codes is None else codes.tolist())


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("words, frames", CASES)
def test_a_cut_answer_is_a_whole_one_whose_ends_nobody_learns(name, words, frames):
    layout = LAYOUTS[name]
    text, codes = random_answer(layout, words, frames, seed=1)
    (tokens, valid), (whole, trained) = layout.delayed(text, codes, cut=True), layout.delayed(text, codes)
    assert torch.equal(tokens, whole)
    for k, stream in enumerate(layout.streams):
        given = stream.delay + (len(text) if stream.kind == "text" and text is not None else frames or 0)
        assert torch.equal(valid[k, :given], trained[k, :given]) and not valid[k, given:].any()


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("words, frames", CASES)
def test_cursor_equals_offline_delay(name, words, frames):
    """A sampler that says the trained tokens, and rubbish wherever nothing is trained, gives back the offline columns."""
    layout = LAYOUTS[name]
    text, codes = random_answer(layout, words, frames, seed=2)
    tokens, valid = layout.delayed(text, codes)
    g = torch.Generator().manual_seed(3)
    cursor = Cursor.start(layout, [words is not None], [frames is not None])
    columns, heard, written = [], [], []
    for c in range(tokens.shape[1] + 3):
        sampled = torch.tensor([int(torch.randint(s.size, (1,), generator=g)) for s in layout.streams])
        if c < tokens.shape[1]:
            sampled = torch.where(valid[:, c], tokens[:, c], sampled)
        cursor, push = cursor.push(sampled[None])
        columns.append(push.column[0])
        heard += [push.frame[0].tolist()] if push.has_frame else []
        written += [int(push.text)] if push.has_text else []
        if push.done:
            break
    if layout.fill == "sampled" and frames is not None:
        tokens = tokens[:, : layout.max_delay + frames + 1]  # stops with the last audio stream, whatever the text does
    assert torch.stack(columns, dim=1).tolist() == tokens.tolist()
    assert heard == ([] if codes is None else codes.T.tolist())
    assert written == ([] if text is None else text.tolist())[: tokens.shape[1]]


def test_rows_of_a_cursor_do_not_touch_each_other():
    layout = LAYOUTS["codec2"]
    g = torch.Generator().manual_seed(0)
    steps = [torch.stack([torch.randint(s.size + 1, (5,), generator=g) for s in layout.streams], 1) for _ in range(40)]
    together = Cursor.start(layout, [True, True, False, True, True], [True, False, True, True, True])
    alone = [together.select([i]) for i in range(5)]
    for sampled in steps:
        together, push = together.push(sampled)
        for i in range(5):
            alone[i], single = alone[i].push(sampled[i : i + 1])
            for name in ("column", "has_frame", "has_text", "done"):
                assert torch.equal(getattr(push, name)[i : i + 1], getattr(single, name))
            if single.has_frame:
                assert torch.equal(push.frame[i], single.frame[0])


def test_earliest_end_of_any_stream_ends_the_audio():
    layout = Layout.build([4, 4], 3, specials=5)  # delays 1 and 2
    cursor = Cursor.start(layout, [False], [True])
    end = layout.ids("end")
    said = [[0, 0], [1, 0], [2, 1], [3, int(end[1])], [3, 3]]  # stream 1 ends at its frame 1, when stream 0 is at frame 2
    frames, dones = [], []
    for column in said:
        cursor, push = cursor.push(torch.tensor([[*column, 0]]))
        frames += [push.frame[0].tolist()] if push.has_frame else []
        dones.append(bool(push.done))
    assert frames == [[1, 1]]
    assert dones == [False, False, False, True, True]


def test_sampled_fill_feeds_back_what_was_said_and_stops_with_the_last_stream():
    layout = LAYOUTS["mini-omni"]
    cursor = Cursor.start(layout, [True], [True])
    said = torch.arange(8)[None] + 40
    cursor, push = cursor.push(said)
    assert push.column.tolist() == said.tolist()  # nothing is forced before the delay
    ends_first = said.clone()
    ends_first[0, 0] = layout.audio[0].special("end")
    cursor, push = cursor.push(ends_first)
    assert not push.done  # the end of streams 0-5 is ignored
    ends_last = said.clone()
    ends_last[0, 6] = layout.audio[6].special("end")
    cursor, push = cursor.push(ends_last)
    assert push.done


def test_a_given_stream_is_never_trained_and_answers_with_one_are_refused():
    layout = Layout((Stream("audio", 4, 5, 1), Stream("audio", 4, 5, 1, role="given"), Stream("text", 4, 5)))
    _, valid = layout.delayed(torch.tensor([1]), torch.zeros(2, 3, dtype=torch.long))
    assert valid[0].any() and not valid[1].any()
    with pytest.raises(UserError, match="stream audio1 is given from outside"):
        Cursor.start(layout, [True], [True])


def test_mini_omni_ids_are_those_of_facts():
    layout = Layout.preset("mini-omni")
    assert [layout.text.special(n) for n in ("end", "pad", "input", "answer", "asr")] == list(range(151936, 151941))
    assert [layout.audio[0].special(n) for n in ("end", "pad", "input", "answer", "split")] == list(range(4096, 4101))
    assert layout.text.vocabulary == 152000 and layout.audio[0].vocabulary == 4160
    assert sum(s.vocabulary for s in layout.streams) == 181120
    assert layout.delays == (1, 2, 3, 4, 5, 6, 7, 0)


def test_drawing_shows_tokens_specials_and_what_is_trained():
    layout = Layout.preset("codec2")
    tokens, valid = layout.delayed(torch.tensor([104, 105]), torch.tensor([[1], [2], [3], [4]]))
    drawing = layout.draw(tokens, valid, decode=chr).splitlines()
    assert drawing[1].split() == ["audio0", ".", "1*", "end*", ".", ".", "."]
    assert drawing[-1].split() == ["text", "h*", "i*", "end*", ".", ".", "."]
