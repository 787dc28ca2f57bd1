from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.nn import functional

from selfspec.backbone import Backbone, fingerprint
from selfspec.errors import HeadsMismatch, InvalidData, InvalidOption, SelfspecError
from selfspec.heads import ExitHeads, LogitLensHead, TranslatorHead, logit_lens
from selfspec.training import records
from selfspec.training.data import Conversation, padded
from selfspec.training.features import Features, FeatureSource, Target, features
from selfspec.training.fit import Fitted, Progress, default_exit_layers, fit
from selfspec.training.losses import ce_targets, cross_entropy, kl_targets
from selfspec.training.measure import agreements
from selfspec.training.options import FitOptions
from tests.models import VOCAB_SIZE, make_model
from tests.talks import make_talks

LAYERS = (2, 4)
OPTIONS = FitOptions(
    exit_layers=LAYERS, draft_vocab_size=80, batch_tokens=128, epochs=2, learning_rate=1e-2
)


@pytest.fixture(scope="module")
def talks(backbone: Backbone) -> list[Conversation]:
    return make_talks(backbone.model)


def test_features_are_the_models_own_states_at_answer_positions(
    backbone: Backbone, talks: list[Conversation]
) -> None:
    batch = padded(talks)
    found = features(backbone, LAYERS, batch)
    with torch.no_grad():
        output = backbone.model(batch.ids, output_hidden_states=True)
    for layer in LAYERS:
        assert torch.equal(found.hidden[layer], output.hidden_states[layer][batch.predicts])
    logits = output.logits[batch.predicts]
    assert torch.equal(found.wanted().top, logits.argmax(-1))
    torch.testing.assert_close(found.wanted().log_total, logits.logsumexp(-1))
    assert found.following.tolist() == [token for talk in talks for token in talk.answer_ids]


def test_padding_changes_nothing_but_the_last_bits(
    backbone: Backbone, talks: list[Conversation]
) -> None:
    alone, together = (features(backbone, LAYERS, padded(t)) for t in (talks[:1], talks))
    count = len(alone.following)
    torch.testing.assert_close(alone.hidden[4], together.hidden[4][:count])


def test_without_a_target_the_layers_behind_the_last_exit_do_not_run(
    backbone: Backbone, talks: list[Conversation]
) -> None:
    ran: list[int] = []
    hooks = [
        layer.register_forward_hook(lambda *_, index=index: ran.append(index))
        for index, layer in enumerate(backbone.layers)
    ]
    found = features(backbone, LAYERS, padded(talks), with_target=False)
    for hook in hooks:
        hook.remove()
    assert ran == [0, 1, 2, 3]
    expected = features(backbone, LAYERS, padded(talks))
    assert all(torch.equal(found.hidden[layer], expected.hidden[layer]) for layer in LAYERS)
    with pytest.raises(InvalidData, match="with_target"):
        found.wanted()


