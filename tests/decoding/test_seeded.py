"""Sampling with a seed: a text is a function of prompt and seed, drawn by the model's own law.

Each draw is tied to the seed and its position, so drafts can only be right or wrong: whatever
drafts, and whatever else is written at the same time, the text is that of plain decoding.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper

from selfspec.api.speculator import Speculator, wrap
from selfspec.api.stream import Generation, Stream
from selfspec.decoding.acceptance import Draft, SeededMatch
from selfspec.decoding.decode import rounds
from selfspec.decoding.sampling import Sampler, mixed
from selfspec.decoding.state import NoDrafter, alone
from selfspec.decoding.stats import Stopwatch
from selfspec.errors import InvalidOption
from selfspec.model.backbone import Backbone
from tests import ladder, laws
from tests.ladder import TEMPERATURE, chi_square_p, enumerate_sequences
from tests.models import make_model, random_ids

SEED, NEW_TOKENS = 11, 24

METHODS: dict[str, dict[str, Any]] = {
    "exit": {"drafter": "exit:layers=3,threshold=0.01,max_tokens=3"},
    "exit of two layers": {"drafter": "exit:threshold=0.05,max_tokens=3"},
    "trees": {"drafter": "exit:layers=0,threshold=0.01,guesses=3,max_rows=9,max_tokens=3"},
    "trees around seen text": {"drafter": "ngram+exit:layers=0,threshold=0.01,guesses=3"},
    "ngram": {"drafter": "ngram:size=2"},
    "ngram, else exit": {"drafter": "ngram+exit:layers=3,threshold=0.01,max_tokens=3"},
    "lookahead": {"drafter": "lookahead", "never_slower": False},
    "draft model": {"drafter": "draft-model:max_tokens=3"},
    "ngram, else draft model": {"drafter": "ngram+draft-model:max_tokens=3"},
    "fewer layers": {"drafter": "skip:skipped=3/4,threshold=0.3,max_tokens=3"},
    "confident exits": {"drafter": "exit:threshold=0.05", "controller": "threshold:threshold=0.1"},
    "exit, pinned": {"drafter": "exit:layers=3,threshold=0.01", "pinned": True},
}
"""How to draft; all of these draft, mostly wrongly."""

FLAT: dict[str, Any] = {"do_sample": True, "top_k": 0, "temperature": 2.0}
"""The tiny models' own laws are nearly one-hot."""


@pytest.fixture(scope="module")
def speculator() -> Speculator:
    """The tiny Llama in float64: what differs in the last bits must not decide a draw."""
    model = make_model("llama", torch.float64)
    heads = ladder.deep_heads(Backbone(model, executor="generic"))
    second = make_model("llama", torch.float64, num_hidden_layers=2)
    return wrap(
        model,
        heads=heads,
        draft_model=second,
        executor="generic",
        costs="row=0,head=0",
        never_slower=False,
    )


def repeating(length: int, seed: int = 0) -> Tensor:
    """[1, length] ids of a few kinds, so that prompt lookup has something to say."""
    return random_ids(length, seed, vocab_size=4)


def plain(speculator: Speculator, ids: Tensor, **options: Any) -> list[int]:
    given = FLAT | {"max_new_tokens": NEW_TOKENS, "seed": SEED} | options
    return speculator.generate(ids, drafter="none", **given).token_ids


def test_a_text_that_its_own_law_goes_on_is_the_text_itself(speculator: Speculator) -> None:
    """A draw knows its position, not how the prompt came to be."""
    ids = repeating(13)
    whole = plain(speculator, ids)
    longer = torch.cat([ids, torch.tensor([whole[:15]])], dim=1)
    assert plain(speculator, longer, max_new_tokens=NEW_TOKENS - 15) == whole[15:]


PROMPTS = (repeating(13), repeating(7, seed=1), repeating(10, seed=2))


def left_padded() -> tuple[Tensor, Tensor]:
    """`PROMPTS` as rows of one batch, and its mask."""
    longest = max(prompt.shape[1] for prompt in PROMPTS)
    ids = torch.full((len(PROMPTS), longest), 3)  # a token like others: the mask alone tells
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(PROMPTS):
        ids[row, longest - prompt.shape[1] :] = prompt[0]
        mask[row, longest - prompt.shape[1] :] = 1
    return ids, mask


