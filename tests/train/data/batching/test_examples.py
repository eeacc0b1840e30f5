"""From rows to examples: the columns of the task, what is heard, what is spelt; and the configuration of it all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from omni.config import from_dict, to_dict
from omni.errors import UserError
from omni.generate.speech_lm import SpeechLM
from omni.model.speech_model import SpeechModel
from omni.tasks import TASKS, Turn, example, prompt
from tests.generate.session_toys import inside
from tests.test_layout import undelayed
from tests.train.data.toys import ENCODER, MODELS, TOKENIZER, ToySource, codec_of, maker_of, pipeline_of
from train.data.batching.examples import Alignment, ExampleMaker, Prepared, heard, interrupted, turn_columns
from train.data.build import build_alignment, build_pipeline, held_out_rows
from train.data.config import AugmentConfig, DataConfig, SourceConfig
from train.data.rows.parquet import StoredRows, write_rows
from train.data.rows.row import Row, RowTurn, Sound, Word
from train.data.seeding import seeded_rng

AUGMENT = AugmentConfig(speed=(0.9, 1.1), noise_snr_db=(5, 20), freq_masks=(1, 12), time_masks=(1, 20))


def row_of(model, turns: int = 1) -> Row:
    source = ToySource("toy", None, codec_of(model), turns)
    return next(row for i in range(100) if len((row := source.row(i)).turns) == turns)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("task", TASKS)
def test_with_a_system_message_an_example_is_what_a_session_feeds(name, task, tmp_path):
    """Law 3 through both doors: a stored row's example, and the columns of a session that is given the same message."""
    model = MODELS[name]
    write_rows(tmp_path / "a.parquet", [replace(row_of(model), system=" Be brief. ")])
    row = StoredRows(tmp_path / "a.parquet")[0]
    made = maker_of(model).make(0, Prepared(row), [task])
    lm = SpeechLM(SpeechModel(model).eval(), TOKENIZER, None)
    turn = row.turns[0]
    with lm.session(system="Be brief.", max_tokens=1) as session:
        session.ask(turn.question_audio.load(16000) if TASKS[task].question == "audio" else turn.question_text, task)
        served = inside(session)._last.columns
    start = len(served)
    assert served.tokens[-1, 1 : 1 + len("Be brief.")].tolist() == TOKENIZER.encode("Be brief.")
    assert torch.equal(made.columns.tokens[:, :start], served.tokens)
    assert torch.equal(made.columns.feature_index[:start], served.feature_index)
    assert (made.task == list(TASKS).index(task)).all() and len(made.task) == len(made.columns)
    without = maker_of(model).make(0, Prepared(replace(row, system="")), [task])
    message = len("Be brief.") + 2
    assert torch.equal(made.columns.targets[:, message:], without.columns.targets)
    assert bool((made.columns.targets[:, :message] == -100).all())
    left_out = ExampleMaker(model, TOKENIZER, codec_of(model), system=False).make(0, Prepared(row), [task])
    assert torch.equal(left_out.columns.tokens, without.columns.tokens)


def served_ids(turn: RowTurn) -> list[int]:
    return TOKENIZER.encode(turn.question_text)


def answer_ids(turn: RowTurn, task: str) -> list[int]:
    return TOKENIZER.encode(turn.question_text if task == "A1T1" else turn.answer_text)


