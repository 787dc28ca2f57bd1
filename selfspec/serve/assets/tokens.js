// Sources of tokens: their classes and words, for the answers and the legend.

const GIVERS = JSON.parse($("givers").textContent);

const giverOf = (source) => GIVERS.find((giver) => giver.source === source) ?? { look: "seen", words: source };

/** Colour an element by the source of its text. */
function dress(node, { source, layer, numLayers }) {
  node.className = `piece ${giverOf(source).look}`;
  node.dataset.source = source;
  if (layer !== null) node.style.setProperty("--exit", layerColour(layer, numLayers));
  node.title = source === "model" ? "given by the model" : `a draft of ${namesOf(source, layer)}`;
  return node;
}

function namesOf(source, layer) {
  if (source !== "exit") return giverOf(source).words;
  return layer ? `the exit head at layer ${layer}` : "the exit head on the embedding";
}

/** A rejected draft, as small text that is struck through. */
function rejectedDraft({ draft, behind, numLayers }) {
  const node = dress(el("del", {}), { ...draft, numLayers });
  node.className = behind ? "reject" : "reject other";
  node.title = `${node.title}, rejected`;
  node.textContent = draft.text.replaceAll("\n", "⏎").replace(/^ +$/, "␣") || "∅";
  return node;
}

/** Rejected drafts of a round, by the position of the token that replaced them. */
function rejectedOf({ drafts }) {
  const next = []; // by draft: the position after it, or its own if it was rejected
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
  $("legend").append(...GIVERS.map(({ source, look, words, line }, place) => {
    const shown = el("span", { class: `piece ${look}` }, line);
    if (source === "exit") shown.classList.add("depths");
    const rare = GIVERS.findIndex((giver) => giver.look === look) < place; // shown once it gave a token
    return el("li", rare ? { hidden: "" } : {}, shown, el("span", {}, words), el("output", { "data-count": source }, ""));
  }));
}

/** Show how many tokens of an answer each source gave. */
function countInLegend(bySource) {
  for (const { source } of GIVERS) {
    const count = document.querySelector(`[data-count="${source}"]`);
    count.textContent = bySource[source] ?? "";
    if (bySource[source]) count.parentElement.hidden = false;
  }
}
