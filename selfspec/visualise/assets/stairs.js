// The staircase: rounds side by side, broken into lines like music. x = position, y = layer.

const COLUMN = 24; // px
const AXIS = 30;
const LABELS = 76;
const GAP = 5; // between rounds
const PROMPT_COLUMNS = 2;
const STEP_MS = 140;

const stairs = { nodes: [], boxes: [], at: 0, timer: 0, width: 0 };
const drawnRounds = new Map(); // most rounds of one setting are rounds of the next as well
const layerHeight = Math.max(3, Math.min(14, 190 / info.num_layers));
const height = layerHeight * info.num_layers;

const columnsIn = (group) => (group.entry.prefill ? PROMPT_COLUMNS : group.columns.length);
const widthOf = (group) => columnsIn(group) * COLUMN + GAP;

/** Draw all rounds of the story, as many to a line as there is room for. */
function drawStairs() {
  const room = Math.max(10 * COLUMN, stairs.width - AXIS - COLUMN);
  const lines = [[]];
  let used = 0;
  for (const group of view.story.groups) {
    if (used && used + widthOf(group) > room) {
      lines.push([]);
      used = 0;
    }
    lines[lines.length - 1].push(group);
    used += widthOf(group);
  }
  stairs.nodes[stairs.at]?.setAttribute("tabindex", -1);
  [stairs.nodes, stairs.boxes] = [[], []];
  $("stairs").replaceChildren(...lines.map((line, index) => drawLine(line, index === lines.length - 1)));
  stairs.at = Math.min(stairs.at, stairs.nodes.length - 1);
  stairs.nodes[stairs.at].setAttribute("tabindex", 0);
  $("step").max = view.story.steps;
  moveTo(view.story.steps);
}

function drawLine(groups, isLast) {
  const rounds = groups.reduce((total, group) => total + widthOf(group), 0);
  const width = AXIS + rounds + (isLast ? COLUMN : 0);
  const line = svg("svg", { width, height: height + LABELS, class: "line" }, hatch(), ...axis(width));
  let x = AXIS;
  for (const group of groups) {
    const node = roundNode(group);
    node.setAttribute("transform", `translate(${x} 0)`);
    stairs.nodes.push(node);
    stairs.boxes.push(...node.boxes);
    line.append(node);
    x += widthOf(group);
  }
  if (isLast) line.append(label(finalText(places.length - 1), x, "newest"));
  const lazy = el("div", { class: "lazy" }, line); // laid out when it comes into view
  lazy.style.setProperty("--height", `${height + LABELS}px`);
  return lazy;
}