def turns_of(model, row: Row, task: str) -> list[Turn]:
    """The row's turns as ids."""
    out = []
    for turn in row.turns:
        features = model.features(len(turn.question_audio.samples)) if TASKS[task].question == "audio" else 0
        codes = turn.answer_codes.frames
        out.append(Turn(task, features=features, question=served_ids(turn), text=answer_ids(turn, task), codes=codes))
    return out


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("task", TASKS)
def test_an_example_is_the_tasks_columns_and_its_prompt_that_of_serving(name, task):
    """Law 3 for data: the prompt's columns equal those that serving lays out for the same question."""
    model = MODELS[name]
    row = row_of(model)
    made = maker_of(model).make(0, Prepared(row), [task])
    turn, audio = row.turns[0], row.turns[0].question_audio.samples
    question = TOKENIZER.encode(turn.question_text)
    served = prompt(model.layout, Turn(task, features=model.features(len(audio)), question=question))
    start = len(served)
    assert torch.equal(made.columns.tokens[:, :start], served.tokens)
    assert torch.equal(made.columns.feature_index[:start], served.feature_index)
    assert (made.task == list(TASKS).index(task)).all() and len(made.task) == len(made.columns)
    asked = {"features": model.features(len(audio))} if TASKS[task].question == "audio" else {}
    ids = Turn(task, **asked, question=served_ids(turn), text=answer_ids(turn, task), codes=turn.answer_codes.frames)
    whole = example(model.layout, [ids])
    for field in ("tokens", "targets", "feature_index"):
        assert torch.equal(getattr(made.columns, field), getattr(whole, field))
    assert made.columns.features == whole.features
    if TASKS[task].question == "audio":
        assert torch.equal(made.clips[0].inputs, model.encoder.features(audio))
        assert made.clips[0].frames == model.encoder.frames(len(audio))
        assert made.columns.features == (model.features(len(audio)),)
    else:
        assert made.clips == () and made.columns.features == ()


@pytest.mark.parametrize("name", MODELS)
def test_a_conversation_is_its_turns_joined(name):
    model = MODELS[name]
    row, tasks = row_of(model, 3), ["A1A2", "T1T2", "A1T2"]
    made = maker_of(model).make(0, Prepared(row), tasks)
    turns = [turns_of(model, row, task)[number] for number, task in enumerate(tasks)]
    whole = example(model.layout, turns)
    for field in ("tokens", "targets", "feature_index"):
        assert torch.equal(getattr(made.columns, field), getattr(whole, field))
    assert made.columns.features == whole.features and len(made.clips) == 2
    sizes = [len(example(model.layout, [turn])) for turn in turns]
    assert made.task.tolist() == [list(TASKS).index(t) for t, n in zip(tasks, sizes, strict=True) for _ in range(n)]


def test_a_rows_own_task_comes_first():
    pipeline = pipeline_of(MODELS["codec2"])
    source = pipeline.mixture.sources[0]
    plain = source.row
    source.row = lambda index: replace(plain(index), task="T1A1")
    numbers = [n for n in range(20) if pipeline.mixture.draw(n).source == 0]
    assert {list(TASKS)[i] for n in numbers for i in pipeline.fetch(n).task.unique().tolist()} == {"T1A1"}


@pytest.mark.parametrize("repeat", [1, 4])
def test_augmentation_belongs_to_the_draw(repeat):
    """The same whenever the draw is made; another for every draw, even of the same row."""
    model = MODELS["codec2"]

    def made() -> list[torch.Tensor]:
        pipeline = pipeline_of(model, sizes=(None,), weights=(1,), repeat=repeat, augment=AUGMENT)
        pipeline.tasks = [type(pipeline.tasks[0])({"A1T1": 1.0})]
        found = {n: pipeline.fetch(n).clips[0] for n in (7, 3, 0, 1, 2, 4, 5, 6)}
        return [found[n] for n in range(8)]

    first, second = made(), made()
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.inputs, b.inputs) and a.frames == b.frames == (a.inputs.shape[1] + 1) // 2
    for i in range(8):
        for j in range(i):
            assert first[i].inputs.shape != first[j].inputs.shape or not torch.equal(first[i].inputs, first[j].inputs)
    if repeat == 4:  # four draws of one row are as long as each other: the sound is changed once for all
        assert len({clip.inputs.shape[1] for clip in first[:4]}) == 1


@pytest.mark.parametrize(("kept", "made"), [(2, [0, 4, 8, 0]), (1, [0, 4, 8, 4, 0])])
def test_kept_rows_are_made_once_and_forgotten_in_turn(kept, made):
    """Rows 0, 4 and 8 are each good for four draws; of those kept, the one that was not used for longest is forgotten first."""
    pipeline = pipeline_of(MODELS["codec2"], sizes=(None,), weights=(1,), repeat=4, kept=kept)
    for n in (0, 1, 2, 4, 3, 5, 8) if kept == 2 else (0, 1, 4, 5, 8, 4, 0):
        pipeline.fetch(n)
    if kept == 2:
        pipeline.fetch(6)
        pipeline.fetch(0)
    assert pipeline.mixture.sources[0].made == made


