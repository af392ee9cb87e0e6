// The table of trials: sorted, filtered, pinned; rows stand still under the pointer.

const pins = new Set();
const table = { sort: "rank", sign: 1, filter: "all", text: "", frozen: false, order: [], rows: new Map(), head: "" };

const GROUPS = {
  all: () => true,
  running: (trial) => OPEN.includes(trial.status),
  ended: (trial) => trial.status === "finished" || trial.status === "stopped",
  failed: (trial) => trial.status === "failed" || trial.status === "diverged",
  yours: (trial) => trial.parent !== null || trial.origin === "user",
};

function sortKey(trial, by) {
  if (by === "rank") return trial.rank === Infinity ? 1e6 + trial.n : trial.rank;
  if (by === "n" || by === "done" || by === "status") return trial[by];
  return trial.config[by.slice(2)] ?? null; // c:NAME, a setting
}

function compareKeys(a, b) {
  if (a === null || b === null) return (a === null) - (b === null);
  if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
  return a < b ? -1 : a > b ? 1 : 0;
}

function matches(trial) {
  const words = table.text.trim().toLowerCase().split(/[\s,]+/).filter(Boolean);
  if (!words.length) return true;
  const settings = Object.entries(trial.config).map(([name, value]) => `${name}=${short(value)}`).join(" ");
  const text = `trial ${trial.n} ${trial.status} ${trial.parent === null ? "" : `clone of ${trial.parent}`} ${trial.origin === "user" ? "added" : ""} ${settings} ${trial.error || ""}`.toLowerCase();
  return words.every((word) => (/^\d+$/.test(word) ? trial.n === +word : text.includes(word)));
}

function chooseRows() {
  const found = [...run.trials.values()].filter((trial) => GROUPS[table.filter](trial) && matches(trial));
  return found.sort((a, b) => {
    if (pins.has(a.n) !== pins.has(b.n)) return pins.has(a.n) ? -1 : 1;
    const [x, y] = [sortKey(a, table.sort), sortKey(b, table.sort)];
    if (x === null || y === null) return compareKeys(x, y);
    return table.sign * compareKeys(x, y) || a.n - b.n;
  });
}

function drawHead() {
  const { info } = run;
  const columns = [["", "pin"], ["n", "trial"], ["status", "state"], ["done", "epochs"], ["rank", heading(info.metric)], ["", "curve"],
    ...info.settings.map((name) => [`c:${name}`, name]), ["", "proof"], ["", "actions"]];
  const wanted = JSON.stringify([columns, table.sort, table.sign]);
  if (table.head === wanted) return;
  table.head = wanted;
  const focused = document.activeElement?.dataset?.sort;
  $("head").replaceChildren(...columns.map(([key, text]) => {
    const chosen = key !== "" && key === table.sort;
    const up = key === "rank" && info.mode === "max" ? -table.sign : table.sign;
    const isText = ["n", "status"].includes(key) || key === "";
    const hidden = key === "" && text !== "proof";
    return node("th", { scope: "col", class: isText ? "l" : null, "aria-sort": chosen ? (up > 0 ? "ascending" : "descending") : null },
      key === "" ? node("span", { class: hidden ? "unseen" : null }, text) : node("button", { type: "button", "data-sort": key, on: { click: () => sortBy(key) } }, text));
  }));
  if (focused) $("head").querySelector(`[data-sort="${CSS.escape(focused)}"]`)?.focus();
}

function sortBy(key) {
  table.sign = table.sort === key ? -table.sign : 1;
  table.sort = key;
  drawTrials(true);
}

