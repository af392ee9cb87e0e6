// What the settings do: parallel coordinates, the share of the variance that each explains, and the
// metric over each of them.

// An axis for values: numbers, linear or by logarithm; anything else, or a few numbers, by category.
function axisOf(values) {
  const distinct = [...new Set(values)];
  const numeric = distinct.every(isNumber);
  if (!numeric || (distinct.length <= 6 && distinct.every(Number.isInteger))) {
    const sorted = numeric ? distinct.sort((a, b) => a - b) : distinct.sort((a, b) => compareKeys(String(a), String(b)));
    const share = (value) => (sorted.length < 2 ? 0.5 : sorted.indexOf(value) / (sorted.length - 1));
    return { share, marks: sorted.length <= 8 ? sorted : [sorted[0], sorted[sorted.length - 1]], byName: true };
  }
  const [low, high] = [Math.min(...distinct), Math.max(...distinct)];
  if (low > 0 && high / low > 50) {
    return { share: (value) => Math.log(value / low) / Math.log(high / low), marks: [low, Math.sqrt(low * high), high] };
  }
  return { share: (value) => (high > low ? (value - low) / (high - low) : 0.5), marks: [low, (low + high) / 2, high] };
}

const MOST_AXES = 12;

function drawParallel() {
  const box = $("parallel");
  if ($("parallelCard").hidden) return;
  setText($("parallelTitle"), `Settings and ${heading(run.info.metric)}`);
  const [width, height] = [box.clientWidth - 16, box.clientHeight - 10];
  let drawing = box.querySelector("svg");
  if (!drawing) {
    drawing = shape("svg", { role: "img", "aria-label": "each trial as a line across its settings and its metric" });
    box.append(drawing);
    hoverOver(drawing);
  }
  drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
  drawing.replaceChildren();
  const shown = run.ranked.slice(0, MOST_CURVES);
  const names = run.info.settings.slice(0, MOST_AXES - 1);
  if (shown.length < 2) return label(drawing, "two trials with a finished epoch are needed", { x: 12, y: 30 });
  const [left, right, top, bottom] = [26, width - 64, 30, height - 14];
  const axes = [...names, null].map((name, i, all) => {
    const of = (trial) => (name === null ? trial.value : trial.config[name] ?? null);
    const axis = axisOf(shown.map(of));
    return { name: name ?? heading(run.info.metric), of, x: left + (i * (right - left)) / Math.max(1, all.length - 1), ...axis, write: name === null ? metric : short };
  });
  const y = (axis, trial) => bottom - axis.share(axis.of(trial)) * (bottom - top);
  const body = shape("g", {}, drawing);
  for (const trial of shown.slice().reverse()) {
    let path = "";
    axes.forEach((axis, i) => {
      const [x, at] = [axis.x.toFixed(1), y(axis, trial).toFixed(1)];
      const middle = i ? ((axes[i - 1].x + axis.x) / 2).toFixed(1) : 0;
      path += i ? `C${middle},${y(axes[i - 1], trial).toFixed(1)} ${middle},${at} ${x},${at}` : `M${x},${at}`;
    });
    const share = 1 - trial.rank / Math.max(1, shown.length - 1);
    const line = shape("path", { d: path, class: trial.rank === 0 ? "ln best" : "ln", "data-n": trial.n }, body);
    line.style.stroke = trial.rank === 0 ? "var(--accent)" : `color-mix(in srgb, var(--c1) ${Math.round(100 * share)}%, var(--faint))`;
  }
  drawAxesOf(drawing, axes, top, bottom, (right - left) / Math.max(1, axes.length - 1));
  showHovered();
}

function drawAxesOf(drawing, axes, top, bottom, room) {
  const most = Math.max(4, Math.floor(room / 6.6));
  axes.forEach((axis) => {
    shape("line", { x1: axis.x, x2: axis.x, y1: top, y2: bottom, stroke: "var(--faint)" }, drawing);
    const name = axis.name.length > most ? `${axis.name.slice(0, most - 1)}…` : axis.name;
    const title = label(drawing, name, { x: axis.x, y: 14, "text-anchor": "middle", class: "axis" });
    shape("title", {}, title).textContent = plain(axis.name, 100);
    for (const value of axis.marks) {
      const text = plain(axis.write(value), 12);
      label(drawing, text, { x: axis.x + 7, y: bottom - axis.share(value) * (bottom - top) + 4, class: "mark" });
    }
  });
}

