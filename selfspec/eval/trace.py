"""Plain decoding that looks around: prompts come in, a Record of what drafts would do goes out.

Before each verification an Explorer runs the newest token to every exit layer, with the runtime's
own pieces, and notes what the heads say. A real round does not know that a draft is wrong and goes
on behind it, so the explorer goes there too. Called by `selfspec trace` and `selfspec tune`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from selfspec.api.speculator import Speculator
from selfspec.api.stream import Call
from selfspec.api.text import Prompt
from selfspec.api.tuned import conditions
from selfspec.decoding import prices
from selfspec.decoding.acceptance import GreedyMatch
from selfspec.decoding.decode import rounds
from selfspec.decoding.drafters import LEAST_SAID, Draft, known_deep
from selfspec.decoding.sequence import DecodeState
from selfspec.decoding.stats import Stopwatch
from selfspec.decoding.work import Steps, alone, ready
from selfspec.errors import HeadsNotFound, InvalidOption
from selfspec.eval.options import RecordOptions
from selfspec.eval.record import GUESSES, NONE, PromptInfo, Record, RecordInfo
from selfspec.eval.suites import Question
from selfspec.heads.confidence import likeliest
from selfspec.heads.exit_heads import ExitHeads, check_exit_layers
from selfspec.heads.judge import ExitJudge
from selfspec.options import Exit

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

    @property
    def token(self) -> int:
        """The best."""
        return self.tokens[0]

    @property
    def confidence(self) -> list[float]:
        """By alpha, of the best."""
        return [chances[0] for chances in self.chances]


@dataclass
class Nodes:
    """Nodes of all prompts so far, in the order in which they were entered."""

    tokens: list[list[int]] = field(default_factory=list)
    confidence: list[list[list[float]]] = field(default_factory=list)
    children: list[list[int]] = field(default_factory=list)
    guesses: list[list[int]] = field(default_factory=list)
    chances: list[list[list[float]]] = field(default_factory=list)
    behind: list[list[int]] = field(default_factory=list)

    def add(self, said: Sequence[_Said], *, trees: bool) -> int:
        """A node without children yet. `trees`: the first column's further guesses count."""
        self.tokens.append([entry.token for entry in said])
        self.confidence.append([entry.confidence for entry in said])
        self.children.append([NONE] * len(said))
        self.guesses.append(said[0].tokens if trees else [])
        self.chances.append(said[0].chances if trees else [[] for _ in said[0].chances])
        self.behind.append([NONE] * len(self.guesses[-1]))
        return len(self.tokens) - 1


class Reach(NamedTuple):
    """How far branches are followed."""

    drafts: int
    """W_max of the widest setting to be replayed."""
    threshold: float
    """Its lowest tau."""
    trees: bool
    """Whether the first exit layer is the embedding, and the model runs trees."""


