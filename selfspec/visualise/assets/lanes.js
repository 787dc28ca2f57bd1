// Time from left to right: plain decoding above, drafting, verifying and what was kept below it; and
// both as a race. Times are predicted by what passes cost on the machine; without costs a
// verification counts as one step, and drafts as nothing.

const RACE_MS = 12_000; // at most
const LANES = ["plain", "draft", "verify", "kept"];
const ROW = 26; // px
const LEFT = 48;

const race = { plain: [], drafts: [], end: 0, now: 0, frame: 0, shown: {} };

const isPriced = data.plain_step !== null;
const plainStep = data.plain_step ?? 1;

/** When each token is there, and what each round did when; the prompt's pass is left out. */
function schedule() {
  const found = { blocks: [], plain: [], drafts: [] };
  let now = 0;
  for (const entry of view.story.rounds) {
    const began = now;
    if (!entry.prefill) {
      const { drafting, verifying } = entry;
      found.blocks.push({ lane: "draft", from: now, until: now + drafting });
      found.blocks.push({ lane: "verify", from: now + drafting, until: now + drafting + verifying });
      now += drafting + verifying;
    }
    const share = (now - began) / entry.count;
    for (let index = 0; index < entry.count; index += 1) {
      const from = began + index * share;
      found.blocks.push({ lane: "kept", from, until: from + share, place: found.drafts.length });
      found.plain.push(found.drafts.length * plainStep);
      found.drafts.push(now);
    }
  }
  return found;
}

function paintLanes() {
  const { blocks, plain, drafts } = schedule();
  Object.assign(race, { plain, drafts, end: Math.max(plain.at(-1), drafts.at(-1)) });
  const width = Math.max(280, $("lanes").clientWidth);
  const x = (time) => LEFT + (width - LEFT) * (race.end ? time / race.end : 0);
  const wide = (from, until) => ({ x: x(from).toFixed(2), width: Math.max(0.5, x(until) - x(from) - 0.6).toFixed(2), height: ROW - 8 });
  const lanes = LANES.filter((lane) => lane === "plain" || blocks.some((block) => block.lane === lane && block.until > block.from));
  const y = (lane) => lanes.indexOf(lane) * ROW + 4;
  const drawn = svg("svg", { width, height: lanes.length * ROW + 4, role: "img", "aria-label": raceWords() });
  for (const lane of lanes) drawn.append(svg("text", { x: LEFT - 8, y: y(lane) + 13 }, lane));
  plain.slice(1).forEach((until, index) => drawn.append(svg("rect", { ...wide(plain[index], until), y: y("plain"), class: "plain" })));
  for (const { lane, from, until, place } of blocks) {
    if (until <= from) continue;
    const block = svg("rect", { ...wide(from, until), y: y(lane), class: lane });
    if (lane === "kept") block.style.fill = giverColour(view.story.places[place]);
    drawn.append(block);
  }
  race.hand = svg("line", { y1: 0, y2: lanes.length * ROW, class: "hand" });
  race.x = x;
  drawn.append(race.hand);
  $("lanes").replaceChildren(drawn);
  $("lanes-hint").textContent = raceWords();
  moveTo(race.end);
}

function raceWords() {
  const [ours, plain] = [race.drafts.at(-1), race.plain.at(-1)];
  const words = (time) => (isPriced ? `${time.toFixed(2)} s` : plural(Math.round(time), "step"));
  const how = isPriced ? "by what passes cost on this machine" : "each pass of the whole model counts as a step, drafts as nothing";
  return `With drafts ${words(ours)}, plain decoding ${words(plain)}, both after the first token; ${how}.`;
}

/** Show both texts as they are at a time. */
function moveTo(now) {
  race.now = now;
  for (const name of ["plain", "drafts"]) {
    const until = race[name].filter((at) => at <= now + 1e-9).length;
    const nodes = race.nodes[name];
    for (let at = Math.min(until, race.shown[name] ?? 0); at < nodes.length; at += 1) {
      const later = at >= until;
      if (nodes[at].hidden !== later) nodes[at].hidden = later;
    }
    race.shown[name] = until;
    $(`${name}-count`).textContent = `${until} of ${places.length}`;
    const box = $(`${name}-text`);
    box.scrollTop = box.scrollHeight;
  }
  const at = race.x(now);
  race.hand.setAttribute("x1", at);
  race.hand.setAttribute("x2", at);
  $("time").value = race.end ? Math.round((1000 * now) / race.end) : 1000;
  const words = isPriced ? `${now.toFixed(2)} s` : plural(Math.round(now), "step");
  $("time-value").textContent = words;
  $("time").setAttribute("aria-valuetext", words);
}

function playRace() {
  if (race.frame) return stopRace();
  const from = race.now >= race.end ? 0 : race.now;
  const lasts = isPriced ? Math.min(RACE_MS, 1000 * race.end) : RACE_MS;
  const began = performance.now() - (race.end ? (lasts * from) / race.end : 0);
  $("play").textContent = "pause";
  const tick = (time) => {
    const share = Math.min(1, Math.max(0, (time - began) / lasts));
    moveTo(share * race.end);
    race.frame = share < 1 ? requestAnimationFrame(tick) : 0;
    if (!race.frame) stopRace();
  };
  race.frame = requestAnimationFrame(tick);
}

function stopRace() {
  cancelAnimationFrame(race.frame);
  race.frame = 0;
  $("play").textContent = "play the race";
}

/** Wire lanes and race up. */
function buildLanes() {
  const nodes = () => [...places.keys()].map((place) => el("span", {}, finalText(place)));
  race.nodes = { plain: nodes(), drafts: nodes() };
  for (const name of ["plain", "drafts"]) $(`${name}-text`).append(...race.nodes[name]);
  $("play").addEventListener("click", playRace);
  $("time").addEventListener("input", (event) => {
    stopRace();
    moveTo((race.end * Number(event.target.value)) / 1000);
  });
  let width = $("lanes").clientWidth;
  new ResizeObserver(([{ contentRect }]) => {
    if (Math.floor(contentRect.width) === width) return;
    width = Math.floor(contentRect.width);
    paintLanes();
  }).observe($("lanes"));
}

function paintRace() {
  race.nodes.drafts.forEach((node, place) => {
    const told = view.story.places[place];
    setClass(node, `piece ${CLASSES[told.source]}`.trimEnd());
    setExit(node, told);
  });
}
