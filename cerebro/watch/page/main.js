// Where the data comes from, polling, and what the keys and the parts at the top do.

const SECONDS = 1; // between two polls
const params = new URLSearchParams(location.hash.slice(1));
let chosenRun = /^\d+$/.test(params.get("run") ?? "") ? +params.get("run") : null;
let pageNumber = 0;
let lostSince = null; // when the server was first not reached
let failures = 0;
let timer = null;

// A report has its data inside; it is all there is.
const inside = $("data");

const served = {
  isLive: true,
  readOnly: true,
  async ask(path, options = {}) {
    const headers = { Authorization: `Bearer ${params.get("token") ?? ""}`, ...options.headers };
    const answer = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
    const text = await answer.text();
    let told = {};
    try { told = text ? JSON.parse(text) : {}; } catch { /* not an answer of this server */ }
    return { ok: answer.ok, status: answer.status, told };
  },
  async read(path) {
    try {
      const { ok, status, told } = await this.ask(path);
      return ok ? told : { problem: told.error ?? `the server answers ${status}` };
    } catch {
      return { problem: "the server cannot be reached" };
    }
  },
  trial(number) { return this.read(`/api/run/${chosenRun}/trial/${number}`); },
  about() { return this.read(`/api/run/${chosenRun}/about`); },
  async act(request) {
    try {
      const headers = { "Content-Type": "application/json" };
      const { ok, status, told } = await this.ask(`/api/run/${chosenRun}/action`, { method: "POST", headers, body: JSON.stringify(request) });
      return ok ? told : { error: told.error ?? `the server answers ${status}` };
    } catch {
      return { error: "the server cannot be reached" };
    }
  },
};

const report = {
  isLive: false,
  readOnly: true,
  async trial(number) {
    const failure = reported.about.failures.find((one) => one.number === number);
    const error = run.trials.get(number)?.error;
    return { error, traceback: failure?.traceback, log: failure?.log };
  },
  async about() { return reported.about; },
  async act() { return { error: "this is a report: it only shows" }; },
};

const reported = inside ? JSON.parse(inside.textContent) : null;
const source = reported ? report : served;

function drawAll() {
  if (!run.info) return;
  drawSummary();
  drawActions();
  drawTrials();
  drawCurves();
  drawWorkers();
  drawEvents();
  drawParallel();
  drawImportance();
  drawSlices();
}

async function poll(now) {
  clearTimeout(timer);
  if (poll.busy) {
    poll.again = poll.again || now;
    return;
  }
  poll.busy = true;
  try {
    if (chosenRun === null) await chooseFirstRun();
    if (chosenRun !== null) await pollRun();
    failures = 0;
  } catch (error) {
    failures += 1;
    tellLost(error);
  }
  poll.busy = false;
  const again = poll.again;
  poll.again = false;
  if (again) return poll();
  // A hidden tab asks for nothing; it catches up when it is looked at again.
  if (!document.hidden) timer = setTimeout(poll, 1000 * SECONDS * Math.min(30, failures ? 2 ** failures : run.info?.live === false ? 3 : 1));
}

async function pollRun() {
  const asked = { run: chosenRun, page: pageNumber, pins: [...pins].slice(-50).join(",") };
  const key = JSON.stringify(asked);
  const after = pollRun.key === key ? run.cursor : "";
  const { ok, status, told } = await served.ask(`/api/run/${asked.run}?after=${encodeURIComponent(after)}&page=${asked.page}&pins=${asked.pins}`);
  if (status === 401) throw new Error("the address lacks the token: open the one that the command printed");
  if (!ok) throw new Error(told.error ?? `the server answers ${status}`);
  if (asked.run !== chosenRun) return;
  pollRun.key = key;
  lostSince = null;
  received.at = performance.now();
  takeAnswer(told);
  setText($("ago"), run.info.live ? "live" : "");
  $("ago").classList.remove("lost");
  drawAll();
}

function tellLost(error) {
  if (lostSince === null) lostSince = new Date();
  const isNetwork = error instanceof TypeError;
  setText($("ago"), isNetwork ? `not connected since ${lostSince.toTimeString().slice(0, 5)}` : "no answer");
  $("ago").classList.add("lost");
  if (!isNetwork) {
    $("problem").hidden = false;
    setText($("problem"), error.message);
  }
}

