"""Recognises what recordings say: transcripts by Whisper or pocketsphinx, and the nearest of some reference recordings.

Whisper's weights are read from OpenAI's `.pt` file or a Hugging Face folder; both run in `openai-whisper`, greedily and without
its fallbacks, so that a recording always has the same transcript; one of a window, 30 s, without timestamps, as in OpenAI's
evaluations.
`nearest` compares sound with sound, without ASR: dynamic time warping (Sakoe and Chiba 1978) over log-mel frames.

Dimensions: S samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from omni.audio.io import SAMPLE_RATE
from omni.audio.mel import log_mel
from omni.audio.resample import resample
from omni.checkpoint.tensors import read_torch, read_weights, state_of
from omni.convert.contract import match, renamed, whole_number
from omni.convert.lazy import Lazy
from omni.errors import UserError
from omni.files import read_json
from train.scoring.text import find_normaliser, primary, text_errors

_DIMENSIONS = {
    "n_mels": "num_mel_bins",
    "n_audio_ctx": "max_source_positions",
    "n_audio_state": "d_model",
    "n_audio_head": "encoder_attention_heads",
    "n_audio_layer": "encoder_layers",
    "n_vocab": "vocab_size",
    "n_text_ctx": "max_target_positions",
    "n_text_state": "d_model",
    "n_text_head": "decoder_attention_heads",
    "n_text_layer": "decoder_layers",
}
"""OpenAI's names of Whisper's sizes, and Hugging Face's."""

_RENAMED = (
    ("encoder.positional_embedding", "encoder.embed_positions.weight"),
    ("decoder.positional_embedding", "decoder.embed_positions.weight"),
    ("decoder.token_embedding.", "decoder.embed_tokens."),
    ("encoder.ln_post.", "encoder.layer_norm."),
    ("decoder.ln.", "decoder.layer_norm."),
    (".blocks.", ".layers."),
    (".cross_attn_ln.", ".encoder_attn_layer_norm."),
    (".cross_attn.", ".encoder_attn."),
    (".attn_ln.", ".self_attn_layer_norm."),
    (".attn.", ".self_attn."),
    (".query.", ".q_proj."),
    (".key.", ".k_proj."),
    (".value.", ".v_proj."),
    (".out.", ".out_proj."),
    (".mlp_ln.", ".final_layer_norm."),
    (".mlp.0.", ".fc1."),
    (".mlp.2.", ".fc2."),
)
"""Parts of OpenAI's tensor names, and transformers' for them."""


class WhisperASR:
    """Transcribes recordings with a Whisper, greedily: of OpenAI's `.pt` file, or a Hugging Face folder. UserError where its
    weights are no Whisper, damaged, or incomplete."""

    def __init__(self, weights: Path, device: str = "cpu") -> None:
        import whisper

        sizes, stored, names = _read(weights)
        self.model = whisper.model.Whisper(whisper.model.ModelDimensions(**sizes))
        shapes = {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}
        wanted = {name: names(name) for name in shapes}
        tensors = match(stored, wanted, shapes, weights, ignore=lambda name: name == "proj_out.weight")
        self.model.load_state_dict({name: tensor().float() for name, tensor in tensors.items()})
        self.model.eval().to(device)
        self.name = f"whisper {weights.name}"

    def transcribe(self, audio: Tensor, sample_rate: int, language: str = "") -> str:
        """Transcribe a recording [S]; Whisper detects the language where it does not know `language`."""
        return self.transcribe_all([audio], sample_rate, [language])[0]

    @torch.inference_mode()
    def transcribe_all(self, sounds: Sequence[Tensor], sample_rate: int, languages: Sequence[str]) -> list[str]:
        """Transcribe recordings [S] side by side; those of more than 30 s one by one, in windows that begin between words."""
        import whisper

        heard = [""] * len(sounds)
        options = {"fp16": self.model.device.type == "cuda", "temperature": 0.0}
        batches: dict[str | None, list[tuple[int, Tensor]]] = {}  # by language
        for i, (sound, name) in enumerate(zip(sounds, languages, strict=True)):
            clip, language = resample(sound, sample_rate, SAMPLE_RATE), primary(name) if self.model.is_multilingual else "en"
            spoken = language if language in whisper.tokenizer.LANGUAGES else None
            if len(clip) > whisper.audio.N_SAMPLES:
                whole = {"condition_on_previous_text": False, "no_speech_threshold": None, "language": spoken}
                heard[i] = str(whisper.transcribe(self.model, clip.numpy(), **options, **whole)["text"]).strip()
            else:
                mel = whisper.log_mel_spectrogram(whisper.pad_or_trim(clip), self.model.dims.n_mels, device=self.model.device)
                batches.setdefault(spoken, []).append((i, mel))
        for spoken, batch in batches.items():
            mels = torch.stack([mel for _, mel in batch])
            decoding = whisper.DecodingOptions(language=spoken, without_timestamps=True, **options)
            results = whisper.decode(self.model, mels, decoding)
            for (i, _), result in zip(batch, results, strict=True):
                heard[i] = result.text.strip()
        return heard


