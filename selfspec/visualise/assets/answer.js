// The text, each token in the colour of who gave it.

const answer = [...places.keys()].map((place) => {
  const token = el("span", { class: "piece" });
  for (const name of ["pointerover", "click"]) token.addEventListener(name, () => choose(place));
  return token;
});

function buildAnswer() {
  $("answer").append(...answer);
  $("rejects").addEventListener("change", paintAnswer);
}

function paintAnswer() {
  const counts = new Map();
  view.story.places.forEach((told, place) => {
    const struck = $("rejects").checked
      ? told.rejected.map(({ text }) => el("del", {}, text.replaceAll("\n", "⏎")))
      : [];
    answer[place].replaceChildren(...struck, finalText(place));
    dress(answer[place], "piece", told);
    answer[place].title = isDraft(told) ? titleOf(told, place) : "";
    counts.set(told.giver, (counts.get(told.giver) ?? 0) + 1);
  });
  const legend = data.givers.filter((giver) => counts.has(giver)).map((giver) => {
    const swatch = el("i", { class: "swatch other" });
    if (giver.colour) swatch.style.background = giver.colour;
    return el("span", {}, swatch, ` ${giver.words} `, el("b", {}, String(counts.get(giver))));
  });
  $("answer-legend").replaceChildren(...legend);
}

/** What hovering says. */
function titleOf(told, place) {
  const origin = originOf(place);
  if (!origin) return `a draft of ${told.giver.words}`;
  return `prompt lookup, in ${origin.where}: … ${origin.before}[${origin.token}]${origin.after} …`;
}

/** Say everything about a token, and mark it and what it was copied from. */
function choose(place) {
  readPlace(place);
  markToken(place);
}

function markToken(place) {
  for (const [name, at] of [["pointed", place], ["origin", originOf(place)?.place ?? null]]) {
    document.querySelectorAll(`.${name}`).forEach((node) => node.classList.remove(name));
    if (at === null) continue;
    answer[at].classList.add(name);
    depths[at].classList.add(name);
  }
}
