"""Drafts of attending heads, equal to the reference's; Medusa's tree; heads in 8 bits."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from selfspec.api.speculator import wrap
from selfspec.cli.main import main
from selfspec.config import SpeculationOptions
from selfspec.decoding.acceptance import Draft, GreedyMatch
from selfspec.decoding.costs import DraftCost
from selfspec.decoding.decode import StopRule
from selfspec.decoding.drafters.base import ROOT, DraftController
from selfspec.decoding.drafters.heads import (
    CHOICES,
    AttendingDrafter,
    HeadGuesser,
    MedusaGuesser,
    pack,
)
from selfspec.decoding.drafters.trees import TreeDrafter
from selfspec.decoding.engine import Engine, Runtime
from selfspec.decoding.sampling import Sampler
from selfspec.decoding.state import AskAhead, DecodeState, NoDrafter, Run, run_alone
from selfspec.decoding.stats import Round, Stopwatch
from selfspec.errors import InvalidOption
from selfspec.eval.verify import BranchingDrafter, OracleDrafter
from selfspec.heads.attending import AttendingHeads
from selfspec.heads.exit_heads import ExitHeads
from selfspec.heads.folder import MEDUSA
from selfspec.heads.heads import HEAD_TYPES, ExitJudge
from selfspec.model import weights
from selfspec.model.backbone import Backbone
from selfspec.options import MEDUSA_FITTED
from tests import ladder
from tests.heads.eagle3.make import HEADS, HERE, LENGTH, SHOWN, STEPS, target, text
from tests.heads.kinds import make_heads, train
from tests.ladder import asked, rounds
from tests.models import EXECUTORS, needs_compiler, noted, random_ids, wrapped
from tests.talks import make_tokenizer

OPTIONS = SpeculationOptions(never_slower=False).updated(
    {"drafter": "exit:threshold=0.001,max_tokens=4"}
)

PUBLISHED = """\
0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21
004 005 0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001
16 070"""
"""`mc_sim_7b_63` of FasterDecoding/Medusa, medusa/model/medusa_choices.py: a digit is a rank."""

WHOLE = f"{MEDUSA_FITTED},max_rows=64".removeprefix("ngram+")

targeted = cache(lambda family, executor: Backbone(target(family), executor=executor))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", HEADS)
def test_drafts_are_those_of_the_reference_on_any_executor(name: str, executor: str) -> None:
    """The text's last token is forced, because the model would not write it."""
    backbone = targeted(HEADS[name][0], executor)
    heads = AttendingHeads.from_pretrained(HERE / name, backbone, "tiny")
    expected = load_file(HERE / f"{name}.expected.safetensors")["drafts"].tolist()
    judge = ExitJudge(8, {0: 1e-6})
    for place in range(SHOWN):
        ids = text()[:, : LENGTH - STEPS - SHOWN + 2 + place]
        drafter = AttendingDrafter(heads, judge, ladder.drafting(STEPS))
        state = DecodeState(backbone, ids[:, :-1], heads=heads)
        forced = SequenceBiasLogitsProcessor([[[int(ids[0, -1])], 1e9]])
        rule = GreedyMatch(Sampler(LogitsProcessorList([forced])))
        entries = rounds(state, drafter, StopRule(max_length=99), rule)
        next(entries)
        assert next(entries).draft_tokens == expected[place]


@pytest.fixture(scope="module", params=EXECUTORS)
def backbone(request: pytest.FixtureRequest) -> Backbone:
    return wrapped("llama", executor=request.param, max_position_embeddings=512)


@pytest.fixture
def generic() -> Backbone:
    return wrapped("llama")


def drafts(entries: list[Round]) -> list[tuple[list[int], list[int]]]:
    return [(entry.draft_tokens, entry.tokens) for entry in entries]