function drawImportance() {
  const box = $("importance");
  const found = run.importance;
  const trials = run.info.ranked;
  const enough = 10 * run.info.settings.length;
  const wanted = JSON.stringify([found, trials]);
  if (box.dataset.made === wanted) return;
  box.dataset.made = wanted;
  box.replaceChildren(...found.slice(0, 12).map(({ name, shares: [share, low, high, chance] }) => {
    const [bar, mark, range] = [node("b"), node("s"), node("em")];
    bar.style.width = `${100 * share}%`;
    if (share < 1.4 * chance) bar.classList.add("weak");
    mark.style.left = `${100 * chance}%`;
    range.style.left = `${100 * low}%`;
    range.style.width = `${100 * (high - low)}%`;
    const percent = (part) => Math.round(100 * part);
    return node("div", { title: `${percent(low)} to ${percent(high)} % (90 %)` }, node("span", { class: "what" }, plain(name, 40)), node("u", {}, bar, range, mark), node("span", { class: "dim share" }, `${percent(share)} %`));
  }));
  setText($("importanceNote"), found.length
    ? `Share of the variance of ${heading(run.info.metric)} that a setting alone explains, with its 90 % range, over ${counted(trials, "trial")}; the mark is what chance gives.` + (trials < enough ? ` ${enough} trials would tell reliably.` : "")
    : "It takes a few trials with a finished epoch that differ in a setting.");
}

const MOST_SLICES = 12;

function drawSlices() {
  const box = $("slices");
  if ($("sliceCard").hidden) return;
  setText($("sliceTitle"), `${heading(run.info.metric)} by setting`);
  const shown = run.ranked.slice(0, MOST_CURVES);
  const names = run.info.settings.slice(0, MOST_SLICES);
  const wanted = JSON.stringify([names, box.clientWidth, shown.map((trial) => [trial.n, trial.value, trial.status])]);
  if (box.dataset.made === wanted || shown.length < 2) return;
  box.dataset.made = wanted;
  const [low, high] = rangeOf(shown.map((trial) => trial.value), run.info.mode === "max");
  const range = [low - 0.05 * (high - low), high + 0.05 * (high - low)];
  box.replaceChildren(...names.map((name) => drawSlice(name, shown.filter((trial) => name in trial.config), range)));
  showHovered();
}

function drawSlice(name, shown, [low, high]) {
  const [width, height] = [200, 140];
  const drawing = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${plain(heading(run.info.metric))} by ${plain(name, 60)}` });
  const [left, right, top, bottom] = [46, width - 12, 10, height - 34];
  const axis = axisOf(shown.map((trial) => trial.config[name]));
  const x = (value) => left + 8 + axis.share(value) * (right - left - 16);
  const y = (value) => bottom - ((Math.min(high, Math.max(low, value)) - low) / (high - low || 1)) * (bottom - top);
  for (const value of ticks(low, high, 3)) {
    shape("line", { x1: left, x2: right, y1: y(value), y2: y(value), stroke: "var(--grid)" }, drawing);
    label(drawing, short(value), { x: left - 6, y: y(value) + 4, "text-anchor": "end" });
  }
  const marks = axis.byName && axis.marks.length <= 5 ? axis.marks : [axis.marks[0], axis.marks[axis.marks.length - 1]];
  for (const value of marks) label(drawing, plain(short(value), 9), { x: x(value), y: bottom + 14, "text-anchor": axis.share(value) > 0.9 && !axis.byName ? "end" : "middle" });
  label(drawing, name, { x: (left + right) / 2, y: height - 4, "text-anchor": "middle", class: "axis" });
  for (const trial of shown.slice().reverse()) {
    const spread = axis.byName ? 8 * (2 * ((trial.n * 0.618034) % 1) - 1) : 0;
    const color = trial.rank === 0 ? "var(--accent)" : "var(--c1)";
    const hollow = trial.status === "stopped";
    const dot = shape("circle", { cx: x(trial.config[name]) + spread, cy: y(trial.value), r: trial.rank === 0 ? 5 : 3.2, class: "dot", "data-n": trial.n, stroke: color, fill: hollow ? "none" : color }, drawing);
    if (trial.status === "failed" || trial.status === "diverged") dot.setAttribute("fill", "var(--bad)");
  }
  hoverOver(drawing);
  return drawing;
}
