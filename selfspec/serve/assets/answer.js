// One answer while it is written: its text coloured by source, as Markdown or as raw text.

const PAINT_MS = 50; // least time between two paints

/** Tokens and rejected drafts, by their positions in the text. */
class Written {
  constructor() {
    this.text = "";
    this.tokens = []; // { end, token }
    this.rejects = []; // { at, draft, behind }
    this.blocks = [];
    this.node = el("div", { class: "text", dir: "auto" });
  }

  add(token) {
    this.text += token.text;
    this.tokens.push({ end: this.text.length, token });
  }

  /** Paint the text. Unchanged blocks keep their elements, except the last block. */
  paint(asMarkdown) {
    const blocks = asMarkdown ? blocksOf(this.text) : [{ start: 0, end: this.text.length }];
    this.blocks = blocks.map((block, place) => {
      const key = `${asMarkdown} ${block.start} ${this.text.slice(block.start, block.end)}`;
      const old = place < this.blocks.length - 1 ? this.blocks[place] : null;
      return old?.key === key ? old : { key, node: this.nodeOf(block, place === blocks.length - 1) };
    });
    for (const [place, { node }] of this.blocks.entries()) {
      const shown = this.node.children[place];
      if (!shown) this.node.append(node);
      else if (shown !== node) shown.replaceWith(node);
      if (node.scrollWidth > node.clientWidth) node.tabIndex = 0; // a wide table scrolls
    }
    while (this.node.children.length > blocks.length) this.node.lastChild.remove();
  }

  nodeOf({ start, end, tokens }, isLast) {
    const node = el("div");
    const rejects = this.rejects.filter(({ at }) => at >= start && (at < end || isLast));
    const cursor = { at: start, end, rejects };
    if (tokens) build(tokens, node, (said) => this.found(said, cursor));
    else node.append(...this.cut(start, end, rejects));
    node.append(...rejects.map(rejectedDraft));
    return node;
  }

  /** Find an element's text in the answer, line by line; other text, as from &amp;amp;, gets the token at that place. */
  *found(said, cursor) {
    for (const line of said.match(/[^\n]*\n|[^\n]+/g) ?? []) {
      const at = this.text.indexOf(line, cursor.at);
      const isThere = at >= 0 && at + line.length <= cursor.end;
      if (isThere) cursor.at = at + line.length;
      if (isThere) yield* this.cut(at, cursor.at, cursor.rejects);
      else yield dress(el("span", {}, line), this.tokens[this.indexAt(cursor.at)].token);
    }
  }

  /** Elements of the text between two positions, and of the drafts rejected before it. */
  *cut(from, to, rejects) {
    for (let index = this.indexAt(from); from < to; index += 1) {
      const { end, token } = this.tokens[index];
      const until = Math.min(to, end);
      while (rejects[0]?.at <= from) yield rejectedDraft(rejects.shift());
      if (until > from) yield dress(el("span", {}, this.text.slice(from, until)), token);
      from = until;
    }
  }

  /** The index of the token with the character at `place`, or of the last token. */
  indexAt(place) {
    let [low, high] = [0, this.tokens.length - 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.tokens[middle].end > place) high = middle;
      else low = middle + 1;
    }
    return low;
  }
}

class AnswerView {
  /** `heading`: the text above the answer; null: one for screen readers only. */
  constructor(heading) {
    this.text = "";
    this.figures = new Figures();
    this.written = new Written();
    this.buttons = el("div", { class: "buttons" });
    this.note = el("p", { class: "note hint" });
    const title = el("h2", { class: heading ? "" : "unseen" }, heading ?? "Answer");
    const parts = [title, this.written.node, this.note, this.figures.node, this.buttons];
    this.node = el("div", { class: "answer", "aria-busy": "true" }, ...parts);
  }

  /** Add a chunk of the stream. */
  add(chunk) {
    for (const choice of chunk.choices) {
      this.text += choice.delta.content ?? "";
      this.finish ??= choice.finish_reason;
      const told = choice.speculation;
      for (const round of told?.rounds ?? []) this.addRound(round, told.num_layers);
    }
    this.timer ??= setTimeout(() => this.paint(), PAINT_MS);
  }

  addRound(round, numLayers) {
    this.figures.add(round);
    const rejected = rejectedOf(round);
    for (const [place, token] of round.tokens.entries()) {
      const at = this.written.text.length;
      this.written.rejects.push(...(rejected.get(place) ?? []).map((one) => ({ at, numLayers, ...one })));
      this.written.add({ ...token, numLayers });
    }
  }

  paint() {
    clearTimeout(this.timer);
    this.timer = null;
    const follows = nearEnd();
    this.written.paint($("markdown").checked);
    this.figures.show();
    if (follows) scrollToEnd();
  }

  /** End the answer. `why`: a note for the reader if the model did not end it. */
  end(why = this.finish === "length" ? "Cut off: the answer reached the limit of tokens or of time." : "") {
    this.node.setAttribute("aria-busy", "false");
    this.note.replaceChildren(why);
    this.paint();
  }
}
