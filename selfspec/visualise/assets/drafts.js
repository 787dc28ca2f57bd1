// What a drafter gives: selfspec/decoding/drafters/base.py, with a controller that is fixed.
//
// A drafter has draft(state, limit) and learn(draft, kept). A state has committed(start): ids of
// prompt and answer from the start-th on. Fields of a draft are those of Python's.

/** In place of a draft token: the newest committed one. */
const ROOT = -1;

const newDraft = () => ({
  tokens: [],
  parents: null,
  chances: [],
  exit_layers: [],
  sources: [],
  heads: 0,
  ended: "off",
});

/** Plain decoding. */
const NO_DRAFTER = { draft: newDraft, learn() {} };

/** Tokens of the first path, each behind the one before. */
function trunkOf(draft) {
  const turned = (draft.parents ?? []).findIndex((parent, at) => parent !== at - 1);
  return turned < 0 ? draft.tokens.length : turned;
}

/** Tokens that follow a row of verification: 0 the newest token's, i + 1 that of token i. */
function followingRow(draft, row) {
  if (!draft.parents) return row < draft.tokens.length ? [row] : [];
  return draft.parents.flatMap((parent, index) => (parent === row - 1 ? [index] : []));
}

/** Writes a draft until W_max, the limit or an end token completes it. */
class DraftWriter {
  constructor({ width, limit, source, ends }) {
    this.room = Math.max(Math.min(width, limit), 0);
    this.draft = { ...newDraft(), ended: width <= limit ? "width" : "budget" };
    Object.assign(this, { source, ends });
  }

  add(token, layer = 0) {
    this.draft.tokens.push(token);
    this.draft.exit_layers.push(layer);
    this.draft.sources.push(this.source);
    this.room -= 1;
    if (this.ends.includes(token)) this.stop("eos");
  }

  stop(reason) {
    this.draft.ended = reason;
    this.room = 0;
  }
}
