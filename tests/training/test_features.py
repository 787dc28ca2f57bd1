"""Features are the model's own states, for every part that heads read or are fitted to."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from selfspec.model.backbone import Backbone
from selfspec.training.features import FeatureSpec, features
from selfspec.training.text import Conversation, padded

LAYERS = (0, 2, 4)
WHOLE = FeatureSpec(LAYERS, deep=True, top_k=5)


def test_features_are_the_models_own_states_at_answer_positions(
    backbone: Backbone, talks: list[Conversation]
) -> None:
    batch = padded(talks)
    found = features(backbone, WHOLE, batch)
    with torch.no_grad():
        output = backbone.model(batch.ids, output_hidden_states=True)
    for layer in LAYERS:
        assert torch.equal(found.hidden[layer], output.hidden_states[layer][batch.predicts])
    logits = output.logits[batch.predicts]
    assert found.top_ids is not None
    assert found.top_log_probs is not None
    expected = logits.log_softmax(-1).topk(5)
    assert torch.equal(found.top_ids.long(), expected.indices)
    # float16 near -5; largest difference measured: 0.0019
    torch.testing.assert_close(found.top_log_probs.float(), expected.values, rtol=0, atol=4e-3)
    assert found.following.tolist() == [token for talk in talks for token in talk.answer_ids]
    assert len(found) == sum(len(talk.answer_ids) for talk in talks)


def test_deep_is_the_models_normed_output_one_position_earlier(
    backbone: Backbone, talks: list[Conversation]
) -> None:
    batch = padded(talks)
    found = features(backbone, WHOLE, batch)
    with torch.no_grad():
        normed = backbone.model(batch.ids, output_hidden_states=True).hidden_states[-1]
    rows, columns = batch.predicts.nonzero(as_tuple=True)
    assert found.deep is not None
    assert torch.equal(found.deep, normed[rows, columns - 1])


def test_a_text_that_begins_with_an_answer_has_no_deep_state_at_first(backbone: Backbone) -> None:
    found = features(backbone, WHOLE, padded([Conversation((1, 2, 3), ((1, 3),))]))
    assert found.deep is not None
    assert found.deep.any(-1).tolist() == [False, True]


def test_rows_continue_within_an_answer_only(backbone: Backbone) -> None:
    talks = [
        Conversation((1, 2, 3, 4, 5, 6, 7), ((2, 4), (5, 7))),
        Conversation((1, 2, 3), ((1, 3),)),
    ]
    found = features(backbone, FeatureSpec((2,)), padded(talks))
    assert found.following.tolist() == [3, 4, 6, 7, 2, 3]
    assert found.continues.tolist() == [False, True, False, True, False, True]
    everywhere = features(backbone, FeatureSpec((2,), everywhere=True), padded(talks))
    assert everywhere.following.tolist() == [2, 3, 4, 5, 6, 7, 2, 3]
    assert everywhere.answers.tolist() == [False, True, True, False, True, True, True, True]
    assert everywhere.continues.tolist() == [False, *[True] * 5, False, True]
    assert torch.equal(everywhere.hidden[2][everywhere.answers], found.hidden[2])


def test_padding_changes_nothing_but_the_last_bits(
    model: PreTrainedModel, talks: list[Conversation]
) -> None:
    backbone = Backbone(model, executor="generic")  # a batch runs there, with any executor
    alone, together = (features(backbone, WHOLE, padded(t)) for t in (talks[:1], talks))
    torch.testing.assert_close(alone.hidden[4], together.hidden[4][: len(alone)])


def test_without_targets_the_layers_behind_the_last_exit_do_not_run(
    backbone: Backbone, talks: list[Conversation]
) -> None:
    ran: list[int] = []
    hooks = [
        layer.register_forward_hook(lambda *_, index=index: ran.append(index))
        for index, layer in enumerate(backbone.layers)
    ]
    found = features(backbone, FeatureSpec(LAYERS), padded(talks))
    for hook in hooks:
        hook.remove()
    assert ran == [0, 1, 2, 3]
    expected = features(backbone, WHOLE, padded(talks))
    assert all(torch.equal(found.hidden[layer], expected.hidden[layer]) for layer in LAYERS)
    assert (found.deep, found.top_ids) == (None, None)


def test_the_announced_size_is_the_real_one(backbone: Backbone, talks: list[Conversation]) -> None:
    found = features(backbone, WHOLE, padded(talks))
    element_size = backbone.dtype.itemsize
    assert sum(tensor.nbytes for tensor in found.tensors().values()) == len(
        found
    ) * WHOLE.bytes_per_token(backbone.hidden_size, element_size)
