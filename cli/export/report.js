
"use strict";
(() => {
  const facts = JSON.parse(document.getElementById("facts").textContent);
  const { layers, heads, pieces, sections, curve } = facts;
  const n = pieces.length;
  const id = (name) => document.getElementById(name);
  const make = (tag, kind, text) => {
    const node = document.createElement(tag);
    if (kind) node.className = kind;
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const draw = (tag, set, text) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const key in set) node.setAttribute(key, set[key]);
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const count = (value) => value.toLocaleString("en-US");
  const percent = (share) => {
    const value = 100 * share;
    return (value === 0 || value >= 10 ? value.toFixed(0) : value.toFixed(1)) + "%";
  };
  // Rounded down; in words if nothing is saved. The same as in the figures of a turn.
  const saved = (held, full) =>
    (held < full ? `${(Math.floor(1000 * (1 - held / full) + 1e-9) / 10).toFixed(1)}% saved` : "nothing saved");
  const level = (share) => (share > 0 ? Math.max(1, Math.ceil(share * 10 - 1e-9)) : 0);

  // ---- which heads hold which tokens --------------------------------------------------------------
  const bits = facts.kept.map((row) => row.map((text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0))));
  const holds = (layer, head, token) => (bits[layer][head][token >> 3] >> (token & 7)) & 1;
  const rows = bits.map((row) => row.map((map) => {
    let sum = 0;
    for (const byte of map) for (let b = byte; b; b &= b - 1) sum += 1;
    return sum;
  }));
  const sums = bits.map((row) => {
    const total = new Uint16Array(n);
    for (const map of row) for (let i = 0; i < n; i++) total[i] += (map[i >> 3] >> (i & 7)) & 1;
    return total;
  });
  const every = new Uint32Array(n);
  for (const total of sums) for (let i = 0; i < n; i++) every[i] += total[i];

  const state = { mode: "all", layer: 0, head: 0, token: -1, stop: 0 };
  const among = () => (state.mode === "all" ? layers * heads : state.mode === "layer" ? heads : 1);
  const holders = (token) =>
    state.mode === "all" ? every[token]
      : state.mode === "layer" ? sums[state.layer][token]
        : holds(state.layer, state.head, token);

  // ---- the document -----------------------------------------------------------------------------
  const spans = [];
  const classes = [];
  const blank = (piece) => piece === null || piece === "";
  function write() {
    const box = id("text");
    const starts = new Map();
    for (const [kind, label, start] of sections) starts.set(start, [kind, label]);
    let line = null;
    for (let i = 0; i < n; i++) {
      const section = starts.get(i);
      if (section) {
        const rule = make("div", "rule");
        rule.append(make("bdi", "", section[1]));
        box.append(rule);
        line = null;
      }
      if (!line) {
        line = make("div", "line");
        box.append(line);
      }
      const piece = pieces[i];
      const span = make("span", "t", piece === null ? "·" : piece);
      classes[i] = blank(piece) ? "t mark" : "t";
      span.tabIndex = -1;
      spans.push(span);
      line.append(span);
      if (piece !== null && piece.endsWith("\n")) line = null;
    }
    if (spans.length) spans[0].tabIndex = 0;
    const index = new Map(spans.map((span, i) => [span, i]));
    const at = (event) => index.get(event.target);
    box.addEventListener("pointerover", (event) => { if (at(event) !== undefined) inspect(at(event)); });
    box.addEventListener("click", (event) => { if (at(event) !== undefined) go(at(event), false); });
    box.addEventListener("focusin", (event) => { if (at(event) !== undefined) inspect(at(event)); });
    box.addEventListener("keydown", (event) => {
      const here = at(event);
      if (here === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
      const steps = { ArrowRight: 1, ArrowLeft: -1, PageDown: 100, PageUp: -100, Home: -n, End: n };
      let next = here + (steps[event.key] || 0);
      if (event.key === "ArrowDown" || event.key === "ArrowUp") next = below(here, event.key === "ArrowDown");
      if (next === here) return;
      event.preventDefault();
      go(Math.max(0, Math.min(n - 1, next)), true);
    });
  }
  // The token on the next or previous line of the screen that is horizontally nearest.
  function below(here, down) {
    const from = spans[here].getBoundingClientRect();
    let best = here, distance = Infinity, line = null;
    for (let i = here + (down ? 1 : -1); i >= 0 && i < n; i += down ? 1 : -1) {
      const to = spans[i].getBoundingClientRect();
      if (down ? to.top < from.bottom - 4 : to.bottom > from.top + 4) continue;
      if (line === null) line = to.top;
      else if (Math.abs(to.top - line) > 4) break;
      if (Math.abs(to.left - from.left) < distance) {
        distance = Math.abs(to.left - from.left);
        best = i;
      }
    }
    return best;
  }
  function go(token, focus) {
    spans[state.stop].tabIndex = -1;
    spans[token].tabIndex = 0;
    state.stop = token;
    if (focus) spans[token].focus({ preventScroll: true });
    const box = id("text"), to = spans[token].getBoundingClientRect(), in_ = box.getBoundingClientRect();
    if (to.top < in_.top + 30 || to.bottom > in_.bottom - 30) {
      box.scrollTop += to.top - in_.top - in_.height / 2;
    }
    inspect(token);
  }
  const where = (token) => {
    const found = sections.find(([, , start, end]) => start <= token && token < end);
    return found ? found[1] : "between the texts";
  };
  function inspect(token) {
    if (state.token >= 0) spans[state.token].classList.remove("now");
    state.token = token;
    spans[token].classList.add("now");
    const piece = pieces[token];
    const title = id("token-title");
    const name = piece === null ? "control token" : piece === "" ? "part of a character" : JSON.stringify(piece);
    title.replaceChildren(
      make("b", "", name),
      `token ${count(token)}, ${where(token)}: held by ${count(every[token])} of `
        + `${count(layers * heads)} heads (${percent(every[token] / (layers * heads))})`,
    );
    const cells = id("token-map").querySelectorAll(".cell");
    let k = 0;
    for (let h = 0; h < heads; h++) for (let l = 0; l < layers; l++) {
      cells[k++].classList.toggle("yes", holds(l, h, token) === 1);
    }
  }
  function shade() {
    const total = among();
    let some = 0, sum = 0;
    for (let i = 0; i < n; i++) {
      const held = holders(i), s = level(held / total);
      some += held > 0;
      sum += held;
      const kind = s ? `${classes[i]} s${s}` : classes[i];
      if (spans[i].className !== kind) spans[i].className = kind;
    }
    if (state.token >= 0) spans[state.token].classList.add("now");
    const whose = state.mode === "all" ? "All heads together"
      : state.mode === "layer" ? `Layer ${state.layer}` : `Layer ${state.layer}, KV head ${state.head}`;
    id("shown").textContent = state.mode === "head"
      ? `${whose} holds ${count(sum)} of ${count(n)} tokens (${percent(n ? sum / n : 0)}).`
      : `${whose}: a head holds ${percent(n ? sum / (n * total) : 0)} of the tokens on average; `
        + `${count(some)} of ${count(n)} tokens are held by at least one head.`;
  }

  // ---- the strip above the document --------------------------------------------------------------
  function strip() {
    const box = id("strip");
    const width = Math.max(200, box.clientWidth), height = 46, band = 6;
    const slices = Math.max(1, Math.min(n, Math.floor(width / 7)));
    const svg = draw("svg", {
      width, height: height + band + 18, role: "img",
      "aria-label": "Share of tokens kept along the text, from the first to the last",
    });
    const total = among();
    const step = width / slices;
    const parts = Array.from({ length: slices }, (_, k) => {
      const from = Math.floor(k * n / slices), to = Math.max(from + 1, Math.floor((k + 1) * n / slices));
      let sum = 0;
      for (let i = from; i < to; i++) sum += holders(i);
      return [from, to, sum / (total * (to - from))];
    });
    const most = Math.max(...parts.map((part) => part[2]));
    for (const [k, [from, to, share]] of parts.entries()) {
      const tall = share ? Math.max(1.5, share / most * height) : 0;
      svg.append(draw("rect", { class: "rail", x: k * step, y: 0, width: Math.max(1, step - 1.5), height }));
      const bar = draw("rect", {
        class: "bar", x: k * step, y: height - tall, width: Math.max(1, step - 1.5), height: tall,
      });
      const hit = draw("rect", { x: k * step, y: 0, width: step, height, fill: "transparent" });
      hit.append(draw("title", {}, `tokens ${count(from)} to ${count(to - 1)}: ${percent(share)} kept`));
      hit.addEventListener("click", () => go(from, false));
      svg.append(bar, hit);
    }
    for (const [kind, label, start, end] of sections) {
      const part = draw("rect", {
        class: `band ${kind}`, x: start / n * width, y: height + 3,
        width: Math.max(1.5, (end - start) / n * width), height: band,
      });
      part.append(draw("title", {}, `${label}: tokens ${count(start)} to ${count(end - 1)}`));
      svg.append(part);
    }
    svg.append(draw("text", { x: 0, y: height + band + 16 }, "token 0"));
    svg.append(draw("text", { x: width, y: height + band + 16, "text-anchor": "end" }, count(n - 1)));
    box.replaceChildren(svg, make("p", "", `Tokens kept along the text: the tallest bar is ${percent(most)}, `
      + "choose one to go there."));
  }

  // ---- maps of layers and heads ------------------------------------------------------------------
  function grid(box, side, cell) {
    box.replaceChildren();
    box.style.gridTemplateColumns = `${side} repeat(${layers}, minmax(0, 1fr))`;
    const every_ = Math.ceil(layers / 8);
    for (let h = 0; h < heads; h++) {
      box.append(make("span", "side", heads > 16 && h % 4 ? "" : `${h}`));
      for (let l = 0; l < layers; l++) box.append(cell(l, h));
    }
    box.append(make("span", "side"));
    for (let l = 0; l < layers; l++) box.append(make("span", "axis", l % every_ ? "" : `${l}`));
  }
  const cells = [];
  function headMap() {
    const flat = rows.flat();
    const low = Math.min(...flat), high = Math.max(...flat);
    const write_ = layers <= 12;
    id("head-map").classList.toggle("large", write_);
    grid(id("head-map"), "2.2em", (l, h) => {
      const kept = rows[l][h];
      const s = high > low ? 1 + Math.round(9 * (kept - low) / (high - low)) : 6;
      const node = make("button", `cell ${kept ? "s" + s : "none"}`, write_ ? count(kept) : undefined);
      const words = `layer ${l}, KV head ${h}: ${count(kept)} of ${count(n)} tokens kept (${percent(n ? kept / n : 0)})`;
      node.type = "button";
      node.title = words;
      node.setAttribute("aria-label", words);
      node.tabIndex = l || h ? -1 : 0;
      const tell = () => { id("map-out").textContent = words; };
      node.addEventListener("pointerenter", tell);
      node.addEventListener("focus", tell);
      node.addEventListener("click", () => choose({ mode: "head", layer: l, head: h }));
      node.addEventListener("keydown", (event) => {
        const step = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key];
        if (!step) return;
        event.preventDefault();
        const to = cells[(h + step[1] + heads) % heads][(l + step[0] + layers) % layers];
        for (const row of cells) for (const other of row) other.tabIndex = -1;
        to.tabIndex = 0;
        to.focus();
      });
      (cells[h] = cells[h] || [])[l] = node;
      return node;
    });
    const legend = id("map-legend");
    legend.append(make("span", "", count(low)));
    if (high > low) for (let s = 1; s <= 10; s++) legend.append(make("i", `s${s}`));
    else legend.append(make("i", "s6"));
    legend.append(make("span", "", `${count(high)} tokens`));
    grid(id("token-map"), "1.4em", () => make("span", "cell"));
    id("token-map").setAttribute("aria-hidden", "true");
  }

  // ---- memory ------------------------------------------------------------------------------------
  const UNITS = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];
  const unit = (bytes) => UNITS.find(([, scale]) => bytes >= scale) || UNITS[3];
  const bytes = (value) => {
    const [name, scale] = unit(value);
    return `${scale === 1 ? count(value) : (value / scale).toFixed(1)} ${name}`;
  };
  function ticks(most, wanted) {
    const rough = most / wanted, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].find((k) => k * power >= rough) * power;
    const list = [];
    for (let value = 0; value <= most * 1.0001; value += step) list.push(value);
    return list;
  }
  function chart() {
    const box = id("chart");
    const width = Math.max(260, box.clientWidth), height = Math.min(320, Math.max(220, width * 0.52));
    const left = 52, right = 14, top = 26, bottom = 40;
    const points = [[0, 0, 0], ...curve];
    const far = Math.max(1, ...points.map((p) => p[0]));
    const most = Math.max(1, ...points.map((p) => Math.max(p[1], p[2])));
    const [name, scale] = unit(most);
    const x = (tokens) => left + (width - left - right) * tokens / far;
    const y = (value) => height - bottom - (height - bottom - top) * value / most;
    const last = points[points.length - 1];
    const svg = draw("svg", {
      width, height, role: "img",
      "aria-label": `KV memory: ${bytes(last[1])} held of ${bytes(last[2])} that a full cache `
        + `would hold after ${count(last[0])} tokens`,
    });
    for (const value of ticks(most / scale, 4)) {
      const at = y(value * scale);
      svg.append(draw("line", { class: "grid", x1: left, x2: width - right, y1: at, y2: at }));
      svg.append(draw("text", { x: left - 8, y: at + 4, "text-anchor": "end" },
        value.toLocaleString("en-US", { maximumFractionDigits: 2 })));
    }
    svg.append(draw("text", { x: left - 8, y: 12, "text-anchor": "end" }, name));
    const across = ticks(far, Math.max(2, Math.floor(width / 110))).filter((value) => Number.isInteger(value));
    for (const value of across) {
      svg.append(draw("text", { x: x(value), y: height - bottom + 18, "text-anchor": "middle" }, count(value)));
    }
    svg.append(draw("text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" },
      "tokens read and written"));
    const line = (k) => points.map((p) => `${x(p[0])},${y(p[k])}`).join(" ");
    svg.append(draw("polygon", { class: "area", points: `${line(1)} ${x(far)},${y(0)}` }));
    svg.append(draw("polyline", { class: "fulls", points: line(2) }));
    svg.append(draw("polyline", { class: "held", points: line(1) }));
    for (const p of curve) {
      svg.append(draw("circle", { class: "dot f", cx: x(p[0]), cy: y(p[2]), r: 4 }));
      svg.append(draw("circle", { class: "dot", cx: x(p[0]), cy: y(p[1]), r: 4.5 }));
    }
    const mid = (k) => last[k] * 0.55;
    svg.append(draw("text", { class: "name", x: x(far * 0.55) - 10, y: y(mid(2)) - 6, "text-anchor": "end" },
      "full cache"));
    svg.append(draw("text", { class: "name h", x: x(far * 0.97), y: Math.min(y(last[1]) - 12, height - bottom - 8),
      "text-anchor": "end" }, `held ${bytes(last[1])}`));
    const cursor = draw("line", { class: "cursor", y1: top, y2: height - bottom });
    svg.append(cursor);
    const read = make("p", "read");
    const say = (p) => {
      read.textContent = `after ${count(p[0])} tokens: ${bytes(p[1])} held, ${bytes(p[2])} in a full cache`
        + (p[2] ? `, ${saved(p[1], p[2])}` : "");
      cursor.setAttribute("x1", x(p[0]));
      cursor.setAttribute("x2", x(p[0]));
      cursor.setAttribute("visibility", "visible");
    };
    svg.addEventListener("pointermove", (event) => {
      if (!curve.length) return;
      const at = event.clientX - svg.getBoundingClientRect().left;
      say(curve.reduce((a, b) => (Math.abs(x(a[0]) - at) <= Math.abs(x(b[0]) - at) ? a : b)));
    });
    box.replaceChildren(svg, read);
    if (curve.length) say(curve[curve.length - 1]);
    cursor.setAttribute("visibility", "hidden");
  }
  function table() {
    const box = id("curve-table");
    const head = make("tr");
    for (const name of ["tokens", "held", "full cache", "saved"]) {
      const cell = make("th", "", name);
      cell.scope = "col";
      head.append(cell);
    }
    box.append(head);
    for (const [tokens, held, full] of curve) {
      const row = make("tr");
      for (const value of [count(tokens), bytes(held), bytes(full), full ? saved(held, full).replace(" saved", "") : "–"]) {
        row.append(make("td", "", value));
      }
      box.append(row);
    }
  }

  // ---- the chosen layer and head, which the address also has ---------------------------------------
  const radios = [...document.querySelectorAll("input[name=mode]")];
  function choose(change, quiet) {
    Object.assign(state, change);
    for (const radio of radios) radio.checked = radio.value === state.mode;
    id("layer").value = state.layer;
    id("head").value = state.head;
    id("layer-out").textContent = state.mode === "all" ? "all" : `${state.layer}`;
    id("head-out").textContent = state.mode === "head" ? `${state.head}` : "all";
    id("layer-row").classList.toggle("off", state.mode === "all");
    id("head-row").classList.toggle("off", state.mode !== "head");
    cells.forEach((row, h) => row.forEach((cell, l) => {
      const on = state.mode !== "all" && l === state.layer && (state.mode === "layer" || h === state.head);
      cell.classList.toggle("on", on);
      cell.setAttribute("aria-pressed", String(on));
    }));
    shade();
    strip();
    if (quiet) return;
    const hash = state.mode === "all" ? "#document"
      : state.mode === "layer" ? `#layer=${state.layer}` : `#layer=${state.layer}&head=${state.head}`;
    try { history.replaceState(null, "", hash); } catch { /* a viewer that has no history */ }
  }
  // Show what the address names: #layer=2, #layer=2&head=1 or #token=40.
  function follow() {
    const wanted = new URLSearchParams(location.hash.slice(1));
    const number = (key, limit) => {
      const text = wanted.get(key);
      return text !== null && /^\d+$/.test(text) && Number(text) < limit ? Number(text) : null;
    };
    const layer = number("layer", layers), head = number("head", heads), token = number("token", n);
    if (layer !== null && head !== null) choose({ mode: "head", layer, head }, true);
    else if (layer !== null) choose({ mode: "layer", layer }, true);
    if (token !== null) go(token, false);
    if (layer !== null || token !== null) id("document").scrollIntoView();
  }

  const drawn = n > 0 && layers > 0 && heads > 0;
  if (drawn) {
    id("document").hidden = id("map").hidden = false;
    id("layer").max = layers - 1;
    id("head").max = heads - 1;
    for (const radio of radios) radio.addEventListener("change", () => choose({ mode: radio.value }));
    id("layer").addEventListener("input", (event) =>
      choose({ mode: state.mode === "head" ? "head" : "layer", layer: Number(event.target.value) }));
    id("head").addEventListener("input", (event) => choose({ mode: "head", head: Number(event.target.value) }));
    write();
    headMap();
    choose({}, true);
    follow();
    addEventListener("hashchange", follow);
  }
  if (curve.length) {
    id("memory").hidden = false;
    chart();
    table();
  }
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    if (drawn) strip();
    if (curve.length) chart();
  });
})();
