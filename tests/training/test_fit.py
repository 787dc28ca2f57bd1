"""A fit equals a plain loop, keeps the best epoch, resumes bit for bit and checks its input."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from selfspec.api.speculator import heads_of
from selfspec.errors import HeadsMismatch, InvalidData, InvalidOption, SelfspecError
from selfspec.heads.attending import AttendingConfig
from selfspec.heads.folder import read_config
from selfspec.heads.heads import DraftVocabulary, TranslatorHead
from selfspec.hub import models as hub
from selfspec.model.backbone import Backbone
from selfspec.training import fit as fitting
from selfspec.training import records
from selfspec.training.features import Features, FeatureSpec, Selection, StreamSource
from selfspec.training.options import FITTED_HEAD_TYPES, FitOptions
from selfspec.training.text import Conversation
from tests.bad_input import NAN
from tests.heads.eagle3.make import HEADS, HERE, LENGTH, SHOWN, STEPS, WIDTH, states, target, text
from tests.heads.test_folders import FIRST, read
from tests.models import CHEAP, VOCAB_SIZE, make_model, noted, wrapped
from tests.talks import Talks, make_talks

LAYERS = (2, 4)
OPTIONS = FitOptions(
    exit_layers=LAYERS,
    head_type="translator",
    draft_vocab_size=80,
    epochs=2,
    learning_rate=1e-2,
    checkpoint_steps=2,
)
BATCH_TOKENS = 128


def selected(backbone: Backbone, talks: Talks, options: FitOptions, batch_tokens: int) -> Selection:
    spec = fitting.feature_spec(backbone, options, measured=False)
    return Selection(StreamSource(backbone, spec, talks, batch_tokens, keep=True))


def make_job(
    backbone: Backbone,
    talks: Talks,
    batch_tokens: int = BATCH_TOKENS,
    checkpoint: Path | None = None,
    special_ids: Any = (),
    **changes: Any,
) -> fitting.Job:
    options = replace(OPTIONS, **changes)
    text = selected(backbone, talks, options, batch_tokens)
    fields: Any = {"base_model": "tiny", "special_ids": special_ids, "checkpoint": checkpoint}
    return fitting.Job(backbone=backbone, train=text, validation=text, options=options, **fields)


def fitted(backbone: Backbone, talks: Talks, **changes: Any) -> fitting.Fitted:
    return fitting.fit(make_job(backbone, talks, **changes))


def weights(result: fitting.Fitted) -> dict[str, Tensor]:
    return dict(result.heads.named_parameters())


def shares(result: fitting.Fitted) -> list[float]:
    return [result.metrics["layers"][str(layer)]["agreement"] for layer in LAYERS]


@pytest.mark.parametrize(
    ("head_type", "ce_share"), [*zip(FITTED_HEAD_TYPES[:-2], itertools.cycle([0.0, 1.0]))]
)
def test_a_fit_lowers_the_loss_and_raises_agreement(
    backbone: Backbone, talks: Talks, ce_share: float, head_type: str
) -> None:
    progress: list[tuple[int, int]] = []
    changes: dict[str, Any] = {"ce_share": ce_share, "head_type": head_type}
    job = make_job(backbone, talks, epochs=12, learning_rate=3e-2, **changes)
    result = fitting.fit(job, lambda step, steps, _: progress.append((step, steps)))
    assert progress == [(step + 1, len(progress)) for step in range(len(progress))]
    untaught = fitted(backbone, talks, epochs=1, learning_rate=1e-12, **changes)
    agreements = fitting.agreements(result.heads, job.validation.batches())
    assert shares(result) == [agreements[layer].agreement for layer in LAYERS]
    assert {agreement.positions for agreement in agreements.values()} == {job.validation.answers}
    for index, layer in enumerate(LAYERS):
        losses = [entry["train_loss"] for entry in result.epochs if entry["layer"] == layer]
        assert losses[-1] < 0.8 * losses[0]
        assert shares(result)[index] > shares(untaught)[index] + 0.1


@pytest.mark.parametrize(
    ("head_type", "states"), [("deep-fused", None), ("deep-fused", (2, 5)), ("eagle3", None)]
)
def test_heads_on_the_embedding_learn_to_draft_without_any_layer(
    backbone: Backbone, talks: Talks, head_type: str, states: tuple[int, ...] | None
) -> None:
    options = {"head_type": head_type, "exit_layers": (0,), "learning_rate": 3e-2}
    options["state_layers"] = states
    shares = fitted(backbone, talks, epochs=20, **options).metrics["layers"]["0"]
    assert shares["agreement"] > 0.5
    one_step = fitted(backbone, talks, epochs=20, draft_steps=1, **options).metrics["layers"]["0"]
    assert shares["agreement_second"] > one_step["agreement_second"]


def test_medusa_heads_learn_tokens_after_the_next_one(backbone: Backbone, talks: Talks) -> None:
    options: dict[str, Any] = {"head_type": "medusa", "exit_layers": (0,), "learning_rate": 3e-2}
    job = make_job(backbone, talks, epochs=20, **options)
    result = fitting.fit(job)
    assert result.heads.config.num_heads == 3
    for batch in job.train.batches():
        assert batch.deep is not None
        wide = replace(batch, deep=batch.deep.repeat(1, 2))  # as from a cache with other states too
        drafts = list(fitting.unroll(result.heads, 0, wide, 9))
        for step, (features, valid) in enumerate(drafts):
            head = result.heads.by_layer["0" if step == 0 else f"ahead_{step + 1}"]
            for row in valid.nonzero()[:, 0].tolist():
                assert bool(batch.continues[row - step + 1 : row + 1].all())
            rows = valid.nonzero()[:, 0]
            expected = cast("Any", head).features(batch.deep[rows - step])
            torch.testing.assert_close(features[rows], expected)
    best = result.metrics["layers"]["0"]
    untaught = fitted(backbone, talks, epochs=20, step_decay=1e-9, **options).metrics["layers"]["0"]
    assert best["agreement"] > 0.5
    assert best["agreement_second"] > untaught["agreement_second"] + 0.1
    options = {n: getattr(FitOptions(head_type="medusa"), n) for n in ("tokens_ahead", "decay")}
    assert options == {"tokens_ahead": 3, "decay": 0.8}
    assert (FitOptions().tokens_ahead, FitOptions().decay) == (2, 1.0)


@pytest.mark.parametrize("name", HEADS)
def test_heads_that_attend_learn_from_the_logits_of_the_reference(name: str) -> None:
    """Check every draft of a round at every place of two texts of different lengths."""
    heads, ids = read(HERE / name, HEADS[name][0]), text()
    table = target(HEADS[name][0]).model.embed_tokens  # replaced by the heads' own
    joined = states(HEADS[name][0], list(heads.layers), ids)[0]
    hidden = dict(zip(heads.layers, joined.split(WIDTH, -1), strict=True))
    both = {layer: torch.cat([state[:7], state]) for layer, state in hidden.items()}
    both[0] = torch.cat([table(ids[0, :7]), table(ids[0])])
    continues = torch.ones(7 + LENGTH, dtype=torch.bool)
    continues[[0, 7]] = False
    following = torch.cat([ids[0, 1:8], ids[0].roll(-1)])
    top = torch.zeros(7 + LENGTH, 1).long()
    batch = Features(both, following, continues, continues, top, top.half())
    expected = load_file(HERE / f"{name}.expected.safetensors")["logits"]
    for step, (features, valid) in enumerate(fitting.unroll(heads, 0, batch, STEPS)):
        assert valid[:7].tolist() == [place > step for place in range(7)]
        rows = features[7 + FIRST + 1 + step :][:SHOWN]
        torch.testing.assert_close(heads.head.unembed(rows), expected[step], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "gpt_neox"])
def test_fitted_heads_that_attend_are_read_back_from_disk(family: str, tmp_path: Path) -> None:
    backbone = wrapped(family)
    talks = make_talks(backbone.model)
    result = fitted(backbone, talks, head_type="eagle3", exit_layers=(0,), draft_vocab_size=20)
    config = cast("AttendingConfig", result.heads.config)
    assert config.layer["model_type"] == ("qwen3" if family == "qwen3" else "llama")
    changes: dict[str, Any] = {"temperatures": {"0": 1.5}, "defaults": {"drafter": "exit"}}
    config = cast("AttendingConfig", replace(result.heads.config, **changes))
    result.heads.config = config
    records.write(tmp_path / "heads", result, {})
    heads = heads_of(tmp_path / "heads", backbone, "tiny")
    stored = cast("AttendingConfig", heads.config)
    assert replace(stored, weights=None, layer=config.layer) == config
    for name, tensor in result.heads.tensors().items():
        assert torch.equal(tensor, heads.tensors()[name])
    with pytest.raises(HeadsMismatch, match="Fit heads for it"):
        heads_of(tmp_path / "heads", Backbone(backbone.model, fingerprint="other"), "tiny")
    shutil.copytree(tmp_path / "heads", tmp_path / "killed")
    other = replace(config, defaults={}, weights="0")
    (tmp_path / "killed/config.json").write_text(json.dumps(other.record()))
    assert read_config(tmp_path / "killed")["defaults"] == {"drafter": "exit"}


@pytest.mark.parametrize("head_type", ["translator", "deep-fused", "eagle3", "medusa"])
def test_a_fit_goes_on_from_heads(backbone: Backbone, talks: Talks, head_type: str) -> None:
    layers = LAYERS if head_type == "translator" else (0,)
    first = fitted(backbone, talks[:8], head_type=head_type, exit_layers=layers, epochs=1)
    options = fitting.continued_options(FitOptions(learning_rate=1e-9, epochs=1), first.heads)
    job = replace(make_job(backbone, talks), options=options, start=first.heads)
    text = selected(backbone, talks, options, BATCH_TOKENS)
    second = fitting.fit(replace(job, train=text, validation=text))
    for name, tensor in weights(first).items():
        assert torch.allclose(tensor, weights(second)[name], atol=1e-6), name
    assert second.heads.config.training["before"] == first.heads.config.training
    assert second.heads.config.exit_layers == layers


def test_heads_can_be_fitted_further_on_more_states(backbone: Backbone, talks: Talks) -> None:
    kind: dict[str, Any] = {"head_type": "deep-fused", "exit_layers": (0,), "state_layers": ()}
    first = fitted(backbone, talks[:8], epochs=1, **kind).heads
    learned = []
    for rate in (1e-9, 1e-2):
        new_options = FitOptions(learning_rate=rate, epochs=1, state_layers=(2, 5))
        options = fitting.continued_options(new_options, first)
        text = selected(backbone, talks, options, BATCH_TOKENS)
        job = replace(make_job(backbone, talks), options=options, start=first)
        learned.append(fitting.fit(replace(job, train=text, validation=text)).heads[0])
    slow, fast = learned
    name, size = "change.inner.weight", backbone.hidden_size
    known, same, moved = (head.state_dict()[name] for head in (first[0], slow, fast))
    torch.testing.assert_close(same[:, : 2 * size], known, rtol=0, atol=1e-6)
    assert float(same[:, 2 * size :].abs().max()) < 1e-6 < float(moved[:, 2 * size :].abs().max())


def test_unsuitable_heads_to_start_from_are_refused(backbone: Backbone, talks: Talks) -> None:
    with pytest.raises(InvalidOption, match="llama has embeddings of its own"):
        fitting.continued_options(FitOptions(), read(HERE / "llama"))
    attending = fitted(backbone, talks[:8], head_type="eagle3", exit_layers=(0,), epochs=1).heads
    with pytest.raises(InvalidOption, match="the heads have their own"):
        fitting.continued_options(FitOptions(state_layers=(2,)), attending)
    three = fitted(backbone, talks[:8], head_type="medusa", exit_layers=(0,), epochs=1).heads
    with pytest.raises(InvalidOption, match="draft_steps is 5, but start_from has 3 heads"):
        fitting.continued_options(FitOptions(draft_steps=5), three)


def test_coverage_is_the_share_that_can_be_drafted(backbone: Backbone, talks: Talks) -> None:
    counts = Counter(token for talk in talks for token in talk.answer_ids)
    result = fitted(backbone, talks, draft_vocab_size=20, special_ids={95})
    known = result.heads[2].to_target_ids(torch.arange(20)).tolist()
    assert 95 in known
    share = sum(counts[token] for token in known) / sum(counts.values())
    assert result.metrics["coverage"] == pytest.approx(share)
    assert 0.0 < share < 1.0


def test_a_fit_leaves_the_model_unchanged(talks: Talks) -> None:
    model = make_model("llama").train()
    model.requires_grad_(True)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fitted(Backbone(model), talks)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    for module in model.modules():
        assert module.training
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_steps_are_those_of_a_plain_loop(backbone: Backbone, talks: Talks) -> None:
    changes: dict[str, Any] = {"exit_layers": (2,), "draft_vocab_size": None}
    changes |= {"weight_decay": 0.1, "seed": 5}
    job = make_job(backbone, talks, **changes, epochs=1, warmup=0.5)
    learned = weights(fitting.fit(job))
    head = TranslatorHead(backbone.unembedding, DraftVocabulary.of(backbone.unembedding, None))
    decayed, plain = (
        [p for p in head.parameters() if (p.dim() == 2) is matrix] for matrix in (True, False)
    )
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": plain}])
    for group, decay in zip(optimizer.param_groups, (0.1, 0.0), strict=True):
        group["weight_decay"] = decay
    order = torch.randperm(3, generator=torch.Generator().manual_seed(5)).tolist()
    assert sorted(order) == list(job.train.indices)
    for share, index in zip((1 / 3, 2 / 3, 1.0), order, strict=True):
        batch = job.train.source.batch(index)
        for group in optimizer.param_groups:
            group["lr"] = share * OPTIONS.learning_rate
        optimizer.zero_grad()
        functional.cross_entropy(head(batch.hidden[2]), batch.top_ids[:, 0].long()).backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), OPTIONS.max_grad_norm)
        optimizer.step()
    for name, weight in head.named_parameters():
        torch.testing.assert_close(learned[f"by_layer.2.{name}"], weight.detach())


def test_accumulated_batches_make_one_large_batch(backbone: Backbone, talks: Talks) -> None:
    changes: dict[str, Any] = {"epochs": 1, "warmup": 0.0, "max_grad_norm": 1e9}
    large = make_job(backbone, talks, batch_tokens=10_000, **changes)
    parts = make_job(backbone, talks, batch_tokens=64, accumulate=99, **changes)
    assert len(large.train.indices) == 1 < len(parts.train.indices)
    (single, *_), (divided, *_) = (fitting.fit(job).epochs for job in (large, parts))
    assert single["train_loss"] == pytest.approx(divided["train_loss"], rel=1e-5)


@pytest.fixture(scope="module")
def deep(backbone: Backbone, talks: Talks) -> fitting.Fitted:
    return fitted(backbone, talks, head_type="deep-fused")


OTHERS: dict[str, list[Any]] = {
    **{"seed": [4], "ce_share": [0.5], "answer_share": [0.9], "epochs": [3], "inner_size": [5]},
    **{"max_grad_norm": [1e-3], "accumulate": [2], "batch_tokens": [64]},
    **{"draft_vocab_size": [40, None], "draft_steps": [1, 3]},
}


@pytest.mark.parametrize(
    ("option", "value"), [(name, value) for name, values in OTHERS.items() for value in values]
)
def test_every_option_changes_what_is_learned(
    backbone: Backbone, talks: Talks, deep: fitting.Fitted, option: str, value: Any
) -> None:
    name = "by_layer.4.change.direct.weight"
    changed = fitted(backbone, talks, head_type="deep-fused", **{option: value})
    assert not torch.equal(weights(deep)[name], weights(changed)[name])


def test_each_layer_keeps_its_best_epoch(backbone: Backbone, talks: Talks) -> None:
    wild = {"epochs": 8, "learning_rate": 3.0, "warmup": 0.0, "exit_layers": (2,)}
    result = fitted(backbone, talks, **wild)
    best = max(result.epochs, key=lambda entry: (entry["agreement"], -entry["epoch"]))
    assert result.metrics["layers"]["2"] == best


def stop_after(count: int) -> fitting.Show:
    """A listener that interrupts the fit like Ctrl-C."""

    def listen(step: int, steps: int, words: str) -> None:
        if step == count:
            raise KeyboardInterrupt

    return listen


def test_heads_that_attend_have_no_draft_of_a_second_token(backbone: Backbone) -> None:
    pairs = [Conversation((1, 2), ((1, 2),))] * 2
    options: dict[str, Any] = {"head_type": "eagle3", "exit_layers": (0,), "epochs": 1}
    job = make_job(backbone, pairs, **options)
    result = fitting.fit(job)
    assert result.metrics["layers"]["0"]["positions"] == 0
    with pytest.raises(InvalidData, match="no answers to measure"):
        records.calibrate(result.heads, job.validation, CHEAP)
    texts = [Conversation((1, 2, 3, 4), ((1, 4),))] * 2
    text = make_job(backbone, texts, **options).validation
    calibration = records.calibrate(result.heads, text, CHEAP)
    assert 0 < calibration.positions < text.answers
    assert calibration.positions == fitting.agreements(result.heads, text.batches())[0].positions


def test_a_killed_fit_ends_the_same(backbone: Backbone, talks: Talks, tmp_path: Path) -> None:
    """tests/cli/test_train.py kills fits of other heads at any moment."""
    job = make_job(backbone, talks, epochs=3, head_type="eagle3", exit_layers=(0,))
    expected, job = fitting.fit(job), replace(job, checkpoint=tmp_path / hub.CHECKPOINT)
    for stop in (5, 6, 7):
        with pytest.raises(KeyboardInterrupt):
            fitting.fit(job, stop_after(stop))
    steps: list[int] = []
    resumed = fitting.fit(job, lambda step, *_: steps.append(step))
    assert steps[0] == 7
    assert resumed.epochs == expected.epochs
    assert all(torch.equal(t, weights(expected)[name]) for name, t in weights(resumed).items())


def test_a_fit_with_little_time_still_ends_its_learning_rate_schedule(
    backbone: Backbone, talks: Talks, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, remaining = itertools.count(), itertools.chain((5, 4, 3, 2, 1), itertools.repeat(0))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(seconds)))
    schedule = noted(monkeypatch, fitting.Trainer, "_rate", lambda _, step: step)
    result = fitting.fit(make_job(backbone, talks, epochs=4), left_s=lambda: float(next(remaining)))
    expected = [0, 2.4, 4.8, 7.2, 9.6]  # of 12 steps, a second each
    assert list(dict.fromkeys(schedule)) == pytest.approx(expected)  # two groups of parameters
    assert result.metrics["steps"] == result.heads.config.training["steps"] == 5
    assert {entry["epoch"] for entry in result.epochs} == {1, 2}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, backbone: Backbone, talks: Talks) -> Path:
    path = tmp_path_factory.mktemp("begun") / hub.CHECKPOINT
    with pytest.raises(KeyboardInterrupt):
        fitting.fit(make_job(backbone, talks, checkpoint=path), stop_after(5))
    return path


def test_a_checkpoint_of_another_job_is_refused(
    backbone: Backbone, talks: Talks, begun: Path, tmp_path: Path
) -> None:
    shutil.copy(begun, tmp_path)
    with pytest.raises(InvalidOption, match="was begun with epochs 2, not 3"):
        fitting.fit(make_job(backbone, talks, checkpoint=tmp_path / hub.CHECKPOINT, epochs=3))
    with pytest.raises(InvalidOption, match="was begun with another data"):
        fitting.fit(make_job(backbone, talks[1:], checkpoint=tmp_path / hub.CHECKPOINT))


NORM = "by_layer.2.norm.weight"
Damage = Callable[[dict[str, Tensor], Any], Any]
CHECKPOINTS: list[Damage] = [
    lambda tensors, record: record["course"].update(sums={"2": NAN, "4": 0.0}),
    lambda tensors, record: record.pop("job"),
    lambda tensors, record: record.update(course=[]),
    lambda tensors, record: tensors.pop(f"heads.{NORM}"),
    lambda tensors, record: tensors.update(more=torch.zeros(2)),
    lambda tensors, record: tensors.update({f"heads.{NORM}": torch.zeros(31)}),
]


@pytest.mark.parametrize("damage", CHECKPOINTS)
def test_a_damaged_checkpoint_is_named(
    begun: Path, tmp_path: Path, backbone: Backbone, talks: Talks, damage: Damage
) -> None:
    tensors, record = fitting.load_checkpoint(begun)
    damage(tensors, record)
    path = tmp_path / hub.CHECKPOINT
    fitting.save_checkpoint(path, tensors, record)
    content = path.read_bytes()
    with pytest.raises(InvalidData, match=f"^{path} is no checkpoint"):
        fitting.fit(make_job(backbone, talks, checkpoint=path))
    assert path.read_bytes() == content


def test_heads_have_the_given_kind_and_default_layers(backbone: Backbone, talks: Talks) -> None:
    kind: dict[str, Any] = {"head_type": "deep-fused", "inner_size": 4}
    config = fitted(backbone, talks, exit_layers=None, **kind).heads.config
    assert (config.head_type, config.inner_size) == ("deep-fused", 4)
    assert (config.exit_layers, config.state_layers) == ((0,), (4,))
    early = FitOptions(head_type="translator")
    assert fitting.exit_layers(backbone, early) == fitting.default_exit_layers(backbone.num_layers)
    assert fitting.default_exit_layers(30) == (4, 8, 12, 16, 20)
    assert fitting.default_exit_layers(2) == (1,)
    assert config.training["answer_tokens"] == sum(len(talk.answer_ids) for talk in talks)


@pytest.mark.parametrize("head_type", ["translator", "deep-fused"])
def test_only_features_that_heads_read_are_computed(backbone: Backbone, head_type: str) -> None:
    options = replace(OPTIONS, head_type=head_type)
    deep = head_type == "deep-fused"
    fitted, measured = (fitting.feature_spec(backbone, options, measured=m) for m in (False, True))
    assert fitted == FeatureSpec(LAYERS, deep, 1, everywhere=True)
    assert measured == FeatureSpec(LAYERS, deep, 1)
    soft = replace(options, ce_share=0.5, answer_share=1.0)
    assert fitting.feature_spec(backbone, soft, measured=False) == FeatureSpec(LAYERS, deep, 32)


def test_answers_have_the_given_share_of_the_loss(backbone: Backbone, talks: Talks) -> None:
    prose = [Conversation(talk.ids, ()) for talk in talks]
    text = selected(backbone, [*talks, *prose], OPTIONS, BATCH_TOKENS)
    assert text.answers == sum(len(talk.answer_ids) for talk in talks)
    assert text.positions == 2 * sum(len(talk.ids) - 1 for talk in talks)
    of_answers, of_others = fitting.answer_weights(text, 0.75)
    assert of_answers * text.answers == pytest.approx(0.75 * text.positions)
    assert of_others * (text.positions - text.answers) == pytest.approx(0.25 * text.positions)
    assert fitting.answer_weights(text, None) == (1.0, 1.0)
    job = make_job(backbone, prose, answer_share=0.75)  # text without answers is enough to fit
    assert fitting.fit(replace(job, validation=text)).metrics["layers"]
    for texts, reason in (([], "0 tokens to fit, 0"), (prose, "to fit, 0 answer tokens to")):
        with pytest.raises(InvalidData, match=reason):
            fitted(backbone, texts)


def test_a_loss_that_is_not_finite_stops(backbone: Backbone, talks: Talks, tmp_path: Path) -> None:
    wild: dict[str, Any] = {"learning_rate": 1e37, "warmup": 0.0, "checkpoint_steps": 1}
    job = make_job(backbone, talks, checkpoint=tmp_path / hub.CHECKPOINT, **wild)
    with pytest.raises(SelfspecError, match=r"the loss is (nan|inf) .* at step 2, exit layer 2"):
        fitting.fit(job)
    assert fitting.load_checkpoint(tmp_path / hub.CHECKPOINT)[1]["course"]["step"] == 1


ATTENDING: dict[str, Any] = {"head_type": "eagle3", "exit_layers": (0,)}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"inner_size": 4}, "inner_size means nothing to translator heads"),
        ({"exit_layers": (6,)}, "exit layer 6 is not among"),
        ({"exit_layers": (0, 2)}, "exit layer 0 is not among"),
        ({"exit_layers": (4, 2)}, "must be rising"),
        ({"exit_layers": ()}, "at least one"),
        *(
            (ATTENDING | {"state_layers": layers}, r"state layer.* (rising|not among)")
            for layers in ((), (0, 2), (3, 2), (2, 6))
        ),
    ],
)
def test_options_that_do_not_fit_the_model_are_refused(
    backbone: Backbone, talks: Talks, change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidOption, match=reason):
        fitted(backbone, talks, **change)


@pytest.mark.parametrize(("head_type", "kind"), [("linear", "exit"), ("eagle3", "state")])
def test_a_model_of_one_layer_has_few_head_types(head_type: str, kind: str) -> None:
    with pytest.raises(InvalidOption, match=f"one layer has no {kind} layers. Give another"):
        fitting.feature_spec(
            wrapped("llama", num_hidden_layers=1), FitOptions(head_type=head_type), measured=True
        )


# --- losses and agreement


DRAFT_IDS = torch.tensor([1, 2, 5])


@pytest.fixture
def few() -> Features:
    """Three positions whose likeliest next tokens are 1, 5 and 9; the last is not in an answer."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, VOCAB_SIZE, generator=generator)
    logits[torch.arange(3), torch.tensor([1, 5, 9])] = 9.0
    best = logits.log_softmax(-1).topk(VOCAB_SIZE)
    return Features(
        hidden={},
        following=torch.tensor([2, 2, 2]),
        continues=torch.tensor([False, True, True]),
        answers=torch.tensor([True, True, False]),
        top_ids=best.indices.int(),
        top_log_probs=best.values.to(torch.float16),
    )


