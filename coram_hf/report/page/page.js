"use strict";
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.closest("th");
    const table = head.closest("table");
    const column = [...head.parentNode.children].indexOf(head);
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = (row) => row.children[column].dataset.value;
    const number = (text) => (text === "" ? NaN : Number(text));
    const compare = (a, b) => {
      const [x, y] = [number(key(a)), number(key(b))];
      if (!Number.isNaN(x) && !Number.isNaN(y)) return x - y;
      if (Number.isNaN(x) !== Number.isNaN(y)) return Number.isNaN(x) ? 1 : -1;
      return key(a).localeCompare(key(b));
    };
    const body = table.tBodies[0];
    const rows = [...body.rows].sort((a, b) => (down ? -1 : 1) * compare(a, b));
    body.append(...rows);
  });
}
document.getElementById("scheme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.scheme
    ? root.dataset.scheme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.scheme = dark ? "light" : "dark";
});
