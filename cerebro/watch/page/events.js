// What happened: hands on the run, leaders, ends, failures, warnings; the newest first.

const SHOWN_EVENTS = 40;

function eventText(kind, trial, text) {
  const of = trial === null || text.includes(`trial ${trial}`) ? "" : ` of trial ${trial}`;
  return kind === "command" ? text : `${kind}${of}: ${text}`;
}

function actionText(action) {
  const refused = action.outcome.startsWith("refused");
  const trial = action.trial === null ? "the run" : `trial ${action.trial}`;
  const changes = Object.entries(action.changes);
  const parent = run.trials.get(action.trial);
  const change = ([name, value]) => node("span", { class: "chg" },
    action.verb === "clone" && parent ? `${name} ${short(parent.config[name])} → ${short(value)}` : `${name} ${short(value)}`);
  const listed = changes.length && action.verb !== "add" ? [": ", ...changes.flatMap((entry, i) => [i ? ", " : null, change(entry)])] : [];
  if (refused) return [node("span", { class: "err" }, `${action.verb} ${trial} `), action.outcome];
  if (action.verb === "clone") return ["clone of ", node("b", {}, String(action.trial)), " is trial ", node("b", {}, String(action.child)), ...listed];
  if (action.verb === "add") return ["added trial ", node("b", {}, String(action.child))];
  if (action.verb === "extend") return [`${trial} trains until epoch ${action.epochs}`];
  return [`${action.verb} ${trial}`];
}

function listHappenings() {
  const { info } = run;
  const found = [];
  const you = () => node("span", { class: "you" }, "you");
  for (const action of run.actions) found.push([action.time, `a${action.request}`, () => [you(), ...actionText(action)]]);
  for (const [i, [time, kind, trial, text]] of run.events.entries()) {
    if (kind === "command" && run.actions.length) continue; // the table of actions says it better
    found.push([time, `e${i}`, () => [kind === "command" ? you() : null, eventText(kind, trial, text)], kind]);
  }
  for (const [time, trial, value] of run.leads) {
    found.push([time, `l${trial} ${time} ${value}`, () => ["trial ", node("b", {}, String(trial)), " leads with ", node("b", {}, metric(value))]]);
  }
  for (const trial of run.trials.values()) {
    const last = trial.ended ?? trial.times[trial.times.length - 1] ?? trial.began ?? 0;
    if (trial.status === "finished") {
      found.push([last, `f${trial.n}`, () => ["trial ", node("b", {}, String(trial.n)), " finished, best ", node("b", {}, metric(trial.value))]]);
    } else if (trial.status === "failed" || trial.status === "diverged") {
      found.push([last, `x${trial.n}`, () => [node("span", { class: "err" }, `trial ${trial.n} ${trial.status}: `), firstLine(trial.error)]]);
    }
  }
  if (!info.live && info.status !== "interrupted") found.push([Math.max(info.now, 0) + 0.001, "end", () => [`the run is ${info.status}`]]);
  return found.sort((a, b) => b[0] - a[0]).slice(0, SHOWN_EVENTS);
}

const firstLine = (text) => plain(String(text || "no cause was recorded").split("\n")[0], 160);

function drawEvents() {
  const list = $("feed");
  const before = new Map([...list.children].map((item) => [item.dataset.key, item]));
  const isFirst = before.size === 0;
  const items = listHappenings().map(([time, key, make]) => {
    const known = before.get(key);
    if (known) return known;
    return node("li", { "data-key": key, class: isFirst ? null : "new" }, node("time", {}, clock(time)), node("span", {}, ...make().filter((part) => part !== null)));
  });
  if (!items.length) items.push(node("li", { "data-key": "" }, node("time"), node("span", { class: "dim" }, "nothing yet")));
  const same = items.length === list.children.length && items.every((item, i) => item === list.children[i]);
  if (!same) list.replaceChildren(...items);
}
