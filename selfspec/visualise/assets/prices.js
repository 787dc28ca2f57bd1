// What rounds cost: selfspec/decoding/prices.py for one text. Sums go from the first on, as there.

/** Added up from the first on: another order has another last bit. */
const sumOf = (values) => values.reduce((total, value) => total + value, 0);

/** Drafts of these take no work before their verification: selfspec/decoding/sources.py. */
const FREE = ["ngram", "grammar"];

/** What the second row of a pass costs, the third, and so on, as many as asked. */
const eachRow = (costs, count) => Array.from({ length: count }, (_, row) => costs[Math.min(row, costs.length - 1)]);

/** What drafting adds to a round, as a share of the round without. */
class DraftCost {
  constructor(rows, head, numLayers) {
    Object.assign(this, { rows, head, numLayers });
  }

  /** What a draft token of an exit head takes at least, its layers left out. */
  get perToken() {
    return Math.min(...this.rows) + this.head;
  }

  /** Tokens that take no work are left out: they would be there without this. */
  of(draft) {
    const rows = eachRow(this.rows, draft.tokens.length);
    return sumOf(rows.filter((_, index) => !FREE.includes(draft.sources[index]))) + this.besideRows(draft);
  }

  /** Siblings run in verification alone. */
  besideRows(draft) {
    const own = draft.exit_layers.slice(0, trunkOf(draft)).filter((_, index) => !FREE.includes(draft.sources[index]));
    return sumOf(own.map((layer) => layer / this.numLayers)) + this.head * draft.heads;
  }
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

/** Wall time behind the prompt's pass: Costs.seconds_of. */
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
