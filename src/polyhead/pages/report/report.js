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
    const points = spec.maps ? { x: spec.maps[method][0], y: spec.maps[method][1] } : {};
    const data = spec.data.map((trace) => ({ ...trace, ...points }));
    const copy = structuredClone({ data, layout: spec.layout });
    const { data: traces, layout } = dark.matches && !printing ? themed(copy) : copy;
    drawn.add(id);
    return Plotly.react(id, traces, layout, options);
  };

  const hidden = (id) => document.getElementById(id).closest("details:not([open]), [hidden]") !== null;

  // In texts of figures, Plotly reads tags such as the token <s>, and entities.
  const literal = (name) => name.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

  // A matrix that was chosen goes into its figure: whole numbers become values, names become ticks.
  const place = (spec, map) => {
    const [trace] = spec.data, { layout } = spec, unit = map.limit / page.steps;
    const columns = map.columns ?? map.z[0].map((_, i) => i + 1);
    const gap = (names) => (names.length > 32 ? 0 : 1);
    Object.assign(trace, {
      z: map.z.map((row) => row.map((value) => value * unit)),
      text: map.rows.map((row) => columns.map((column) => literal(`${row} → ${column}`))),
      colorscale: page.scales[map.signed ? "signed" : "plain"],
      zmin: map.signed ? -map.limit : 0, zmax: map.limit, xgap: gap(columns), ygap: gap(map.rows),
    });
    const ticks = (names) => ({
      tickmode: "array", tickvals: names.map((_, i) => i), ticktext: names.map(literal), tickfont: { size: names.length > 24 ? 9 : 11 },
    });
    Object.assign(layout.yaxis, ticks(map.rows));
    if (map.columns) Object.assign(layout.xaxis, ticks(columns), { tickangle: columns.every((name) => name.length < 3) ? 0 : -60 });
    else trace.x = columns;
    layout.height = Math.max(200, Math.min(640, 96 + (map.rows.length > 24 ? 12 : 22) * map.rows.length));
    document.getElementById(spec.id).style.height = `${layout.height}px`;
  };
  const fill = (select, names) => {
    const old = Math.max(0, select.selectedIndex);
    select.replaceChildren(...names.map((name) => new Option(name)));
    select.selectedIndex = Math.min(old, names.length - 1);
  };
  const choose = (look) => {
    const box = document.getElementById(look.id), pick = (name) => box.querySelector(`select[name=${name}]`);
    const example = pick("example").selectedIndex, layer = look.examples[example][pick("layer").selectedIndex];
    box.querySelectorAll("[data-example]").forEach((seen) => { seen.hidden = Number(seen.dataset.example) !== example; });
    for (const [kind, id] of Object.entries(look.figures)) {
      const maps = layer[kind], select = pick(kind);
      select.parentElement.hidden = document.getElementById(id).parentElement.hidden = !maps;
      if (!maps) continue;
      fill(select, maps.map((map) => map.name));
      place(specs.get(id), maps[select.selectedIndex]);
    }
  };
  for (const look of page.looks) {
    choose(look);
    document.getElementById(look.id).addEventListener("change", () => {
      choose(look);
      // A figure that comes or goes leaves the others another width.
      Object.values(look.figures).filter((id) => !hidden(id)).forEach((id) => draw(id).then(() => Plotly.Plots.resize(id)));
    });
  }

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
