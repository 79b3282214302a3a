"use strict";

// The data of a request holds, for each layer, KV head and token, the number of tokens that had been read when the token
// was first missing: 0 while it is held. What any head held at any time follows from it.

const get = (id) => document.getElementById(id);
const whole = (number) => number.toLocaleString("en", { maximumFractionDigits: 1 });
const mebibytes = (bytes) => `${whole(bytes / 2 ** 20)} MiB`;
const EVENTS = 60; // times that are listed

let opened = null; // id of the request that is shown
let shown = null; // its data, with `left` decoded
let token = null; // number of the token that was clicked

async function fetched(path) {
  const key = sessionStorage.getItem("key");
  const answer = await fetch(path, { headers: key ? { Authorization: `Bearer ${key}` } : {} });
  get("login").hidden = answer.status !== 401;
  if (answer.status === 401) throw new Error(key ? "the key is wrong" : "the server asks for its API key");
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error?.message ?? body.detail ?? answer.statusText);
  return body;
}

function put(parent, kind, text, className = "") {
  const element = document.createElement(kind);
  element.textContent = text;
  element.className = className;
  parent.append(element);
  return element;
}

// Table of requests

function range(numbers) {
  if (!numbers) return "unknown";
  const spread = numbers.min < numbers.max ? ` (${whole(numbers.min)} to ${whole(numbers.max)})` : "";
  return whole(numbers.mean) + spread;
}

function showTable(found) {
  const { model, policy, budget, layers, model_layers, heads, requests } = found;
  get("server").textContent =
    `${model} · ${policy}, budget ${whole(budget)} tokens per KV head · ${layers}${layers < model_layers ? ` of ${model_layers}` : ""} layers of ${heads} KV heads`;
  get("none").hidden = requests.length > 0;
  const body = get("requests").tBodies[0];
  const rows = new Map([...body.rows].map((row) => [row.dataset.id, row]));
  requests.forEach((each, i) => {
    const row = rows.get(each.id) ?? newRow(each.id);
    rows.delete(each.id);
    if (body.rows[i] !== row) body.insertBefore(row, body.rows[i] ?? null); // a row that stays can be clicked meanwhile
    const texts = [
      each.state,
      whole(each.prompt_tokens),
      whole(each.generated_tokens),
      range(each.kept_tokens_per_head),
      range(each.evicted_tokens_per_head),
      `${each.blocks} of ${each.blocks_bound}`,
      mebibytes(each.bytes),
      each.dense_bytes ? `${whole((100 * each.bytes) / each.dense_bytes)}%` : "",
    ];
    texts.forEach((text, column) => (row.cells[column + 1].textContent = text));
    row.cells[1].className = each.state;
  });
  for (const row of rows.values()) row.remove();
}

function newRow(id) {
  const row = document.createElement("tr");
  row.dataset.id = id;
  row.onclick = () => choose(id);
  put(put(row, "td", ""), "button", id);
  for (let column = 1; column < 9; column++) put(row, "td", "");
  return row;
}

// One request

function decoded(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Int32Array(bytes.buffer);
}

function setSlider(id, most, follow) {
  const slider = get(id);
  slider.max = most;
  if (follow) slider.value = most;
}

function choose(id) {
  opened = id;
  shown = token = null;
  for (const row of get("requests").tBodies[0].rows) row.classList.toggle("open", row.dataset.id === id);
  get("text").replaceChildren();
  get("layer").value = get("head").value = 0;
  get("time").max = get("time").value = 1;
  return update();
}

function receive(found) {
  const time = get("time");
  const follow = !shown || time.value === time.max; // at the newest token it stays there
  shown = found;
  shown.left = decoded(found.left);
  shown.count = found.tokens.length;
  setSlider("layer", shown.layers, false);
  setSlider("head", shown.heads, false);
  setSlider("time", Math.max(1, shown.count), follow);
  const text = get("text");
  while (text.children.length > shown.count) text.lastChild.remove(); // it has started over
  for (let t = text.children.length; t < shown.count; t++) {
    const visible = shown.tokens[t].replaceAll("\n", "↵\n");
    const span = put(text, "span", visible, t === shown.prompt_tokens ? "first" : "");
    span.dataset.t = t;
  }
  get("name").textContent = shown.id;
  get("details").hidden = false;
  draw();
}

// Chosen layers and heads: all where a slider is at 0.

function chosen(id, count) {
  const value = Number(get(id).value);
  return value ? [value - 1] : [...Array(count).keys()];
}

function rowsOf(layers, heads) {
  return layers.flatMap((layer) => heads.map((head) => (layer * shown.heads + head) * shown.count));
}

// Number of the given heads that hold each token at a time, layer by layer.
function holders(heads, time) {
  const held = new Uint16Array(shown.layers * shown.count);
  for (let layer = 0; layer < shown.layers; layer++) {
    for (const row of rowsOf([layer], heads)) {
      for (let t = 0; t < Math.min(time, shown.count); t++) {
        const left = shown.left[row + t];
        if (left === 0 || left > time) held[layer * shown.count + t]++;
      }
    }
  }
  return held;
}

