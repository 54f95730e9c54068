// The page: a conversation, kept in the browser and sent whole with each message (the server finds what it has cached of it by its
// text), and the settings it is sent with.
import { say, number, useLanguage, chosenLanguage } from "/words.js";
import { render } from "/markdown.js";
import { chat, properties, Refused } from "/stream.js";
import { show, paint } from "/tlc.js";

const $ = (id) => document.getElementById(id);
const BIGGEST_DOCUMENT = 32 << 20; // bytes; a model's context is far smaller

// messages: {role, content, documents: [{name, text}]}; documents only where the user added some
// running: {stop, conversation, reply, replaced}; the messages that the reply goes after, and the answers it is to replace
let messages = [], documents = [], running = null, server = null, settings = {};

/* ---- what the browser keeps ---- */

// Every tab has its own conversation and settings in sessionStorage, which a reload leaves alone. What any tab wrote last is in
// localStorage besides, and a new tab begins with it.
function read(where, name) {
  try {
    return JSON.parse(window[where].getItem(name));
  } catch {
    return null;
  }
}

function write(where, name, value) {
  try {
    window[where].setItem(name, JSON.stringify(value));
    return true;
  } catch { // no room, or not allowed
    return false;
  }
}

function load(name, otherwise) {
  const own = read("sessionStorage", name);
  if (own !== null) return own;
  const found = read("localStorage", name) ?? otherwise;
  write("sessionStorage", name, found); // or a reload would begin with what another tab wrote meanwhile
  return found;
}

// What to tell the user where not all of that was possible; or null.
function keep(name, value) {
  const beyond = write("localStorage", name, value);
  if (!write("sessionStorage", name, value)) return "unsaved"; // this one decides what a reload shows
  return beyond ? null : "keptInTab";
}

// Until a reply has some text, the answer it is to replace stands.
function withReply() {
  if (running?.conversation !== messages) return messages; // none runs, or it belongs to a chat left meanwhile
  return [...messages, ...(running.reply.content.trim() !== "" ? [running.reply] : running.replaced)];
}

function keepMessages() {
  const lack = keep("deeptutor.messages", withReply());
  if (lack) status(say(lack));
}

// What the user has chosen, by name. The rest is the server's, and may not be known yet, or not be on offer at the moment.
function keepSetting(name, value) {
  settings[name] = value;
  keep("deeptutor.settings", settings);
}

/* ---- the conversation ---- */

function status(text) { $("status").textContent = text; }

function atEnd() {
  const box = $("chat");
  const room = box.scrollHeight > box.clientHeight + 1 ? box : document.scrollingElement;
  return room.scrollHeight - room.scrollTop - room.clientHeight < 80;
}

function toEnd() {
  const box = $("chat");
  if (box.scrollHeight > box.clientHeight + 1) box.scrollTop = box.scrollHeight;
  else $("composer").scrollIntoView({ block: "end" });
}

