// What rounds made of each token: told once, drawn by the answer, the map and the staircase.

const data = JSON.parse($("data").textContent);
const { info, places } = data;
const record = data.record && (await unpackRecord(data.record).catch(() => null));
const textById = new Map(data.words.map(([token, text]) => [token, text]));
const textOf = (word) => data.words[word][1];
const tokenOf = (word) => data.words[word][0];
const finalText = (place) => textOf(places[place].word);

/** Texts of a round's drafts; a replay may draft behind a wrong draft what the trace never saw. */
function draftTexts(entry) {
  if (entry.drafts) return entry.drafts.map(textOf);
  return entry.draft_tokens.map((token) => textById.get(token) ?? `#${token}`);
}

/**
 * Rounds -> for each place who drafted it and what was rejected there; for each round its rows
 * (`columns`) and passes (`boxes`, numbered by `step` over the whole answer).
 */
function tell(rounds) {
  const story = { rounds, places: [], groups: [], steps: 0 };
  let known = 0;
  for (const [index, entry] of rounds.entries()) {
    const boxes = boxesOf(entry, story.steps);
    story.steps += boxes.length;
    const drafts = draftTexts(entry);
    entry.tokens.forEach((_, offset) => {
      const draft = entry.kept[offset] ?? null;
      const rejected = draft === null ? [...drafts.keys()].filter((d) => !entry.kept.includes(d)) : [];
      story.places.push({
        round: index,
        kind: entry.prefill ? "prefill" : draft === null ? "bonus" : "accepted",
        source: draft === null ? null : entry.sources[draft],
        exit: draft === null ? null : exitOf(entry, draft),
        rejected: rejected.map((d) => drafts[d]),
        rejectedAt: rejected.length ? exitOf(entry, rejected[0]) : null,
        step: story.steps,
      });
    });
    story.groups.push({ index, entry, boxes, columns: columnsOf(entry, known - 1, drafts) });
    known += entry.tokens.length;
  }
  return story;
}

/** The exit layer where a draft left; null: it came from elsewhere. */
const exitOf = (entry, draft) => (entry.sources[draft] === "exit" ? entry.exit_layers[draft] : null);

/** Rows of a round: the newest token, then every draft. In a tree siblings share a place. */
function columnsOf(entry, newest, drafts) {
  if (entry.prefill) return [];
  const parents = entry.parents ?? drafts.map((_, draft) => draft - 1);
  const depths = [0];
  for (const parent of parents) depths.push(depths[parent + 1] + 1);
  return [finalText(newest), ...drafts].map((text, row) => {
    const following = [...drafts.keys()].filter((draft) => parents[draft] === row - 1);
    const kept = following.find((draft) => entry.kept.includes(draft));
    const told = kept ?? following[0];
    return {
      text,
      place: newest + depths[row],
      depth: depths[row],
      parent: row ? parents[row - 1] + 1 : null,
      kept: row === 0 || entry.kept.includes(row - 1),
      exit: told === undefined ? null : exitOf(entry, told),
      right: kept !== undefined,
    };
  });
}

/** Which rows each pass carried: it goes on where the first of its layers has stopped. */
function boxesOf(entry, step) {
  const held = new Array(info.num_layers).fill(0);
  return entry.passes.map(([rows, first, last], index) => {
    const from = held[first];
    held.fill(from + rows, first, last);
    return { from, rows, first, last, number: index + 1, step: step + index };
  });
}

const ENDED = {
  depth: "no layer was sure enough",
  width: "W_max drafts",
  budget: "no room for more tokens",
  eos: "the draft closed the answer",
  unsure: "more would not have paid",
  off: "nothing was to be drafted",
};

/** A round in words. */
function describeRound(group) {
  const { entry, index } = group;
  if (entry.prefill) {
    return `The prompt's own pass: ${entry.passes.map(([rows]) => rows).join(" + ")} tokens through all ${info.num_layers} layers.`;
  }
  const made = plural(entry.draft_tokens.length, "draft");
  return `Round ${index}: ${made}${entry.parents ? " in a tree" : ""}, ${entry.kept.length} kept. Drafting ended: ${ENDED[entry.ended]}.`;
}

/** A pass in words. */
function describePass({ rows, first, last }) {
  const layers = last - first === 1 ? `layer ${last}` : `layers ${first + 1}‥${last}`;
  return `${plural(rows, "row")} through ${layers}`;
}
