"""Points where decoding waits for the device: these are all, counted per round.

On a GPU the host runs ahead of the device; turning a tensor into a Python value makes it wait. On a
CPU nothing waits, but the same operators run, so they are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from selfspec.api.speculator import Speculator, wrap
from selfspec.decoding.sampling import Sampler
from selfspec.decoding.stats import Round
from selfspec.model.backbone import Backbone
from tests import ladder
from tests.models import make_model, random_ids
from tests.recorded import RecordedCapture

WAITING = {
    "_local_scalar_dense": "number",  # int(), float(), bool(), item() of a tensor
    "item": "number",  # the same in inference mode; so is the next
    "is_nonzero": "number",
    "nonzero": "shape",  # a result whose size depends on values
    "masked_select": "shape",
    "lift_fresh": "upload",  # a tensor from Python values: the host waits until it is copied
}


class Waits(TorchDispatchMode):
    """Counts operators that would make the host wait for a GPU, and operators that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        aliases = [output.alias_info for output in func._schema.returns]
        self.launches += not any(info and not info.is_write for info in aliases)  # otherwise a view
        if name in WAITING:
            self.counts[WAITING[name]] += 1
        if name in ("index", "index_put_"):
            masks = [index for index in args[1] if index is not None and index.dtype == torch.bool]
            self.counts["shape"] += len(masks)
        return func(*args, **(kwargs or {}))


@contextmanager
def waits() -> Iterator[Counter[str]]:
    """Count waits while open. `tolist` runs no operator on a CPU, so it is counted separately."""
    mode = Waits()
    original = Tensor.tolist

    def tolist(self: Tensor) -> Any:
        mode.counts["list"] += 1
        return original(self)

    with pytest.MonkeyPatch.context() as patch, mode:
        patch.setattr(Tensor, "tolist", tolist)
        yield mode.counts


@pytest.fixture(scope="module", params=["generic", "cuda-graph"])
def speculator(request: pytest.FixtureRequest) -> Speculator:
    return wrap(
        make_model("llama"),
        heads="logit-lens",
        executor=request.param,
        drafter="exit:layers=2/5,max_tokens=4",
    )


def rounds_of(speculator: Speculator, **options: Any) -> Iterator[tuple[Round, Counter[str]]]:
    """Each round after the prompt's, and its waits."""
    stream = speculator.stream(random_ids(13), max_new_tokens=24, **options)
    next(stream._running)
    while True:
        with waits() as counts:
            entry = next(stream._running, None)
        if entry is None:
            return
        yield entry, counts


def judged(entry: Round) -> int:
    """Number of head calls: a token that exits at layer 5 was judged at layer 2 before."""
    calls = sum({2: 1, 5: 2}[layer] for layer in entry.exit_layers)
    return calls + (2 if entry.ended == "depth" else 0)


def test_plain_decoding_reads_once_per_token(speculator: Speculator) -> None:
    rounds = list(rounds_of(speculator, speculate=False))
    assert len(rounds) == 23
    for _, counts in rounds:
        assert counts == {"list": 1}  # the argmax of the logits


@pytest.mark.parametrize(("tau", "controller"), [(0.05, "fixed"), (0.4, "fixed"), (0.05, "cm-asd")])
def test_exit_heads_read_once_per_judgement_and_once_per_verification(
    speculator: Speculator, tau: float, controller: str
) -> None:
    """Also if the controller needs more values than the judge."""
    endings = set()
    drafter = f"exit:threshold={tau}"
    for entry, counts in rounds_of(speculator, drafter=drafter, controller=controller):
        assert counts == {"list": judged(entry) + 1}
        endings.add(entry.ended)
    assert "depth" in endings or tau < 0.4


@pytest.mark.parametrize(
    ("drafter", "asks"), [("ngram", 0), ("skip:skipped=3,threshold=0.2,max_tokens=4", 1)]
)
def test_prompt_lookup_reads_only_verdicts_and_layer_skipping_once_per_token(
    speculator: Speculator, drafter: str, asks: int
) -> None:
    total = 0
    for entry, counts in rounds_of(speculator, drafter=drafter, costs="row=0.0"):
        total += (drafted := len(entry.draft_tokens))
        # the draft is uploaded with the newest token; a single number goes with a launch
        assert counts == Counter({"list": 1 + asks * drafted, "upload": drafted > 0})
    assert total