def test_kept_features_are_computed_once_and_shuffled_later(
    backbone: Backbone, talks: list[Conversation], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = FeatureSource(backbone, LAYERS, talks, 64, keep=True)
    first = list(source.epoch(0))
    monkeypatch.setattr(Backbone, "run", None)
    again = list(source.epoch(3))
    assert len(source) == len(first) == len(again)
    assert {id(entry) for entry in first} == {id(entry) for entry in again}
    assert [id(entry) for entry in first] != [id(entry) for entry in again]


@pytest.fixture
def few(backbone: Backbone) -> Features:
    """Three positions whose next tokens are 1, 5 and 9."""
    last = torch.randn(3, backbone.hidden_size, generator=torch.Generator().manual_seed(0))
    logits = backbone.logits(last[None])[0].detach()
    target = Target(last, logits.logsumexp(-1), logits.argmax(-1))
    return Features({}, torch.tensor([1, 5, 9]), target)


def test_kl_is_the_soft_cross_entropy_within_the_draft_vocabulary(
    backbone: Backbone, few: Features
) -> None:
    draft_ids, guess = torch.tensor([1, 2, 5]), torch.randn(3, 3)
    targets = kl_targets(LogitLensHead(backbone.unembedding, draft_ids))(few)
    full = backbone.logits(few.wanted().last[None])[0].softmax(-1)
    torch.testing.assert_close(targets, full[:, draft_ids])
    expected = -(full[:, draft_ids] * guess.log_softmax(-1)).sum()
    torch.testing.assert_close(cross_entropy(guess, targets), expected)


def test_ce_is_the_cross_entropy_of_the_next_tokens_that_can_be_drafted(
    backbone: Backbone, few: Features
) -> None:
    head, guess = LogitLensHead(backbone.unembedding, torch.tensor([1, 2, 5])), torch.randn(3, 3)
    found = cross_entropy(guess, ce_targets(head, VOCAB_SIZE)(few))
    expected = functional.cross_entropy(guess[:2], torch.tensor([0, 2]), reduction="sum")
    assert torch.equal(found, expected)
    whole = LogitLensHead(backbone.unembedding)
    assert ce_targets(whole, VOCAB_SIZE)(few).tolist() == [1, 5, 9]


def test_agreement_is_counted_over_all_and_over_the_most_confident(backbone: Backbone) -> None:
    heads = logit_lens(backbone.unembedding, backbone.num_layers, "tiny")
    hidden = torch.randn(40, backbone.hidden_size, generator=torch.Generator().manual_seed(0))
    logits = heads[1](hidden)
    top = logits.argmax(-1)
    unsure = logits.softmax(-1).amax(-1).argsort()[:20]
    top[unsure] = (top[unsure] + 1) % VOCAB_SIZE
    surest = logits.softmax(-1).amax(-1).argmax()
    top[surest] = (top[surest] + 1) % VOCAB_SIZE
    states = dict.fromkeys(heads.config.exit_layers, hidden)
    batch = Features(states, top, Target(hidden, hidden[:, 0], top))
    halves = [
        replace(batch, hidden={k: v[part] for k, v in states.items()}, target=_part(batch, part))
        for part in (slice(0, 20), slice(20, 40))
    ]
    found = agreements(heads, halves)[1]
    assert found.positions == 40
    assert found.agreement == pytest.approx(19 / 40)
    assert found.agreement_top_25 == pytest.approx(9 / 10)
    assert found.agreement_top_10 == pytest.approx(3 / 4)


def _part(batch: Features, part: slice) -> Target:
    target = batch.wanted()
    return Target(target.last[part], target.log_total[part], target.top[part])


def fitted(backbone: Backbone, talks: list[Conversation], **changes: Any) -> Fitted:
    return fit(backbone, "tiny", talks, talks, replace(OPTIONS, **changes))


def weights(result: Fitted) -> dict[str, Tensor]:
    return dict(result.heads.named_parameters())


def shares(result: Fitted) -> list[float]:
    return [result.metrics["layers"][str(layer)]["agreement"] for layer in LAYERS]


@pytest.mark.parametrize("loss", ["kl", "ce"])
@pytest.mark.parametrize("head_type", ["translator", "linear"])
def test_a_fit_lowers_the_loss_and_raises_agreement(
    backbone: Backbone, talks: list[Conversation], loss: str, head_type: str
) -> None:
    steps: list[Progress] = []
    options = replace(OPTIONS, epochs=12, learning_rate=3e-2, loss=loss, head_type=head_type)
    result = fit(backbone, "tiny", talks, talks, options, progress=steps.append)
    assert [entry.step for entry in steps] == list(range(1, steps[0].steps + 1))
    before = fitted(backbone, talks, epochs=1, learning_rate=1e-12, head_type=head_type)
    held_out = list(FeatureSource(backbone, LAYERS, talks, 128).epoch())
    found = agreements(result.heads, held_out)
    assert shares(result) == [found[layer].agreement for layer in LAYERS]
    for index, layer in enumerate(LAYERS):
        assert steps[-1].losses[layer] < 0.8 * steps[0].losses[layer]
        assert shares(result)[index] > shares(before)[index] + 0.1


def test_special_tokens_can_be_drafted(backbone: Backbone, talks: list[Conversation]) -> None:
    unseen = min(set(range(VOCAB_SIZE)) - {token for talk in talks for token in talk.answer_ids})
    heads = fit(backbone, "tiny", talks, talks, OPTIONS, special_ids={unseen}).heads
    assert unseen in heads[2].to_target_ids(torch.arange(heads[2].draft_vocab_size))


def test_coverage_is_the_share_of_tokens_that_can_be_drafted(
    backbone: Backbone, talks: list[Conversation]
) -> None:
    counts = Counter(token for talk in talks for token in talk.answer_ids).most_common(20)
    expected = sum(count for _, count in counts) / sum(len(talk.answer_ids) for talk in talks)
    options = replace(OPTIONS, draft_vocab_size=20)
    metrics = fit(backbone, "tiny", talks, talks, options).metrics
    assert metrics["coverage"] == pytest.approx(expected)
    assert 0.0 < expected < 1.0


def test_the_model_stays_as_it_was(talks: list[Conversation]) -> None:
    model = make_model("llama").train()
    model.requires_grad_(True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fitted(Backbone(model), talks)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    for module in model.modules():
        assert module.training
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_the_same_seed_gives_the_same_bits(backbone: Backbone, talks: list[Conversation]) -> None:
    for rank in (None, 4):  # only a low-rank map begins with random numbers
        once, again, other = (
            weights(fitted(backbone, talks, seed=seed, rank=rank)) for seed in (3, 3, 4)
        )
        assert all(torch.equal(once[name], again[name]) for name in once)
        assert not torch.equal(once["by_layer.2.up.weight"], other["by_layer.2.up.weight"])


def test_steps_are_those_of_a_plain_loop(backbone: Backbone, talks: list[Conversation]) -> None:
    options = {"exit_layers": (2,), "draft_vocab_size": None, "loss": "ce", "weight_decay": 0.1}
    found = weights(fitted(backbone, talks, **options, epochs=1, warmup=0.5))
    head = TranslatorHead(backbone.unembedding)
    decayed, plain = (
        [p for p in head.parameters() if (p.dim() == 2) is matrix] for matrix in (True, False)
    )
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": plain}])
    for group, decay in zip(optimizer.param_groups, (0.1, 0.0), strict=True):
        group["weight_decay"] = decay
    steps = list(FeatureSource(backbone, (2,), talks, 128).epoch(OPTIONS.seed))
    assert len(steps) == 3
    for share, batch in zip((1 / 3, 2 / 3, 1.0), steps, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = share * OPTIONS.learning_rate
        optimizer.zero_grad()
        functional.cross_entropy(head(batch.hidden[2]), batch.following).backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), OPTIONS.max_grad_norm)
        optimizer.step()
    for name, weight in head.named_parameters():
        torch.testing.assert_close(found[f"by_layer.2.{name}"], weight.detach())


@pytest.mark.parametrize(
    "change",
    [
        {"loss": "ce"},
        {"epochs": 3},
        {"learning_rate": 1e-3},
        {"warmup": 0.5},
        {"weight_decay": 5.0},
        {"max_grad_norm": 1e-3},
        {"batch_tokens": 64},
        {"draft_vocab_size": 40},
        {"draft_vocab_size": None},
    ],
    ids=str,
)
def test_every_option_changes_what_is_learned(
    backbone: Backbone, talks: list[Conversation], change: dict[str, Any]
) -> None:
    name = "by_layer.4.up.weight"
    assert not torch.equal(
        weights(fitted(backbone, talks))[name], weights(fitted(backbone, talks, **change))[name]
    )


def test_weights_decay_and_norms_do_not(backbone: Backbone, talks: list[Conversation]) -> None:
    still = {"learning_rate": 1e-3, "max_grad_norm": 1e-30, "warmup": 0.0}
    decayed = weights(fitted(backbone, talks, head_type="linear", weight_decay=50.0, **still))
    kept = weights(fitted(backbone, talks, head_type="linear", weight_decay=0.0, **still))
    name = "by_layer.2."
    assert decayed[f"{name}weight"].norm() < 0.9 * kept[f"{name}weight"].norm()
    torch.testing.assert_close(decayed[f"{name}norm.weight"], kept[f"{name}norm.weight"])


def test_heads_of_the_asked_kind_and_the_default_layers(
    backbone: Backbone, talks: list[Conversation]
) -> None:
    config = fitted(backbone, talks, rank=4, exit_layers=None).heads.config
    assert (config.rank, config.exit_layers) == (4, default_exit_layers(backbone.num_layers))
    assert default_exit_layers(30) == (4, 8, 12, 16, 20)
    assert default_exit_layers(2) == (1,)
    assert config.training["answer_tokens"] == sum(len(talk.answer_ids) for talk in talks)


def test_a_loss_that_is_not_finite_stops_with_batch_and_layer(
    backbone: Backbone, talks: list[Conversation]
) -> None:
    with pytest.raises(SelfspecError, match=r"loss is nan at batch 2, exit layer 2"):
        fitted(backbone, talks, learning_rate=1e37, warmup=0.0)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_type": "logit-lens"}, "head_type is logit-lens, expected linear or translator"),
        ({"loss": "mse"}, "loss is mse, expected kl or ce"),
        ({"rank": 0}, "rank is 0, expected at least 1"),
        ({"epochs": 0}, "epochs is 0"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0, expected above 0"),
        ({"warmup": 1.0}, "warmup is 1.0"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"max_grad_norm": 0.0}, "max_grad_norm is 0.0"),
        ({"exit_layers": (6,)}, "exit layer 6 is not among"),
        ({"exit_layers": (4, 2)}, "must be rising"),
        ({"exit_layers": ()}, "at least one"),
        ({"draft_vocab_size": 97}, "draft_vocab_size is 97, the model has 96"),
    ],
)
def test_options_out_of_range_are_refused(
    backbone: Backbone, talks: list[Conversation], change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidOption, match=reason):
        fitted(backbone, talks, **change)


