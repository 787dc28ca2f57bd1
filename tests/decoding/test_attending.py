"""Drafts from heads that attend: as the reference drafts, whatever passed by and was kept."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LogitsProcessorList

from selfspec.api.speculator import wrap
from selfspec.cli.main import main
from selfspec.config import SpeculationOptions
from selfspec.decoding.acceptance import GreedyMatch
from selfspec.decoding.decode import StopRule, rounds
from selfspec.decoding.drafters.base import Draft, NoDrafter
from selfspec.decoding.drafters.heads import AttendingDrafter
from selfspec.decoding.engine import Asked, Engine, Runtime
from selfspec.decoding.sampling import Sampler
from selfspec.decoding.state import DecodeState
from selfspec.decoding.stats import Round, Stopwatch
from selfspec.decoding.work import Run, Steps, alone
from selfspec.eval.scripted import OracleDrafter
from selfspec.heads.attending import AttendingHeads, TextRows
from selfspec.heads.heads import ExitJudge
from selfspec.model.backbone import Backbone
from tests import ladder
from tests.heads.eagle3.make import HEADS, HERE, LENGTH, SHOWN, STEPS, target, text
from tests.models import make_model, needs_compiler, random_ids
from tests.talks import make_tokenizer

OPTIONS = SpeculationOptions(never_slower=False).updated(
    {"drafter": "exit:threshold=0.001,max_tokens=4"}
)
EXECUTORS = ["generic", pytest.param("fused", marks=needs_compiler)]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", HEADS)
def test_drafts_are_those_of_the_reference_on_any_executor(name: str, executor: str) -> None:
    """The text is given as a prompt, whose first token the model itself would not have written."""
    backbone = Backbone(target(HEADS[name][0]), executor=executor)
    heads = AttendingHeads.from_pretrained(
        HERE / name, backbone.unembedding, "", "tiny", backbone.num_layers
    )
    expected = load_file(HERE / f"{name}.expected.safetensors")["drafts"].tolist()
    judge = ExitJudge(8, {0: 1e-6})
    for place in range(SHOWN):
        ids = text()[:, : LENGTH - STEPS - SHOWN + 2 + place]
        drafter = AttendingDrafter(heads, judge, ladder.drafting(STEPS))
        state = DecodeState(backbone, ids[:, :-1], reader=heads)
        rule = Forced(int(ids[0, -1]))
        found = rounds(state, drafter, rule, StopRule(max_length=99), Stopwatch())
        next(found)
        assert next(found).draft_tokens == expected[place]


class Forced(GreedyMatch):
    """The first token is given, and no draft is kept."""

    def __init__(self, token: int) -> None:
        super().__init__(ladder.greedy())
        self._token: int | None = token

    def verdict(self, *args: Any) -> Any:
        found = super().verdict(*args)
        token, self._token = self._token, None
        return found if token is None else found._replace(token=token)


def test_sampled_sequences_have_the_distribution_of_the_model() -> None:
    model = make_model("llama", vocab_size=4, num_hidden_layers=2)
    heads = ladder.attending_heads(Backbone(model, executor="generic"))
    drafter = "exit:layers=0,threshold=0.01,max_tokens=2"
    ladder.check_sampling(model, random_ids(3, vocab_size=4), heads=heads, drafter=drafter)


@pytest.fixture(scope="module", params=EXECUTORS)
def backbone(request: pytest.FixtureRequest) -> Backbone:
    return Backbone(make_model("llama", max_position_embeddings=512), executor=request.param)


def asked(prompt: Tensor) -> Asked:
    return Asked(
        ids=prompt,
        sampler=Sampler(LogitsProcessorList()),
        stop=StopRule(max_length=prompt.shape[1] + 14),
    )


def drafts(entries: list[Round]) -> list[tuple[list[int], list[int]]]:
    return [(entry.draft_tokens, entry.tokens) for entry in entries]


@pytest.mark.parametrize("patience", [None, 0.5], ids=["", "in pieces"])
def test_a_text_has_the_drafts_that_it_has_alone(
    backbone: Backbone, patience: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a batch, whose rows run together, with prompts that begin alike or were written before."""
    texts: list[int] = []
    run = AttendingHeads.run

    def counted(heads: AttendingHeads, rows: Sequence[TextRows]) -> list[Tensor]:
        texts.append(len(rows))
        return run(heads, rows)

    monkeypatch.setattr(AttendingHeads, "run", counted)
    common = random_ids(90, seed=9)
    prompts = [torch.cat([common, random_ids(3 + n, seed=n)], 1) for n in range(5)]
    prompts += [random_ids(4, seed=20), random_ids(40, seed=21), prompts[0]]
    alone = [
        drafts(list(Engine(runtime(backbone)).add(asked(prompt), OPTIONS))) for prompt in prompts
    ]
    plain = SpeculationOptions(speculate=False)
    for prompt, entries in zip(prompts, alone, strict=True):
        tokens = [token for _, found in entries for token in found]
        written = Engine(runtime(backbone)).add(asked(prompt), plain)
        assert tokens == [token for entry in written for token in entry.tokens]
    assert sum(len(tokens) > 1 for entries in alone for _, tokens in entries)
    assert set(texts) == {1}
    engine = Engine(runtime(backbone), most=4, patience=patience)
    running = [engine.add(asked(prompt), OPTIONS) for prompt in prompts]
    while engine.texts:
        engine.step()
    again = engine.add(asked(prompts[2]), OPTIONS)
    assert max(texts) == 4
    assert [drafts(one.take()) for one in running] == alone
    for one in running:
        reading = one.state.attention
        assert reading is not None
        assert reading.ids == one.state.committed(1)[: len(reading.ids)]
    assert drafts(list(again)) == alone[2]
    if backbone.claims.pages is not None:
        assert again.stats.reused_tokens == prompts[2].shape[1] - 1


