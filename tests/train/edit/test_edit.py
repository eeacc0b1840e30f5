"""Editing from the command line: taught, judged, merged and reverted on a tiny model, and every mistake told."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import models, pre_tokenizers
from torch import Tensor

from infer.ask import ask
from infer.checks import check_ask
from infer.options import AskOptions
from omni.audio.io import read_audio
from omni.audio.wav import write_wav
from omni.edit.deltas import edited
from omni.edit.storage import load_edits
from omni.errors import UserError
from omni.generate.speech_lm import SpeechLM
from omni.model.speech_model import SpeechModel
from omni.text import Tokenizer
from tests.close import assert_near
from tests.train.eval.toys import save_model
from train.commands.edit import main, read_command
from train.data.config import SourceConfig
from train.data.rows.parquet import write_rows
from train.data.rows.row import Row, RowTurn
from train.data.seeding import seeded_generator
from train.edit.apply import draw_untouched
from train.edit.config import ApplyConfig, EditEvalConfig, SpeakConfig
from train.edit.facts import Synthesiser, fact_rows, read_facts
from train.edit.judge import _held_out, judge_edits, share
from train.edit.lessons import EditExample, EditObjective, draws
from train.objective.config import ObjectiveConfig
from train.objective.objective import Objective, targets

VOICE = "tests.train.edit.test_edit:say"
FACTS = [
    {"question_text": "one", "answer_text": "ab", "rephrased": ["uno"], "untouched": ["three"]},
    {"question_text": "two", "answer_text": "c"},
    {"untouched": ["four", "five"]},
]
QUICK = (
    *("--speak.voices", f"[{VOICE}]", "--speak.answer_voice", VOICE),
    *("--finetune.each", "2", "--finetune.facts", "4", "--finetune.others", "2", "--finetune.rank", "4"),
    *("--finetune.steps", "40", "--finetune.lr", "0.03", "--finetune.bound", "50", "--linears", "[decoder.blocks.*.mlp.*]"),
)
JUDGE = ("--speak.voices", f"[{VOICE}]", "--speak.answer_voice", VOICE, "--voices", "2", "--max_seconds", "0.4")


def say(text: str, seed: int) -> tuple[Tensor, int]:
    """A voice: noise that depends on the text, a little louder or softer."""
    return 0.2 * torch.randn(3200, generator=seeded_generator("say", text)) * (1 + seed % 3 / 10), 16000


def write(place: Path, lines: list[dict]) -> Path:
    place.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return place


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a model, facts, and their edits."""
    folder = tmp_path_factory.mktemp("edit")
    save_model(folder / "model")
    write(folder / "facts.jsonl", FACTS)
    assert main(["apply", str(folder / "model"), str(folder / "facts.jsonl"), str(folder / "edits"), *QUICK]) == 0
    return folder


def run(place: Path, *words: str) -> int:
    return main([str(place / w[1:]) if w.startswith("@") else w for w in words])


