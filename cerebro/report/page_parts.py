"""Define the style sheet and the script of a run's page; neither contains anything from a run."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1f2933; --dim: #5d6873; --line: #dfe3e8;
  --band: #f4f6f8; --good: #1f7a3d; --warn: #93600a; --bad: #c2372f; --link: #2369a0; }
@media (prefers-color-scheme: dark) { :root { --page: #14181d; --ink: #e4e8ed; --dim: #9aa5b1;
  --line: #323a44; --band: #1c2229; --good: #5fc27e; --warn: #e0ab55; --bad: #ff7b72;
  --link: #7db8e8; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 2rem 4rem; max-width: 90rem; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .6rem; padding-top: .6rem;
  border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.2rem 0 .4rem; overflow-wrap: anywhere; }
nav { margin: .8rem 0 0; display: flex; flex-wrap: wrap; gap: 0 1rem; }
nav a { color: var(--link); }
.dim { color: var(--dim); } .finished { color: var(--good); }
.stopped, .paused, .running, .waiting, .interrupted { color: var(--warn); }
.failed, .diverged { color: var(--bad); }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr));
  gap: 0 2.5rem; }
ul { margin: .3rem 0; padding-left: 1.2rem; } li { margin: .25rem 0; overflow-wrap: anywhere; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .2rem .9rem .2rem 0; text-align: left; vertical-align: top; }
table.facts th { font-weight: 400; color: var(--dim); white-space: nowrap; }
table.facts th.long { white-space: normal; overflow-wrap: anywhere; min-width: 11rem; }
table.facts td { overflow-wrap: anywhere; min-width: 6rem; }
.scroll { overflow: auto; max-height: 85vh; border: 1px solid var(--line); border-radius: 4px; }
.scroll table { width: 100%; }
.scroll td, .scroll th { padding: .2rem .5rem; font-size: .9rem; white-space: nowrap;
  text-align: right; vertical-align: middle; }
.scroll td.text, .scroll th.text { text-align: left; }
.scroll thead th { position: sticky; top: 0; background: var(--band); font-weight: 600;
  border-bottom: 1px solid var(--line); }
.scroll tbody tr:nth-child(even) { background: var(--band); }
.scroll tbody tr.best td { font-weight: 700; }
th button { all: unset; cursor: pointer; } th button:focus-visible { outline: 2px solid; }
th[aria-sort=ascending] button::after { content: " \\25B2"; font-size: .7em; }
th[aria-sort=descending] button::after { content: " \\25BC"; font-size: .7em; }
input[type=search] { font: inherit; color: inherit; background: var(--band); padding: .25rem .6rem;
  border: 1px solid var(--line); border-radius: 4px; width: 20rem; max-width: 100%;
  margin-bottom: .6rem; }
pre { background: var(--band); padding: .6rem .8rem; overflow: auto; border-radius: 4px;
  font-size: .85rem; margin: .4rem 0; max-height: 34rem; }
code { font-size: .92em; background: var(--band); padding: .05rem .3rem; border-radius: 3px;
  overflow-wrap: anywhere; }
summary { cursor: pointer; color: var(--link); }
img { display: block; max-width: 100%; height: auto; margin: 0 0 1.6rem; }
@media print { .scroll { max-height: none; overflow: visible; } nav, input { display: none; } }
"""

SCRIPT = """
"use strict";
document.querySelectorAll("table.sortable").forEach(function (table) {
  var body = table.tBodies[0], heads = Array.from(table.tHead.rows[0].cells);
  function key(row, column) {
    var value = row.cells[column].dataset.v, number = Number(value);
    return value === "" ? null : isNaN(number) ? value : number;
  }
  heads.forEach(function (head, column) {
    var button = head.querySelector("button");
    if (!button) { return; }
    button.addEventListener("click", function () {
      var sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      var rows = Array.from(body.rows).map(function (row) { return [key(row, column), row]; });
      rows.sort(function (a, b) {
        a = a[0]; b = b[0];
        if (a === null || b === null) { return (a === null) - (b === null); }
        if (typeof a !== typeof b) { return typeof a === "number" ? -sign : sign; }
        return a < b ? -sign : a > b ? sign : 0;
      });
      heads.forEach(function (other) { other.removeAttribute("aria-sort"); });
      head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      rows.forEach(function (row) { body.appendChild(row[1]); });
    });
  });
  var filter = document.getElementById("filter");
  filter.hidden = false;
  filter.addEventListener("input", function () {
    var sought = filter.value.toLowerCase();
    Array.from(body.rows).forEach(function (row) {
      row.hidden = !row.textContent.toLowerCase().includes(sought);
    });
  });
});
"""