def error_rate(text: str, heard: str, language: str) -> float:
    """Word (or character) error rate of the transcript `heard` against `text`, both normalised; may exceed 1."""
    normal = find_normaliser("whisper", language)
    _, errors, words = text_errors(normal(text), normal(heard), language)
    return errors / max(1, words)


Stored = tuple[dict[str, int], Mapping[str, Lazy], Callable[[str], str]]
"""A Whisper's sizes by OpenAI's names, its tensors, and what gives OpenAI's name of a tensor the one it is stored under."""


def _read(path: Path) -> Stored:
    """Reads OpenAI's file, or a Hugging Face folder."""
    if path.is_dir():
        settings = read_json(path / "config.json")
        if settings.get("model_type") != "whisper":
            raise UserError(f"{path} is no Whisper: its config.json has model_type {settings.get('model_type')!r}")
        sizes = {name: whole_number(settings, theirs, path / "config.json") for name, theirs in _DIMENSIONS.items()}
        weights = read_weights(path)
        prefix = "model." if any(name.startswith("model.") for name in weights) else ""
        return sizes, weights, lambda name: prefix + renamed(name, _RENAMED)
    data = read_torch(path)
    if not isinstance(data, Mapping) or not {"dims", "model_state_dict"} <= set(data) or not isinstance(data["dims"], Mapping):
        raise UserError(f"{path} is no Whisper of OpenAI's: it must hold dims and model_state_dict")
    sizes = {name: whole_number(data["dims"], name, path) for name in _DIMENSIONS}
    return sizes, state_of(data["model_state_dict"], path), str


class Sphinx:
    """Recognises sequences of at most `longest` of the given words with pocketsphinx, by a grammar of one rule. UserError for a
    word that its dictionary lacks.

    pocketsphinx's adaptation to the sound's level is reset before every recording: results do not depend on earlier ones.
    """

    def __init__(self, words: Sequence[str], longest: int = 4) -> None:
        try:
            from pocketsphinx import Decoder
        except ImportError as error:
            raise UserError('pocketsphinx is not installed; run: pip install "omni-speech[demo]"') from error
        self.name = f"pocketsphinx, up to {longest} of {len(set(words))} words"
        word = f"({' | '.join(sorted(set(words)))})"
        grammar = f"#JSGF V1.0;\ngrammar answers;\npublic <answer> = {word}{f' [{word}]' * (longest - 1)};\n"
        self._decoder = Decoder(lm=None, loglevel="FATAL", samprate=SAMPLE_RATE)
        try:
            self._decoder.add_jsgf_string("answers", grammar)
            self._decoder.activate_search("answers")
        except RuntimeError as error:
            raise UserError(f"pocketsphinx refuses --asr_words ({error}): give English words of its dictionary") from error

    def transcribe(self, audio: Tensor, sample_rate: int, language: str = "en") -> str:
        """Recognise the words of a recording [S]; empty where the grammar fits nothing."""
        audio, quiet = resample(audio, sample_rate, SAMPLE_RATE), torch.zeros(4000)
        audio = torch.cat([quiet, audio / audio.abs().max().clamp_min(1e-3) * 0.7, quiet])
        self._decoder.reinit_feat()
        self._decoder.activate_search("answers")
        self._decoder.start_utt()
        self._decoder.process_raw((audio * 32767).short().numpy().tobytes(), full_utt=True)
        self._decoder.end_utt()
        best = self._decoder.hyp()
        return "" if best is None else " ".join(w.split("(")[0] for w in best.hypstr.split())

    def transcribe_all(self, sounds: Sequence[Tensor], sample_rate: int, languages: Sequence[str]) -> list[str]:
        """Recognise the words of recordings [S], one by one."""
        return [self.transcribe(sound, sample_rate) for sound in sounds]


