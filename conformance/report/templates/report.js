"use strict";
// Text reaches the page through textContent alone: a name or a detail is never markup.
(() => {
  const $ = (id) => document.getElementById(id);
  const SHOWN = 300;
  const ALL = "all, side by side";
  let cells;

  function make(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }

  async function unpack(id) {
    if (typeof DecompressionStream === "undefined")
      throw new Error("this browser cannot unpack the cases (Chrome 80, Firefox 113 and Safari 16.4 can); report.json has them");
    const bytes = Uint8Array.from(atob($(id).textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  }

  let unpacked = null;
  const cases = () => (unpacked = unpacked || unpack("cases"));
  const said = (error) => { $("message").textContent = error.message; };

  // ---- the matrices

  const operationOf = (table) => table.title.split(" ")[0];
  const FIELDS = 10;

  // Table -> "row,column" -> the ten numbers of the cell; made when a backend is first looked at.
  const index = new Map();
  function cellsOf(backend) {
    if (!index.has(backend)) {
      const found = cells.tables.map(() => new Map());
      const flat = cells.cells[backend];
      for (let i = 0; i < flat.length; i += FIELDS)
        found[flat[i]].set(`${flat[i + 1]},${flat[i + 2]}`, flat.slice(i, i + FIELDS));
      index.set(backend, found);
    }
    return index.get(backend);
  }

  function described(cell) {
    const counts = cell.slice(4);
    const worst = counts.findIndex((n) => n > 0);
    const total = counts.reduce((a, b) => a + b, 0);
    const outcome = cells.outcomes[worst];
    const margin = cell[3] / 1000;
    let label = cells.signs[worst];
    let kind = outcome;
    if (outcome === "conforms") {
      if (margin) label += margin < 0.005 ? " <.01" : " " + margin.toFixed(2).replace(/^0/, "");
      if (total > counts[worst]) label += "*";
      const heat = Math.min(4, Math.floor(margin * 5));
      kind = "conforms" + (heat ? " h" + heat : "");
    } else if (outcome !== "declines") label += ` ${counts[worst]}/${total}`;
    const words = cells.outcomes.map((o, i) => [o, counts[i]]).filter(([, n]) => n).map(([o, n]) => `${o} ${n}`);
    return { label, kind, words: words.join(", ") + (margin ? `; worst error ${margin.toFixed(3)} of what is allowed` : "") };
  }

  function drawTable(table, number, backend) {
    const own = cellsOf(backend)[number];
    if (!own.size) return null;
    const head = make("tr", {}, make("th", { scope: "col" }, table.corner));
    for (const column of table.columns) head.append(make("th", { scope: "col" }, column));
    const body = make("tbody");
    table.rows.forEach((row, r) => {
      const line = make("tr", {}, make("th", { scope: "row" }, row));
      table.columns.forEach((column, c) => {
        const cell = own.get(`${r},${c}`);
        const place = make("td", { class: "cell" });
        if (cell) {
          const { label, kind, words } = described(cell);
          const what = `${cells.backends[backend]}, ${table.title}, ${row} ${column}: ${words}`;
          const button = make("button", { type: "button", class: kind, title: what, "aria-label": what }, label);
          button.addEventListener("click", () => show(backend, number, r, c));
          place.append(button);
        }
        line.append(place);
      });
      body.append(line);
    });
    const drawn = make("div", { class: "wide", tabindex: "0", role: "region", "aria-label": table.title });
    drawn.append(make("table", {}, make("thead", {}, head), body));
    return drawn;
  }

  function draw() {
    const chosen = $("backend").value;
    const backends = chosen === ALL ? cells.backends.map((_, i) => i) : [cells.backends.indexOf(chosen)];
    const operation = $("operation").value;
    const several = backends.length > 1;
    // Of one backend the tables stand beside each other, of several the backends of each table.
    const drawn = make("div", several ? {} : { class: "beside" });
    cells.tables.forEach((table, number) => {
      if (operationOf(table) !== operation) return;
      const blocks = [];
      for (const backend of backends) {
        const matrix = drawTable(table, number, backend);
        if (matrix) blocks.push(make("div", {}, several ? make("h4", {}, cells.backends[backend]) : make("h3", {}, table.title), matrix));
      }
      if (several && blocks.length) drawn.append(make("h3", {}, table.title), make("div", { class: "beside" }, ...blocks));
      else drawn.append(...blocks);
    });
    $("drawn").replaceChildren(...drawn.children.length ? [drawn] : []);
    if (!$("drawn").children.length) $("drawn").textContent = "This backend was not asked for this operation.";
  }

  // ---- the panel

  function quoted(word) {
    return /^[\w@%+=:,.\/-]+$/.test(word) ? word : "'" + word.replace(/'/g, "'\"'\"'") + "'";
  }

  function command(backend, id) {
    const template = cells.commands[backend];
    const at = template.lastIndexOf("CASE");
    const name = cells.checkpoint ? id.replace(/^checkpoint\//, "").replace(/\/[^\/]*$/, "") : id;
    return template.slice(0, at) + quoted(name) + template.slice(at + "CASE".length);
  }

  function entry(list, term, text) {
    if (text) list.append(make("dt", {}, term), make("dd", {}, text));
  }

  const bounds = (distance) => (distance === null ? "far away" : `${Number(distance.toPrecision(3))} bounds away`);

  function describe(data, backend, i) {
    const own = data.verdicts[backend];
    const number = own.case[i];
    const id = data.ids[number];
    const outcome = Number(own.outcome[i]);
    const more = own.more[i] || {};
    const list = make("dl");
    entry(list, "verdict", `${cells.signs[outcome]} ${cells.outcomes[outcome]}`);
    if (own.worst[i] !== null) entry(list, "margin", `worst error ${own.worst[i]} of what is allowed`);
    entry(list, "detail", data.texts[own.detail[i]]);
    entry(list, "explained by", data.texts[own.explained[i]]);
    if (more.diagnosis) {
      const d = more.diagnosis;
      if (d.computes) entry(list, "it computes", `${d.computes} (${d.fault || "no known fault"}), ${bounds(d.distance)}`);
      entry(list, "the right answer", bounds(d.right));
      if (d.runner_up) entry(list, "next best", `${d.runner_up}, ${bounds(d.runner_up_distance)}`);
      if (!data.texts[own.detail[i]].includes(d.pattern)) entry(list, "where", d.pattern);
    }
    if (more.note) entry(list, "note", data.texts[more.note]);
    if (more.kernels) entry(list, "kernels", more.kernels.map((k) => data.texts[k]).join(", ") || "none were launched");
    if (data.cited[number] >= 0) entry(list, "clauses", data.clauses[data.cited[number]]);
    const text = command(backend, id);
    const copy = make("button", { type: "button", class: "action" }, "copy the command");
    copy.addEventListener("click", () => navigator.clipboard.writeText(text).then(
      () => { copy.textContent = "copied"; }, () => { copy.textContent = "select it by hand"; }));
    return [list, make("pre", {}, text), copy];
  }

  let opener = null;
  function close() {
    $("panel").hidden = true;
    if (opener && opener.isConnected) opener.focus();
  }

  async function show(backend, number, row, column, wanted) {
    opener = document.activeElement;
    let data;
    try { data = await cases(); } catch (error) { said(error); return; }
    const own = data.verdicts[backend];
    const found = [];
    own.case.forEach((id, i) => {
      const [t, r, c] = data.places[id];
      if (t === number && r === row && c === column) found.push(i);
    });
    found.sort((a, b) => own.outcome[a] - own.outcome[b] || (own.worst[b] || 0) - (own.worst[a] || 0));
    const at = found.findIndex((i) => own.case[i] === wanted);
    if (at > 0) found.unshift(...found.splice(at, 1));
    const table = cells.tables[number];
    const shut = make("button", { type: "button", class: "action", "aria-label": "close" }, "✕");
    shut.addEventListener("click", close);
    const title = `${cells.backends[backend]}: ${table.title}, ${table.rows[row]} ${table.columns[column]}`;
    const panel = $("panel");
    panel.replaceChildren(make("header", {}, make("h3", {}, title), shut));
    found.slice(0, SHOWN).forEach((i, nth) => {
      const outcome = Number(own.outcome[i]);
      const sign = make("span", { class: `key ${cells.outcomes[outcome]}` }, cells.signs[outcome]);
      const id = data.ids[own.case[i]];
      const details = make("details", {}, make("summary", {}, sign, " ", make("code", {}, id)));
      const fill = () => { if (details.children.length === 1) details.append(...describe(data, backend, i)); };
      details.addEventListener("toggle", fill);
      if (nth === 0) { fill(); details.open = true; }
      panel.append(details);
    });
    if (found.length > SHOWN) panel.append(make("p", {}, `${found.length - SHOWN} more cases of the cell are in report.json.`));
    panel.hidden = false;
    panel.scrollTop = 0;
    panel.focus();
  }

  async function showCase(backend, id) {
    let data;
    try { data = await cases(); } catch (error) { said(error); return; }
    const number = data.ids.indexOf(id);
    if (number >= 0) await show(cells.backends.indexOf(backend), ...data.places[number], number);
  }

  // ---- start

  async function start() {
    cells = await unpack("cells");
    const names = cells.backends.length > 1 ? [...cells.backends, ALL] : cells.backends;
    for (const name of names) $("backend").append(make("option", {}, name));
    for (const name of new Set(cells.tables.map(operationOf))) $("operation").append(make("option", {}, name));
    // What a person looks for first: the layers of a backend that fails, if one does.
    const failing = cells.backends.findIndex((_, b) => cells.cells[b].some((n, i) => i % FIELDS > 3 && i % FIELDS < 7 && n));
    $("backend").selectedIndex = Math.max(failing, 0);
    const layers = [...$("operation").options].findIndex((o) => o.value === "linear");
    $("operation").selectedIndex = Math.max(layers, 0);
    $("backend").addEventListener("change", draw);
    $("operation").addEventListener("change", draw);
    for (const button of document.querySelectorAll("button[data-operation]"))
      button.addEventListener("click", () => {
        $("backend").value = button.dataset.backend;
        $("operation").value = button.dataset.operation;
        draw();
        $("matrices").scrollIntoView();
      });
    for (const button of document.querySelectorAll("button[data-case]"))
      button.addEventListener("click", () => showCase(button.dataset.backend, button.dataset.case));
    document.addEventListener("keydown", (event) => { if (event.key === "Escape" && !$("panel").hidden) close(); });
    draw();
    document.body.dataset.ready = "yes";
  }
  start().catch(said);
})();
