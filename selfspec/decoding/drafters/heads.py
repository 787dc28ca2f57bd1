"""Drafts from exit heads: trees of a head's guesses, and chains along the hidden cache.

Drafts do not change the text, so low precision suffices and fewer bytes read make them faster:
`pack` makes 8-bit copies of the heads' weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from selfspec.decoding.acceptance import Draft
from selfspec.decoding.drafters.base import ROOT, ChoosingDrafter, Drafting, DraftWriter, Likeliest
from selfspec.decoding.sampling import DraftToken, Sampler
from selfspec.decoding.state import Ask, AskAhead, DecodeState, Embed, Steps, do_alone
from selfspec.decoding.stats import EXIT, Ended, Stopwatch
from selfspec.heads.attending import AttendingHeads, Attention
from selfspec.heads.exit_heads import ExitHeads
from selfspec.heads.heads import Answer, ExitHead, ExitJudge, Parts, top_probability
from selfspec.model.backbone import Backbone
from selfspec.model.fused import HIDDEN, Operation, Program
from selfspec.model.kv import upload
from selfspec.model.recipe import Activation, Norm, norm_of, why_unusual
from selfspec.model.weights import CompiledLinear, QuantisedWeight, in_8_bits

# --- heads on the embedding


class HeadGuesser:
    """Asks the head of exit layer 0, which reads embeddings: no layer runs before verification."""

    source = EXIT
    asks_once = False

    def __init__(self, heads: ExitHeads, judge: ExitJudge, sampler: Sampler, count: int) -> None:
        self._heads, self._head = heads, heads.first  # the head of exit layer 0
        self._judge, self._temperature = judge, judge.temperatures[0]
        self._sampler, self._count = sampler.for_drafts(), count

    @torch.inference_mode()
    def warm_up(self, backbone: Backbone) -> None:
        """Ask about a few rows, so that no request waits while CUDA graphs are captured."""
        for count in (1, 2, 4, 8):
            rows = backbone.embed_listed([0] * count)
            deep = rows if self._heads.reads_deep else None
            do_alone(Ask(backbone, self._head, rows, deep, self._temperature, self._count))

    def begin(self, state: DecodeState) -> None:
        self._state = state
        self._deep = state.deep if self._heads.reads_deep else None  # beside the newest embedding
        self._features: dict[int, Tensor] = {}  # the head's features of each asked token, [1, d]

    def ask(self, draft: Draft, nodes: Sequence[int], watch: Stopwatch) -> Steps[list[Likeliest]]:
        """One linear layer over all of `nodes`, and one device read."""
        hidden, deep = yield from self._rows(draft, nodes)
        watch.lap("draft")
        ask = Ask(self._state.backbone, self._head, hidden, deep, self._temperature, self._count)
        answer: Answer = yield ask
        self._features |= zip(nodes, answer.features.split(1), strict=True)
        guesses = [self._guesses(draft, node, answer, row) for row, node in enumerate(nodes)]
        watch.lap("heads")
        return guesses

    def _rows(self, draft: Draft, nodes: Sequence[int]) -> Steps[tuple[Tensor, Tensor | None]]:
        (newest,) = self._state.committed(-1)
        ids = [newest if node == ROOT else draft.proposed[node].token for node in nodes]
        hidden: Tensor = yield Embed(self._state.backbone, ids)
        if not self._heads.reads_deep or nodes[0] == ROOT:
            return hidden, self._deep
        # the head's own features one token earlier
        return hidden, torch.cat([self._features[draft.proposed[node].parent] for node in nodes])

    def _guesses(
        self, draft: Draft, node: int, answer: Answer, row: int, count: int | None = None
    ) -> Likeliest:
        tokens, chances = answer.tokens[row][:count], answer.chances[row][:count]
        if not self._judge.exits(chances[0], 0):
            return Likeliest([], [])
        if self._sampler.is_plain_greedy:
            return Likeliest(tokens, chances)
        ids, path, logits = self._state.ids, draft.tokens_to(node), answer.logits[row : row + 1]
        sampler, place, drafted = self._sampler, ids.shape[1] + len(path), self._head.draft_ids
        if not sampler.reads_scores_alone:
            ids, drafted = torch.cat([ids, upload(path, ids.device)[None]], dim=1), None
            logits = self._head.to_target_logits(logits)
        doubt = self._temperature
        if sampler.seed is not None and sampler.do_sample:
            probs, drafted = sampler.candidates(ids, logits, drafted)
            return Likeliest(*sampler.likely_draws(probs, place, len(tokens), doubt, drafted))
        scores = sampler.scores(ids, logits)[0]
        best = (scores / doubt).softmax(-1).topk(min(len(tokens), len(scores)))
        likeliest = best.indices if drafted is None else drafted[best.indices]
        return Likeliest(likeliest.tolist(), best.values.tolist())


class AttendingGuesser(HeadGuesser):
    """Trees of attending heads (EAGLE-2, Li et al. 2024): their layer runs once per level.

    A token's row is combined with the layer's output at its parent, and attends to its own path.
    """

    def begin(self, state: DecodeState) -> None:
        super().begin(state)
        self._text = cast("Attention", state.attention)
        self._places = {ROOT: -1}  # each token's index among those read this round
        self._outputs: dict[int, Tensor] = {}

    def ask(self, draft: Draft, nodes: Sequence[int], watch: Stopwatch) -> Steps[list[Likeliest]]:
        """Guesses, after reading newly verified tokens; none if the layer has nothing to read."""
        if not self._outputs:
            root = yield from self._text.read(self._state.committed(0))
            if root is None:
                return [Likeliest([], []) for _ in nodes]
            self._outputs[ROOT] = root
        return (yield from super().ask(draft, nodes, watch))

    def _rows(self, draft: Draft, nodes: Sequence[int]) -> Steps[tuple[Tensor, Tensor | None]]:
        if nodes[0] != ROOT:
            rows = [draft.proposed[node] for node in nodes]
            parent_outputs = torch.cat([self._outputs[row.parent] for row in rows])
            places = [self._places[row.parent] for row in rows]
            outputs = yield self._text.draft([row.token for row in rows], parent_outputs, places)
            for node, output in zip(nodes, outputs.split(1), strict=True):
                self._places[node] = len(self._places) - 1
                self._outputs[node] = output
        return torch.cat([self._outputs[node] for node in nodes]), None


# --- Medusa: each head guesses one token further ahead, all from one verified state

CHOICES: dict[tuple[int, ...], int] = {
    (): 10,
    **dict(zip([(rank,) for rank in range(10)], [10, 7, 3, 2, *[1] * 6], strict=True)),
    **dict(zip([(0, rank) for rank in range(8)], [10, 3, 2, *[1] * 5], strict=True)),
    **{(1, 0): 2, (2, 0): 1, (0, 0, 0): 2},
}
"""Number of guesses after a path of ranks: the 63 nodes of `mc_sim_7b_63` (FasterDecoding/Medusa,
medusa/model/medusa_choices.py), chosen by how often the ranks of Vicuna 7B's heads were right.
No path is longer than four tokens, so a fifth head is not used."""


class MedusaGuesser(HeadGuesser):
    """Asks all heads once a round; the guesses of head k (from 0) follow every path of k tokens.

    Medusa-1 (Cai et al. 2024) verifies the whole tree in every round; here only the part that pays.
    With sampling it accepts tokens that are typical of the model; here accepted tokens have the
    model's distribution.
    """

    asks_once = True

    def begin(self, state: DecodeState) -> None:
        super().begin(state)
        self._answer: Answer | None = None

    def ask(self, draft: Draft, nodes: Sequence[int], watch: Stopwatch) -> Steps[list[Likeliest]]:
        """Guesses; none without a known state, or after paths as long as the number of heads."""
        if self._answer is None and self._deep is not None:
            count = min(self._count, CHOICES[()])
            self._answer = yield AskAhead(self._heads, self._deep, self._temperature, count)
            watch.lap("heads")
        return [self._guesses_after(draft, node) for node in nodes]

    def _guesses_after(self, draft: Draft, node: int) -> Likeliest:
        # each token's rank among its siblings; tokens of the trunk come first
        parents = draft.parents
        ranks = tuple(parents[:at].count(parents[at]) for at in draft.path(node))
        count, place = CHOICES.get(ranks, 0), len(ranks)
        if self._answer is None or place >= len(self._answer.tokens) or count == 0:
            return Likeliest([], [])
        return self._guesses(draft, node, self._answer, place, count)


# --- rows run through the hidden cache and wait where they exited


class _Exit(NamedTuple):
    choice: DraftToken
    confidence: float  # the controller's signal; the judge's own confidence if it has none
    beside: Tensor | None  # [1, d]: state that the head reads beside the next token's row, if any


class ExitDrafter(ChoosingDrafter):
    """Drafts from exit heads on intermediate layers: SpecBound's BSCS, section 2.3.

    Each token runs segment by segment until the judge is confident; a token that is not confident
    at the last exit layer in use (D_max) ends the draft, and so does the W_max-th draft.
    """

    unsure: ClassVar[Ended] = "depth"  # why a draft ends if no head is confident

    def __init__(self, heads: ExitHeads, judge: ExitJudge, drafting: Drafting) -> None:
        super().__init__(drafting)
        self.heads, self._judge = heads, judge

    def draft(self, state: DecodeState, limit: int, watch: Stopwatch) -> Steps[Draft]:
        """Up to min(limit, W_max) tokens; the rows that gave them wait where they exited."""
        writer = DraftWriter(self, limit, source=EXIT)
        beside = state.deep if self.heads.reads_deep else None
        ids = state.ids
        while writer.room:
            early_exit = yield from self._first_exit(state, ids, beside, writer.draft, watch)
            if early_exit is None:
                writer.stop(self.unsure)
                break
            writer.add(early_exit.choice, early_exit.confidence)
            ids, beside = self.sampler.with_token(ids, early_exit.choice.token), early_exit.beside
        return writer.draft

    def _first_exit(
        self, state: DecodeState, ids: Tensor, beside: Tensor | None, draft: Draft, watch: Stopwatch
    ) -> Steps[_Exit | None]:
        """The draft of the first confident layer; None: difficult token.

        Whether to exit is decided before a token is drawn, since a decision by the drawn token
        would bias the output. `draft` counts the heads that are asked.
        """
        newest = draft.tokens[-1:] or state.committed(-1)
        state.hidden.push((yield Embed(state.backbone, newest)))
        for boundary, layer in enumerate(state.hidden.depths[1:-1]):
            hidden = yield from state.hidden.advance(boundary)
            watch.lap("draft")
            head = self.heads[layer]
            draft.heads += 1
            # the row being drafted
            answer: Answer = yield self._question(state.backbone, head, layer, hidden[-1:], beside)
            early_exit = self._exit(head, answer, layer, ids)
            watch.lap("heads")
            if early_exit is not None:
                return early_exit
        return None

    @torch.inference_mode()
    def warm_up(self, backbone: Backbone) -> None:
        """Ask each head about one row, so that no request waits while CUDA graphs are captured."""
        row = backbone.embed(upload([0], backbone.device))
        for layer in self._judge.thresholds:
            head = cast("ExitHead", self.heads.by_layer[str(layer)])
            do_alone(self._question(backbone, head, layer, row, row if head.reads_deep else None))

    def _question(
        self, backbone: Backbone, head: ExitHead, layer: int, hidden: Tensor, deep: Tensor | None
    ) -> Ask:
        signal = self.controller.signal
        if signal is top_probability:  # the judge computes this anyway
            signal = None
        return Ask(backbone, head, hidden, deep, self._judge.temperatures[layer], 1, signal)

    def _exit(self, head: ExitHead, answer: Answer, layer: int, ids: Tensor) -> _Exit | None:
        (tokens,), (chances,) = answer.tokens, answer.chances
        if not self._judge.exits(chances[0], layer):
            return None
        confidence = answer.signals[0] if answer.signals else chances[0]
        if self.sampler.is_plain_greedy and not self.beliefs:
            choice = DraftToken(tokens[0])
        else:
            wide = head.to_target_logits(answer.logits)
            choice = self.sampler.choose(ids, wide, believe=self.beliefs)
        beside = answer.features if self.heads.reads_deep else None
        return _Exit(choice._replace(layer=layer), confidence, beside)


class AttendingDrafter(ExitDrafter):
    """Chains of attending heads: a row is combined with the previous row's output (EAGLE-3).

    The judge of exit layer 0 ends a draft at a token that is not confident.
    """

    heads: AttendingHeads
    unsure = "unsure"

    def _first_exit(
        self, state: DecodeState, ids: Tensor, beside: Tensor | None, draft: Draft, watch: Stopwatch
    ) -> Steps[_Exit | None]:
        """The layer's draft; no rows wait. None: not confident, or the layer has read nothing."""
        text, head = cast("Attention", state.attention), self.heads.head
        if beside is None:
            output = yield from text.read(state.committed(0))
        else:
            output = yield text.draft(draft.tokens[-1:], beside, [len(draft.proposed) - 2])
        if output is None:
            return None
        draft.heads += 1
        answer: Answer = yield self._question(state.backbone, head, 0, output, None)
        watch.lap("heads")
        early_exit = self._exit(head, answer, 0, ids)
        return None if early_exit is None else early_exit._replace(beside=output)