def state(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def test_what_is_taught_is_written_down_and_the_loss_falls(place):
    lm = SpeechLM.from_pretrained(place / "model")
    edits = load_edits(place / "edits", lm.model)
    assert all(delta.a is not None and len(delta.a) == 4 for delta in edits.deltas.values())
    assert list(edits.deltas) == [f"decoder.blocks.{i}.mlp.{part}" for i in (0, 1) for part in ("gate", "up", "down")]
    told = json.loads((place / "edits" / "edits.json").read_text())["extra"]
    assert told["method"] == "finetune" and told["facts"][1] == {"question": "two", "answer": "c"}
    lessons = EditObjective(lm, edits.deltas)
    facts = read_facts(place / "facts.jsonl", lm.tokenizer)
    speakers = Synthesiser(SpeakConfig(voices=(VOICE,), answer_voice=VOICE), lm.codec)
    pieces = lessons.pieces([row for rows in fact_rows(facts, speakers, 1) for row in rows], ["A1A2"])
    with torch.no_grad():
        before = float(lessons.loss(lm.model, pieces))
        with edited(lm.model, edits):
            after = float(lessons.loss(lm.model, pieces))
    assert after < before / 2


@pytest.fixture(params=[0, "tokens"])
def lessons(place, request) -> EditObjective:
    lm = SpeechLM.from_pretrained(place / "model")
    if request.param:
        model = SpeechModel(replace(lm.config, ctc=request.param)).eval()
        model.load_state_dict(lm.model.state_dict(), strict=False)
        lm = SpeechLM(model, lm.tokenizer, lm.codec)
    return EditObjective(lm, [], (0.25, 0.5, 0.25, 0.0, 1.0))


@pytest.fixture
def pieces(place, lessons) -> list[EditExample]:
    """Spoken and written questions of several lengths."""
    facts = read_facts(place / "facts.jsonl", lessons.lm.tokenizer)
    speakers = Synthesiser(SpeakConfig(voices=(VOICE,), answer_voice=VOICE), lessons.lm.codec)
    return lessons.pieces([row for rows in fact_rows(facts, speakers, 3) for row in rows], ["A1A2", "T1T2"])


def test_a_lessons_loss_is_that_of_training(lessons, pieces):
    config = ObjectiveConfig(stream_weights=lessons.weights)
    batch = lessons._batch(pieces)
    with torch.no_grad():
        wanted = Objective(lessons.model, config)(batch, targets(batch)).total / sum(lessons.weights)
        assert_near(lessons.loss(lessons.model, pieces), wanted, 1e-5)


def test_a_divergence_is_measured_where_the_answers_stand(place, lessons, pieces):
    kept = lessons.stay(pieces)
    edits = load_edits(place / "edits", lessons.model)
    with torch.no_grad():
        assert float(lessons.divergence(lessons.model, kept)) < 1e-6
        with edited(lessons.model, edits):
            after = [lessons._logits(lessons.model, [one], lessons._batch([one])) for one in kept]
            got = lessons.divergence(lessons.model, kept)
    wanted = 0.0
    for k, weight in enumerate(lessons.weights):
        p = torch.cat([one.before[k] for one in kept]).log_softmax(-1)
        q = torch.cat([each[k] for each in after]).log_softmax(-1)
        wanted += weight * float(F.kl_div(q, p, log_target=True, reduction="batchmean"))
    assert float(got) == pytest.approx(wanted / sum(lessons.weights), rel=1e-4) and wanted > 0.01


@pytest.mark.long
@pytest.mark.usefixtures("whole_pictures")
def test_edits_are_judged_in_a_table_a_file_and_a_picture(place, capsys, tmp_path):
    assert run(place, "eval", "@model", "@edits", "@facts.jsonl", str(tmp_path / "out"), *JUDGE) == 0
    shown = capsys.readouterr().out
    report = json.loads((tmp_path / "out" / "report.json").read_text())["figures"]
    wanted = {"success", "generalisation/voices", "generalisation/rephrased", "portability/written", "locality"}
    assert wanted <= report.keys() and all(name in shown for name in wanted)
    assert report["locality"]["questions"] == 3 and report["generalisation/voices"]["questions"] == 4
    answers = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines()]
    for name in ("success", "locality"):
        hits = [a["right"] for a in answers if a["part"] == name]
        assert report[name]["value"] == pytest.approx(sum(hits) / len(hits))
    assert all(a["right"] == (a["before"] == a["after"]) for a in answers if a["part"] == "locality")
    assert (tmp_path / "out" / "report.png").stat().st_size > 1000
    with pytest.raises(UserError, match="exists; give another name, or --overwrite to replace it"):
        run(place, "eval", "@model", "@edits", "@facts.jsonl", str(tmp_path / "out"), *JUDGE)


