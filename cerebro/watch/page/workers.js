// The timeline: which worker trained which trial, in the last seconds or, at the end, in all of them.

const ROW = 30;
const MOST_BARS = 600;

function drawWorkers() {
  const box = $("gantt");
  if ($("workersCard").hidden) return;
  const rows = [...new Set(run.units.map((unit) => unit[2]))].sort((a, b) => a - b);
  const width = Math.max(60, box.clientWidth - 28);
  const now = run.info.live ? runClock() : Math.max(0, ...run.units.map((unit) => unit[4]));
  const begin = run.info.live ? Math.max(0, now - spanOf()) : Math.min(now, ...run.units.map((unit) => unit[3]));
  setText($("span"), !rows.length ? "" : run.info.live ? `last ${Math.round(now - begin)} seconds` : `${clock(begin)} to ${clock(now)}`);
  const height = rows.length * ROW + 20;
  let drawing = box.querySelector("svg");
  if (!drawing) {
    drawing = shape("svg", { role: "img" });
    box.append(drawing);
  }
  drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
  drawing.setAttribute("aria-label", `units of ${counted(rows.length, "worker")} over time`);
  drawing.style.height = `${height}px`;
  drawing.replaceChildren();
  if (!rows.length) return label(drawing, "no unit has finished yet", { x: 0, y: 14 });
  const x = (time) => 20 + ((time - begin) / Math.max(1e-6, now - begin)) * (width - 20);
  rows.forEach((worker, i) => drawWorker(drawing, worker, i * ROW + 4, x, begin, now, width));
  label(drawing, clock(begin), { x: 20, y: height - 3 });
  label(drawing, (run.info.live ? "now " : "") + clock(now), { x: width, y: height - 3, "text-anchor": "end" });
  showHovered();
}

// The seconds that the timeline of a live run shows: a dozen units, 8 seconds at least.
function spanOf() {
  const last = run.units.slice(-60).map((unit) => unit[4] - unit[3]).sort((a, b) => a - b);
  const middle = last[Math.floor(last.length / 2)] || 0;
  return Math.min(3600, Math.max(8, 12 * middle));
}

function drawWorker(drawing, worker, y, x, begin, now, width) {
  label(drawing, worker, { x: 0, y: y + 16 });
  shape("rect", { x: 20, y, width: width - 20, height: 24, rx: 5, fill: "var(--band)" }, drawing);
  const least = (2 * (now - begin)) / MOST_BARS; // bars closer than this are joined
  const bars = [];
  for (const [trial, , by, from, to] of run.units) {
    if (by !== worker || to <= begin || from >= now) continue;
    const last = bars[bars.length - 1];
    if (last && last.trial === trial && from - last.to < Math.max(0.12, least)) last.to = to;
    else bars.push({ trial, from: Math.max(from, begin), to });
  }
  for (const bar of bars) {
    const [left, wide] = [x(bar.from), Math.max(1.5, x(Math.min(bar.to, now)) - x(bar.from) - 1.5)];
    const trial = run.trials.get(bar.trial);
    const hot = trial !== undefined && trial.rank < 5;
    shape("rect", { x: left, y, width: wide, height: 24, rx: 4, class: hot ? "bar-hot" : "bar-cool", fill: hot ? colorOf(trial) : "var(--faint)", "data-n": bar.trial }, drawing);
    if (wide > 9 + 7 * String(bar.trial).length) label(drawing, bar.trial, { x: left + wide / 2, y: y + 16, "text-anchor": "middle", class: hot ? "lab bar-name" : "lab", "pointer-events": "none" });
  }
}
