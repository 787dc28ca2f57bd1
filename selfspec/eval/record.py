"""What any exit setting would do on some prompts, for `tune` and `replay`.

Comes in: a model with its heads, and prompts. Goes out: a Record, in memory. Each *place* of an
answer has a root *node*: what every exit layer would draft behind the tokens up to there. A draft
that a setting may take leads to a child node, where drafting goes on.

It is made by plain decoding that looks around. Before each verification an Explorer runs the newest
token to every exit layer, with the runtime's own pieces, and notes what the heads say. A real round
does not know that a draft is wrong and goes on behind it, so the explorer goes there too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from selfspec.api.request import Request
from selfspec.api.speculator import Speculator
from selfspec.api.text import Prompt
from selfspec.decoding import costs
from selfspec.decoding.acceptance import Draft, GreedyMatch
from selfspec.decoding.decode import rounds
from selfspec.decoding.drafters.heads import known_deep
from selfspec.decoding.drafters.trees import LEAST_SAID
from selfspec.decoding.state import DecodeState, Steps, alone, ready
from selfspec.decoding.stats import Stopwatch
from selfspec.errors import HeadsNotFound, InvalidOption
from selfspec.eval.options import RecordOptions
from selfspec.eval.results import Question, Show
from selfspec.heads.exit_heads import ExitHeads, check_exit_layers
from selfspec.heads.heads import ExitJudge, likeliest
from selfspec.options import Exit

GUESSES = 8
"""Guesses kept of exit layer 0 at each node, for trees."""

NONE = -1
"""In place of a node: there is none."""

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class RecordInfo:
    """What was recorded."""

    num_layers: int
    exit_layers: tuple[int, ...]
    """Recorded ones: a column each in the arrays."""
    anneal_strengths: tuple[float, ...]
    """Alphas: the last axis of `confidence`."""
    min_threshold: float
    """Branches are followed down to this confidence, at the alpha where it is highest."""
    max_draft_tokens: int
    """Branches are followed for so many drafts."""
    end_tokens: tuple[int, ...]
    row_costs: tuple[float, ...]
    """What the model pays for a verification's second row, its third and so on, unless measured."""
    head_cost: float
    """What it pays for an exit head that is asked, likewise."""


@dataclass(frozen=True, kw_only=True)
class PromptInfo:
    """One prompt and the length of its answer."""

    id: str
    """The question's: all its turns have it."""
    prompt_tokens: int
    new_tokens: int
    """Places: tokens of the answer, an end token included."""
    max_new_tokens: int
    """What was asked for; the answer is shorter if it ended by itself."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Record:
    """Answers of plain decoding, and what exit layers would have drafted at each place.

    P prompts, T places (the answers of all prompts, one behind the other), N nodes, E exit layers,
    A alphas.
    """

    info: RecordInfo
    prompts: tuple[PromptInfo, ...]
    contexts: Ints
    """The tokens of all prompts, one prompt behind the other."""
    answers: Ints
    """[T] the tokens of plain decoding."""
    roots: Ints
    """[T] the node where the place's token is the newest; NONE where nothing can be drafted."""
    tokens: Ints
    """[N, E] the top-1 token of each exit layer."""
    confidence: Floats
    """[N, E, A] its probability after annealing."""
    children: Ints
    """[N, E] the node behind that token; NONE where no setting goes on."""
    guesses: Ints
    """[N, G] the best tokens of exit layer 0, for trees; G is 0 where it was not recorded."""
    chances: Floats
    """[N, A, G] their probabilities after annealing, falling."""
    behind: Ints
    """[N, G] the node behind each; NONE where no tree goes on."""

    def places(self, prompt: int) -> range:
        """The places of one prompt."""
        start = sum(entry.new_tokens for entry in self.prompts[:prompt])
        return range(start, start + self.prompts[prompt].new_tokens)

    def context(self, prompt: int) -> list[int]:
        """The tokens of one prompt."""
        start = sum(entry.prompt_tokens for entry in self.prompts[:prompt])
        stop = start + self.prompts[prompt].prompt_tokens
        return list(self.contexts[start:stop].tolist())

    @property
    def widest(self) -> int:
        """Rows of a verification at most, under settings that are tried on it."""
        chain = self.info.max_draft_tokens + 1
        return max(chain, Exit().max_rows) if self.guesses.shape[-1] else chain

    @property
    def mean_context(self) -> int:
        """Tokens in front of a place, on average."""
        contexts = (entry.prompt_tokens + entry.new_tokens / 2 for entry in self.prompts)
        return round(sum(contexts) / len(self.prompts))