def test_a_fit_without_conversations_is_refused(backbone: Backbone) -> None:
    with pytest.raises(InvalidData, match="0 conversations to fit"):
        fit(backbone, "tiny", [], [], OPTIONS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_written_folder_gives_the_same_bits_back(
    tmp_path: Path, talks: list[Conversation], dtype: torch.dtype
) -> None:
    backbone = Backbone(make_model("llama", dtype))
    result = fitted(backbone, talks)
    records.write(tmp_path, result, {"epochs": 2})
    names = {"README.md", "config.json", "metrics.json", "model.safetensors", "run.yaml"}
    assert {file.name for file in tmp_path.iterdir()} == names
    unembedding = backbone.unembedding
    loaded = ExitHeads.from_pretrained(
        tmp_path, unembedding, fingerprint(unembedding.weight), "tiny"
    )
    hidden = torch.randn(7, backbone.hidden_size).to(dtype)
    for layer in LAYERS:
        assert torch.equal(loaded[layer](hidden), result.heads[layer](hidden))
        assert next(loaded[layer].parameters()).dtype == dtype


def test_heads_of_another_model_are_refused(tmp_path: Path, talks: list[Conversation]) -> None:
    backbone, other = Backbone(make_model("llama")), Backbone(make_model("mistral", vocab_size=97))
    records.write(tmp_path, fitted(backbone, talks), {})
    with pytest.raises(HeadsMismatch, match="fits tiny"):
        ExitHeads.from_pretrained(
            tmp_path, other.unembedding, fingerprint(other.unembedding.weight), "other"
        )


def test_the_card_and_the_run_are_made_from_the_records(
    backbone: Backbone, talks: list[Conversation], tmp_path: Path
) -> None:
    result = fitted(backbone, talks)
    records.write(tmp_path, result, {"exit_layers": [2, 4], "validation": "some/talks.jsonl"})
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics == result.metrics
    card = (tmp_path / "README.md").read_text()
    assert f"| 4 | {100 * metrics['layers']['4']['agreement']:.1f} % |" in card
    assert "210 answer positions (talks.jsonl)" in card
    assert f"{metrics['steps']} steps" in " ".join(card.split())
    run = yaml.safe_load((tmp_path / "run.yaml").read_text())
    assert run["run"] == {"exit_layers": [2, 4], "validation": "some/talks.jsonl"}
    assert run["machine"]["torch"] == torch.__version__.split("+")[0]
