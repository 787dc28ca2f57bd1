// The text, each token in the colour of its source. Arrow keys move along it.

const answer = places.map((told, place) => {
  const token = Object.assign(el("span", { role: "option", tabindex: -1 }), { place });
  dress(token, "piece", told);
  token.setAttribute("aria-label", `${finalVisible(place)}, token ${place + 1}, given by ${told.giver.words}, ${knownWords(told)}`);
  if (isDraft(told)) token.title = titleOf(told, place);
  return token;
});

function buildAnswer() {
  const isCode = /^ {0,3}```|^[{[]/m.test(places.map((_, place) => finalText(place)).join(""));
  document.querySelector("main").classList.toggle("code", isCode);
  $("answer").append(...answer);
  walkable($("answer"), "[role=option]", ({ place }) => choose(place), (key, { place }) => {
    const to = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: answer.length - 1 };
    return answer[to[key]];
  });
  $("rejects").addEventListener("change", paintAnswer);
  paintAnswer();
  $("answer-legend").append(...data.givers.map((giver) => {
    const swatch = el("i", { class: "swatch other" });
    if (giver.colour) swatch.style.background = giver.colour;
    return el("span", {}, swatch, ` ${giver.words} `, el("b", {}, String(giver.count)));
  }));
}

/** Show the answer, with or without rejected drafts. */
function paintAnswer() {
  for (const [place, { rejected }] of places.entries()) {
    const struck = $("rejects").checked ? rejected.map(({ text }) => el("del", {}, text.replaceAll("\n", "⏎"))) : [];
    answer[place].replaceChildren(...struck, finalText(place));
  }
}

/** The tooltip of a token. */
function titleOf(told, place) {
  const origin = originOf(place);
  if (!origin) return `a draft of ${told.giver.words}`;
  return `prompt lookup, in ${origin.where}: … ${origin.before}[${origin.token}]${origin.after} …`;
}

/** Show all about a token in the readout; mark it and the token that it was copied from. */
function choose(place) {
  readPlace(place);
  markToken(place);
}

function markToken(place) {
  for (const [name, at] of [["pointed", place], ["origin", originOf(place)?.place ?? null]]) {
    document.querySelectorAll(`.${name}`).forEach((node) => node.classList.remove(name));
    if (at !== null) answer[at].classList.add(name);
  }
}
