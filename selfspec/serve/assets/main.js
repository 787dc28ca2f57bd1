// The chat: its turns, the next question, and the button that stops an answer.

const MOST_BYTES = 100_000; // largest file, longer than the context of most models

const talk = { id: 0, turns: [], busy: null };

/** One question with its answers: two side by side [speculation on, off], or one. */
class Turn {
  constructor(question, history) {
    this.question = question;
    this.history = history;
    this.messages = [...history, { role: "user", content: question }];
    const asked = el("p", { class: "question", dir: "auto" }, question);
    if (question.length > 600) asked.tabIndex = 0; // it scrolls
    this.body = el("div");
    this.node = el("article", { "aria-label": `Question: ${question.slice(0, 60)}` }, asked, this.body);
  }

  /** The messages before the next question. */
  get said() {
    const content = this.views?.[0].text;
    return content ? [...this.messages, { role: "assistant", content }] : this.history;
  }

  /** The previous answer, until the new one has text. */
  get kept() {
    const [view] = this.views;
    return view.text ? view : this.former ?? view;
  }

  show(...views) {
    if (this.views?.[0].text) [this.former] = this.views;
    this.views = views;
    this.verdict = el("p", { class: "verdict", role: "status" });
    const columns = el("div", { class: views.length > 1 ? "columns" : "" }, ...views.map((view) => view.node));
    this.body.replaceChildren(columns, this.verdict);
  }
}

/** The body of a request with these settings. `speculates`: whether drafts are made. */
function bodyFor(messages, settings, speculates) {
  const { drafter, ...sampling } = settings;
  const speculation = { explain: true };
  if (drafter || !speculates) speculation.drafter = speculates ? drafter : "none";
  return { messages, stream: true, speculation, ...sampling };
}

/** Read the settings. Two sampled answers side by side need the same seed. */
function readSettings() {
  const [temperature, top_p, max_tokens, seed] = ["temperature", "top_p", "max_tokens", "seed"].map((id) => $(id).valueAsNumber);
  const found = { temperature, top_p, max_tokens, drafter: $("drafter").value };
  if (!Number.isNaN(seed)) found.seed = seed;
  else if ($("both").checked && temperature > 0) found.seed = Math.floor(Math.random() * 2 ** 31);
  return found;
}

/** Answer a turn's question, for the first time or again. */
async function answer(turn) {
  const settings = readSettings();
  const ways = $("both").checked ? [true, false] : [$("speculation").checked];
  const views = ways.map((speculates) => new AnswerView(ways.length > 1 ? `speculation ${speculates ? "on" : "off"}` : null));
  turn.show(...views);
  keepChat();
  if (views.length > 1) turn.verdict.textContent = "The answers are written one after the other, so that each has the machine to itself.";
  const stopper = new AbortController();
  const typing = document.activeElement === $("question");
  setBusy(stopper);
  if (!typing) $("stop").focus(); // the pressed button disappears
  turn.again?.remove();
  scrollToEnd();
  let view;
  try {
    for (const [place, speculates] of ways.entries()) {
      view = views[place];
      for await (const chunk of chunksOf(bodyFor(turn.messages, settings, speculates), stopper.signal)) {
        view.add(chunk);
        if (place === 0) countInLegend(view.figures.bySource);
      }
      view.end();
    }
    if (views.length > 1) turn.verdict.replaceChildren(...verdictOn(...views));
  } catch (error) {
    if (turn.kept !== views[0]) turn.show((view = turn.kept));
    view.end(error.name === "AbortError" ? "Stopped." : el("span", { class: "bad", role: "alert" }, error.message));
    if (error.status === 401) askForKey();
    for (const other of views) if (other !== view && !other.text) other.end("Not run.");
  } finally {
    if (talk.busy === stopper) finish(turn);
  }
}

/** Compare two texts, one with drafts and one without. */
function verdictOn(drafted, plain) {
  if (drafted.text !== plain.text) return [el("strong", { class: "bad" }, "✕ The texts differ.")];
  const same = el("strong", { class: "good" }, "✓ The same text, letter for letter.");
  const [fast, slow] = [drafted.figures.seconds, plain.figures.seconds];
  if (!(fast > 0 && slow > 0)) return [same];
  return [same, ` ${fast.toFixed(1)} s with drafts, ${slow.toFixed(1)} s without: ${(slow / fast).toFixed(2)} times the speed. Written one after the other; the first token is not counted.`];
}

/** Show Stop instead of Send while an answer is written. */
function setBusy(stopper) {
  talk.busy = stopper;
  $("stop").hidden = !stopper;
  $("send").hidden = !!stopper;
  $("said").textContent = "";
}