async function copyText(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const area = document.createElement("textarea"); // from another machine without HTTPS there is the old way only
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

function messageView(message) {
  const item = document.createElement("li");
  item.className = `message ${message.role}`;
  const who = document.createElement("div");
  who.className = "who";
  who.append(say(message.role === "user" ? "you" : "model"));
  const text = document.createElement("div");
  text.className = "text";
  item.append(who, text);
  if (message.role === "assistant") {
    const copy = document.createElement("button");
    copy.type = "button";
    copy.textContent = say("copy");
    copy.addEventListener("click", async () => {
      await copyText(message.content);
      copy.textContent = say("copied");
      setTimeout(() => { copy.textContent = say("copy"); }, 1500);
    });
    who.append(copy);
    text.append(render(message.content));
  } else {
    for (const added of message.documents ?? []) {
      const chip = document.createElement("div");
      chip.className = "document";
      chip.textContent = `${added.name} · ${number(added.text.length)}`;
      text.append(chip);
    }
    text.append(message.content);
  }
  return item;
}

function showMessages() {
  $("messages").replaceChildren(...messages.map(messageView));
  $("welcome").hidden = messages.length > 0;
  showButtons();
}

function showButtons() {
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
  $("again").hidden = running !== null || !messages.some((m) => m.role === "user");
  $("again").textContent = say("again");
  for (const id of ["evict", "preset"]) $(id).disabled = running !== null || !server?.eviction?.override;
}

// What the model reads for a message: the documents first, so that the text before a question stays the same from turn to turn.
function wholeText(message) {
  const parts = (message.documents ?? []).map((added) => `${added.name}:\n\n${added.text}`);
  return [...parts, message.content].filter((part) => part !== "").join("\n\n");
}

function request() {
  const system = $("system").value.trim();
  const body = {
    messages: [...(system ? [{ role: "system", content: system }] : []),
      ...messages.map((m) => ({ role: m.role, content: m.role === "user" ? wholeText(m) : m.content }))],
    stream: true, tlc: true,
  };
  if ($("temperature").value !== "") body.temperature = Number($("temperature").value);
  if ($("max-tokens").value !== "") body.max_tokens = Number($("max-tokens").value);
  if (server?.eviction?.override) { // nothing is sent for what the server does by itself
    if (!$("evict").checked) body.eviction = { enabled: false };
    else if ($("preset").value !== "") body.eviction = { preset: $("preset").value };
  }
  return body;
}

async function answer(replaced = []) {
  const reply = { role: "assistant", content: "" };
  const body = request();
  const view = messageView(reply), text = view.querySelector(".text");
  let drawn = false, failed = false, reason = "";
  const stop = new AbortController();
  running = { stop, conversation: messages, reply, replaced };
  $("messages").append(view);
  $("welcome").hidden = true;
  showButtons();
  status("");
  toEnd();
  const draw = () => { // at most once a frame: a long answer is rendered anew each time
    drawn = false;
    const follow = atEnd();
    text.replaceChildren(render(reply.content));
    if (follow) toEnd();
  };
  try {
    if (/[^\x20-\xff]/.test($("key").value)) throw new Refused(0, say("badKey"), 0);
    await chat(body, $("key").value, stop.signal, {
      text: (piece) => {
        reply.content += piece;
        status(say("writingNow"));
        if (!drawn) requestAnimationFrame(draw);
        drawn = true;
      },
      tlc: (event) => {
        show(event);
        if (event.phase === "prefill") status(say("readingNow", { n: number(event.read_tokens), all: number(event.prompt_tokens) }));
      },
      end: (why) => { reason = why; },
    });
    status(reason === "length" ? say("cutShort") : "");
  } catch (problem) {
    failed = problem.name !== "AbortError";
    status(problem.name === "AbortError" ? say("stopped")
      : problem instanceof Refused && (problem.status === 429 || problem.status === 503) ? say("busy", { n: problem.retryAfter })
        : problem instanceof Refused ? say("failed", { why: problem.message }) : say("gone"));
  }
  messages = withReply();
  running = null;
  keepMessages();
  showMessages();
  if (failed) learnServer().catch(() => {}); // it may be another one by now, which takes other settings
  if (atEnd()) toEnd();
}

function send() {
  const content = $("prompt").value.trim();
  if (running || (content === "" && documents.length === 0)) return;
  messages.push(documents.length ? { role: "user", content, documents } : { role: "user", content });
  documents = [];
  $("prompt").value = "";
  showDocuments();
  showMessages();
  keepMessages();
  answer();
}

/* ---- documents ---- */

function showDocuments() {
  $("documents").replaceChildren(...documents.map((added, i) => {
    const item = document.createElement("li"), remove = document.createElement("button");
    remove.type = "button";
    remove.textContent = "×";
    remove.setAttribute("aria-label", say("remove", { name: added.name }));
    remove.addEventListener("click", () => {
      documents.splice(i, 1);
      showDocuments();
      $("prompt").focus();
    });
    item.append(`${added.name} · ${number(added.text.length)} `, remove);
    return item;
  }));
}

async function add(files) {
  for (const file of files) {
    let text = null;
    try {
      text = file.size <= BIGGEST_DOCUMENT ? new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer()) : null;
    } catch { /* not UTF-8 */ }
    if (text === null || text.includes("\0")) status(say("notText", { name: file.name }));
    else documents.push({ name: file.name, text });
  }
  showDocuments();
  $("prompt").focus();
}

