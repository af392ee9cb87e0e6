// Hands on the run: what each button asks the server for, and the dialogs that say beforehand what
// changes, what that means, and the command that does the same.

const canAct = () => source.isLive && !source.readOnly && run.writable && run.info.live;

async function act(request, done) {
  const told = await source.act(request);
  toast(told.error ? `refused: ${told.error}` : told.text);
  if (!told.error) {
    done?.();
    poll(true);
  }
  return told;
}

function actOn(number, verb) {
  if (verb === "clone") showClone(number);
  else act({ verb, trial: number });
}

const command = (verb, ...words) => ["python", "-m", "cerebro", verb, quoted(run.info.path), ...words].join(" ");

// What a typed value is: as JSON where it is that, else text.
function readValue(text, before) {
  const typed = text.trim();
  if (typed === "") return { problem: "is empty" };
  try {
    const value = JSON.parse(typed.replace(/^(-?)\./, "$10.").replace(/^True$/, "true").replace(/^False$/, "false").replace(/^None$/, "null"));
    if (typeof value !== "object" || value === null) {
      if (typeof before === "string" && typeof value !== "string") return { value: typed };
      if (isNumber(before) && !isNumber(value)) return { problem: `${typed} is not a number` };
      return { value };
    }
  } catch { /* not JSON */ }
  return isNumber(before) ? { problem: `${typed} is not a number` } : { value: typed };
}

// What a changed setting means; the search has the last word when it builds the model.
function effectOf(name) {
  if (name === "batch_size") return "batches: the schedule keeps its place";
  if (/^(lr|learning_rate|weight_decay|decay|momentum|betas?|eps|nesterov)/.test(name)) return "optimizer: from the first step";
  if (/dropout|drop_|noise|smooth|temperature|weight/.test(name)) return "model and loss: from the first step";
  if (/width|hidden|depth|layers|units|size|channels|heads|dim/.test(name)) return "shape: needs a cold start";
  return "as build uses it; another shape needs a cold start";
}

function footer(text, confirm) {
  return node("div", { class: "df" }, node("span", { class: "dim" }, text),
    node("button", { type: "button", class: "btn", on: { click: () => $("dialog").close() } }, "Cancel"), confirm);
}

function settingRows(config, effects) {
  const space = run.info.space;
  const rows = Object.entries(config).map(([name, before]) => {
    const input = node("input", { name, value: before === undefined ? "" : exact(before), "aria-label": name, autocomplete: "off", spellcheck: "false", maxlength: 500 });
    const note = effects ? effectOf(name) : space[name] ?? "";
    return { name, before, input, line: node("div", { class: "fr" }, node("span", { title: name }, plain(name, 40)), node("span", { class: "from" }, before === undefined ? "" : short(before)), node("div", {}, input, node("span", { class: "eff" }, plain(note, 60)))) };
  });
  return { rows, box: node("div", { class: "frm" }, ...rows.map((row) => row.line)) };
}

// Read the rows of a dialog: which settings differ from before, and the first that is wrong.
function readRows(rows) {
  const changes = {};
  let problem = null;
  for (const { name, before, input, line } of rows) {
    const isSame = before !== undefined && input.value.trim() === exact(before);
    line.classList.toggle("changed", !isSame && before !== undefined);
    if (isSame) continue;
    const read = readValue(input.value, before);
    if (read.problem) problem ??= `${name}: ${read.problem}`;
    else changes[name] = read.value;
    input.setAttribute("aria-invalid", String(Boolean(read.problem)));
  }
  return { changes, problem };
}

async function showClone(number) {
  const trial = run.trials.get(number);
  if (!trial) return;
  openTrial = null;
  const body = openDialog(`Clone trial ${number}`);
  body.append(node("p", { class: "dim" }, `${describeTrial(trial)}. The trial itself ${isOpen(trial) ? "trains on" : "stays"} unchanged.`));
  const latest = run.info.adaptive ? "the last reported epoch" : "the last finished epoch";
  const after = node("select", { "aria-label": "after which epoch" }, node("option", { value: "" }, latest));
  const warm = node("input", { type: "radio", name: "start", value: "warm", checked: trial.done > 0, disabled: trial.done === 0 });
  const cold = node("input", { type: "radio", name: "start", value: "cold", checked: trial.done === 0 });
  const { rows, box } = settingRows(trial.config, true);
  const until = node("input", { type: "number", min: 1, max: 1000000, value: trial.done < trial.target ? trial.target : trial.done + run.info.epochs });
  const stop = node("input", { type: "checkbox", disabled: !isOpen(trial) });
  const problem = node("p", { class: "warn", role: "alert", hidden: true });
  const shown = node("code", { class: "cmd" });
  const go = node("button", { type: "submit", class: "btn primary", id: "go" }, "Clone");
  const form = node("form", { method: "dialog" },
    node("div", { class: "choice", role: "radiogroup", "aria-label": "where the clone begins" },
      node("label", { class: trial.done ? null : "off" }, warm, node("b", {}, "Warm: continue from its state"), node("span", {}, "weights, moments and schedule after ", after)),
      node("label", {}, cold, node("b", {}, "Cold: from the beginning"), node("span", {}, "only the settings are copied"))),
    box, problem,
    node("div", { class: "opts" }, node("label", {}, "Train until epoch ", until), node("label", {}, stop, ` stop trial ${number} when the clone begins`)),
    shown, footer("Recorded with the run; replay can prove it.", go));
  const read = () => {
    const { changes, problem: wrong } = readRows(rows);
    const isCold = cold.checked;
    const request = { verb: "clone", trial: number, changes, cold: isCold };
    const words = ["--trial", String(number)];
    for (const [name, value] of Object.entries(changes)) words.push("--set", quoted(`${name}=${exact(value)}`));
    if (isCold) words.push("--cold");
    else if (after.value) { request.after = +after.value; words.push("--after", after.value); }
    if (+until.value !== trial.target) { request.epochs = +until.value; words.push("--epochs", until.value); }
    if (stop.checked) { request.stop_parent = true; words.push("--stop-parent"); }
    const refused = wrong ?? (Number.isInteger(+until.value) && +until.value > (isCold ? 0 : +after.value || 0) ? null : "train until a later epoch than the one it begins after")
      ?? (Object.keys(changes).length || request.epochs ? null : "");
    problem.hidden = !refused;
    problem.textContent = plain(refused ?? "");
    go.disabled = refused !== null;
    shown.textContent = plain(command("clone", ...words));
    return request;
  };
  form.addEventListener("input", read);
  onSubmit(form, read, problem, go);
  body.append(form);
  read();
  (rows[0]?.input ?? until).focus();
  const told = await source.trial(number);
  for (const epoch of told.kept ?? []) after.append(node("option", { value: epoch }, epoch === (trial.best ?? -1) + 1 ? `epoch ${epoch} (best)` : `epoch ${epoch}`));
}

