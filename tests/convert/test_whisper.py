"""Whisper encoders as OpenAI and Hugging Face store them, against their own code, in both modes."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch
import transformers
import whisper
from whisper.model import ModelDimensions, Whisper

from omni.audio.io import read_audio
from omni.checkpoint.folder import load_folder
from omni.convert.parts import read_whisper
from omni.errors import UserError
from omni.pretrained import QUESTION, find_question
from tests.close import assert_near
from tests.convert.hub_toys import save_text, stirred, text_model
from train.commands.models import run_convert as main

POSITIONS, BANDS, WIDTH = 60, 80, 24


def openai(folder, dtype=torch.float32):
    """A Whisper file, and its encoder's features [T, D] of a padded log-mel [M, F]."""
    torch.manual_seed(1)
    dims = ModelDimensions(BANDS, POSITIONS, WIDTH, 4, 2, 50, 10, 16, 2, 1)
    model = stirred(Whisper(dims).to(dtype))
    state = model.state_dict()
    torch.save({"dims": dataclasses.asdict(dims), "model_state_dict": state}, folder / "tiny.pt")
    return folder / "tiny.pt", lambda mel: model.float().encoder(mel[None])[0]


def huggingface(folder, kind=transformers.WhisperModel):
    torch.manual_seed(2)
    config = transformers.WhisperConfig(
        vocab_size=60, num_mel_bins=BANDS, d_model=WIDTH, encoder_layers=2, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=2, encoder_ffn_dim=4 * WIDTH, decoder_ffn_dim=32, max_source_positions=POSITIONS,
        max_target_positions=20, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    model = stirred(kind(config))
    model.save_pretrained(folder / "whisper")
    encoder = model.get_encoder()
    return folder / "whisper", lambda mel: encoder(mel[None]).last_hidden_state[0]


MAKERS = {
    "openai": openai,
    "openai-half": lambda folder: openai(folder, torch.float16),
    "model": huggingface,
    "whole": lambda folder: huggingface(folder, transformers.WhisperForConditionalGeneration),
}


@pytest.fixture(params=MAKERS)
def made(request, tmp_path):
    return MAKERS[request.param](tmp_path)


@pytest.mark.sampled(3)
@torch.no_grad()
@pytest.mark.parametrize("mode", ["padded", "variable"])
def test_features_equal_the_original(made, mode, tmp_path):
    path, theirs = made
    source = save_text(text_model("qwen2"), tmp_path / "lm")
    options = ["--encoder", str(path), "--encoder_mode", mode, "--codec", "codec2", "--projector", "linear"]
    assert main([str(source), str(tmp_path / "ours"), *options]) == 0
    model = load_folder(tmp_path / "ours").model
    assert model.config.encoder.mode == mode and model.config.encoder.window_seconds == pytest.approx(1.2)
    audio = torch.randn(POSITIONS * 320 if mode == "variable" else 9000) * 0.1
    mel = model.encoder.config.features(audio)
    if mode == "padded":
        assert_near(mel, whisper.log_mel_spectrogram(whisper.pad_or_trim(audio, POSITIONS * 320)), 1e-5)
    ours = model.encoder.run(mel[None], [mel.shape[1]], [model.encoder.config.frames(len(audio))])
    assert_near(ours, theirs(mel)[: len(ours)], 1e-5)
    assert len(ours) == model.encoder.config.frames(len(audio))


@torch.no_grad()
def test_a_shorter_window_is_the_original_with_fewer_positions(tmp_path, capsys):
    path, whole = openai(tmp_path)
    data, name = torch.load(path, weights_only=True), "encoder.positional_embedding"
    short = Whisper(ModelDimensions(**data["dims"] | {"n_audio_ctx": 30}))
    short.load_state_dict(data["model_state_dict"] | {name: data["model_state_dict"][name][:30]})
    source, convert = save_text(text_model("qwen2"), tmp_path / "lm"), ["--encoder", str(path), "--codec", "codec2"]
    assert main([str(source), str(tmp_path / "whole"), *convert]) == 0
    assert "frames differ" not in capsys.readouterr().out
    assert main([str(source), str(tmp_path / "short"), *convert, "--encoder_window", "0.6"]) == 0
    audio = read_audio(find_question(QUESTION), 16000)[:9600]
    mels = [whisper.log_mel_spectrogram(whisper.pad_or_trim(audio, positions * 320)) for positions in (30, POSITIONS)]
    theirs, reference = short.encoder(mels[0][None])[0], whole(mels[1])[:30]
    error = (theirs - reference).norm() / reference.norm()
    said = capsys.readouterr().out
    assert f"frames differ by {error:.2f} from those in Whisper's window of 1.2 s (relative, of 0.6 s of" in said
    encoder = load_folder(tmp_path / "short").model.encoder
    assert_near(encoder.encode([audio])[0], theirs, 1e-5)
    assert_near(encoder.encode([torch.cat([audio, audio])])[0], torch.cat([theirs, theirs]), 1e-5)
    assert main([str(path), str(tmp_path / "again"), "--into", str(tmp_path / "short")]) == 0
    positions = load_folder(tmp_path / "again").model.encoder.whisper.positional_embedding
    assert torch.equal(positions, data["model_state_dict"][name][:30])
    with pytest.raises(UserError, match=r"window_seconds is 2: .*tiny.pt has positions for 1.2 s"):
        main([str(source), str(tmp_path / "long"), *convert, "--encoder_window", "2"])


@pytest.mark.parametrize("made", ["openai-half", "whole"], indirect=True)
def test_an_encoder_goes_into_a_model_folder(made, tmp_path):
    path, _ = made
    source = save_text(text_model("qwen2").bfloat16(), tmp_path / "lm")
    assert main([str(source), str(tmp_path / "one"), "--encoder", str(openai(tmp_path)[0]), "--codec", "codec2"]) == 0
    one = load_folder(tmp_path / "one").model
    assert main([str(path), str(tmp_path / "two"), "--into", str(tmp_path / "one")]) == 0
    two = load_folder(tmp_path / "two").model
    wanted = read_whisper(path).tensors
    for name, tensor in two.state_dict().items():
        expected = wanted[name]().bfloat16() if name in wanted else one.state_dict()[name]
        assert torch.equal(tensor, expected), name
    assert main([str(path), str(tmp_path / "two"), "--into", str(tmp_path / "two"), "--overwrite"]) == 0  # in place


def test_another_size_of_encoder_is_refused(tmp_path):
    path, _ = openai(tmp_path)
    source = save_text(text_model("qwen2"), tmp_path / "lm")
    assert main([str(source), str(tmp_path / "one"), "--encoder", "nano", "--codec", "codec2"]) == 0
    with pytest.raises(UserError, match=r"encoder.width is 24 in .* and 192 in"):
        main([str(path), str(tmp_path / "two"), "--into", str(tmp_path / "one")])
    with pytest.raises(UserError, match="is an encoder; name the model folder"):
        main([str(path), str(tmp_path / "two")])


class Evil:
    def __reduce__(self):
        return (print, ("this must never be printed",))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_with_code_is_not_run(tmp_path, zipped, capsys):
    path = tmp_path / "evil.pt"
    torch.save({"dims": {}, "model_state_dict": Evil()}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(UserError, match=r"evil.pt.*pickle.*nothing was run"):
        read_whisper(path)
    path.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(UserError, match=r"evil.pt"):
        read_whisper(path)
    assert "never" not in capsys.readouterr().out


def test_the_older_file_format_is_read(tmp_path):
    path, _ = openai(tmp_path)
    data = torch.load(path, weights_only=True)
    torch.save(data, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert read_whisper(tmp_path / "old.pt").config == read_whisper(path).config


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda d: d["model_state_dict"].pop("encoder.conv1.bias"), "tensor encoder.conv1.bias is missing"),
        (lambda d: d["model_state_dict"].update({"encoder.more": torch.ones(1)}), r"tensor encoder.more \[1\] has no place"),
        (lambda d: d["dims"].update(n_audio_state=28), r"positional_embedding has shape \[60, 24\], .* asks for \[60, 28\]"),
        (lambda d: d.pop("dims"), "is no Whisper of OpenAI's"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path, change, words):
    path, _ = openai(tmp_path)
    data = torch.load(path, weights_only=True)
    change(data)
    torch.save(data, path)
    with pytest.raises(UserError, match=words):
        read_whisper(path)
