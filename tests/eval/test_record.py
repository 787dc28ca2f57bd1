"""Records: what was saved comes back, what is damaged or made with other heads is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from selfspec.api.speculator import Speculator, wrap
from selfspec.decoding.drafters.trees import LEAST_SAID
from selfspec.errors import (
    CannotWrite,
    HeadsMismatch,
    HeadsNotFound,
    InvalidData,
    InvalidOption,
)
from selfspec.eval.options import RecordOptions
from selfspec.eval.record import ARRAYS_FILE, GUESSES, INFO_FILE, NONE, Record, Recorder, record
from selfspec.eval.results import Question
from tests.heads.kinds import make_heads
from tests.models import make_model, random_ids
from tests.records import OPTIONS, recorded
from tests.talks import make_tokenizer

ARRAYS = ("contexts", "answers", "roots", "tokens", "confidence", "children")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with a record of a translator."""
    folder = tmp_path / "sub" / "record"
    recorded("translator").record.save(folder)
    return folder


def renamed(**values: Any) -> Record:
    """The same record, said to be of something else."""
    found = recorded("translator").record
    return replace(found, info=replace(found.info, **values))


def test_what_was_saved_loads_equal(saved: Path) -> None:
    before, after = recorded("translator").record, Record.load(saved)
    assert (after.info, after.prompts) == (before.info, before.prompts)
    assert all(np.array_equal(getattr(after, name), getattr(before, name)) for name in ARRAYS)
    assert sorted(path.name for path in saved.iterdir()) == [INFO_FILE, ARRAYS_FILE]
    assert [path.name for path in saved.parent.iterdir()] == ["record"]


def test_a_record_that_is_there_or_more_than_one_stays_as_it_is(saved: Path) -> None:
    before = (saved / INFO_FILE).read_bytes()
    with pytest.raises(CannotWrite, match=r"holds record\.\w+ already. Give --overwrite"):
        renamed(base_model="other").save(saved)
    (saved / "notes.txt").write_text("mine")
    with pytest.raises(CannotWrite, match="which selfspec did not write"):
        renamed(base_model="other").save(saved, overwrite=True)
    assert (saved / INFO_FILE).read_bytes() == before
    (saved / "notes.txt").unlink()
    renamed(base_model="other").save(saved, overwrite=True)
    assert (saved / INFO_FILE).read_bytes() != before


def edited(**values: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / INFO_FILE
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return edit


def changed(name: str, change: Callable[[Any], Any] | None = None) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        arrays = load_file(folder / ARRAYS_FILE)
        value = arrays.pop(name)
        save_file(arrays | ({name: change(value)} if change else {}), folder / ARRAYS_FILE)

    return edit


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / ARRAYS_FILE).unlink(), "No such file"),
        (edited(format_version=9), "format version 9, this reads 4"),
        (edited(colour="red"), "unknown key 'colour'"),
        (edited(exit_layers=[1, 3]), "tokens is int32"),
        (changed("guesses"), "holds ['answers', 'behind', 'chances', 'children', "),
        (changed("answers", lambda a: a[:-1]), "answers is int32 [72], expected [73]"),
        (changed("confidence", lambda a: a.astype(np.float64)), "confidence is float64"),
        (changed("children", lambda a: a + 10_000), "children names a node that is not there"),
    ],
)
def test_a_damaged_record_is_refused_by_name(
    damage: Callable[[Path], object], reason: str, saved: Path
) -> None:
    damage(saved)
    with pytest.raises(InvalidData) as caught:
        Record.load(saved)
    assert reason in str(caught.value)
    assert str(saved) in str(caught.value)


def test_other_heads_other_dtypes_and_other_models_are_refused() -> None:
    found, speculator = recorded("translator")
    assert speculator.heads is not None
    found.require_heads(speculator.backbone, speculator.heads)
    unembedding, base = speculator.backbone.unembedding, found.info.base
    others = make_heads("translator", unembedding, base_fingerprint=base)
    with pytest.raises(HeadsMismatch, match="another set of heads"):
        found.require_heads(speculator.backbone, others)
    with pytest.raises(HeadsMismatch, match=r"another model \(.*\), found 0123456789ab\."):
        found.require_heads(speculator.backbone, make_heads("translator", unembedding))
    with pytest.raises(HeadsMismatch, match=r"another dtype \(bfloat16\), found float64"):
        renamed(dtype="bfloat16").require_heads(speculator.backbone, speculator.heads)


# What is recorded


