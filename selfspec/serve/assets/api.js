// The server's public API: questions out, chunks in.

const KEY = "selfspec-key";
let key = readKey();

/** A refusal, in the server's own words. */
class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Without storage, as in some private windows, a key lives as long as the page. */
function readKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

function keepKey(value) {
  key = value;
  try {
    sessionStorage.setItem(KEY, value);
  } catch {
    // it is in memory
  }
}

async function call(path, options = {}) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server cannot be reached. Is it running?");
  }
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  throw new Refusal(response.status, said?.error?.message ?? `The server says ${response.status}.`);
}

/** The model that is served. */
async function findModel() {
  return (await (await call("/v1/models")).json()).data[0];
}

/** The chunks of an answer, as they come. Throws what the server says is wrong. */
async function* chunksOf(body, signal) {
  const response = await call("/v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refusal(0, chunk.error.message);
    yield chunk;
  }
  throw new Error("The connection ended before the answer did.");
}

/** Data of server-sent events, however they are cut on their way. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    while (true) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (held + value).split("\n\n");
      held = parts.pop();
      for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
