"""Folders of heads load as they were saved; damaged or mismatched folders are refused.

Each refusal is one line that names the file, with no traceback, and leaves the folder unchanged.
"""

# mypy: disable-error-code="var-annotated"
# rows of mixed values have no common type for mypy

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from selfspec import files
from selfspec.api.speculator import Speculator
from selfspec.config import SpeculationOptions
from selfspec.decoding.state import do_alone, run_alone
from selfspec.errors import (
    HeadsMismatch,
    HeadsNotFound,
    InvalidHeads,
    InvalidOption,
    SelfspecError,
    annotations_of,
    check_types,
)
from selfspec.heads.attending import AttendingHeads, TextRows, config_of
from selfspec.heads.folder import METADATA, WEIGHTS_FILE, attends, repeated_config
from selfspec.model.backbone import Backbone
from selfspec.model.parts import Unembedding
from selfspec.options import ACCEPTANCE, CONTROLLERS, TOGETHER
from tests import bad_input
from tests.bad_input import NAN, Change, config, one_line, snapshot, steps_into, tensor, tensors
from tests.heads.eagle3 import make
from tests.heads.eagle3.make import HEADS, HERE, LENGTH, SHOWN, VOCABULARY, WIDTH, target, text
from tests.heads.kinds import TRAINED, beside, load, make_heads, train
from tests.models import VOCAB_SIZE, addressless, wrapped


def refused(kind: type[SelfspecError], load: Callable[..., object], folder: Path, *of: Any) -> str:
    contents = snapshot(folder)
    with pytest.raises(kind) as caught:
        load(folder, *of)
    one_line(caught, folder)
    assert snapshot(folder) == contents
    return str(caught.value)


@pytest.mark.parametrize("kind", TRAINED)
def test_saved_heads_load_bit_equal(
    kind: str, unembedding: Unembedding, hidden: Tensor, tmp_path: Path
) -> None:
    heads = make_heads(
        kind,
        unembedding,
        temperatures={"2": 1.25},
        defaults={"drafter": "exit:threshold=0.5/0.6,layers=2/4"},
        training={"steps": 7},
    )
    train(heads).save(tmp_path / "new" / "folder")
    weights = load_file(tmp_path / "new" / "folder" / WEIGHTS_FILE).values()
    assert any(len(w) == VOCAB_SIZE for w in weights) is (kind == "linear"), "the unembedding's"
    loaded = load(tmp_path / "new" / "folder", unembedding)
    assert loaded.config == heads.config
    assert loaded.state_dict().keys() == heads.state_dict().keys()
    assert all(torch.equal(v, loaded.state_dict()[k]) for k, v in heads.state_dict().items())
    for layer in (2, 4):
        assert torch.equal(loaded[layer](hidden), heads[layer](hidden))


def test_heads_saved_in_float32_load_in_the_models_dtype_ready_to_use(heads: Path) -> None:
    unembedding = wrapped("llama", torch.bfloat16).unembedding
    loaded = load(heads, unembedding)
    assert {weight.dtype for weight in loaded.parameters()} == {torch.bfloat16}
    assert not any(weight.requires_grad for weight in loaded.parameters())
    assert not loaded.training
    assert loaded.first.draft_ids is not None
    assert loaded.first.draft_ids.dtype == torch.int64


def test_loading_writes_nothing_into_the_model(backbone: Backbone, tmp_path: Path) -> None:
    # logit-lens heads share the model's norm; a folder made with another norm must not replace it
    make_heads("linear", backbone.unembedding, exit_layers=(2,)).save(tmp_path)
    config(head_type="logit-lens")(tmp_path)
    save_file({"by_layer.2.norm.weight": torch.zeros(32)}, tmp_path / WEIGHTS_FILE)
    before = {name: weight.clone() for name, weight in backbone.model.state_dict().items()}
    with suppress(InvalidHeads):
        load(tmp_path, backbone.unembedding)
    after = backbone.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(weight.requires_grad for weight in backbone.model.parameters())


