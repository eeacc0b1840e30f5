"""The recognisers: Whisper against openai-whisper and transformers, error rates against jiwer, pocketsphinx in any order; time
warping against a slow reference."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

import jiwer
import pytest
import torch
import whisper
from torch import Tensor
from whisper.normalizers import BasicTextNormalizer, EnglishTextNormalizer

from tests.train.eval.toys import noise
from train.data.tts.espeak import synthesise
from train.scoring.asr import Sphinx, WhisperASR, describe, dtw, error_rate, nearest, open_asr, transcripts


def test_a_whisper_hears_recordings_side_by_side_as_openai_s_own_call_each(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = whisper.Whisper(whisper.ModelDimensions(80, 1500, 16, 2, 1, 51865, 20, 16, 2, 1)).eval()
    with torch.no_grad():
        model.decoder.positional_embedding.normal_()
        model.decoder.token_embedding.weight.normal_()
    torch.save({"dims": asdict(model.dims), "model_state_dict": model.state_dict()}, tmp_path / "asr.pt")
    asr = open_asr(str(tmp_path / "asr.pt"), [], 4, "cpu")
    assert asr is not None
    sounds = {name: torch.from_numpy(noise(i, s)) for i, (name, s) in enumerate({"en-GB": 1, "en": 31, "de": 2, "": 3}.items())}
    sounds["en-US"] = sounds["en-GB"] / 100  # the level that a spectrum is cut at is each recording's own
    plain = {"temperature": 0.0, "fp16": False, "no_speech_threshold": None, "condition_on_previous_text": False}
    wanted = [
        whisper.transcribe(model, s.numpy(), language=n[:2] or None, without_timestamps=len(s) <= 480000, **plain)[
            "text"
        ].strip()
        for n, s in sounds.items()
    ]
    assert len({*wanted, ""}) >= 3
    silent = [torch.zeros(16000), None]
    assert transcripts(asr, [*sounds.values(), *silent], 16000, [*sounds, "en", "en"]) == [*wanted, "", ""]


def test_hugging_face_folders_hear_the_same(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.WhisperConfig(
        vocab_size=51865, num_mel_bins=80, d_model=16, encoder_layers=2, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=1500, max_target_positions=20,
    )  # fmt: skip
    torch.manual_seed(1)
    model = transformers.WhisperForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "hf")
    mel, ids = torch.randn(1, 80, 3000), torch.tensor([[50258, 50259, 7, 9]])
    with torch.no_grad():
        theirs = model(input_features=mel, decoder_input_ids=ids).logits
        ours = WhisperASR(tmp_path / "hf").model(mel, ids)
    assert torch.allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize(("language", "normal"), [("en-US", EnglishTextNormalizer()), ("nl", BasicTextNormalizer())])
def test_error_rates_are_jiwers(language: str, normal) -> None:
    pairs = (("It's 2 o'clock.", "it is two o clock"), ("Colour!", "color"), ("a b c", ""), ("Een, twee", "één twee drie"))
    for text, heard in pairs:
        assert error_rate(text, heard, language) == pytest.approx(jiwer.wer(normal(text).strip(), normal(heard).strip()))
    assert error_rate("!", "", language) == 0 and error_rate("你好吗", "你好", "zh") == pytest.approx(1 / 3)


def test_sphinx_hears_its_words_alike_in_any_order() -> None:
    sounds = [synthesise(text) for text in ("one three", "two", "three two one")]
    loud = 0.9 * torch.from_numpy(noise(3, 1.0))

    def heard(order: list[int], before: bool) -> dict[int, str]:
        asr = open_asr("sphinx", ["one", "two", "three"], 3, "cpu")
        assert asr is not None
        if before:
            transcripts(asr, [loud], 16000, ["en"])
        return {i: transcripts(asr, [sounds[i][0]], sounds[i][1], ["en"])[0] for i in order}

    assert heard([0, 1, 2], before=False) == heard([2, 1, 0], before=True)
    seven = Sphinx(["one", "two", "three", "four", "seven"])
    assert seven.transcribe(*synthesise("seven", voice="en-us+f3", rate=160)) == "seven"


def slow_dtw(a: Tensor, b: Tensor) -> float:
    total = [[math.inf] * (len(b) + 1) for _ in range(len(a) + 1)]
    total[0][0] = 0.0
    for i in range(1, len(a) + 1):
        for j in range(1, len(b) + 1):
            d = float((a[i - 1] - b[j - 1]).norm())
            total[i][j] = min(total[i - 1][j] + d, total[i][j - 1] + d, total[i - 1][j - 1] + 2 * d)
    return total[-1][-1] / (len(a) + len(b))


def test_dtw_equals_the_slow_reference() -> None:
    torch.manual_seed(0)
    query = torch.randn(7, 3)
    references = [torch.randn(n, 3) for n in (1, 4, 7, 12)]
    wanted = torch.tensor([slow_dtw(query, r) for r in references])
    torch.testing.assert_close(dtw(query, references), wanted, rtol=1e-5, atol=1e-6)


def test_a_slower_saying_of_the_same_is_nearest() -> None:
    time = torch.linspace(0, 1, 8000)
    up, down = torch.sin(2000 * time * (1 + time)), torch.sin(2000 * time * (3 - time))
    slow = torch.linspace(0, 1, 11000)
    query = torch.sin(2000 * slow * (1 + slow)) * 0.1  # longer and quieter
    references = [describe(x, 8000) for x in (down, up, torch.randn(8000) * 0.1)]
    assert nearest(describe(query, 8000), references) == 1
