// Conversations, kept in this browser: each as its questions, and its answers with their sources.

const CHATS = "selfspec-chats-1";

/** Newest first: { id, turns: [{ question, text, runs: [[letters, source, layer, numLayers]] }] } */
const readChats = () => stored(() => JSON.parse(localStorage.getItem(CHATS)), []);

/** Store conversations; drops the oldest if there is no room. If the newest alone does not fit, the stored ones stay. */
function keepChats(chats) {
  for (let count = chats.length; count >= Math.min(1, chats.length); count -= 1) {
    const text = JSON.stringify(chats.slice(0, count));
    if (stored(() => localStorage.setItem(CHATS, text) ?? true, false)) return;
  }
  $("chats-hint").textContent = "This browser stores nothing for this page: conversations are lost when the tab closes.";
}

/** Store the conversation on the page as the newest; as a new one if another tab continued it. */
function keepChat() {
  const known = readChats().find(({ id }) => id === talk.id)?.turns ?? [];
  if (known.some(({ question }, place) => question !== talk.turns[place]?.question)) talk.id = Date.now();
  const turns = talk.turns.map(({ question, kept: { text, written } }) => ({ question, text, runs: runsOf(written) }));
  keepChats([{ id: talk.id, turns }, ...readChats().filter(({ id }) => id !== talk.id)]);
  listChats();
}

/** Runs of characters from one source. */
function runsOf({ tokens }) {
  const runs = [];
  let from = 0;
  for (const { end, token } of tokens) {
    const [last, giver] = [runs.at(-1), [token.source, token.layer, token.numLayers]];
    if (last && giver.every((value, place) => value === last[place + 1])) last[0] += end - from;
    else runs.push([end - from, ...giver]);
    from = end;
  }
  return runs;
}

function openChat({ id, turns }) {
  if (id === talk.id) return;
  newChat();
  talk.id = id;
  for (const { question, text, runs } of turns) {
    const view = new AnswerView(null);
    const turn = addTurn(question);
    let at = 0;
    for (const [letters, source, layer, numLayers] of runs) {
      view.written.add({ text: text.slice(at, (at += letters)), source, layer, numLayers });
    }
    view.text = text;
    view.figures.node.hidden = true; // times are not kept
    turn.show(view);
    view.end();
    addButtons(turn);
  }
  listChats();
  scrollToEnd();
}

function dropChat({ id, turns }) {
  if (!confirm(`Delete “${titleOf(turns)}”?`)) return;
  if (id === talk.id) newChat();
  keepChats(readChats().filter((chat) => chat.id !== id));
  listChats();
  $("question").focus();
}

const titleOf = (turns) => turns[0].question.trim().replace(/\s+/g, " ").slice(0, 60);

function listChats() {
  $("chats").replaceChildren(...readChats().map((chat) => {
    const open = button(titleOf(chat.turns), () => openChat(chat));
    if (chat.id === talk.id) open.setAttribute("aria-current", "true");
    const drop = button("×", () => dropChat(chat));
    drop.setAttribute("aria-label", `Delete ${titleOf(chat.turns)}`);
    return el("li", {}, open, drop);
  }));
}
