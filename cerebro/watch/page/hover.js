// One hover for all: the trial under the pointer stands out in chart, table, timeline and parallel
// coordinates. Whatever shows a trial carries its number as data-n.

let hovered = null;

function hover(number) {
  if (number === hovered) return;
  hovered = number;
  showHovered();
}

function showHovered() {
  document.body.classList.toggle("has-on", hovered !== null);
  for (const element of document.querySelectorAll(".on[data-n]")) element.classList.remove("on");
  if (hovered === null) return;
  for (const element of document.querySelectorAll(`[data-n="${hovered}"]`)) {
    element.classList.add("on");
    if (element.classList.contains("ln")) element.parentNode.append(element); // above the others
  }
}

function hoverOver(box) {
  box.addEventListener("pointerover", (event) => {
    const number = event.target.closest("[data-n]")?.dataset.n;
    hover(number === undefined ? null : +number);
  });
  box.addEventListener("pointerleave", () => hover(null));
}