function finish(turn) {
  const stopHadFocus = document.activeElement === $("stop");
  setBusy(null);
  keepChat();
  if (stopHadFocus) $("question").focus();
  $("said").textContent = turn.views[0].text ? `Answer: ${turn.views[0].text} ${turn.verdict.textContent}` : "";
  addButtons(turn);
  scrollToEnd();
}

function addButtons(turn) {
  for (const view of turn.views) if (view.text) view.buttons.replaceChildren(copyButton(view));
  turn.again = button("Regenerate", () => answer(turn));
  turn.views[0].buttons.append(turn.again);
}

function button(name, pressed) {
  const node = el("button", { type: "button" }, name);
  node.addEventListener("click", () => pressed(node));
  return node;
}

/** A button that copies an answer, or selects it if the browser does not let pages copy. */
const copyButton = (view) =>
  button("Copy", async (node) => {
    try {
      await navigator.clipboard.writeText(view.text);
      node.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(view.written.node);
      node.textContent = "Selected: press Ctrl+C";
    }
    setTimeout(() => (node.textContent = "Copy"), 2000);
  });

function ask(question) {
  if (!question.trim() || talk.busy || !$("settings").reportValidity()) return;
  const turn = addTurn(question);
  $("question").value = "";
  fitQuestion();
  answer(turn);
}

function addTurn(question) {
  for (const { again } of talk.turns) again?.remove();
  const turn = new Turn(question, talk.turns.at(-1)?.said ?? []);
  talk.turns.push(turn);
  $("talk").append(turn.node);
  $("empty").hidden = true;
  return turn;
}

const stop = () => talk.busy?.abort();

function newChat() {
  if (talk.busy) keepChat(); // with the part of the answer so far
  stop();
  Object.assign(talk, { id: Date.now(), turns: [] });
  setBusy(null);
  listChats();
  $("talk").replaceChildren();
  $("empty").hidden = false;
  countInLegend({});
  $("question").focus();
}

/** Put a text file into the message, where the reader can see, change and send it. */
async function attach() {
  const [file] = $("file").files;
  $("file").value = ""; // so that the same file can be chosen again
  $("problem").textContent = "";
  if (file.size > MOST_BYTES) {
    $("problem").textContent = `${file.name} has ${Math.ceil(file.size / 1000)} kB; the limit is ${MOST_BYTES / 1000} kB. Copy the part that matters.`;
    return;
  }
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    const fence = "`".repeat(Math.max(3, ...(text.match(/`+/g) ?? []).map(({ length }) => length + 1)));
    $("question").value += `${$("question").value && "\n\n"}${file.name}:\n${fence}\n${text.replace(/\n?$/, "\n")}${fence}\n`;
  } catch {
    $("problem").textContent = `${file.name} is not UTF-8 text.`;
  }
  fitQuestion();
  $("question").focus();
}

/** Fit the field's height to its text, up to a third of the window. */
function fitQuestion() {
  const field = $("question");
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight + 2, innerHeight / 3)}px`;
}

/** Whether the end of the newest text is visible; if so, the page follows it. */
const nearEnd = () => $("talk").getBoundingClientRect().bottom < $("ask").getBoundingClientRect().top + 80;

const scrollToEnd = () => $("talk").scrollIntoView({ block: "end" });

function askForKey() {
  $("key-form").hidden = false;
  $("key").focus();
}

async function greet() {
  try {
    const [model] = (await (await call("/v1/models")).json()).data;
    $("facts").textContent = `${model.id} · up to ${model.max_model_len} tokens`;
    $("key-form").hidden = true;
  } catch (error) {
    $("facts").textContent = error.message;
    if (error.status === 401) askForKey();
  }
}

function listen() {
  const submits = (id, act) =>
    $(id).addEventListener("submit", (event) => {
      event.preventDefault();
      act();
    });
  submits("ask", () => ask($("question").value));
  submits("settings", () => {});
  submits("key-form", () => {
    keepKey($("key").value.trim());
    $("key").value = "";
    greet();
  });
  $("question").addEventListener("input", fitQuestion);
  $("question").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    ask($("question").value);
  });
  document.addEventListener("keydown", ({ key }) => key === "Escape" && stop());
  addEventListener("storage", listChats); // another tab may store conversations
  $("stop").addEventListener("click", stop);
  $("new").addEventListener("click", newChat);
  $("attach").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", attach);
  $("markdown").addEventListener("change", () => talk.turns.forEach(({ views }) => views.forEach((view) => view.paint())));
  $("rejects").addEventListener("change", () => $("talk").classList.toggle("rejects", $("rejects").checked));
  $("both").addEventListener("change", () => ($("speculation").disabled = $("both").checked));
  $("examples").addEventListener("click", ({ target }) => target.matches("button") && ask(target.textContent));
}

buildLegend();
startTheme();
listen();
greet();
newChat();
document.documentElement.dataset.ready = "true";
