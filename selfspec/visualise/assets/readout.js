// The box that says everything about what is pointed at: a cell or a token.

/** What one layer's head says of one place. */
function readCell(place, index) {
  const says = places[place].layers[index];
  const layer = info.exit_layers[index];
  const tau = view.tauOf(layer);
  const sure = says.sure;
  const right = tokenOf(says.top[0]) === tokenOf(places[place].word);
  show(
    heading(`layer ${layer}`, info.head_kinds[index], place),
    bars(says.top, says.probs, place),
    facts({
      confidence: [decimal(sure), `τ ${decimal(tau)}: ${sure >= tau ? "sure enough for a draft" : "not sure enough"}`],
      rank: says.rank ? [String(says.rank), "of the emitted token here"] : ["–", "not in the draft vocabulary"],
      KL: [decimal(says.kl), "nats away from the whole model"],
    }),
    el("p", { class: right ? "good" : "bad" }, verdict(place, layer, right, sure >= tau)),
  );
}

function verdict(place, layer, right, confident) {
  const told = view.story.places[place];
  if (told.exit === layer) return "● A draft was made here, and it was kept.";
  if (told.rejectedAt.includes(layer)) return "✕ A draft was made here, and verification rejected it.";
  if (right) return confident ? "Right, and sure enough." : "Right, but not sure enough.";
  return confident ? "Sure enough for a draft, and wrong." : "Another token, but not sure of it.";
}

/** What the whole model said, and how the token came to be. */
function readPlace(place) {
  const told = view.story.places[place];
  const from = {
    prefill: "given by the prompt's own pass",
    bonus: `given by verification, round ${told.round}`,
    accepted: `a draft of ${giverWords(told)} that was kept, round ${told.round}`,
  }[told.kind];
  const rejected = told.rejected.length
    ? [el("p", { class: "bad" }, "rejected here: ", ...told.rejected.flatMap((text) => [el("del", {}, visible(text)), " "]))]
    : [];
  show(
    heading("whole model", `layer ${info.num_layers}`, place),
    bars(places[place].final, places[place].final_probs, place),
    el("p", {}, from),
    ...origin(place),
    el("p", {}, `${knownWords(place)}.`),
    ...rejected,
  );
}

/** The words that a token was copied from. */
function origin(place) {
  const found = view.choice ? null : originWords(place);
  if (!found) return [];
  const quoted = [`from ${found.where}: … ${found.before}`, el("mark", {}, found.token), `${found.after} …`];
  return [el("p", { class: "quote" }, ...quoted)];
}

function heading(where, kind, place) {
  return el(
    "h3",
    {},
    el("span", { class: "token" }, visible(finalText(place))),
    ` token ${place + 1} · ${where} `,
    el("small", {}, kind),
  );
}

/** The likeliest tokens with their probabilities; the emitted one is ticked. */
function bars(words, probs, place) {
  const emitted = tokenOf(places[place].word);
  const rows = words.map((word, index) => {
    const bar = el("i", { class: "bar" });
    bar.style.setProperty("--share", probs[index] ?? 0);
    const tick = tokenOf(word) === emitted ? "✓" : "";
    return el(
      "tr",
      tick ? { class: "emitted" } : {},
      el("td", { class: "token", dir: "auto" }, visible(textOf(word))),
      el("td", { class: "number" }, decimal(probs[index], 4)),
      el("td", { class: "share" }, bar),
      el("td", {}, tick),
    );
  });
  return el("table", { class: "bars", "aria-label": "likeliest tokens" }, el("tbody", {}, ...rows));
}

function facts(entries) {
  const rows = Object.entries(entries).map(([name, [value, meaning]]) =>
    el(
      "div",
      {},
      el("dt", {}, name),
      el("dd", {}, el("b", { "data-field": name }, value), " ", el("small", {}, meaning)),
    ),
  );
  return el("dl", {}, ...rows);
}

function show(...children) {
  $("readout").replaceChildren(...children);
}