@pytest.mark.parametrize("ce_share", [0.0, 0.25, 1.0])
def test_targets_are_the_next_token_and_the_distribution_within_the_draft_vocabulary(
    few: Features, ce_share: float
) -> None:
    guess = torch.randn(3, 3, generator=torch.Generator().manual_seed(1))
    probs = few.top_log_probs.float().exp()
    full = torch.zeros(3, VOCAB_SIZE).scatter(1, few.top_ids.long(), probs)
    soft = -(full[:, DRAFT_IDS] * guess.log_softmax(-1)).sum()
    hard = functional.cross_entropy(guess[:2], torch.tensor([0, 2]), reduction="sum")
    index = fitting.draft_index(DRAFT_IDS, VOCAB_SIZE)
    targets = fitting.targets(few, index, ce_share, (1.0, 1.0))
    expected = ce_share * hard + (1 - ce_share) * soft
    torch.testing.assert_close(fitting.cross_entropy(guess, *targets), expected)


def test_positions_have_the_given_weights(few: Features) -> None:
    index = fitting.draft_index(None, VOCAB_SIZE)
    ids, weights = fitting.targets(few, index, 1.0, (1.5, 0.25))
    assert ids.tolist() == [[1], [5], [9]]
    assert weights.tolist() == [[1.5], [1.5], [0.25]]


def test_the_draft_vocabulary_is_special_then_frequent_then_low() -> None:
    counts = Counter({7: 3, 3: 2, 5: 1})
    assert fitting.draft_vocabulary(counts, 3, {50}, 60).tolist() == [3, 7, 50]
    # a tokenizer may have more special tokens than the model
    assert fitting.draft_vocabulary(counts, 6, {50, 2, 60}, 60).tolist() == [0, 2, 3, 5, 7, 50]
