// One bar per token, as high as the layer from which on every first guess is the token; a dot where
// a fitted head said it first, whatever the layers between say.

const depths = places.map(({ right_from, head_right }, place) => {
  const shown = visible(finalText(place)).replaceAll("␣", " ").trim() || visible(finalText(place));
  const node = el("span", { role: "option", tabindex: -1, dir: "auto" }, shown);
  node.place = place;
  node.style.setProperty("--share", (right_from ?? data.num_layers) / data.num_layers);
  if (right_from !== null) node.style.setProperty("--deep-as", layerColour(right_from, data.num_layers));
  if (head_right !== null) node.style.setProperty("--said", head_right / data.num_layers);
  return node;
});

function buildDepth() {
  $("depth").append(...depths);
  walkable($("depth"), "[role=option]", ({ place }) => choose(place), (key, { place }) => {
    const to = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: depths.length - 1 };
    return depths[to[key]];
  });
  const known = places.map((place) => place.right_from).filter((layer) => layer !== null).sort((a, b) => a - b);
  const looked = data.exit_layers.length;
  $("depth-hint").textContent = [
    known.length && `Half of the tokens are known by ${layerName(known[(known.length - 1) >> 1])} of ${data.num_layers}.`,
    "A low bar: the first layers would have said the same token, and so would all deeper ones.",
    places.some((place) => place.head_right !== null) && "A dot: a fitted exit head says it there.",
    data.head_kinds.includes("logit-lens") && "Layers without a fitted head are read by the model's own output layer.",
    looked < data.num_layers - 1 && `Looked at: ${looked} of ${data.num_layers} layers.`,
  ].filter(Boolean).join(" ");
}

/** What the bar and the dot of a token say. */
function knownWords({ right_from, head_right }) {
  const said = head_right === null ? "" : `; a fitted head says it at ${layerName(head_right)}`;
  return (right_from === null ? "drawn: the model's likeliest is another" : `right from ${layerName(right_from)} on`) + said;
}

function paintDepth() {
  view.story.places.forEach((told, place) => {
    const { right_from, head_right } = places[place];
    const base = [right_from === null && "drawn", head_right !== null && "said"].filter(Boolean).join(" ");
    dress(depths[place], base, told);
    depths[place].setAttribute("aria-label", `${visible(finalText(place))}, token ${place + 1}, ${knownWords(places[place])}, given by ${told.giver.words}`);
  });
}
