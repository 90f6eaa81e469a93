"use strict";
(() => {
  const root = document.documentElement;
  root.classList.add("scripted");

  // Tables: a title sorts by its column, a second time the other way round; gaps come last.

  const sortBy = (table, heading) => {
    const numeric = heading.classList.contains("number");
    const before = heading.getAttribute("aria-sort");
    const first = numeric && heading.cellIndex > 0 ? "descending" : "ascending";
    const other = before === "ascending" ? "descending" : "ascending";
    const direction = before === "none" ? first : other;
    const sign = direction === "ascending" ? 1 : -1;
    const valueOf = (row) => {
      const text = row.cells[heading.cellIndex].textContent;
      return numeric ? parseFloat(text) : text; // "171.6 ±12.8" is sorted by 171.6
    };
    const lines = [...table.tBodies[0].rows].map((row) => ({ row, value: valueOf(row) }));
    lines.sort((left, right) => {
      if (!numeric) return sign * left.value.localeCompare(right.value, undefined, { numeric: true });
      if (Number.isNaN(left.value) || Number.isNaN(right.value))
        return Number.isNaN(left.value) - Number.isNaN(right.value);
      return sign * (left.value - right.value);
    });
    table.tBodies[0].append(...lines.map((line) => line.row));
    for (const cell of table.tHead.rows[0].cells) cell.setAttribute("aria-sort", "none");
    heading.setAttribute("aria-sort", direction);
  };

  const tables = [...document.querySelectorAll("table.sortable")];
  for (const table of tables)
    for (const heading of table.tHead.rows[0].cells)
      heading.querySelector("button").addEventListener("click", () => sortBy(table, heading));

  // Downloads: what the page holds as data is handed out as a file.

  for (const button of document.querySelectorAll("[data-download]")) {
    button.parentElement.hidden = false;
    button.addEventListener("click", () => {
      const text = JSON.parse(document.getElementById(button.dataset.download).textContent);
      const address = URL.createObjectURL(new Blob([text], { type: button.dataset.type }));
      const link = document.createElement("a");
      link.href = address;
      link.download = button.dataset.name;
      link.click();
      setTimeout(() => URL.revokeObjectURL(address), 10000);
    });
  }

  // Figures are drawn already.  Legend and filters hide marks, which their labels identify.

  const rowAxes = JSON.parse(document.getElementById("row-axes").textContent);
  const filters = document.querySelector(".filters");
  const wanted = () =>
    [...(filters?.elements ?? [])].filter((one) => one.value).map((one) => [one.name, one.value]);
  const passes = (axes, chosen) => chosen.every(([axis, value]) => axes[axis] === value);

  const figures = [...document.querySelectorAll("figure")].map((figure) => {
    const known = JSON.parse(figure.querySelector(".marks-data").textContent);
    const marks = [...figure.querySelectorAll(".plot")].flatMap((plot, panel) =>
      [...plot.querySelectorAll("[aria-label]")]
        .filter((element) => Object.hasOwn(known[panel], element.getAttribute("aria-label")))
        .map((element) => {
          const [series, ...rows] = known[panel][element.getAttribute("aria-label")];
          return { element, series, rows };
        }),
    );
    return { figure, marks, off: new Set() };
  });

  const apply = () => {
    const chosen = wanted();
    const visible = rowAxes.map((axes) => passes(axes, chosen));
    for (const { marks, off } of figures)
      for (const { element, series, rows } of marks) {
        const hidden = off.has(series) || (rows.length && !rows.some((row) => visible[row]));
        element.classList.toggle("off", Boolean(hidden));
      }
    for (const table of tables) {
      const titles = [...table.tHead.rows[0].cells].map((cell) => cell.dataset.title);
      for (const row of table.tBodies[0].rows)
        row.hidden = chosen.some(([axis, value]) =>
          titles.includes(axis) && row.cells[titles.indexOf(axis)].textContent !== value);
    }
  };

  if (filters) {
    filters.hidden = false;
    filters.addEventListener("change", apply);
    filters.addEventListener("submit", (event) => event.preventDefault());
  }
  for (const { figure, off } of figures)
    for (const button of figure.querySelectorAll(".legend button"))
      button.addEventListener("click", () => {
        const name = button.querySelector("span").textContent;
        if (!off.delete(name)) off.add(name);
        button.setAttribute("aria-pressed", String(!off.has(name)));
        apply();
      });

  // The pointer names the mark below it; a click shows the panel as large as the window.

  const tip = document.getElementById("tip");
  const markAt = (event) => event.target.closest?.(".plot [aria-roledescription$='mark'][aria-label],"
    + ".plot [aria-roledescription='point'][aria-label], .plot [aria-roledescription='bar'][aria-label]");
  document.addEventListener("pointermove", (event) => {
    const mark = markAt(event);
    tip.hidden = !mark;
    if (!mark) return;
    tip.textContent = mark.getAttribute("aria-label");
    const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${event.clientY + (event.clientY > innerHeight - 80 ? -44 : 18)}px`;
  });

  const dialog = document.getElementById("enlarged");
  dialog.querySelector("button").addEventListener("click", () => dialog.close());
  for (const panel of document.querySelectorAll(".panel")) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "enlarge";
    button.textContent = "Enlarge";
    button.setAttribute("aria-label", `Enlarge: ${panel.querySelector(".plot").getAttribute("aria-label")}`);
    button.addEventListener("click", () => {
      dialog.querySelector("div").replaceChildren(panel.querySelector(".plot").cloneNode(true));
      dialog.showModal();
    });
    panel.append(button);
  }

  // Paper has everything unfolded.

  const folded = () => [...document.querySelectorAll("details:not([open])")];
  let unfolded = [];
  const paper = (on) => {
    for (const part of unfolded) part.open = false;
    unfolded = on ? folded() : [];
    for (const part of unfolded) part.open = true;
  };
  window.addEventListener("beforeprint", () => paper(true));
  window.addEventListener("afterprint", () => paper(false));

  // Theme: the system's, until the reader chooses; the choice is kept where the browser allows it.

  const button = document.getElementById("theme");
  const darkWished = window.matchMedia("(prefers-color-scheme: dark)");
  const KEY = "shardmark-theme";
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : darkWished.matches);
  const name = () => (button.textContent = isDark() ? "Use light theme" : "Use dark theme");
  try {
    const kept = localStorage.getItem(KEY);
    if (["light", "dark"].includes(kept)) root.dataset.theme = kept;
  } catch {
    // private windows keep nothing
  }
  button.hidden = false;
  name();
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem(KEY, root.dataset.theme);
    } catch {
      // private windows keep nothing
    }
    name();
  });
  darkWished.addEventListener("change", name);
})();