def test_speech_longer_than_the_window_is_refused_or_split_as_the_model_says():
    row = replace(row_of(MODELS["codec2"]), where="data.parquet row 5")
    long = replace(row, turns=(replace(row.turns[0], question_audio=Sound(torch.randn(5 * 16000) * 0.1, 16000)),))
    with pytest.raises(UserError, match=r"^data.parquet row 5, turn 0: the sound lasts 5.0 s"):
        maker_of(MODELS["codec2"]).make(0, Prepared(long), ["A1T1"])
    split = replace(MODELS["codec2"], encoder=replace(ENCODER, long_audio="split"), ctc=29)
    made = maker_of(split, alignment=Alignment("letters")).make(0, Prepared(long), ["A1T1"])
    assert [clip.frames for clip in made.clips] == [100, 100, 50]
    assert sum(made.columns.features) == split.features(5 * 16000) == 125
    assert all(clip.transcript == [] for clip in made.clips)
    uneven = replace(split, projector=replace(split.projector, stack=3))
    with pytest.raises(UserError, match=r"which projector.stack 3 does not divide"):
        maker_of(uneven, alignment=Alignment("letters")).make(0, Prepared(long), ["A1T1"])


def test_codes_are_made_of_the_answers_audio_where_there_are_none():
    model = MODELS["codec2"]
    audio = torch.randn(4000)
    row = Row((RowTurn("q", None, "a", Sound(audio, 8000)),))
    made = maker_of(model).make(0, Prepared(row), ["T1A2"])
    start = len(prompt(model.layout, Turn("T1A2", question=TOKENIZER.encode("q"))))
    assert torch.equal(undelayed(model.layout, made.columns.tokens[:, start:])[1], codec_of(model).encode(audio))
    with pytest.raises(UserError, match=r"turn 0\b.*no codec"):
        ExampleMaker(model, TOKENIZER).make(0, Prepared(row), ["T1A2"])


@pytest.mark.parametrize(("task", "field"), [("A1A2", "question_audio"), ("T1A2", "question_text"), ("T1A1", "answer_codes")])
def test_a_row_without_what_its_task_needs_is_named(task, field):
    model = MODELS["codec2"]
    row = row_of(model, 2)
    empty = "" if field.endswith("text") else None
    row = replace(row, turns=(row.turns[0], replace(row.turns[1], **{field: empty})), where="data/a.parquet row 12")
    with pytest.raises(UserError, match=rf"^data/a.parquet row 12, turn 1: there is no {field}.*task {task} needs") as error:
        maker_of(model).make(0, Prepared(row), [task, task])
    assert "\n" not in str(error.value)


def test_a_run_is_built_from_plain_data(tmp_path):
    """Synthetic and stored sources in one mixture, as a YAML file would say it."""
    model = MODELS["codec2"]
    codec = codec_of(model)
    rows = [replace(ToySource("toy", None, codec).row(i), id=str(i)) for i in range(5)]
    write_rows(tmp_path / "train.parquet", rows)
    write_rows(tmp_path / "test.parquet", rows[:3])
    plain = {
        "sources": [
            {
                "kind": "spoken-digits", "weight": 2, "tasks": {"A1T1": 1, "A1A2": 1},
                "options": {"reuse": 2, "reuse_distance": 4},
            },
            {
                "kind": "stored", "path": str(tmp_path / "train.parquet"), "held_out": str(tmp_path / "test.parquet"),
                "stages": [{"until": 10, "tasks": {"T1T2": 1}}],
            },
        ],
        "packing": {"rows": 2, "length": 512, "buffer": 4},
        "seed": 2, "alignment": "words", "words": ["xyz"], "augment": {"freq_masks": [1, 12]},
    }  # fmt: skip
    config = from_dict(DataConfig, plain, "data")
    assert from_dict(DataConfig, to_dict(config)) == config
    alignment = build_alignment(config, TOKENIZER)
    assert alignment.size == 1 + 14 + 10  # the blank, 13 words of the phrases, xyz, ten digits
    pipeline = build_pipeline(config, replace(model, ctc=alignment.size), TOKENIZER, codec)
    sources = [pipeline.mixture.draw(n).source for n in range(12)]
    examples = [pipeline.fetch(n) for n in range(12)]
    assert set(sources) == {0, 1}
    for n, (source, made) in enumerate(zip(sources, examples, strict=True)):
        tasks = {list(TASKS)[i] for i in made.task.tolist()}
        assert tasks <= ({"A1T1", "A1A2"} if source == 0 else {"T1T2"} if n < 10 else {"A1A2"})
    held = held_out_rows(config, codec, 8)
    assert len(held) == 7 and {row.id for row in held if row.source == "toy"} == {"0", "1", "2"}  # four asked of three
    again = held_out_rows(config, codec, 8)
    assert [row.turns[0].question_text for row in held] == [row.turns[0].question_text for row in again]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 10])