# --- exit heads in compiled code, from 8-bit copies of their weights


@torch.no_grad()
def pack(heads: ExitHeads) -> None:
    """Make heads cheaper to ask, on a CPU with compiled code.

    8-bit copies agree with the model as often: at 46.2 % of 6,163 positions, SmolLM2-135M's own
    heads before and after. Later changes of weights do not reach the copies. Heads that multiply by
    all rows of an unquantised unembedding are left unchanged, since a copy would be large.
    """
    if isinstance(heads, AttendingHeads):
        with suppress(ValueError):  # no compiler
            _pack_layer(heads)
    shared: dict[int, CompiledLinear] = {}  # most heads of a model share their rows
    for head in heads.by_layer.values():
        assert isinstance(head, ExitHead)  # noqa: S101  # a ModuleDict of them
        rows = head.rows
        small = head.draft_ids is not None or isinstance(rows.detach(), QuantisedWeight)
        if not small or why_unusual(rows) is not None:
            continue
        with suppress(ValueError):  # no compiler, or an unsupported dtype or norm
            if id(rows) not in shared:
                shared[id(rows)] = _light_linear(rows, head.bias)
            head.packed = PackedHead(head, shared[id(rows)])


def _pack_layer(heads: AttendingHeads) -> None:
    """Pack linear layers; attention itself reads no weights. ValueError without a compiler."""
    for linear in heads.parts.modules():
        if isinstance(linear, nn.Linear) and why_unusual(linear.weight) is None:
            light = _light_linear(linear.weight, linear.bias)
            heads.nbytes += light.nbytes - linear.weight.nbytes
            linear.forward = light.__call__  # type: ignore[method-assign,assignment]  # heads are ours