@pytest.mark.long
def test_a_pronunciation_is_taught_and_told_from_the_one_before(place, tmp_path):
    """A model that says "ab" in one way is taught another; without the edit its right text sounds wrong."""
    assert run(place, "merge", "@model", "@edits", str(tmp_path / "model")) == 0
    write_wav(tmp_path / "other.wav", 0.2 * torch.sin(torch.arange(4800) * 0.3), 16000)
    facts = write(tmp_path / "facts.jsonl", [{**FACTS[0], "answer_audio": "other.wav"}, FACTS[1]])
    model, edits, report = (str(tmp_path / name) for name in ("model", "edits", "report"))
    harder = ("--finetune.rank", "16", "--finetune.kl", "0", "--finetune.steps", "150")
    assert main(["apply", model, str(facts), edits, *QUICK, *harder]) == 0
    assert main(["eval", model, edits, str(facts), report, *JUDGE]) == 0
    taught = json.loads((tmp_path / "report" / "report.json").read_text())["figures"]["portability/speech"]
    lm = SpeechLM.from_pretrained(model)
    nothing = load_edits(edits, lm.model).map(torch.zeros_like)
    config = EditEvalConfig(voices=2, max_seconds=0.4, speak=SpeakConfig(voices=(VOICE,), answer_voice=VOICE))
    figures, asked = judge_edits(lm, nothing, read_facts(facts, lm.tokenizer), config)
    right = [one for one in asked if one.wanted is not None and one.right]
    share = sum(one.wanted == "c" for one in right) / len(right)
    former = figures["portability/speech"].value
    assert 0 < share < 1 and former <= share  # at best "c" sounds as it should, "ab" as before
    assert taught["value"] > former + 0.3


def test_merged_edits_answer_as_lent_ones_and_come_out_bit_for_bit(place, tmp_path):
    lm = SpeechLM.from_pretrained(place / "model")
    edits = load_edits(place / "edits", lm.model)
    question = say("one", 0)[0]
    options = {"max_seconds": 0.4}
    before, wanted = lm.generate(question, **options), lm.generate(question, edits=edits, **options)
    assert run(place, "merge", "@model", "@edits", str(tmp_path / "merged")) == 0
    assert run(place, "merge", "@model", "@edits", str(tmp_path / "merged"), "--overwrite", "true") == 0
    assert run(place, "merge", "--overwrite", "@model", "@edits", str(tmp_path / "merged")) == 0
    merged = SpeechLM.from_pretrained(tmp_path / "merged").generate(question, **options)
    assert merged.tokens == wanted.tokens and torch.equal(merged.codes, wanted.codes)
    assert not torch.equal(merged.codes, before.codes)
    with pytest.raises(UserError, match=r"is merged into .* already; to take it out: omni-train edit revert"):
        main(["merge", str(tmp_path / "merged"), str(place / "edits"), str(tmp_path / "twice")])
    assert run(place, "revert", str(tmp_path / "merged"), "@edits", str(tmp_path / "back")) == 0
    back, first = state(tmp_path / "back"), state(place / "model")
    assert back.keys() == first.keys() and all(torch.equal(back[name], first[name]) for name in first)
    assert not (tmp_path / "back" / "replaced").exists()
    for folder in (place / "model", tmp_path / "back"):
        with pytest.raises(UserError, match=r"never merged.*revert"):
            main(["revert", str(folder), str(place / "edits"), str(tmp_path / "again")])
    assert not (tmp_path / "again").exists() and not (tmp_path / "twice").exists()


def test_a_question_is_asked_with_edits_from_the_command_line(place, tmp_path):
    write_wav(tmp_path / "q.wav", say("one", 0)[0], 16000)
    where = {"model": str(place / "model"), "max_seconds": 0.4, "device": "cpu"}
    options = AskOptions(files=(str(tmp_path / "q.wav"),), edits=str(place / "edits"), out=str(tmp_path / "a.wav"), **where)
    ask(options, check_ask(options))
    lm = SpeechLM.from_pretrained(place / "model")
    wanted = lm.generate(str(tmp_path / "q.wav"), edits=load_edits(place / "edits", lm.model), max_seconds=0.4).audio
    got = read_audio(tmp_path / "a.wav", lm.codec.sample_rate)
    assert len(got) == len(wanted) and float((got - wanted.clamp(-1, 1)).abs().max()) < 1e-3
    with pytest.raises(UserError, match=r"nowhere does not exist; give the folder of edits"):
        ask(replace(options, edits="nowhere"), check_ask(options))


