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