ASR = WhisperASR | Sphinx


def open_asr(name: str | None, words: Sequence[str], longest: int, device: str) -> ASR | None:
    """Open the ASR `name`: `sphinx`, with its `words` and `longest`, or a Whisper's file or folder; None without a name."""
    if name is None:
        return None
    if name == "sphinx":
        return Sphinx(words, longest)
    if not Path(name).exists():
        raise UserError(f"--asr {name} does not exist: name a Whisper's .pt file or folder, or 'sphinx'")
    return WhisperASR(Path(name), device)


def transcripts(asr: ASR, sounds: Sequence[Tensor | None], sample_rate: int, languages: Sequence[str]) -> list[str]:
    """Transcribe answers [S]; "" where one has less than 20 ms of sound or is all zeros."""
    audible = {
        i: sound.float().cpu()
        for i, sound in enumerate(sounds)
        if sound is not None and sound.numel() >= sample_rate // 50 and bool(sound.abs().max() > 0)
    }
    heard = asr.transcribe_all([*audible.values()], sample_rate, [languages[i] for i in audible])
    by_index = dict(zip(audible, heard, strict=True))
    return [by_index.get(i, "") for i in range(len(sounds))]


def describe(audio: Tensor, sample_rate: int) -> Tensor:
    """Compute log-mel frames [T, n_mels] of a recording [S], one every 20 ms, less their mean over time (channel and level)."""
    audio = resample(audio, sample_rate, SAMPLE_RATE)
    mel = log_mel(torch.nn.functional.pad(audio, (0, max(0, 800 - audio.numel()))))[:, ::2].T
    return mel - mel.mean(0)


def dtw(query: Tensor, references: Sequence[Tensor]) -> Tensor:
    """Distance of query [T, C] to each reference [U, C] along the best alignment, divided by T + U; [len(references)].

    Steps (1, 0), (0, 1) and (1, 1), the diagonal counted twice (Sakoe and Chiba's symmetric form), so that every path has the
    length T + U. Each diagonal is computed for all references at once.
    """
    lengths = torch.tensor([len(r) for r in references])
    padded = pad_sequence(list(references), batch_first=True)
    cost = torch.cdist(query[None], padded)  # [R, T, U]
    n, t, u = cost.shape
    total = torch.full((n, t + 1, u + 1), torch.inf)
    total[:, 0, 0] = 0
    for diagonal in range(t + u - 1):
        i = torch.arange(max(0, diagonal - u + 1), min(t, diagonal + 1))
        j = diagonal - i
        here = cost[:, i, j]
        best = torch.minimum(total[:, i, j + 1], total[:, i + 1, j]) + here
        total[:, i + 1, j + 1] = torch.minimum(best, total[:, i, j] + 2 * here)
    return total[torch.arange(n), t, lengths] / (t + lengths)


def nearest(query: Tensor, references: Sequence[Tensor]) -> int:
    """Index of the reference at the least `dtw` distance to the query; both are frames of `describe`."""
    return int(dtw(query, references).argmin())
