// The sliders: they change `choice`, and what the replay makes of it.
//
// A choice is a Start of start.py; `used` and `thresholds` go by recorded exit layer. A threshold
// that no slider has touched keeps all its digits. Controls that mean nothing are hidden.

const controls = { taus: [] };

/** Columns in use, up to D_max. */
const columnsOf = (choice) => record.exit_layers.flatMap((layer, column) =>
  choice.used[column] && layer <= choice.depth ? [column] : [],
);

/** A choice in the replay's terms. */
function settingOf(choice) {
  const columns = columnsOf(choice);
  return {
    ...choice,
    layers: columns.map((column) => record.exit_layers[column]),
    columns,
    thresholds: columns.map((column) => choice.thresholds[column]),
    guesses: readsEmbedding(choice) ? choice.guesses : 1,
  };
}

const drafts = (choice, source) => choice.drafter.split("+").includes(source);

/** Whether the embedding is the only exit layer in use: several guesses for a place make trees. */
function readsEmbedding(choice) {
  const columns = columnsOf(choice);
  return columns.length === 1 && record.exit_layers[columns[0]] === 0 && record.guesses > 1;
}

const growsTrees = (choice) => readsEmbedding(choice) && choice.guesses > 1;

/** Sliders of one number: where it is kept, its bounds, and whether it means something. */
const NUMBERS = {
  "per-place": { name: "guesses", most: () => record.guesses, means: (choice) => drafts(choice, "exit") && readsEmbedding(choice) },
  width: { name: "width", most: () => record.max_draft_tokens, means: (choice) => drafts(choice, "exit") },
  rows: { name: "max_rows", most: () => data.most_rows, means: (choice) => drafts(choice, "exit") && growsTrees(choice) },
  "ngram-width": { name: "ngram_width", most: () => data.most_rows - 1, means: (choice) => drafts(choice, "ngram") },
};

const DRAFTERS = {
  "ngram+exit": "text seen, exit heads",
  exit: "exit heads",
  ngram: "text already seen",
  none: "nothing",
};

/** Exit layers that are switched on, rising. */
const layersIn = (choice) => record.exit_layers.filter((_, column) => choice.used[column]);

const copyOf = (choice) => ({
  ...choice,
  used: [...choice.used],
  thresholds: [...choice.thresholds],
});

/** Build the sliders; `changed(choice)` is called whenever one moves. */
function buildSettings(changed) {
  const choice = () => copyOf(view.choice ?? data.start);
  $("taus").append(...record.exit_layers.map((layer, column) => tauRow(layer, column, choice, changed)));
  const on = (id, change) =>
    $(id).addEventListener("input", (event) => {
      const next = choice();
      change(next, Number(event.target.value));
      changed(next);
    });
  on("alpha", (next, value) => (next.alpha = value));
  on("depth-max", (next, value) => (next.depth = layersIn(next)[value]));
  for (const [id, { name, most }] of Object.entries(NUMBERS)) {
    $(id).max = most();
    on(id, (next, value) => (next[name] = value));
  }
  $("drafter").append(...Object.entries(DRAFTERS).flatMap(([value, words]) =>
    record.exit_layers.length || !value.includes("exit") ? [el("option", { value }, words)] : [],
  ));
  $("drafter").addEventListener("change", () => changed({ ...choice(), drafter: $("drafter").value }));
  $("never-slower").addEventListener("change", () => changed({ ...choice(), never_slower: $("never-slower").checked }));
  const same = new Set(data.start.thresholds.filter((_, column) => data.start.used[column])).size === 1;
  $("one-tau").checked = same;
  $("alpha").max = record.anneal_strengths.length - 1;
  $("controls").hidden = false;
  $("controls").addEventListener("submit", (event) => event.preventDefault());
  document.querySelectorAll(".reset").forEach((button) => button.addEventListener("click", () => changed(null)));
}

