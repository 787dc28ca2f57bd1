// The controls. Each stop is a setting that Python replayed when it wrote the page: the Grid of
// page.py. A choice is a drafter and a stop on every axis, by name; controls that mean nothing for
// its drafter are hidden.

const { grid } = data;
const controls = new Map();

const axesOf = (choice) => grid.axes.filter((axis) => axis.drafters.includes(choice.drafter));

/** What a choice gives: counts, and rounds. */
function resultOf(choice) {
  const point = axesOf(choice).reduce((at, axis) => at * axis.values.length + choice[axis.name], 0);
  return grid.results[grid.points[choice.drafter][point]];
}

/** The stop of a choice on an axis; undefined where the axis means nothing for it. */
function stopOf(choice, name) {
  const axis = axesOf(choice).find((one) => one.name === name);
  return axis?.values[choice[name]];
}

/** Build the controls; `changed(choice)` is called whenever one moves. */
function buildSettings(changed) {
  const change = (values) => changed({ ...(view.choice ?? grid.begin), ...values });
  $("drafter").append(...Object.entries(grid.drafters).map(([value, words]) => el("option", { value }, words)));
  $("drafter").addEventListener("change", () => change({ drafter: $("drafter").value }));
  for (const { name, words, values } of grid.axes) {
    const input = el("input", { id: name, type: "range", min: 0, max: values.length - 1, step: 1 });
    const value = el("output", {});
    const label = el("label", {}, el("span", {}, words), input, value);
    input.addEventListener("input", () => change({ [name]: Number(input.value) }));
    controls.set(name, { label, input, value });
    $("axes").append(label);
  }
  $("controls").addEventListener("submit", (event) => event.preventDefault());
  document.querySelectorAll(".reset").forEach((button) => button.addEventListener("click", () => changed(null)));
}

/** Move every control to where `choice` is. */
function placeSettings(choice) {
  $("drafter").value = choice.drafter;
  const meant = axesOf(choice);
  for (const axis of grid.axes) {
    const { label, input, value } = controls.get(axis.name);
    const stop = choice[axis.name];
    label.hidden = !meant.includes(axis) || axis.values.length === 1;
    input.value = stop;
    value.textContent = axis.texts[stop];
    input.setAttribute("aria-valuetext", axis.texts[stop]);
  }
}

/** Name, words, digits, and whether more is better (1), worse (-1), or neither. */
const RESULTS = [
  ["rounds", "verifications", 0, -1],
  ["cr", "tokens / verification", 2, 1],
  ["drafted", "drafts", 0, 0],
  ["accepted", "accepted", 0, 0],
  ["acceptance", "acceptance, %", 1, 1],
  ["work", "layers run per token", 1, -1],
  ["speed", "predicted speed-up", 3, 1],
];

/** The table beside the controls: what the settings used give, what these give, the change. */
function showResults(used, now) {
  const rows = RESULTS.map(([name, words, digits, good]) => {
    const known = used[name] !== null && now[name] !== null;
    const text = (value) => (known ? value.toFixed(digits) : "–");
    const change = known ? now[name] - used[name] : 0;
    return el(
      "tr",
      {},
      el("th", { scope: "row" }, words),
      el("td", { "data-used": name }, text(used[name])),
      el("td", { "data-now": name }, text(now[name])),
      el("td", { class: ["bad", "", "good"][1 + Math.sign(change * good)] }, known ? signed(change, digits) : ""),
    );
  });
  $("results").tBodies[0].replaceChildren(...rows);
}
