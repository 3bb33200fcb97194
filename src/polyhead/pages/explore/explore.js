// Shows the numbers of the pair that a reader points at.  All text goes in as text, never as HTML.
"use strict";
(async () => {
  const get = (id) => document.getElementById(id);
  const page = JSON.parse(get("explored").textContent);
  const packed = Uint8Array.from(atob(get("numbers").textContent), (c) => c.charCodeAt(0));
  const inflated = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(inflated).arrayBuffer()), signed = new Int8Array(bytes.buffer);
  const { tokens, layers, causal } = page, count = tokens.length;
  const SHOWN = 8; // of a list
  const state = { layer: 0, paint: "rows", scope: "layer", token: count - 1, key: count - 1, pinned: false, held: false };

  // ------------------------------------------------------------------------------------------------------------ numbers
  // A byte is sign(x) sqrt(|x| / limit), from -1 to 1: colours follow it, numbers are made of it.
  const root = (array, i) => (array.signed ? signed[array.start + i] / 127 : bytes[array.start + i] / 255);
  const number = (array, r) => array.limit * r * Math.abs(r);
  const sees = (i, j) => j >= 0 && j < count && (!causal || j <= i);
  const place = (i, j) => (causal ? (i * (i + 1)) / 2 + j : i * count + j);
  const planes = (group, name) => {
    const array = group[name];
    const own = { array, kind: group.kind, hidden: group.hidden };
    return array === null ? [] : Array.from({ length: array.planes }, (_, n) => ({ ...own, first: n * array.row, head: name === "code" ? n : null }));
  };
  for (const layer of layers) {
    layer.heads = layer.groups.flatMap((group) => planes(group, "code"));
    layer.relations = layer.groups.flatMap((group) => planes(group, "relations"));
    layer.mixed = new Set(layer.groups.map((group) => group.kind)).size > 1;
    layer.limit = Math.max(...layer.heads.map(({ array }) => array.limit));
  }
  // Whether a mask or a window hides a pair from a head; from a relation, if from all heads of its group.
  const hides = ({ hidden, head }, i, j) => {
    if (hidden === null) return false;
    const from = (n) => bytes[hidden.start + n * hidden.row + place(i, j)] === 1;
    return hidden.planes > 1 && head !== null ? from(head) : Array.from({ length: hidden.planes }, (_, n) => n).every(from);
  };
  const open = (list, i, j) => (sees(i, j) ? list.filter((plane) => !hides(plane, i, j)) : []);
  const rootAt = (plane, i, j) => root(plane.array, plane.first + place(i, j));
  const valueAt = (plane, i, j) => number(plane.array, rootAt(plane, i, j));
  const shown = (x) => {
    const size = Math.abs(x), digits = size === 0 || size >= 100 ? 0 : size >= 10 ? 1 : size >= 0.095 ? 2 : 3;
    return x.toFixed(digits).replace("-", "−");
  };
  const colour = (r) => `rgb(var(--${r < 0 ? "minus" : "plus"}) / ${(0.85 * Math.abs(r)).toFixed(3)})`;

  // What colours show: planes whose numbers are averaged; "rows" shows each by itself.
  const painted = () => {
    const layer = layers[state.layer], [what, n] = state.paint.split(" ");
    if (what === "head") return [layer.heads[n]];
    if (what === "relation") return [layer.relations[n]];
    return layer.heads;
  };
  const mean = (list, i, j, of = (x) => x) => list.reduce((sum, plane) => sum + of(valueAt(plane, i, j)), 0) / list.length;

  // --------------------------------------------------------------------------------------------------------------- text
  const make = (tag, className = "", text = "") => Object.assign(document.createElement(tag), { className, textContent: text });
  const boxes = tokens.map((text, i) => {
    const box = make("span", /^·*⏎?$/.test(text) ? "token blank" : "token", text);
    Object.assign(box, { tabIndex: -1, role: "option" });
    box.dataset.token = i;
    return box;
  });
  const words = []; // a line may break between words, and anywhere in very long ones
  let width = 0;
  boxes.forEach((box, i) => {
    const before = tokens[i - 1] ?? "⏎", begins = /[·⇥⏎]$/.test(before) || /^·+[^·]/.test(tokens[i]);
    if (begins || width + tokens[i].length > 24) {
      words.push([]);
      width = 0;
    }
    width += tokens[i].length;
    words.at(-1).push(box);
  });
  for (const word of words) {
    const span = make("span", "word");
    span.append(...word);
    get("tokens").append(span, ...(word.at(-1).textContent.endsWith("⏎") ? [make("br")] : [document.createElement("wbr")]));
  }
  const piece = (i) => make("code", "piece", tokens[i]);
  const around = (i) => {
    const side = (from, to) => make("span", "", tokens.slice(Math.max(0, from), to).join(""));
    const near = make("code", "piece");
    near.append(side(i - 4, i), make("b", "", tokens[i]), side(i + 1, i + 4));
    return near;
  };

  const paint = () => {
    const list = painted(), rows = state.paint === "rows", height = list.length > 8 ? 2 : 3, limit = layers[state.layer].limit;
    get("tokens").style.setProperty("--strip", rows ? `${height * list.length}px` : "0px");
    boxes.forEach((box, j) => {
      const heads = open(list, state.token, j), seen = heads.length > 0;
      let image = "none", size = "auto";
      if (seen && rows) {
        const shade = (plane) => (heads.includes(plane) ? colour(rootAt(plane, state.token, j) * Math.sqrt(plane.array.limit / limit)) : "var(--rule)");
        const stops = list.map((plane, h) => `${shade(plane)} ${h * height}px ${(h + 1) * height}px`);
        [image, size] = [`linear-gradient(to bottom, ${stops})`, `100% ${height * list.length}px`];
      } else if (seen) {
        const x = mean(heads, state.token, j), most = list.length === 1 ? list[0].array.limit : limit;
        const c = colour(Math.sign(x) * Math.sqrt(Math.abs(x) / most));
        image = `linear-gradient(${c}, ${c})`;
      }
      Object.assign(box.style, { backgroundImage: image, backgroundSize: size });
      box.classList.toggle("unseen", !seen);
      box.classList.toggle("chosen", j === state.token);
      box.classList.toggle("key", j === state.key && j !== state.token);
      box.setAttribute("aria-selected", j === state.token);
    });
  };

  // -------------------------------------------------------------------------------------------------------------- panel
  const grid = (table, name, word) => {
    const columns = Math.max(...layers.map((layer) => layer[name].length)), cells = [];
    table.classList.toggle("many", columns > 12);
    const head = table.createTHead().insertRow();
    for (let n = 0; n <= columns; n += 1) head.append(make("th", "", n && (columns <= 12 || n % 8 === 0) ? n : ""));
    const body = table.createTBody();
    layers.forEach((layer, l) => {
      if (!layer[name].length) return;
      const row = body.insertRow(), title = row.appendChild(make("th")), button = title.appendChild(make("button", "", layer.name));
      button.title = layer.own;
      button.addEventListener("click", () => choose({ layer: l }));
      layer[name].forEach((plane, n) => {
        const cell = row.insertCell(), label = `${layer.name}, ${word} ${n + 1}${layer.mixed ? ` (${plane.kind})` : ""}`;
        cell.addEventListener("click", () => choose({ layer: l, paint: `${word} ${n}` }));
        cells.push({ cell, row, plane, label, l, own: `${word} ${n}` });
      });
    });
    return () => {
      for (const { cell, row, plane, label, l, own } of cells) {
        const r = rootAt(plane, state.token, state.key), x = number(plane.array, r), no = hides(plane, state.token, state.key);
        cell.style.backgroundImage = no ? "" : `linear-gradient(${colour(r)}, ${colour(r)})`;
        cell.textContent = columns > 12 ? "" : no ? "–" : shown(x);
        cell.title = `${label}: ${no ? "not visible" : x.toPrecision(3).replace("-", "−")}`;
        cell.dataset.value = no ? "not visible" : x;
        cell.classList.toggle("hidden", no);
        cell.classList.toggle("on", l === state.layer && own === state.paint);
        row.classList.toggle("on", l === state.layer);
      }
    };
  };
  const item = (at, what, value, action) => {
    const button = make("button");
    button.type = "button";
    button.dataset.at = at;
    button.dataset.value = value;
    button.append(make("span", "number", shown(value)), what, make("span", "at", `#${at + 1}`));
    button.addEventListener("click", action);
    for (const [event, on] of [["mouseenter", true], ["mouseleave", false], ["focus", true], ["blur", false]])
      button.addEventListener(event, () => boxes[at].classList.toggle("pointed", on));
    const line = make("li");
    line.append(button);
    return line;
  };
  const best = (score) => tokens.map((_, i) => ({ i, x: score(i) })).filter(({ x }) => x !== null);

  const reads = () => {
    const list = painted(), one = list.length === 1, [what, n] = state.paint.split(" ");
    const strength = (j) => {
      const heads = open(list, state.token, j);
      return !heads.length ? null : one ? valueAt(list[0], state.token, j) : mean(heads, state.token, j, Math.abs);
    };
    const found = best(strength).sort((a, b) => Math.abs(b.x) - Math.abs(a.x)).slice(0, SHOWN);
    const by = n === undefined ? "all heads, mean size" : `${what} ${Number(n) + 1}`;
    get("most").replaceChildren(what === "relation" ? "Relates most to " : "Reads most ", make("span", "note", by));
    get("reads").replaceChildren(...found.map(({ i, x }) => {
      const line = item(i, piece(i), x, () => choose({ key: i, pinned: true, held: true }));
      const bar = make("span", x < 0 ? "bar minus" : "bar");
      bar.style.width = `${(100 * Math.abs(x)) / Math.abs(found[0].x || 1)}%`;
      line.querySelector(".number").after(bar);
      return line;
    }));
  };

  const nearest = () => {
    const all = state.scope === "all" ? layers.flatMap((layer) => layer.heads) : layers[state.layer].heads;
    const list = open(all, state.token, state.key);
    const apart = state.token - state.key, own = list.map((plane) => valueAt(plane, state.token, state.key));
    const norm = Math.hypot(...own);
    const cosine = (i) => {
      if (i === state.token || open(list, i, i - apart).length < list.length) return null;
      let dot = 0, square = 0;
      list.forEach((plane, h) => {
        const x = valueAt(plane, i, i - apart);
        dot += x * own[h];
        square += x * x;
      });
      return square && norm ? dot / (norm * Math.sqrt(square)) : null;
    };
    const found = best(cosine).sort((a, b) => b.x - a.x).slice(0, SHOWN);
    const same = apart === 0 ? "each token for itself" : `each token for the one ${Math.abs(apart)} ${apart > 0 ? "before" : "after"} it`;
    const none = list.length ? "The code of this pair is 0: nothing is near it." : "This pair is not visible: it has no code.";
    get("about").textContent = norm ? `Cosine of codes, ${same}; a bar marks them in the text.` : none;
    get("nearest").replaceChildren(...found.map(({ i, x }) => item(i, around(i), x, () => choose({ token: i, key: i - apart }))));
    boxes.forEach((box) => box.classList.remove("near"));
    found.forEach(({ i }) => boxes[i].classList.add("near"));
  };

  const symbols = () => {
    const lines = layers[state.layer].groups.filter((group) => group.symbols).flatMap(({ symbols: array }) =>
      Array.from({ length: array.planes }, (_, h) => {
        const first = (h * count + state.key) * array.row;
        const roots = Array.from({ length: array.row }, (_, n) => root(array, first + n));
        const values = roots.map((r) => number(array, r)), top = values.indexOf(Math.max(...values));
        const line = make("div", "strip"), bar = make("i"), step = 100 / array.row;
        bar.style.backgroundImage = `linear-gradient(90deg, ${roots.map((r, n) => `${colour(r)} ${n * step}% ${(n + 1) * step}%`)})`;
        line.dataset.values = JSON.stringify(values);
        line.append(make("span", "", `head ${h + 1}`), bar, make("span", "", `most of ${top + 1}: ${shown(values[top])}`));
        return line;
      }));
    get("symbols").replaceChildren(...lines);
    get("symbolic").hidden = lines.length === 0;
  };

  // ------------------------------------------------------------------------------------------------------------ choices
  const option = (value, text) => new Option(text, value);
  const fill = () => {
    const layer = layers[state.layer], list = [option("rows", "every head, a row each"), option("mean", "the mean over heads")];
    layer.heads.forEach(({ kind }, n) => list.push(option(`head ${n}`, `head ${n + 1}${layer.mixed ? ` (${kind})` : ""}`)));
    layer.relations.forEach((_, n) => list.push(option(`relation ${n}`, `relation ${n + 1}`)));
    get("paint").replaceChildren(...list);
    if (!list.some(({ value }) => value === state.paint)) state.paint = "rows";
    get("paint").value = state.paint;
    get("layer").value = state.layer;
  };
  const legend = () => {
    const list = painted(), layer = layers[state.layer];
    const limit = list.length === 1 ? list[0].array.limit : layer.limit, low = list.some(({ array }) => array.signed) ? -1 : 0;
    const at = Array.from({ length: 9 }, (_, n) => low + ((1 - low) * n) / 8);
    get("scale").style.background = `linear-gradient(90deg, ${at.map(colour)})`;
    [get("low").textContent, get("high").textContent] = [shown(low * limit), shown(limit)];
    get("legend").title = "Colours follow the square root of the number, so that small ones can be seen.";
    get("legend").setAttribute("aria-label", `Colours from ${shown(low * limit)} to ${shown(limit)}: orange above 0, blue below.`);
  };
  const told = () => {
    get("pair").replaceChildren(piece(state.token), ` #${state.token + 1} reads `, piece(state.key), ` #${state.key + 1}`, state.key === state.token ? " (itself)" : "",
      open(layers[state.layer].heads, state.token, state.key).length ? "" : " (not visible in this layer)");
    get("state").textContent = !state.pinned
      ? "Point at a token, or move with the arrow keys; a click or Enter pins it."
      : !state.held
        ? `Token #${state.token + 1} is pinned: point at the token that it reads; a click keeps that, too. Escape lets go.`
        : "Both tokens are pinned. Click another to read instead; Escape lets go.";
  };

  const codes = grid(get("code"), "heads", "head");
  const compared = layers.some((layer) => layer.relations.length) ? grid(get("relations"), "relations", "relation") : () => {};
  get("related").hidden = !layers.some((layer) => layer.relations.length);
  const choose = (change) => {
    Object.assign(state, change);
    if ("layer" in change || "paint" in change) fill();
    [legend, told, paint, codes, compared, symbols, reads, nearest].forEach((draw) => draw());
  };

  // ------------------------------------------------------------------------------------------------- pointing and pinning
  const point = (i) => {
    if (!state.pinned) {
      if (i !== state.token || i !== state.key) choose({ token: i, key: i });
    } else if (!state.held && i !== state.key && sees(state.token, i)) choose({ key: i });
  };
  const pin = (i) => {
    if (!state.pinned) choose({ token: i, key: i, pinned: true });
    else if (i === state.token && (!state.held || state.key !== i)) choose({ key: i, pinned: false, held: false });
    else if (state.held && i === state.key) choose({ held: false });
    else if (sees(state.token, i)) choose({ key: i, held: true });
  };
  const release = () => choose(state.held ? { held: false } : { pinned: false, key: state.token });
  const target = (event) => event.target.closest(".token");
  const line = (box) => box.getBoundingClientRect();
  const beside = (i, way) => {
    // The token of the next line up or down that is nearest sideways.
    const { left, right, top } = line(boxes[i]), middle = (left + right) / 2;
    let row = null, found = i, least = Infinity;
    for (let j = i + way; j >= 0 && j < count; j += way) {
      const box = line(boxes[j]);
      if (Math.abs(box.top - top) < 2) continue;
      if (row === null) row = box.top;
      if (Math.abs(box.top - row) > 2) break;
      const off = Math.abs((box.left + box.right) / 2 - middle);
      if (off < least) [found, least] = [j, off];
    }
    return found;
  };
  const KEYS = {
    ArrowLeft: (i) => Math.max(0, i - 1), ArrowRight: (i) => Math.min(count - 1, i + 1), Home: () => 0, End: () => count - 1,
    ArrowUp: (i) => beside(i, -1), ArrowDown: (i) => beside(i, 1),
  };
  const focus = (i) => {
    boxes.forEach((box, j) => { box.tabIndex = i === j ? 0 : -1; });
    boxes[i].focus();
  };
  get("tokens").addEventListener("mouseover", (event) => target(event) && point(Number(target(event).dataset.token)));
  get("tokens").addEventListener("focusin", (event) => target(event) && point(Number(target(event).dataset.token)));
  get("tokens").addEventListener("click", (event) => target(event) && pin(Number(target(event).dataset.token)));
  get("tokens").addEventListener("keydown", (event) => {
    const box = target(event);
    if (!box || event.ctrlKey || event.metaKey || event.altKey) return;
    const i = Number(box.dataset.token);
    if (event.key in KEYS) focus(KEYS[event.key](i));
    else if (event.key === "Enter" || event.key === " ") pin(i);
    else return;
    event.preventDefault();
  });
  document.addEventListener("keydown", (event) => event.key === "Escape" && state.pinned && release());
  layers.forEach((layer, l) => get("layer").append(option(l, layer.name)));
  get("layer").addEventListener("change", (event) => choose({ layer: Number(event.target.value) }));
  get("paint").addEventListener("change", (event) => choose({ paint: event.target.value }));
  get("scope").addEventListener("change", (event) => choose({ scope: event.target.value }));
  boxes[state.token].tabIndex = 0;
  choose({ layer: layers.length - 1 });
  document.documentElement.dataset.explore = "ready";
})();
