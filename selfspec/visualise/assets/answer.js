// The text, each token in the colour of who gave it.

const answer = [];

function buildAnswer() {
  for (const place of places.keys()) {
    const token = el("span", { class: "piece" });
    token.addEventListener("pointerover", () => choose(place));
    token.addEventListener("click", () => choose(place));
    answer.push(token);
  }
  $("answer").append(...answer);
  $("rejects").addEventListener("change", paintAnswer);
}

function paintAnswer() {
  view.story.places.forEach((told, place) => {
    const token = answer[place];
    const struck = $("rejects").checked
      ? told.rejected.map((text) => el("del", {}, text.replaceAll("\n", "⏎")))
      : [];
    token.replaceChildren(...struck, finalText(place));
    setClass(token, `piece ${CLASSES[told.source]}`.trimEnd());
    setExit(token, told);
    token.title = told.source === "model" ? "" : titleOf(told, place);
  });
  $("answer-legend").replaceChildren(...legend());
}

/** What hovering says. */
function titleOf(told, place) {
  const origin = told.source === "ngram" && !view.choice ? originWords(place) : null;
  if (!origin) return `a draft of ${giverWords(told)}`;
  return `text already seen, in ${origin.where}: … ${origin.before}[${origin.token}]${origin.after} …`;
}

/** Who gave how many tokens: the model, text already seen, then layers from shallow to deep. */
function legend() {
  const counts = new Map();
  for (const told of view.story.places) {
    const key = `${told.source} ${told.exit}`;
    counts.set(key, { told, count: (counts.get(key)?.count ?? 0) + 1 });
  }
  const order = ["model", "ngram", "grammar", "draft-model", "exit"];
  const rank = ({ told }) => 1000 * order.indexOf(told.source) + (told.exit ?? 0);
  return [...counts.values()].sort((a, b) => rank(a) - rank(b)).map(({ told, count }) => {
    const swatch = el("i", { class: "swatch" });
    swatch.style.background = giverColour(told);
    return el("span", {}, swatch, ` ${giverWords(told)} `, el("b", {}, String(count)));
  });
}

/** Say everything about a token, and mark it and what it was copied from. */
function choose(place) {
  readPlace(place);
  markToken(place);
}

function markToken(place) {
  const copied = view.choice ? null : originWords(place)?.place ?? null;
  for (const [name, at] of [["pointed", place], ["origin", copied]]) {
    document.querySelectorAll(`.${name}`).forEach((node) => node.classList.remove(name));
    if (at === null) continue;
    answer[at].classList.add(name);
    depth.nodes[at].classList.add(name);
  }
}
