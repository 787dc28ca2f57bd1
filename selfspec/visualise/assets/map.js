// The table of guesses, tokens by layers: a grid with arrow-key navigation, deep layers on top.
// It is built when it is first opened.

/** Rows of the grid: -1 is the emitted token, others are indices of exit layers, deepest first. */
const mapRows = [-1, ...data.exit_layers.map((_, index) => index).reverse()];

let cells = [];

function buildMap() {
  $("words").addEventListener("change", (event) => $("map").classList.toggle("narrow", !event.target.checked));
  $("guesses").addEventListener("toggle", () => {
    if (cells.length) return;
    cells = mapRows.map((index, row) => places.map((_, place) => mapCell(place, index, row)));
    const rows = mapRows.map((index, row) => el("tr", { role: "row" }, rowName(index), ...cells[row]));
    $("map").append(el("thead", {}, rows[0]), el("tbody", {}, ...rows.slice(1)));
    walkable($("map"), "[role=gridcell], [role=columnheader]", readMap, walkMap);
  });
}

function rowName(index) {
  const name = index < 0 ? data.num_layers : data.exit_layers[index];
  const kind = index < 0 ? "emitted" : data.head_kinds[index];
  const look = index < 0 || data.in_use.includes(name) ? "" : "idle";
  return el("th", { class: look, scope: "row", role: "rowheader", title: kind }, String(name), el("small", {}, kind));
}

function mapCell(place, index, row) {
  const words = visibleOf(index < 0 ? places[place].word : places[place].layers[index].top[0]);
  const role = index < 0 ? "columnheader" : "gridcell";
  const cell = el(index < 0 ? "th" : "td", { role, tabindex: -1 }, el("span", { dir: "auto" }, words));
  if (index < 0) dress(cell, "", places[place]);
  else {
    cell.style.setProperty("--sure", places[place].layers[index].sure);
    cell.className = classesOf(place, index, places[place]);
  }
  return Object.assign(cell, { place, index, row });
}

/** The classes of a cell: whether its guess is right, and its draft kept or rejected. */
function classesOf(place, index, told) {
  const layer = data.exit_layers[index];
  const right = tokenOf(places[place].layers[index].top[0]) === tokenOf(places[place].word);
  const rejected = told.rejected.some((branch) => branch.layer === layer);
  return (right ? "right" : "other") + (told.giver.layer === layer ? " left" : rejected ? " rejected" : "");
}

function readMap(cell) {
  const { place, index } = cell;
  const emitted = `token ${place + 1} ${finalVisible(place)}`;
  markToken(place);
  if (index < 0) {
    cell.setAttribute("aria-label", `${emitted}, given by ${places[place].giver.words}`);
    readPlace(place);
    return;
  }
  const { top, sure } = places[place].layers[index];
  const marks = [...cell.classList].join(", ");
  cell.setAttribute("aria-label", `layer ${data.exit_layers[index]} says ${visibleOf(top[0])}, ${percent(sure)}, ${marks}; ${emitted}`);
  readCell(place, index);
}

/** Arrow keys, Home, End, and pages of ten columns. */
function walkMap(key, { row, place }) {
  const last = places.length - 1;
  const [toRow, toPlace] = {
    ArrowUp: [row - 1, place],
    ArrowDown: [row + 1, place],
    ArrowLeft: [row, place - 1],
    ArrowRight: [row, place + 1],
    Home: [row, 0],
    End: [row, last],
    PageUp: [row, Math.max(0, place - 10)],
    PageDown: [row, Math.min(last, place + 10)],
  }[key] ?? [];
  return cells[toRow]?.[toPlace];
}