function drawTrials(force) {
  drawHead();
  let rows = chooseRows();
  if (table.frozen && !force) {
    const left = new Map(rows.map((trial) => [trial.n, trial]));
    const kept = table.order.filter((number) => left.has(number)).map((number) => left.get(number));
    kept.forEach((trial) => left.delete(trial.n));
    rows = [...kept, ...left.values()];
  }
  table.order = rows.map((trial) => trial.n);
  const body = $("rows");
  const names = JSON.stringify(run.info.settings);
  if (body.dataset.names !== names) {
    body.dataset.names = names;
    table.rows.clear();
    body.replaceChildren();
  }
  const wanted = new Set(table.order);
  for (const [number, row] of table.rows) {
    if (wanted.has(number)) continue;
    row.line.remove();
    table.rows.delete(number);
  }
  rows.forEach((trial, i) => {
    if (!table.rows.has(trial.n)) table.rows.set(trial.n, makeRow(trial.n));
    const row = table.rows.get(trial.n);
    row.update(trial);
    if (body.children[i] !== row.line) body.insertBefore(row.line, body.children[i] ?? null);
  });
  drawTableTools(rows.length);
}

function drawTableTools(count) {
  const all = [...run.trials.values()];
  tabs($("filterTabs"), Object.keys(GROUPS).map((key) => [key, key, all.filter(GROUPS[key]).length]), table.filter, (key) => { table.filter = key; drawTrials(true); });
  const pair = [...pins].filter((number) => run.trials.has(number)).slice(-2);
  $("compare").hidden = pair.length < 2;
  if (pair.length === 2) setText($("compare"), `Compare ${pair[0]} and ${pair[1]}`);
  $("noRows").hidden = count > 0;
  setText($("noRows"), all.length ? "no trial matches the filter" : "no trial has begun yet");
  drawPager();
}

// A row whose cells change in place, so that focus and selection stay where they are.
function makeRow(number) {
  const cell = (kind, ...children) => node("td", { class: kind }, ...children);
  const parts = {
    pin: node("button", { type: "button", class: "pin", on: { click: (event) => { event.stopPropagation(); togglePin(number); } } }),
    swatch: node("span", { class: "sw" }), name: node("button", { type: "button", class: "num", on: { click: (event) => { event.stopPropagation(); showTrial(number); } } }, String(number)),
    lineage: node("span", { class: "lin" }), state: node("span"), bar: node("b"), epochs: node("span"), value: node("span"),
    spark: shape("svg", { width: 104, height: 22, "aria-hidden": "true" }), why: node("span", { class: "why" }), all: node("span"),
    proof: node("span", { class: "proof" }), acts: node("span", { class: "acts" }),
  };
  const settings = run.info.settings.map((name) => [name, node("td", { class: "c-set set" })]);
  const status = node("span", { class: "st" }, node("i"), parts.state);
  const buttons = ["pause", "stop", "clone"].map((verb) => [verb, node("button", { type: "button", class: verb === "stop" ? "ic bad" : "ic", on: { click: (event) => { event.stopPropagation(); actOn(number, event.currentTarget.dataset.verb); } } })]);
  parts.acts.append(...buttons.map(([, button]) => button));
  const line = node("tr", { "data-n": number, on: { click: () => showTrial(number) } },
    cell("l c-pin", parts.pin), cell("l c-n", parts.swatch, parts.name, parts.lineage), cell("l c-st", status),
    cell("c-e", node("span", { class: "prog" }, node("u", {}, parts.bar), parts.epochs)), cell("c-v val", parts.value),
    cell("l c-cv", parts.spark, parts.why), ...settings.map(([, made]) => made), cell("c-sum", parts.all), cell("l c-proof", parts.proof), cell("c-a", parts.acts));
  let drawn = "";
  const update = (trial) => {
    const proof = run.proofs[number];
    const state = JSON.stringify([trial.status, trial.done, trial.target, trial.value, trial.rank, pins.has(number), proof, colorOf(trial), run.writable, run.info.live, trial.parent, run.trials.has(trial.parent), $("add").hidden]);
    if (state === drawn) return;
    drawn = state;
    line.classList.toggle("best", trial.rank === 0);
    setText(parts.pin, pins.has(number) ? "★" : "☆");
    setAttribute(parts.pin, "aria-pressed", pins.has(number));
    setAttribute(parts.pin, "aria-label", `pin trial ${number}`);
    setAttribute(parts.name, "aria-label", `trial ${number}, show more`);
    parts.swatch.style.background = colorOf(trial);
    setText(parts.lineage, lineage(trial));
    status.className = `st ${trial.status}`;
    setText(parts.state, trial.status);
    parts.bar.style.width = `${Math.min(100, (100 * trial.done) / Math.max(1, trial.target))}%`;
    setText(parts.epochs, `${trial.done}/${trial.target}`);
    setText(parts.value, metric(trial.value));
    setText(parts.why, trial.error && !isOpen(trial) ? firstLine(trial.error).replace(/^\w+Error: /, "") : "");
    setAttribute(parts.why, "title", trial.error ? plain(trial.error, 400) : null);
    parts.spark.style.display = trial.error ? "none" : "";
    drawSpark(parts.spark, trial);
    updateSettings(settings, parts.all, trial);
    updateProof(parts.proof, proof);
    updateActions(buttons, trial);
  };
  return { line, update };
}