@pytest.fixture(scope="module")
def texts(speculator: Speculator) -> list[list[int]]:
    """Of each prompt alone, without drafts."""
    given = ((prompt, SEED + row) for row, prompt in enumerate(PROMPTS))
    return [plain(speculator, prompt, max_new_tokens=20, seed=seed) for prompt, seed in given]


@pytest.mark.parametrize("method", [None, *METHODS], ids=str)
def test_a_row_of_a_batch_is_its_prompt_alone_with_the_seed_plus_its_number(
    speculator: Speculator, method: str | None, texts: list[list[int]]
) -> None:
    drafting = {"drafter": "none"} if method is None else METHODS[method]
    ids, mask = left_padded()
    given = FLAT | {"max_new_tokens": 20, "attention_mask": mask} | drafting
    answers = speculator.generate_batch(ids, **given, seed=SEED)
    assert [answer.token_ids for answer in answers] == texts
    assert all(answer.stats.lossless for answer in answers)
    drafted = sum(answer.stats.drafted for answer in answers)
    accepted = sum(answer.stats.accepted for answer in answers)
    # some were right, some were wrong; prompt lookup has nothing right here
    assert method in (None, "ngram") or 0 < accepted < drafted


def test_seeds_go_round_at_64_bits(speculator: Speculator) -> None:
    both = torch.cat([PROMPTS[0], PROMPTS[0]])
    last, first = speculator.generate_batch(both, **FLAT, max_new_tokens=8, seed=2**64 - 1)
    assert last.token_ids == plain(speculator, PROMPTS[0], max_new_tokens=8, seed=-1)
    assert first.token_ids == plain(speculator, PROMPTS[0], max_new_tokens=8, seed=0)


def test_no_prompt_is_lost_where_seeds_end_or_are_none(speculator: Speculator) -> None:
    prompts, seeds = [PROMPTS[0]] * 4, [2**64 + 5, "x", None]
    asked: Any = {"seeds": seeds, **FLAT, "max_new_tokens": 3}
    found = dict(speculator.generate_each(prompts, **asked))
    kinds = [type(found[number]) for number in range(4)]
    assert kinds == [Generation, InvalidOption, Generation, InvalidOption]
    assert "more prompts than seeds" in str(found[3])


def sampler_of(seed: int) -> Sampler:
    return Sampler(LogitsProcessorList(), do_sample=True).seeded(seed, torch.device("cpu"))


def test_of_drafts_and_siblings_the_one_that_is_the_targets_own_draw_stays() -> None:
    sampler, kept = sampler_of(5), Counter[bool]()
    drafts = [*(Draft.of([token]) for token in range(5)), Draft.of([1, 4], [-1, -1])]
    for draft, position in product(drafts, range(1, 60)):
        own = sampler.draw(laws.TARGET, position)
        logits = laws.TARGET.log().expand(len(draft.tokens) + 1, 5)
        found = laws.verdicts(SeededMatch(sampler), laws.Words(*[0] * position), logits, draft)
        assert found[0] == (own, own in draft.tokens)
        kept[own in draft.tokens] += 1
    assert set(kept) == {True, False}


def test_guesses_are_what_a_seed_would_draw_one_without_the_others() -> None:
    sampler = sampler_of(7)
    for place in range(40):
        tokens, chances = sampler.foreseen(laws.TARGET, place, 4, doubt=1.0)
        left, drawn = laws.TARGET.clone(), list[int]()
        for _ in range(4):
            drawn.append(sampler.draw(left, place))
            left[drawn[-1]] = 0.0
        assert tokens == drawn
        assert chances == sorted(chances, reverse=True)
        assert sum(chances) < 1.0 + 1e-9


def test_the_others_of_many_tokens_are_no_guess() -> None:
    flat = torch.full((1000,), 0.001)  # most races are won by one of those that race as one
    for place in range(20):
        tokens, chances = sampler_of(7).foreseen(flat, place, 3, doubt=1.0)
        assert len(tokens) == 3
        assert min(tokens) >= 0
        assert sum(chances) < 0.4


