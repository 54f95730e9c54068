// Requests to the server and its stream of events.

export class Refused extends Error {
  constructor(status, message, retryAfter) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

// Server-sent events out of pieces of text that may end anywhere. Yields {event, data}.
export class EventReader {
  constructor() { this.rest = ""; this.event = ""; this.data = []; }

  * take(text) {
    this.rest += text;
    for (let end; (end = this.rest.search(/\r\n|\n|\r(?=[^])/)) >= 0;) {
      const line = this.rest.slice(0, end);
      this.rest = this.rest.slice(end + (this.rest.startsWith("\r\n", end) ? 2 : 1));
      if (line === "") {
        if (this.data.length) yield { event: this.event || "message", data: this.data.join("\n") };
        this.event = "";
        this.data = [];
      } else if (!line.startsWith(":")) {
        const colon = line.indexOf(":");
        const name = colon < 0 ? line : line.slice(0, colon);
        const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
        if (name === "event") this.event = value;
        if (name === "data") this.data.push(value);
      }
    }
  }
}

async function refusal(response) {
  let message = `HTTP ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch { /* no JSON: the status has to do */ }
  return new Refused(response.status, message, Number(response.headers.get("Retry-After")) || 1);
}

// Sends a chat request; calls on.text(piece), on.tlc(event), on.end(finishReason).
export async function chat(body, key, signal, on) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await fetch("/v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!response.ok) throw await refusal(response);
  const reader = new EventReader(), decoder = new TextDecoder();
  for await (const bytes of chunks(response.body)) {
    for (const { event, data } of reader.take(decoder.decode(bytes, { stream: true }))) {
      if (data === "[DONE]") return;
      const value = JSON.parse(data);
      if (value.error) throw new Refused(response.status, value.error.message, 1);
      if (event === "tlc") {
        on.tlc(value);
      } else {
        const choice = value.choices?.[0];
        if (choice?.delta?.content) on.text(choice.delta.content);
        if (choice?.finish_reason) on.end(choice.finish_reason);
      }
    }
  }
  throw new Refused(0, "the stream ended before the answer did", 1);
}

async function* chunks(stream) { // not every browser can iterate a stream
  const reader = stream.getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    yield value;
  }
}

export async function properties() {
  const response = await fetch("/props");
  if (!response.ok) throw await refusal(response);
  return response.json();
}
