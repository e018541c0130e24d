// The live page. Everything that comes from the run is set as text, never as HTML.
"use strict";

const POLL_MS = 1500;
const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 400, HEIGHT = 220, LEFT = 52, RIGHT = 10, TOP = 8, BOTTOM = 38;
const COLOURS = 6;
const by = (id) => document.getElementById(id);

let token = location.hash.slice(1);
if (token.length >= 32) {
  sessionStorage.setItem("token", token);
  history.replaceState(null, "", location.pathname + location.search);
} else token = sessionStorage.getItem("token") || "";

const saved = by("saved") && JSON.parse(by("saved").textContent); // a report has its data in itself

const chosen = new URLSearchParams(location.search).get("run"); // of several runs; null: all of them, or the only one

async function ask(path, run = chosen) {
  const one = run === null ? "" : `${path.includes("?") ? "&" : "?"}run=${encodeURIComponent(run)}`;
  const response = await fetch(path + one, { headers: { Authorization: `Bearer ${token}` } });
  const found = await response.json();
  if (!response.ok) throw Object.assign(new Error(found.error || response.statusText), { status: response.status });
  return found;
}

function make(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function draw(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function set(id, text) {
  if (by(id).textContent !== text) by(id).textContent = text;
}

// ---------------------------------------------------------------- numbers

function short(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e15 || size < 1e-4) return value.toExponential(1).replace("e+", "e");
  if (size >= 1e4) {
    const [unit, name] = size >= 1e9 ? [1e9, "G"] : size >= 1e6 ? [1e6, "M"] : [1e3, "k"];
    return `${Number((value / unit).toPrecision(3))}${name}`;
  }
  return String(Number(value.toPrecision(3)));
}

const share = (value) => `${Number((100 * value).toPrecision(3))}%`;

function ago(seconds) {
  const s = Math.max(0, Math.round(seconds));
  return s < 120 ? `${s} s` : s < 7200 ? `${Math.floor(s / 60)} min` : `${Math.floor(s / 3600)} h`;
}

function ticks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}

// ---------------------------------------------------------------- figures

const figures = new Map();
let latest = null;

// A figure of nothing but zeros is as empty as one without points.
function shownFigure(figure) {
  return figure.curves.some((curve) => curve.points[1].some((value) => value !== 0));
}

