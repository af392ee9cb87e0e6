// The chart of curves: one line per trial, by epoch or by time.

const chart = { metric: null, axis: "epoch", lines: [], drawn: null };
const MOST_CURVES = 200;

// Whether larger values of a metric are better: as the run says, else by the metric's name.
function isRising(name) {
  if (name === run.info.metric) return run.info.mode === "max";
  return !/loss|error|err$|mse|mae|perplexity/.test(name);
}

// The part of the axis that shows what matters: the good end whole, of the bad end not the worst.
function rangeOf(values, rising) {
  const sorted = values.slice().sort((a, b) => a - b);
  const at = (share) => sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
  let [low, high] = rising ? [at(0.08), sorted[sorted.length - 1]] : [sorted[0], at(0.92)];
  if (!(high > low)) [low, high] = [sorted[0], sorted[sorted.length - 1]];
  if (!(high > low)) [low, high] = [low - 0.5 * (Math.abs(low) || 1), low + 0.5 * (Math.abs(low) || 1)];
  const margin = 0.04 * (high - low);
  const share = sorted[0] >= 0 && sorted[sorted.length - 1] <= 1; // an accuracy does not pass 1
  return [Math.max(low - margin, sorted[0] >= 0 ? 0 : -Infinity), share ? Math.min(1, high + margin) : high + margin];
}

function drawChartTabs() {
  const names = run.info.metrics;
  if (!names.includes(chart.metric)) chart.metric = names[0] ?? null;
  const shown = names.slice(0, 4);
  const choose = (key) => { chart.metric = key; drawCurves(); };
  tabs($("metricTabs"), shown.map((name) => [name, heading(name)]), chart.metric, choose);
  const pick = $("metricPick");
  pick.hidden = names.length <= 4;
  if (pick.dataset.made !== names.join("\n")) {
    pick.dataset.made = names.join("\n");
    pick.replaceChildren(node("option", { value: "" }, "more …"), ...names.slice(4).map((name) => node("option", { value: name }, heading(name))));
    pick.onchange = () => pick.value && choose(pick.value);
  }
  pick.value = shown.includes(chart.metric) ? "" : chart.metric;
  tabs($("axisTabs"), [["epoch", "by epoch"], ["time", "by time"]], chart.axis, (key) => { chart.axis = key; drawCurves(); });
}

function drawCurves() {
  drawChartTabs();
  const box = $("curves");
  const [width, height] = [box.clientWidth - 12, box.clientHeight - 8];
  if (width < 150 || $("curvesCard").hidden) return;
  const chosen = [...run.trials.values()].filter((trial) => pins.has(trial.n) || isOpen(trial) || trial.rank < MOST_CURVES);
  chosen.sort((a, b) => (a.rank === b.rank ? b.n - a.n : b.rank - a.rank));
  const lines = chosen.slice(-MOST_CURVES).map((trial) => ({ trial, ...seriesOf(trial, chart.metric, chart.axis) }))
    .filter((line) => line.points.length);
  chart.lines = lines;
  $("rings").hidden = !lines.some((line) => line.ring);
  let drawing = box.querySelector("svg");
  if (!drawing) {
    drawing = shape("svg", { role: "img" });
    box.prepend(drawing);
    drawing.addEventListener("pointermove", pointAtCurve);
    drawing.addEventListener("pointerleave", leaveCurves);
  }
  drawing.replaceChildren();
  drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const best = run.ranked[0];
  drawing.setAttribute("aria-label", `${plain(heading(chart.metric ?? "metric"))} by ${chart.axis}, ${lines.length} trials` +
    (best ? `; trial ${best.n} is the best with ${metric(best.value)}` : ""));
  if (!lines.length) {
    label(drawing, "the curves begin with the first finished epoch", { x: width / 2, y: height / 2, "text-anchor": "middle" });
    return;
  }
  const place = drawAxes(drawing, lines, width, height);
  drawLines(drawing, lines, place);
  showHovered();
}

function drawAxes(drawing, lines, width, height) {
  const [left, right, top, bottom] = [52, width - 46, 10, height - 28];
  const values = lines.flatMap((line) => line.points.filter((point) => chart.axis === "time" || point[0] > 2).map((point) => point[1]));
  const all = values.length ? values : lines.flatMap((line) => line.points.map((point) => point[1]));
  const [low, high] = rangeOf(all, isRising(chart.metric));
  const byEpoch = chart.axis === "epoch";
  const last = Math.max(...lines.map((line) => line.points[line.points.length - 1][0]));
  const first = byEpoch ? 1 : 0;
  const end = byEpoch ? Math.max(2, last, ...lines.map((line) => (isOpen(line.trial) ? line.trial.target : 0))) : Math.max(run.info.now, last, 1);
  const x = (value) => left + ((value - first) / (end - first)) * (right - left);
  const y = (value) => bottom - ((value - low) / (high - low)) * (bottom - top);
  const clip = shape("clipPath", { id: "clip" }, drawing);
  shape("rect", { x: left - 5, y: top - 6, width: right - left + 10, height: bottom - top + 10 }, clip);
  for (const value of ticks(low, high, 5)) {
    shape("line", { x1: left, x2: right, y1: y(value), y2: y(value), stroke: "var(--grid)" }, drawing);
    label(drawing, short(value), { x: left - 9, y: y(value) + 4, "text-anchor": "end" });
  }
  const marks = byEpoch ? [1, ...ticks(2, end, width < 420 ? 4 : 7).filter((value) => Number.isInteger(value))] : ticks(0, end, 5);
  for (const value of marks) label(drawing, byEpoch ? value : clock(value), { x: x(value), y: bottom + 19, "text-anchor": "middle" });
  return { x, y, left, right, top, bottom };
}

