// Markdown as elements. The parser gives tokens, never HTML; an answer only ever becomes text nodes.

const parser = markdownit({ maxNesting: 20 }); // deeper nesting stays text, as does HTML

/** The blocks of a text: each with its start, end and tokens. */
function blocksOf(text) {
  const starts = [0];
  for (const end of text.matchAll(/\r\n?|\n/g)) starts.push(end.index + end[0].length);
  const blocks = [];
  let depth = 0;
  for (const token of parser.parse(text, {})) {
    if (depth === 0 && token.nesting >= 0) blocks.push({ start: starts[token.map[0]], tokens: [] });
    blocks.at(-1).tokens.push(token);
    depth += token.nesting;
  }
  return blocks.map((block, place) => ({ ...block, end: blocks[place + 1]?.start ?? text.length }));
}

/** Build the elements of tokens. `cut(text)`: the nodes of an element's text. */
function build(tokens, root, cut) {
  const open = [root];
  for (const token of tokens) {
    const into = open.at(-1);
    if (token.nesting < 0) open.pop();
    else if (token.nesting > 0) open.push(token.hidden ? into : into.appendChild(elementOf(token)));
    else if (token.type === "inline") build(token.children, into, cut);
    else if (token.type.endsWith("break")) into.append("\n");
    else if (token.type === "hr") into.append(el("hr"));
    else if (token.type === "text") into.append(...cut(token.content));
    else if (token.type === "image") into.append(el("em", {}, `[picture: ${token.content}]`)); // pictures are not loaded
    else into.appendChild(el(token.type === "code_inline" ? "code" : "pre")).append(...cut(token.content));
  }
}

function elementOf(token) {
  if (token.type === "heading_open") return el("h3", { class: token.tag }); // one level below the page's own
  const node = el(token.tag);
  if (token.type === "link_open" && /^(https?|mailto):/i.test(token.attrGet("href"))) {
    const href = token.attrGet("href");
    for (const [name, value] of Object.entries({ href, title: href, target: "_blank", rel: "noopener noreferrer" })) node.setAttribute(name, value);
  }
  if (token.attrGet("start")) node.start = token.attrGet("start");
  node.style.textAlign = token.attrGet("style")?.replace("text-align:", "") ?? "";
  return node;
}