# --- heads: config.json


@pytest.fixture
def heads(tmp_path: Path, backbone: Backbone) -> Path:
    """A folder of trained MLPs over a draft vocabulary."""
    folder = tmp_path / "heads"
    train(make_heads("deep-fused-draft", backbone.unembedding)).save(folder)
    return folder


VALUES: list[tuple[str, Any]] = [
    *(("format_version", value) for value in (1, 3, 2.0, True)),
    *(("base_model", value) for value in ("a\0b", "x" * 2000)),
    *(("hidden_size", value) for value in (0, 1 << 40, True)),
    *(("exit_layers", value) for value in ([], [0, 2], [2, 6], [4, 2], [2, 2], [True])),
    *(("head_type", value) for value in ("", "magic", "ExitHead")),
    *(("inner_size", value) for value in (0, 10**9, 1 << 23)),
    *(("draft_vocab_size", value) for value in (4, 97)),
    *(("temperatures", {"2": value}) for value in (0, -1, "1", NAN, bad_input.INF)),
    *(("temperatures", {layer: 1.0}) for layer in ("3", "x")),
    *(("defaults", value) for value in ({"magic": 1}, {"exit_threshold": 0.5})),
    *(("defaults", {"drafter": value}) for value in ("exit:threshold=7", "exit:layers=3")),
    *(("defaults", {"drafter": value}) for value in ("exit:threshold=0.5/0.5/0.5", 5, None)),
    *(("num_heads", value) for value in (0, 2)),
    ("state_layers", [2]),
    *((name, None) for name in ("base_model", "hidden_size", "exit_layers", "head_type")),
    ("unknown", 1),
]
AT_0 = [  # numbers of heads and state layers that differ from the weights
    *(("medusa", "num_heads", value) for value in (None, 2, 4)),
    *(("states", "state_layers", value) for value in (None, [], [0], [2], [5, 2], [6], 3)),
]


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [*(("deep-fused-draft", *value) for value in VALUES), *AT_0],
    ids=lambda value: addressless(repr(value))[:30],
)
def test_a_heads_config_with_a_strange_value(
    tmp_path: Path, unembedding: Unembedding, kind: str, name: str, value: Any
) -> None:
    train(make_heads(kind, unembedding)).save(heads := tmp_path / "heads")
    config(**{name: value})(heads)
    refused(SelfspecError, load, heads, unembedding)


@pytest.mark.parametrize("kind", ["deep-fused-draft", "states", "medusa", "eagle3"])
def test_any_value_anywhere_in_a_config_is_one_line_or_of_its_type(
    kind: str, tmp_path: Path, backbone: Backbone
) -> None:
    folder = tmp_path / "heads"
    if kind == "eagle3":
        shutil.copytree(HERE / "llama", folder)
    else:
        make_heads(kind, backbone.unembedding).save(folder)
    path = folder / "config.json"
    content = path.read_text()
    for *outer, last in [steps for steps in steps_into(json.loads(content)) if steps]:
        for value in (None, True, -1, 0.5, NAN, 10**40, "a\nb", [], {}, [None]):
            values = inner = json.loads(content)
            for step in outer:
                inner = inner[step]
            inner[last] = value
            path.write_text(json.dumps(values))
            try:
                heads_config = config_of(folder)
            except InvalidHeads as error:
                message = str(error)
                assert "\n" not in message
                assert str(folder) in message
            else:
                check_types(vars(heads_config), annotations_of(type(heads_config)))


DEFAULTS: list[dict[str, Any]] = [
    *({"acceptance": rule} for rule in (*ACCEPTANCE, "lenient:lenience=1.0", "easd:entropy=1")),
    {"easd": "entropy=1.0"},
    *({"drafter": drafter} for drafter in TOGETHER),
    *({"controller": kind} for kind in CONTROLLERS),
    *({"pinned": value} for value in (True, False, None)),
    *({"speculate": False}, {"require_lossless": True}, {"costs": "row=0.5"}),
]


