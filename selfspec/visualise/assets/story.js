// What rounds made of each token: told once, drawn by the answer, the depths, the table and the lanes.

const data = JSON.parse($("data").textContent);
const { info, places } = data;
const textOf = (word) => data.words[word][1];
const tokenOf = (word) => data.words[word][0];
const finalText = (place) => textOf(places[place].word);

/** A round as page.py packs it: who gave a draft is an exit layer or a name. */
function roundAt(index) {
  const [count, words, givers, parents, kept, prefill, drafting, verifying] = data.rounds[index];
  return { count, words, givers, parents, kept, prefill, drafting, verifying };
}

/** Rounds by index -> for each place who gave it, and what was rejected there. */
function tell(indices) {
  const story = { rounds: indices.map(roundAt), places: [] };
  for (const [index, entry] of story.rounds.entries()) {
    const rejected = rejectedOf(entry);
    for (let offset = 0; offset < entry.count; offset += 1) {
      const draft = entry.kept[offset] ?? null;
      const there = rejected.get(offset) ?? [];
      const exit = draft === null ? null : exitOf(entry, draft);
      story.places.push({
        round: index,
        kind: entry.prefill ? "prefill" : draft === null ? "bonus" : "accepted",
        source: draft === null ? "model" : exit === null ? entry.givers[draft] : "exit",
        exit,
        rejected: there.map((branch) => branch.text),
        rejectedAt: there.map((branch) => branch.exit),
      });
    }
  }
  return story;
}

/** The exit layer where a draft left; null: it came from elsewhere. */
const exitOf = (entry, draft) => (typeof entry.givers[draft] === "number" ? entry.givers[draft] : null);

/** Drafts that were not kept, by the token of the round that stands in their place. */
function rejectedOf(entry) {
  const found = new Map();
  const branchOf = new Map();
  entry.words.forEach((word, draft) => {
    const text = textOf(word);
    if (entry.kept.includes(draft)) return;
    const parent = entry.parents ? entry.parents[draft] : draft - 1;
    const branch = branchOf.get(parent);
    if (branch) { // it stands behind a wrong draft
      branch.text += text;
      branchOf.set(draft, branch);
      return;
    }
    const offset = parent < 0 ? 0 : entry.kept.indexOf(parent) + 1;
    const begun = { text, exit: exitOf(entry, draft) };
    branchOf.set(draft, begun);
    found.set(offset, [...(found.get(offset) ?? []), begun]);
  });
  return found;
}

const CLASSES = { exit: "left", ngram: "seen", grammar: "grammar", "draft-model": "second", model: "" };

/** Who gave a token, in words. */
function giverWords({ source, exit }) {
  if (source !== "exit") return data.names[source];
  return exit ? `exit layer ${exit}` : "the embedding";
}

/** The colour of its tokens. */
function giverColour({ source, exit }) {
  if (source === "exit") return layerColour(exit, info.num_layers);
  return source === "model" ? "var(--other)" : `var(--${CLASSES[source]})`;
}

/** The colour of an exit layer; other givers have theirs by class. */
function setExit(node, told) {
  if (told.exit === null) node.style.removeProperty("--exit");
  else node.style.setProperty("--exit", giverColour(told));
}

/** Where a token of the decode was copied from, in words; null: it was not. */
function originWords(place) {
  const from = places[place].copied_from;
  if (from === null) return null;
  const asked = info.prompt_texts;
  const inAnswer = from - asked.length;
  const texts = inAnswer < 0 ? asked : places.map((_, index) => finalText(index));
  const at = inAnswer < 0 ? from : inAnswer;
  const words = texts.slice(Math.max(0, at - 6), at).join("");
  return {
    where: inAnswer < 0 ? "the prompt" : `token ${inAnswer + 1} of this answer`,
    before: words,
    token: texts[at],
    after: texts.slice(at + 1, at + 5).join(""),
    place: inAnswer < 0 ? null : inAnswer,
  };
}
