// Puts the page together: what is shown now, and what happens when a slider moves.

/** What is shown: a choice of settings (null: the decode itself) and its story. */
const view = {
  choice: null,
  story: null,

  /** tau of a layer; only recorded ones have sliders. */
  tauOf(layer) {
    const column = this.choice ? record.exit_layers.indexOf(layer) : -1;
    if (column >= 0) return this.choice.thresholds[column];
    return info.thresholds[info.exit_layers.indexOf(layer)];
  },

  /** Confidence of a place's layer, annealed by the alpha shown where that was recorded. */
  sureOf(place, index) {
    const traced = places[place].layers[index].sure;
    if (!this.choice || this.choice.alpha === data.start.alpha || place === 0) return traced;
    const column = record.exit_layers.indexOf(info.exit_layers[index]);
    const node = record.roots[place - 1];
    return column < 0 || node < 0 ? traced : confidenceAt(record, node, column, this.choice.alpha);
  },

  /** Whether a layer may be left at. */
  asks(layer) {
    if (!this.choice) return info.settings.exit_layers.includes(layer) && layer <= info.settings.max_draft_depth;
    return drafts(this.choice, "exit") && settingOf(this.choice).layers.includes(layer);
  },
};

const decoded = tell(data.rounds);
const used = record && summary(replayRounds(record, settingOf(data.start)), data.prices);

/** Show the decode itself (null), or what another choice would have done. */
function apply(choice) {
  stopRace();
  view.choice = choice;
  const replayed = choice && replayRounds(record, settingOf(choice));
  view.story = replayed ? tell(replayed) : decoded;
  if (record) {
    placeSettings(choice ?? data.start);
    showResults(used, replayed ? summary(replayed, data.prices) : used);
    document.querySelectorAll(".reset").forEach((button) => (button.hidden = !choice));
  }
  paintAnswer();
  paintDepth();
  paintMap();
  paintRace();
  paintLanes();
}

function describe() {
  const counts = summary(data.rounds, null);
  $("facts").textContent = [
    info.base_model,
    `${info.dtype}, ${info.executor}`,
    plural(places.length, "token"),
    `${counts.rounds} verifications`,
    `${counts.compression_rate.toFixed(2)} tokens each`,
    `${counts.accepted} of ${plural(counts.drafted, "draft")} accepted`,
    info.settings.lossless ? "" : "lossy",
  ].filter(Boolean).join(" · ");
  $("prompt").textContent = info.prompt;
  const notes = record ? [...data.start.notes] : [];
  if (record && !data.prices) notes.push("no cost table, so no speed-up is predicted");
  $("notes").replaceChildren(...notes.map((note) => el("li", {}, note)));
  if (notes.length && data.start?.notes.length) $("results").tHead.rows[0].cells[1].textContent = "nearest";
  if (record) return;
  $("no-replay").hidden = false;
  $("no-replay").textContent = data.record
    ? "This browser cannot unpack the record, so other settings cannot be tried here."
    : data.why || "The trace came without a record, so other settings cannot be tried here.";
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
if (record) buildSettings(apply);
view.story = decoded;
apply(null);
document.documentElement.dataset.ready = "true";

// for the console, and for the tests
globalThis.selfspec = {
  data,
  record,
  apply,
  replay: (choice) => replayRounds(record, settingOf(choice)),
  summary: (rounds) => summary(rounds, data.prices),
};
