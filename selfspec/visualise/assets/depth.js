// One bar per token, as high as the layer from which on every first guess is the token; a dot where
// a fitted head said it first, whatever the layers between say.

const depth = { nodes: [], at: 0 };

/** The layer, L at most; a drawn token that the model does not prefer has none. */
const rightFrom = (place) => places[place].right_from;

function buildDepth() {
  depth.nodes = [...places.keys()].map((place) => {
    const layer = rightFrom(place);
    const shown = visible(finalText(place)).replaceAll("␣", " ").trim() || visible(finalText(place));
    const node = el("span", { role: "option", tabindex: -1, "aria-selected": false, dir: "auto" }, shown);
    node.style.setProperty("--share", (layer ?? info.num_layers) / info.num_layers);
    if (layer === null) node.classList.add("drawn");
    else node.style.setProperty("--deep-as", layerColour(layer, info.num_layers));
    node.place = place;
    const head = places[place].head_right;
    if (head !== null) {
      node.classList.add("said");
      node.style.setProperty("--said", head / info.num_layers);
    }
    return node;
  });
  const box = $("depth");
  box.append(...depth.nodes);
  depth.nodes[0].tabIndex = 0;
  const placeOf = (event) => event.target.closest("[role=option]")?.place;
  const look = (event) => {
    const place = placeOf(event);
    if (place !== undefined) choose(place);
  };
  box.addEventListener("pointerover", look);
  box.addEventListener("focusin", look);
  box.addEventListener("click", (event) => {
    if (placeOf(event) !== undefined) stepTo(placeOf(event));
  });
  box.addEventListener("keydown", walkDepth);
}

/** What the bar and the dot of a token say. */
function knownWords(place) {
  const layer = rightFrom(place);
  const head = places[place].head_right;
  const said = head === null ? "" : `; a fitted head says it at ${layerName(head)}`;
  return (layer === null ? "drawn: the model's likeliest is another" : `right from ${layerName(layer)} on`) + said;
}

function paintDepth() {
  view.story.places.forEach((told, place) => {
    const node = depth.nodes[place];
    for (const name of Object.values(CLASSES)) if (name) node.classList.toggle(name, CLASSES[told.source] === name);
    setExit(node, told);
    node.setAttribute("aria-label", `${visible(finalText(place))}, token ${place + 1}, ${knownWords(place)}, given by ${giverWords(told)}`);
  });
  const known = [...places.keys()].map(rightFrom).filter((layer) => layer !== null).sort((a, b) => a - b);
  const half = known[Math.floor((known.length - 1) / 2)];
  const looked = info.exit_layers.length;
  $("depth-hint").textContent =
    (known.length ? `Half of the tokens are known by ${layerName(half)} of ${info.num_layers}. ` : "") +
    "A low bar: the first layers would have said the same token, and so would all deeper ones. " +
    (depth.nodes.some((node) => node.classList.contains("said")) ? "A dot: a fitted exit head says it there. " : "") +
    (info.head_kinds.includes("logit-lens") ? "Layers without a fitted head are read by the model's own output layer. " : "") +
    (looked < info.num_layers - 1 ? `Looked at: ${looked} of ${info.num_layers} layers.` : "");
}

const layerName = (layer) => (layer ? `layer ${layer}` : "the embedding");

function stepTo(place) {
  for (const [at, on] of [[depth.at, false], [place, true]]) {
    depth.nodes[at].tabIndex = on ? 0 : -1;
    depth.nodes[at].setAttribute("aria-selected", on);
  }
  depth.at = place;
  depth.nodes[place].focus();
}

/** Left and right by a token, up and down by a line. */
function walkDepth(event) {
  const lines = { ArrowUp: -1, ArrowDown: 1 };
  const moves = { ArrowLeft: depth.at - 1, ArrowRight: depth.at + 1, Home: 0, End: places.length - 1 };
  const to = event.key in lines ? beside(lines[event.key]) : moves[event.key];
  if (to === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
  event.preventDefault();
  if (depth.nodes[to]) stepTo(to);
}

/** The nearest token of the line above or below. */
function beside(direction) {
  const from = depth.nodes[depth.at].getBoundingClientRect();
  let best;
  for (let at = depth.at + direction; depth.nodes[at]; at += direction) {
    const box = depth.nodes[at].getBoundingClientRect();
    const lines = Math.round(Math.abs(box.top - from.top) / from.height);
    if (lines > 1) break;
    const off = Math.abs(box.left - from.left);
    if (lines === 1 && (!best || off < best.off)) best = { at, off };
  }
  return best?.at;
}