/** Sends what `read` returns when a form is submitted; shows a refusal in `problem`. */
function onSubmit(form, read, problem, go) {
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    go.disabled = true;
    const told = await act(read(), () => $("dialog").close());
    if (told.error) { problem.hidden = false; problem.textContent = plain(told.error); go.disabled = false; }
  });
}

function showAdd() {
  const body = openDialog("Add a configuration");
  body.append(node("p", { class: "dim" }, "It is trained, ranked and kept like any other trial; the searcher neither sees nor stops it."));
  const known = [...run.trials.values()][0]?.config ?? {};
  const names = [...new Set([...Object.keys(run.info.space), ...Object.keys(known)])];
  const best = run.ranked[0]?.config ?? {};
  const { rows, box } = settingRows(Object.fromEntries(names.map((name) => [name, undefined])), false);
  for (const row of rows) if (row.name in best) row.input.placeholder = `best: ${short(best[row.name])}`;
  const until = node("input", { type: "number", min: 1, max: 1000000, value: run.info.epochs });
  const problem = node("p", { class: "warn", role: "alert", hidden: true });
  const shown = node("code", { class: "cmd" });
  const go = node("button", { type: "submit", class: "btn primary", id: "go" }, "Add");
  const form = node("form", { method: "dialog" }, box, problem, node("div", { class: "opts" }, node("label", {}, "Train until epoch ", until)), shown, footer("A value outside the space is allowed and noted.", go));
  const read = () => {
    const { changes, problem: wrong } = readRows(rows.map((row) => ({ ...row, before: best[row.name] === undefined || row.input.value ? undefined : best[row.name] })));
    go.disabled = wrong !== null;
    shown.textContent = plain(command("add", ...Object.entries(changes).map(([name, value]) => quoted(`${name}=${exact(value)}`)), ...(+until.value === run.info.epochs ? [] : ["--epochs", until.value])));
    return { verb: "add", changes, ...(+until.value === run.info.epochs ? {} : { epochs: +until.value }) };
  };
  form.addEventListener("input", read);
  onSubmit(form, read, problem, go);
  body.append(form);
  read();
  rows[0]?.input.focus();
}

function showExtend(number) {
  const trial = run.trials.get(number);
  const body = openDialog(`Extend trial ${number}`);
  const until = node("input", { type: "number", min: trial.target + 1, max: 1000000, value: trial.target + run.info.epochs });
  const shown = node("code", { class: "cmd" });
  const go = node("button", { type: "submit", class: "btn primary", id: "go" }, "Extend");
  const form = node("form", { method: "dialog" }, node("p", { class: "dim" }, `${describeTrial(trial)}. It trains on with the same state; a schedule sees the new number of epochs.`),
    node("div", { class: "opts" }, node("label", {}, "Train until epoch ", until)), shown, footer("Recorded with the run.", go));
  const read = () => { shown.textContent = command("extend", "--trial", String(number), "--epochs", until.value); go.disabled = !(+until.value > trial.target); };
  form.addEventListener("input", read);
  form.addEventListener("submit", (event) => { event.preventDefault(); act({ verb: "extend", trial: number, epochs: +until.value }, () => $("dialog").close()); });
  body.append(form);
  read();
  until.focus();
}

function showStopRun() {
  const body = openDialog("Stop the run");
  const go = node("button", { type: "button", class: "btn primary", id: "go", on: { click: () => act({ verb: "stop" }, () => $("dialog").close()) } }, "Stop");
  body.append(node("p", {}, "All finished units are kept, and the run can be resumed from there:"),
    node("code", { class: "cmd" }, command("resume")), node("p", { class: "dim" }, "The same from a terminal:"), node("code", { class: "cmd" }, command("stop")), footer("", go));
}

function drawActions() {
  const may = canAct();
  for (const id of ["pauseRun", "stopRun", "add"]) $(id).hidden = !may;
  const verb = run.info.status === "paused" ? "unpause" : "pause";
  const button = $("pauseRun");
  if (button.dataset.verb === verb) return;
  button.dataset.verb = verb;
  button.replaceChildren(icon(verb), node("span", {}, verb === "pause" ? "Pause run" : "Continue"));
  button.setAttribute("aria-label", verb === "pause" ? "pause the run" : "continue the run");
}

$("pauseRun").addEventListener("click", (event) => act({ verb: event.currentTarget.dataset.verb }));
$("stopRun").append(icon("stop"), node("span", {}, "Stop run"));
$("stopRun").setAttribute("aria-label", "stop the run");
$("stopRun").addEventListener("click", showStopRun);
$("add").addEventListener("click", showAdd);
