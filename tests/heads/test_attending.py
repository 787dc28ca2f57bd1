"""EAGLE-3 heads: folders as others publish them give what the reference package computed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from selfspec.decoding.state import alone, done_alone
from selfspec.errors import HeadsMismatch, InvalidHeads, InvalidOption, SelfspecError
from selfspec.heads.attending import AttendingHeads, TextRows
from selfspec.heads.folder import attends
from selfspec.model.backbone import Backbone
from selfspec.model.parts import Unembedding
from tests.bad_input import NAN, Change, config, one_line, snapshot, tensor, tensors
from tests.heads.eagle3 import make
from tests.heads.eagle3.make import HEADS, HERE, LENGTH, SHOWN, VOCABULARY, WIDTH, target, text
from tests.models import addressless

FIRST = LENGTH - make.STEPS - SHOWN
"""The first row whose logits are kept; row r is token r + 1."""


def read(folder: Path, family: str = "llama") -> AttendingHeads:
    model = target(family)
    unembedding = Unembedding(model.lm_head.weight, model.model.norm, Tensor.float)
    return AttendingHeads.from_pretrained(folder, unembedding, "", "tiny", 8)


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("name", HEADS)
def test_logits_and_drafts_are_those_of_the_reference(name: str, *, tree: bool) -> None:
    """In a tree another token stands beside each, before it."""
    family = HEADS[name][0]
    heads, ids = read(HERE / name, family), text()
    expected = load_file(HERE / f"{name}.expected.safetensors")
    seen = make.states(family, list(heads.layers), ids)[0]
    embed = target(family).get_input_embeddings()
    whole = torch.ones(LENGTH - 1, LENGTH - 1, dtype=torch.bool).tril()
    tokens, fused = ids[0, 1:].tolist(), heads.fuse(seen[:-1])
    whole_text = TextRows(heads.attention(embed), tokens, fused, range(1, LENGTH), whole)
    rows = heads.head(done_alone(whole_text))
    first = expected["logits"][0]
    torch.testing.assert_close(rows[FIRST : FIRST + SHOWN], first, rtol=1e-5, atol=1e-5)
    for shown in range(SHOWN):
        row = FIRST + shown
        reading = heads.attention(embed)
        for piece in seen[: row + 1].split(7):  # as prompts enter in pieces
            reading.add(piece)
        tokens = ids[0].tolist()
        for forced in (True, False):
            output: Any = alone(reading.read(tokens))
            for step in range(make.STEPS):
                logits = heads.head(output)[0]
                if forced:
                    wanted = expected["logits"][step, shown]
                    torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-5)
                best = int(heads.head.to_target_ids(logits.argmax()))
                if not forced:
                    assert best == int(expected["drafts"][shown, step])
                follows = tokens[row + 2 + step : row + 3 + step] if forced else [best]
                token, place = follows[0] if follows else best, (2 * step - 1 if tree else step - 1)
                beside = [token ^ 1, token] if tree else [token]
                before = output.expand(len(beside), -1)
                output = done_alone(reading.draft(beside, before, [place] * len(beside)))[-1:]


@pytest.mark.parametrize("name", ["llama", "original-qwen3"])
def test_a_model_s_vocabulary_may_be_padded(name: str) -> None:
    model = target(HEADS[name][0])
    padded = torch.cat([model.lm_head.weight, torch.zeros(8, WIDTH)])
    unembedding = Unembedding(padded, model.model.norm, Tensor.float)
    heads = AttendingHeads.from_pretrained(HERE / name, unembedding, "", "tiny", 8)
    reading = heads.attention(model.get_input_embeddings())
    reading.add(torch.randn(2, 3 * WIDTH))
    output: Any = alone(reading.read([0, 1, VOCABULARY + 7]))
    wide = heads.head.to_target_logits(heads.head(output))
    assert wide.shape == (1, VOCABULARY + 8)
    assert not wide[:, VOCABULARY:].isfinite().any()


def test_folders_are_told_from_those_of_other_heads(tmp_path: Path) -> None:
    assert all(attends(HERE / name) for name in HEADS)
    (tmp_path / "config.json").write_text('{"head_type": "linear", "draft_vocab_size": 5}')
    assert not attends(tmp_path)
    assert not attends(tmp_path / "nowhere")


def test_no_head_is_asked_about_a_single_row() -> None:
    with pytest.raises(InvalidOption, match="attend to the whole text"):
        read(HERE / "llama")[0]


# --- damaged folders


def layer(name: str, value: Any) -> Change:
    def damage(folder: Path) -> None:
        own = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
        config(transformer_layer_config=own | {name: value})(folder)

    return damage


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


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
        (layer("rope_parameters", {"rope_type": kind, "factor": value}), said)
        for kind, value, said in [
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
    (pickled, "pickles"),
    (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 9), "model.safetensors"),
    (tensors(lambda held: held.pop(Q)), f"no {Q}"),
    (tensors(lambda held: held.update(x=torch.ones(2))), "x is unknown"),
    (tensor(Q, Tensor.t), Q),
    (tensor(Q, Tensor.int), Q),
    (tensor(Q, lambda t: t * NAN), Q),
    (tensors(lambda held: held.pop("d2t")), "no d2t"),
    (tensor("d2t", Tensor.float), "d2t"),
    (tensor("d2t", lambda t: t + VOCABULARY), "d2t"),
    (tensor("d2t", lambda t: -torch.arange(make.DRAFTED)), "d2t"),
    (tensor("d2t", lambda t: t[:-1]), "d2t"),
]


OF_ANOTHER_MODEL = [
    (config(**{STATES: [1, 4, 9]}), "8 layers"),
    (config(target_hidden_size=WIDTH * 2), "width 64"),
    (layer("vocab_size", VOCABULARY + 1), "129 tokens"),
]


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        *((InvalidHeads, *damage) for damage in DAMAGES),
        *((HeadsMismatch, *other) for other in OF_ANOTHER_MODEL),
    ],
    ids=addressless,
)
def test_what_is_damaged_or_of_another_model_is_one_line_that_says_where(
    tmp_path: Path, kind: type[SelfspecError], change: Change, said: str
) -> None:
    folder = tmp_path / "heads"
    shutil.copytree(HERE / "llama", folder)
    change(folder)
    before = snapshot(folder)
    with pytest.raises(kind) as caught:
        read(folder)
    one_line(caught, folder)
    assert said in str(caught.value)
    assert snapshot(folder) == before


def test_heads_run_in_the_model_s_dtype() -> None:
    model = Backbone(target("llama").bfloat16(), executor="generic")
    heads = AttendingHeads.from_pretrained(HERE / "llama", model.unembedding, "", "tiny", 8)
    reading = heads.attention(model.embed)
    reading.add(torch.randn(5, 3 * WIDTH, dtype=torch.bfloat16))
    output: Any = alone(reading.read(list(range(6))))
    assert output.dtype == torch.bfloat16
    assert heads.head(output).shape == (1, make.DRAFTED)
