"""Compares SpecBound's formula with measured speed-ups, with heads as good as in large models.

    python -m eval.papers.specbound --output eval/results/dialled

Plain decoding and speculation answer in turns; nothing else should run on the machine. The same
command continues a stopped run. Writes `summary.json`, `table.md` and, in a folder for each depth,
the answers as `selfspec bench` stores them.

Synthetic: layers that add nothing follow the first ones, so an exit before them sees the output of
the last layer; the head there is then made wrong at a chosen share of positions. This shows the
speed of the runtime with good heads, not how good heads are.

D / L: depth of the exit; k: drafts per round; a: measured chance that a draft is kept if those
before it are. Speed-up is over plain decoding, after the prompt's pass. SpecBound's formula: a
round commits (1 - a^(k+1)) / (1 - a) tokens and costs k D / L + (L - D) / L plain steps. It leaves
out the heads, and one row: the last draft also runs through the first D layers, because the token
after it needs them. The complete formula has both. Rows that are not free and bookkeeping explain
its remaining difference from 100 %.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from itertools import product, starmap
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
from selfspec.eval.bench import Contender, Written, on_our_runtime
from selfspec.eval.report import frame_of
from selfspec.eval.results import SIX_TASKS, Answer, BenchOptions, Question, Run
from selfspec.heads.heads import DraftVocabulary, LogitLensHead
from selfspec.model.backbone import Backbone
from selfspec.model.parts import text_config
from selfspec.options import Exit

NOTE = (__doc__ or "")[(__doc__ or "").find("Synthetic: ") :]  # printed above the table


def main(
    output: lab.Output,
    model: lab.Model = None,
    dtype: str = "bfloat16",
    layers: Annotated[int, typer.Option(help="D: layers before the exit.")] = 30,
    extra_layers: Annotated[str, typer.Option(help="L - D: layers after it: N[,N..].")] = "90,30",
    max_draft_tokens: Annotated[str, typer.Option(help="k: drafts a round: N[,N..].")] = "2,4,6,8",
    wrong_shares: lab.Numbers = "0,0.1,0.2,0.3",
    suite: lab.Suite = SIX_TASKS,
    limit: lab.Limit = 6,
    max_new_tokens: lab.NewTokens = 64,
    repeats: lab.Repeats = 3,
    draft_vocab_size: int = 4096,
    seed: int = 0,
) -> None:
    """Measure all settings and write the results.

    A draft vocabulary of 4,096 costs two thirds of a layer of the default model, like one of 32,000
    in a model of 7B parameters.
    """
    base = lab.load(model, dtype=dtype, executor="generic")
    questions, rows = lab.first_turns(suite, None, limit), list[dict[str, Any]]()
    options = BenchOptions(suite=suite, max_new_tokens=max_new_tokens, repeats=repeats, seed=seed)
    drafts, shares = lab.numbers(max_draft_tokens, int), lab.numbers(wrong_shares, float)
    dials = list(starmap(Dial, product(drafts, shares)))
    for extra in lab.numbers(extra_layers, int):
        speculator, head = rig(base, questions, layers, extra, draft_vocab_size, max_new_tokens)
        folder = output / f"{extra}-layers-more"
        ways = [lab.PLAIN, *(dial.contender(head) for dial in dials)]
        answers = lab.run_bench(folder, speculator, questions, ways, options)
        rows += points(answers, dials, layers / (layers + extra))
    lab.finish(output, {"points": rows}, f"{NOTE}\n" + as_table(pd.DataFrame(rows)))


# --- a model whose first layers decide the answer


def early_model(model: PreTrainedModel, layers: int, extra: int) -> PreTrainedModel:
    """A copy of the first `layers` layers of `model` and `extra` layers that add nothing.

    The added layers have their own weights, so they cost as much as other layers; only their two
    output projections are zero. No token ends a text. Raises UnsupportedModel, InvalidOption.
    """
    deep = copy.deepcopy(model)
    config, decoder = text_config(deep), deep.get_decoder()
    if not 1 <= layers <= len(decoder.layers):
        raise InvalidOption(f"{layers} layers asked for, the model has {len(decoder.layers)}")
    kept, total = list(decoder.layers[:layers]), layers + extra
    silent = [_silent_layer(kept[-1], index) for index in range(layers, total)]
    decoder.layers = nn.ModuleList([*kept, *silent])
    config.num_hidden_layers = total
    if (kinds := getattr(config, "layer_types", None)) is not None:
        config.layer_types = [*kinds[:layers], *itertools.repeat(kinds[layers - 1], extra)]
    if deep.generation_config is not None:
        deep.generation_config.eos_token_id = None
    return deep


def _silent_layer(layer: Any, index: int) -> nn.Module:
    """A copy of `layer`, at index `index`, that returns its input unchanged."""
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
    """The model's own norm and unembedding, but wrong at a chosen share of the rows."""

    wrong_share = 0.0

    def unembed(self, features: Tensor) -> Tensor:
        """Map [.., d] to draft logits [.., V_draft], float32."""
        logits = super().unembed(features)
        wrong = torch.rand(features.shape[:-1], device=features.device) < self.wrong_share
        return torch.where(wrong[..., None], logits.roll(1, -1), logits)


# --- timed


