// The data of each token, for the answer, the table and the lanes.

const data = JSON.parse($("data").textContent);
const { places } = data;
for (const told of places) told.giver = data.givers[told.giver];

const tokenOf = (word) => data.words[word][0];
const visibleOf = (word) => data.words[word][2];
const finalText = (place) => data.words[places[place].word][1];
const finalVisible = (place) => visibleOf(places[place].word);
const layerName = (layer) => (layer ? `layer ${layer}` : "the embedding");
const isDraft = ({ giver }) => giver.colour !== null;

/** Style a node by its token's source. */
function dress(node, base, told) {
  node.className = `${base} ${told.giver.look}`.trim();
  if (isDraft(told)) node.style.setProperty("--exit", told.giver.colour);
}

/** The place that an answer's token was copied from; null if it was not copied. */
function originOf(place) {
  const from = places[place].copied_from;
  if (from === null) return null;
  const asked = data.prompt_texts;
  const inPrompt = from < asked.length;
  const at = inPrompt ? from : from - asked.length;
  const texts = inPrompt ? asked : places.map((_, index) => finalText(index));
  return {
    where: inPrompt ? "the prompt" : `token ${at + 1} of this answer`,
    before: texts.slice(Math.max(0, at - 6), at).join(""),
    token: texts[at],
    after: texts.slice(at + 1, at + 5).join(""),
    place: inPrompt ? null : at,
  };
}

/** Make `box` one tab stop with key navigation: `next(key, node)` is the node to move to, if any. */
function walkable(box, selector, look, next) {
  const nodeOf = (event) => event.target.closest(selector);
  let [at, pointed] = [box.querySelector(selector), null];
  at.tabIndex = 0;
  box.addEventListener("pointermove", (event) => { // not pointerover, which fires for nodes that scroll under the pointer
    const node = nodeOf(event);
    if (node && node !== pointed) look(node);
    pointed = node;
  });
  box.addEventListener("focusin", (event) => {
    if (!nodeOf(event)) return;
    [at.tabIndex, at, pointed] = [-1, nodeOf(event), null];
    at.tabIndex = 0;
    look(at);
  });
  box.addEventListener("keydown", (event) => {
    const to = event.ctrlKey || event.altKey || event.metaKey ? undefined : next(event.key, at);
    if (!to) return;
    event.preventDefault();
    to.focus();
  });
}
