// The rounds that a setting would have made, from a record alone: what selfspec/eval/replay.py does,
// step by step, and the seconds that selfspec/decoding/prices.py predicts. Knows nothing of the page.
//
// A setting is {layers, columns, thresholds, alpha, width}: exit layers in use up to D_max, their
// columns in the record and their taus; the index of alpha; W_max. Rounds have the fields of
// selfspec.decoding.stats.Round, and how often `heads` were asked.
// Chains of drafts only: trees are not replayed here.

/** Arrays from base64 of zlib of little-endian numbers, laid out by page.py. */
async function unpackRecord(packed) {
  const bytes = Uint8Array.from(atob(packed.arrays), (letter) => letter.charCodeAt(0));
  const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(plain).arrayBuffer();
  const [places, nodes] = [packed.places, packed.nodes];
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
    answers: take(Int32Array, places),
    roots: take(Int32Array, places),
    tokens: take(Int32Array, nodes * layers),
    children: take(Int32Array, nodes * layers),
    confidence: take(Float32Array, nodes * layers * alphas),
  };
}

/** Confidence of a column of a node; float32 becomes a double exactly, as in Python. */
function confidenceAt(record, node, column, alpha) {
  const cell = node * record.exit_layers.length + column;
  return record.confidence[cell * record.anneal_strengths.length + alpha];
}

/** All rounds, the prompt's own pass first. */
function replayRounds(record, setting) {
  const answer = Array.from(record.answers);
  const entries = [
    {
      tokens: answer.slice(0, 1),
      draft_tokens: [],
      exit_layers: [],
      sources: [],
      parents: null,
      kept: [],
      ended: "off",
      prefill: true,
      passes: [[record.prompt_tokens, 0, record.num_layers]],
      stop_reason: stopReason(record, 1),
      heads: 0,
    },
  ];
  let known = 1;
  while (known < answer.length) {
    const limit = record.max_new_tokens - known - 1;
    const entry = oneRound(record, setting, record.roots[known - 1], limit, answer.slice(known));
    known += entry.tokens.length;
    entry.stop_reason = stopReason(record, known);
    entries.push(entry);
  }
  return entries;
}

function stopReason(record, known) {
  const { answers } = record;
  if (known < answers.length) return null;
  return record.end_tokens.includes(answers[answers.length - 1]) ? "eos" : "length";
}

/** How many rows wait at each boundary, and the passes so far: selfspec/decoding/schedule.py. */
class Schedule {
  constructor(layers, numLayers) {
    this.depths = [0, ...layers, numLayers];
    this.waiting = this.depths.map(() => 0);
    this.passes = [];
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

function oneRound(record, setting, root, limit, following) {
  const schedule = new Schedule(setting.layers, record.num_layers);
  const draft = draftTokens(record, setting, schedule, root, limit);
  if (draft.ended !== "depth") schedule.waiting[0] += 1; // else the row has come to D_max already
  schedule.finish();
  let accepted = 0;
  while (accepted < draft.tokens.length && draft.tokens[accepted] === following[accepted]) {
    accepted += 1;
    if (accepted === following.length) break;
  }
  return {
    tokens: following.slice(0, accepted + 1),
    draft_tokens: draft.tokens,
    exit_layers: draft.layers,
    sources: draft.tokens.map(() => "exit"),
    parents: null,
    kept: draft.tokens.slice(0, accepted).map((_, index) => index),
    ended: draft.ended,
    prefill: false,
    passes: schedule.passes,
    stop_reason: null,
    heads: draft.heads,
  };
}

function draftTokens(record, setting, schedule, root, limit) {
  const draft = { tokens: [], layers: [], heads: 0, ended: "budget" };
  if (setting.width <= limit) [limit, draft.ended] = [setting.width, "width"];
  let node = root;
  while (draft.tokens.length < limit) {
    schedule.waiting[0] += 1;
    const column = firstExit(record, setting, schedule, node, draft);
    if (column < 0) return { ...draft, ended: "depth" };
    const cell = node * record.exit_layers.length + column;
    draft.tokens.push(record.tokens[cell]);
    draft.layers.push(record.exit_layers[column]);
    if (record.end_tokens.includes(record.tokens[cell])) return { ...draft, ended: "eos" };
    node = record.children[cell];
  }
  return draft;
}

/** The column of the first confident layer at a node; -1: difficult token. */
function firstExit(record, setting, schedule, node, draft) {
  for (let boundary = 0; boundary < setting.columns.length; boundary += 1) {
    schedule.advance(boundary, boundary + 1);
    draft.heads += 1;
    const column = setting.columns[boundary];
    const sure = confidenceAt(record, node, column, setting.alpha);
    if (sure >= setting.thresholds[boundary]) return column;
  }
  return -1;
}

/** Counts of rounds, the prompt's pass left out, and their predicted speed-up (null: unknown). */
function summary(rounds, prices) {
  const later = rounds.filter((entry) => !entry.prefill);
  const sum = (value) => later.reduce((total, entry) => total + value(entry), 0);
  const [tokens, accepted] = [sum((entry) => entry.tokens.length), sum((entry) => entry.kept.length)];
  const drafted = sum((entry) => entry.draft_tokens.length);
  const seconds = predictedSeconds(later, prices);
  return {
    rounds: later.length,
    tokens,
    drafted,
    accepted,
    acceptance_rate: drafted ? accepted / drafted : 0,
    compression_rate: later.length ? tokens / later.length : 0,
    row_layers: sum((entry) =>
      entry.passes.reduce((total, [rows, first, last]) => total + rows * (last - first), 0),
    ),
    seconds,
    speed_up: seconds ? (tokens * prices.plain_step) / seconds : null,
  };
}

/** Wall time behind the prompt's pass: Costs.seconds of selfspec/decoding/prices.py. */
function predictedSeconds(rounds, prices) {
  if (!prices) return null;
  let seconds = 0;
  for (const entry of rounds) {
    for (const [rows, first, last] of entry.passes) {
      seconds += passSeconds(prices, rows, last - first);
    }
    seconds += prices.verdict[entry.draft_tokens.length] + entry.heads * prices.head;
  }
  return seconds;
}

/** One pass of so many rows through so many layers. */
const passSeconds = (prices, rows, layers) => prices.pass[rows - 1] + prices.layer[rows - 1] * layers;
