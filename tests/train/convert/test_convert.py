"""The command `convert`: what it recognises, how it grows a model, and what it refuses."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from snac import SNAC

from omni.checkpoint.folder import load_folder, save_folder
from omni.codec.registry import load_codec
from omni.codec.snac import SNAC_24KHZ
from omni.convert.grow import NOISE
from omni.errors import UserError
from omni.generate.speech_lm import SpeechLM
from omni.lora.attach import add_adapter
from omni.lora.config import LoRAConfig
from omni.lora.peft import load_adapter, save_adapter, weights_of
from omni.model.linears import base_checksum
from omni.model.speech_model import SpeechModel
from omni.tasks import Turn, prompt
from omni.text import Tokenizer
from tests.codec.mimi_toys import PLAIN
from tests.codec.mimi_toys import save as save_mimi
from tests.convert.hub_toys import VOCABULARY, edit_config, save_text, text_model
from tests.infer.conftest import TINY
from train.commands.models import run_convert as main
from train.convert.convert import kind_of

GROW = ["--encoder", "nano", "--codec", "codec2"]
SMALL_SNAC = dict(SNAC_24KHZ, encoder_dim=4, encoder_rates=[2, 4], decoder_dim=32, decoder_rates=[4, 2])


@pytest.fixture
def lm(tmp_path):
    return save_text(text_model("qwen2"), tmp_path / "lm")


def run(*arguments) -> int:
    return main([str(a) for a in arguments])


def snac_folder(folder: Path) -> Path:
    torch.manual_seed(0)
    folder.mkdir()
    torch.save(SNAC(**SMALL_SNAC).state_dict(), folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(SMALL_SNAC))
    return folder


def test_checksums_and_the_table_of_files_hold(lm, tmp_path, capsys):
    assert run(lm, tmp_path / "out", *GROW) == 0
    printed = capsys.readouterr().out
    data = json.loads((tmp_path / "out" / "config.json").read_text())
    assert set(data["files"]) == {"model.safetensors", "tokenizer.json"}
    for name, stamp in data["files"].items():
        content = (tmp_path / "out" / name).read_bytes()
        assert stamp == {"bytes": len(content), "crc32": zlib.crc32(content)}
        assert f"crc32 {stamp['crc32']:08x}" in printed
    assert "grown by the rule mean, with a random nano encoder" in printed
    assert data["extra"]["hf"]["config.json"]["model_type"] == "qwen2"
    assert kind_of(tmp_path / "out") == "omni"


def test_growth_is_decided_by_the_seed(lm, tmp_path):
    states = []
    for i, seed in enumerate((0, 0, 1)):
        assert run(lm, tmp_path / f"out{i}", *GROW, "--seed", seed) == 0
        states.append(load_folder(tmp_path / f"out{i}").model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    differ = {name for name in states[0] if not torch.equal(states[0][name], states[2][name])}
    assert {"decoder.audio_head.weight", "projector.project.gate.weight", "encoder.whisper.conv1.weight"} <= differ
    assert not any("blocks" in name and name.startswith("decoder") for name in differ)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("combine", ["sum", "mean"])
@pytest.mark.parametrize("rule", ["mean", "normal", "zero"])
def test_new_rows_begin_as_the_rule_says(lm, tmp_path, rule, combine):
    assert run(lm, tmp_path / "out", *GROW, "--init", rule, "--combine", combine) == 0
    decoder = load_folder(tmp_path / "out").model.decoder
    assert decoder.config.combine == combine
    known = text_model("qwen2")
    pads = torch.zeros(len(decoder.audio_embedding.weight), dtype=torch.bool)
    for offset, stream in zip(decoder.audio_offsets, decoder.layout.audio, strict=False):
        pads[offset + stream.special("pad")] = True
    assert not decoder.audio_embedding.weight[pads].any()
    streams = decoder.layout.n_audio if combine == "sum" else 1
    tables = [
        (known.model.embed_tokens.weight, decoder.text_embedding.weight[VOCABULARY:], 1),
        (known.lm_head.weight, decoder.text_head.weight[VOCABULARY:], 1),
        (known.model.embed_tokens.weight, decoder.audio_embedding.weight[~pads], streams),
        (known.lm_head.weight, decoder.audio_head.weight, 1),
    ]
    for table, new, share in tables:
        table = table[:256].detach()  # the rows of known tokens
        mean, deviation = table.mean(0), table.std(0, correction=0)
        if rule == "zero":
            assert not new.any()
            continue
        scale = NOISE * deviation if rule == "mean" else deviation.square().mean().sqrt().expand_as(mean)
        wanted = mean if rule == "mean" else torch.zeros_like(mean)
        z = (new - wanted / share) / (scale / share**0.5)
        assert abs(z.mean()) < 0.15 and abs(z.std() - 1) < 0.15
    assert torch.equal(decoder.text_embedding.weight[:VOCABULARY], known.model.embed_tokens.weight)


@pytest.mark.parametrize("projector", ["mlp", "transformer"])
def test_fresh_parts_begin_as_pytorch_has_them(lm, tmp_path, projector):
    words = ["--projector", projector, "--projector_stack", 2, "--combine", "mean"]
    assert run(lm, tmp_path / "out", "--encoder", "nano", "--codec", "codec2", *words) == 0
    model = load_folder(tmp_path / "out").model
    torch.manual_seed(0)
    other = SpeechModel(model.config)
    if projector == "transformer":  # features are as large as the known tokens, less what the mean of the streams does to these
        rms, scale = model.decoder.text_embedding.weight[:256].square().mean().sqrt(), other.projector.project.scale
        scale.data.fill_(rms / model.config.layout.n_audio)
    for part in ("encoder", "projector"):
        usual = getattr(other, part).state_dict()
        for name, tensor in getattr(model, part).state_dict().items():
            spread, few = float(usual[name].std(correction=0)), 4 * tensor.numel() ** -0.5  # four deviations of a mean
            assert abs(float(tensor.std(correction=0)) - spread) <= (0.1 + few) * spread, name
            assert abs(float(tensor.mean() - usual[name].mean())) <= 1.5 * few * spread + 1e-6, name
    positions = model.encoder.whisper.positional_embedding
    assert torch.equal(positions, other.encoder.whisper.positional_embedding)


def test_a_model_with_a_talker_writes_as_the_one_without(lm, tmp_path):
    for name, words in (("plain", []), ("talker", ["--talker", 2])):
        assert run(lm, tmp_path / name, "--encoder", "nano", "--codec", "codec2-1600", *words) == 0
    plain, talker = (load_folder(tmp_path / name).model for name in ("plain", "talker"))
    columns = prompt(talker.layout, Turn("T1T2", question=[5, 6, 7])).tokens[None]
    with torch.no_grad():
        written = [model.decoder.text_logits(model(columns)) for model in (plain, talker)]
        said = talker.decoder.audio_logits(talker(columns))
    assert written[0].equal(written[1]) and len(talker.decoder.post_blocks) == 2
    assert 0.3 < float(said.std()) < 3  # neither sure of anything nor lost


@pytest.mark.parametrize(
    "options, sizes",
    [
        (["--layout", "mini-omni"], (4096,) * 7),
        (["--codec", "mimi"], (2048,) * 8),
        (["--codec", "mimi-16"], (2048,) * 16),
        ([], (4096,) * 7),
    ],
)
def test_layouts_and_codecs(lm, tmp_path, options, sizes):
    assert run(lm, tmp_path / "out", "--encoder", "nano", "--dtype", "bfloat16", *options) == 0
    loaded = load_folder(tmp_path / "out")
    assert loaded.config.layout.codebook_sizes == sizes
    assert loaded.config.layout.fill == ("sampled" if "mini-omni" in options else "pad")
    assert {t.dtype for t in loaded.model.state_dict().values()} == {torch.bfloat16}


def test_a_model_kept_as_text_answers_in_text(lm, tmp_path):
    assert run(lm, tmp_path / "out", "--keep_text") == 0
    answer = SpeechLM.from_pretrained(tmp_path / "out").generate("hello", task="T1T2", max_tokens=4)
    assert answer.text is not None


@pytest.mark.long
def test_a_whole_model_takes_a_codec_later(lm, tmp_path):
    assert run(lm, tmp_path / "a", "--encoder", "nano") == 0
    assert load_folder(tmp_path / "a").codec is None
    assert run(tmp_path / "a", tmp_path / "b", "--kind", "omni", "--codec_folder", snac_folder(tmp_path / "snac")) == 0
    assert load_folder(tmp_path / "b").codec is not None
    for option, value in (("--init", "zero"), ("--encoder", "nano"), ("--layout", "snac")):
        with pytest.raises(UserError, match=f"{option}.*whole"):
            run(tmp_path / "a", tmp_path / "c", "--kind", "omni", option, value)
    with pytest.raises(UserError, match="--seed has no meaning here: .* goes out as hf"):
        run(tmp_path / "a", tmp_path / "c", "--kind", "hf", "--seed", 3)
    with pytest.raises(UserError, match="--dtype has no meaning here: .* is a codec"):
        run(tmp_path / "snac", tmp_path / "c", "--dtype", "float16")


def test_a_folder_for_answering_lacks_the_alignment_head(tmp_path):
    config = replace(TINY, ctc=29, ctc_sounds=40)
    torch.manual_seed(0)
    model = SpeechModel(config)
    save_folder(tmp_path / "model", config, model.state_dict(), Tokenizer.bytes())
    for name, words in {"all": ["--dtype", "bfloat16"], "less": ["--dtype", "bfloat16", "--drop_ctc"]}.items():
        assert run(tmp_path / "model", tmp_path / name, *words) == 0
    whole, less = (load_folder(tmp_path / name).model for name in ("all", "less"))
    assert (less.config.ctc, less.config.ctc_sounds, less.alignment_head) == (0, 0, None)
    assert whole.state_dict().keys() - less.state_dict().keys() == {"alignment_head.weight", "alignment_head.bias"}
    assert all(torch.equal(whole.state_dict()[name], tensor) for name, tensor in less.state_dict().items())
    (tmp_path / "less" / "adapters").mkdir()
    with pytest.raises(UserError, match=r"holds adapters/, which would be lost"):
        run(tmp_path / "model", tmp_path / "less", "--drop_ctc", "--overwrite")


def test_an_adapter_changes_its_type_and_still_fits(tmp_path):
    torch.manual_seed(0)
    model = SpeechModel(TINY)
    save_folder(tmp_path / "model", TINY, model.state_dict(), Tokenizer.bytes())
    base = base_checksum(model, add_adapter(model, LoRAConfig(rank=2)))
    save_adapter(tmp_path / "adapter", weights_of(model, model.state_dict(), base=base))
    run(tmp_path / "adapter", tmp_path / "less", "--kind", "omni", "--dtype", "bfloat16")
    run(tmp_path / "model", tmp_path / "small", "--dtype", "bfloat16")
    pairs = load_adapter(tmp_path / "less").pairs.values()
    assert {half.dtype for a, b, _ in pairs for half in (a, b)} == {torch.bfloat16}
    assert SpeechLM.from_pretrained(tmp_path / "small", dtype="float32").load_adapter(tmp_path / "less") == "less"


def test_snac_becomes_safetensors_that_decode_alike(tmp_path):
    source = snac_folder(tmp_path / "snac")
    assert run(source, tmp_path / "out") == 0
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    codes = torch.randint(4096, (7, 3))
    one, two = (load_codec("snac", folder).decode(codes) for folder in (source, tmp_path / "out"))
    assert torch.equal(one, two)


def test_mimi_is_recognised_and_kept(tmp_path):
    save_mimi(PLAIN, tmp_path / "mimi")
    assert kind_of(tmp_path / "mimi") == "mimi"
    assert run(tmp_path / "mimi", tmp_path / "out") == 0
    codes = torch.randint(PLAIN["codebook_size"], (8, 3))
    one, two = (load_codec("mimi", tmp_path / name).decode(codes) for name in ("mimi", "out"))
    assert torch.equal(one, two)


def test_a_codec_goes_into_the_model_folder(lm, tmp_path):
    source = snac_folder(tmp_path / "snac")
    assert run(lm, tmp_path / "out", "--encoder", "nano", "--codec_folder", source) == 0
    loaded = load_folder(tmp_path / "out")
    assert loaded.codec is not None and loaded.codec.name == "snac"
    assert run(tmp_path / "out", tmp_path / "again", "--kind", "omni") == 0
    assert load_folder(tmp_path / "again").codec is not None
    with pytest.raises(UserError, match="holds snac, the model's codec is mimi"):
        run(lm, tmp_path / "b", "--encoder", "nano", "--codec", "mimi", "--codec_folder", source)
    config = json.loads((source / "config.json").read_text()) | {"codebook_size": 4000}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"weights in {source} do not fit its config.json"):
        run(lm, tmp_path / "b", "--encoder", "nano", "--codec_folder", source)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    "options, words",
    [
        ([], "--encoder is missing"),
        (["--encoder", "smal"], "neither a file nor a size; did you mean 'small'?"),
        ([*GROW, "--init", "means"], "init 'means' is unknown; did you mean 'mean'?"),
        (["--encoder", "nano", "--codec", "mimi", "--layout", "codec2"], "has codebooks"),
        ([*GROW, "--projektor", "mlp"], "unknown option --projektor; did you mean --projector"),
        (["--keep_text", "--codec", "snac"], "--codec has no meaning here: --keep_text leaves sound aside"),
        (["--encoder", "LM"], "is no Whisper"),
    ],
)
def test_mistakes_are_one_line(lm, tmp_path, options, words):
    with pytest.raises(UserError) as error:
        run(lm, tmp_path / "out", *[str(lm) if o == "LM" else o for o in options])
    assert words in str(error.value) and "\n" not in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ["lm"]


def test_what_is_no_checkpoint_is_refused(lm, tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        run(tmp_path / "nothing", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="not recognised; name what it is with --kind"):
        run(tmp_path / "empty", tmp_path / "out")
    edit_config(lm, model_type="lama")
    with pytest.raises(UserError, match="did you mean 'llama'"):
        run(lm, tmp_path / "out", *GROW)
    assert run(save_text(text_model("llama"), tmp_path / "b"), tmp_path / "out", *GROW) == 0
    with pytest.raises(UserError, match="say what it becomes with --kind: omni, .*hf"):
        run(tmp_path / "out", tmp_path / "out2")
    with pytest.raises(UserError, match="cannot be written as a SNAC"):
        run(tmp_path / "out", tmp_path / "out2", "--kind", "snac")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("count", [0, 1, 3])
def test_weights_that_are_not_finite_are_told(count, tmp_path, capsys):
    model = text_model("qwen2")
    with torch.no_grad():
        for name in ("model.norm.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight")[:count]:
            model.get_parameter(name).view(-1)[3] = float("nan")
    assert run(save_text(model, tmp_path / "lm"), tmp_path / "out", *GROW) == 0
    told = capsys.readouterr().err
    which = {0: "", 1: "decoder.norm.weight: fetch", 3: "3 tensors (the first is decoder."}[count]
    assert which in told and (f"warning: NaN or infinity in {which}" in told) == bool(count)