function updateSettings(cells, all, trial) {
  const changed = new Map(changesOf(trial).map((change) => [change.name, change]));
  for (const [name, cell] of cells) {
    const change = changed.get(name);
    setText(cell, name in trial.config ? short(trial.config[name]) : "");
    cell.classList.toggle("d", change !== undefined);
    setAttribute(cell, "title", change ? `${short(change.from)} in trial ${trial.parent}` : null);
  }
  all.replaceChildren(...settingsLine(trial).filter((part) => part !== null));
}

function updateProof(box, proof) {
  setAttribute(box, "title", proof ? plain(proof.text, 400) : null);
  box.className = `proof ${proof?.state ?? ""}`;
  const text = { proving: "proving …", identical: "identical", failed: "not proved" }[proof?.state] ?? "";
  box.replaceChildren(...(proof?.state === "identical" ? [icon("check")] : []), text);
}

function updateActions(buttons, trial) {
  const may = canAct();
  for (const [verb, button] of buttons) {
    const now = verb === "pause" && trial.status === "paused" ? "unpause" : verb;
    button.hidden = !may;
    button.disabled = verb === "clone" ? !run.info.live : !isOpen(trial);
    if (button.dataset.verb === now) continue;
    button.dataset.verb = now;
    const text = `${now === "unpause" ? "continue" : now} trial ${trial.n}`;
    button.title = text;
    button.setAttribute("aria-label", text);
    button.replaceChildren(icon(now));
  }
}

// A small curve in the row: all rows share their axes.
function drawSpark(drawing, trial) {
  const { points } = seriesOf(trial, run.info.metric, "epoch");
  drawing.replaceChildren();
  if (!points.length) return;
  const [low, high] = sparkRange();
  const most = Math.max(run.info.epochs, trial.target, 2);
  const x = (epoch) => 2 + ((epoch - 1) / (most - 1)) * 100;
  const y = (value) => 20 - ((Math.min(high, Math.max(low, value)) - low) / (high - low || 1)) * 18;
  const path = "M" + points.map((point) => `${x(point[0]).toFixed(1)},${y(point[1]).toFixed(1)}`).join("L");
  shape("path", { d: path, fill: "none", stroke: trial.rank < 5 ? colorOf(trial) : "var(--mute)", "stroke-width": 1.5, "stroke-linejoin": "round" }, drawing);
}

function sparkRange() {
  if (sparkRange.of !== run.ranked) {
    sparkRange.of = run.ranked;
    const values = run.ranked.flatMap((trial) => (trial.curves[run.info.metric] || []).filter(isNumber));
    sparkRange.range = values.length ? rangeOf(values, run.info.mode === "max") : [0, 1];
  }
  return sparkRange.range;
}

function togglePin(number) {
  if (!pins.delete(number)) pins.add(number);
  drawTrials(true);
  drawCurves();
}

$("rows").addEventListener("pointerenter", () => { table.frozen = true; });
$("rows").addEventListener("pointerleave", () => { table.frozen = $("rows").contains(document.activeElement); });
$("rows").addEventListener("focusin", () => { table.frozen = true; });
$("rows").addEventListener("focusout", () => { table.frozen = false; });
hoverOver($("rows"));
hoverOver($("gantt"));
$("search").addEventListener("input", (event) => { table.text = event.target.value; drawTrials(true); });