class Explorer:
    """A drafter that looks and proposes nothing, so that decoding stays plain.

    A right draft leads to the next place's root: the same tokens have the same hidden states. Only
    for heads that read deep states it does not: what they read there is what the head before them
    computed, so all their drafts, right ones too, have nodes of their own, by exit layer.
    """

    def __init__(
        self,
        heads: ExitHeads,
        judges: Sequence[ExitJudge],
        reach: Reach,
        nodes: Nodes,
        answer: Sequence[int],
        end_tokens: Collection[int],
    ) -> None:
        """`judges`: one per alpha. Nodes are added to `nodes`; `answer` is what will be decoded."""
        self.roots: list[int] = []
        """By place; the last token of an answer has none."""
        self._heads = heads
        self._judges = judges
        self._reach = reach
        self._nodes = nodes
        self._answer = answer
        self._end_tokens = frozenset(end_tokens)
        self._trees = reach.trees

    def draft(self, state: DecodeState, limit: int, watch: Stopwatch) -> Steps[Draft]:  # noqa: ARG002  # the protocol's
        """No tokens; the state is left as it was found."""
        place = len(self.roots)
        room = min(limit, self._reach.drafts)
        root = NONE
        if room > 0:
            right = None if self._heads.reads_deep else self._answer[place + 1]
            deep = known_deep(self._heads, state)
            paths = [1.0] * len(self._judges)
            root = self._look(state, self._answer[place], deep, room, right, paths)
            state.hidden.clear()
        if place > 0 and not self._heads.reads_deep:
            self._lead(self.roots[-1], self._answer[place], root)
        self.roots.append(root)
        return ready(Draft())

    def _lead(self, node: int, right: int, root: int) -> None:
        """Lead the right drafts of the place before to this place's root."""
        for tokens, children in (
            (self._nodes.tokens[node], self._nodes.children[node]),
            (self._nodes.guesses[node], self._nodes.behind[node]),
        ):
            for column, token in enumerate(tokens):
                if token == right:
                    children[column] = root

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
        held = state.lease.length(0)
        said = self._ask(state, token, deep)
        node = self._nodes.add(said, trees=self._trees)
        found: dict[tuple[int, int], int] = {}

        def follow(column: int, rank: int, paths: Sequence[float]) -> int:
            draft = said[column].tokens[rank]
            if room == 1 or draft == right or draft in self._end_tokens:
                return NONE
            branch = (column if self._heads.reads_deep else 0, draft)
            if branch not in found:
                features = said[column].features
                found[branch] = self._look(state, draft, features, room - 1, None, paths)
            return found[branch]

        for rank in range(len(said[0].tokens) if self._trees else 0):
            ways = [path * by[rank] for path, by in zip(paths, said[0].chances, strict=True)]
            if max(ways) >= LEAST_SAID:
                self._nodes.behind[node][rank] = follow(0, rank, ways)
        for column, entry in enumerate(said):
            if max(entry.confidence) >= self._reach.threshold:
                ways = [0.0] * len(paths)
                if column == 0 and self._trees:
                    both = zip(paths, entry.confidence, strict=True)
                    ways = [path * sure for path, sure in both]
                self._nodes.children[node][column] = follow(column, 0, ways)
        state.lease.truncate(held)
        return node

    def _ask(self, state: DecodeState, token: int, deep: Tensor | None) -> list[_Said]:
        """Run one token's row up to the deepest exit layer; what each says of the next token."""
        state.hidden.clear()  # rows of other branches; their keys and values stay
        state.hidden.push(state.backbone.embed(state.ids.new_tensor([token])))
        said = []
        for boundary, layer in enumerate(state.hidden.schedule.depths[1:-1]):
            hidden = alone(state.hidden.advance(boundary))[-1:]
            head = self._heads[layer]
            features = head.features(hidden, deep)
            logits = head.unembed(features)
            count = GUESSES if self._trees and layer == 0 else 1
            made = [likeliest(logits, judge.temperature(layer), count) for judge in self._judges]
            best = head.to_target_ids(made[0][0]).float()
            tokens, *chances = torch.cat([best, *(found for _, found in made)]).tolist()
            said.append(_Said([*map(int, tokens)], chances, features))
        return said


Show = Callable[[int, int, str], None]
"""Called with prompts done, prompts in all, and words."""


def record(
    speculator: Speculator, questions: Sequence[Question], options: RecordOptions, show: Show
) -> Record:
    """Decode all turns of `questions` greedily and note what any setting would do there.

    Without heads that is drafts from text already seen, for which nothing is noted but the text.
    Raises HeadsNotFound for exit layers without heads, InvalidOption for those that heads lack, and
    for a model whose own settings make greedy decoding more than the most likely token.
    """
    recorder = Recorder(speculator, options)
    for done, question in enumerate(questions):
        show(done, len(questions), question.id)
        recorder.question(question)
    show(len(questions), len(questions), f"{len(recorder.nodes.tokens)} nodes")
    return recorder.record()


