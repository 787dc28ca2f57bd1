// Time runs from left to right: plain decoding above; drafting, verification and kept tokens below.
// Then both as a race. Times are predicted from costs, in steps of plain decoding.

const [RACE_MS, STEP_MS] = [12_000, 100]; // at most

const timeWords = (time) => `${time.toFixed(1)} steps`;

/** The time of each token, and the times of each round's parts; without the prompt's pass. */
function schedule() {
  const lanes = { plain: [], draft: [], verify: [], kept: [] };
  const times = { plain: places.map((_, place) => place), drafts: [] };
  times.plain.slice(1).forEach((until, place) => lanes.plain.push({ from: times.plain[place], until }));
  let now = 0;
  for (const [count, drafting, verifying] of data.rounds) {
    const [began, drafted] = [now, now + drafting];
    now = drafted + verifying;
    lanes.draft.push({ from: began, until: drafted });
    lanes.verify.push({ from: drafted, until: now });
    const share = (now - began) / count;
    for (let from = began, index = 0; index < count; index += 1, from += share) {
      const { colour } = places[times.drafts.length].giver;
      lanes.kept.push({ from, until: from + share, colour });
      times.drafts.push(now);
    }
  }
  return { lanes, times };
}

const { lanes, times } = schedule();
const end = Math.max(times.plain.at(-1), times.drafts.at(-1));
const share = (time) => `${((100 * time) / (end || 1)).toFixed(3)}%`;
const hand = el("i", { class: "hand" });
const race = { nodes: {}, now: end, frame: 0 };

function buildLanes() {
  const drawn = Object.entries(lanes).map(([name, blocks]) => {
    const bars = blocks.filter(({ from, until }) => until > from).map(({ from, until, colour }) => {
      const bar = el("i", { class: name });
      Object.assign(bar.style, { left: share(from), width: share(until - from), background: colour ?? "" });
      return bar;
    });
    return bars.length ? el("div", {}, el("span", {}, name), el("div", {}, ...bars)) : "";
  });
  $("lanes").append(...drawn, el("div", { class: "over" }, hand));
  const [ours, plain] = [times.drafts.at(-1), times.plain.at(-1)].map(timeWords);
  $("lanes-hint").textContent = `With drafts ${ours}, plain decoding ${plain}, both after the first token; a step is the time of one token without drafts. Predicted from the costs that the drafter used.`;
  $("lanes").setAttribute("aria-label", $("lanes-hint").textContent);
}

/** Show both texts as they stand at time `now`. */
function moveTo(now) {
  race.now = now;
  for (const [name, nodes] of Object.entries(race.nodes)) {
    const until = times[name].filter((at) => at <= now + 1e-9).length;
    nodes.forEach((node, place) => node.toggleAttribute("hidden", place >= until));
    $(`${name}-count`).textContent = `${until} of ${places.length}`;
    $(`${name}-text`).scrollTop = $(`${name}-text`).scrollHeight;
  }
  hand.style.left = share(now);
  $("time").value = end ? Math.round((1000 * now) / end) : 1000;
  $("time-value").textContent = timeWords(now);
  $("time").setAttribute("aria-valuetext", timeWords(now));
}

function playRace() {
  if (race.frame) return stopRace();
  const lasts = Math.min(RACE_MS, STEP_MS * end);
  const from = race.now >= end ? 0 : race.now / end;
  const began = performance.now() - lasts * from;
  $("play").textContent = "pause";
  const tick = (time) => {
    const done = Math.min(1, Math.max(0, (time - began) / lasts));
    moveTo(done * end);
    if (done < 1) race.frame = requestAnimationFrame(tick);
    else stopRace();
  };
  race.frame = requestAnimationFrame(tick);
}

function stopRace() {
  cancelAnimationFrame(race.frame);
  race.frame = 0;
  $("play").textContent = "play the race";
}

function buildRace() {
  for (const name of ["plain", "drafts"]) {
    race.nodes[name] = places.map((_, place) => el("span", {}, finalText(place)));
    $(`${name}-text`).append(...race.nodes[name]);
  }
  places.forEach((told, place) => dress(race.nodes.drafts[place], "piece", told));
  $("play").addEventListener("click", playRace);
  $("time").addEventListener("input", (event) => {
    stopRace();
    moveTo((end * Number(event.target.value)) / 1000);
  });
  moveTo(end);
}