@pytest.mark.parametrize("defaults", DEFAULTS, ids=str)
def test_defaults_of_heads_write_the_models_own_text_or_are_refused(
    heads: Path, backbone: Backbone, defaults: dict[str, Any]
) -> None:
    config(defaults=defaults)(heads)
    options = SpeculationOptions().updated(defaults)
    elsewhere = options.uses("draft-model") or options.uses("rest")
    if options.loss or elsewhere or options.pinned:
        refused(SelfspecError, load, heads, backbone.unembedding)
        return
    loaded = load(heads, backbone.unembedding)
    options = SpeculationOptions().updated(loaded.config.defaults)
    speculator = Speculator(backbone, None, loaded, "tiny", options)
    keywords: Any = {"max_new_tokens": 6, "do_sample": True, "seed": 1}
    answer = speculator.generate([1, 2, 3, 1, 2], **keywords)
    plain = speculator.generate([1, 2, 3, 1, 2], **keywords, speculate=False)
    assert answer.token_ids == plain.token_ids


def test_a_heads_config_that_is_a_folder_or_a_pipe(heads: Path, unembedding: Unembedding) -> None:
    path = heads / "config.json"
    for create in (os.mkfifo, Path.mkdir):
        path.unlink()
        for folder in (heads, heads / "nowhere"):
            with pytest.raises(HeadsNotFound, match=f"no config.json in {folder}"):
                load(folder, unembedding)
        create(path)
        with pytest.raises(HeadsNotFound):
            load(heads, unembedding)


# --- heads: model.safetensors

NAME = "by_layer.4.change.inner.weight"

WEIGHTS: dict[str, Change] = {
    "gone": lambda folder: (folder / "model.safetensors").unlink(),
    "no tensors": lambda folder: (folder / "model.safetensors").write_bytes(b"\x80\x04\x95"),
    "nan": tensor(NAME, lambda t: t * NAN),
    "transposed": tensor(NAME, lambda t: t.t()),
    "whole numbers": tensor(NAME, lambda t: t.long()),
    "float8": tensor(NAME, lambda t: t.to(torch.float8_e4m3fn)),
    "a tensor less": tensors(lambda tensors: tensors.pop(NAME)),
    "a tensor more": tensors(lambda tensors: tensors.update({"extra": torch.zeros(2)})),
    "no draft ids": tensors(lambda tensors: tensors.pop("draft_ids")),
    "draft ids 2-D": tensor("draft_ids", lambda t: t[None]),
    "draft ids of floats": tensor("draft_ids", lambda t: t.float()),
    "draft ids falling": tensor("draft_ids", lambda t: t.flip(0)),
    "draft ids below 0": tensor("draft_ids", lambda t: t - 1),
    "draft ids too high": tensor("draft_ids", lambda t: t + 90),
    "a draft id less": tensor("draft_ids", lambda t: t[:-1]),
}


@pytest.mark.parametrize("damage", WEIGHTS)
def test_strange_weights_of_heads(heads: Path, unembedding: Unembedding, damage: str) -> None:
    WEIGHTS[damage](heads)
    refused(InvalidHeads, load, heads, unembedding)