class Recorder:
    """Collects prompts into one Record."""

    def __init__(self, speculator: Speculator, options: RecordOptions) -> None:
        """Raises HeadsNotFound for exit layers without heads, InvalidOption where they lack one."""
        heads, layers = speculator.heads, options.exit_layers or ()
        if heads is not None:
            layers = layers or heads.config.exit_layers
            check_exit_layers(layers, heads.config.exit_layers)
        elif layers:
            raise HeadsNotFound(
                f"exit layers {list(layers)} without exit heads. Give --heads, or leave them out"
            )
        self.nodes = Nodes()
        self._speculator = speculator
        self._heads = heads
        floor = options.min_threshold or _FLOORS[len(layers) == 1]
        self._options = options
        trees = layers[:1] == (0,) and speculator.backbone.runs_trees
        self._reach = Reach(options.max_draft_tokens, floor, trees)
        self._layers = layers
        self._end_tokens: set[int] = set()
        self._prompts: list[PromptInfo] = []
        self._contexts: list[int] = []
        self._answers: list[int] = []
        self._roots: list[int] = []

    def question(self, question: Question) -> None:
        """All turns of a question; each sees the plain answers to those before it."""
        messages: list[dict[str, str]] = []
        for number, turn in enumerate(question.turns, start=1):
            messages.append({"role": "user", "content": turn})
            answer = self.prompt(messages, question.id, question.task, number)
            messages.append({"role": "assistant", "content": answer})

    def prompt(self, prompt: Prompt, name: str, task: str, turn: int) -> str:
        """One prompt; returns the answer's text."""
        speculator = self._speculator
        options: Any = {"max_new_tokens": self._options.max_new_tokens, "do_sample": False}
        call = speculator.call(prompt, options)
        asked = call.request.only()
        if not asked.sampler.is_plain_greedy or asked.stop.criteria is not None:
            names = [type(p).__name__ for p in asked.sampler.processors] or ["stopping criteria"]
            raise InvalidOption(
                f"the model's generation_config asks for {', '.join(names)}, which cannot be "
                "replayed. Leave it out there"
            )
        plain = speculator.generate(prompt, **options, speculate=False)
        answer, ends = plain.token_ids, asked.stop.end_tokens
        start = asked.ids.shape[1]
        self._contexts += asked.ids[0, asked.pad :].tolist()
        self._answers += answer
        self._roots += self._explored(call, answer)
        self._end_tokens |= set(ends)
        self._prompts.append(
            PromptInfo(
                id=name,
                task=task,
                turn=turn,
                prompt_tokens=start - asked.pad,
                new_tokens=len(answer),
                max_new_tokens=asked.stop.max_length - start,
            )
        )
        return plain.text

    def _explored(self, call: Call, answer: Sequence[int]) -> list[int]:
        """The root of each place of an answer, its nodes noted; without heads there are none."""
        if self._heads is None:
            return [NONE] * len(answer)
        asked = call.request.only()
        looking = replace(call.speculation, speculate=True, exit=Exit(layers=self._layers))
        state = self._speculator.runtime.state(asked, looking)
        explorer = Explorer(
            self._heads,
            self._judges(self._heads),
            self._reach,
            self.nodes,
            answer,
            asked.stop.end_tokens,
        )
        for _ in rounds(state, explorer, GreedyMatch(asked.sampler), asked.stop, Stopwatch()):
            pass
        return [*explorer.roots, NONE]

    def _judges(self, heads: ExitHeads) -> list[ExitJudge]:
        """One per alpha."""
        return [
            ExitJudge(
                self._speculator.backbone.num_layers,
                dict.fromkeys(self._layers, 1.0),
                alpha,
                {int(layer): value for layer, value in heads.config.temperatures.items()},
            )
            for alpha in self._options.anneal_strengths
        ]

    def record(self) -> Record:
        """Everything so far."""
        backbone, options = self._speculator.backbone, self._options
        cost = prices.Unmeasured.of(backbone)
        known = conditions(backbone, self._heads)
        shape = len(self.nodes.tokens), len(self._layers)
        guesses = max(map(len, self.nodes.guesses), default=0)
        return Record(
            info=RecordInfo(
                base_model=self._speculator.label,
                base=known["base"],
                heads=known["heads"],
                dtype=known["dtype"],
                executor=known["executor"],
                num_layers=backbone.num_layers,
                exit_layers=tuple(self._layers),
                anneal_strengths=tuple(options.anneal_strengths),
                min_threshold=self._reach.threshold,
                max_draft_tokens=self._reach.drafts,
                end_tokens=tuple(sorted(self._end_tokens)),
                row_costs=cost.rows,
                head_cost=cost.head,
            ),
            prompts=tuple(self._prompts),
            contexts=np.array(self._contexts, np.int32),
            answers=np.array(self._answers, np.int32),
            roots=np.array(self._roots, np.int32),
            tokens=np.array(self.nodes.tokens, np.int32).reshape(shape),
            confidence=np.array(self.nodes.confidence, np.float32).reshape(
                *shape, len(options.anneal_strengths)
            ),
            children=np.array(self.nodes.children, np.int32).reshape(shape),
            guesses=np.array(self.nodes.guesses, np.int32).reshape(shape[0], guesses),
            chances=np.array(self.nodes.chances, np.float32).reshape(
                shape[0], len(options.anneal_strengths), guesses
            ),
            behind=np.array(self.nodes.behind, np.int32).reshape(shape[0], guesses),
        )
