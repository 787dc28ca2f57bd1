// One answer while it is written: tokens become spans, lines between ``` become code.

const FENCE = /^ {0,3}```/;

/** Text of tokens, a block for each line; a span never spans two of them. */
class Lines {
  constructor() {
    this.node = el("div", { class: "text", dir: "auto" });
    this.isCode = false;
    this.startLine();
  }

  startLine() {
    this.line = el("div");
    this.said = "";
    this.node.append(this.line);
  }

  /** `make()` gives an empty span of the token. */
  add(text, make) {
    for (const part of text.match(/[^\n]*\n|[^\n]+/g) ?? []) {
      const span = make();
      span.textContent = part;
      this.put(span, part);
    }
  }

  /** `text`: what of the node is said; rejected drafts say nothing. */
  put(node, text = "") {
    this.line.append(node);
    this.said += text;
    const opens = !this.isCode && FENCE.test(this.said);
    this.line.classList.toggle("code", this.isCode || opens);
    if (!text.endsWith("\n")) return;
    this.isCode = opens || (this.isCode && !/^ {0,3}```\s*$/.test(this.said));
    this.startLine();
  }
}

class AnswerView {
  /** `heading`: what stands above it; null: nothing. */
  constructor(heading) {
    this.text = "";
    this.figures = new Figures();
    this.lines = new Lines();
    this.buttons = el("div", { class: "buttons" });
    this.note = el("p", { class: "note hint" });
    this.node = el(
      "div",
      { class: "answer", "aria-busy": "true" },
      ...(heading ? [el("h2", {}, heading)] : []),
      this.lines.node,
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
        this.lines.put(rejectedDraft(draft, behind, numLayers));
      }
      this.lines.add(token.text, () => dress(el("span", {}), token, numLayers));
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