async function chooseFirstRun() {
  const runs = await listRuns();
  const newest = runs.slice().sort((a, b) => (b.started ?? 0) - (a.started ?? 0));
  const first = newest.find((one) => one.status === "running") ?? newest[0];
  if (first) chooseRun(first.id);
  else setText($("bestCap"), "there is no run here yet: it appears when it begins");
}

async function listRuns() {
  const { ok, status, told } = await served.ask("/api/runs");
  if (status === 401) throw new Error("the address lacks the token: open the one that the command printed");
  if (!ok) throw new Error(told.error ?? `the server answers ${status}`);
  served.readOnly = told.read_only;
  const pick = $("pick");
  pick.hidden = told.runs.length < 2;
  $("name").hidden = !pick.hidden;
  const sorted = told.runs.slice().sort((a, b) => (b.started ?? 0) - (a.started ?? 0));
  const wanted = JSON.stringify(sorted.map((one) => [one.id, one.name, one.status]));
  if (pick.dataset.made !== wanted) {
    pick.dataset.made = wanted;
    pick.replaceChildren(...sorted.map((one) => node("option", { value: one.id }, `${plain(one.name, 60)} · ${one.status}`)));
    if (chosenRun !== null) pick.value = chosenRun;
  }
  return told.runs;
}

function chooseRun(id) {
  chosenRun = id;
  pageNumber = 0;
  pins.clear();
  forgetRun();
  chart.metric = null;
  params.set("run", id);
  history.replaceState(null, "", `#${params}`);
  $("pick").value = id;
  $("about").replaceChildren($("showAbout"));
}

$("pick").addEventListener("change", (event) => { chooseRun(+event.target.value); poll(true); });
$("pick").addEventListener("focus", () => { listRuns().catch(() => {}); });

function drawPager() {
  const many = run.info.trials > run.trials.size || pageNumber > 0;
  $("pager").hidden = !many || !source.isLive;
  const last = Math.max(0, Math.ceil(run.info.trials / 200) - 1);
  setText($("pageText"), `${run.trials.size.toLocaleString("en")} of ${run.info.trials.toLocaleString("en")} trials, page ${pageNumber + 1} of ${last + 1}, best first`);
  $("before").disabled = pageNumber === 0;
  $("next").disabled = pageNumber >= last;
}

for (const [id, step] of [["before", -1], ["next", 1]]) $(id).addEventListener("click", () => { pageNumber += step; poll(true); });

const THEMES = ["auto", "light", "dark"];

function setTheme(theme) {
  const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  const text = `colors: ${theme === "auto" ? "as the system" : theme}; change to ${next}`;
  $("theme").title = text;
  $("theme").setAttribute("aria-label", text);
  $("theme").onclick = () => {
    try { localStorage.setItem("cerebro-theme", next); } catch { /* it lasts until the page is closed */ }
    setTheme(next);
  };
}

$("theme").append(icon("theme"));
let kept = "auto";
try { kept = localStorage.getItem("cerebro-theme") ?? "auto"; } catch { /* not allowed to keep it */ }
setTheme(THEMES.includes(kept) ? kept : "auto");

document.addEventListener("keydown", (event) => {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) || $("dialog").open;
  if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) { event.preventDefault(); $("search").focus(); }
  if (event.key === "Escape" && event.target === $("search")) { $("search").value = table.text = ""; drawTrials(true); }
});

let resizing = null;
addEventListener("resize", () => { cancelAnimationFrame(resizing); resizing = requestAnimationFrame(drawAll); });
document.addEventListener("visibilitychange", () => { if (!document.hidden && source.isLive) poll(true); });

if (reported) {
  takeAnswer(reported.answer);
  chart.metric = run.info.metrics.includes(reported.metric) ? reported.metric : run.info.metrics.find((name) => name === `val_${reported.metric}`) ?? run.info.metrics[0] ?? null;
  const cards = { curves: "curvesCard", gantt: "workersCard", parallel: "parallelCard", importance: "importanceCard", slice: "sliceCard" };
  for (const [kind, id] of Object.entries(cards)) $(id).hidden = !reported.plots.includes(kind);
  drawAll();
  drawAbout(reported.about);
} else {
  poll();
  setInterval(() => { if (run.info?.live && !document.hidden && !lostSince) { drawWorkers(); drawTime(); } }, 250);
}
