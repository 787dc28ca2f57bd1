// Puts the page together: what is shown now, and what happens when a slider moves.

/** What is shown: a choice of settings (null: the decode itself) and its story. */
const view = {
  choice: null,
  story: null,

  /** tau of a layer; only recorded ones have another one under another setting. */
  tauOf(layer) {
    const taus = this.choice && stopOf(this.choice, "tau");
    return taus?.[layer] ?? info.thresholds[info.exit_layers.indexOf(layer)];
  },

  /** Whether a layer may be left at. */
  asks(layer) {
    if (!this.choice) return info.settings.exit_layers.includes(layer) && layer <= info.settings.max_draft_depth;
    const exits = stopOf(this.choice, "exits");
    return exits !== null && exits[0].includes(layer);
  },
};

const decoded = tell(data.decoded.rounds);

/** Show the decode itself (null), or what another choice would have done. */
function apply(choice) {
  stopRace();
  view.choice = choice;
  view.story = choice ? tell(resultOf(choice).rounds) : decoded;
  if (grid) {
    placeSettings(choice ?? grid.begin);
    showResults(resultOf(grid.begin).counts, resultOf(choice ?? grid.begin).counts);
    document.querySelectorAll(".reset").forEach((button) => (button.hidden = !choice));
  }
  paintAnswer();
  paintDepth();
  paintMap();
  paintRace();
  paintLanes();
}

function describe() {
  const { counts } = data.decoded;
  $("facts").textContent = [
    info.base_model,
    `${info.dtype}, ${info.executor}`,
    plural(places.length, "token"),
    `${counts.rounds} verifications`,
    `${counts.cr.toFixed(2)} tokens each`,
    `${counts.accepted} of ${plural(counts.drafted, "draft")} accepted`,
    info.settings.lossless ? "" : "lossy",
  ].filter(Boolean).join(" · ");
  $("prompt").textContent = info.prompt;
  $("no-replay").hidden = grid !== null;
  $("no-replay").textContent = data.why || "The trace came without a record, so other settings cannot be tried here.";
  if (!grid) return;
  const notes = data.plain_step === null ? [...grid.notes, "no cost table, so no speed-up is predicted"] : grid.notes;
  $("notes").replaceChildren(...notes.map((note) => el("li", {}, note)));
  if (grid.notes.length) $("results").tHead.rows[0].cells[1].textContent = "nearest";
}

function setClass(node, classes) {
  if (node.className !== classes) node.className = classes;
}

describe();
startTheme();
buildAnswer();
buildDepth();
startMap();
buildLanes();
if (grid) buildSettings(apply);
view.story = decoded;
apply(null);
document.documentElement.dataset.ready = "true";