def heated(temperature: float) -> Sampler:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    return replace(sampler_of(9), processors=warpers)


def test_near_temperature_0_a_guess_has_the_chance_of_a_greedy_one() -> None:
    logits = torch.tensor([[1.0, 0.9, 0.7, 0.4]])
    sampler, ids = heated(0.01), random_ids(3)
    for place in range(5):
        tokens, chances = sampler.foreseen(sampler.probs(ids, logits), place, 4, doubt=2.0)
        assert chances == pytest.approx((logits[0] / 2.0).softmax(0)[tokens].tolist(), abs=0.02)


@pytest.mark.parametrize(("temperature", "doubt"), [(0.3, 0.5), (1.0, 1.0), (1.0, 2.0)])
def test_a_guess_is_as_right_as_it_says(temperature: float, doubt: float) -> None:
    generator = torch.Generator().manual_seed(1)
    sampler, ids = heated(temperature), random_ids(3)
    said, right, count = 0.0, 0, 1500
    for place in range(count):
        draft = 2.0 * torch.randn(1, 5, generator=generator)
        noise = -torch.empty(1, 5).exponential_(generator=generator).log()
        tokens, chances = sampler.foreseen(sampler.probs(ids, draft), place, 2, doubt)
        drawn = sampler.draw(sampler.probs(ids, draft + doubt * noise), place)
        said += chances[1]
        right += drawn == tokens[1]
    assert said > 0.1 * count
    assert abs(right - said) < 4 * math.sqrt(said)


