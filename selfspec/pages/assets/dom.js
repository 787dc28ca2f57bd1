// Elements and words. Data only becomes text nodes, never markup.

const $ = (id) => document.getElementById(id);

/** An HTML element; properties are attributes, children elements or strings. */
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const percent = (share) => `${(100 * share).toFixed(1)} %`;
const decimal = (value, digits = 3) => (value === null ? "∞" : value.toFixed(digits));

/** Shallow layers are green, deep ones violet: pages.of_layer. */
function layerColour(layer, numLayers) {
  const place = 2 * Math.min(layer / numLayers, 0.999);
  const [from, to] = place < 1 ? ["shallow", "middle"] : ["middle", "deep"];
  return `color-mix(in srgb, var(--${to}) ${(100 * (place % 1)).toFixed(1)}%, var(--${from}))`;
}

/** Follow the system's light or dark theme until the reader uses the button, whose name is the other theme. */
function startTheme() {
  const root = document.documentElement, system = matchMedia("(prefers-color-scheme: dark)");
  const other = () => ((root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark" ? "light" : "dark");
  const say = () => { $("theme").textContent = other(); };
  $("theme").addEventListener("click", () => {
    root.dataset.theme = other();
    say();
  });
  say();
}
