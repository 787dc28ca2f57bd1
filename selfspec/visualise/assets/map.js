// The table of guesses, tokens by layers: a grid that arrow keys walk over. Deep layers stand above.
// It is built when it is first opened.

const PAGE = 128; // columns at once
const map = { from: 0, cells: [], at: [0, 0], pointed: null };

/** Rows of the grid: -1 is the emitted token, others are indices of exit layers, deepest first. */
const mapRows = [-1, ...info.exit_layers.map((_, index) => index).reverse()];

/** Draw the columns of the page that holds `place`. */
function buildMap(place = 0) {
  map.from = Math.floor(place / PAGE) * PAGE;
  const until = Math.min(map.from + PAGE, places.length);
  map.cells = mapRows.map((index) =>
    Array.from({ length: until - map.from }, (_, column) => mapCell(map.from + column, index)),
  );
  const rows = mapRows.map((index, row) => el("tr", { role: "row" }, rowName(index), ...map.cells[row]));
  const [head, ...body] = rows;
  $("map").replaceChildren(el("thead", {}, head), el("tbody", {}, ...body));
  $("pages").hidden = places.length <= PAGE;
  $("page-number").textContent = `tokens ${map.from + 1}–${until} of ${places.length}`;
  $("previous").disabled = map.from === 0;
  $("next").disabled = until === places.length;
  map.at = [0, 0];
  map.cells[0][0].tabIndex = 0;
}

function rowName(index) {
  const name = index < 0 ? info.num_layers : info.exit_layers[index];
  const kind = index < 0 ? "emitted" : info.head_kinds[index];
  return el("th", { scope: "row", role: "rowheader", title: kind }, String(name), el("small", {}, kind));
}

function mapCell(place, index) {
  const words = index < 0 ? finalText(place) : textOf(places[place].layers[index].top[0]);
  const role = index < 0 ? "columnheader" : "gridcell";
  const cell = el(index < 0 ? "th" : "td", { role, tabindex: -1 }, el("span", { dir: "auto" }, visible(words)));
  [cell.place, cell.index] = [place, index];
  return cell;
}

/** Shades, frames and marks under the settings shown; only what differs is touched. */
function paintMap() {
  if (!map.cells.length) return;
  map.cells.forEach((row, number) => row.forEach((cell) => {
    const told = view.story.places[cell.place];
    if (number === 0) paintToken(cell, told);
    else paintCell(cell, told);
  }));
  document.querySelectorAll("#map tbody th").forEach((name, row) => {
    name.classList.toggle("idle", !view.asks(info.exit_layers[mapRows[row + 1]]));
  });
}

function paintToken(cell, told) {
  setClass(cell, told.kind);
  setExit(cell, told);
}

function paintCell(cell, told) {
  const says = places[cell.place].layers[cell.index];
  const layer = info.exit_layers[cell.index];
  const right = tokenOf(says.top[0]) === tokenOf(places[cell.place].word);
  const sure = places[cell.place].layers[cell.index].sure;
  const classes = [right ? "right" : "other"];
  if (told.exit === layer) classes.push("left");
  else if (told.rejectedAt.includes(layer)) classes.push("rejected");
  setClass(cell, classes.join(" "));
  if (cell.sure !== sure) cell.style.setProperty("--sure", (cell.sure = sure));
}

/** Put the keyboard's place on a cell, and say what it holds. */
function enterCell(row, column, { focus = true } = {}) {
  const [oldRow, oldColumn] = map.at;
  map.cells[oldRow][oldColumn].tabIndex = -1;
  [map.at, map.pointed] = [[row, column], null];
  const cell = map.cells[row][column];
  cell.tabIndex = 0;
  cell.setAttribute("aria-label", cellWords(cell));
  if (focus) cell.focus();
  readMap(cell);
}

function cellWords(cell) {
  const emitted = `token ${cell.place + 1} ${visible(finalText(cell.place))}`;
  if (cell.index < 0) return `${emitted}, ${view.story.places[cell.place].kind}`;
  const sure = percent(places[cell.place].layers[cell.index].sure);
  const says = visible(textOf(places[cell.place].layers[cell.index].top[0]));
  const marks = [...cell.classList].join(", ");
  return `layer ${info.exit_layers[cell.index]} says ${says}, ${sure}, ${marks}; ${emitted}`;
}

function readMap(cell) {
  if (cell.index < 0) readPlace(cell.place);
  else readCell(cell.place, cell.index);
  markToken(cell.place);
}

function turnTo(place) {
  buildMap(place);
  paintMap();
}

/** Arrow keys, Home, End, and pages of ten columns; columns go on over the edge of a page. */
function walkMap(event) {
  const [row, column] = map.at;
  const place = map.from + column;
  const last = places.length - 1;
  const moves = {
    ArrowUp: [row - 1, place],
    ArrowDown: [row + 1, place],
    ArrowLeft: [row, place - 1],
    ArrowRight: [row, place + 1],
    Home: [row, 0],
    End: [row, last],
    PageUp: [row, Math.max(0, place - 10)],
    PageDown: [row, Math.min(last, place + 10)],
  };
  const to = moves[event.key];
  if (!to || event.ctrlKey || event.altKey || event.metaKey) return;
  event.preventDefault();
  const [toRow, toPlace] = to;
  if (toRow < 0 || toRow >= mapRows.length || toPlace < 0 || toPlace > last) return;
  if (toPlace < map.from || toPlace >= map.from + PAGE) turnTo(toPlace);
  enterCell(toRow, toPlace - map.from);
}

/** Wire the grid up. */
function startMap() {
  const table = $("map");
  const cellOf = (event) => event.target.closest("[role=gridcell], [role=columnheader]");
  table.addEventListener("pointermove", (event) => { // not over: cells that scroll under it are silent
    const cell = cellOf(event);
    if (cell && cell !== map.pointed) readMap(cell);
    map.pointed = cell;
  });
  table.addEventListener("click", (event) => {
    const cell = cellOf(event);
    if (cell) enterCell(mapRows.indexOf(cell.index), cell.place - map.from);
  });
  table.addEventListener("focusin", (event) => {
    const cell = cellOf(event);
    if (cell) enterCell(mapRows.indexOf(cell.index), cell.place - map.from, { focus: false });
  });
  table.addEventListener("keydown", walkMap);
  $("words").addEventListener("change", (event) => table.classList.toggle("narrow", !event.target.checked));
  $("previous").addEventListener("click", () => turnTo(map.from - PAGE));
  $("next").addEventListener("click", () => turnTo(map.from + PAGE));
  $("guesses").addEventListener("toggle", () => {
    if ($("guesses").open && !map.cells.length) turnTo(0);
  });
}
