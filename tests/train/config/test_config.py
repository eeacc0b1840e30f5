"""Configurations: every recipe is complete and can be read; the model part resolves as documented."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from omni.checkpoint.folder import load_folder, save_folder
from omni.config import ModelConfig, from_dict, preset, to_dict
from omni.errors import UserError
from omni.lora.attach import add_adapter
from omni.model.speech_model import SpeechModel
from omni.pretrained import find_model
from omni.text import Tokenizer
from omni.utils.arguments import match_names
from train.commands.fit import run_demo as demo
from train.config.parse import read_fit_config
from train.config.run import FitConfig, plain_config
from train.config.sections import BudgetConfig, CheckpointConfig, GroupConfig, ModelSection, OptimizerConfig
from train.data.config import DataConfig, PackingConfig, SourceConfig
from train.objective.config import ObjectiveConfig
from train.optim.optimizer import parameter_groups, set_trainable
from train.plan.memory import meta_model
from train.plan.plan import count_parameters
from train.trainer.build import with_alignment
from train.trainer.initial_model import build_initial, changed, check_fits, check_tokenizer, shape_of

CONFIGS = Path(__file__).parents[3] / "configs"
OF_OTHER_COMMANDS = ("nano-edit", "dialogues", "voices")
RECIPES = sorted(path for path in CONFIGS.rglob("*.yaml") if not path.name.startswith(OF_OTHER_COMMANDS))
SMALL = {
    "encoder": {"width": 32, "heads": 2, "layers": 1},
    "decoder": {"width": 32, "layers": 1, "heads": 2, "kv_heads": 1, "mlp_width": 64},
}


@functools.cache
def read(recipe: Path) -> tuple[FitConfig, str]:
    return read_fit_config([str(recipe)])


def small(**changes: object) -> ModelSection:
    return ModelSection(**{"preset": "nano", **SMALL, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model folder of a small model."""
    place = tmp_path_factory.mktemp("models") / "small"
    torch.manual_seed(5)
    config = changed(preset("nano"), small())
    save_folder(place, config, SpeechModel(config).state_dict(), Tokenizer.bytes())
    return str(place)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: "/".join(p.parts[-2:]))
def test_every_recipe_names_parameters_that_exist_whatever_the_base(recipe: Path, tied: bool) -> None:
    config, name = read(recipe)
    assert isinstance(config, FitConfig) and name == recipe.stem
    base = str(config.model.preset or "qwen2-0.5b-omni")  # a recipe without a preset names a folder
    section = dataclasses.replace(config.model, init_from=None, preset=base, decoder={"tie_text": tied})
    if recipe.parent.name == "smol":  # as `convert --talker 4` makes its base
        talker = {"layout": {"talker": True}, "decoder": {"tie_text": tied, "combine": "sum", "post_layers": 4}}
        section = dataclasses.replace(section, ctc="tokens", **talker)
    with torch.device("meta"):
        model = SpeechModel(changed(preset(base), section))
    if tied and config.lora is not None and "decoder.text_head" in config.lora.targets:
        with pytest.raises(UserError, match="head is its text embedding; leave it out"):
            add_adapter(model, config.lora)
        return
    if config.lora is not None:
        add_adapter(model, config.lora)
    also = set_trainable(model, config.trainable_patterns)
    learning = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    assert learning
    parameter_groups(learning, config.optimizer, also)
    if any(pattern.startswith(("decoder.text", "*")) for pattern in config.trainable) and config.lora is None:
        assert model.decoder.text_weight.requires_grad