def runtime(backbone: Backbone) -> Runtime:
    return Runtime(backbone, ladder.attending_heads(backbone), None)


def test_a_conversation_goes_on_from_what_was_read(backbone: Backbone) -> None:
    heads = ladder.attending_heads(backbone)
    chat = wrap(backbone.model, heads=heads, executor=backbone.executor_name).session()
    first, more = random_ids(50), random_ids(5, seed=3)
    drafter = "exit:threshold=0.1,max_tokens=4"
    options: Any = {"max_new_tokens": 20, "never_slower": False, "drafter": drafter}
    answer = chat.generate(first, **options)
    prompt = torch.cat([first, torch.tensor([answer.token_ids]), more], 1)
    found = chat.generate(prompt, **options)
    afresh = ladder.attending_heads(backbone)
    fresh = wrap(backbone.model, heads=afresh, executor="generic")
    expected = fresh.generate(prompt, **options)
    assert found.token_ids == expected.token_ids
    assert found.stats.reused_tokens >= 50
    assert found.stats.drafted == expected.stats.drafted > 0
    read = [one.longest(prompt[0, 1:].tolist()) for one in (heads, afresh)]
    keys = [one.lease.first(len(one.ids), 0)[0] for one in read if one is not None]
    torch.testing.assert_close(*keys, rtol=1e-4, atol=1e-4)


class BranchingDrafter(OracleDrafter):
    """A wrong token in front of each right one."""

    def draft(self, *args: Any) -> Steps[Draft]:
        draft = yield from super().draft(*args)
        right = draft.tokens
        tokens = [token for one in right for token in (one ^ 1, one)]
        return Draft.of(tokens, [at for n in range(len(right)) for at in (2 * n - 1,) * 2])


@pytest.mark.parametrize("drafter", [OracleDrafter, BranchingDrafter], ids=["chain", "tree"])
def test_rows_that_stay_are_read_and_no_others(backbone: Backbone, drafter: Any) -> None:
    ids = random_ids(30)
    plain = ladder.decode(backbone, ids, NoDrafter())
    found = []
    for one in (NoDrafter(), drafter(ids[0].tolist() + plain.tokens, 3)):
        state = DecodeState(backbone, ids, reader=ladder.attending_heads(backbone))
        stop = StopRule(max_length=30 + ladder.NEW_TOKENS)
        rule = GreedyMatch(ladder.greedy())
        kept = [len(entry.kept) for entry in rounds(state, one, rule, stop, Stopwatch())]
        assert state.attention is not None
        with torch.inference_mode():
            alone(state.attention.read(state.committed(0)))
        found.append(state.attention.lease.first(30 + ladder.NEW_TOKENS - 2, 0)[0])
    assert sum(kept) > 5
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_what_broke_in_the_middle_of_a_round_is_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backbone = Backbone(make_model("llama"), executor="generic")
    heads = ladder.attending_heads(backbone)
    judge, ids = ExitJudge(6, {0: 0.001}), random_ids(30)
    expected = ladder.decode(backbone, ids, AttendingDrafter(heads, judge, ladder.drafting(4)))
    for at in range(4, 16):
        drafter = AttendingDrafter(heads, judge, ladder.drafting(4))
        state = DecodeState(backbone, ids, reader=ladder.attending_heads(backbone))
        drafter.heads = state.attention.heads if state.attention else heads
        entries: list[Round] = []
        passes = 0
        own = Run.done

        def done(work: Any, *args: Any, own: Any = own, at: int = at) -> Any:
            nonlocal passes
            passes += 1
            if passes == at:
                raise KeyboardInterrupt
            return own(work, *args)

        with monkeypatch.context() as patch:
            patch.setattr(Run, "done", done)
            stop = StopRule(max_length=30 + ladder.NEW_TOKENS)
            rule = GreedyMatch(ladder.greedy())
            with pytest.raises(KeyboardInterrupt):
                entries += rounds(state, drafter, rule, stop, Stopwatch())
        assert passes == at
        for entry in rounds(state, drafter, rule, stop, Stopwatch()):
            entries.append(entry)
        tokens = state.ids[0, 30:].tolist()
        assert tokens == expected.tokens
        assert state.attention is not None
        held = state.attention.waiting + len(state.attention.ids)
        assert held == state.lease.length(0)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, and heads of others beside it."""
    monkeypatch.chdir(tmp_path)
    target("llama").save_pretrained("model")
    make_tokenizer().save_pretrained("model")
    for name in ("llama", "original-llama"):
        shutil.copytree(HERE / name, name)
    return tmp_path


@pytest.mark.parametrize("name", ["llama", "original-llama"])
@pytest.mark.usefixtures("folders")
def test_the_command_line_takes_the_folder_as_it_is(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*words: str) -> str:
        capsys.readouterr()
        assert main([*words]) == 0
        return capsys.readouterr().out

    model = ("--model", "model")
    asked = ("generate", "a b", *model, "--dtype", "float32", "--max-new-tokens", "12")
    plain = said(*asked, "--no-speculate")
    found = said(*asked, "--heads", name, "--drafter", "exit:threshold=0.001", "--json")
    assert json.loads(found)["text"] == plain.removesuffix("\n")
    assert json.loads(found)["stats"]["drafted"] > 0
    kind = "original" if name.startswith("original") else "speculators"
    assert f"{name} (EAGLE-3, {kind} format, llama layer" in said("heads", "check", name, *model)
    assert "eagle3" in said("heads", "show", name)
    said("heads", "pull", name)
    assert any(one["name"] == name for one in json.loads(said("heads", "list", "--json")))