def test_a_header_is_read_with_bounds(heads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert repeated_config(heads / WEIGHTS_FILE) is not None
    monkeypatch.setattr(files, "MOST_HEADER_BYTES", 9)
    assert repeated_config(heads / WEIGHTS_FILE) is None


@pytest.mark.parametrize("text", ["{", "[]", bad_input.DEEP, '{"weights": "x"}', "{}"])
def test_a_wrong_copy_of_the_config_in_the_weights(
    heads: Path, unembedding: Unembedding, text: str
) -> None:
    path = heads / "model.safetensors"
    save_file(load_file(path), path, {METADATA: text})
    if text.startswith('{"') or text == "{}":
        with pytest.raises(InvalidHeads, match="repeats no config"):
            load(heads, unembedding)
    else:
        assert load(heads, unembedding).config.exit_layers == (2, 4)


# --- published EAGLE-3 heads, against the outputs of the reference package

FIRST = LENGTH - make.STEPS - SHOWN
"""The first row whose logits are kept; row r is token r + 1."""


def read(folder: Path, family: str = "llama", padding: int = 0) -> AttendingHeads:
    model = target(family)
    weight = torch.cat([model.lm_head.weight, torch.zeros(padding, WIDTH)])
    unembedding = Unembedding(weight, model.model.norm, Tensor.float)
    return AttendingHeads.from_pretrained(folder, beside(unembedding, "", 8), "tiny")


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("name", HEADS)
def test_logits_equal_the_reference(name: str, *, tree: bool) -> None:
    """In a tree, a sibling with another token precedes each draft."""
    family = HEADS[name][0]
    heads, ids = read(HERE / name, family), text()
    expected = load_file(HERE / f"{name}.expected.safetensors")
    states = make.states(family, list(heads.layers), ids)[0]
    embed = target(family).get_input_embeddings()
    mask = torch.ones(LENGTH - 1, LENGTH - 1, dtype=torch.bool).tril()
    tokens, fused = ids[0, 1:].tolist(), heads.fuse(states[:-1])
    text_rows = TextRows(heads.attention(embed), tokens, fused, range(1, LENGTH), mask)
    rows = heads.head(do_alone(text_rows))
    first = expected["logits"][0]
    torch.testing.assert_close(rows[FIRST : FIRST + SHOWN], first, rtol=1e-5, atol=1e-5)
    for index in range(SHOWN):
        row = FIRST + index
        reading = heads.attention(embed)
        for piece in states[: row + 1].split(7):  # prompts are read in pieces
            reading.add(piece)
        tokens = [*ids[0].tolist(), 0]  # 0: after the last logits, not read
        output: Any = run_alone(reading.read(tokens))
        do_alone(reading.draft([tokens[row]], output, [-1]))
        run_alone(reading.read(tokens))  # drops the draft
        for step, reference in enumerate(expected["logits"][:, index]):
            torch.testing.assert_close(heads.head(output)[0], reference, rtol=1e-5, atol=1e-5)
            token, place = tokens[row + 2 + step], 2 * step - 1 if tree else step - 1
            drafts = [token ^ 1, token] if tree else [token]
            outputs = output.expand(len(drafts), -1)
            output = do_alone(reading.draft(drafts, outputs, [place] * len(drafts)))[-1:]


@pytest.mark.parametrize("name", ["llama", "original-qwen3"])
def test_a_model_s_vocabulary_may_be_padded(name: str) -> None:
    family = HEADS[name][0]
    heads = read(HERE / name, family, padding=8)
    reading = heads.attention(target(family).get_input_embeddings())
    reading.add(torch.randn(2, 3 * WIDTH))
    output: Any = run_alone(reading.read([0, 1, VOCABULARY + 7]))
    wide = heads.head.to_target_logits(heads.head(output))
    assert wide.shape == (1, VOCABULARY + 8)
    assert not wide[:, VOCABULARY:].isfinite().any()


def test_folders_of_attending_heads_are_recognised(tmp_path: Path) -> None:
    assert all(attends(HERE / name) for name in HEADS)
    (tmp_path / "config.json").write_text('{"head_type": "linear", "draft_vocab_size": 5}')
    assert not attends(tmp_path)
    assert not attends(tmp_path / "nowhere")


def test_attending_heads_refuse_a_single_row() -> None:
    with pytest.raises(InvalidOption, match="attend to the whole text"):
        read(HERE / "llama")[0]


# --- damaged folders


def layer(name: str, value: Any) -> Change:
    def damage(folder: Path) -> None:
        fields = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
        config(transformer_layer_config=fields | {name: value})(folder)

    return damage


Q = "layers.0.self_attn.q_proj.weight"
STATES = "eagle_aux_hidden_state_layer_ids"
DAMAGES: list[tuple[Change, str]] = [
    (config(speculators_model_type="dflash"), "speculators_model_type is 'dflash'"),
    (config(transformer_layer_config=None), "hidden_size is None"),
    *(
        (layer(name, value), f"{name} is ")
        for name, value in [
            *(("model_type", "gpt2"), ("hidden_size", 1 << 40), ("num_attention_heads", 1 << 30)),
            *(("num_hidden_layers", 2), ("num_key_value_heads", 3), ("head_dim", 7)),
            *(("hidden_act", "gelu"), ("rms_norm_eps", 0), ("layer_types", ["sliding_attention"])),
        ]
    ),
    *(
        (layer("rope_parameters", {"rope_type": kind, "factor": value}), reason)
        for kind, value, reason in [
            ("dynamic", 2.0, "rope_type"),
            *(("linear", value, "factor is") for value in (NAN, [2.0], 10**400)),
        ]
    ),
    (layer("rope_parameters", {"rope_type": "llama3"}), "factor"),
    (config(fc_norm=True, norm_before_fc=True), "fc_norm"),
    (config(fc_norm=True), "no fc_norm.0.weight"),
    (layer("intermediate_size", 1 << 20), "expected"),
    *((config(**{STATES: value}), STATES) for value in ([1, 1, 2], [], [-1, 2, 3])),
    (config(**{STATES: [1, 2, 3, 4]}), "fc.weight"),
    (lambda folder: (folder / "model.safetensors").unlink(), "no *.safetensors"),
    (lambda path: (path / "model.safetensors").rename(path / "pytorch_model.bin"), "pickles"),
    (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 9), "model.safetensors"),
    (tensors(lambda tensors: tensors.pop(Q)), f"no {Q}"),
    (tensors(lambda tensors: tensors.update(x=torch.ones(2))), "x is unknown"),
    (tensor(Q, Tensor.t), Q),
    (tensor(Q, Tensor.int), Q),
    (tensor(Q, lambda t: t * NAN), Q),
    (tensors(lambda tensors: tensors.pop("d2t")), "no d2t"),
    (tensor("d2t", Tensor.float), "d2t"),
    (tensor("d2t", lambda t: t + VOCABULARY), "d2t"),
    (tensor("d2t", lambda t: -torch.arange(make.DRAFTED)), "d2t"),
    (tensor("d2t", lambda t: t[:-1]), "d2t"),
]


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        *((InvalidHeads, *damage) for damage in DAMAGES),
        (HeadsMismatch, config(**{STATES: [1, 4, 9]}), "8 layers"),
        (HeadsMismatch, config(target_hidden_size=WIDTH * 2), "width 64"),
        (HeadsMismatch, layer("vocab_size", VOCABULARY + 1), "129 tokens"),
    ],
    ids=addressless,
)
def test_damaged_or_mismatched_heads_are_refused_in_one_line(
    tmp_path: Path, kind: type[SelfspecError], change: Change, said: str
) -> None:
    folder = tmp_path / "heads"
    shutil.copytree(HERE / "llama", folder)
    change(folder)
    assert said in refused(kind, read, folder)


def test_heads_run_in_the_model_s_dtype() -> None:
    model = Backbone(target("llama").bfloat16(), executor="generic")
    heads = AttendingHeads.from_pretrained(HERE / "llama", model, "tiny")
    reading = heads.attention(model.embed)
    reading.add(torch.randn(5, 3 * WIDTH, dtype=torch.bfloat16))
    output: Any = run_alone(reading.read(list(range(6))))
    assert output.dtype == torch.bfloat16
    assert heads.head(output).shape == (1, make.DRAFTED)
