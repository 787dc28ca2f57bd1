// What an answer cost, counted from its rounds and from this browser's clock.

class Figures {
  constructor() {
    this.tokens = 0;
    this.rounds = 0;
    this.drafted = 0;
    this.accepted = 0;
    this.steps = 0;
    this.bySource = {};
    this.begun = null;
    this.ended = null;
    this.untimed = 0;
  }

  /** One round; the clock starts with the first, the prompt's pass. */
  add(round) {
    this.ended = performance.now();
    this.begun ??= this.ended;
    this.tokens += round.tokens.length;
    for (const { source } of round.tokens) this.bySource[source] = (this.bySource[source] ?? 0) + 1;
    if (round.steps === 0) {
      this.untimed += round.tokens.length;
      return;
    }
    this.rounds += 1;
    this.drafted += round.drafts.length;
    this.accepted += round.drafts.filter((draft) => draft.accepted).length;
    this.steps += round.steps;
  }

  /** Seconds behind the first token. */
  get seconds() {
    return this.begun === null ? 0 : (this.ended - this.begun) / 1000;
  }

  /** Tokens that these seconds gave. */
  get timed() {
    return this.tokens - this.untimed;
  }

  get perSecond() {
    return this.seconds ? this.timed / this.seconds : 0;
  }

  get perRound() {
    return this.rounds ? this.timed / this.rounds : 0;
  }

  /** How many times as long plain decoding takes, by the prices: a step for each token. */
  get plain() {
    return this.steps ? this.timed / this.steps : 1;
  }
}

/** The box below an answer; `show` again whenever its figures have changed. */
class FigureBox {
  constructor() {
    this.values = {};
    this.node = el(
      "dl",
      { class: "figures" },
      this.entry("speed", "tokens/s", "speed"),
      this.entry("plain", "plain, by the prices", "speed"),
      this.entry("round", "tokens per verification"),
      this.entry("drafts", "drafts accepted"),
    );
    this.values.plain.parentNode.title = "What the same text would have had without drafts, by the server's prices of rows, layers and heads";
  }

  /** `kind`: speeds have a bar. */
  entry(name, words, kind = "") {
    this.values[name] = el("dd", { "data-figure": name }, "–");
    const bar = kind ? [el("dd", { "aria-hidden": "true" }, el("i", { class: "bar" }))] : [];
    return el("div", { class: kind }, el("dt", {}, words), ...bar, this.values[name]);
  }

  /** `share`: of the longest bar. */
  showSpeed(name, words, share) {
    this.values[name].textContent = words;
    this.values[name].parentNode.querySelector(".bar").style.setProperty("--share", share);
  }

  show(figures) {
    if (!figures.rounds) return;
    const drafts = figures.drafted ? `${figures.accepted} of ${figures.drafted}` : "none made";
    const { perSecond: speed, plain } = figures;
    const longest = Math.max(1, 1 / plain);
    this.showSpeed("speed", speed ? speed.toFixed(1) : "–", 1 / longest);
    this.showSpeed("plain", speed ? `≈ ${(speed / plain).toFixed(1)}` : "–", 1 / plain / longest);
    this.values.plain.parentNode.hidden = !figures.drafted;
    this.node.classList.toggle("alone", !figures.drafted);
    this.values.round.textContent = figures.perRound.toFixed(2);
    this.values.drafts.textContent = drafts;
  }
}
