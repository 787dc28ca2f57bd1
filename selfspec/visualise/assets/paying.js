// The never-slower rule: selfspec/decoding/drafters/paying.py.

/** Weight of the newest round in the running mean. */
const NEWEST_ROUND = 1 / 16;

/** Steps a round is believed to gain before the first one has. */
const PRIOR = 0.5;

/** Rounds. */
const [SHORTEST_PAUSE, LONGEST_PAUSE] = [8, 64];

/** Steps that a draft token may take beside its layers and still be tried at once. */
const DEAR = 0.4;

/** Says whether to draft: while a running mean of what rounds gain, in plain steps, is >= 0. */
class Paying {
  constructor(cost) {
    Object.assign(this, { cost, begun: false, gain: PRIOR, nextPause: SHORTEST_PAUSE, pausing: 0 });
  }

  /** Whether this round goes without; asked once in each. */
  pauses() {
    if (!this.begun && this.cost.perToken >= DEAR) {
      [this.gain, this.nextPause, this.pausing] = [0, LONGEST_PAUSE, LONGEST_PAUSE / 2];
    }
    this.begun = true;
    if (!this.pausing) return false;
    this.pausing -= 1;
    return true;
  }

  /** Weigh a round that did not pause. */
  learn(draft, kept) {
    const accepted = kept.filter((index) => !FREE.includes(draft.sources[index])).length;
    const gain = accepted - this.cost.of(draft);
    this.gain += NEWEST_ROUND * (gain - this.gain);
    if (this.gain >= 0) {
      this.nextPause = SHORTEST_PAUSE;
    } else if (gain < 0) {
      this.pausing = this.nextPause;
      this.nextPause = Math.min(2 * this.nextPause, LONGEST_PAUSE);
    }
  }
}

/** Asks another drafter while that has been paying. */
class WhilePaying {
  constructor(drafter, cost) {
    Object.assign(this, { drafter, rule: new Paying(cost), drafted: false });
  }

  draft(state, limit) {
    this.drafted = !this.rule.pauses();
    return this.drafted ? this.drafter.draft(state, limit) : newDraft();
  }

  learn(draft, kept) {
    if (!this.drafted) return;
    this.rule.learn(draft, kept);
    this.drafter.learn(draft, kept);
  }
}
