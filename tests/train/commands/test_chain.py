"""The lines of docs/data.md: from folders as the hub has them over three stages to answers, and back to a folder of the hub."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from snac import SNAC

from infer.__main__ import main as infer
from omni.audio.io import read_audio
from omni.checkpoint.folder import load_folder
from omni.codec.registry import load_codec
from omni.codec.snac import SNAC_24KHZ
from omni.generate.speech_time import EXTRA, SpeechTime
from tests.convert.hub_toys import VOCABULARY, save_text, stirred, text_logits, text_model
from tests.train.data.readers.toys import flac, snac_frames, voice_assistant, write_parquet
from train.cli import main
from train.data.rows.parquet import StoredRows
from train.trainer.logs import METRICS, VALIDATION, read_table

ROOT = Path(__file__).parents[3]
STEPS, HELD_OUT = 2, 4
STAGES = [f"configs/voiceassistant/stage{number}.yaml" for number in (1, 2, 3)]
LEARNT = (
    ("projector.", "decoder.audio_embedding.", "decoder.audio_head."),
    ("decoder.blocks.", "decoder.norm.", "decoder.text_embedding."),
    ("",),
)
"""What each stage learns, of a tied base; the last one all."""

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
SMALL = {
    "budget.steps": STEPS, "schedule.warmup_steps": 1, "log.every": 1, "log.progress": "off", "fabric.accelerator": "cpu",
    "fabric.devices": 1, "fabric.precision": "32-true", "fabric.compile": "false", "data.micro_batches": 2,
    "data.packing.rows": 1, "data.packing.length": 96, "data.workers": 0, "data.sources.0.held_out": HELD_OUT,
    "validation.questions": 2, "validation.max_seconds": 1,
}  # fmt: skip


def documented() -> list[list[str]]:
    """The commands of docs/data.md's beginning, as somebody would type them, from the package's name on."""
    section = (ROOT / "docs" / "data.md").read_text().split("\n## ")[1]
    lines = [line for block in re.findall(r"```\n(.*?)```", section, re.DOTALL) for line in block.splitlines()]
    words = [shlex.split(line) for line in lines if line.startswith("omni-")]
    return [[name.removeprefix("omni-"), *rest] for name, *rest in words]


def download(weights: Path) -> None:
    """Toys in place of what the documented `hf download` lines fetch, in the formats of their makers."""
    save_text(text_model("qwen2-tied-windowed"), weights / "Qwen2.5-0.5B")
    torch.manual_seed(1)
    whisper = transformers.WhisperConfig(
        vocab_size=60, num_mel_bins=80, d_model=24, encoder_layers=2, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=2, encoder_ffn_dim=96, decoder_ffn_dim=32, max_source_positions=60, max_target_positions=20,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    stirred(transformers.WhisperForConditionalGeneration(whisper)).save_pretrained(weights / "whisper-small")
    snac = dict(SNAC_24KHZ, encoder_dim=4, encoder_rates=[2, 4], decoder_dim=32, decoder_rates=[4, 2])
    (weights / "snac_24khz").mkdir()
    torch.save(SNAC(**snac).state_dict(), weights / "snac_24khz" / "pytorch_model.bin")
    (weights / "snac_24khz" / "config.json").write_text(json.dumps(snac))
    for part in range(2):
        rows = [voice_assistant(index) for index in range(12 * part, 12 * (part + 1))]
        write_parquet(weights / f"VoiceAssistant-400K/data/train-0000{part}-of-00002.parquet", rows)


@pytest.mark.long
def test_the_documented_commands_lead_from_downloads_to_a_trained_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.fsync", lambda handle: None)
    monkeypatch.chdir(tmp_path)
    weights = tmp_path / "weights"
    download(weights)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (_, *convert), (_, *prepare), (_, *plan_line), *stages, examine, ask, back = documented()
    assert [line[:2] for line in (convert, prepare, plan_line)] == [[*convert[:2]], ["data", "prepare"], ["plan", STAGES[0]]]
    assert convert[0] == "convert" and stages == [["train", "fit", stage] for stage in STAGES]
    small = [part for key, value in SMALL.items() for part in (f"--{key}", str(value))]

    assert main(convert) == 0
    assert main([*prepare, "--workers", "0", "--progress", "off"]) == 0
    stored = StoredRows(tmp_path / "data" / "voiceassistant")
    assert [row.turns[0].answer_codes.frames.t().tolist() for row in stored] == [snac_frames(i) for i in range(24)]

    capsys.readouterr()
    assert main([*plan_line, *small, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] and plan["pace"]["source"] == "2 micro-batches of the data" and plan["pace"]["hours"] > 0
    for _, *fit in stages:
        assert main([*fit, *small]) == 0

    base = load_folder("models/base").model.state_dict()
    trained = load_folder("runs/voiceassistant-stage1/model")
    names = LEARNT[0]
    before = base
    for number, parts in enumerate(LEARNT, 1):
        stage = load_folder(f"runs/voiceassistant-stage{number}/model").model
        after, parameters = stage.state_dict(), {name for name, _ in stage.named_parameters()}
        assert after.keys() == before.keys()
        for name, tensor in after.items():
            learns = name in parameters and name.startswith(parts)
            assert torch.equal(tensor, before[name].float()) == (not learns), (number, name)
        before = after
    spoken = SpeechTime.read(trained.extra, "the trained model")  # of the rows' answers; the converted base has none
    assert trained.extra[EXTRA] == spoken.plain() != SpeechTime().plain()
    known = load_file(weights / "Qwen2.5-0.5B" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(trained.model.decoder.text_embedding.weight[:VOCABULARY], known)
    heard = load_file(weights / "whisper-small" / "model.safetensors")["model.encoder.conv1.weight"]
    assert torch.equal(trained.model.encoder.whisper.conv1.weight, heard)
    counted = [sum(both) for both in zip(*plan["counts"].values(), strict=True)]
    model = trained.model
    assert counted[0] == sum(p.numel() for p in model.parameters())
    assert counted[1] == sum(p.numel() for name, p in model.named_parameters() if name.startswith(names))
    codes, codec = torch.tensor(snac_frames(3)).t(), load_codec("snac", weights / "snac_24khz")
    assert trained.codec is not None and torch.equal(trained.codec.decode(codes), codec.decode(codes))
    for number in (1, 2, 3):
        run = tmp_path / "runs" / f"voiceassistant-stage{number}"
        assert [row["step"] for row in read_table(run / METRICS)] == [1, 2]
        assert [row["step"] for row in read_table(run / VALIDATION)] == [STEPS] and "wer" in read_table(run / VALIDATION)[0]
        measured = read_table(run / VALIDATION)[0]
        assert all(measured[name] > 0 for name in ("loss", "loss/text", *(["loss/audio"] if number != 2 else [])))

    listened_to(tmp_path)
    examined_and_talked_to(examine, ask, tmp_path, capsys)
    back_at_transformers(back)


def listened_to(place: Path) -> None:
    """The line that looks at a row runs as it stands there, with the codec of the documented model."""
    (line,) = (line for line in (ROOT / "docs" / "data.md").read_text().splitlines() if " data listen " in line)
    assert main(shlex.split(line, comments=True)[1:]) == 0
    heard = read_audio(place / "listen-voiceassistant-17" / "answer-0-codes.wav", 24000)
    codes, codec = torch.tensor(snac_frames(17)).t(), load_codec("snac", place / "weights" / "snac_24khz")
    torch.testing.assert_close(heard, codec.decode(codes), rtol=0, atol=1e-4)


def examined_and_talked_to(examine: list[str], ask: list[str], place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last stage's model answers questions of the data, and a file."""
    assert (examine[:2], ask[:2]) == (["train", "eval"], ["infer", "ask"])
    assert main([*examine[1:], "--limit", "3", "--max_seconds", "1", "--max_tokens", "8", "--progress", "off"]) == 0
    report = json.loads((place / "reports" / "voiceassistant" / "report.json").read_text())
    assert len((place / "reports" / "voiceassistant" / "answers.jsonl").read_text().splitlines()) == 3 and report
    (place / "question.wav").write_bytes(flac(0.2, 220))
    capsys.readouterr()
    assert infer([*ask[1:], "--json", "--max_seconds", "1"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["task"] == "A1A2" and answer["audio"] == "answer.wav"
    assert answer["seconds"] > 0 and len(read_audio(place / "answer.wav", 24000)) == round(24000 * answer["seconds"])


def back_at_transformers(back: list[str]) -> None:
    """The text part as transformers loads it has the logits of the whole model while it is silent."""
    assert back[:2] == ["train", "convert"] and main([*back[1:], "--quiet"]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(back[3], attn_implementation="eager").eval()
    ours = load_folder(back[2]).model.eval()
    text = torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(theirs(text).logits, text_logits(ours, text)[..., : theirs.config.vocab_size], **CLOSE)
