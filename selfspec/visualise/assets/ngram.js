// Drafts from text already seen: selfspec/decoding/drafters/ngram.py.

/** Weight of the newest observation in a running mean of text already seen. */
const NEWEST_GUESS = 1 / 8;

/** A growing text, and where each of its n-grams was continued last. */
class NgramIndex {
  constructor(size) {
    this.text = [];
    this.size = size;
    this.continued = new Map();
  }

  extend(tokens) {
    for (const token of tokens) {
      const place = this.text.length;
      for (const name of this.namesOfEnd()) this.continued.set(name, place);
      this.text.push(token);
    }
  }

  /** Names of the n-grams at the end of the text, from one token on. */
  namesOfEnd() {
    const names = [];
    const end = this.text.length;
    for (let count = 1; count <= Math.min(this.size, end); count += 1) {
      const token = this.text[end - count];
      names.push(count > 1 ? `${token} ${names[count - 2]}` : `${token}`);
    }
    return names;
  }

  /** Tokens that match at the end of the text, 0 for none, and where they went on before. */
  find() {
    const names = this.namesOfEnd();
    for (let count = names.length; count > 0; count -= 1) {
      const place = this.continued.get(names[count - 1]);
      if (place !== undefined) return [count, place];
    }
    return [0, this.text.length];
  }

  /** Tokens from `place` on; where the text ends, the copy goes on into itself. */
  copied(place, count) {
    const found = this.text.slice(place, place + count);
    const period = this.text.length - place;
    while (found.length < count) found.push(found[found.length - period]);
    return found;
  }
}

/** Drafts what followed the longest match, as far as that has been paying. */
class NgramDrafter {
  constructor({ width, size, rows, ends }) {
    Object.assign(this, { width, size, rows, ends });
    this.index = new NgramIndex(size);
    this.rates = Array.from({ length: size + 1 }, (_, count) => count / (size + 1));
    this.guess = [];
    this.matched = [];
  }

  draft(state, limit) {
    return this.propose(state, limit);
  }

  learn() {} // a fixed controller learns nothing

  /** None unless more than `rival` should be accepted. */
  propose(state, limit, rival = 0) {
    this.read(state);
    const writer = new DraftWriter({ width: this.width, limit, source: "ngram", ends: this.ends });
    const [count, place] = this.index.find();
    this.guess = count ? this.index.copied(place, writer.room) : [];
    this.matched = this.guess.map((_, step) => Math.min(count + step, this.size));
    let path = 1;
    const chances = this.matched.map((matched) => (path *= this.rates[matched]));
    const length = this.bestLength(chances);
    if (sumOf(chances.slice(0, length)) > rival) {
      for (let at = 0; at < length && writer.room; at += 1) writer.add(this.guess[at]);
      writer.draft.chances = chances.slice(0, writer.draft.tokens.length);
    }
    if (writer.room) writer.stop(this.guess.length ? "unsure" : "off");
    return writer.draft;
  }

  /** Where most tokens are expected per plain step; 0 where that is without a draft. */
  bestLength(chances) {
    const rows = eachRow(this.rows, chances.length);
    let [best, rate, tokens, steps] = [0, 1, 1, 1];
    chances.forEach((chance, at) => {
      tokens += chance;
      steps += rows[at];
      if (tokens / steps > rate) [best, rate] = [at + 1, tokens / steps];
    });
    return best;
  }

  /** Take in what was committed since the last draft, and score the last guess by it. */
  read(state) {
    const fresh = state.committed(this.index.text.length);
    for (let at = 0; at < Math.min(this.guess.length, fresh.length); at += 1) {
      const right = this.guess[at] === fresh[at];
      this.rates[this.matched[at]] += NEWEST_GUESS * (Number(right) - this.rates[this.matched[at]]);
      if (!right) break;
    }
    this.index.extend(fresh);
  }
}

/** Text already seen where it promises more than the other drafter has been giving, else that. */
class SeenTextFirst {
  constructor(seen, other) {
    Object.assign(this, { seen, other, otherGives: 0, otherDrafted: false, otherDeclines: false });
  }

  draft(state, limit) {
    let draft = this.seen.propose(state, limit, this.otherDeclines ? 0 : this.otherGives);
    this.otherDrafted = false;
    if (!draft.tokens.length) {
      draft = this.other.draft(state, limit);
      this.otherDeclines = draft.ended === "off" && !draft.tokens.length;
      this.otherDrafted = !this.otherDeclines;
    }
    return draft;
  }

  learn(draft, kept) {
    if (!this.otherDrafted) return;
    this.otherGives += NEWEST_GUESS * (kept.length - this.otherGives);
    this.other.learn(draft, kept);
  }
}
