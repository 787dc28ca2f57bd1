// One answer while it is written: tokens become spans, lines between ``` become code.

/** Text of tokens in blocks; a span never spans two lines, so that blocks can begin at any line. */
class Blocks {
  constructor() {
    this.node = el("div", { class: "text", dir: "auto" });
    this.open(false);
  }

  open(isCode) {
    this.isCode = isCode;
    this.block = el("div", isCode ? { class: "code", dir: "ltr" } : {});
    this.node.append(this.block);
    this.startLine();
  }

  startLine() {
    this.line = "";
    this.spans = [];
    this.closes = false;
  }

  /** `make()` gives an empty span of the token. */
  add(text, make) {
    for (const part of text.match(/[^\n]*\n|[^\n]+/g) ?? []) {
      const span = make();
      span.textContent = part;
      this.put(span, part);
    }
  }

  put(span, text = "") {
    this.block.append(span);
    this.spans.push(span);
    this.line += text;
    const fence = /^ {0,3}```/.test(this.line);
    if (fence && !this.isCode && !this.closes) {
      const { line, spans } = this;
      this.open(true);
      this.block.append(...spans);
      Object.assign(this, { line, spans, opens: true });
    } else if (fence && !this.opens) this.closes = true;
    if (!text.endsWith("\n")) return;
    const ends = this.closes && /^ {0,3}```\s*$/.test(this.line);
    this.opens = false;
    if (ends) this.open(false);
    else this.startLine();
  }
}

class AnswerView {
  /** `heading`: what stands above it; null: nothing. */
  constructor(heading) {
    this.text = "";
    this.figures = new Figures();
    this.blocks = new Blocks();
    this.buttons = el("div", { class: "buttons" });
    this.note = el("p", { class: "note hint" });
    this.node = el(
      "div",
      { class: "answer", "aria-busy": "true" },
      ...(heading ? [el("h2", {}, heading)] : []),
      this.blocks.node,
      this.note,
      this.figures.node,
      this.buttons,
    );
  }

  /** A chunk of the stream. */
  add(chunk) {
    for (const choice of chunk.choices) {
      this.text += choice.delta.content ?? "";
      this.finish ??= choice.finish_reason;
      const told = choice.speculation;
      if (!told) continue;
      for (const round of told.rounds) this.addRound(round, told.num_layers);
    }
    this.figures.show();
  }

  addRound(round, numLayers) {
    this.figures.add(round);
    const rejected = rejectedOf(round);
    for (const [place, token] of round.tokens.entries()) {
      for (const { draft, behind } of rejected.get(place) ?? []) {
        this.blocks.put(rejectedDraft(draft, behind, numLayers));
      }
      this.blocks.add(token.text, () => dress(el("span", {}), token, numLayers));
    }
  }

  /** No more comes. `why`: words for the reader, if it did not end by itself. */
  end(why = "") {
    this.node.setAttribute("aria-busy", "false");
    this.note.textContent = why || (this.finish === "length" ? "Cut: it has as many tokens as the settings allow." : "");
  }

  fail(message) {
    this.end();
    this.note.replaceChildren(el("span", { class: "bad", role: "alert" }, message));
  }
}

/** Copies text; where a browser does not let pages do that, selects it for the reader to copy. */
async function copyText(text, node) {
  try {
    await navigator.clipboard.writeText(text);
    return "Copied";
  } catch {
    getSelection().selectAllChildren(node);
    return "Selected: press Ctrl+C";
  }
}
