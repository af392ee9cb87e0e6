// The first lines: state, best trial, share done, forecast, workers.

const STATES = [
  ["running", "var(--good)"], ["waiting", "var(--faint)"], ["paused", "var(--warn)"],
  ["finished", "var(--c1)"], ["stopped", "var(--mute)"], ["diverged", "var(--warn)"], ["failed", "var(--bad)"],
];

function settingsLine(trial) {
  const changed = new Map(changesOf(trial).map((change) => [change.name, change]));
  const names = run.info.settings.filter((name) => name in trial.config);
  return names.flatMap((name, i) => {
    const change = changed.get(name);
    const text = change ? `${name} ${short(change.from)} → ${short(change.to)}` : `${name} ${short(trial.config[name])}`;
    return [i ? " · " : null, change ? node("span", { class: "chg" }, text) : text];
  });
}

function drawSummary() {
  const { info } = run;
  document.title = `${plain(info.name, 60)} · Cerebro`;
  setText($("name"), info.name);
  $("name").title = plain(info.path);
  $("state").className = `pill ${info.status}`;
  setText($("state").lastElementChild, info.status);
  const problem = info.error || (info.status === "interrupted" ? "The process that trained this run is gone; resume continues it." : "");
  $("problem").hidden = !problem;
  setText($("problem"), problem);
  const share = Math.round(100 * (info.share ?? 0));
  $("bar").firstElementChild.style.width = `${share}%`;
  $("bar").setAttribute("aria-valuenow", share);
  drawBest();
  drawCounts();
  drawTime();
}

function drawBest() {
  const best = run.ranked[0];
  const { info } = run;
  if (!best) return;
  setText($("bestCap"), `best ${heading(info.metric)}${info.live ? " so far" : ""}`);
  const wanted = JSON.stringify([best.n, best.value, best.parent, info.settings]);
  if ($("best").dataset.made === wanted) return;
  $("best").dataset.made = wanted;
  const link = node("button", { class: "link", "data-n": best.n, on: { click: () => showTrial(best.n) } }, `trial ${best.n}`);
  $("best").replaceChildren(metric(best.value), link);
  const origin = best.parent === null ? null : `clone of ${best.parent}${best.after === null ? "" : ` after epoch ${best.after}`}: `;
  $("bestSub").replaceChildren(...[origin, ...settingsLine(best)].filter((part) => part !== null));
}

function drawCounts() {
  const { info } = run;
  setText($("count"), info.trials.toLocaleString("en"));
  setText($("share"), info.share === null ? "" : `${Math.floor(100 * info.share)} % of the epochs done`);
  const present = STATES.filter(([state]) => info.counts[state]);
  const wanted = JSON.stringify(info.counts);
  if ($("seg").dataset.made === wanted) return;
  $("seg").dataset.made = wanted;
  $("seg").replaceChildren(...present.map(([state, color]) => {
    const part = node("i");
    part.style.flexGrow = info.counts[state];
    part.style.background = color;
    return part;
  }));
  $("keys").replaceChildren(...present.map(([state, color]) => {
    const key = node("span", {}, node("b", {}, info.counts[state].toLocaleString("en")), ` ${state}`);
    key.style.setProperty("--k", color);
    return key;
  }));
}

function drawTime() {
  const { info } = run;
  setText($("time"), clock(runClock()));
  const begun = info.started ? `begun ${new Date(1000 * info.started).toLocaleString([], { dateStyle: "medium", timeStyle: "short" })}` : "";
  const held = info.adaptive ? heldTrials() : []; // in a search by rounds the others wait for them
  const waits = held.length ? `trial ${held.join(", ")} is paused by you: others wait` : info.status === "paused" ? "paused by you" : isNumber(info.left) ? `about ${clock(info.left)} left` : begun;
  setText($("left"), info.live ? waits : begun);
  setText($("workers"), info.workers || "–");
  setText($("busy"), !info.workers || !info.live ? "" : `${Math.round(100 * busyShare(5))} % busy`);
  setText($("hops"), `${counted(info.hops, "hop")}, ${counted(info.units, "unit")}`);
}

// The share of the last seconds that workers spent in units.
function busyShare(seconds) {
  const end = run.units.reduce((last, unit) => Math.max(last, unit[4]), 0);
  const begin = Math.max(0, end - seconds);
  let busy = 0;
  for (const unit of run.units) busy += Math.max(0, Math.min(unit[4], end) - Math.max(unit[3], begin));
  return Math.min(1, busy / Math.max(1e-9, (end - begin) * run.info.workers));
}

// The run's clock goes on between two answers.
const received = { at: 0 };
const runClock = () => run.info.now + (run.info.live && !lostSince ? (performance.now() - received.at) / 1000 : 0);
