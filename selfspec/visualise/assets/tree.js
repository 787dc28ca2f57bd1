// Trees of drafts: selfspec/decoding/drafters/tree.py, with the likeliest tokens as guesses.
//
// A guesser has begin(state) and ask(draft, asked), which gives what may follow each of `asked`:
// {tokens, chances}, the likeliest first.

const ROUNDING = 1e-6;

/** Answers of the head that say what the next one should bring. */
const REMEMBERED = 16;

/** The head is not asked behind a path that it gives a lower probability itself. */
const LEAST_SAID = 0.05;

/** Probability of the head's best guess that is expected before it was ever asked. */
const FIRST_HOPE = 0.5;

/** All guesses but a token, and the chance that it had. */
function without(guesses, token) {
  const at = guesses.tokens.indexOf(token);
  if (at < 0) return [guesses, 0];
  const others = (values) => values.filter((_, index) => index !== at);
  return [{ tokens: others(guesses.tokens), chances: others(guesses.chances) }, guesses.chances[at]];
}

/** A draft while it grows: what it should give, what it costs, what fits. */
class Tree {
  constructor(trunk, cost, most, ends) {
    Object.assign(this, { draft: trunk, cost, most, ends, said: new Map([[ROOT, 1]]) });
    this.parents = trunk.parents = trunk.tokens.map((_, index) => index - 1);
    this.rows = eachRow(cost.rows, most);
    this.tokens = 1 + sumOf(trunk.chances);
    this.steps = 1 + sumOf(this.rows.slice(0, trunk.tokens.length));
  }

  /** Tokens expected per plain step. */
  get rate() {
    return this.tokens / this.steps;
  }

  get full() {
    return this.draft.tokens.length >= this.most;
  }

  /** The chance at which one more token pays. */
  get nextRow() {
    return this.rows[this.draft.tokens.length] * this.rate;
  }

  /** ROOT or a token: its chance, less that of a child that it has already, of the trunk. */
  node(index) {
    const chance = index === ROOT ? 1 : this.draft.chances[index];
    const behind = index + 1;
    if (behind < this.parents.length && this.parents[behind] === index) {
      return { at: index, free: Math.max(chance - this.draft.chances[behind], 0), child: behind };
    }
    return { at: index, free: chance, child: null };
  }

  /** Whether a token ends the text. */
  closes(index) {
    return index !== ROOT && this.ends.includes(this.draft.tokens[index]);
  }

  /** Whether the head can say more there, and would mean it. */
  askable(index) {
    return !this.closes(index) && (this.said.get(index) ?? 0) >= LEAST_SAID;
  }

  /** What the head gives a token behind its parent. */
  note(index, parent, said) {
    this.said.set(index, (this.said.get(parent) ?? 0) * said);
  }

  /** One more level was asked. */
  payHead() {
    this.draft.heads += 1;
    this.steps += this.cost.head;
  }

  /** Add those that pay, the likeliest first (sort is stable); returns their indices. */
  take(offers) {
    const taken = [];
    for (const offer of [...offers].sort((a, b) => b.chance - a.chance)) {
      if (this.full || offer.chance <= this.nextRow) break;
      taken.push(this.add(offer));
    }
    return taken;
  }

  add({ chance, said, parent, token }) {
    const { draft } = this;
    this.steps += this.rows[draft.tokens.length];
    this.tokens += chance;
    this.parents.push(parent);
    draft.tokens.push(token);
    draft.chances.push(chance);
    draft.exit_layers.push(0);
    draft.sources.push("exit");
    this.note(draft.tokens.length - 1, parent, said);
    return draft.tokens.length - 1;
  }

