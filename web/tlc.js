// The live view of the cache: figures, memory against the full cache, and a strip for each layer that shows which parts of the
// conversation it still keeps.
import { say, number, bytes } from "/words.js";

const $ = (id) => document.getElementById(id);
let last = null; // the newest event, with the newest strips carried along

function colour(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

// Digits cover [0, stripTokens); what came since is kept whole.
function draw(canvas, strip, stripTokens, nTokens) {
  const ratio = window.devicePixelRatio || 1;
  const width = Math.max(1, Math.round(canvas.clientWidth * ratio)), height = Math.max(1, Math.round(canvas.clientHeight * ratio));
  if (canvas.width !== width || canvas.height !== height) [canvas.width, canvas.height] = [width, height];
  const context = canvas.getContext("2d"), kept = colour("--kept");
  context.fillStyle = colour("--track");
  context.fillRect(0, 0, width, height);
  const known = strip && nTokens > 0 ? Math.min(1, stripTokens / nTokens) * width : 0;
  for (let i = 0; strip && i < strip.length; i++) {
    const share = parseInt(strip[i], 16) / 15;
    if (share > 0) {
      const from = Math.floor((i * known) / strip.length), to = Math.floor(((i + 1) * known) / strip.length);
      context.fillStyle = `rgba(${kept}, ${0.15 + 0.85 * share})`;
      context.fillRect(from, 0, Math.max(1, to - from), height);
    }
  }
  if (known < width) {
    context.fillStyle = `rgba(${kept}, 1)`;
    context.fillRect(Math.floor(known), 0, width - Math.floor(known), height);
  }
}

function rows(n) {
  const body = $("layers").tBodies[0];
  while (body.rows.length > n) body.deleteRow(-1);
  while (body.rows.length < n) {
    const row = body.insertRow();
    row.insertCell();
    row.insertCell();
    const canvas = document.createElement("canvas");
    canvas.setAttribute("role", "img");
    row.insertCell().append(canvas);
  }
  return body.rows;
}

export function paint() {
  const event = last;
  $("layers").hidden = !event;
  $("layers-empty").hidden = Boolean(event);
  if (!event) {
    for (const id of ["prefill-tps", "decode-tps", "n-tokens", "reused", "kv-bytes"]) $(id).textContent = "–";
    $("meter-fill").style.width = "0";
    $("meter").removeAttribute("aria-label");
    return;
  }
  const speed = (n) => (n > 0 ? say("perSecond", { n: number(n) }) : "–");
  $("prefill-tps").textContent = speed(event.prefill_tps);
  $("decode-tps").textContent = speed(event.decode_tps);
  $("n-tokens").textContent = number(event.n_tokens);
  $("reused").textContent = say("ofPrompt", { n: number(event.reused_tokens), all: number(event.prompt_tokens) });
  const shrunk = event.kv_bytes <= event.kv_bytes_full; // a short one takes more with what eviction keeps beside it
  $("kv-bytes").textContent = shrunk ? say("ofFull", { now: bytes(event.kv_bytes), full: bytes(event.kv_bytes_full) }) : bytes(event.kv_bytes);
  const share = event.kv_bytes_full > 0 ? Math.min(1, event.kv_bytes / event.kv_bytes_full) : 0;
  $("meter-fill").style.width = `${100 * share}%`;
  $("meter").setAttribute("aria-label", say("meter", { percent: number(100 * share) }));
  const table = rows(event.layers.length);
  const sharing = event.layers.filter((layer) => layer.policy !== "none").length;
  const average = sharing > 0 ? Math.floor((event.eviction.total_cache_size ?? 0) / sharing) : 0; // of a budget that layers share
  event.layers.forEach((layer, i) => {
    const cells = table[i].cells, kept = Math.round(layer.mean_length);
    cells[0].textContent = i;
    const budget = layer.max > 0 ? number(layer.max) : average > 0 && layer.policy !== "none" ? `⌀ ${number(average)}` : "";
    cells[1].textContent = budget ? `${number(kept)} / ${budget}` : number(kept);
    const canvas = cells[2].firstChild;
    const label = say("keeps", { layer: i, n: number(kept), all: number(event.n_tokens) });
    canvas.setAttribute("aria-label", label);
    canvas.title = `${label} (${layer.policy})`;
    draw(canvas, layer.strip, event.strip_tokens ?? 0, event.n_tokens);
  });
}

export function show(event) {
  if (event && event.strip_tokens === undefined && last && last.layers.length === event.layers.length) {
    event.strip_tokens = last.strip_tokens;
    event.layers.forEach((layer, i) => { layer.strip = last.layers[i].strip; });
  }
  last = event;
  paint();
}

window.addEventListener("resize", paint);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