function scaleOf(figure) {
  const values = figure.curves.flatMap((curve) => [...curve.points[1], ...(curve.interval || []).flat()]);
  const positive = values.filter((value) => value > 0);
  const log = figure.log && positive.length > 0;
  let low = Math.min(...(log ? positive : values)), high = Math.max(...(log ? positive : values));
  if (figure.kind === "accuracy" || figure.kind === "utilisation") [low, high] = [0, 1];
  else if (figure.zero && !log) [low, high] = [Math.min(0, low), Math.max(0, high)];
  if (log) {
    low = Math.floor(Math.log10(low));
    high = Math.max(low + 1, Math.ceil(Math.log10(high)));
    const at = (value) => (Math.log10(Math.max(value, 10 ** low)) - low) / (high - low);
    const every = Math.ceil((high - low) / 5);
    const shown = [];
    for (let p = low; p <= high; p += every) shown.push(10 ** p);
    return { at, ticks: shown, name: (value) => `1e${Math.round(Math.log10(value))}` };
  }
  if (low === high) [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
  const found = ticks(low, high, 4);
  const room = figure.kind === "accuracy" || figure.kind === "utilisation" ? 0 : (high - low) * 0.05;
  const bottom = figure.zero && low === 0 ? 0 : low - room, top = high + room;
  return { at: (value) => (value - bottom) / (top - bottom), ticks: found, name: figure.share ? share : short };
}

function plot(figure, all) {
  const bars = figure.kind === "histogram";
  const xs = figure.curves[0].points[0];
  const first = bars ? -0.6 : 0;
  const last = bars ? Math.max(figure.bound, ...xs) + 0.9 : Math.max(all.end, 1);
  const x = (value) => LEFT + ((value - first) / (last - first)) * (WIDTH - LEFT - RIGHT);
  const scale = scaleOf(figure);
  const y = (value) => TOP + (1 - scale.at(value)) * (HEIGHT - TOP - BOTTOM);
  const svg = draw("svg", { class: "plot", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": figure.title });
  for (const value of scale.ticks) {
    svg.append(draw("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }));
    svg.append(draw("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, scale.name(value)));
  }
  const floor = HEIGHT - BOTTOM;
  svg.append(draw("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: floor, y2: floor }));
  for (const value of ticks(Math.max(first, 0), last, bars ? 8 : 5).filter(Number.isInteger)) {
    svg.append(draw("text", { x: x(value), y: floor + 16, "text-anchor": "middle" }, short(value)));
  }
  svg.append(draw("text", { x: WIDTH - RIGHT, y: HEIGHT - 5, "text-anchor": "end" }, bars ? "versions" : all.x));
  for (const curve of figure.curves) {
    const [px, py] = curve.points;
    if (bars) {
      const wide = Math.max(1, (x(1) - x(0)) * 0.8);
      px.forEach((value, i) =>
        svg.append(draw("rect", { class: "bar", x: x(value) - wide / 2, y: y(py[i]), width: wide, height: floor - y(py[i]), fill: curve.colour })));
      continue;
    }
    if (curve.interval) {
      px.forEach((value, i) =>
        svg.append(draw("line", { class: "interval", stroke: curve.colour, x1: x(value), x2: x(value), y1: y(curve.interval[0][i]), y2: y(curve.interval[1][i]) })));
    }
    const line = px.map((value, i) => `${x(value).toFixed(1)},${y(py[i]).toFixed(1)}`);
    svg.append(draw("polyline", { class: "curve", stroke: curve.colour, "stroke-dasharray": curve.dash || "none", points: line.join(" ") }));
    if (px.length < 15) {
      px.forEach((value, i) => svg.append(draw("circle", { cx: x(value), cy: y(py[i]), r: curve.marked ? 3.5 : 2.5, fill: curve.colour })));
    }
  }
  if (bars) {
    const at = x(figure.bound + 0.5);
    svg.append(draw("line", { stroke: "#ea580c", "stroke-dasharray": "5 4", x1: at, x2: at, y1: TOP, y2: floor }));
  }
  const cursor = draw("line", { class: "cursor", y1: TOP, y2: floor, visibility: "hidden" });
  svg.append(cursor);
  return { svg, x, cursor, invert: (px) => first + ((px - LEFT) / (WIDTH - LEFT - RIGHT)) * (last - first) };
}

function nearest(points, at) {
  let best = -1;
  points[0].forEach((value, i) => {
    if (best < 0 || Math.abs(value - at) < Math.abs(points[0][best] - at)) best = i;
  });
  return best;
}

function legend(figure, at) {
  const items = figure.curves.filter((curve) => curve.points[0].length && !curve.quiet).map((curve) => {
    const i = at === null ? curve.points[0].length - 1 : nearest(curve.points, at);
    const item = make("span", {}, make("i", { className: "swatch" }), curve.label ? `${curve.label} ` : "");
    item.firstChild.style.background = curve.colour;
    item.append(make("b", {}, (figure.share ? share : short)(curve.points[1][i])));
    if (at !== null) item.append(` at ${short(curve.points[0][i])}`);
    return item;
  });
  if (figure.kind === "histogram") {
    const bound = make("span", {}, make("i", { className: "swatch" }), `bound η = ${figure.bound}`);
    bound.firstChild.style.background = "#ea580c";
    return at === null ? [bound] : [...items, bound];
  }
  return items;
}

function showFigure(place, figure, all) {
  const drawn = plot(figure, all);
  const box = make("p", { className: "legend" }, ...legend(figure, null));
  const caption = make("figcaption", {}, figure.title);
  if (figure.unit) caption.append(make("span", { className: "unit" }, ` ${figure.unit}`));
  place.replaceChildren(caption, box, drawn.svg);
  const move = (event) => {
    place.dataset.held = "1";
    const bounds = drawn.svg.getBoundingClientRect();
    const at = drawn.invert(((event.clientX - bounds.left) / bounds.width) * WIDTH);
    const curve = figure.curves.find((c) => c.points[0].length);
    const i = nearest(curve.points, at);
    for (const name of ["x1", "x2"]) drawn.cursor.setAttribute(name, drawn.x(curve.points[0][i]));
    drawn.cursor.setAttribute("visibility", "visible");
    box.replaceChildren(...legend(figure, curve.points[0][i]));
  };
  drawn.svg.addEventListener("pointermove", move);
  drawn.svg.addEventListener("pointerleave", () => {
    delete place.dataset.held;
    drawn.cursor.setAttribute("visibility", "hidden");
    box.replaceChildren(...legend(figure, null));
    showCurves(latest);
  });
}

function showCurves(all) {
  latest = all;
  showTables(all);
  const names = all.sections.filter((section) => section.figures.some(shownFigure)).map((section) => section.title).join("|");
  if (by("figures").dataset.names !== names) {
    by("figures").dataset.names = names;
    by("figures").replaceChildren();
    by("sections").replaceChildren(...(all.tables.length ? [make("a", { href: "#processes-head" }, "Processes")] : []));
    figures.clear();
    all.sections.forEach((section, i) => {
      if (!section.figures.some(shownFigure)) return;
      const head = make("h2", { id: `section-${i}` }, section.title);
      by("figures").append(head, make("p", {}, section.text), make("div", { className: "figures", id: `figures-${i}` }));
      by("sections").append(make("a", { href: `#section-${i}` }, section.title));
    });
    if (evaluations.length) by("sections").append(make("a", { href: "#answers-head" }, "Answers"));
    if (!saved && all.tables.length) by("sections").append(make("a", { href: "#trajectories-head" }, "Trajectories"));
    if (all.tables.length) by("sections").append(make("a", { href: "#tables" }, "Figures of the run"));
  }
  all.sections.forEach((section, i) => {
    const place = by(`figures-${i}`), shown = section.figures.filter(shownFigure);
    if (!place) return;
    shown.forEach((figure, n) => {
      const key = `${i} ${figure.title}`, text = JSON.stringify([figure, all.end]);
      let known = figures.get(key);
      if (!known) {
        known = { place: make("figure", { className: "figure" }), text: "" };
        figures.set(key, known);
      }
      if (place.children[n] !== known.place) place.insertBefore(known.place, place.children[n] || null);
      if (known.text === text || known.place.dataset.held) return;
      known.text = text;
      showFigure(known.place, figure, all);
    });
  });
}

function showTables(all) {
  const shown = all.tables.filter((table) => table.rows.length);
  const cells = (tag, row) => make("tr", {}, ...row.map((cell) => make(tag, {}, cell)));
  by("tables").replaceChildren(...shown.flatMap(({ title, head, rows }) => [
    make("h2", {}, title),
    make("div", { className: "box wide" },
      make("table", { className: "pairs" }, ...(head ? [cells("th", head)] : []), ...rows.map((row) => cells("td", row)))),
  ]));
}

// ---------------------------------------------------------------- overview

const STATES = {
  "not begun": "has not begun", "not started": "not started by a launcher", silent: "waiting for a sign of life",
  lost: "launcher lost",
};

function showOverview(run) {
  const version = run.version, total = run.updates;
  document.title = total ? `${version}/${total} · ${run.name}` : run.name;
  set("name", run.name);
  set("folder", run.folder);
  by("about").replaceChildren(...run.facts.map(([name, value]) => make("span", {}, name ? `${name} ` : "", make("b", {}, value))));
  by("advice").hidden = !run.advice;
  set("advice", `Advice: ${run.advice}`);
  by("state").className = run.state.replace(" ", "-");
  set("state", STATES[run.state] ?? run.state);
  set("phase", run.phase);
  set("version", total ? `${run.mode === "sft" ? "step" : "version"} ${version.toLocaleString("en")} of ${total.toLocaleString("en")}` : "");
  by("done").style.width = total ? `${Math.min(100, (100 * version) / total)}%` : "0";
  const running = run.elapsed_s ? `, ${run.state === "running" ? "running" : "ran"} for ${ago(run.elapsed_s)}` : "";
  const last = saved ? `last update ${new Date(1000 * run.updated).toLocaleString("en-GB")}` : `last update ${ago(run.now - run.updated)} ago`;
  set("updated", run.updated ? `${last}${running}` : "no update yet");
  by("cards").replaceChildren(...run.cards.map(([value, label]) =>
    make("div", { className: "card" }, make("b", {}, value), make("span", {}, label))));
  const numbers = new Set(["version", "requests", "tokens/s"]), { head, rows } = run.processes;
  const minor = (i) => (["node", "slots"].includes(head[i]) ? " minor" : "");
  const kind = (i) => (numbers.has(head[i]) ? "number" : "") + minor(i);
  by("no-processes").hidden = rows.length > 0 || saved;
  by("processes").replaceChildren(...(rows.length ? [
    make("tr", {}, ...head.map((name, i) => make("th", { className: kind(i) }, name))),
    ...rows.map((row) => make("tr", {}, ...row.map((cell, i) => make("td", { className: kind(i) }, cell)))),
  ] : []));
  const slow = run.age_s > 10 ? `The run folder has not answered for ${ago(run.age_s)}: this is what was seen then.` : "";
  complain(run.problem || slow);
}

function complain(text) {
  by("problem").hidden = !text;
  set("problem", text);
}

// ---------------------------------------------------------------- several runs

const RUN_COLOURS = ["#2563eb", "#ea580c", "#0d9488", "#9333ea", "#ca8a04", "#db2777", "#65a30d", "#0891b2"];
const DASHES = ["", "6 3", "2 3", "9 3 2 3", "1 5", "12 4"]; // of the curves of a figure
const NAMES = ["", "dashed", "dotted", "dash-dotted", "sparsely dotted", "long dashes"];
const drawn = new Map(); // a run that is drawn → its colour, and its curves of a revision
let offered = false, listedRuns = "";

function addRun(name) {
  const used = new Set([...drawn.values()].map((run) => run.colour));
  const colour = RUN_COLOURS.find((one) => !used.has(one));
  if (colour) drawn.set(name, { colour, revision: null, curves: null });
}

async function showRuns(all) {
  document.body.classList.add("several");
  by("runs").hidden = false;
  document.title = `${all.runs.length} runs`;
  set("name", `${all.runs.length} runs`);
  set("folder", all.folder);
  if (!offered) all.runs.slice(0, RUN_COLOURS.length).forEach((run) => addRun(run.name));
  offered = true;
  for (const name of [...drawn.keys()]) if (!all.runs.some((run) => run.name === name)) drawn.delete(name);
  listRuns(all);
  complain(all.problem || (all.age_s > 10 ? `The run folders have not answered for ${ago(all.age_s)}.` : ""));
  await Promise.all(all.runs.map(async ({ name, revision }) => {
    const run = drawn.get(name);
    if (!run || run.revision === revision || revision < 0) return;
    [run.curves, run.revision] = [saved ? saved.curves[name] : await ask("api/curves", name), revision];
  }));
  showCurves(overlaid());
}

function listRuns(all) {
  const text = JSON.stringify([all.runs, [...drawn.keys()]]);
  if (text === listedRuns) return;
  listedRuns = text;
  const names = ["drawn", "run", "state", "update", "reward", "held-out accuracy", "last update"];
  const kind = (i) => ([3, 4].includes(i) ? "number" : "");
  const lines = all.runs.map((run) => {
    const box = make("input", { type: "checkbox", checked: drawn.has(run.name), ariaLabel: `draw ${run.name}` });
    box.disabled = !box.checked && drawn.size === RUN_COLOURS.length;
    box.addEventListener("change", () => {
      if (box.checked) addRun(run.name);
      else drawn.delete(run.name);
      showRuns(all).catch(failed);
    });
    const swatch = make("i", { className: "swatch", hidden: !drawn.has(run.name) });
    swatch.style.background = drawn.get(run.name)?.colour ?? "";
    const link = saved ? run.name : make("a", { href: `?run=${encodeURIComponent(run.name)}#${token}` }, run.name);
    const state = `${STATES[run.state] ?? run.state}${run.phase ? ` · ${run.phase}` : ""}`;
    const cells = [state, run.updates ? `${run.version} of ${run.updates}` : "", run.reward || "", run.accuracy || "",
      run.updated ? new Date(1000 * run.updated).toLocaleString("en-GB") : ""];
    return make("tr", {}, make("td", {}, box, swatch), make("td", {}, link),
      ...cells.map((cell, i) => make("td", { className: kind(i + 2) }, cell)));
  });
  by("all-runs").replaceChildren(make("tr", {}, ...names.map((name, i) => make("th", { className: kind(i) }, name))), ...lines);
}

// Figures of the same title in one: a colour for each run, a kind of line for each of its curves.
function overlaid() {
  const runs = [...drawn].filter(([, run]) => run.curves?.sections), sections = new Map();
  for (const [name, { colour, curves }] of runs) {
    for (const section of curves.sections) {
      if (!sections.has(section.title)) sections.set(section.title, { ...section, figures: new Map() });
      const figures = sections.get(section.title).figures;
      for (const figure of section.figures.filter(({ kind }) => kind !== "histogram")) {
        const known = figures.get(figure.title) ?? { ...figure, curves: [], lines: new Map() };
        figures.set(figure.title, known);
        figure.curves.forEach((curve) => {
          if (!known.lines.has(curve.label)) known.lines.set(curve.label, known.lines.size);
          const line = known.lines.get(curve.label) % DASHES.length;
          const quiet = known.curves.some(({ label, points }) => label === name && points[0].length); // in the legend
          known.curves.push({ points: curve.points, marked: curve.marked, colour, label: name, dash: DASHES[line], quiet });
        });
      }
    }
  }
  const unit = ({ unit, lines }) => {
    const kinds = [...lines].map(([label, i]) => [label, NAMES[i % NAMES.length]]).filter(([label]) => label);
    const said = kinds.length > 1 ? kinds.map(([label, kind]) => (kind ? `${label} ${kind}` : label)).join(", ") : "";
    return [unit, said].filter(Boolean).join("; ");
  };
  return {
    x: [...new Set(runs.map(([, run]) => run.curves.x))].join(" or "),
    end: Math.max(1, ...runs.map(([, run]) => run.curves.end)),
    tables: [],
    sections: [...sections.values()].map((section) => ({
      ...section,
      figures: [...section.figures.values()].map(({ lines, ...figure }) => ({ ...figure, unit: unit({ unit: figure.unit, lines }) })),
    })),
  };
}

if (chosen !== null) {
  by("all").href = `./#${token}`;
  by("back").hidden = false;
}

// ---------------------------------------------------------------- answers at each evaluation

let evaluations = [], evaluated = null; // the version that is chosen; null: the newest

function showAnswers(all) {
  evaluations = all.evaluations;
  if (by("evaluated").hidden !== !evaluations.length) delete by("figures").dataset.names; // the links to sections
  by("evaluated").hidden = !evaluations.length;
  by("evaluation").replaceChildren(...evaluations.map(({ version, accuracy }) =>
    make("option", { value: version }, `version ${version}${typeof accuracy === "number" ? `: ${share(accuracy)} right` : ""}`)));
  showEvaluation();
}

function showEvaluation() {
  const found = evaluations.findIndex(({ version }) => version === evaluated);
  const at = found < 0 ? evaluations.length - 1 : found;
  if (at < 0) return;
  by("evaluation").selectedIndex = at;
  by("earlier").disabled = at === 0;
  by("later").disabled = at === evaluations.length - 1;
  const names = ["prompt", "right answer", "answer", "score"];
  by("answers").replaceChildren(
    make("tr", {}, ...names.map((name, i) => make("th", { className: i === 3 ? "number" : "" }, name))),
    ...evaluations[at].rows.map(({ cells, correct, truncated }) => make("tr", {}, ...cells.map((cell, i) => {
      const text = i < 3 ? cell : `${cell === null ? "unknown" : short(cell)}${truncated ? " cut" : ""}`;
      const made = make("td", { className: i < 3 ? "" : `number ${correct ? "right" : "wrong"}` }, make("div", {}, text));
      made.dataset.name = names[i];
      return made;
    }))));
}

function choose(at) {
  evaluated = at === evaluations.length - 1 ? null : evaluations[at].version;
  showEvaluation();
}

by("evaluation").addEventListener("change", () => choose(by("evaluation").selectedIndex));
by("earlier").addEventListener("click", () => choose(by("evaluation").selectedIndex - 1));
by("later").addEventListener("click", () => choose(by("evaluation").selectedIndex + 1));

// ---------------------------------------------------------------- trajectories

// A batch may be large: it is asked for only while somebody looks at it.
let stale = true, inView = false, ofOne = false; // whether it is known that the page is that of one run
new IntersectionObserver(([entry]) => {
  inView = entry.isIntersecting;
  renewBatch().catch(failed);
}).observe(by("browser"));

async function renewBatch() {
  if (!ofOne || !inView || document.hidden || (!stale && listed !== null)) return;
  stale = false;
  if (listed === null || (place.batch === null && place.from === 0)) await showBatch();
}

let place = { batch: null, from: 0, only: "" }, listed = null, opened = null;

async function showBatch() {
  const query = new URLSearchParams({ from: place.from, only: place.only });
  if (place.batch !== null) query.set("batch", place.batch);
  let found = await ask(`api/trajectories?${query}`);
  if (found.note) {
    set("batch-of", found.note);
    found = null;
  }
  listed = found;
  by("batches").hidden = !found;
  by("pages").hidden = !found || found.found <= found.rows.length;
  if (!found) return by("rows").replaceChildren();
  by("older").disabled = found.older === null;
  by("newer").disabled = by("newest").disabled = found.newer === null;
  if (document.activeElement !== by("batch")) by("batch").value = found.batch;
  set("batch-of", `trained to version ${found.version + 1}: ${found.found.toLocaleString("en")} trajectories${found.newer === null ? ", the newest batch" : ""}`);
  const end = found.from + found.rows.length;
  set("page", `${found.from + 1}–${end} of ${found.found}`);
  by("before").disabled = found.from === 0;
  by("after").disabled = end >= found.found;
  const names = ["uid", "prompt", "reward", "tokens", "staleness", "versions", "answer"];
  const kind = (i) => ([1, 6].includes(i) ? "said" : "number") + ([0, 4, 5].includes(i) ? " minor" : "");
  const head = make("tr", {}, ...names.map((name, i) => make("th", { className: kind(i) }, name)));
  by("rows").replaceChildren(head, ...found.rows.map((row) => {
    const cells = [row.uid, row.start || `${row.epoch}:${row.row}`, reward(row), `${row.tokens.toLocaleString("en")}${row.truncated ? " cut" : ""}`,
      row.staleness, versions(row), row.excerpt || "(empty)"];
    const line = entry(cells.map((cell, i) => make("td", { className: kind(i) }, String(cell))), () => showTrajectory(found.batch, row.index).catch(failed));
    line.cells[1].title = `row ${row.row}, epoch ${row.epoch}`;
    line.cells[2].classList.add(row.correct ? "right" : "wrong");
    return line;
  }));
}

const EPISODE = ["", "returns", "number", "number", "said"];

function entry(cells, open) {
  const line = make("tr", { className: "entry", tabIndex: 0 }, ...cells);
  line.addEventListener("click", open);
  line.addEventListener("keydown", (event) => event.key === "Enter" && open());
  return line;
}

const versions = ({ versions: [low, high] }) => (low === high ? low : `${low}–${high}`);
const reward = (row) => (row.reward === null ? "unknown" : short(row.reward));

async function showTrajectory(batch, index, from = 0) {
  const found = await ask(`api/trajectory?${new URLSearchParams({ batch, index, from })}`);
  if (found.note) return complain(found.note);
  opened = { batch, index, next: found.next };
  set("trajectory-of", `Trajectory ${found.uid}`);
  by("episode").hidden = found.episode.length < 2;
  by("samples").replaceChildren(
    make("tr", {}, ...["sample", "return", "tokens", "versions", "answer"].map((name, i) => make("th", { className: EPISODE[i] }, name))),
    ...found.episode.map((row) => {
      const cells = [row.uid, row.returns.length ? row.returns.map(short).join(", ") : reward(row), row.tokens.toLocaleString("en"), versions(row), row.excerpt || "(empty)"];
      const line = entry(cells.map((cell, i) => make("td", { className: EPISODE[i] }, String(cell))), () => showTrajectory(batch, row.index).catch(failed));
      line.ariaLevel = row.depth + 1;
      line.ariaCurrent = row.index === index;
      line.cells[0].style.paddingLeft = `${16 * row.depth}px`;
      return line;
    }));
  set("figures-of", `prompt ${found.epoch}:${found.row} · reward ${reward(found)} · ${found.correct ? "right" : "not right"}` +
    ` · ${found.tokens.toLocaleString("en")} tokens${found.truncated ? ", cut off" : ""} · staleness ${found.staleness} · trained to version ${found.trained + 1}`);
  set("prompt", found.prompt);
  set("prompt-rest", found.prompt_shown < found.prompt_tokens ? `the first ${found.prompt_shown} of ${found.prompt_tokens} tokens` : "");
  by("versions").replaceChildren(...found.by_version.map(([version, count]) =>
    make("span", { className: `v${version % COLOURS}` }, `■ version ${version}: ${count.toLocaleString("en")} trained`)));
  const parts = found.parts.map(([version, trained, text]) =>
    make("span", { className: `v${version % COLOURS}${trained ? "" : " untrained"}`, title: `version ${version}` }, text));
  if (from) by("answer").append(...parts);
  else by("answer").replaceChildren(...parts);
  by("more").hidden = found.next === null;
  if (!from) {
    by("trajectory").hidden = false;
    by("trajectory-of").focus({ preventScroll: true });
    by("trajectory").scrollIntoView({ block: "start", behavior: "smooth" });
  }
}

function go(change) {
  place = { ...place, ...change };
  showBatch().catch(failed);
}

by("older").addEventListener("click", () => go({ batch: listed.older, from: 0 }));
by("newer").addEventListener("click", () => go({ batch: listed.newer, from: 0 }));
by("newest").addEventListener("click", () => go({ batch: null, from: 0 }));
by("batch").addEventListener("change", () => {
  const wanted = by("batch").value.trim();
  if (/^\d{1,9}$/.test(wanted)) go({ batch: Number(wanted), from: 0 });
});
by("only").addEventListener("change", () => go({ only: by("only").value, from: 0 }));
by("before").addEventListener("click", () => go({ batch: listed.batch, from: Math.max(0, listed.from - listed.size) }));
by("after").addEventListener("click", () => go({ batch: listed.batch, from: listed.from + listed.rows.length }));
by("close").addEventListener("click", () => { by("trajectory").hidden = true; });
by("more").addEventListener("click", () => opened.next !== null && showTrajectory(opened.batch, opened.index, opened.next).catch(failed));

// ---------------------------------------------------------------- loop

function failed(error) {
  if (error.status === 401) {
    set("state", "closed");
    complain("This page needs its token: open the whole address that areal status printed, with what follows the #.");
  } else complain(error.status ? error.message : "The server of this page does not answer. Is areal status --web still running?");
}

let revision = -1, answers = -1, timer = null;

async function look() {
  clearTimeout(timer);
  if (saved) {
    by("trained").hidden = true;
    if (saved.overview.runs) return showRuns(saved.overview);
    showOverview(saved.overview);
    showAnswers(saved.answers);
    return showCurves(saved.curves);
  }
  try {
    const run = await ask("api/overview");
    if (run.runs) await showRuns(run);
    ofOne = "revision" in run;
    if (run.state) showOverview(run); // it has none before the first look at a slow file server
    if (run.state && run.answers !== answers) {
      const found = await ask("api/answers");
      showAnswers(found);
      answers = found.revision;
    }
    if (run.state && run.revision !== revision) {
      if (run.revision >= 0) showCurves(await ask("api/curves"));
      revision = run.revision;
      stale = true;
    }
    await renewBatch();
  } catch (error) {
    failed(error);
    if (error.status === 401) return;
  }
  timer = setTimeout(look, document.hidden ? 10 * POLL_MS : POLL_MS);
}

document.addEventListener("visibilitychange", () => !document.hidden && look());
addEventListener("hashchange", () => location.hash.length > 32 && location.reload());
look();