/** Stripes over rows that were run for nothing; the first one of the page serves all lines. */
function hatch() {
  const size = { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse" };
  return svg("pattern", size, svg("path", { d: "M-1,7 L7,-1" }));
}

/** Layers: ticks at 0, every exit layer in use, and L. */
function axis(width) {
  const asked = info.exit_layers.filter((layer) => view.asks(layer));
  return [...new Set([0, ...asked, info.num_layers])].flatMap((layer) => {
    const y = layerY(layer);
    const text = svg("text", { x: AXIS - 6, y: y + 4, class: "tick" }, String(layer));
    return [svg("line", { x1: AXIS, x2: width, y1: y, y2: y, class: "tick" }), text];
  });
}

const layerY = (layer) => 6 + height - layer * layerHeight;

/** A round's drawing: one from before, if it did the same at the same place. */
function roundNode(group) {
  const { entry, columns, index } = group;
  const { passes, exit_layers, kept, parents, ended } = entry;
  const start = columns.length ? columns[0].place : -1;
  const key = JSON.stringify([start, entry.draft_tokens, exit_layers, passes, kept, parents, ended]);
  if (!drawnRounds.has(key)) drawnRounds.set(key, drawRound(group));
  const node = drawnRounds.get(key);
  node.group = group;
  if (node.index !== index) node.setAttribute("aria-label", roundWords(group));
  node.index = index;
  return node;
}

const roundWords = (group) =>
  `${describeRound(group)} ${group.boxes.map(describePass).join("; ")}.`;

function drawRound(group) {
  const node = svg("g", { class: "round", tabindex: -1, role: "img" });
  const ground = { width: widthOf(group) - GAP, height: height + LABELS, class: "ground" };
  node.boxes = group.boxes.map((box) => drawBox(box, group));
  node.append(svg("rect", ground), ...node.boxes);
  group.columns.forEach((column, index) => node.append(...drawColumn(column, index)));
  if (group.entry.prefill) {
    node.append(label(`prompt: ${info.prompt_tokens}`, COLUMN / 2, "newest"));
  }
  return node;
}

function drawBox(box, group) {
  const columns = group.entry.prefill ? PROMPT_COLUMNS : box.rows;
  const verifies = box.last === info.num_layers;
  const top = layerY(box.last);
  const drawn = svg("g", { class: verifies ? "box verifying" : "box drafting" });
  const size = { width: columns * COLUMN - 2, height: Math.max(2, layerY(box.first) - top - 1) };
  drawn.append(svg("rect", { x: box.from * COLUMN + 1, y: top + 0.5, ...size, rx: 2 }));
  drawn.style.setProperty("--exit", layerColour(box.last, info.num_layers));
  if (size.height >= 12 && group.boxes.length > 1) {
    const at = { x: (box.from + columns / 2) * COLUMN, y: top + size.height / 2 + 4 };
    drawn.append(svg("text", at, String(box.number)));
  }
  return drawn;
}

/** A row's label below, and a dot where its token left. */
function drawColumn(column, index) {
  const x = index * COLUMN;
  const kind = !column.kept ? "rejected" : index === 0 ? "newest" : "kept";
  const drawn = [label(column.text, x, kind)];
  if (!column.kept) {
    const over = { x, y: layerY(info.num_layers), width: COLUMN, height };
    drawn.push(svg("rect", { ...over, class: "rejected" }));
  }
  if (index > 0 && column.parent !== index - 1) drawn.push(branch(column, index));
  if (column.exit !== null) {
    const dot = svg("circle", { cx: x + COLUMN / 2, cy: layerY(column.exit), r: 4 });
    dot.setAttribute("class", column.right ? "left" : "left bad");
    dot.style.setProperty("--exit", layerColour(column.exit, info.num_layers));
    drawn.push(dot);
  }
  return drawn;
}

/** From a row of a tree to one that follows it and does not stand beside it. */
function branch({ parent, depth }, to) {
  const [start, end] = [parent, to].map((row) => (row + 0.5) * COLUMN);
  const level = height + 7 + 2.5 * Math.min(depth, 3);
  return svg("path", { d: `M${start},${height + 7} V${level} H${end} V${height + 7}`, class: "branch" });
}

function label(text, x, kind) {
  const shown = visible(text);
  const short = [...shown].length > 9 ? `${[...shown].slice(0, 8).join("")}…` : shown;
  const at = `translate(${x + COLUMN / 2 + 4} ${height + 14}) rotate(-90)`;
  return svg("text", { transform: at, class: `word ${kind}` }, short);
}

/** Show the first `step` passes of the answer, and the tokens that they gave. */
function moveTo(step) {
  stairs.step = step;
  $("step").value = step;
  $("step-value").textContent = `${step} of ${view.story.steps}`;
  stairs.boxes.forEach((box, index) => box.classList.toggle("later", index >= step));
  stairs.nodes.forEach((node) => {
    const { boxes } = node.group;
    node.classList.toggle("later", boxes.length > 0 && boxes[0].step >= step);
    node.classList.toggle("open", boxes.length > 0 && boxes[boxes.length - 1].step >= step);
  });
  showUntil(step);
}

function play() {
  if (stairs.timer) return stop();
  if (stairs.step >= view.story.steps) moveTo(0);
  $("play").textContent = "pause";
  stairs.timer = setInterval(() => {
    moveTo(stairs.step + 1);
    const node = stairs.nodes.find((each) => each.group.boxes.some((box) => box.step === stairs.step - 1));
    if (node) readRound(node.group);
    if (stairs.step >= view.story.steps) stop();
  }, STEP_MS);
}

function stop() {
  clearInterval(stairs.timer);
  stairs.timer = 0;
  $("play").textContent = "play";
}

function walkStairs(event) {
  const move = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
  const ends = { Home: 0, End: stairs.nodes.length - 1 };
  const to = move ? stairs.at + move : ends[event.key];
  if (to === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
  event.preventDefault();
  if (!stairs.nodes[to]) return;
  stairs.nodes[stairs.at].setAttribute("tabindex", -1);
  stairs.at = to;
  stairs.nodes[to].setAttribute("tabindex", 0);
  stairs.nodes[to].focus();
}

/** Wire the staircase up. */
function startStairs() {
  const nodeOf = (event) => event.target.closest("g.round");
  let pointed = null;
  $("stairs").addEventListener("pointermove", (event) => {
    const node = nodeOf(event);
    if (node && node !== pointed) readRound(node.group);
    pointed = node;
  });
  $("stairs").addEventListener("focusin", (event) => {
    const node = nodeOf(event);
    if (node) readRound(node.group);
    pointed = null;
  });
  $("stairs").addEventListener("keydown", walkStairs);
  $("play").addEventListener("click", play);
  $("step").addEventListener("input", (event) => {
    stop();
    moveTo(Number(event.target.value));
  });
  stairs.width = $("stairs").clientWidth;
  new ResizeObserver(([{ contentRect }]) => {
    if (Math.floor(contentRect.width) === stairs.width) return;
    stairs.width = Math.floor(contentRect.width);
    drawStairs();
  }).observe($("stairs"));
}