/* ---- begin ---- */

function settingsNote() { $("settings-note").textContent = server ? say(server.eviction.override ? "changed" : "fixed") : ""; }

async function learnServer() {
  server = await properties();
  $("model").textContent = server.model;
  $("key-row").hidden = !server.api_key;
  $("max-tokens").placeholder = server.max_tokens ?? "";
  const own = server.eviction.enabled ? [new Option(server.eviction.name.replace(/^preset /, ""), "")] : [];
  const others = server.eviction.presets.filter((name) => !server.eviction.enabled || server.eviction.name !== `preset ${name}`);
  $("preset").replaceChildren(...own, ...others.map((name) => new Option(name, name)));
  if ([...$("preset").options].some((option) => option.value === settings.preset)) $("preset").value = settings.preset;
  $("evict").checked = settings.evict ?? server.eviction.enabled;
  settingsNote();
  showButtons();
}

function begin() {
  const kept = settings = load("deeptutor.settings", {});
  useLanguage(kept.language ?? (navigator.language.toLowerCase().startsWith("zh") ? "zh" : "en"));
  $("language").value = chosenLanguage();
  $("system").value = kept.system ?? "";
  $("temperature").value = kept.temperature ?? "";
  $("max-tokens").value = kept.maxTokens ?? "";
  messages = load("deeptutor.messages", []);
  showMessages();
  paint();
  toEnd();
  settingsNote();
  showButtons();
  learnServer().catch(() => status(say("noServer")));
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { // isComposing: Enter ends a Chinese word, not the message
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.stop.abort(); });
$("stop").addEventListener("click", () => running?.stop.abort());
$("again").addEventListener("click", () => {
  const replaced = [];
  while (messages.length && messages[messages.length - 1].role === "assistant") replaced.unshift(messages.pop());
  showMessages();
  answer(replaced);
});
$("fresh").addEventListener("click", () => {
  running?.stop.abort();
  messages = [];
  documents = [];
  keepMessages();
  show(null);
  showDocuments();
  showMessages();
  status("");
  $("prompt").focus();
});
$("language").addEventListener("change", () => {
  useLanguage($("language").value);
  keepSetting("language", chosenLanguage());
  settingsNote();
  showDocuments();
  if (!running) showMessages();
  paint();
});
for (const [id, name] of [["preset", "preset"], ["system", "system"], ["temperature", "temperature"], ["max-tokens", "maxTokens"]]) {
  $(id).addEventListener("change", () => keepSetting(name, $(id).value));
}
$("evict").addEventListener("change", () => keepSetting("evict", $("evict").checked));
$("attach").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", () => {
  add([...$("file").files]);
  $("file").value = "";
});
$("prompt").addEventListener("paste", (event) => {
  if (event.clipboardData.files.length) {
    event.preventDefault();
    add([...event.clipboardData.files]);
  }
});
addEventListener("pagehide", () => {
  // The part of a reply that has come; or what is kept nowhere else any more, after a new chat in another tab.
  if (running || read("localStorage", "deeptutor.messages")?.length === 0) keepMessages();
});
document.addEventListener("visibilitychange", () => { // a phone may end a page that isn't seen, without a pagehide
  if (document.hidden && running) keepMessages();
});
let dragged = 0; // enter and leave come for every element on the way
document.addEventListener("dragenter", (event) => {
  if (event.dataTransfer.types.includes("Files")) $("drop").hidden = ++dragged <= 0;
});
document.addEventListener("dragleave", (event) => {
  if (event.dataTransfer.types.includes("Files")) $("drop").hidden = --dragged <= 0;
});
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  dragged = 0;
  $("drop").hidden = true;
  add([...event.dataTransfer.files]);
});
begin();