@torch.inference_mode()
@pytest.mark.parametrize("method", ["exit", "trees", "draft model"])
def test_every_drafter_draws_at_the_place_of_its_token(
    speculator: Speculator, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, mask = left_padded()
    options = speculator.options.updated(METHODS[method])
    call = speculator.call(ids, FLAT | {"seed": SEED, "attention_mask": mask})  # type: ignore[arg-type]  # by name
    asked, runtime = call.row(1), speculator.runtime
    state, drafter = runtime.state(asked, options), runtime.drafter(asked, options)
    next(rounds(state, NoDrafter(), SeededMatch(asked.sampler), asked.stop, Stopwatch()))
    guesses, foreseen = dict[int, set[int]](), Sampler.foreseen

    def noted(self: Sampler, probs: Tensor, place: int, *given: Any) -> Any:
        found = foreseen(self, probs, place, *given)
        assert found[0][0] == asked.sampler.draw(probs, place)
        guesses.setdefault(place, set()).update(found[0])
        return found

    monkeypatch.setattr(Sampler, "foreseen", noted)
    with state.round():
        draft = alone(drafter.draft(state, 9, Stopwatch()))
    assert len(draft.tokens) > 1
    for index, one in enumerate(draft.proposed):
        place = state.length + len(draft.path(index)) - 1  # ids in front of it, and padding
        if one.probs is None:
            assert one.token in guesses[place]
        else:
            assert one.token == asked.sampler.draw(one.probs, place)


def test_sampled_sequences_follow_the_model_s_law_over_seeds() -> None:
    """Of plain decoding, 32 at a time: drafts change no text, as shown above."""
    model = make_model("llama", vocab_size=4, num_hidden_layers=2)
    speculator = wrap(model, drafter="none", executor="generic")
    ids, seeds, length = random_ids(3, vocab_size=4), 1000, 3
    call = speculator.call(  # read once: keywords take longer than the answer
        ids, {"max_new_tokens": length, "do_sample": True, "top_k": 0, "temperature": TEMPERATURE}
    )
    engine, sampler = speculator.engine(), call.sampler
    asked = (
        replace(call, sampler=sampler.seeded(seed, ids.device)).only() for seed in range(seeds)
    )
    running = [engine.add(one, call.speculation) for one in asked]
    counts = Counter(tuple(Stream(one, call).drain().token_ids) for one in running)
    assert chi_square_p(counts, enumerate_sequences(model, ids, length, 4), seeds) > 0.001


@pytest.mark.parametrize("seeded", [True, False])
def test_draws_from_many_tokens_follow_their_law(seeded: bool) -> None:
    """Of 200 tokens only the likeliest 64 race by themselves; they have 54 % of this law."""
    law = torch.arange(1.0, 201.0)
    law, sampler = law / law.sum(), sampler_of(4)
    drawn = (sampler.draw(law, at if seeded else None) for at in range(20_000))
    counts = Counter[tuple[int, ...]]((token,) for token in drawn)
    expected: laws.Law = {(token,): chance for token, chance in enumerate(law.tolist())}
    assert chi_square_p(counts, expected, counts.total()) > 0.001


@pytest.mark.parametrize("place", [None, 3])
def test_what_is_no_law_is_refused(place: int | None) -> None:
    for value in (0.0, math.nan, math.inf):
        with pytest.raises(InvalidOption, match="no distribution to draw from"):
            sampler_of(0).draw(torch.full((100,), value), place)


def agreement(one: Sampler, law: Tensor, other: Sampler, their_law: Tensor) -> float:
    """How often two ways to draw give the same token, over 4,000 places of a text."""
    drawn = ((one.draw(law, at), other.draw(their_law, at)) for at in range(1, 4001))
    return sum(ours == theirs for ours, theirs in drawn) / 4000


def test_drafts_of_the_same_seed_and_place_agree_more_often_than_independent_ones() -> None:
    p, q = laws.TARGET, laws.DRAFT
    together = agreement(sampler_of(0), p, sampler_of(0), q)
    apart = agreement(sampler_of(0), p, sampler_of(1), q)
    chance, distance = float(p @ q), float((p - q).abs().sum() / 2)
    assert apart == pytest.approx(chance, abs=0.03)  # 4 sigma of 4,000 draws
    # not below its bound, and no coupling agrees more often than 1 - TV
    assert (1 - distance) / (1 + distance) - 0.03 < together < 1 - distance + 0.03
    assert together > apart + 0.2
    assert agreement(sampler_of(0), p, sampler_of(0), p.clone()) == 1.0


LAW = torch.tensor([0.4, 0.3, 0.2, 0.1])

LINES: dict[str, Callable[[int], tuple[int, int]]] = {
    "places of a seed": lambda number: (0, number),
    "places of another seed": lambda number: (1, number),
    "seeds at a place": lambda number: (number, 1),
    "seeds that rise with the place": lambda number: (number, number),
    "seeds that fall as the place rises": lambda number: (4000 - number, number),
    "seeds of 40 bits more": lambda number: (number << 40, 5),
}
"""Where one after another could hang together; number -> (seed, place)."""


@pytest.mark.parametrize("line", LINES)
def test_neighbours_are_drawn_independently(line: str) -> None:
    places = map(LINES[line], range(1, 4001))
    drawn = [sampler_of(seed).draw(LAW, place) for seed, place in places]
    expected: laws.Law = {(a, b): float(LAW[a] * LAW[b]) for a, b in product(range(4), repeat=2)}
    for step in (1, 2, 64):
        pairs = Counter[tuple[int, ...]](zip(drawn, drawn[step:], strict=False))
        assert chi_square_p(pairs, expected, pairs.total()) > 0.001


def test_every_seed_and_place_has_a_number_of_its_own() -> None:
    numbers = [mixed(seed, place) for seed in range(-50, 50) for place in range(100)]
    assert len({*numbers}) == len(numbers)
    assert all(0 <= number < 2**64 for number in numbers)
    assert len({number % 2**32 for number in numbers}) == len(numbers)  # all that a CPU's takes
    bits = torch.tensor([[number >> bit & 1 for bit in range(64)] for number in numbers])
    # half of 10,000, within 5 sigma
    assert (bits.float().mean(0) - 0.5).abs().max() < 0.025


def test_a_seeds_draws_touch_no_other_generator() -> None:
    before, sampler = torch.get_rng_state(), sampler_of(0)
    assert sampler.generator is not None
    own = sampler.generator.get_state()
    first, _, again = (sampler.draw(LAW, place) for place in (3, 1, 3))
    assert first == again
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(sampler.generator.get_state(), own)