/** One exit layer: whether it is asked, and its tau. */
function tauRow(layer, column, choice, changed) {
  const used = el("input", { type: "checkbox", "aria-label": `use exit layer ${layer}` });
  const value = el("output", {});
  const slider = el("input", {
    type: "range",
    min: record.min_threshold,
    max: 1,
    step: 0.005,
    "aria-label": `tau, exit threshold of layer ${layer}`,
    "data-layer": layer,
  });
  used.addEventListener("change", () => {
    const next = choice();
    next.used[column] = used.checked;
    const layers = layersIn(next);
    if (used.checked) next.depth = Math.max(next.depth, layer);
    else if (next.depth === layer) next.depth = layers.findLast((other) => other < layer) ?? layers[0];
    changed(next);
  });
  slider.addEventListener("input", () => {
    const next = choice();
    const tau = Number(slider.value);
    next.thresholds = next.thresholds.map((old, other) =>
      other === column || $("one-tau").checked ? tau : old,
    );
    changed(next);
  });
  controls.taus.push({ used, slider, value });
  return el("label", {}, el("span", {}, used, layer ? ` τ, layer ${layer}` : " τ, the embedding"), slider, value);
}

/** Move every slider to where `choice` is. */
function placeSettings(choice) {
  const [layers, exits] = [layersIn(choice), drafts(choice, "exit")];
  $("drafter").value = choice.drafter;
  $("taus").hidden = $("alpha-label").hidden = $("never-slower-label").hidden = !exits;
  $("one-tau-label").hidden = $("depth-label").hidden = !exits || record.exit_layers.length === 1;
  $("never-slower").checked = choice.never_slower;
  for (const [id, { name, means }] of Object.entries(NUMBERS)) {
    $(`${id}-label`).hidden = !means(choice);
    $(id).value = choice[name];
    $(`${id}-value`).textContent = choice[name];
  }
  controls.taus.forEach(({ used, slider, value }, column) => {
    used.hidden = record.exit_layers.length === 1;
    used.checked = choice.used[column];
    used.disabled = layers.length === 1 && used.checked;
    slider.disabled = !used.checked || record.exit_layers[column] > choice.depth;
    slider.value = choice.thresholds[column];
    value.textContent = slider.disabled ? "off" : decimal(choice.thresholds[column]);
  });
  $("alpha").value = choice.alpha;
  $("alpha").setAttribute("aria-valuetext", record.anneal_strengths[choice.alpha]);
  $("alpha-value").textContent = record.anneal_strengths[choice.alpha];
  $("depth-max").max = layers.length - 1;
  $("depth-max").value = layers.indexOf(choice.depth);
  $("depth-max").disabled = layers.length === 1;
  $("depth-max").setAttribute("aria-valuetext", `layer ${choice.depth}`);
  $("depth-max-value").textContent = choice.depth;
}

const RESULTS = [
  ["rounds", "verifications", (found) => found.rounds, 0],
  ["cr", "tokens / verification", (found) => found.compression_rate, 2],
  ["drafted", "drafts", (found) => found.drafted, 0],
  ["accepted", "accepted", (found) => found.accepted, 0],
  ["acceptance", "acceptance, %", (found) => 100 * found.acceptance_rate, 1],
  ["work", "layers run per token", (found) => found.row_layers / found.tokens, 1],
  ["speed", "predicted speed-up", (found) => found.speed_up, 3],
];

/** The table beside the sliders: what the settings used give, what these give, the change. */
function showResults(used, now) {
  const rows = RESULTS.map(([name, words, value, digits]) => {
    const [before, after] = [value(used), value(now)];
    const cells = before === null || Number.isNaN(before)
      ? ["–", "–", ""]
      : [before.toFixed(digits), after.toFixed(digits), signed(after - before, digits)];
    const better = Math.sign(after - before) * (name === "rounds" || name === "work" ? -1 : 1);
    const tone = name === "drafted" || name === "accepted" ? 0 : better;
    const [first, second, change] = cells.map((text) => el("td", {}, text));
    first.dataset.used = second.dataset.now = name;
    change.className = tone > 0 ? "good" : tone < 0 ? "bad" : "";
    return el("tr", {}, el("th", { scope: "row" }, words), first, second, change);
  });
  $("results").tBodies[0].replaceChildren(...rows);
  $("results").hidden = false;
}