# --- how it is made -------------------------------------------------------------------------------

_FLOORS = {True: 0.01, False: 0.2}
"""Lowest threshold to be replayed, for a single exit layer and for several."""


class _Said(NamedTuple):
    """What one exit layer says of the next token."""

    tokens: list[int]
    """The best first."""
    chances: list[list[float]]
    """By alpha, of all of them."""
    features: Tensor
    """The head's, [1, d]."""


class _Node(NamedTuple):
    """A row of a Record's arrays; what lies behind it is entered later."""

    tokens: list[int]
    confidence: list[list[float]]
    children: list[int]
    guesses: list[int]
    chances: list[list[float]]
    behind: list[int]


@dataclass
class Explorer:
    """A drafter that looks and proposes nothing, so that decoding stays plain.

    A right draft leads to the next place's root: the same tokens have the same hidden states. Only
    for heads that read deep states it does not: what they read there is what the head before them
    computed, so all their drafts, right ones too, have nodes of their own, by exit layer.
    """

    recorder: Recorder
    """How far branches are followed, and where nodes are added."""
    heads: ExitHeads
    judges: Sequence[ExitJudge]
    """One per alpha."""
    answer: Sequence[int]
    """What will be decoded."""
    end_tokens: frozenset[int]
    roots: list[int] = field(default_factory=list)
    """By place; the last token of an answer has none."""

    def draft(self, state: DecodeState, limit: int, watch: Stopwatch) -> Steps[Draft]:  # noqa: ARG002  # the protocol's
        """No tokens; the state is left as it was found."""
        place, nodes, root = len(self.roots), self.recorder.nodes, NONE
        if (room := min(limit, self.recorder.drafts)) > 0:
            right = None if self.heads.reads_deep else self.answer[place + 1]
            deep = known_deep(self.heads, state)
            paths = [1.0] * len(self.judges)
            root = self._look(state, self.answer[place], deep, room, right, paths)
            state.hidden.clear()
        if place > 0 and not self.heads.reads_deep:
            # the right drafts of the place before lead to this place's root
            last = nodes[self.roots[-1]]
            for tokens, behind in ((last.tokens, last.children), (last.guesses, last.behind)):
                for column, token in enumerate(tokens):
                    if token == self.answer[place]:
                        behind[column] = root
        self.roots.append(root)
        return ready(Draft())

    def learn(self, draft: Draft, kept: Sequence[int]) -> None:
        """Nothing was proposed."""

    def _look(
        self,
        state: DecodeState,
        token: int,
        deep: Tensor | None,
        room: int,
        right: int | None,
        paths: Sequence[float],
    ) -> int:
        """Note what follows `token`, and what follows that, for `room` drafts; returns the node.

        Nothing is noted behind the draft `right`, behind an end token, or where nothing that can be
        replayed goes on: no threshold lets a draft leave, no tree asks behind it. `paths`: what
        exit layer 0 gives the way to here, by alpha.
        """
        nodes, trees = self.recorder.nodes, self.recorder.trees
        held, index = state.lease.length(0), len(nodes)
        said = self._ask(state, token, deep)
        confidence = [[chances[0] for chances in entry.chances] for entry in said]
        guesses = said[0].tokens if trees else []
        node = _Node(
            tokens=[entry.tokens[0] for entry in said],
            confidence=confidence,
            children=[NONE] * len(said),
            guesses=guesses,
            chances=said[0].chances if trees else [[] for _ in self.judges],
            behind=[NONE] * len(guesses),
        )
        nodes.append(node)
        found: dict[tuple[int, int], int] = {}

        def follow(column: int, rank: int, paths: Sequence[float]) -> int:
            draft = said[column].tokens[rank]
            if room == 1 or draft == right or draft in self.end_tokens:
                return NONE
            branch = (column if self.heads.reads_deep else 0, draft)
            if branch not in found:
                features = said[column].features
                found[branch] = self._look(state, draft, features, room - 1, None, paths)
            return found[branch]

        def ways(rank: int) -> list[float]:
            return [path * by[rank] for path, by in zip(paths, said[0].chances, strict=True)]

        for rank in range(len(guesses)):
            if max(ways(rank)) >= LEAST_SAID:
                node.behind[rank] = follow(0, rank, ways(rank))
        for column, sure in enumerate(confidence):
            if max(sure) >= self.recorder.threshold:
                on = ways(0) if trees and column == 0 else [0.0] * len(paths)
                node.children[column] = follow(column, 0, on)
        state.lease.truncate(held)
        return index

    def _ask(self, state: DecodeState, token: int, deep: Tensor | None) -> list[_Said]:
        """Run one token's row up to the deepest exit layer; what each says of the next token."""
        state.hidden.clear()  # rows of other branches; their keys and values stay
        state.hidden.push(state.backbone.embed(state.ids.new_tensor([token])))
        said = []
        for boundary, layer in enumerate(state.hidden.schedule.depths[1:-1]):
            hidden = alone(state.hidden.advance(boundary))[-1:]
            head = self.heads[layer]
            features = head.features(hidden, deep)
            logits = head.unembed(features)
            count = GUESSES if self.recorder.trees and layer == 0 else 1
            made = [likeliest(logits, judge.temperature(layer), count) for judge in self.judges]
            best = head.to_target_ids(made[0][0]).float()
            tokens, *chances = torch.cat([best, *(found for _, found in made)]).tolist()
            said.append(_Said([*map(int, tokens)], chances, features))
        return said