function drawLines(drawing, lines, place) {
  const { x, y, right, bottom } = place;
  chart.drawn = place;
  const body = shape("g", { "clip-path": "url(#clip)" }, drawing);
  const names = [];
  for (const { trial, points, ring } of lines) {
    const path = "M" + points.map((point) => `${x(point[0]).toFixed(1)},${y(point[1]).toFixed(1)}`).join("L");
    const color = colorOf(trial);
    const kind = trial.rank === 0 ? " hot best" : trial.rank < 5 ? " hot" : pins.has(trial.n) ? " pinned" : "";
    shape("path", { d: path, class: `ln${kind}`, "data-n": trial.n, stroke: kind === " pinned" ? "var(--c4)" : color }, body);
    if (ring) shape("circle", { cx: x(ring[0]), cy: y(ring[1]), r: 4, fill: "var(--card)", "stroke-width": 1.8, stroke: color, class: "ring" }, body);
    const end = points[points.length - 1];
    const failed = trial.status === "failed" || trial.status === "diverged";
    if (failed) label(body, "×", { x: x(end[0]), y: y(end[1]) + 4, "text-anchor": "middle", class: "cross" });
    else if (isOpen(trial) || points.length === 1) shape("circle", { cx: x(end[0]), cy: y(end[1]), r: trial.rank < 5 ? 3.2 : 2.2, fill: trial.rank < 5 ? color : "var(--mute)" }, body);
    if (trial.rank < 5 && y(end[1]) < bottom) names.push({ x: x(end[0]), y: y(end[1]), n: trial.n, color });
  }
  names.sort((a, b) => a.y - b.y);
  let above = -99;
  for (const name of names) {
    name.at = above = Math.max(name.y, above + 13);
    label(drawing, name.n, { class: "lab", x: right + 12, y: name.at + 4, fill: name.color, "data-n": name.n });
    if (name.x < right - 6) {
      shape("path", { d: `M${name.x + 6},${name.y}L${right + 4},${name.y}L${right + 9},${name.at}`, fill: "none", stroke: name.color, "stroke-opacity": 0.28, "stroke-dasharray": "2 3" }, drawing);
    }
  }
}

function pointAtCurve(event) {
  const drawing = event.currentTarget;
  const box = drawing.getBoundingClientRect();
  const [mx, my] = [event.clientX - box.left, event.clientY - box.top];
  const { x, y } = chart.drawn ?? {};
  if (!x) return;
  let nearest = null;
  for (const { trial, points } of chart.lines) {
    for (const point of points) {
      const distance = Math.hypot(x(point[0]) - mx, 1.2 * (y(point[1]) - my));
      if (distance < (nearest?.distance ?? 60)) nearest = { distance, trial, point };
    }
  }
  if (!nearest) return leaveCurves();
  hover(nearest.trial.n);
  showTip(nearest.trial, nearest.point, x(nearest.point[0]), y(nearest.point[1]));
}

function showTip(trial, point, x, y) {
  const tip = $("curves").querySelector(".tip");
  const row = (name, value) => node("tr", {}, node("td", {}, plain(name, 30)), node("td", {}, value));
  const origin = lineage(trial);
  tip.replaceChildren(
    node("b", {}, `trial ${trial.n}`), origin ? node("span", { class: "dim" }, ` ${origin}`) : "",
    node("table", {}, row(chart.axis, chart.axis === "epoch" ? point[0] : clock(point[0])), row(heading(chart.metric), metric(point[1])),
      ...run.info.settings.slice(0, 10).map((name) => row(name, short(trial.config[name])))));
  const box = $("curves");
  tip.style.opacity = 1;
  tip.style.transform = `translate(${Math.max(4, Math.min(x + 18, box.clientWidth - tip.offsetWidth - 8))}px,${Math.max(4, Math.min(y - 30, box.clientHeight - tip.offsetHeight - 4))}px)`;
}

function leaveCurves() {
  hover(null);
  $("curves").querySelector(".tip").style.opacity = 0;
}
