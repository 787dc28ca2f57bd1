from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from selfspec.backbone import Backbone, fingerprint
from selfspec.cli.main import main
from selfspec.errors import HeadsMismatch, InvalidData, InvalidOption, SelfspecError
from selfspec.heads import ExitHeads, HeadsConfig, LogitLensHead, logit_lens
from selfspec.training import data, records
from selfspec.training.data import Conversation, batches, count_batches, padded
from selfspec.training.features import Features, FeatureSource, Target, features
from selfspec.training.fit import Fitted, Progress, default_exit_layers, fit
from selfspec.training.losses import ce_targets, cross_entropy, kl_targets
from selfspec.training.measure import agreements, coverage
from selfspec.training.options import FitOptions
from tests.models import VOCAB_SIZE, make_model, random_ids

LAYERS = (2, 4)
OPTIONS = FitOptions(
    exit_layers=LAYERS, draft_vocab_size=80, batch_tokens=128, epochs=2, learning_rate=1e-2
)
TEMPLATE = (
    "{% for m in messages %}<start> {{ m.role }} {{ m.content }} <end> <line> {% endfor %}"
    "{% if add_generation_prompt %}<start> assistant {% endif %}"
)
WORDS = ["<start>", "<end>", "<line>", "<unused>", "system", "user", "assistant", "a", "b", "c"]


@pytest.fixture(scope="module")
def talks(backbone: Backbone) -> list[Conversation]:
    """Twelve greedy answers of the tiny model, of several lengths."""
    return [answered(backbone.model, seed, 12 + seed) for seed in range(12)]


