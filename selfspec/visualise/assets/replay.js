// The rounds that a setting would have made, from a record alone: what selfspec/eval/replay.py does,
// step by step. Knows nothing of the page; drafters are in files of their own.
//
// A setting: `drafter` (ngram+exit, exit, ngram, none); of exit heads `layers` in use up to D_max,
// their `columns` in the record and their `thresholds`, the index of `alpha`, `width` (W_max),
// `guesses` for a place, `max_rows` of a tree; of text already seen `ngram_size`, `ngram_width`;
// `never_slower`, and what that goes by: `row_costs`, `head_cost`. Rounds have the fields of
// selfspec.decoding.stats.Round.

/** Arrays from base64 of zlib of little-endian numbers, laid out by page.py. */
async function unpackRecord(packed) {
  const bytes = Uint8Array.from(atob(packed.arrays), (letter) => letter.charCodeAt(0));
  const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(plain).arrayBuffer();
  const { places, nodes, guesses } = packed;
  const [layers, alphas] = [packed.exit_layers.length, packed.anneal_strengths.length];
  let offset = 0;
  const take = (Kind, count) => {
    const values = new Kind(buffer, offset, count);
    offset += values.byteLength;
    return values;
  };
  return {
    ...packed,
    arrays: null,
    context: Array.from(take(Int32Array, packed.prompt_tokens)),
    answers: Array.from(take(Int32Array, places)),
    roots: take(Int32Array, places),
    tokens: take(Int32Array, nodes * layers),
    children: take(Int32Array, nodes * layers),
    confidence: take(Float32Array, nodes * layers * alphas),
    guessed: take(Int32Array, nodes * guesses),
    behind: take(Int32Array, nodes * guesses),
    // of the best guess the first column's confidence
    chances: take(Float32Array, nodes * alphas * Math.max(guesses - 1, 0)),
  };
}

/** Confidence of a column of a node; float32 becomes a double exactly, as in Python. */
function confidenceAt(record, node, column, alpha) {
  const cell = node * record.exit_layers.length + column;
  return record.confidence[cell * record.anneal_strengths.length + alpha];
}

/** What exit layer 0 gives its guess of a rank behind a node. */
function chanceAt(record, node, rank, alpha) {
  if (!rank) return confidenceAt(record, node, 0, alpha);
  return record.chances[(node * record.anneal_strengths.length + alpha) * (record.guesses - 1) + rank - 1];
}

/** How many rows wait at each boundary, and the passes so far: selfspec/decoding/schedule.py. */
class Schedule {
  constructor(layers, numLayers) {
    this.depths = [0, ...layers, numLayers];
    this.waiting = this.depths.map(() => 0);
    this.pushed = 0;
    this.passes = [];
  }

  /** Rows enter at boundary 0. */
  push(rows) {
    this.waiting[0] += rows;
    this.pushed += rows;
  }

  /** All rows at a boundary to another one in a pass; none where no layer lies between them. */
  advance(boundary, until) {
    const rows = this.waiting[boundary];
    const [first, last] = [this.depths[boundary], this.depths[until]];
    if (first !== last) this.passes.push([rows, first, last]);
    this.waiting[boundary] = 0;
    this.waiting[until] += rows;
  }

  /** All rows to boundary L; a pass goes on until it meets other rows. */
  finish() {
    const end = this.depths.length - 1;
    const stops = [...this.waiting.keys()].filter((b) => b < end && this.waiting[b]);
    stops.forEach((boundary, index) => this.advance(boundary, stops[index + 1] ?? end));
  }
}

/** What drafters see of a text. */
class ReplayState {
  constructor(record) {
    this.record = record;
    this.known = 1; // committed tokens of the answer
    this.schedule = null;
  }

  committed(start) {
    const { context, answers } = this.record;
    return [...context.slice(start), ...answers.slice(Math.max(start - context.length, 0), this.known)];
  }

  /** The node where the newest token's draft begins. */
  get root() {
    return this.record.roots[this.known - 1];
  }

  stopReason() {
    const { answers, end_tokens: ends } = this.record;
    if (this.known < answers.length) return null;
    return ends.includes(answers[answers.length - 1]) ? "eos" : "length";
  }
}

/** Guesses of exit layer 0, for trees. */
class RecordGuesser {
  constructor(record, setting) {
    Object.assign(this, { record, setting, nodes: new Map() });
  }

  begin(state) {
    this.nodes = new Map([[ROOT, state.root]]);
  }

  ask(draft, asked) {
    return asked.map((index) => this.guessesAt(this.nodeOf(draft, index)));
  }

  /** Of the record, by token of the draft. */
  nodeOf(draft, index) {
    if (!this.nodes.has(index)) {
      const first = this.nodes.get(draft.parents[index]) * this.record.guesses;
      const rank = this.record.guessed.subarray(first, first + this.record.guesses).indexOf(draft.tokens[index]);
      this.nodes.set(index, this.record.behind[first + rank]);
    }
    return this.nodes.get(index);
  }