def test_rows_that_are_held_out_are_examined_and_never_trained_on(tmp_path, count):
    model = MODELS["codec2"]
    codec = codec_of(model)
    write_rows(tmp_path / "a.parquet", [replace(ToySource("toy", None, codec).row(i), id=str(i)) for i in range(11)])
    source = {"kind": "stored", "path": str(tmp_path / "a.parquet"), "held_out": count, "tasks": {"T1T2": 1.0}}
    config = from_dict(DataConfig, {"sources": [source, source]}, "data")
    pipeline = build_pipeline(config, model, TOKENIZER, codec)
    assert [made.size for made in pipeline.mixture.sources] == [11 - count] * 2
    examined = [row.id for row in held_out_rows(config, codec, 100)]
    trained = [pipeline.mixture.sources[0].row(i).id for i in range(11 - count)]
    assert examined == examined[:count] * 2 and trained == sorted({*map(str, range(11))} - {*examined}, key=int)
    places = [int(name) for name in examined[:count]]
    assert max((b - a for a, b in zip(places, [*places[1:], 11], strict=True)), default=0) <= 11 / count + 1  # spread evenly
    fewer = [row.id for row in held_out_rows(from_dict(DataConfig, {"sources": [source]}, "data"), codec, 2)]
    assert len(fewer) == min(2, count) and {*fewer} <= {*examined}


def test_what_one_source_holds_out_no_other_trains_on(tmp_path):
    write_rows(tmp_path / "a.parquet", [ToySource("toy", None, codec_of(MODELS["codec2"])).row(i) for i in range(3)])
    source = SourceConfig(kind="stored", path=str(tmp_path / "a.parquet"), held_out=2)
    with pytest.raises(UserError, match=r"sources.1.held_out is None, but another source of .*a.parquet holds out 2 rows"):
        DataConfig((source, replace(source, held_out=None)))
    with pytest.raises(UserError, match=r"held_out is 3, but .*a.parquet has 3 rows"):
        held_out_rows(DataConfig((replace(source, held_out=3),)), None, 4)
    with pytest.raises(UserError, match="held_out is 0"):
        replace(source, held_out=0)


def test_slower_speech_does_not_leave_the_window_and_padded_models_keep_their_frames():
    model = MODELS["codec2"]
    row = row_of(model)
    full = replace(row, turns=(replace(row.turns[0], question_audio=Sound(torch.randn(32000) * 0.1, 16000)),))
    slow = AugmentConfig(speed=(0.5, 0.5), warp_speed=(0.5, 0.5), freq_masks=(1, 12))
    made = maker_of(model, augment=slow).make(0, Prepared(full), ["A1T1"])
    assert made.clips[0].frames == 100 and made.columns.features == (50,)  # as long as it was
    short = replace(row, turns=(replace(row.turns[0], question_audio=Sound(torch.randn(8000) * 0.1, 16000)),))
    made = maker_of(model, augment=slow).make(0, Prepared(short), ["A1T1"])
    assert made.clips[0].inputs.shape[1] == 200 and made.clips[0].frames == 100  # twice as slow, then twice as slow
    padded = replace(model, encoder=replace(ENCODER, mode="padded"))
    made = maker_of(padded, augment=replace(slow, speed=None)).make(0, Prepared(short), ["A1T1"])
    assert made.clips[0].inputs.shape[1] == 200 and made.clips[0].frames == padded.encoder.frames(8000) == 26
    with pytest.raises(UserError, match=r"the sound lasts 2.5 s"):  # however fast it would be played
        long = replace(row, turns=(replace(row.turns[0], question_audio=Sound(torch.randn(40000) * 0.1, 16000)),))
        maker_of(model, augment=AugmentConfig(speed=(2.0, 2.0))).make(0, Prepared(long), ["A1T1"])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("short", [0, 512])
