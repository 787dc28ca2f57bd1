// Puts the page together: what is shown now, and what happens when a slider moves.

/** What is shown: a choice of settings (null: the decode itself) and its story. */
const view = {
  choice: null,
  story: tell(data.decoded.rounds),

  /** tau of a layer; only recorded ones have another one under another setting. */
  tauOf(layer) {
    const taus = this.choice && stopOf(this.choice, "tau");
    return taus?.[layer] ?? data.thresholds[data.exit_layers.indexOf(layer)];
  },

  /** Whether a layer may be left at. */
  asks(layer) {
    const layers = this.choice ? stopOf(this.choice, "exits")?.[0] : data.in_use;
    return layers?.includes(layer) ?? false;
  },
};

/** Show the decode itself (null), or what another choice would have done. */
function apply(choice) {
  stopRace();
  view.choice = choice;
  view.story = tell((choice ? resultOf(choice) : data.decoded).rounds);
  if (grid) {
    placeSettings(choice ?? grid.begin);
    showResults(resultOf(grid.begin).counts, resultOf(choice ?? grid.begin).counts);
    document.querySelectorAll(".reset").forEach((button) => (button.hidden = !choice));
  }
  paintAnswer();
  paintDepth();
  paintMap();
  paintLanes();
}

function describe() {
  document.querySelector(".settings").hidden = grid === null;
  $("no-replay").hidden = grid !== null;
  $("no-replay").textContent = data.why || "The trace came without a record, so other settings cannot be tried here.";
  if (!grid) return;
  const unpriced = data.plain_step === null ? ["no cost table, so no speed-up is predicted"] : [];
  $("notes").replaceChildren(...[...grid.notes, ...unpriced].map((note) => el("li", {}, note)));
  if (grid.notes.length) $("results").tHead.rows[0].cells[1].textContent = "nearest";
}

describe();
startTheme();
buildAnswer();
buildDepth();
startMap();
buildLanes();
if (grid) buildSettings(apply);
apply(null);
document.documentElement.dataset.ready = "true";