def test_of_several_edits_the_last_comes_out_first(place, tmp_path):
    facts = write(tmp_path / "more.jsonl", [{"question_text": "six", "answer_text": "d"}])
    one, two = tmp_path / "one", tmp_path / "two"
    assert run(place, "merge", "@model", "@edits", str(one)) == 0
    main(["apply", str(one), str(facts), str(tmp_path / "more"), *QUICK, "--finetune.steps", "3"])
    with pytest.raises(UserError, match=r"other weights"):
        run(place, "merge", "@model", str(tmp_path / "more"), str(two))
    main(["merge", str(one), str(tmp_path / "more"), str(two)])
    with pytest.raises(UserError, match=r"weights that the merge left"):
        main(["revert", str(two), str(place / "edits"), str(tmp_path / "three")])
    main(["revert", str(two), str(tmp_path / "more"), str(tmp_path / "three")])
    main(["revert", str(tmp_path / "three"), str(place / "edits"), str(tmp_path / "four")])
    back, first = state(tmp_path / "four"), state(place / "model")
    assert all(torch.equal(back[name], first[name]) for name in first)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--linears", "[decoder.blocks.*.mpl.*]"], r"linears: pattern .* matches no linear; the closest names are decoder"),
        (["--method", "mend"], r"^method mend needs --editor FOLDER"),
        (["--finetune.norm", "linf"], r"bounds single weights, which a change of low rank has none of"),
        (["--tasks", "[A1T1]"], r"task A1T1 writes no answer of its own"),
        (["--editor", "nowhere", "--method", "mend"], r"nowhere does not exist; give the folder of mend"),
        (["--editor", "nowhere"], r"^--editor nowhere is given, but method finetune takes none"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_written(place, tmp_path, words, message):
    with pytest.raises(UserError, match=message):
        main(["apply", str(place / "model"), str(place / "facts.jsonl"), str(tmp_path / "out"), *QUICK, *words])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("line", "words", "message"),
    [
        ({"question_audio": "q.wav"}, ["--tasks", "[T1T2]"], r"fact 2 \('q.wav'\): it lacks .* cannot be asked as T1T2"),
        ({"question_text": "one " * 300}, ["--tasks", "[T1T2]"], r"positions as T1T2, but the model's context has 256"),
    ],
)
def test_a_fact_that_would_not_be_taught_is_not_counted_as_taught(place, tmp_path, line, words, message):
    write_wav(tmp_path / "q.wav", *say("q", 0))
    facts = write(tmp_path / "facts.jsonl", [FACTS[0], {"answer_text": "ab", **line}])
    with pytest.raises(UserError, match=message):
        main(["apply", str(place / "model"), str(facts), str(tmp_path / "out"), *QUICK, *words])
    assert not (tmp_path / "out").exists()


def test_an_edit_is_judged_on_rows_that_did_not_teach_it(place, tmp_path):
    """Of rows that are held out none is among those that `edit apply` draws its untouched questions from."""
    rows = [Row((RowTurn(question_text=f"question {i}", answer_text="one"),), id=str(i)) for i in range(40)]
    write_rows(tmp_path / "rows.parquet", rows)
    write_rows(tmp_path / "other.parquet", [replace(row, id=f"other {row.id}") for row in rows[:7]])
    lm = SpeechLM.from_pretrained(place / "model")
    facts = read_facts(place / "facts.jsonl", lm.tokenizer)
    source = SourceConfig(kind="stored", path=str(tmp_path / "rows.parquet"), tasks={"T1T2": 1.0}, held_out=8)
    judged = {row.id for row in _held_out(lm, facts, EditEvalConfig(untouched=source, untouched_count=100))}
    taught = {row.id for row in draw_untouched(source, lm, facts, 300, 0)}
    assert len(judged) == 8 and not judged & taught
    named = replace(source, held_out=str(tmp_path / "other.parquet"))
    found = _held_out(lm, facts, EditEvalConfig(untouched=named, untouched_count=100))
    assert [row.id for row in found] == [f"other {i}" for i in range(7)]
    none = _held_out(lm, facts, EditEvalConfig(untouched=replace(source, held_out=None), untouched_count=10))
    assert len(none) == 10