def test_a_tied_head_is_named_as_head_or_as_table() -> None:
    """In a tied model either name means the one tensor; in another, each its own."""
    for tied, other in ((True, ["decoder.text_embedding.weight"]), (False, ["decoder.text_head.weight"])):
        with torch.device("meta"):
            model = SpeechModel(changed(preset("nano"), small(decoder={**SMALL["decoder"], "tie_text": tied})))
        also = set_trainable(model, ["decoder.text_head.*"])
        learning = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        assert [name for name, _ in learning] == other
        slow = OptimizerConfig(groups=(GroupConfig("decoder.text_head.*", lr=1e-5),))
        assert [group["lr"] for group in parameter_groups(learning, slow, also)] == [1e-5]
        with pytest.raises(UserError, match="'decoder.text_hat.*' matches no parameter"):
            set_trainable(model, ["decoder.text_hat.*"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: "/".join(p.parts[-2:]))
def test_recipes_with_open_answers_keep_what_has_the_lowest_held_out_loss(recipe: Path) -> None:
    config, _ = read(recipe)
    by_loss = config.checkpoint.metric.partition("/")[0] == "loss"
    assert by_loss == (recipe.parent != CONFIGS)  # the files at the top have one right answer
    assert config.checkpoint.good == ("max" if config.checkpoint.metric == "exact_match" else "min")


def test_the_good_values_of_a_metric_follow_from_its_name() -> None:
    known = {"exact_match": "max", "code_accuracy": "max", "ended": "max", "wer": "min", "loss": "min", "loss/text": "min"}
    assert {metric: CheckpointConfig(metric=metric).good for metric in known} == known


def test_the_stages_train_what_the_authors_say() -> None:
    """Stage 1 the adapter and the new audio tables and heads, stage 2 the language model, stage 3 everything."""
    parts = {}
    for stage in (1, 2, 3):
        config, _ = read_fit_config([str(CONFIGS / "mini-omni" / f"stage{stage}.yaml")])
        with torch.device("meta"):
            names = [name for name, _ in SpeechModel(preset("qwen2-0.5b-omni")).named_parameters()]
        parts[stage] = {".".join(n.split(".")[:2]) for n in match_names(config.trainable, names, "trainable")}
        assert config.optimizer.lr * config.schedule.final == pytest.approx(4e-6)
        if stage > 1:
            assert config.model.init_from == f"runs/mini-omni-stage{stage - 1}/model"
    assert parts[1] == {"projector.project", "decoder.audio_embedding", "decoder.audio_head"}
    assert parts[2] == {"decoder.blocks", "decoder.norm", "decoder.text_embedding", "decoder.text_head"}
    assert parts[3] >= parts[1] | parts[2] | {"encoder.whisper"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_written_configuration_reads_back(recipe: Path, tmp_path: Path) -> None:
    import yaml

    config, _ = read_fit_config([str(recipe), "--optimizer.lr", "0.25", "--seed", "7"])
    assert config.optimizer.lr == 0.25 and config.seed == 7
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(plain_config(config)))
    assert read_fit_config([str(file)])[0] == config


@pytest.mark.sampled(1)
@pytest.mark.parametrize("data", ["", ", seed: 3"])
def test_a_printed_configuration_reads_back(data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"budget: {{steps: 3}}\nmodel: {{preset: nano}}\ndata: {{sources: [{{kind: spoken-digits}}]{data}}}\n")
    with pytest.raises(SystemExit):
        read_fit_config([str(file), "--seed", "7", "--print_config"])
    printed = tmp_path / "printed.yaml"
    printed.write_text(capsys.readouterr().out)
    assert read_fit_config([str(printed)])[0] == read_fit_config([str(file), "--seed", "7"])[0]


@pytest.mark.parametrize(
    ("model", "sounds", "ctc", "ctc_sounds"),
    [({}, True, 13, 46), ({}, False, 13, 0), ({"ctc": 40}, True, 40, 46), ({"ctc": 40, "ctc_sounds": 50}, True, 40, 50)],
)
def test_the_head_has_the_ids_that_the_data_need(model: dict[str, Any], sounds: bool, ctc: int, ctc_sounds: int) -> None:
    digits = {"digit_phrases": ("{}",), "arithmetic_phrases": ("{}",)}
    data = DataConfig((SourceConfig("spoken-digits", options=digits),), alignment="words", sounds=sounds)
    config = with_alignment(FitConfig(budget=BudgetConfig(steps=1), model=ModelSection(preset="nano", **model), data=data))
    assert (config.model.ctc, config.model.ctc_sounds) == (ctc, ctc_sounds)
    shape = changed(preset("nano"), config.model)
    assert SpeechModel(shape).alignment_head.out_features == ctc + ctc_sounds


def test_what_starts_from_the_demonstrations_model_spells_as_it_does() -> None:
    wanted, config = (with_alignment(read_fit_config([str(CONFIGS / f"{one}.yaml")])[0]) for one in ("nano", "nano-lora"))
    assert config.model.init_from == "runs/nano/model"
    assert config.model.ctc == wanted.model.ctc and config.data.alignment == wanted.data.alignment == "none"


def test_a_run_starts_from_the_model_that_ships_by_its_name() -> None:
    section = ModelSection(init_from="nano")
    shipped, model = load_folder(find_model("nano")).model, build_initial(section, 0).model
    assert model.config == shape_of(section) == shipped.config
    assert all(torch.equal(model.state_dict()[name], weight.float()) for name, weight in shipped.state_dict().items())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("most, own, minutes", [("12", [], 12), ("", [], 25), ("12", ["--budget.minutes=3"], 3)])
def test_the_environment_caps_the_demonstration(
    most: str, own: list[str], minutes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[FitConfig] = []
    monkeypatch.setattr("digits.exam.demonstrate", lambda config, digits: found.append(config) or 0)
    monkeypatch.setenv("DEMO_MINUTES", most)
    assert demo(own) == 0 and found[0].budget.minutes == minutes and found[0].budget.until == 0.95


def test_a_head_of_other_ids_is_new(tmp_path: Path) -> None:
    from train.trainer.initial_model import _with_weights

    source = SpeechModel(dataclasses.replace(preset("nano"), ctc=12, ctc_sounds=8))
    for config, kept in ((source.config, True), (dataclasses.replace(source.config, ctc=20, ctc_sounds=0), False)):
        model = _with_weights(config, source)
        assert torch.equal(model.alignment_head.weight, source.alignment_head.weight) == kept
        assert torch.equal(model.encoder.whisper.ln_post.weight, source.encoder.whisper.ln_post.weight)
    without = changed(source.config, ModelSection(init_from="x", ctc=0))
    assert (without.ctc, without.ctc_sounds) == (0, 0)
    with pytest.raises(UserError, match=r"ctc_sounds is 8, a second spelling, but ctc is 0"):
        dataclasses.replace(source.config, ctc=0)


def test_overrides_change_the_preset_only_where_they_say() -> None:
    base = preset("nano")
    config = changed(base, ModelSection(preset="nano", decoder={"layers": 7}, ctc=30))
    assert config == dataclasses.replace(base, ctc=30, decoder=dataclasses.replace(base.decoder, layers=7))
    with pytest.raises(UserError, match=r"model: unknown key decoder\.layerz; did you mean decoder\.layers"):
        changed(base, ModelSection(preset="nano", decoder={"layerz": 7}))
    with pytest.raises(UserError, match="neither preset nor init_from"):
        ModelSection()


def test_random_weights_depend_on_the_seed_only() -> None:
    a, b, c = (build_initial(small(), seed).model.state_dict() for seed in (1, 1, 2))
    assert all(t.equal(b[name]) for name, t in a.items())
    assert any(not t.equal(c[name]) for name, t in a.items())


@pytest.mark.parametrize("with_preset", [False, True])
def test_init_from_gives_the_weights_of_the_folder(folder: str, with_preset: bool) -> None:
    stored = build_initial(ModelSection(init_from=folder), 0).model.state_dict()
    section = small(init_from=folder) if with_preset else ModelSection(init_from=folder)
    initial = build_initial(dataclasses.replace(section, ctc=12), 0)
    assert initial.model.config.ctc == 12
    state = initial.model.state_dict()
    assert all(state[name].equal(t) for name, t in stored.items())
    assert {name for name in state if name not in stored} == {"alignment_head.weight", "alignment_head.bias"}
    assert all(p.requires_grad for p in initial.model.parameters())


@pytest.mark.sampled(5)
@pytest.mark.parametrize("with_preset", [False, True])
@pytest.mark.parametrize(
    ("given", "head"),
    [({}, (12, 8)), ({"ctc": 20}, (20, 8)), ({"ctc": 20, "ctc_sounds": 0}, (20, 0)), ({"ctc_sounds": 5}, (12, 5)),
     ({"ctc": 0}, (0, 0))],
)  # fmt: skip
def test_a_run_keeps_the_folders_alignment_head_and_a_plan_knows_it(
    given: dict[str, Any], head: tuple[int, int], with_preset: bool, tmp_path: Path
) -> None:
    stored = changed(preset("nano"), small(ctc=12, ctc_sounds=8))
    save_folder(tmp_path / "heard", stored, SpeechModel(stored).state_dict(), Tokenizer.bytes())
    start = {"init_from": str(tmp_path / "heard"), **given}
    section = small(**start) if with_preset else ModelSection(**start)
    model, shape = build_initial(section, 0).model, shape_of(section)
    assert shape == model.config and (shape.ctc, shape.ctc_sounds) == head
    counts = count_parameters(
        meta_model(FitConfig(BudgetConfig(steps=1), section, DataConfig((SourceConfig("spoken-digits"),))), shape)
    )
    assert sum(every for every, _ in counts.values()) == sum(p.numel() for p in model.parameters())
    assert ("alignment head" in counts) == (head[0] > 0)


@pytest.mark.parametrize("with_preset", [False, True])
def test_a_run_may_add_a_turn_head_to_a_folder_and_keeps_one(folder: str, with_preset: bool, tmp_path: Path) -> None:
    chunked = {"encoder": {**SMALL["encoder"], "mode": "chunked"}}
    given = small(**chunked) if with_preset else ModelSection("nano", encoder={"mode": "chunked"})
    section = dataclasses.replace(given, init_from=folder, preset="nano" if with_preset else None, turn=True)
    assert build_initial(dataclasses.replace(section, turn=None), 0).model.turn_head is None
    model, stored = build_initial(section, 0).model, build_initial(ModelSection(init_from=folder), 0).model.state_dict()
    assert shape_of(section) == model.config and model.config.turn
    state = model.state_dict()
    assert all(state[name].equal(t) for name, t in stored.items())
    assert {name for name in state if name not in stored} == {"turn_head.weight", "turn_head.bias"}
    save_folder(tmp_path / "turns", model.config, state, Tokenizer.bytes())
    again = build_initial(dataclasses.replace(section, init_from=str(tmp_path / "turns"), turn=None), 1).model
    assert all(t.equal(state[name]) for name, t in again.state_dict().items())
    dropped = build_initial(dataclasses.replace(section, init_from=str(tmp_path / "turns"), turn=False), 1).model
    assert dropped.turn_head is None and dropped.state_dict().keys() == stored.keys()
    counts = count_parameters(
        meta_model(FitConfig(BudgetConfig(steps=1), section, DataConfig((SourceConfig("spoken-digits"),))), model.config)
    )
    assert sum(every for every, _ in counts.values()) == sum(p.numel() for p in model.parameters())
    with pytest.raises(UserError, match="turn is true, but the encoder's frames hear what comes after them"):
        build_initial(ModelSection(init_from=folder, turn=True), 0)


def test_a_configuration_that_does_not_fit_names_the_field(folder: str) -> None:
    with pytest.raises(UserError, match=r"model\.decoder\.layers is 2\b.*small\b.*\b1\b"):
        build_initial(small(init_from=folder, decoder={**SMALL["decoder"], "layers": 2}), 0)
    with pytest.raises(UserError, match=r"model\.layout\.fill is 'sampled', but .* 'pad'"):
        build_initial(ModelSection(init_from=folder, layout={"fill": "sampled"}), 0)
    stored = changed(preset("nano"), small())
    shorter = from_dict(ModelConfig, {**to_dict(stored), "decoder": {**to_dict(stored)["decoder"], "context": 64}})
    check_fits(stored, shorter, folder)  # no weight depends on it


def test_a_tokenizer_is_needed_where_bytes_do_not_fit() -> None:
    assert len(build_initial(small(), 0).tokenizer) == 256
    with pytest.raises(UserError, match=r"model\.tokenizer is missing: the text stream has 151936 ids"):
        check_tokenizer(ModelSection(preset="qwen3-0.6b"), preset("qwen3-0.6b"))


def nano(**given: Any) -> FitConfig:
    return FitConfig(BudgetConfig(steps=1), ModelSection(preset="nano"), DataConfig((SourceConfig("spoken-digits"),)), **given)


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: OptimizerConfig(muon_lr=1e308), "OptimizerConfig: muon_lr is 1e.308; it must be less than or equal to 1000"),
        (lambda: PackingConfig(rows=0), "PackingConfig: rows is 0; it must be greater than 0"),
        (lambda: PackingConfig(length=99999999999), "data.packing has rows 8 and length 99999999999; make their product"),
        (lambda: CheckpointConfig(metric="loss/words"), "loss/words, but there is no stream or task 'words'; use loss/"),
        (lambda: nano(checkpoint=CheckpointConfig(metric="loss/audio4")), "loss/audio4, but the model has 4 audio streams"),
        (lambda: nano(objective=ObjectiveConfig(stream_weights=(1, 2))), "stream_weights has 2 entries; the layout has 5 s"),
        (
            lambda: nano(objective=ObjectiveConfig(ctc_weight=1.0)).check_head(),
            "is 1.0, but the model has no alignment head: set data.a",
        ),
    ],
)
def test_impossible_values_name_their_key(make, key: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=key):
        make()


