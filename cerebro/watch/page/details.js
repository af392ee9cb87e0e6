// A trial in full: settings, metrics, output, traceback, proof; and two trials side by side.

let openTrial = null; // the number of the trial whose details are shown

function openDialog(title, wide) {
  const box = $("dialog");
  box.className = wide ? "wide" : "";
  const close = node("button", { type: "button", class: "ic close", "aria-label": "close", on: { click: () => box.close() } }, "×");
  const body = node("div", { class: "db" });
  box.replaceChildren(node("div", { class: "dh" }, node("h3", { id: "dialogTitle" }, title), close), body);
  if (!box.open) box.showModal();
  return body;
}

$("dialog").addEventListener("close", () => { openTrial = null; $("dialog").replaceChildren(); });
$("dialog").addEventListener("click", (event) => { if (event.target === $("dialog")) $("dialog").close(); });

function facts(entries) {
  return node("table", { class: "facts" }, node("tbody", {}, ...entries.map(([name, value]) =>
    node("tr", {}, node("th", { scope: "row" }, name), node("td", {}, value)))));
}

async function showTrial(number) {
  const trial = run.trials.get(number);
  if (!trial) return;
  openTrial = number;
  const body = openDialog(`Trial ${number}`, true);
  body.append(node("p", { class: "dim" }, describeTrial(trial)));
  body.append(node("div", { class: "pair" }, node("section", {}, node("h4", {}, "Settings"), settingsTable([trial])), node("section", {}, node("h4", {}, "Metrics"), metricsTable([trial]))));
  const more = node("div", {}, node("p", { class: "dim" }, "reading its output …"));
  body.append(detailTools(trial), more);
  const told = await source.trial(number);
  if (openTrial !== number) return;
  more.replaceChildren(...tellMore(told));
}

function describeTrial(trial) {
  const origin = trial.parent !== null ? `a clone of trial ${trial.parent}${trial.after === null ? " from the beginning" : ` after epoch ${trial.after}`}; ` : trial.origin === "user" ? "added by you; " : "";
  const best = trial.best === null ? "" : `; best ${heading(run.info.metric)} ${metric(trial.value)} after ${counted(trial.best + 1, "epoch")}`;
  return `${origin}${trial.status}, ${trial.done} of ${counted(trial.target, "epoch")}${best}`;
}

function settingsTable(trials) {
  const names = [...new Set(trials.flatMap((trial) => Object.keys(trial.config)))];
  const values = (name) => trials.map((trial) => (name in trial.config ? exact(trial.config[name]) : "–"));
  const head = trials.length > 1 ? node("thead", {}, node("tr", {}, node("th"), ...trials.map((trial) => node("th", { scope: "col" }, `trial ${trial.n}`)))) : null;
  return node("table", { class: "facts" }, head, node("tbody", {}, ...names.map((name) => {
    const row = values(name);
    const differs = trials.length > 1 ? row[0] !== row[1] : changesOf(trials[0]).some((change) => change.name === name);
    return node("tr", { class: differs ? "differs" : null }, node("th", { scope: "row" }, name), ...row.map((value) => node("td", {}, value)));
  })));
}

function metricsTable(trials) {
  const names = run.info.metrics.filter((name) => trials.some((trial) => name in trial.curves));
  const at = (trial, name) => metric(trial.curves[name]?.[(trial.best ?? trial.done - 1) - trial.first]);
  const last = (trial, name) => metric(trial.curves[name]?.[trial.curves[name].length - 1]);
  const head = trials.length > 1
    ? [node("th"), ...trials.map((trial) => node("th", { scope: "col" }, `trial ${trial.n}, best`))]
    : [node("th"), node("th", { scope: "col" }, "best epoch"), node("th", { scope: "col" }, "last epoch")];
  return node("table", { class: "facts" }, node("thead", {}, node("tr", {}, ...head)), node("tbody", {}, ...names.map((name) =>
    node("tr", {}, node("th", { scope: "row" }, heading(name)), ...(trials.length > 1 ? trials.map((trial) => node("td", {}, at(trial, name))) : [node("td", {}, at(trials[0], name)), node("td", {}, last(trials[0], name))])))));
}

