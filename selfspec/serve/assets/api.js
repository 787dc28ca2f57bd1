// The server's public API: questions out, chunks in.

const KEY = "selfspec-key";
let key = stored(() => sessionStorage.getItem(KEY), "");

/** The result of a storage action, else `otherwise`: some private windows have no storage. */
function stored(act, otherwise) {
  try {
    return act() ?? otherwise;
  } catch {
    return otherwise;
  }
}

function keepKey(value) {
  key = value;
  stored(() => sessionStorage.setItem(KEY, value));
}

async function call(path, options = {}) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers }).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("The server cannot be reached. Is it running?");
  });
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  const refusal = new Error(said?.error?.message ?? `The server answered with status ${response.status}.`); // in its own words
  throw Object.assign(refusal, { status: response.status });
}

/** Yield the chunks of an answer as they arrive. Throws an error that the server reports. */
async function* chunksOf(body, signal) {
  const response = await call("/v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    yield chunk;
  }
  throw new Error("The connection ended before the answer did.");
}

/** Yield the data of server-sent events, which chunks of the body may split anywhere. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (let read = await reader.read(); !read.done; read = await reader.read()) {
      const parts = (held + read.value).split("\n\n");
      held = parts.pop();
      for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