function draw() {
  if (!shown) return;
  const time = Number(get("time").value);
  const layers = chosen("layer", shown.layers);
  const heads = chosen("head", shown.heads);
  const rows = rowsOf(layers, heads);
  const name = (id, values, count) => (values.length > 1 || count === 1 ? `all ${count}` : `${values[0] + 1} of ${count}`);
  get("layer").nextElementSibling.value = name("layer", layers, shown.layers);
  get("head").nextElementSibling.value = name("head", heads, shown.heads);
  get("time").nextElementSibling.value = `after ${whole(time)} tokens`;
  const holding = holders(heads, time);
  let held = 0;
  const spans = get("text").children;
  for (let t = 0; t < shown.count; t++) {
    const share = layers.reduce((sum, layer) => sum + holding[layer * shown.count + t], 0) / rows.length;
    held += share;
    const span = spans[t];
    span.dataset.share = share.toFixed(3);
    span.style.backgroundColor = share ? `rgb(var(--held) / ${(0.7 * Math.sqrt(share)).toFixed(3)})` : "";
    span.classList.toggle("gone", t < time && !share);
    span.classList.toggle("unseen", t >= time);
    span.classList.toggle("chosen", t === token);
  }
  const evicted = Math.min(time, shown.count) - held;
  get("told").textContent = shown.error
    ? `The pages could not be read: ${shown.error}`
    : `Mean of the chosen heads: ${whole(held)} of ${whole(time)} tokens held, ${whole(evicted)} evicted. ` +
      `The answer begins at the orange line.`;
  drawEvents(rows, layers, heads, time);
  drawMap(holding, heads.length);
}

// What was evicted when: of the clicked token by head, else of all tokens, newest first.

function drawEvents(rows, layers, heads, time) {
  const list = document.createElement("ol");
  list.id = "events";
  if (token !== null) {
    get("chosen").textContent = `Token ${whole(token)}`;
    put(put(list, "li", ""), "code", shown.tokens[token]);
    for (const layer of layers) {
      const times = heads.map((head) => shown.left[(layer * shown.heads + head) * shown.count + token]);
      const item = put(list, "li", "");
      put(item, "b", `layer ${layer + 1}`);
      item.append(times.map((left) => (left ? `after ${whole(left)}` : "held")).join(", "));
    }
  } else {
    get("chosen").textContent = "Evicted, newest first (of one token: click it)";
    const counts = new Uint32Array(time + 1);
    for (const row of rows) for (let t = 0; t < shown.count; t++) counts[shown.left[row + t]]++;
    const times = [];
    for (let left = time; left > 0 && times.length < EVENTS; left--) if (counts[left]) times.push(left);
    const byTime = new Map(times.map((left) => [left, new Map()]));
    for (const row of rows) {
      for (let t = 0; t < shown.count; t++) {
        const tokens = byTime.get(shown.left[row + t]);
        tokens?.set(t, (tokens.get(t) ?? 0) + 1);
      }
    }
    for (const left of times) {
      const item = put(list, "li", "");
      put(item, "b", `after ${whole(left)}`);
      const tokens = [...byTime.get(left)].sort((a, b) => b[1] - a[1]);
      for (const [t, count] of tokens.slice(0, 6)) {
        put(item, "code", shown.tokens[t]).title = `token ${t}, by ${count} of ${rows.length} heads`;
      }
      if (tokens.length > 6) item.append(`and ${whole(tokens.length - 6)} others`);
    }
    if (!times.length) put(list, "li", "nothing yet");
  }
  get("events").replaceWith(list);
}

// Layers by tokens, as in Figure 6 of the KVpop paper.

function drawMap(holding, heads) {
  const canvas = get("map");
  canvas.width = Math.max(1, shown.count);
  canvas.height = shown.layers;
  canvas.style.height = `${Math.max(60, 7 * shown.layers)}px`;
  const image = new ImageData(canvas.width, canvas.height);
  const [red, green, blue] = getComputedStyle(document.body).getPropertyValue("--held").trim().split(" ");
  holding.forEach((held, at) => image.data.set([red, green, blue, (255 * held) / heads], 4 * at));
  canvas.getContext("2d").putImageData(image, 0, 0);
}

// Events

for (const id of ["layer", "head", "time"]) get(id).oninput = draw;

get("text").onclick = (event) => {
  const clicked = event.target.dataset.t;
  token = clicked === undefined || Number(clicked) === token ? null : Number(clicked);
  draw();
};

get("map").onclick = (event) => {
  const { width, height } = event.target.getBoundingClientRect();
  get("layer").value = 1 + Math.floor((event.offsetY / height) * shown.layers);
  token = Math.min(shown.count - 1, Math.floor((event.offsetX / width) * shown.count));
  get("text").children[token].scrollIntoView({ block: "nearest" });
  draw();
};

get("login").onsubmit = (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", get("key").value);
  update();
};

// Polling: the next question is asked a second after the last answer, while the page is seen.

async function update() {
  const state = get("state");
  try {
    const found = await fetched("v1/kv_inspect");
    showTable(found);
    const now = found.requests.find((each) => each.id === opened);
    const changed = !shown || shown.seen_tokens !== now?.seen_tokens || shown.state !== now?.state;
    if (now && changed) {
      const id = opened;
      const data = await fetched(`v1/kv_inspect/${encodeURIComponent(id)}`);
      if (id === opened) receive({ ...data, layers: found.layers, heads: found.heads });
    }
    state.textContent = "live";
    state.className = "live";
  } catch (error) {
    state.textContent = error.message;
    state.className = "";
  }
}

async function poll() {
  if (!document.hidden) await update();
  setTimeout(poll, 1000);
}

poll();
