// Requests to this server: JSON, streams of server-sent events, and the key that they may need.

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const KEY = "outrider.api_key";

// A key lives as long as the tab: shared computers keep nothing.
export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  let reply;
  try {
    reply = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer.");
  }
  if (reply.ok) return reply;
  const body = await reply.json().catch(() => null);
  throw new ApiError(reply.status, body?.error?.message ?? `The server answered ${reply.status}.`);
}

export const getJson = async (path) => (await ask(path)).json();
export const getText = async (path) => (await ask(path)).text();

// The events of a streamed answer, each an object.
export async function* stream(path, body, signal) {
  const reply = await ask(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { done, value } = await reader.read();
    if (done) throw new ApiError(0, "The connection ended before the answer did.");
    rest += value;
    const events = rest.split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const content = JSON.parse(data);
      if (content.error) throw new ApiError(0, content.error.message);
      yield content;
    }
  }
}
