"""SpecBound's formula beside measured speed-ups, where heads are as good as in large models.

    python -m eval.papers.specbound --output eval/results/dialled

Synthetic: layers that add nothing are put behind the first ones, so an exit before them sees what
the last layer gives; then a head there is made wrong at a chosen share of positions. That shows
what the runtime does with good heads, and nothing about how good heads are. Acceptance, depth and
draft length are turned; plain decoding and speculation are timed in turns. Nothing else should run
on the machine. Writes `runs.jsonl`, `summary.json` and `table.md`.

The formula, for k drafts per round, each kept with chance a if those before it were, and exits
after D of L layers: a round commits (1 - a^(k+1)) / (1 - a) tokens and costs k D / L + (L - D) / L
plain steps. It leaves out the heads, and one row: the last draft too runs through the first D
layers, or there would be no token behind it. The complete formula has both.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, NamedTuple

import pandas as pd
import torch
import typer
from torch import Tensor, nn
from transformers import PreTrainedModel

from eval import lab
from selfspec.api.speculator import Speculator
from selfspec.config import SpeculationOptions
from selfspec.errors import InvalidOption, UnsupportedModel
from selfspec.eval.results import SIX_TASKS, Question, load_suite
from selfspec.files import write
from selfspec.heads.exit_heads import ExitHeads
from selfspec.heads.heads import DraftVocabulary, LogitLensHead
from selfspec.model.backbone import Backbone
from selfspec.model.parts import Unembedding, text_config
from selfspec.options import Exit

NOTE = """\
Synthetic: a model that answers early by construction, and a head that is wrong where it is told to
be. This shows what the runtime does where heads are good, not how good heads are. D / L: depth of
the exit; k: drafts per round; a: chance that a draft is kept when those before it are. Speed-up
over plain decoding on the same runtime, after the prompt's pass. The formula is SpecBound's, at the
a that was measured: heads cost nothing, and no row is run for the token behind the last draft. The
complete formula has both, so what is missing to 100 % there are rows that are not free, and
bookkeeping.

"""


def main(
    output: lab.Output,
    model: lab.Model = None,
    dtype: str = "bfloat16",
    layers: Annotated[int, typer.Option(help="D: layers ahead of the exit.")] = 30,
    extra_layers: Annotated[str, typer.Option(help="L - D, that add nothing: N[,N..].")] = "90,30",
    max_draft_tokens: Annotated[str, typer.Option(help="k, per round: N[,N..].")] = "2,4,6,8",
    wrong_shares: lab.Numbers = "0,0.1,0.2,0.3",
    suite: lab.Suite = SIX_TASKS,
    limit: lab.Limit = 6,
    max_new_tokens: lab.NewTokens = 64,
    repeats: lab.Repeats = 3,
    draft_vocab_size: int = 4096,
    seed: int = 0,
) -> None:
    """Measure, then write.

    A draft vocabulary of 4,096 costs two thirds of a layer of the default model, as 32,000 do in a
    model of 7B parameters.
    """
    base = lab.loaded(model, dtype=dtype, executor="generic")
    questions, runs = load_suite(suite, limit=limit), list[Run]()
    for extra in lab.counts(extra_layers):
        rig = Rig(base, questions, layers, extra, draft_vocab_size, max_new_tokens, seed)
        dials = [
            Dial(rig.depth_ratio, width, share)
            for width in lab.counts(max_draft_tokens)
            for share in lab.shares(wrong_shares)
        ]
        runs += rig.runs(dials, repeats, seed)
    found = points(runs)
    output.mkdir(parents=True, exist_ok=True)
    write(output / "runs.jsonl", "".join(json.dumps(asdict(run)) + "\n" for run in runs))
    lab.finish(output, {"points": found.to_dict("records")}, NOTE + as_table(found))


# --- a model that answers early -------------------------------------------------------------------

_PLACES = 1 << 16
"""Rows of the table that says where a head is wrong."""

_SPIKE = 1e4
"""Added to the logit of a wrong token: more than any logit."""


def early_model(model: PreTrainedModel, layers: int, extra: int) -> PreTrainedModel:
    """A copy of the first `layers` layers of `model` and `extra` layers that add nothing.

    Those have weights of their own, so they cost what layers cost; only their two output
    projections are zero. No token ends a text. Raises UnsupportedModel, InvalidOption.
    """
    deep = copy.deepcopy(model)
    config, decoder = text_config(deep), deep.get_decoder()
    if not 1 <= layers <= len(decoder.layers):
        raise InvalidOption(f"{layers} layers asked for, the model has {len(decoder.layers)}")
    kept, total = list(decoder.layers[:layers]), layers + extra
    silent = [_silent(kept[-1], index) for index in range(layers, total)]
    decoder.layers = nn.ModuleList([*kept, *silent])
    config.num_hidden_layers = total
    if (kinds := getattr(config, "layer_types", None)) is not None:
        config.layer_types = [*kinds[:layers], *itertools.repeat(kinds[layers - 1], extra)]
    if deep.generation_config is not None:
        deep.generation_config.eos_token_id = None
    return deep


def _silent(layer: Any, index: int) -> nn.Module:
    """A copy of `layer`, at place `index`, that passes its input on."""
    twin = copy.deepcopy(layer)
    try:
        outputs = (twin.self_attn.o_proj, twin.mlp.down_proj)
    except AttributeError as error:
        raise UnsupportedModel(f"layers without o_proj and down_proj: {error}") from error
    for projection in outputs:
        for weight in projection.parameters():
            nn.init.zeros_(weight)
    for module in twin.modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx = index
    return twin  # type: ignore[no-any-return]  # a layer is untyped here


class DialledHead(LogitLensHead):
    """The model's own norm and unembedding, made to prefer a wrong token now and then.

    Where, and which token, is a function of the hidden state's bits and the seed: the same at
    every run, independent from position to position, and the more places the larger
    `wrong_share`, each in addition to those of a smaller one.
    """

    def __init__(
        self, unembedding: Unembedding, vocabulary: DraftVocabulary, seed: int = 0
    ) -> None:
        super().__init__(unembedding, vocabulary)
        self.wrong_share = 0.0
        device, size = unembedding.weight.device, unembedding.weight.shape[1]
        generator = torch.Generator().manual_seed(seed)
        whole = torch.iinfo(torch.int64)
        factors = torch.randint(whole.min, whole.max, (size,), generator=generator)
        self._factors = factors.to(device)  # [d]
        self._chance = torch.rand(_PLACES, generator=generator).to(device)
        victims = torch.randint(len(self.rows), (_PLACES,), generator=generator)
        self._victims = victims.to(device)

    def unembed(self, features: Tensor) -> Tensor:
        """[.., d] -> draft logits [.., V_draft], float32."""
        logits = super().unembed(features)
        place = self._place(features)
        spike = (self._chance[place] < self.wrong_share).to(logits.dtype) * _SPIKE
        return logits.scatter_add_(-1, self._victims[place][..., None], spike[..., None])

    def _place(self, features: Tensor) -> Tensor:
        """A hash of each row's bits, [.., d] -> 0.._PLACES-1, [..]."""
        whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[features.element_size()]
        mixed = (features.contiguous().view(whole).long() * self._factors).sum(-1)
        return (mixed >> 40) & (_PLACES - 1)  # products are mixed best in their upper bits