@torch.no_grad()
def answered(model: PreTrainedModel, seed: int, count: int) -> Conversation:
    ids = random_ids(5, seed)
    for _ in range(count):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return Conversation(tuple(ids[0].tolist()), ((5, 5 + count),))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """Whole words, a chat template, and a special token without a role."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "c"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    built = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", bos_token="<start>")
    built.add_special_tokens({"additional_special_tokens": ["<unused>"]})
    built.chat_template = TEMPLATE
    assert len(built) == len(WORDS)
    return built


def read(path: Path, *lines: str, tokenizer: Any = None, **limits: int) -> list[Conversation]:
    path.write_text("".join(f"{line}\n" for line in lines))
    sizes = {"vocab_size": VOCAB_SIZE, "max_length": 64} | limits
    return data.read_conversations(path, tokenizer, **sizes)


GOOD = '{"input_ids": [1, 2, 3, 4], "answer_start": 2, "messages": []}'


def test_ids_are_read_as_they_are_from_plain_and_gzipped_lines(tmp_path: Path) -> None:
    plain = read(tmp_path / "a.jsonl", GOOD, GOOD)
    assert plain == [Conversation((1, 2, 3, 4), ((2, 4),))] * 2
    zipped = tmp_path / "a.jsonl.gz"
    zipped.write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    assert data.read_conversations(zipped, None, vocab_size=VOCAB_SIZE, max_length=64) == plain


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "Expecting property name"),
        ("[1]", "holds a list"),
        ('{"text": "hello"}', "holds text, expected input_ids"),
        ('{"input_ids": "12", "answer_start": 1}', "whole numbers"),
        ('{"input_ids": [1, true], "answer_start": 1}', "whole numbers"),
        ('{"input_ids": [1, 2]}', "answer_start is None"),
        ('{"input_ids": [1, 2], "answer_start": 0}', "answer_start is 0, expected 1..1"),
        ('{"input_ids": [1, 2], "answer_start": 2}', "answer_start is 2, expected 1..1"),
        ('{"input_ids": [1, 96], "answer_start": 1}', "token id 96 is outside 0..95"),
        ('{"input_ids": [1, -2], "answer_start": 1}', "token id -2 is outside"),
        (json.dumps({"input_ids": [1] * 65, "answer_start": 1}), "65 tokens, at most 64"),
        ('{"messages": []}', "at least one message"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no answer"),
        ('{"messages": [{"role": "cat", "content": "a"}]}', "role 'cat' is none of"),
        ('{"messages": [{"content": "a"}]}', "role"),
    ],
)
def test_a_bad_line_is_named_with_file_number_and_reason(
    tmp_path: Path, tokenizer: Any, line: str, reason: str
) -> None:
    path = tmp_path / "talks.jsonl"
    with pytest.raises(InvalidData) as caught:
        read(path, GOOD, line, tokenizer=tokenizer)
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    empty, broken = tmp_path / "empty.jsonl", tmp_path / "broken.jsonl.gz"
    empty.write_text("")
    broken.write_bytes(gzip.compress(GOOD.encode() * 99)[:40])
    for path, reason in ((tmp_path / "no.jsonl", "No such"), (empty, "no conv"), (broken, "ended")):
        with pytest.raises(InvalidData, match=reason) as caught:
            data.read_conversations(path, None, vocab_size=VOCAB_SIZE, max_length=64)
        assert str(path) in str(caught.value)


def test_every_assistant_turn_is_an_answer_up_to_its_end_token(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    turns = [("user", "a b"), ("assistant", "c"), ("user", "b"), ("assistant", "a a")]
    messages = [{"role": role, "content": text} for role, text in turns]
    line = json.dumps({"messages": messages})
    (talk,) = read(tmp_path / "a.jsonl", line, tokenizer=tokenizer)
    said = [[WORDS[i] for i in talk.ids[first:end]] for first, end in talk.answers]
    assert said == [["c", "<end>"], ["a", "a", "<end>"]]


def test_messages_without_a_chat_template_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="no chat template"):
        read(tmp_path / "a.jsonl", '{"messages": [{"role": "user", "content": "a"}]}')


def test_reading_stops_behind_max_tokens(tmp_path: Path) -> None:
    assert len(read(tmp_path / "a.jsonl", *[GOOD] * 5, max_tokens=3)) == 2


def test_a_twentieth_is_held_out_and_one_conversation_is_too_few(talks: list[Conversation]) -> None:
    train, held_out = data.split(talks * 5)
    assert (len(train), held_out) == (57, talks[-3:])
    with pytest.raises(InvalidData, match="too few"):
        data.split(talks[:1])


def test_batches_hold_every_conversation_once_within_the_limit(talks: list[Conversation]) -> None:
    for seed in (None, 0, 1):
        made = list(batches(talks, 64, seed))
        rows = [tuple(row.tolist()) for batch in made for row in batch.ids]
        assert sorted(row[: len(row)] for row in map(_stripped(talks), rows)) == sorted(
            talk.ids for talk in talks
        )
        assert all(batch.ids.numel() <= 64 for batch in made)
        assert len(made) == count_batches(talks, 64) < len(talks)


def _stripped(talks: list[Conversation]) -> Any:
    """A padded row -> the conversation that it begins with."""
    return lambda row: next(talk.ids for talk in talks if row[: len(talk.ids)] == talk.ids)


def test_another_seed_is_another_order(talks: list[Conversation]) -> None:
    orders = [[batch.ids.tolist() for batch in batches(talks, 64, seed)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def test_a_position_predicts_the_token_behind_it() -> None:
    batch = padded(
        [Conversation((5, 6, 7, 8, 9), ((1, 2), (3, 5))), Conversation((5, 6), ((1, 2),))]
    )
    assert batch.predicts.int().tolist() == [[1, 0, 1, 1, 0], [1, 0, 0, 0, 0]]


def test_the_draft_vocabulary_is_special_and_frequent_tokens_rising() -> None:
    talk = Conversation((9, 9, 9, 7, 7, 7, 3, 3, 5), ((3, 9),))
    assert data.draft_vocabulary([talk], 3, {50}).tolist() == [3, 7, 50]
    assert data.draft_vocabulary([talk], 80, {50, 2}).tolist() == [2, 3, 5, 7, 50]


def test_special_tokens_without_a_role_count_too(tokenizer: PreTrainedTokenizerBase) -> None:
    assert data.special_ids(tokenizer) == {0, 1, 3}


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
    return fit(backbone, "tiny", talks, talks, replace(OPTIONS, **changes), special_ids={95})


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
    options = replace(OPTIONS, epochs=12, loss=loss, head_type=head_type)
    result = fit(backbone, "tiny", talks, talks, options, progress=steps.append)
    assert [entry.step for entry in steps] == list(range(1, steps[0].steps + 1))
    before = fitted(backbone, talks, epochs=1, learning_rate=1e-12, head_type=head_type)
    held_out = list(FeatureSource(backbone, LAYERS, talks, 128).epoch())
    found = agreements(result.heads, held_out)
    assert shares(result) == [found[layer].agreement for layer in LAYERS]
    for index, layer in enumerate(LAYERS):
        assert steps[-1].losses[layer] < 0.8 * steps[0].losses[layer]
        assert shares(result)[index] > shares(before)[index] + 0.1
    assert result.metrics["coverage"] == coverage(result.heads, held_out) < 1.0


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
    once, again, other = (fitted(backbone, talks, seed=seed, rank=4) for seed in (3, 3, 4))
    assert all(torch.equal(weights(once)[name], weights(again)[name]) for name in weights(once))
    assert not torch.equal(
        weights(once)["by_layer.2.up.weight"], weights(other)["by_layer.2.up.weight"]
    )


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
        fitted(backbone, talks, learning_rate=1e38, warmup=0.0)


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
    assert 95 in loaded[2].to_target_ids(torch.arange(loaded[2].draft_vocab_size))


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
    records.write(tmp_path, result, {"epochs": 2, "exit_layers": [2, 4]})
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics == result.metrics
    card = (tmp_path / "README.md").read_text()
    assert f"| 4 | {100 * metrics['layers']['4']['agreement']:.1f} % |" in card
    assert f"{metrics['steps']} steps" in " ".join(card.split())
    run = yaml.safe_load((tmp_path / "run.yaml").read_text())
    assert run["run"] == {"epochs": 2, "exit_layers": [2, 4]}
    assert run["machine"]["torch"] == torch.__version__.split("+")[0]


@pytest.fixture
def workplace(
    tmp_path: Path, tokenizer: Any, talks: list[Conversation], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A folder with a tiny model, conversations and a recipe; the current one."""
    make_model("llama").save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    lines = [json.dumps({"input_ids": list(t.ids), "answer_start": 5}) for t in talks]
    (tmp_path / "talks.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "recipe.yaml").write_text(
        "model: model\ndtype: float32\nbatch-tokens: 128\ndraft-vocab-size: null\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


COMMAND = ["fit", "--config", "recipe.yaml", "--data", "talks.jsonl", "--output", "out"]


def test_the_command_fits_as_recipe_and_flags_say(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--exit-layers", "2,3", "--validation", "talks.jsonl", "--max-tokens", "60"]
    assert main([*COMMAND, *more]) == 0
    config = HeadsConfig.read(workplace / "out")
    assert (config.base_model, config.exit_layers) == ("model", (2, 3))
    assert config.draft_vocab_size is None
    assert 60 <= config.training["answer_tokens"] < 80
    output = capsys.readouterr()
    assert output.out.count("agreement") == 2
    assert "fit" in output.err
    run = yaml.safe_load((workplace / "out" / "run.yaml").read_text())["run"]
    assert (run["exit_layers"], run["batch_tokens"], run["data"]) == ([2, 3], 128, "talks.jsonl")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["fit", "--data", "talks.jsonl"], "no --output"),
        (["fit", "--output", "out"], "no --data"),
        ([*COMMAND, "--epochs", "0"], "epochs is 0, expected at least 1"),
        ([*COMMAND, "--exit-layers", "two"], "exit_layers is 'two'"),
        ([*COMMAND, "--exit-layers", "6"], "exit layer 6"),
        ([*COMMAND, "--data", "none.jsonl"], "none.jsonl"),
        ([*COMMAND[:2], "wrong.yaml", *COMMAND[3:]], "Did you mean epochs?"),
        ([*COMMAND[:2], "list.yaml", *COMMAND[3:]], "no `option: value` lines"),
        ([*COMMAND[:2], "none.yaml", *COMMAND[3:]], "cannot read the config none.yaml"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    workplace: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    (workplace / "wrong.yaml").write_text("epoch: 3\n")
    (workplace / "list.yaml").write_text("- epochs\n")
    assert main(arguments) == 2
    (line,) = [text for text in capsys.readouterr().err.splitlines() if "error" in text]
    assert reason in line
    assert not (workplace / "out").exists()