@pytest.mark.parametrize("path", ["a", ("a", "s3://b/c")])
def test_a_stored_source_has_a_folder_or_a_list_of_them(path, tmp_path):
    (tmp_path / "run.yaml").write_text("data: {sources: [{kind: stored, path: x}]}\nmodel: {preset: nano}\nbudget: {steps: 3}")
    given = path if isinstance(path, str) else f"[{', '.join(path)}]"
    config, _ = read_fit_config([str(tmp_path / "run.yaml"), "--data.sources.0.path", given])
    assert config.data.sources[0].path == path and config.data.sources[0].folders == (("a",) if path == "a" else path)
    with pytest.raises(UserError, match="another source of"):
        shared = SourceConfig(kind="stored", path=path, held_out=2), SourceConfig(kind="stored", path="a")
        DataConfig(sources=shared)


def test_overrides_reach_into_lists(tmp_path):
    file = tmp_path / "run.yaml"
    sources = "sources: [{kind: recorded-digits, weight: 1}, {kind: spoken-digits, weight: 2, options: {arithmetic: 0.5}}]"
    file.write_text(f"budget: {{steps: 3}}\nmodel: {{preset: nano}}\ndata: {{{sources}}}\n")
    config, name = read_fit_config([
        *(str(file), "--data.sources.1.weight", "5", "--seed", "4"),
        *("--data.sources.1.options.lengths=[1, 2]", "--data.sources.0.options.held_out", "[anna]"),
    ])  # fmt: skip
    first, second = config.data.sources
    assert (first.weight, second.weight, config.seed, name) == (1, 5, 4, "run")
    assert second.made.arithmetic == 0.5 and second.made.lengths == (1, 2) and first.made.held_out == ("anna",)
