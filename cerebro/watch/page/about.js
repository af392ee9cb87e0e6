// What does not change from poll to poll: how reliable the numbers are, failures, data, settings.

function bullets(title, items) {
  return items?.length ? [node("h3", {}, title), node("ul", {}, ...items.map((item) => node("li", {}, item)))] : [];
}

const HALF = ["Data", "Space", "Settings of the search", "Environment"]; // two of them side by side

function section(title, ...parts) {
  const inner = parts.flat().filter((part) => part !== null && part !== undefined);
  return inner.length ? node("section", { class: HALF.includes(title) ? "card half" : "card" }, node("div", { class: "hd" }, node("h2", {}, title)), node("div", { class: "inner" }, ...inner)) : null;
}

const factsOf = (values) => (values && Object.keys(values).length ? facts(Object.entries(values)) : null);

function tail(what, text, number) {
  return text ? node("details", {}, node("summary", {}, `${what} of trial ${number}, its last lines`), node("pre", {}, lines(text))) : null;
}

function tellBest(best) {
  if (!best) return node("p", {}, "No trial has a finite metric.");
  return node("div", { class: "pair" },
    node("section", {}, node("p", {}, node("b", {}, best.text)), best.tie ? node("p", {}, best.tie) : null, factsOf(best.config),
      node("h3", {}, "Metrics"), factsOf(best.metrics), ...(factsOf(best.folds) ? [node("h3", {}, "Folds"), factsOf(best.folds)] : []),
      best.state_hash ? node("p", { class: "dim" }, "state hash ", node("code", {}, best.state_hash)) : null),
    node("section", {}, ...bullets("How reliable these numbers are", best.sure), ...bullets("What to try next", best.next)));
}

function tellFailures(about) {
  const told = about.failures.flatMap((failure) => [
    node("h3", { class: failure.status }, plain(failure.cause, 400)), factsOf(failure.facts),
    failure.trials.length ? node("ul", {}, ...failure.trials.map((line) => node("li", {}, line))) : null,
    tail("traceback", failure.traceback, failure.number), tail("output", failure.log, failure.number)]);
  return about.other_causes ? [...told, node("p", {}, `and ${about.other_causes} more causes`)] : told;
}

function drawAbout(about) {
  const list = (items) => (items.length ? node("ul", {}, ...items.map((item) => node("li", {}, item))) : null);
  $("about").replaceChildren(...[
    node("p", { class: "dim" }, about.facts.join(" · ")),
    section("Best configuration", tellBest(about.best)),
    section("Failures", ...tellFailures(about)),
    section("Ended early", list(about.pruned)),
    section("Warnings and events", list(about.events)),
    section("Data", ...Object.entries(about.data ?? {}).flatMap(([name, values]) => [node("h3", {}, name), factsOf(values)])),
    section("Space", factsOf(about.space)),
    section("Settings of the search", factsOf(about.settings)),
    section("Environment", factsOf(about.environment)),
  ].filter((part) => part !== null));
}

$("showAbout").addEventListener("click", async () => {
  const told = await source.about();
  if (told.problem) toast(told.problem);
  else drawAbout(told);
});
