// Draws the figures of the page from the JSON beside it, in the colours of the reader's theme.
"use strict";
(() => {
  const page = JSON.parse(document.getElementById("figures").textContent);
  const specs = new Map(page.figures.map((figure) => [figure.id, figure]));
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const options = { responsive: true, displayModeBar: false };
  const drawn = new Set();
  let method = "tsne";
  let printing = false;

  const themed = (value) => {
    if (typeof value === "string") return page.dark[value] ?? value;
    if (Array.isArray(value)) return value.map(themed);
    if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, themed(v)]));
    return value;
  };

  const draw = (id) => {
    const spec = specs.get(id);
    const place = spec.maps ? { x: spec.maps[method][0], y: spec.maps[method][1] } : {};
    const data = spec.data.map((trace) => ({ ...trace, ...place }));
    const copy = structuredClone({ data, layout: spec.layout });
    const { data: traces, layout } = dark.matches && !printing ? themed(copy) : copy;
    drawn.add(id);
    return Plotly.react(id, traces, layout, options);
  };

  const hidden = (id) => document.getElementById(id).closest("details:not([open])") !== null;
  const drawVisible = async () => {
    document.documentElement.dataset.figures = "drawing";
    for (const id of specs.keys()) {
      if (drawn.has(id) || hidden(id)) continue;
      await draw(id);
      await new Promise((resolve) => setTimeout(resolve)); // let the reader scroll meanwhile
    }
    document.documentElement.dataset.figures = "done";
  };
  const redraw = () => [...drawn].forEach(draw);

  document.querySelectorAll("input[name=method]").forEach((input) =>
    input.addEventListener("change", () => {
      method = input.value;
      [...drawn].filter((id) => specs.get(id).maps).forEach(draw);
    }));
  document.querySelectorAll("details").forEach((box) => box.addEventListener("toggle", () => box.open && drawVisible()));
  dark.addEventListener("change", redraw);
  window.addEventListener("beforeprint", () => { printing = true; redraw(); });
  window.addEventListener("afterprint", () => { printing = false; redraw(); });
  drawVisible();
})();