  /** Each token's likeliest child behind it; without parents if that is a chain as a whole. */
  finished() {
    const order = this.inDepth();
    const places = new Map([[ROOT, ROOT], ...order.map((old, index) => [old, index])]);
    const { draft } = this;
    for (const name of ["tokens", "chances", "exit_layers", "sources"]) {
      const values = draft[name];
      draft[name] = order.map((old) => values[old]);
    }
    const parents = order.map((old) => places.get(this.parents[old]));
    draft.parents = parents.every((parent, at) => parent === at - 1) ? null : parents;
    return draft;
  }

  /** All tokens: each before its children, and these, in their order, with all behind them. */
  inDepth() {
    const children = new Map();
    this.parents.forEach((parent, index) => children.set(parent, [...(children.get(parent) ?? []), index]));
    const behind = (index) => (children.get(index) ?? []).flatMap((child) => [child, ...behind(child)]);
    return behind(ROOT);
  }
}

/** Grows a tree per round. */
class TreeDrafter {
  constructor({ guesser, cost, width, most, ends, seen, neverSlower }) {
    Object.assign(this, { guesser, cost, width, most, ends, seen });
    this.paying = neverSlower ? new Paying(cost) : null;
    this.best = [FIRST_HOPE];
    this.asked = false;
  }

  draft(state, limit) {
    const draft = this.seen ? this.seen.propose(state, Math.min(limit, this.most)) : newDraft();
    this.asked = false;
    if (limit <= 0 || this.paying?.pauses()) return draft;
    const tree = new Tree(draft, this.cost, this.most, this.ends);
    this.grow(tree, state, limit);
    return tree.finished();
  }

  learn(draft, kept) {
    if (this.asked) this.paying?.learn(draft, kept);
  }

  /** Level by level, one question to the head each. */
  grow(tree, state, limit) {
    let level = [ROOT];
    this.guesser.begin(state);
    tree.draft.ended = this.width <= limit ? "width" : "budget";
    for (let depth = 0; depth < Math.min(this.width, limit); depth += 1) {
      const asked = this.worthAsking(tree, level);
      if (!asked.length) {
        tree.draft.ended = tree.full ? "width" : "unsure";
        return;
      }
      this.asked = true;
      tree.payHead();
      level = this.add(tree, asked, this.guesser.ask(tree.draft, asked.map((node) => node.at)));
      if (level.length && level.every((index) => tree.closes(index))) {
        tree.draft.ended = "eos";
        return;
      }
    }
  }

  /** Of the newest level those behind which a guess should pay its row, if all pay the head. */
  worthAsking(tree, level) {
    if (tree.full) return [];
    if (level[0] === ROOT && !tree.draft.tokens.length) return [tree.node(ROOT)];
    const row = tree.nextRow;
    const nodes = level.filter((index) => tree.askable(index)).map((index) => tree.node(index));
    const gains = nodes.map((node) => this.hope(node.free, row));
    if (sumOf(gains) <= this.cost.head * tree.rate) return [];
    return nodes.filter((_, index) => gains[index] > 0);
  }

  /** What the best guess behind a node of this chance should bring, its row paid. */
  hope(free, row) {
    return sumOf(this.best.map((best) => Math.max(free * best - row, 0))) / this.best.length;
  }

  /** The guesses that pay; returns the next level, which the trunk is part of. */
  add(tree, asked, answers) {
    const [level, offers] = [[], []];
    asked.forEach((node, index) => {
      let [guesses, taken] = [answers[index], 0];
      if (guesses.chances.length) this.best = [...this.best, guesses.chances[0]].slice(-REMEMBERED);
      if (node.child !== null) {
        level.push(node.child);
        [guesses, taken] = without(guesses, tree.draft.tokens[node.child]);
        tree.note(node.child, node.at, taken);
      }
      const share = node.free / Math.max(1 - taken, ROUNDING);
      guesses.chances.forEach((said, rank) => {
        const chance = Math.min(share * said, node.free);
        offers.push({ chance, said, parent: node.at, token: guesses.tokens[rank] });
      });
    });
    return [...level, ...tree.take(offers)];
  }
}
