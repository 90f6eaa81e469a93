"use strict";
(() => {
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const root = document.documentElement;
  root.classList.add("scripted");

  // Tables: a title sorts by its column, a second time the other way round; gaps come last.

  const sortBy = (table, heading) => {
    const numeric = heading.classList.contains("number");
    const upward = heading.ariaSort === "none" ? !numeric : heading.ariaSort === "descending";
    const sign = upward ? 1 : -1;
    const text = (row) => row.cells[heading.cellIndex].textContent;
    const number = (row) => parseFloat(text(row)); // "171.6 ±12.8" is sorted by 171.6
    const rows = [...table.tBodies[0].rows].sort((a, b) =>
      numeric
        ? isNaN(number(a)) - isNaN(number(b)) || sign * (number(a) - number(b)) || 0
        : sign * text(a).localeCompare(text(b), undefined, { numeric: true }));
    table.tBodies[0].append(...rows);
    for (const cell of table.tHead.rows[0].cells) cell.ariaSort = "none";
    heading.ariaSort = upward ? "ascending" : "descending";
  };

  const tables = all("table.sortable");
  for (const table of tables)
    for (const button of all("th button", table.tHead))
      button.addEventListener("click", () => sortBy(table, button.parentElement));

  // Downloads: what the page holds as data is handed out as a file.

  for (const button of all("[data-download]")) {
    button.parentElement.hidden = false;
    button.addEventListener("click", () => {
      const text = JSON.parse(document.getElementById(button.dataset.download).textContent);
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([text], { type: button.dataset.type }));
      link.download = button.dataset.name;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    });
  }

  // Figures are drawn already.  Legend and filters hide marks, which carry their series and rows.

  const rowAxes = JSON.parse(document.getElementById("row-axes").textContent);
  const off = (figure) => all(".legend [aria-pressed=false] span", figure).map((name) => name.textContent);

  const apply = () => {
    const chosen = all(".filters select").filter((select) => select.value);
    const passes = rowAxes.map((axes) => chosen.every(({ name, value }) => axes[name] === value));
    for (const figure of all("figure")) {
      const hidden = off(figure);
      for (const panel of all(".panel", figure)) {
        const marks = all("[data-series]", panel);
        for (const mark of marks) {
          const rows = mark.dataset.rows.split(" ").filter(Boolean);
          mark.classList.toggle("filtered", rows.length > 0 && !rows.some((row) => passes[row]));
          mark.classList.toggle("off", hidden.includes(mark.dataset.series));
        }
        const ofRows = marks.filter((mark) => mark.dataset.rows);
        panel.hidden = ofRows.length > 0 && ofRows.every((mark) => mark.classList.contains("filtered"));
      }
    }
    for (const table of tables) {
      const titles = [...table.tHead.rows[0].cells].map((cell) => cell.dataset.title);
      for (const row of table.tBodies[0].rows)
        row.hidden = chosen.some(({ name, value }) =>
          titles.includes(name) && row.cells[titles.indexOf(name)].textContent !== value);
    }
  };

  for (const filters of all(".filters")) {
    filters.hidden = false;
    filters.addEventListener("change", apply);
  }
  for (const button of all(".legend button"))
    button.addEventListener("click", () => {
      button.ariaPressed = button.ariaPressed === "false";
      apply();
    });

  // The pointer names the mark below it.

  const tip = document.getElementById("tip");
  document.addEventListener("pointermove", ({ target, clientX, clientY }) => {
    const mark = target.closest?.(".plot [data-series]");
    tip.hidden = !mark;
    if (!mark) return;
    tip.textContent = mark.getAttribute("aria-label");
    tip.style.left = `${Math.max(8, Math.min(clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${clientY + (clientY > innerHeight - 80 ? -44 : 18)}px`;
  });

  // Theme: the system's, until the reader chooses.  The button says what it does.

  const theme = document.getElementById("theme");
  const darkWished = matchMedia("(prefers-color-scheme: dark)");
  const other = () => ((root.dataset.theme ?? (darkWished.matches ? "dark" : "light")) === "dark" ? "light" : "dark");
  const name = () => (theme.textContent = `Use ${other()} theme`);
  theme.hidden = false;
  name();
  darkWished.addEventListener("change", name);
  theme.addEventListener("click", () => {
    root.dataset.theme = other();
    name();
  });
})();