class Dial(NamedTuple):
    """Drafts per round, and the share of positions where the head is wrong."""

    drafts: int
    wrong_share: float

    @property
    def label(self) -> str:
        return f"{self.drafts} drafts, {self.wrong_share:g} wrong"

    def contender(self, head: DialledHead) -> Contender:
        def decode(*inputs: Any) -> Written:
            head.wrong_share = self.wrong_share
            return on_our_runtime(*inputs)

        setting = {"drafter": f"exit:max_tokens={self.drafts}"}
        return Contender(label=self.label, method="speculation", setting=setting, by=decode)


def rig(
    base: Speculator,
    questions: Sequence[Question],
    layers: int,
    extra: int,
    draft_vocab_size: int,
    new_tokens: int,
) -> tuple[Speculator, DialledHead]:
    """A deep model, and a head whose draft vocabulary has all tokens of the model's answers.

    A head over a few thousand tokens costs little compared with a layer, like a head over the whole
    vocabulary of a large model.
    """
    backbone = Backbone(early_model(base.model, layers, extra))
    # every token reaches this threshold, so all drafts come from the one exit
    options = SpeculationOptions(exit=Exit(threshold=1e-6), never_slower=False)
    plain = Speculator(backbone, base.tokenizer, None, base.label, options)
    keywords: Any = {"max_new_tokens": new_tokens, "do_sample": False, "speculate": False}
    texts = (plain.generate(question.turns[0], **keywords).token_ids for question in questions)
    used = set(itertools.chain.from_iterable(texts))
    others = range(max(0, min(draft_vocab_size, backbone.vocab_size) - len(used)))
    ids, unembedding = torch.tensor(sorted(used | {*others})), backbone.unembedding
    heads = lab.untrained_heads(backbone, layers, "logit-lens", ids).eval()
    head = DialledHead(unembedding, DraftVocabulary.of(unembedding, ids)).eval()
    heads.by_layer[str(layers)] = head
    return Speculator(backbone, base.tokenizer, heads, base.label, options), head


# --- the formula


def points(
    answers: Sequence[Answer], dials: Sequence[Dial], depth_ratio: float
) -> list[dict[str, Any]]:
    """The results of each setting over all prompts.

    acceptance: a, accepted / tried; a draft is tried if all before it in the round were kept.
    head_cost: one head, in plain steps. formula: over the actual rounds, with the drafts that each
    had room for. Seconds are those after the prompt's pass.
    """
    runs = frame_of(answers)
    runs["behind_s"] = runs.token_s.map(sum)
    by_prompt = runs.groupby(["method", "id"])
    seconds = by_prompt.behind_s.median().groupby("method").sum()
    equal = by_prompt.equal.all().groupby("method").sum()
    plain_s, d, rows = seconds[lab.PLAIN.label], depth_ratio, []
    step = plain_s / sum(answer.new_tokens - 1 for answer in answers if answer.repeat == 1)
    for dial in dials:
        dial_runs = [answer.runs[dial.label] for answer in answers]
        passes = [entry for run in dial_runs for entry in rounds(run, dial.drafts)]
        tried = sum(min(kept + 1, drafts) for drafts, kept in passes)
        accepted = sum(kept for _, kept in passes)
        heads_s = sum(run.counts["seconds"]["heads"] for run in dial_runs)
        a, head = accepted / tried, heads_s / sum(drafts for drafts, _ in passes) / step
        tokens = sum(lab.expected_tokens(a, k) for k, _ in passes)
        # without drafts the newest token's row still runs through the shallow layers
        cost = sum(round_cost(k, d, rows=max(k, 1)) for k, _ in passes)
        complete = sum(round_cost(k, d, rows=k + 1, head=head) for k, _ in passes)
        rows.append(
            {
                "depth_ratio": d,
                "max_draft_tokens": dial.drafts,
                "wrong_share": dial.wrong_share,
                "equal_texts": int(equal[dial.label]),
                "acceptance": a,
                "compression_rate": 1 + accepted / len(passes),
                "head_cost": head,
                "speed_up": float(plain_s / seconds[dial.label]),
                "formula": tokens / cost,
                "complete_formula": tokens / complete,
            }
        )
    return rows


def rounds(run: Run, most: int) -> Iterator[tuple[int, int]]:
    """Yield the drafts of each round and how many were kept; a text's last round has fewer."""
    counts = [count for count, _ in run.arrivals[1:]]
    remaining = sum(counts)
    for count in counts:
        yield min(most, remaining - 1), count - 1
        remaining -= count


def round_cost(drafts: int, depth_ratio: float, *, rows: int, head: float = 0.0) -> float:
    """Plain steps per round, with `rows` rows in the shallow layers and one in the deep layers."""
    return rows * depth_ratio + (1.0 - depth_ratio) + drafts * head


def as_table(points: pd.DataFrame) -> str:
    names = {"depth_ratio": "D / L", "max_draft_tokens": "k", "acceptance": "a"}
    names |= {"compression_rate": "CR", "speed_up": "measured", "equal_texts": "equal texts"}
    frame = points.rename(columns=names)
    for name in ("formula", "complete_formula"):
        frame[f"measured / {name}"] = points.speed_up / points[name]
    return f"{frame.to_markdown(index=False, floatfmt='.2f')}\n"


if __name__ == "__main__":
    lab.run(main)