class PackedHead:
    """The features of one head in one compiled call, and its draft logits in another."""

    def __init__(self, head: ExitHead, rows: CompiledLinear) -> None:
        """`rows`: the head's unembedding rows. Raises ValueError if it cannot be compiled."""
        self.rows, width = rows, rows.in_features
        self._program = Program(rows.dtype, width + head.deep_size)
        self._features = self._program.buffer("features", width)
        self._program.add_layer(list(self._operations(head.parts, head.deep_size)))
        self._logits = self._program.buffer("logits", rows.out_features)
        self._program.add_layer([self._program.linear(self._features, self._logits, rows)])

    def features(self, hidden: Tensor, beside: Tensor) -> Tensor:
        rows = torch.cat([hidden, beside], dim=-1)  # a copy: norms overwrite their input
        (features,) = self._program.transform(rows.reshape(-1, rows.shape[-1]), self._features)
        return features.view_as(hidden)

    def ask(self, hidden: Tensor, beside: Tensor) -> tuple[Tensor, Tensor]:
        rows, buffers = torch.cat([hidden, beside], dim=-1), (self._features, self._logits)
        features, logits = self._program.transform(rows, *buffers, layers=2)
        return features, logits

    def _operations(self, parts: Parts, deep_size: int) -> Iterator[Operation]:
        program, output, width = self._program, self._features, self.rows.in_features
        alone = parts.direct is None and parts.inner is None
        if alone or not isinstance(parts.norm, nn.Identity):
            norm = norm_of(parts.norm, width, self.rows.dtype)
            yield program.norm(HIDDEN, output if alone else HIDDEN, norm)
        if alone:
            return
        scale = Norm(torch.ones(width), None, torch.finfo(torch.float32).eps, False, False)
        for state in range(2 * width, width + deep_size, width):  # after the last layer's output
            yield program.norm(HIDDEN, HIDDEN, scale, at=state)
        terms = 0.0  # 1: the output buffer already holds a term
        if parts.inner is not None:
            inner, outer = _light_linear(parts.inner.weight, parts.inner.bias), parts.outer
            activations = output if outer is None else program.buffer("opened", inner.out_features)
            yield program.linear(HIDDEN, activations, inner)
            yield program.activate(activations, activations, Activation.SILU, gated=False)
            if outer is not None:
                yield program.linear(activations, output, _light_linear(outer.weight, outer.bias))
            terms = 1.0
        if parts.direct is not None:
            direct = _light_linear(parts.direct.weight, parts.direct.bias)
            yield program.linear(HIDDEN, output, direct, adds=terms)
        if not deep_size:
            yield program.add(HIDDEN, output, 1.0)


def _light_linear(weight: Tensor, bias: Tensor | None) -> CompiledLinear:
    """A linear layer with 8-bit weights. Raises ValueError if it cannot be compiled."""
    return CompiledLinear(in_8_bits(weight.detach()), bias)
