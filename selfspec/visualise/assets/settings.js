// The controls. Each stop is a setting that Python replayed when it wrote the page: the Grid of
// grid.py. A choice is a drafter and a stop on every axis, by name; controls that mean nothing for
// its drafter are hidden.

const grid = data.grid;
const controls = new Map();

const axesOf = (choice) => grid.axes.filter((axis) => axis.drafters.includes(choice.drafter));

/** What a choice gives: counts, and rounds. */
function resultOf(choice) {
  const point = axesOf(choice).reduce((at, axis) => at * axis.values.length + choice[axis.name], 0);
  return grid.results[grid.points[choice.drafter][point]];
}

/** The stop of a choice on an axis; null where the axis means nothing for it. */
function stopOf(choice, name) {
  const axis = axesOf(choice).find((one) => one.name === name);
  return axis ? axis.values[choice[name]] : null;
}

/** Build the controls; `changed(choice)` is called whenever one moves. */
function buildSettings(changed) {
  const choice = () => ({ ...(view.choice ?? grid.begin) });
  $("drafter").append(...Object.entries(grid.drafters).map(([value, words]) => el("option", { value }, words)));
  $("drafter").addEventListener("change", () => changed({ ...choice(), drafter: $("drafter").value }));
  for (const axis of grid.axes) {
    const move = (stop) => changed({ ...choice(), [axis.name]: stop });
    const control = axis.name === "never-slower" ? checkOf(axis, move) : sliderOf(axis, move);
    controls.set(axis.name, control);
    $("axes").append(control.label);
  }
  $("controls").hidden = false;
  $("controls").addEventListener("submit", (event) => event.preventDefault());
  document.querySelectorAll(".reset").forEach((button) => button.addEventListener("click", () => changed(null)));
}

function checkOf(axis, move) {
  const input = el("input", { id: axis.name, type: "checkbox" });
  input.addEventListener("change", () => move(Number(input.checked)));
  return {
    label: el("label", { class: "check" }, input, ` ${axis.words}`),
    show: (stop) => (input.checked = stop === 1),
  };
}

function sliderOf(axis, move) {
  const input = el("input", { id: axis.name, type: "range", min: 0, max: axis.values.length - 1, step: 1 });
  const value = el("output", {});
  input.addEventListener("input", () => move(Number(input.value)));
  return {
    label: el("label", {}, el("span", {}, axis.words), input, value),
    show(stop) {
      input.value = stop;
      input.setAttribute("aria-valuetext", axis.texts[stop]);
      value.textContent = axis.texts[stop];
    },
  };
}

/** Move every control to where `choice` is. */
function placeSettings(choice) {
  $("drafter").value = choice.drafter;
  const meant = axesOf(choice);
  for (const axis of grid.axes) {
    const { label, show } = controls.get(axis.name);
    label.hidden = !meant.includes(axis) || axis.values.length === 1;
    show(choice[axis.name]);
  }
}

const RESULTS = [
  ["rounds", "verifications", 0],
  ["cr", "tokens / verification", 2],
  ["drafted", "drafts", 0],
  ["accepted", "accepted", 0],
  ["acceptance", "acceptance, %", 1],
  ["work", "layers run per token", 1],
  ["speed", "predicted speed-up", 3],
];

/** The table beside the controls: what the settings used give, what these give, the change. */
function showResults(used, now) {
  const rows = RESULTS.map(([name, words, digits]) => {
    const [before, after] = [used[name], now[name]];
    const cells = before === null || after === null
      ? ["–", "–", ""]
      : [before.toFixed(digits), after.toFixed(digits), signed(after - before, digits)];
    const better = Math.sign(after - before) * (name === "rounds" || name === "work" ? -1 : 1);
    const tone = name === "drafted" || name === "accepted" ? 0 : better;
    const [first, second, change] = cells.map((text) => el("td", {}, text));
    first.dataset.used = second.dataset.now = name;
    change.className = tone > 0 ? "good" : tone < 0 ? "bad" : "";
    return el("tr", {}, el("th", { scope: "row" }, words), first, second, change);
  });
  $("results").tBodies[0].replaceChildren(...rows);
  $("results").hidden = false;
}
