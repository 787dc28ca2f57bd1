// Who gave a token: classes and words for it. One list, read by the answers and the legend, which
// shows the rare ones when they gave some.

const GIVERS = [
  { source: "model", kind: "piece", words: "the whole model", sample: "plain" },
  { source: "exit", kind: "piece left", words: "an exit head, by its layer: from shallow to deep", sample: "line" },
  { source: "ngram", kind: "piece seen", words: "prompt lookup", sample: "dots" },
  { source: "grammar", kind: "piece grammar", words: "the grammar of a format", sample: "dashes" },
  { source: "draft-model", kind: "piece second", words: "a draft model", sample: "two lines" },
  { source: "successors", kind: "piece seen", words: "successors seen before", sample: "dots", rare: true },
  { source: "rest", kind: "piece seen", words: "a datastore", sample: "dots", rare: true },
  { source: "lookahead", kind: "piece seen", words: "lookahead", sample: "dots", rare: true },
  { source: "skip", kind: "piece second", words: "fewer of its layers", sample: "two lines", rare: true },
];

const giverOf = (source) => GIVERS.find((giver) => giver.source === source) ?? { kind: "piece seen", words: source };

/** Colour an element by who gave its text. */
function dress(node, { source, layer, numLayers }) {
  node.className = giverOf(source).kind;
  node.dataset.source = source;
  if (layer !== null) node.style.setProperty("--exit", layerColour(layer, numLayers));
  node.title = source === "model" ? "given by the whole model" : `a draft of ${namesOf(source, layer)}`;
  return node;
}

function namesOf(source, layer) {
  if (source !== "exit") return giverOf(source).words;
  return layer ? `the exit head at layer ${layer}` : "the exit head on the embedding";
}

/** A draft that did not stay, as small text that is struck through. */
function rejectedDraft({ draft, behind, numLayers }) {
  const node = dress(el("del", {}), { ...draft, numLayers });
  node.className = behind ? "reject" : "reject other";
  node.title = `${node.title}, rejected`;
  node.textContent = draft.text.replaceAll("\n", "⏎").replace(/^ +$/, "␣") || "∅";
  return node;
}

/** Drafts of a round that did not stay, by the place of the token that stands there instead. */
function rejectedOf({ drafts }) {
  const next = []; // by draft: the place behind it, or where it would have stood
  const found = new Map();
  let kept = 0;
  for (const [index, draft] of drafts.entries()) {
    const place = next[draft.parent] ?? 0;
    next[index] = draft.accepted ? (kept += 1) : place;
    if (draft.accepted) continue;
    const behind = draft.parent === index - 1 && drafts[index - 1]?.accepted === false;
    found.set(place, [...(found.get(place) ?? []), { draft, behind }]);
  }
  return found;
}

function buildLegend() {
  $("legend").append(...GIVERS.map(({ source, kind, words, sample, rare = false }) => {
    const shown = el("span", { class: kind }, sample);
    if (source === "exit") shown.classList.add("depths");
    return el("li", rare ? { hidden: "" } : {}, shown, el("span", {}, words), el("output", { "data-count": source }, ""));
  }));
}

/** How many tokens of an answer each gave. */
function countInLegend(bySource) {
  for (const { source } of GIVERS) {
    const count = document.querySelector(`[data-count="${source}"]`);
    count.textContent = bySource[source] ?? "";
    if (bySource[source]) count.parentElement.hidden = false;
  }
}