def record(
    speculator: Speculator, questions: Sequence[Question], options: RecordOptions, show: Show
) -> Record:
    """Decode all turns of `questions` greedily and note what any setting would do there.

    Each turn sees the plain answers to those before it; a model without a chat template writes on
    behind the first. Raises what a Recorder does.
    """
    recorder = Recorder(speculator, options)
    raw = getattr(speculator.tokenizer, "chat_template", None) is None
    for done, question in enumerate(questions):
        show(done, len(questions), question.id)
        messages: list[dict[str, str]] = []
        for turn in question.turns[: 1 if raw else None]:
            messages.append({"role": "user", "content": turn})
            answer = recorder.prompt(turn if raw else messages, question.id)
            messages.append({"role": "assistant", "content": answer})
    show(len(questions), len(questions), f"{len(recorder.nodes)} nodes")
    return recorder.record()


class Recorder:
    """Collects prompts into one Record; without heads nothing is noted but the text.

    Raises HeadsNotFound for exit layers without heads, InvalidOption for those that heads lack.
    """

    def __init__(self, speculator: Speculator, options: RecordOptions) -> None:
        heads, layers = speculator.heads, options.exit_layers or ()
        if heads is not None:
            layers = layers or heads.config.exit_layers
            check_exit_layers(layers, heads.config.exit_layers)
        elif layers:
            raise HeadsNotFound(
                f"exit layers {list(layers)} without exit heads. Give --heads, or leave them out"
            )
        self.nodes: list[_Node] = []
        self.drafts = options.max_draft_tokens
        self.threshold = options.min_threshold or _FLOORS[len(layers) == 1]
        self.trees = layers[:1] == (0,) and speculator.backbone.runs_trees
        self._speculator, self._options, self._layers = speculator, options, layers
        self._end_tokens, self._prompts = set[int](), list[PromptInfo]()
        self._contexts, self._answers, self._roots = list[int](), list[int](), list[int]()

    def prompt(self, prompt: Prompt, name: str) -> str:
        """The answer's text. Raises InvalidOption where greedy is more than the likeliest token."""
        speculator = self._speculator
        options: Any = {"max_new_tokens": self._options.max_new_tokens, "do_sample": False}
        request = speculator.call(prompt, options)
        asked = request.only()
        if not asked.sampler.is_plain_greedy or asked.stop.criteria is not None:
            names = [type(p).__name__ for p in asked.sampler.processors] or ["stopping criteria"]
            raise InvalidOption(
                f"the model's generation_config asks for {', '.join(names)}, which cannot be "
                "replayed. Leave it out there"
            )
        plain = speculator.generate(prompt, **options, speculate=False)
        start = asked.ids.shape[1]
        self._contexts += asked.ids[0, asked.pad :].tolist()
        self._answers += plain.token_ids
        self._roots += self._explored(request, plain.token_ids)
        self._end_tokens |= set(asked.stop.end_tokens)
        self._prompts.append(
            PromptInfo(
                id=name,
                prompt_tokens=start - asked.pad,
                new_tokens=len(plain.token_ids),
                max_new_tokens=asked.stop.max_length - start,
            )
        )
        return plain.text

    def _explored(self, request: Request, answer: Sequence[int]) -> list[int]:
        """The root of each place of an answer, its nodes noted; without heads there are none."""
        heads = self._speculator.heads
        if heads is None:
            return [NONE] * len(answer)
        asked = request.only()
        looking = replace(
            request.speculation, speculate=True, drafter="exit", exit=Exit(layers=self._layers)
        )
        state = self._speculator.runtime.state(asked, looking)
        layers, taus = self._speculator.backbone.num_layers, dict.fromkeys(self._layers, 1.0)
        warmth = {int(layer): value for layer, value in heads.config.temperatures.items()}
        judges = [
            ExitJudge(layers, taus, alpha, warmth) for alpha in self._options.anneal_strengths
        ]
        explorer = Explorer(self, heads, judges, answer, frozenset(asked.stop.end_tokens))
        for _ in rounds(state, explorer, GreedyMatch(asked.sampler), asked.stop, Stopwatch()):
            pass
        return [*explorer.roots, NONE]

    def record(self) -> Record:
        """Everything so far."""
        backbone, alphas = self._speculator.backbone, tuple(self._options.anneal_strengths)
        cost = costs.DraftCost.for_model(backbone).with_costs(self._speculator.options.costs)
        info = RecordInfo(
            num_layers=backbone.num_layers,
            exit_layers=tuple(self._layers),
            anneal_strengths=alphas,
            min_threshold=self.threshold,
            max_draft_tokens=self.drafts,
            end_tokens=tuple(sorted(self._end_tokens)),
            row_costs=cost.rows,
            head_cost=cost.head,
        )
        layers, strengths = len(self._layers), len(alphas)
        guesses = max((len(node.guesses) for node in self.nodes), default=0)

        def by_node(name: str, kind: type[np.generic], *shape: int) -> Any:
            values = [getattr(node, name) for node in self.nodes]
            return np.array(values, kind).reshape(len(values), *shape)  # where there are none, too

        return Record(
            info=info,
            prompts=tuple(self._prompts),
            contexts=np.array(self._contexts, np.int32),
            answers=np.array(self._answers, np.int32),
            roots=np.array(self._roots, np.int32),
            tokens=by_node("tokens", np.int32, layers),
            confidence=by_node("confidence", np.float32, layers, strengths),
            children=by_node("children", np.int32, layers),
            guesses=by_node("guesses", np.int32, guesses),
            chances=by_node("chances", np.float32, strengths, guesses),
            behind=by_node("behind", np.int32, guesses),
        )