FEW = Tokenizer(tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "nine": 1, "two": 2}, unk_token="[UNK]")))
FEW.inner.pre_tokenizer = pre_tokenizers.Whitespace()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"question_text": "q", "answer_text": "seven"}], r"line 1: answer_text 'seven' cannot be tokenised"),
        ([{"answer_text": "two"}], r"line 1: the fact has no question"),
        ([{"question_text": "q", "answer_text": "two"}, {}], r"line 2: it has neither a fact nor untouched questions"),
        ([{"question_text": "q", "answer_text": "two", "rephrased": ["p"]}, {"question_text": "P?", "answer_text": "nine"}],
         r"fact 2 \('P\?'\): 'P\?' is to be answered by 'nine' and by 'two'"),
        ([{"question_audio": "q.wav", "answer_text": "two"}, {"question_audio": "./q.wav", "answer_text": "nine"}],
         r"fact 2 \('./q.wav'\): './q.wav' is to be answered by 'nine' and by 'two'"),
        ([{"question_text": "q \ud800", "answer_text": "two"}], r"line 1: .* holds half of a surrogate pair"),
        ([{"question_text": "q", "answer_text": "two", "untouched": ["Q"]}], r"'Q' is a question to change and an unt"),
        ([{"question_text": "q", "answer_text": "two", "answer_codes": [[1, 2], [3]]}], r"answer_codes are ragged"),
    ],
)  # fmt: skip
def test_facts_that_cannot_be_taught_are_refused(tmp_path, lines, message):
    with pytest.raises(UserError, match=message):
        read_facts(write(tmp_path / "facts.jsonl", lines), FEW)


def test_facts_are_read_in_order(tmp_path):
    found = read_facts(write(tmp_path / "f.jsonl", [{"question_text": "q ", "answer_text": "two nine"}, *FACTS[2:]]), FEW)
    assert [f.answer_text for f in found.facts] == ["two nine"] and found.untouched == ("four", "five")
    assert found.asked() == {"q"}
    lines = '\ufeff{"question_text": "one\u2028two\x85", "answer_text": "two"}\r\n\n{"untouched": ["four"]}\n'
    (tmp_path / "f.jsonl").write_text(lines, encoding="utf-8")  # signs that end lines elsewhere, and a byte order mark
    found = read_facts(tmp_path / "f.jsonl", FEW)
    assert found.facts[0].question_text == "one\u2028two\x85" and found.untouched == ("four",)
    (tmp_path / "f.jsonl").write_text("{")
    with pytest.raises(UserError, match=r"f.jsonl, line 1 is not JSON"):
        read_facts(tmp_path / "f.jsonl", FEW)
    with pytest.raises(UserError, match=r"do not exist; give a file of JSON lines"):
        read_facts(tmp_path / "none.jsonl", FEW)


def test_the_recipes_are_read():
    configs = Path(__file__).parents[3] / "configs"
    _, taught = read_command(["--config", str(configs / "nano-edit.yaml")], "apply", "", {}, ApplyConfig)
    _, judged = read_command(["--config", str(configs / "nano-edit-eval.yaml")], "eval", "", {}, EditEvalConfig)
    assert not set(taught.speak.voices) & set(judged.speak.voices)  # who asks has taught nothing
    assert len((configs / "nano-edit.jsonl").read_text().splitlines()) == 5


def test_an_interval_is_wilsons():
    """By hand for 9 of 10: 0.5958 to 0.9821 (Wilson 1927)."""
    figure = share([True] * 9 + [False])
    assert (figure.value, figure.questions) == (0.9, 10)
    assert figure.low == pytest.approx(0.5958, abs=1e-4) and figure.high == pytest.approx(0.9821, abs=1e-4)
    for count in range(1, 400):  # the plot takes no negative length, not even of rounding
        for hit in (True, False):
            figure = share([hit] * count)
            assert figure.low <= figure.value <= figure.high


def test_draws_take_everyone_before_anyone_again():
    taken = list(itertools.chain.from_iterable(itertools.islice(draws(list(range(5)), 2, seed=0), 5)))  # type: ignore[arg-type]
    assert sorted(taken[:5]) == [0, 1, 2, 3, 4] and sorted(taken) == sorted([*range(5), *range(5)])