function detailTools(trial) {
  const tools = node("div", { class: "tools" });
  const button = (text, call) => tools.append(node("button", { type: "button", class: "btn", on: { click: call } }, text));
  const others = [...run.trials.values()].filter((other) => other.n !== trial.n).sort((a, b) => a.n - b.n);
  if (others.length) {
    const pick = node("select", { class: "small", "aria-label": "compare with" }, node("option", { value: "" }, "compare with …"), ...others.map((other) => node("option", { value: other.n }, `trial ${other.n}`)));
    pick.addEventListener("change", () => pick.value && compareTrials(trial.n, +pick.value));
    tools.append(pick);
  }
  if (source.isLive && !source.readOnly) {
    if (trial.done > trial.first) button("Prove this trial", () => act({ verb: "prove", trial: trial.n }));
    if (canAct()) {
      button("Clone", () => showClone(trial.n));
      if (isOpen(trial) && !run.info.adaptive) button("Extend", () => showExtend(trial.n));
    }
  }
  const proof = run.proofs[trial.n];
  if (proof) tools.append(node("span", { class: `proof ${proof.state}` }, proof.text));
  return tools;
}

function tellMore(told) {
  if (told.problem) return [node("p", { class: "warn" }, told.problem)];
  const entries = [];
  if (told.kept) entries.push(["states kept", told.kept.length ? `after epoch ${told.kept.join(", ")}` : "none"]);
  if (told.state_hash) entries.push(["last state's hash", told.state_hash]);
  if (isNumber(told.seconds)) entries.push(["training time", `${told.seconds.toFixed(1)} s`]);
  const parts = entries.length ? [facts(entries)] : [];
  if (told.error) parts.push(node("h4", {}, "Why it ended"), node("pre", {}, plain(told.error, 4000)));
  if (told.traceback) parts.push(node("details", { open: true }, node("summary", {}, "Traceback"), node("pre", {}, lines(told.traceback))));
  if (told.log) parts.push(node("details", { open: !told.traceback }, node("summary", {}, "Output"), node("pre", { class: "log", tabindex: 0 }, lines(told.log))));
  else if (source.isLive) parts.push(node("p", { class: "dim" }, "It has printed nothing."));
  return parts;
}

// Text of several lines: each is made plain and cut.
const lines = (text) => document.createTextNode(text.split(/\r?\n/).slice(-400).map((line) => plain(line, 300)).join("\n"));

function compareTrials(a, b) {
  const trials = [run.trials.get(a), run.trials.get(b)];
  if (trials.some((trial) => !trial)) return;
  openTrial = null;
  const body = openDialog(`Trials ${a} and ${b}`, true);
  body.append(...trials.map((trial) => node("p", { class: "dim" }, `trial ${trial.n}: ${describeTrial(trial)}`)));
  body.append(pairOfCurves(trials), node("div", { class: "pair" }, node("section", {}, node("h4", {}, "Settings"), settingsTable(trials)), node("section", {}, node("h4", {}, "Metrics"), metricsTable(trials))));
}

function pairOfCurves(trials) {
  const [width, height, left] = [640, 180, 46];
  const drawing = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", class: "pair-of-curves", "aria-label": `${plain(heading(chart.metric ?? ""))} of both trials` });
  const series = trials.map((trial) => seriesOf(trial, chart.metric, "epoch").points);
  const all = series.flat();
  if (!all.length) return drawing;
  const [low, high] = rangeOf(all.map((point) => point[1]), isRising(chart.metric));
  const last = Math.max(2, ...all.map((point) => point[0]));
  const x = (value) => left + ((value - 1) / (last - 1)) * (width - left - 70);
  const y = (value) => height - 24 - ((Math.max(low, Math.min(high, value)) - low) / (high - low)) * (height - 34);
  for (const value of ticks(low, high, 4)) {
    shape("line", { x1: left, x2: width - 70, y1: y(value), y2: y(value), stroke: "var(--grid)" }, drawing);
    label(drawing, short(value), { x: left - 8, y: y(value) + 4, "text-anchor": "end" });
  }
  for (const value of [1, ...ticks(2, last, 7).filter(Number.isInteger)]) label(drawing, value, { x: x(value), y: height - 6, "text-anchor": "middle" });
  series.forEach((points, i) => {
    if (!points.length) return;
    const color = i ? "var(--c1)" : "var(--accent)";
    shape("path", { d: "M" + points.map((point) => `${x(point[0])},${y(point[1])}`).join("L"), class: "ln best", stroke: color }, drawing);
    const end = points[points.length - 1];
    label(drawing, `trial ${trials[i].n}`, { x: x(end[0]) + 8, y: y(end[1]) + (i ? 12 : 0), class: "lab", fill: color });
  });
  return drawing;
}

$("compare").addEventListener("click", () => {
  const pair = [...pins].filter((number) => run.trials.has(number)).slice(-2);
  if (pair.length === 2) compareTrials(...pair);
});