  guessesAt(node) {
    const { record, setting } = this;
    const ranks = [...Array(setting.guesses).keys()];
    const chances = ranks.map((rank) => chanceAt(record, node, rank, setting.alpha));
    if (chances[0] < setting.thresholds[0]) return { tokens: [], chances: [] };
    return { tokens: ranks.map((rank) => record.guessed[node * record.guesses + rank]), chances };
  }
}

/** Chains of exit heads: rows wait where their drafts left. */
class ExitDrafter {
  constructor(record, setting) {
    Object.assign(this, { record, setting });
  }

  learn() {} // a fixed controller learns nothing

  draft(state, limit) {
    const { record, setting } = this;
    const writer = new DraftWriter({ width: setting.width, limit, source: "exit", ends: record.end_tokens });
    let node = state.root;
    while (writer.room) {
      state.schedule.push(1);
      const column = this.firstExit(state.schedule, node, writer.draft);
      if (column < 0) {
        writer.stop("depth");
        break;
      }
      const cell = node * record.exit_layers.length + column;
      writer.add(record.tokens[cell], record.exit_layers[column]);
      node = record.children[cell];
    }
    return writer.draft;
  }

  /** The column of the first confident layer at a node; -1: difficult token. */
  firstExit(schedule, node, draft) {
    const { columns, thresholds, alpha } = this.setting;
    for (let boundary = 0; boundary < columns.length; boundary += 1) {
      schedule.advance(boundary, boundary + 1);
      draft.heads += 1;
      const sure = confidenceAt(this.record, node, columns[boundary], alpha);
      if (sure >= thresholds[boundary]) return columns[boundary];
    }
    return -1;
  }
}

/** What proposes tokens, and the exit layers at which rows may wait. */
function makeDrafter(record, setting) {
  const kinds = setting.drafter.split("+");
  const [ends, rows] = [record.end_tokens, setting.row_costs];
  if (setting.drafter === "none") return [NO_DRAFTER, []];
  const seen = kinds.includes("ngram")
    ? new NgramDrafter({ width: setting.ngram_width, size: setting.ngram_size, rows, ends })
    : null;
  if (!kinds.includes("exit")) return [seen, []];
  const { layers, width, never_slower: neverSlower } = setting;
  if (setting.guesses > 1) {
    const cost = neverSlower ? new DraftCost(rows, setting.head_cost, 1) : new DraftCost([0], 0, 1);
    const guesser = new RecordGuesser(record, setting);
    return [new TreeDrafter({ guesser, cost, width, most: setting.max_rows - 1, ends, seen, neverSlower }), layers];
  }
  let exits = new ExitDrafter(record, setting);
  if (neverSlower) exits = new WhilePaying(exits, new DraftCost(rows, setting.head_cost, record.num_layers));
  return [seen ? new SeenTextFirst(seen, exits) : exits, layers];
}

/** All rounds, the prompt's own pass first. */
function replayRounds(record, setting) {
  const [drafter, layers] = makeDrafter(record, setting);
  const state = new ReplayState(record);
  const passes = [[record.prompt_tokens, 0, record.num_layers]];
  const prompt = roundOf({ ...newDraft(), passes, tokens: [] }, record.answers.slice(0, 1), []);
  const entries = [{ ...prompt, prefill: true, stop_reason: state.stopReason() }];
  while (state.known < record.answers.length) {
    state.schedule = new Schedule(layers, record.num_layers);
    const draft = drafter.draft(state, record.max_new_tokens - state.known - 1);
    const entry = verified(state, draft);
    state.known += entry.tokens.length;
    drafter.learn(draft, entry.kept);
    entries.push({ ...entry, stop_reason: state.stopReason() });
  }
  return entries;
}

/** One verification; what it commits is the recorded answer's. */
function verified(state, draft) {
  const following = state.record.answers.slice(state.known);
  state.schedule.push(draft.tokens.length + 1 - state.schedule.pushed);
  state.schedule.finish();
  const kept = [];
  while (kept.length < following.length) {
    const behind = followingRow(draft, kept.length ? kept.at(-1) + 1 : 0);
    const right = behind.find((index) => draft.tokens[index] === following[kept.length]);
    if (right === undefined) break;
    kept.push(right);
  }
  return roundOf({ ...draft, passes: state.schedule.passes }, following.slice(0, kept.length + 1), kept);
}

const roundOf = (draft, tokens, kept) => ({
  tokens,
  draft_tokens: draft.tokens,
  exit_layers: draft.exit_layers,
  sources: draft.sources,
  parents: draft.parents,
  kept,
  ended: draft.ended,
  heads: draft.heads,
  prefill: false,
  passes: draft.passes,
  stop_reason: null,
});