def test_sampling_reads_once_per_verdict_and_draws(speculator: Speculator) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"drafter": "exit:threshold=0.05", "acceptance": ladder.RATIO}
    for entry, counts in rounds_of(speculator, do_sample=True, **options):
        drafted = len(entry.draft_tokens)
        refused = entry.accepted < drafted
        verdicts = entry.accepted + refused
        # the residual reads its sum in case nothing is left
        draws = drafted + 1
        assert counts["number"] == verdicts + refused
        assert counts["list"] == judged(entry) + draws


def test_sampling_with_a_seed_draws_once_per_draft_and_verdict(
    speculator: Speculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sampler, "_top_k", 0)  # which is used on a CPU alone, as it reads scores
    for one, counts in rounds_of(speculator, drafter="exit:threshold=0.05", do_sample=True, seed=0):
        draws = len(one.draft_tokens) + len(one.tokens)
        misses = counts["upload"]  # draws that none of the likeliest tokens won
        assert counts["list"] == judged(one) + draws + misses
        assert misses < draws
        assert not counts.keys() - {"list", "upload"}


def test_a_draft_model_reads_once_per_token(speculator: Speculator) -> None:
    second = make_model("llama", num_hidden_layers=2)
    combined = wrap(
        speculator.model, heads=None, executor=speculator.backbone.executor_name, draft_model=second
    )
    behind = True  # the host knows where the cache differs from the text
    for entry, counts in rounds_of(combined, drafter="draft-model:max_tokens=4"):
        drafted = len(entry.draft_tokens)
        uploads = (drafted > 0) * (1 + behind)  # drafts to verify; tokens new to the draft model
        assert counts == Counter({"list": 1, "number": drafted, "upload": uploads})
        behind = entry.accepted == drafted


def test_a_round_launches_few_operators_besides_graphs_and_captures_nothing() -> None:
    llama = wrap(make_model("llama"), heads="logit-lens", executor="cuda-graph", never_slower=False)
    capture, maxima = RecordedCapture(), dict[int, tuple[int, int]]()
    llama.backbone._executor.start_capture(lambda: capture, None)  # type: ignore[attr-defined]
    drafter = "exit:layers=5,threshold=0.0001,max_tokens=4"
    for speculate in (False, True):
        options: Any = {"speculate": speculate, "drafter": drafter, "max_new_tokens": 24}
        stream = llama.stream(random_ids(13), **options)
        next(stream._running)
        captured = len(capture.recordings)
        for _ in range(3):
            replays = capture.replays
            with Waits() as mode:
                drafted = len(next(stream._running).draft_tokens)
            counts = mode.launches, capture.replays - replays
            maxima[drafted] = max(counts, maxima.get(drafted, counts))
        assert len(capture.recordings) == captured
    # before heads were captured: 127 launches and 7 graphs
    assert maxima == {0: (10, 2), 4: (59, 11)}


@pytest.mark.parametrize("kind", ["deep", "deep with states", "attending"])
def test_trees_capture_nothing_within_an_answer(kind: str) -> None:
    model, capture = make_model("llama"), RecordedCapture()
    heads = ladder.HEADS[kind](Backbone(model, executor="generic"))
    speculator = wrap(model, heads=heads, executor="cuda-graph", never_slower=False)
    speculator.backbone._executor.start_capture(lambda: capture, None)  # type: ignore[attr-defined]
    stream = speculator.stream(random_ids(13), max_new_tokens=24, drafter=ladder.TREES)
    next(stream._running)
    captured, entries = len(capture.recordings), list(stream._running)
    assert any(entry.parents for entry in entries)
    assert len(capture.recordings) == captured


def test_a_read_would_be_noticed() -> None:
    with waits() as counts:
        value = torch.rand(3)
        assert int(value.argmax()) in range(3)
        assert len(value[value > 2].tolist()) == 0
        torch.tensor([1])
    assert counts == {"number": 1, "list": 1, "upload": 1, "shape": 1}