def test_columns_that_are_kept_equal_those_made_again(name, short, monkeypatch):
    """Every task, with answers of no frames and of no text too, twice: made, then from what is kept."""
    monkeypatch.setattr("train.data.batching.examples.SHORT", short)
    layout = MODELS[name].layout
    for text in ((), (1, 2, 3)):
        for frames in (0, 1, 4):
            codes = torch.stack([torch.arange(frames) % size for size in layout.codebook_sizes])
            for task in TASKS:
                turn = Turn(task, features=3, question=(7, 8), text=text, codes=codes)
                whole = example(layout, [turn])
                for _ in range(2):
                    made = turn_columns(layout, turn)
                    for field in ("tokens", "targets", "feature_index"):
                        assert torch.equal(getattr(made, field), getattr(whole, field))
                    assert made.features == whole.features


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("task", TASKS)
def test_answers_are_cut_but_the_last(name, task):
    """A cut answer's columns are those of what was heard, its ends are not trained, and no draw cuts a conversation's last."""
    model = MODELS[name]
    row = row_of(model, turns=2)
    maker, whole = maker_of(model, cut=1.0), maker_of(model).make(0, Prepared(row), [task] * 2).columns
    first, last = (turn_columns(model.layout, turn) for turn in turns_of(model, row, task))
    lengths = set()
    for draw in range(20):
        made = maker.make(draw, Prepared(row), [task] * 2).columns
        assert torch.equal(made.tokens, maker.make(draw, Prepared(row), [task] * 2).columns.tokens)
        begin, rest = len(prompt(model.layout, turns_of(model, row, task)[0])), len(made) - len(last)
        assert torch.equal(made.tokens[:, rest:], last.tokens) and torch.equal(made.targets[:, rest:], last.targets)
        text, codes = undelayed(model.layout, made.tokens[:, begin:rest])
        heard = replace(turns_of(model, row, task)[0], text=text.tolist(), codes=codes, cut=True)
        assert torch.equal(made.tokens[:, :rest], example(model.layout, [heard]).tokens)
        assert torch.equal(made.targets[:, :rest], example(model.layout, [heard]).targets)
        assert text.tolist() == (answer_ids(row.turns[0], task)[: len(text)] if TASKS[task].text else [])
        lengths.add(rest)
    assert len(lengths) > 1 and max(lengths) <= len(first)
    assert len(whole) == len(first) + len(last)


def test_of_a_cut_answers_text_the_words_heard_are_kept():
    words = (Word("one", 0.0, 0.2, "model"), Word("two", 0.2, 0.4, "model"), Word("say", 0.0, 0.3, "user"))
    turn = RowTurn(answer_text="one, two", words=words)
    assert [heard(turn, seconds) for seconds in (0.0, 0.05, 0.15, 0.25, 0.35, 9.0)] == [0, 0, 3, 3, 8, 8]
    assert heard(replace(turn, words=()), 0.2) is None and heard(replace(turn, answer_text="1, 2"), 0.2) is None
    whole = Turn("T1A2", question=[1], text=TOKENIZER.encode("one, two"), codes=torch.zeros(4, 10, dtype=torch.long))
    cuts = [interrupted(whole, turn, TOKENIZER, 25.0, seeded_rng(i)) for i in range(40)]
    assert {(cut.codes.shape[1], TOKENIZER.decode(cut.text)) for cut in cuts} == {
        (frames, "" if frames < 3 else "one" if frames < 8 else "one, two") for frames in range(10)
    }
