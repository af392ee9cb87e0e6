// What the page knows of the run: it takes answers in, and ranks and colors the trials.

const run = {
  info: null, // what is true of the run as a whole
  trials: new Map(), // by number: the rows of the table, with their curves
  ranked: [], // the trials that have the metric, best first
  units: [], // [trial, epoch, worker, begin, end, validates]
  events: [], // [time, kind, trial, text]
  actions: [],
  leads: [], // [time, trial, value]: when a trial took the lead
  importance: [],
  proofs: {}, // by trial: {state, text}
  writable: false,
  cursor: "",
};

const MOST_UNITS = 4000;
const MOST_EVENTS = 500;
const OPEN = ["waiting", "running", "paused"];
const isOpen = (trial) => OPEN.includes(trial.status) && run.info.live;

function forgetRun() {
  Object.assign(run, { info: null, ranked: [], units: [], events: [], actions: [], leads: [], importance: [], proofs: {}, cursor: "" });
  run.trials.clear();
}

// Merge an answer of the server, or the data of a report.
function takeAnswer(answer) {
  run.proofs = answer.proofs || run.proofs;
  run.writable = answer.writable ?? run.writable;
  if (answer.same) {
    run.info.now = answer.now;
    return;
  }
  if (answer.full) forgetRun();
  run.info = answer.run;
  run.cursor = answer.cursor;
  run.importance = answer.importance;
  const points = [];
  for (const row of answer.trials) takeTrial(row, points);
  const shown = new Set(answer.shown);
  for (const number of run.trials.keys()) if (!shown.has(number)) run.trials.delete(number);
  run.units = [...run.units, ...answer.units].slice(-MOST_UNITS);
  run.events = [...run.events, ...answer.events].slice(-MOST_EVENTS);
  run.actions = [...run.actions, ...answer.actions].slice(-MOST_EVENTS);
  rankTrials();
  findLeads(points);
}

function takeTrial(row, points) {
  const before = run.trials.get(row.n);
  const first = row.after || 0;
  const begin = row.from - first;
  const trial = { ...row, first, curves: {}, times: [] };
  trial.times = [...(before?.times || []).slice(0, begin), ...row.times];
  for (const [name, values] of Object.entries(row.curves)) {
    trial.curves[name] = [...(before?.curves[name] || []).slice(0, begin), ...values];
  }
  run.trials.set(row.n, trial);
  (row.curves[run.info.metric] || []).forEach((value, i) => {
    if (isNumber(value)) points.push([row.times[i] ?? run.info.now, row.n, value]);
  });
}

const better = (a, b) => (run.info.mode === "min" ? a < b : a > b);

function rankTrials() {
  const valued = [...run.trials.values()].filter((trial) => isNumber(trial.value));
  valued.sort((a, b) => (better(a.value, b.value) ? -1 : better(b.value, a.value) ? 1 : a.n - b.n));
  for (const trial of run.trials.values()) trial.rank = Infinity;
  valued.forEach((trial, i) => (trial.rank = i));
  run.ranked = valued;
  colorTrials();
}

// When a trial took the lead; `points` are those that came with an answer.
function findLeads(points) {
  points.sort((a, b) => a[0] - b[0]);
  for (const point of points) {
    const last = run.leads[run.leads.length - 1];
    if (last && !better(point[2], last[2])) continue;
    if (last && last[1] === point[1]) run.leads[run.leads.length - 1] = [last[0], point[1], point[2]];
    else run.leads.push(point);
  }
  run.leads = run.leads.slice(-MOST_EVENTS);
}

// The best trial has the accent; the four after it keep their color as long as they stay there.
const slots = [null, null, null, null];

function colorTrials() {
  const top = run.ranked.slice(1, 5).map((trial) => trial.n);
  for (let i = 0; i < 4; i++) if (!top.includes(slots[i])) slots[i] = null;
  for (const number of top) if (!slots.includes(number)) slots[slots.indexOf(null)] = number;
}

function colorOf(trial) {
  if (trial.rank === 0) return "var(--accent)";
  return trial.rank < 5 ? `var(--c${1 + slots.indexOf(trial.n)})` : "var(--faint)";
}

// The trial's points for the chart: [epochs done or time, value]; a clone begins on its parent's.
function seriesOf(trial, name, axis) {
  const at = (of, i) => (axis === "epoch" ? of.first + i + 1 : of.times[i]);
  const points = (trial.curves[name] || []).map((value, i) => [at(trial, i), value]);
  const parent = trial.after === null ? undefined : run.trials.get(trial.parent);
  const place = parent === undefined ? -1 : trial.after - 1 - parent.first;
  const value = parent?.curves[name]?.[place];
  const found = points.filter(([x, y]) => isNumber(x) && isNumber(y));
  if (!isNumber(value)) return { points: found, ring: null };
  const x = axis === "epoch" ? trial.after : Math.min(trial.began ?? Infinity, found[0]?.[0] ?? Infinity, run.info.now);
  return { points: [[x, value], ...found], ring: [x, value] };
}

// The settings in which a clone differs from its parent.
function changesOf(trial) {
  const parent = trial.parent === null ? undefined : run.trials.get(trial.parent);
  if (parent === undefined) return [];
  return Object.keys(trial.config).filter((name) => trial.config[name] !== parent.config[name])
    .map((name) => ({ name, from: parent.config[name], to: trial.config[name] }));
}

// The trials that you have paused and not continued.
function heldTrials() {
  const last = new Map();
  for (const { trial, verb, outcome } of run.actions) {
    if (trial !== null && (verb === "pause" || verb === "unpause") && outcome.startsWith("done")) last.set(trial, verb);
  }
  return [...last.keys()].filter((number) => last.get(number) === "pause" && OPEN.includes(run.trials.get(number)?.status));
}

function lineage(trial) {
  if (trial.parent !== null) return trial.after === null ? `↳ ${trial.parent}, cold` : `↳ ${trial.parent} after ${trial.after}`;
  return trial.origin === "user" ? "added" : "";
}
