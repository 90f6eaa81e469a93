"use strict";
(() => {
  const root = document.documentElement;
  const printed = window.matchMedia("print");
  const darkWished = window.matchMedia("(prefers-color-scheme: dark)");
  const coarse = window.matchMedia("(pointer: coarse)").matches;
  const PRINT_WIDTH = { one: 640, several: 320 };

  // Tables: a title sorts by its column, a second time the other way round; gaps come last.

  const valueOf = (cell, numeric) =>
    numeric ? Number(cell.dataset.value ?? (cell.textContent || NaN)) : cell.textContent;

  const sortBy = (table, heading) => {
    const numeric = heading.dataset.kind === "number";
    const first = numeric && heading.cellIndex > 0 ? "descending" : "ascending";
    const other = { ascending: "descending", descending: "ascending" };
    const before = heading.getAttribute("aria-sort");
    const direction = before === "none" ? first : other[before];
    const sign = direction === "ascending" ? 1 : -1;
    const body = table.tBodies[0];
    const lines = [...body.rows].map((row) => ({
      row,
      value: valueOf(row.cells[heading.cellIndex], numeric),
    }));
    lines.sort((one, two) => {
      if (!numeric) return sign * one.value.localeCompare(two.value, undefined, { numeric: true });
      if (Number.isNaN(one.value) || Number.isNaN(two.value))
        return Number.isNaN(one.value) - Number.isNaN(two.value);
      return sign * (one.value - two.value);
    });
    body.append(...lines.map((line) => line.row));
    for (const cell of table.tHead.rows[0].cells) cell.setAttribute("aria-sort", "none");
    heading.setAttribute("aria-sort", direction);
  };

  for (const table of document.querySelectorAll("table.sortable"))
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

  // Figures: drawn when they come near the window, in the colours of the theme.

  const colours = () => {
    if (printed.matches || printing)
      return { ink: "#111", rule: "#ccc", paper: "#fff" };
    const style = getComputedStyle(document.body);
    const rule = getComputedStyle(document.querySelector("section")).borderTopColor;
    return { ink: style.color, rule, paper: style.backgroundColor };
  };

  const themed = (layout, panels) => {
    const { ink, rule, paper } = colours();
    const family = getComputedStyle(document.querySelector("button")).fontFamily;
    const result = {
      ...layout,
      title: undefined,
      annotations: [],
      template: undefined,
      width: undefined,
      height: heightOf(layout),
      autosize: true,
      showlegend: false,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { ...layout.font, family, size: 12, color: ink },
      hoverlabel: { bgcolor: paper, bordercolor: rule, font: { family, color: ink } },
      margin: { l: 8, r: 8, t: 12, b: 8 },
      dragmode: coarse ? false : "zoom",
    };
    if (printing) result.width = panels === 1 ? PRINT_WIDTH.one : PRINT_WIDTH.several;
    for (const key of Object.keys(layout).filter((name) => /^[xy]axis\d*$/.test(name)))
      result[key] = {
        ...layout[key],
        automargin: true,
        fixedrange: coarse,
        gridcolor: rule,
        zerolinecolor: rule,
        linecolor: ink,
        tickcolor: ink,
        tickfont: { ...layout[key].tickfont, color: ink },
      };
    return result;
  };

  const groupOf = (trace) => trace.legendgroup || trace.name || "";

  const shown = (trace, state) => (state.off.has(groupOf(trace)) ? false : trace.visible ?? true);

  const AXIS_PIXELS = 66;
  const heightOf = ({ height = 340, margin = { t: 0, b: 0 } }) =>
    height - margin.t - margin.b + AXIS_PIXELS; // without the space for plotly's own legend

  // Panels of one quantity have one scale, unless there is nothing in common to show.
  const share = (state) => {
    const titleOf = (plot) => plot.layout.yaxis.title?.text ?? "";
    for (const title of new Set(state.plots.map(titleOf))) {
      const alike = state.plots.filter((plot) => titleOf(plot) === title);
      const ranges = alike.map((plot) => plot._fullLayout.yaxis.range);
      const range = [
        Math.min(...ranges.map((one) => one[0])),
        Math.max(...ranges.map((one) => one[1])),
      ];
      if (alike.length > 1 && range.every(Number.isFinite))
        for (const plot of alike) Plotly.relayout(plot, { "yaxis.range": range });
    }
  };

  // Texts beside points: each where it covers least and is within the plot; one that would still
  // cover another is left to the hover.

  const TEXT = { letter: 7.5, height: 13, gap: 8 };
  const PLACES = ["top right", "top left", "bottom right", "bottom left", "top center",
    "bottom center", "middle right", "middle left"];

  const boxOf = (place, [x, y], text) => {
    const [down, across] = place.split(" ");
    const width = text.length * TEXT.letter;
    const shift = { left: -width - TEXT.gap, right: TEXT.gap, center: -width / 2 }[across];
    const drop = { top: -TEXT.height - TEXT.gap, bottom: TEXT.gap, middle: -TEXT.height / 2 }[down];
    return { left: x + shift, right: x + shift + width, top: y + drop, bottom: y + drop + TEXT.height };
  };
  const touch = (one, other) =>
    one.left < other.right && other.left < one.right && one.top < other.bottom && other.top < one.bottom;
  const around = ([x, y]) => ({ left: x - 4, right: x + 4, top: y - 4, bottom: y + 4 });

  const placeTexts = (plot) => {
    const { xaxis, yaxis } = plot._fullLayout;
    const traces = plot.data.map((trace, number) => ({ trace, number }))
      .filter(({ trace }) => trace.mode?.includes("text") && trace.visible !== false);
    if (!traces.length) return;
    const placeOf = (trace, index) => [xaxis.d2p(trace.x[index]), yaxis.d2p(trace.y[index])];
    const points = traces.flatMap(({ trace }) => trace.x.map((_, index) => around(placeOf(trace, index))));
    const inside = (box) => box.left >= 0 && box.right <= xaxis._length && box.top >= 0;
    const taken = [];
    const update = { textposition: [], texttemplate: [] };
    for (const { trace } of traces) {
      const places = [], shownTexts = [];
      trace.text.forEach((text, index) => {
        const at = placeOf(trace, index);
        const free = PLACES.map((place) => ({ place, box: boxOf(place, at, plainName(text)) }))
          .filter(({ box }) => inside(box) && !taken.some((other) => touch(box, other)))
          .map((one) => ({ ...one, covers: points.filter((point) => touch(one.box, point)).length }))
          .sort((one, other) => one.covers - other.covers);
        if (free.length) taken.push(free[0].box);
        places.push(free[0]?.place ?? PLACES[0]);
        shownTexts.push(free.length ? "%{text}" : " ");
      });
      update.textposition.push(places);
      update.texttemplate.push(shownTexts);
    }
    Plotly.restyle(plot, update, traces.map(({ number }) => number));
  };

  const draw = (state) => {
    state.drawn = true;
    state.plots.forEach((plot, index) => {
      const panel = state.panels[index];
      const data = panel.data.map((trace) => ({ ...trace, visible: shown(trace, state) }));
      const layout = themed(panel.layout, state.plots.length);
      plot.style.height = `${layout.height}px`;
      Plotly.react(plot, data, layout, { displayModeBar: false, responsive: true });
    });
    if ("shared" in state.figure.dataset) share(state);
    state.plots.forEach(placeTexts);
    state.figure.dataset.drawn = "";
    if (!performance.getEntriesByName("first-figure").length) performance.mark("first-figure");
  };

  const swatchOf = (trace) => {
    const swatch = document.createElement("span");
    swatch.className = "swatch";
    const bars = trace.type === "bar";
    const colour = (bars ? trace.marker?.color : trace.line?.color ?? trace.marker?.color) ?? "";
    if (bars) swatch.classList.add("block");
    swatch.style[bars ? "backgroundColor" : "borderTopColor"] = Array.isArray(colour) ? colour[0] : colour;
    if (trace.line?.dash && trace.line.dash !== "solid") swatch.style.borderTopStyle = "dashed";
    return swatch;
  };

  const ENTITIES = { lt: "<", gt: ">", quot: '"', "#39": "'", "#x27": "'", amp: "&" };
  const plainName = (name) =>
    name.replace(/&(lt|gt|quot|#39|#x27|amp);/g, (_, entity) => ENTITIES[entity]);

  const makeLegend = (state) => {
    const named = new Map();
    for (const trace of state.panels.flatMap((panel) => panel.data))
      if (trace.showlegend !== false && trace.name && !named.has(groupOf(trace)))
        named.set(groupOf(trace), trace);
    if (named.size < 2) return;
    for (const [group, trace] of named) {
      const button = document.createElement("button");
      button.type = "button";
      button.setAttribute("aria-pressed", "true");
      button.append(swatchOf(trace), plainName(trace.name));
      button.addEventListener("click", () => {
        const off = !state.off.delete(group);
        if (off) state.off.add(group);
        button.setAttribute("aria-pressed", String(!off));
        draw(state);
      });
      state.legend.append(button);
    }
  };

  const states = [...document.querySelectorAll("figure")].map((figure) => ({
    figure,
    legend: figure.querySelector(".legend"),
    plots: [...figure.querySelectorAll(".plot")],
    panels: null,
    off: new Set(),
    drawn: false,
  }));

  const prepare = (state) => {
    if (state.panels) return;
    state.panels = JSON.parse(state.figure.querySelector(".panels-data").textContent);
    makeLegend(state);
  };

  const show = (state) => {
    if (state.drawn) return;
    prepare(state);
    draw(state);
  };

  let printing = false;
  const waiting = [];
  const showNext = () => {
    show(waiting.shift());
    if (waiting.length) setTimeout(showNext); // one at a time: the page stays responsive
  };
  let resizing;
  window.addEventListener("resize", () => {
    clearTimeout(resizing);
    resizing = setTimeout(() => states.filter((one) => one.drawn).forEach((one) => one.plots.forEach(placeTexts)), 300);
  });

  const observer = new IntersectionObserver(
    (entries) => {
      for (const entry of entries.filter((one) => one.isIntersecting)) {
        observer.unobserve(entry.target);
        waiting.push(states.find((state) => state.figure === entry.target));
        if (waiting.length === 1) setTimeout(showNext);
      }
    },
    { rootMargin: "400px 0px" },
  );
  for (const state of states) observer.observe(state.figure);

  // Paper: every figure, in light colours and of the paper's width; afterwards as before.

  const paper = (on) => {
    if (printing === on) return;
    printing = on;
    for (const state of states) {
      prepare(state);
      if (on || state.drawn) draw(state);
    }
  };
  window.addEventListener("beforeprint", () => paper(true));
  window.addEventListener("afterprint", () => paper(false));
  printed.addEventListener("change", (event) => paper(event.matches));

  // Theme: the system's, until the reader chooses; the choice is kept where the browser allows it.

  const button = document.getElementById("theme");
  const KEY = "shardmark-theme";
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : darkWished.matches);
  const redraw = () => {
    button.setAttribute("aria-pressed", String(isDark()));
    for (const state of states) if (state.drawn) draw(state);
  };
  const remembered = () => {
    try {
      return localStorage.getItem(KEY);
    } catch {
      return null;
    }
  };
  if (["light", "dark"].includes(remembered())) root.dataset.theme = remembered();
  button.hidden = false;
  redraw();
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try {
      localStorage.setItem(KEY, root.dataset.theme);
    } catch {
      // private windows keep nothing
    }
    redraw();
  });
  darkWished.addEventListener("change", redraw);
})();