@pytest.mark.parametrize("kind", ["translator", "deep-fused"])
def test_branches_are_followed_as_far_as_a_setting_may_go(kind: str) -> None:
    """A child where the draft may be taken and another may follow; a tree no deeper than W_max."""
    found, _ = recorded(kind)
    assert found.guesses.shape[1] == (GUESSES if kind == "deep-fused" else 0)
    truth = {int(r): int(t) for r, t in zip(found.roots, found.answers[1:], strict=False)}
    truth.pop(NONE)
    depths = dict.fromkeys(truth, 1)
    for node in range(len(found.tokens)):
        for column, child in enumerate(found.children[node].tolist()):
            token = int(found.tokens[node, column])
            if child == NONE:
                continue
            assert token not in found.info.end_tokens
            if child in truth:
                assert truth[node] == token  # a right draft leads to the next place
                assert kind == "translator"
                continue
            assert found.confidence[node, column].max() >= found.info.min_threshold
            depths[child] = depths[node] + 1  # nodes are numbered from the root on
        for rank, child in enumerate(found.behind[node].tolist()):
            if child != NONE:
                assert found.chances[node, :, rank].max() >= LEAST_SAID
                assert found.guesses[node, rank] not in found.info.end_tokens
                depths[child] = depths[node] + 1
    assert max(depths.values()) == OPTIONS.max_draft_tokens
    assert depths.keys() == set(range(len(found.tokens)))


def test_confidence_falls_with_alpha_and_layers_of_one_mind_share_a_branch() -> None:
    found, _ = recorded("translator")
    assert (np.diff(found.confidence, axis=-1) <= 0).all()
    shared = [
        (tokens[a] == tokens[b], children[a] == children[b])
        for tokens, children in zip(found.tokens, found.children, strict=True)
        for a, b in [(0, 1), (1, 2)]
        if NONE not in (children[a], children[b])
    ]
    assert any(same for same, _ in shared)
    assert all(same == together for same, together in shared)


def test_every_turn_is_recorded_behind_the_plain_answers_to_those_before() -> None:
    speculator = wrap(make_model("llama"), make_tokenizer(), heads="logit-lens")
    questions = [
        Question(id="x", task="chat", turns=("a b", "c")),
        Question(id="y", task="QA", turns=("b",)),
    ]
    seen: list[tuple[int, int]] = []
    found = record(
        speculator,
        questions,
        RecordOptions(max_new_tokens=6),
        lambda n, of, _: seen.append((n, of)),
    )
    assert [(p.id, p.task, p.turn) for p in found.prompts] == [
        ("x", "chat", 1),
        ("x", "chat", 2),
        ("y", "QA", 1),
    ]
    assert found.prompts[1].prompt_tokens > found.prompts[0].prompt_tokens + 3
    assert seen == [(0, 2), (1, 2), (2, 2)]
    mean = sum(p.prompt_tokens + p.new_tokens / 2 for p in found.prompts) / 3
    assert found.mean_context == round(mean)


@pytest.fixture(scope="module")
def lens() -> Speculator:
    """It drafts with prompt lookup: `tune` may find that heads pay that `calibrate` left out."""
    return wrap(make_model("llama"), heads="logit-lens", drafter="ngram")


@pytest.mark.parametrize(
    ("options", "floor"), [({"exit_layers": (4,)}, 0.01), ({}, 0.2), ({"min_threshold": 0.6}, 0.6)]
)
def test_heads_are_recorded_whoever_drafts_and_a_single_one_further_down(
    lens: Speculator, options: dict[str, Any], floor: float
) -> None:
    recorder = Recorder(lens, RecordOptions(max_new_tokens=4, **options))
    recorder.prompt(random_ids(5), "x", "prompts", 1)
    assert len(recorder.record().tokens) > 0
    assert recorder.record().info.min_threshold == floor


def test_what_cannot_be_recorded_is_refused(
    lens: Speculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HeadsNotFound, match="without exit heads"):
        Recorder(wrap(lens.model), RecordOptions(exit_layers=(2,)))
    with pytest.raises(InvalidOption, match="exit layer 6 is not among"):
        Recorder(lens, RecordOptions(exit_layers=(2, 6)))
    for name, value, reason in (
        ("repetition_penalty", 1.2, "RepetitionPenaltyLogitsProcessor"),
        ("max_time", 60.0, "stopping criteria"),
    ):  # greedy decoding is more than the top token
        with monkeypatch.context() as patch:
            patch.setattr(lens.model.generation_config, name, value)
            with pytest.raises(InvalidOption, match=f"asks for {reason}, which cannot"):
                Recorder(lens, RecordOptions()).prompt(random_ids(5), "x", "prompts", 1)
