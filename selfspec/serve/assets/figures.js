// The box below an answer with its figures, from its rounds and this browser's clock.

class Figures {
  constructor() {
    this.timed = this.rounds = this.drafted = this.accepted = this.steps = 0;
    this.bySource = {};
    this.begun = this.ended = null;
    this.values = {};
    this.node = el("dl", { class: "figures" },
      this.entry("speed", "tokens/s", "speed"),
      this.entry("plain", "without drafts", "speed"),
      this.entry("round", "tokens per verification"),
      this.entry("drafts", "drafts accepted"),
    );
    this.values.plain.parentNode.title = "The estimated speed of the same text without drafts, by the server's costs of rows, layers and heads";
  }

  /** A figure's element; a `kind` of "speed" has a bar. */
  entry(name, words, kind = "") {
    this.values[name] = el("dd", { "data-figure": name }, "–");
    const bar = kind ? [el("dd", { "aria-hidden": "true" }, el("i", { class: "bar" }))] : [];
    return el("div", { class: kind }, el("dt", {}, words), ...bar, this.values[name]);
  }

  /** Add a round; the clock starts with the first round, the prompt's pass. */
  add(round) {
    this.ended = performance.now();
    this.begun ??= this.ended;
    for (const { source } of round.tokens) this.bySource[source] = (this.bySource[source] ?? 0) + 1;
    this.timed += round.steps ? round.tokens.length : 0;
    this.rounds += round.steps ? 1 : 0;
    this.drafted += round.drafts.length;
    this.accepted += round.drafts.filter((draft) => draft.accepted).length;
    this.steps += round.steps;
  }

  /** Seconds after the first token. */
  get seconds() {
    return (this.ended - this.begun) / 1000;
  }

  /** Update the box. Without drafts each token would take one step. */
  show() {
    if (!this.rounds) return;
    const speed = this.seconds ? this.timed / this.seconds : 0;
    const plain = this.timed / this.steps;
    const longest = Math.max(1, 1 / plain);
    this.showSpeed("speed", speed ? speed.toFixed(1) : "–", 1 / longest);
    this.showSpeed("plain", speed ? `≈ ${(speed / plain).toFixed(1)}` : "–", 1 / plain / longest);
    this.values.plain.parentNode.hidden = !this.drafted;
    this.node.classList.toggle("alone", !this.drafted);
    this.values.round.textContent = (this.timed / this.rounds).toFixed(2);
    this.values.drafts.textContent = this.drafted ? `${this.accepted} of ${this.drafted}` : "none made";
  }

  /** Show a speed; `share`: its part of the longest bar. */
  showSpeed(name, words, share) {
    this.values[name].textContent = words;
    this.values[name].parentNode.querySelector(".bar").style.setProperty("--share", share);
  }
}