@pytest.mark.parametrize("threshold", [1.0, 0.001])
def test_a_head_that_is_not_sure_enough_guesses_nothing(
    threshold: float, backbone: Backbone
) -> None:
    drafter = f"exit:layers=0,threshold={threshold},guesses=4"
    options = SpeculationOptions(never_slower=False).updated({"drafter": drafter})
    runtime = Runtime(backbone, ladder.deep_heads(backbone, (0,)), None)
    entries = list(Engine(runtime).add(asked(random_ids(9)), options))
    assert any(entry.draft_tokens for entry in entries) == (threshold < 1.0)
    assert any(entry.heads for entry in entries)


def test_seeded_guesses_need_the_scores_of_drafted_tokens_alone(backbone: Backbone) -> None:
    heads = train(make_heads("deep-fused-draft", backbone.unembedding, num_layers=6))
    warpers, found = [TemperatureLogitsWarper(2.0), TopKLogitsWarper(4)], []
    for processors in (warpers, [*warpers, MinNewTokensLengthLogitsProcessor(0, 0, [1])]):
        sampler = Sampler(LogitsProcessorList(processors), do_sample=True)
        assert sampler.reads_scores_alone == (processors is warpers)  # the last one changes nothing
        seeded = sampler.seeded(5, backbone.device)
        guesser = HeadGuesser(heads, ExitJudge(6, {0: 1e-9}), seeded, 3)
        guesser.begin(DecodeState(backbone, random_ids(9)))
        draft = Draft.of([7])
        with torch.inference_mode():
            found += run_alone(guesser.ask(draft, [ROOT], Stopwatch()))
            found += run_alone(guesser.ask(draft, [0], Stopwatch()))
    for alone, among_all in zip(found[:2], found[2:], strict=True):
        assert alone.tokens == among_all.tokens
        assert alone.chances == pytest.approx(among_all.chances)
    assert found[0].tokens != found[1].tokens or found[0].chances != found[1].chances


