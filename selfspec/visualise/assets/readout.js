// The box with all details of the cell or token under the pointer.

/** Show one layer's guess at one position. */
function readCell(place, index) {
  const says = places[place].layers[index];
  const layer = data.exit_layers[index];
  const tau = data.thresholds[index];
  const isSure = says.sure >= tau;
  const right = tokenOf(says.top[0]) === tokenOf(places[place].word);
  const facts = [
    ["confidence", decimal(says.sure), `τ ${decimal(tau)}: ${isSure ? "sure enough for a draft" : "not sure enough"}`],
    ["rank", says.rank || "–", says.rank ? "of the emitted token here" : "not in the draft vocabulary"],
    ["KL", decimal(says.kl), "nats, from the whole model's distribution"],
  ].map(([name, value, meaning]) => el(
    "div",
    {},
    el("dt", {}, name),
    el("dd", {}, el("b", { "data-field": name }, String(value)), " ", el("small", {}, meaning)),
  ));
  $("readout").replaceChildren(
    heading(`layer ${layer}`, data.head_kinds[index], place),
    bars(says, place),
    el("dl", {}, ...facts),
    el("p", { class: right ? "good" : "bad" }, verdict(places[place], layer, right, isSure)),
  );
}

function verdict(told, layer, right, isSure) {
  if (told.giver.layer === layer) return "● A draft was made here, and it was kept.";
  if (told.rejected.some((branch) => branch.layer === layer)) return "✕ A draft was made here, and verification rejected it.";
  if (right) return isSure ? "Right, and sure enough." : "Right, but not sure enough.";
  return isSure ? "Sure enough for a draft, and wrong." : "Wrong, and not sure enough.";
}

/** The layer from which all guesses are the token, and the first fitted head that predicts it. */
function knownWords({ right_from, head_right }) {
  const said = head_right === null ? "" : `; a fitted head predicts it at ${layerName(head_right)}`;
  return (right_from === null ? "sampled: the model prefers another token" : `right from ${layerName(right_from)} on`) + said;
}

/** Show the whole model's distribution at a position, and the token's source. */
function readPlace(place) {
  const told = places[place];
  const from = told.round === 0
    ? "given by the prompt's pass"
    : `${isDraft(told) ? `a draft of ${told.giver.words} that was kept` : "given by verification"}, round ${told.round}`;
  const origin = originOf(place);
  const quoted = origin ? [`from ${origin.where}: … ${origin.before}`, el("mark", {}, origin.token), `${origin.after} …`] : [];
  const struck = told.rejected.flatMap(({ visible }) => [el("del", {}, visible), " "]);
  $("readout").replaceChildren(
    heading("whole model", `layer ${data.num_layers}`, place),
    bars(places[place], place),
    el("p", {}, from),
    ...(origin ? [el("p", { class: "quote" }, ...quoted)] : []),
    el("p", {}, `${knownWords(places[place])}.`),
    ...(struck.length ? [el("p", { class: "bad" }, "rejected here: ", ...struck)] : []),
  );
}

function heading(where, kind, place) {
  const token = el("span", { class: "token" }, finalVisible(place));
  return el("h3", {}, token, ` token ${place + 1} · ${where} `, el("small", {}, kind));
}

/** The likeliest tokens with their probabilities; the emitted one is ticked. */
function bars({ top, probs }, place) {
  const rows = top.map((word, index) => {
    const emitted = tokenOf(word) === tokenOf(places[place].word);
    const bar = el("i", { class: "bar" });
    bar.style.setProperty("--share", probs[index]);
    return el(
      "tr",
      { class: emitted ? "emitted" : "" },
      el("td", { class: "token", dir: "auto" }, visibleOf(word)),
      el("td", { class: "number" }, decimal(probs[index], 4)),
      el("td", { class: "share" }, bar),
      el("td", {}, emitted ? "✓" : ""),
    );
  });
  return el("table", { class: "bars", "aria-label": "likeliest tokens" }, el("tbody", {}, ...rows));
}