def dialled_heads(
    backbone: Backbone, layer: int, draft_ids: Tensor | None = None, seed: int = 0
) -> tuple[ExitHeads, DialledHead]:
    """Heads of one exit at `layer`, and that head, whose `wrong_share` is to be dialled."""
    heads = lab.untrained(backbone, layer, "logit-lens", draft_ids)
    vocabulary = DraftVocabulary.of(backbone.unembedding, draft_ids)
    head = DialledHead(backbone.unembedding, vocabulary, seed)
    heads.by_layer[str(layer)] = head
    return heads.eval(), head


def small_vocabulary(tokens: Iterable[int], size: int, vocab_size: int) -> Tensor:
    """`size` ids, rising: all of `tokens`, then the lowest others. Raises InvalidOption.

    A head over these alone costs little beside a layer, as a full one does in a large model.
    """
    needed = set(tokens)
    if not len(needed) <= size <= vocab_size:
        raise InvalidOption(
            f"a draft vocabulary of {size} for {len(needed)} different tokens of {vocab_size}"
        )
    others = (token for token in range(vocab_size) if token not in needed)
    return torch.tensor(sorted({*needed, *itertools.islice(others, size - len(needed))}))


# --- timed ----------------------------------------------------------------------------------------


class Dial(NamedTuple):
    """One setting: D / L, drafts per round, share of wrong ones."""

    depth_ratio: float
    max_draft_tokens: int
    wrong_share: float


@dataclass(frozen=True, kw_only=True)
class Run:
    """One timed decoding. Seconds are those after the prompt's pass."""

    prompt: str
    depth_ratio: float
    dial: Dial | None
    """None: plain decoding of the same deep model."""
    new_tokens: int
    equal: bool
    """To the text of plain decoding."""
    decode_s: float
    heads_s: float
    """Part of these seconds: heads, judge, and reading the draft from the device."""
    drafts: tuple[int, ...]
    """Draft tokens of each round; the last of a text may have room for fewer."""
    accepted: int
    tried: int
    """Drafts whose predecessors in the round were all kept."""