@pytest.mark.parametrize("kind", ["attending", "medusa"])
def test_a_text_in_a_batch_has_the_same_drafts_as_alone(
    backbone: Backbone, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows run together; some prompts share a prefix, and one was decoded before."""
    attends = kind == "attending"
    options = OPTIONS if attends else OPTIONS.updated({"drafter": WHOLE})

    def runtime() -> Runtime:
        heads: Any = (ladder.attending_heads if attends else ladder.medusa_heads)(backbone)
        return Runtime(backbone, heads, None)

    owner, name = (AttendingHeads, "run") if attends else (AskAhead, "do")
    texts = noted(monkeypatch, owner, name, lambda _, works, *__: len(works))
    common = random_ids(90, seed=9)
    prompts = [torch.cat([common, random_ids(3 + n, seed=n)], 1) for n in range(3)]
    prompts += [random_ids(4, seed=20), random_ids(40, seed=21), prompts[0]]
    alone = [drafts(list(Engine(runtime()).add(asked(prompt), options))) for prompt in prompts]
    plain = SpeculationOptions(speculate=False)
    for prompt, entries in zip(prompts, alone, strict=True):
        tokens = [token for _, committed in entries for token in committed]
        written = Engine(runtime()).add(asked(prompt), plain)
        assert tokens == [token for entry in written for token in entry.tokens]
    assert sum(len(tokens) > 1 for entries in alone for _, tokens in entries)
    assert set(texts) == {1}
    for patience in (None, 0.5):  # prompts run whole, then in pieces
        engine = Engine(runtime(), most=4, patience=patience)
        running = [engine.add(asked(prompt), options) for prompt in prompts]
        texts.clear()
        while engine.texts:
            engine.step()
        rerun = engine.add(asked(prompts[2]), options)
        assert max(texts) == 4
        assert [drafts(sequence.take()) for sequence in running] == alone
        for sequence in running:
            if (reading := sequence.state.attention) is not None:
                assert reading.ids == sequence.state.committed(1)[: len(reading.ids)]
        assert drafts(list(rerun)) == alone[2]
        if backbone.claims.pages is not None:
            assert rerun.stats.reused_tokens == prompts[2].shape[1] - 1


def test_a_conversation_reuses_the_heads_kv_cache(backbone: Backbone) -> None:
    heads = ladder.attending_heads(backbone)
    chat = wrap(backbone.model, heads=heads, executor=backbone.executor_name).session()
    first, question = random_ids(50), random_ids(5, seed=3)
    drafter = "exit:threshold=0.1,max_tokens=4"
    options: Any = {"max_new_tokens": 20, "never_slower": False, "drafter": drafter}
    answer = chat.generate(first, **options)
    prompt = torch.cat([first, torch.tensor([answer.token_ids]), question], 1)
    reply = chat.generate(prompt, **options)
    new_heads = ladder.attending_heads(backbone)
    speculator = wrap(backbone.model, heads=new_heads, executor="generic")
    expected = speculator.generate(prompt, **options)
    assert reply.token_ids == expected.token_ids
    assert reply.stats.reused_tokens >= 50
    assert reply.stats.drafted == expected.stats.drafted > 0
    texts = [one.texts[-1] for one in (heads, new_heads)]
    keys = [text.kv.first(len(text.ids), 0)[0] for text in texts]
    torch.testing.assert_close(*keys, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("drafter", [OracleDrafter, BranchingDrafter], ids=["chain", "tree"])
def test_heads_read_only_rows_that_are_kept(backbone: Backbone, drafter: Any) -> None:
    ids = random_ids(30)
    plain = ladder.decode(backbone, ids, NoDrafter())
    keys = []
    text = ids[0].tolist() + plain.tokens
    for proposer in (NoDrafter(), drafter(text, 0, backbone.vocab_size, 7)):
        state = DecodeState(backbone, ids, heads=ladder.attending_heads(backbone))
        stop = StopRule(max_length=30 + ladder.NEW_TOKENS)
        kept = [len(entry.kept) for entry in rounds(state, proposer, stop)]
        assert state.attention is not None
        with torch.inference_mode():
            run_alone(state.attention.read(state.committed(0)))
        keys.append(state.attention.kv.first(30 + ladder.NEW_TOKENS - 2, 0)[0])
    assert sum(kept) > 5
    torch.testing.assert_close(*keys, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("at", range(4, 16))
def test_heads_recover_from_an_interrupt_within_a_round(
    at: int, generic: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = random_ids(30)
    heads = ladder.attending_heads(generic)
    judge = ExitJudge(6, {0: 0.001})
    drafter, twin = (AttendingDrafter(heads, judge, ladder.drafting(4)) for _ in range(2))
    expected = ladder.decode(generic, ids, twin, heads=heads)
    state = DecodeState(generic, ids, heads=heads)
    setup = state, drafter, StopRule(max_length=30 + ladder.NEW_TOKENS)
    passes, original = itertools.count(1), Run.do

    def do(work: Any, *args: Any) -> Any:
        if next(passes) == at:
            raise KeyboardInterrupt
        return original(work, *args)

    monkeypatch.setattr(Run, "do", do)
    with pytest.raises(KeyboardInterrupt):
        list(rounds(*setup))
    list(rounds(*setup))
    assert state.ids[0, 30:].tolist() == expected.tokens
    assert state.attention is not None
    assert state.attention.waiting_rows + len(state.attention.ids) == state.kv.length(0)


@pytest.mark.parametrize("name", ["llama", "original-llama"])
def test_the_command_line_accepts_such_folders(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    target("llama").save_pretrained("model")
    make_tokenizer().save_pretrained("model")
    shutil.copytree(HERE / name, name)

    def said(*args: str) -> str:
        capsys.readouterr()
        assert main([*args]) == 0
        return capsys.readouterr().out

    model = ("--model", "model")
    command = ("generate", "a b", *model, "--dtype", "float32", "--max-new-tokens", "12")
    plain = said(*command, "--no-speculate")
    output = said(*command, "--heads", name, "--drafter", "exit:threshold=0.001", "--json")
    assert json.loads(output)["text"] == plain.removesuffix("\n")
    assert json.loads(output)["stats"]["drafted"] > 0
    kind = "original" if name.startswith("original") else "speculators"
    assert f"{name} (EAGLE-3, {kind} format, llama layer" in said("heads", "check", name, *model)
    assert "eagle3" in said("heads", "show", name)
    said("heads", "pull", name)
    assert any(entry["name"] == name for entry in json.loads(said("heads", "list", "--json")))


# --- Medusa's tree: its shape, its tokens, and the part that pays


def published() -> set[tuple[int, ...]]:
    return {tuple(map(int, path)) for path in PUBLISHED.split()}


def test_the_tree_is_the_published_one() -> None:
    paths = published()
    assert len(paths) == len(PUBLISHED.split()) == 63
    assert {(*path, rank) for path, count in CHOICES.items() for rank in range(count)} == paths


def ranked(heads: ExitHeads, state: DecodeState) -> tuple[list[list[int]], Tensor]:
    """The ten likeliest tokens of each head, and their probabilities [K, 10], by hand."""
    assert state.deep is not None
    x, rows = state.deep, state.backbone.unembedding.weight
    logits = []
    for name, weight in heads.named_parameters():
        if name.endswith("weight"):
            bias = heads.get_parameter(name.replace("weight", "bias"))
            hidden = torch.nn.functional.linear(x, weight, bias)
            logits.append((x + hidden * hidden.sigmoid()) @ rows.T)
    best = torch.cat(logits).softmax(-1).topk(10)
    return best.indices.tolist(), best.values.detach()


@pytest.mark.parametrize(("row", "least", "most"), [(0.0, 63, 63), (0.02, 5, 62), (0.9, 0, 1)])
def test_a_tree_is_whole_if_rows_cost_nothing_and_else_cut_to_the_part_that_pays(
    precise: Backbone, row: float, least: int, most: int
) -> None:
    state, stop = DecodeState(precise, random_ids(9), exit_layers=(0,)), StopRule(max_length=40)
    next(rounds(state, NoDrafter(), stop))
    heads, judge = ladder.medusa_heads(precise), ExitJudge(6, {0: 1e-9})
    drafter = TreeDrafter(
        MedusaGuesser(heads, judge, ladder.greedy(), 10),
        DraftCost(rows=(row,)),
        DraftController(6),
        most=63,
        never_slower=False,
    )
    draft = ladder.ask(drafter, state, 9)
    assert least <= len(draft.tokens) <= most
    assert draft.heads == 1
    tokens, chances = ranked(heads, state)
    ranks = {
        tuple(tokens[depth].index(token) for depth, token in enumerate(draft.tokens_to(at))): at
        for at in range(len(draft.tokens))
    }
    assert len(ranks) == len(draft.tokens)
    assert ranks.keys() == published() if row == 0.0 else ranks.keys() < published()
    for path, at in ranks.items():
        expected = math.prod(float(chances[depth, rank]) for depth, rank in enumerate(path))
        assert draft.proposed[at].chance == pytest.approx(expected, rel=1e-5)


def test_a_tree_is_no_deeper_than_there_are_heads(precise: Backbone) -> None:
    for count in (1, 3, 5):
        options = SpeculationOptions().updated({"drafter": WHOLE, "costs": "row=0,head=0"})
        engine = Engine(Runtime(precise, ladder.medusa_heads(precise, count), None))
        trees = [tree for tree in engine.add(asked(random_ids(9)), options) if tree.draft_tokens]
        depths = {max(tree.depths) for tree in trees}
        assert max(depths) == min(count, 4)


def test_medusa_heads_have_no_exit_layer(precise: Backbone) -> None:
    heads = ladder.medusa_heads(precise)
    with pytest.raises(InvalidOption, match="none of them reads exit layer 0"):
        heads[0]
    for fields in ({"num_heads": None}, {"exit_layers": (0, 2)}, {"head_type": "translator"}):
        with pytest.raises(InvalidOption, match=r"num_heads is|exit layer"):
            replace(heads.config, **fields)
    assert heads.config.head_type == MEDUSA


# --- heads with 8-bit copies of their weights: equal answers, and heads without a copy


@needs_compiler
@pytest.mark.parametrize("family", ["llama", "phi"])  # phi: LayerNorm, an unembedding with a bias
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [*HEAD_TYPES, "states"])
def test_packed_heads_are_exact_to_8_bits(kind: str, dtype: torch.dtype, family: str) -> None:
    backbone = wrapped(family, dtype)
    heads = train(make_heads(kind, backbone.unembedding, draft_vocab_size=5))
    hidden = backbone.embed(random_ids(6)[0]).view(2, 3, -1)
    variants = hidden.flip(0), None, hidden.repeat(1, 1, 1 + len(heads.layers))

    def answers() -> list[Tensor]:
        with torch.no_grad():
            features = [heads.first.features(hidden, deep) for deep in variants]
            answer = heads.first.ask(hidden[0], hidden[1])
            return [*features, *answer, heads.first.unembed(hidden)]

    whole = answers()
    pack(heads)
    packed = answers()
    for found, expected in zip(packed, whole, strict=True):
        assert found.dtype == expected.dtype
        assert near(found, expected)
    if dtype == torch.float32:  # else the numbers are equal where blocks are slow
        assert not torch.equal(packed[-1], whole[-1])


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_layer_of_heads_that_attend_is_packed_too(dtype: torch.dtype) -> None:
    backbone = wrapped("llama", dtype)
    heads = ladder.attending_heads(backbone)
    states = torch.cat([backbone.embed(random_ids(6, seed=n)[0]) for n in range(3)], dim=-1)

    def answers() -> list[Tensor]:
        with torch.no_grad():
            reading = heads.attention(backbone.embed)
            reading.add(states)
            output = run_alone(reading.read(random_ids(7)[0].tolist()))
            assert output is not None
            return [heads.fuse(states), output, heads.head(output)]

    whole, nbytes = answers(), heads.nbytes
    pack(heads)
    packed = answers()
    assert heads.nbytes < nbytes
    assert all(near(found, expected) for found, expected in zip(packed, whole, strict=True))
    assert not torch.equal(packed[1], whole[1])
    assert torch.equal(heads.twin(backbone.unembedding).fuse(states), whole[0])


def near(found: Tensor, expected: Tensor) -> bool:
    return float((found - expected).abs().max()) < 0.02 * float(expected.abs().max())


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("deep-fused-draft", {"compiler": "no-such-compiler"}),
        ("translator", {"draft_vocab_size": 5, "norm": nn.Softmax(dim=-1)}),  # an unknown norm
        ("linear", {"draft_vocab_size": 5, "norm": nn.Identity()}),
        *((kind, {}) for kind in ("linear", "deep-fused", "logit-lens")),  # these draft any token
    ],
)
@torch.no_grad()
def test_some_heads_are_not_packed(
    kind: str, options: dict[str, Any], generic: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "compiler" in options:
        monkeypatch.setenv("CXX", options["compiler"])
        monkeypatch.setattr(weights, "library", weights.library.__wrapped__)
    sizes = {name: value for name, value in options.items() if name == "draft_vocab_size"}
    heads = train(make_heads(kind, generic.unembedding, **sizes))
    if "norm" in options:
        heads[2].parts = heads[2].parts._replace(norm=options["norm"])
    hidden = generic.embed(random_ids(3)[0])
    whole = heads[2](hidden, hidden)
    pack(heads)
    assert torch.equal(heads[2](hidden, hidden), whole)


def test_packed_heads_can_still_be_fitted(generic: Backbone) -> None:
    heads = train(make_heads("deep-fused-draft", generic.unembedding))
    pack(heads)
    hidden = generic.embed(random_ids(3)[0])
    heads[2](hidden, hidden).sum().backward()
    assert all(weight.grad is not None for weight in heads[2].parameters())