class Rig:
    def __init__(
        self,
        base: Speculator,
        questions: Sequence[Question],
        layers: int,
        extra: int,
        draft_vocab_size: int,
        new_tokens: int,
        seed: int,
    ) -> None:
        backbone = Backbone(early_model(base.model, layers, extra))
        # a threshold that every token reaches: all drafts leave at the one exit
        options = SpeculationOptions(exit=Exit(threshold=1e-6), speculate=False, never_slower=False)
        plain = Speculator(backbone, base.tokenizer, None, base.label, options)
        self.depth_ratio = layers / (layers + extra)
        self._new_tokens = new_tokens
        self._prompts = {q.id: q.turns[0] for q in questions}
        self._texts = {
            name: plain.generate(prompt, max_new_tokens=new_tokens, do_sample=False).token_ids
            for name, prompt in self._prompts.items()
        }
        used = itertools.chain.from_iterable(self._texts.values())
        draft_ids = small_vocabulary(used, draft_vocab_size, backbone.vocab_size)
        heads, self._head = dialled_heads(backbone, layers, draft_ids, seed)
        self._speculator = Speculator(backbone, base.tokenizer, heads, base.label, options)

    def runs(self, dials: Sequence[Dial], repeats: int, seed: int) -> Iterator[Run]:
        """Per prompt all settings, and plain decoding, in random order: drift hits all alike."""
        shuffle = random.Random(seed)
        self.timed(next(iter(self._prompts)), dials[-1])  # kernels and caches warm
        prompts = [*self._prompts] * repeats
        for prompt in lab.each(prompts, f"exit at {self.depth_ratio:.0%}", "prompts"):
            for dial in shuffle.sample([None, *dials], len(dials) + 1):
                yield self.timed(prompt, dial)

    def timed(self, prompt: str, dial: Dial | None) -> Run:
        options: Any = {"max_new_tokens": self._new_tokens, "do_sample": False}
        if dial is not None:
            self._head.wrong_share = dial.wrong_share
            drafter = f"exit:max_tokens={dial.max_draft_tokens}"
            options |= {"speculate": True, "drafter": drafter}
        stream = self._speculator.stream(self._prompts[prompt], **options)
        found = stream.drain()
        rounds = stream.rounds[1:]  # behind the prompt's pass
        return Run(
            prompt=prompt,
            depth_ratio=self.depth_ratio,
            dial=dial,
            new_tokens=len(found.token_ids),
            equal=found.token_ids == self._texts[prompt],
            decode_s=found.stats.decode_s,
            heads_s=found.stats.seconds["heads"],
            drafts=tuple(len(entry.draft_tokens) for entry in rounds),
            accepted=sum(entry.accepted for entry in rounds),
            tried=sum(min(entry.accepted + 1, len(entry.draft_tokens)) for entry in rounds),
        )


# --- the formula ----------------------------------------------------------------------------------


def points(runs: Sequence[Run]) -> pd.DataFrame:
    """A row per setting, in the order of their first runs: what it gave over all prompts.

    acceptance: a, accepted / tried. head_cost: one head, in plain steps. formula: over the rounds
    as they were, with the drafts that each had room for.
    """
    every = pd.DataFrame(map(asdict, runs)).assign(dial=[run.dial for run in runs])
    every["drafted"] = every.drafts.map(sum)
    plain = every[every.dial.isna()]
    found = []
    for dial, own in every.dropna(subset="dial").groupby("dial", sort=False):
        dial = Dial(*dial)
        base = plain[plain.depth_ratio == dial.depth_ratio]
        seconds, plain_seconds = _total(own.decode_s, own), _total(base.decode_s, base)
        plain_step = plain_seconds / _total(base.new_tokens - 1, base)
        head = _total(own.heads_s, own) / _total(own.drafted, own) / plain_step
        a, drafts = own.accepted.sum() / own.tried.sum(), own.drafts.explode().astype(int)
        tokens = sum(expected_tokens(a, k) for k in drafts)
        # without drafts the newest token's own row still runs through the shallow layers
        cost = sum(round_cost(k, dial.depth_ratio, rows=max(k, 1)) for k in drafts)
        complete = sum(round_cost(k, dial.depth_ratio, rows=k + 1, head=head) for k in drafts)
        found.append(
            dial._asdict()
            | {
                "prompts": own.prompt.nunique(),
                "equal_texts": int(own.groupby("prompt").equal.all().sum()),
                "acceptance": float(a),
                "compression_rate": float((own.new_tokens - 1).sum() / len(drafts)),
                "head_cost": float(head),
                "speed_up": float(plain_seconds / seconds),
                "formula": float(tokens / cost),
                "complete_formula": float(tokens / complete),
            }
        )
    return pd.DataFrame(found)


def _total(values: pd.Series, runs: pd.DataFrame) -> float:
    """Sum over prompts of the median over repeats."""
    return float(values.groupby(runs.prompt).median().sum())


def expected_tokens(acceptance: float, drafts: int) -> float:
    """(1 - a^(k+1)) / (1 - a): what a round commits."""
    return sum(acceptance**kept for kept in range(drafts + 1))


def round_cost(drafts: int, depth_ratio: float, *, rows: int, head: float = 0.0) -> float:
    """Plain steps per round, `rows` of them through the shallow layers alone."""
    return rows * depth_ratio + (1.0 - depth_ratio) + drafts * head


def as_table(points: pd.DataFrame) -> str:
    names = {"depth_ratio": "D / L", "max_draft_tokens": "k", "acceptance": "a"}
    names |= {"compression_rate": "CR", "speed_up": "measured", "equal_texts": "equal texts"}
    shown = points.rename(columns=names)
    for name in ("formula", "complete_formula"):
        shown[f"measured / {name}"] = points.speed_up / points[name]
    return f"{shown.to_markdown(index=False, floatfmt='.2f')}\n"


if __name__ == "__main__":
    lab.run(main)
