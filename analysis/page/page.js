"use strict";
// The page: runs unpacked, one chart for each panel, the switches above them. compare.js sets runs side by side.

const WINDOWS = [0, 5, 11, 25, 51, 101, 251, 501, 1001, 2501];  // steps, of the smoothing; 0 for none
const data = JSON.parse(document.getElementById("data").textContent);
const $ = name => document.getElementById(name);
const page = {
  axis: "step", log: false, raw: true, cut: false, window: null, kinds: new Set(Object.keys(data.marks)), charts: [],
  ranges: {}, runs: data.runs, means: new Map(), axes: {},

  // A chart's zoom is that of all charts over the same x. range: null for all.
  zoom(chart, range) {
    if (range && !(range[1] > range[0])) return;
    this.ranges[chart.axis.key] = range;
    for (const other of this.charts) if (other.axis.key === chart.axis.key) {
      other.range = range;
      other.draw();
    }
    this.point(chart, null);
    $("whole").disabled = !Object.values(this.ranges).some(Boolean);
  },

  // The pointer is over a chart, at this pixel; null: over none.
  point(chart, pixel) {
    const value = pixel === null || !chart.at ? null : chart.at.back(pixel);
    for (const other of this.charts) if (!other.box.hidden && other.at) {
      const pen = other.over.getContext("2d"), same = other.axis.key === chart.axis.key;
      pen.clearRect(0, 0, other.width, other.height);
      other.tip.hidden = true;
      other.cursor = undefined;
      if (value === null || !same || value < other.at.x0 || value > other.at.x1) continue;
      other.cursor = other.at.x(value);
      pen.strokeStyle = other.colour("--muted");
      pen.beginPath();
      pen.moveTo(other.cursor, MARGIN.top);
      pen.lineTo(other.cursor, other.height - MARGIN.bottom);
      pen.stroke();
      if (other === chart) hover(chart, pen, value);
    }
  }};

// ---------------------------------------------------------------------------------------------------
// Numbers
// ---------------------------------------------------------------------------------------------------

// What never falls and has no gap: a gap has the value before it. null where nothing is known.
function rising(values) {
  if (!values) return null;
  const made = new Float64Array(values.length);
  let last = 0;
  for (let i = 0; i < made.length; i++) made[i] = last = values[i] > last ? values[i] : last;
  return made;
}

function scaled(values, factor, zero) {
  return values && values.map(value => (value - zero) * factor);
}

function prepare(bytes) {
  for (const run of page.runs) {
    run.columns = unpacked(run.heads, bytes);
    run.samples = run.sampled ? unpacked(run.sampled.heads, bytes) : null;
  }
  const longest = values => Math.max(0, ...page.runs.map(run => values(run) || 0));
  const end = column => column ? column[column.length - 1] : 0;
  const hours = longest(run => end(rising(run.columns.minutes))) > 180;
  const wall = longest(run => end(rising(run.columns.time)) - run.started);
  const [unit, seconds] = wall > 2 * 86400 ? ["days", 86400] : wall > 10800 ? ["hours", 3600] : ["minutes", 60];
  page.axes = {
    step: {key: "step", title: "step"}, tokens: {key: "tokens", title: "tokens"},
    minutes: {key: "minutes", title: `training time (${hours ? "hours" : "minutes"})`},
    wall: {key: "wall", title: `time since the first start (${unit})`}};
  for (const run of page.runs) {
    const {step, tokens, minutes, time} = run.columns, clock = rising(time);
    run.x = {step: rising(step), tokens: rising(tokens), minutes: scaled(rising(minutes), hours ? 1 / 60 : 1, 0),
             wall: scaled(clock, 1 / seconds, run.started)};
    if (run.samples && clock) {
      run.sampleX = Object.fromEntries(Object.entries(run.x).map(([key, x]) => [key, key === "wall" || !x
        ? scaled(run.samples.time, 1 / seconds, run.started) : run.samples.time.map(at => between(clock, x, at))]));
    }
  }
}

// x where a rising clock shows this.
function between(clock, x, at) {
  const i = before(clock, at);
  if (i < 0) return x[0];
  if (i + 1 >= clock.length) return x[i];
  return x[i] + (x[i + 1] - x[i]) * (at - clock[i]) / (clock[i + 1] - clock[i]);
}

function mean(run, key) {
  const window = page.window === null ? run.window : WINDOWS[page.window], name = `${run.id} ${key} ${window}`;
  if (!page.means.has(name)) page.means.set(name, window ? smoothed(run.columns[key], window) : null);
  return page.means.get(name);
}

const isMean = (run, key) => key === "loss" && Boolean(run.loss_is);

// The smoothed loss, or the loss where it is a mean already.
const lossLine = run => (isMean(run, "loss") ? null : mean(run, "loss")) || run.columns.loss;

// The index of the last point up to a step.
const at = (run, step) => Math.max(0, before(run.columns.step, step + 0.5));

// ---------------------------------------------------------------------------------------------------
// Panels
// ---------------------------------------------------------------------------------------------------

function build() {
  for (const panel of data.panels) page.charts.push(Object.assign(new Chart($("panels"), panel, page), {panel}));
  for (const run of page.runs) run.shown = true;
  redraw();
}

function redraw() {
  for (const chart of page.charts) {
    const {panel} = chart, other = page.axis === "minutes" ? "step" : "minutes";
    const axis = page.axes[panel.over === "other" ? other : page.axis];
    const shown = page.runs.filter(run => run.shown && run.x[axis.key]);
    axis.extent = extent(shown.map(run => run.x[axis.key]));
    const over = panel.over ? ` by ${axis.title.split(" (")[0]}` : "";
    chart.box.querySelector("h2").textContent = panel.title + over;
    chart.range = page.ranges[axis.key] || null;
    const lines = shown.flatMap(run => linesOf(run, panel, axis.key));
    const points = panel.evals ? shown.flatMap(run => pointsOf(run, axis.key, panel.kind ? panel.y : "val_loss")) : [];
    const events = lines.length ? shown.flatMap(run => eventsOf(run, axis.key)) : [];
    chart.show(lines, points, events, axis, panel.loss ? page.log : panel.log);
  }
  compare();
}

// From the first to the last x of all; from 0 where they begin near it.
function extent(columns) {
  const low = Math.min(...columns.map(x => x[0])), high = Math.max(...columns.map(x => x[x.length - 1]));
  if (!(low < high)) return Number.isFinite(low) ? [low - 0.5, low + 0.5] : [0, 1];
  return [low < 0.1 * high ? Math.min(0, low) : low, high];
}

function linesOf(run, panel, key) {
  const base = {run, colour: run.colour, dash: run.dash, name: run.name};
  if (panel.kind === "samples") {
    const found = run.samples && run.sampleX ? panel.parts.filter(part => run.samples[part.y]) : [];
    return found.map((part, i) => ({...base, sampled: true, x: run.sampleX[key], y: run.samples[part.y],
      low: run.samples[part.low], high: run.samples[part.high], name: `${run.name}${part.name ? `, ${part.name}` : ""}`,
      dash: i ? "dot" : run.dash}));
  }
  if (panel.kind === "difference") return differenceOf(run, key, base);
  if (panel.kind === "evals") {
    const evals = run.evals.filter(e => !e.full && e[panel.y] !== null);
    if (evals.length < 2) return [];
    return [{...base, x: Float64Array.from(evals, e => run.x[key][at(run, e.step)]), evals,
      y: Float64Array.from(evals, e => e[panel.y])}];
  }
  if (!run.columns[panel.y]) return [];
  return [{...base, x: run.x[key], y: run.columns[panel.y], isMean: isMean(run, panel.y),
    nan: panel.y === "loss" ? run.columns.loss_nan : null,
    mean: panel.smooth && !isMean(run, panel.y) ? mean(run, panel.y) : null}];
}

function pointsOf(run, key, of) {
  return run.evals.filter(e => e[of] !== null).map(e => ({run, x: run.x[key][at(run, e.step)], y: e[of], full: e.full,
    colour: run.colour, words: `${e.full ? "validation, full set" : "validation"} `
      + [[e.val_loss, ""], [e.val_bpb, " bpb"], [e.core, " CORE"], [e.core_partial, " core_partial"]]
        .filter(pair => pair[0] !== null).map(pair => full(pair[0]) + pair[1])
        .join(", ")
      + ` at step ${full(e.step)}`}));
}

function eventsOf(run, key) {
  return run.events.filter(event => page.kinds.has(event.kind)).map(event => ({
    ...data.marks[event.kind], x: run.x[key][at(run, event.step)], run,
    words: `${event.words} (step ${full(event.step)})`}));
}

// ---------------------------------------------------------------------------------------------------
// Hover
// ---------------------------------------------------------------------------------------------------

function element(name, text, style) {
  const made = document.createElement(name);
  made.textContent = text;
  Object.assign(made.style, style || {});
  return made;
}

function hover(chart, pen, value) {
  const rows = [], near = item => Math.abs(chart.at.x(item.x) - chart.at.x(value)) <= REACH;
  const head = new Set();
  for (const line of chart.lines) {
    const i = nearest(line.x, value);
    if (i < 0 || Math.abs(chart.at.x(line.x[i]) - chart.at.x(value)) > Math.max(REACH, 0.03 * chart.at.width)) continue;
    head.add(where(line, i));
    const row = element("div", "", {}), y = line.y[i];
    const colour = chart.colour(line.colour);
    row.append(element("i", "", {background: colour}), element("b", line.nan && line.nan[i] ? line.run.nan : full(y)));
    if (line.mean && !line.isMean) row.append(` mean ${rounded(line.mean[i], 6)}`);
    if (line.low) row.append(` (${rounded(line.low[i], 5)} to ${rounded(line.high[i], 5)})`);
    if (page.runs.length > 1 || line.name !== line.run.name) row.append(element("small", ` ${line.name}`));
    row.className = "value";
    rows.push(row);
    if (Number.isFinite(y) && !(chart.log && y <= 0)) {
      pen.fillStyle = colour;
      pen.beginPath();
      pen.arc(chart.at.x(line.x[i]), chart.at.y(y), 3.5, 0, 7);
      pen.fill();
    }
  }
  const marked = new Map();
  for (const item of [...chart.points, ...chart.events]) if (near(item)) {
    const words = page.runs.length > 1 ? `${item.words}, ${item.run.name}` : item.words;
    marked.set(words, (marked.get(words) || 0) + 1);
  }
  for (const words of [...marked.keys()].slice(0, 6)) rows.push(element("div", words));
  if (marked.size > 6) rows.push(element("div", `and ${marked.size - 6} more: zoom in`));
  if (!rows.length) return;
  chart.tip.replaceChildren(...[...head].slice(0, 8).map(text => element("header", text)), ...rows);
  chart.tip.hidden = false;
  const left = chart.at.x(value), width = chart.tip.offsetWidth;
  chart.tip.style.left = `${Math.max(0, left + 14 + width > chart.width ? left - width - 14 : left + 14)}px`;
}

// Where a point lies, in all that is known of it.
function where(line, i) {
  if (line.sampled) {
    return new Date(line.run.samples.time[i] * 1000).toISOString().slice(0, 19).replace("T", " ") + " UTC";
  }
  const {step, tokens, minutes} = line.run.columns;
  const k = line.evals ? at(line.run, line.evals[i].step) : i;
  return [`step ${full(line.evals ? line.evals[i].step : step[k])}`, ...(tokens ? [`${full(tokens[k])} tokens`] : []),
    ...(minutes ? [minutes[k] < 180 ? `${minutes[k].toFixed(2)} min` : `${(minutes[k] / 60).toFixed(3)} h`] : [])]
    .join(" · ");
}

// ---------------------------------------------------------------------------------------------------
// Switches
// ---------------------------------------------------------------------------------------------------

function switches() {
  for (const option of [...$("axis").options]) {
    if (!page.runs.some(run => run.x[option.value])) option.disabled = true;
  }
  $("axis").addEventListener("change", () => {
    page.axis = $("axis").value;
    redraw();
  });
  for (const name of ["log", "cut", "raw"]) $(name).addEventListener("change", () => {
    page[name] = $(name).checked;
    redraw();
  });
  $("smooth").max = WINDOWS.length - 1;
  $("smooth").value = Math.max(0, WINDOWS.findIndex(window => window >= page.runs[0].window));
  const said = () => {
    const own = [...new Set(page.runs.map(run => run.window))].join(", ");
    const steps = page.window === null ? own : WINDOWS[page.window];
    $("window").textContent = steps ? `${steps} steps` : "off";
  };
  said();
  $("smooth").addEventListener("input", () => {
    page.window = Number($("smooth").value);
    page.means.clear();
    said();
    redraw();
  });
  $("whole").addEventListener("click", () => {
    page.ranges = {};
    $("whole").disabled = true;
    redraw();
  });
  $("theme").addEventListener("click", () => {
    const now = document.documentElement.dataset.theme || (dark.matches ? "dark" : "light");
    document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
    redraw();
  });
  for (const box of document.querySelectorAll(".shown")) box.addEventListener("change", () => {
    page.runs[box.value].shown = box.checked;
    redraw();
  });
  legend();
}

// A box for each kind of event that a run has, with its mark and what it is.
function legend() {
  const present = Object.keys(data.marks).filter(kind => page.runs.some(run => run.events.some(e => e.kind === kind)));
  for (const kind of present) {
    const label = element("label", ""), box = document.createElement("input"), icon = document.createElement("canvas");
    Object.assign(box, {type: "checkbox", checked: true, value: kind, className: "kind"});
    Object.assign(icon, {width: 32, height: 32, className: "icon"});
    const count = page.runs.reduce((sum, run) => sum + run.events.filter(e => e.kind === kind).length, 0);
    label.append(box, icon, ` ${data.marks[kind].name} (${full(count)})`);
    label.append(element("small", ` ${data.marks[kind].means}`));
    $("events").append(label);
    box.addEventListener("change", () => {
      page.kinds[box.checked ? "add" : "delete"](kind);
      redraw();
    });
  }
}

function icons() {
  const css = getComputedStyle(document.documentElement);
  for (const icon of document.querySelectorAll(".icon")) {
    const pen = icon.getContext("2d"), {symbol, colour} = data.marks[icon.previousSibling.value];
    pen.setTransform(2, 0, 0, 2, 0, 0);
    pen.clearRect(0, 0, 16, 16);
    mark(pen, symbol, 8, 13, css.getPropertyValue(colour).trim());
  }
}

// ---------------------------------------------------------------------------------------------------
// Beginning
// ---------------------------------------------------------------------------------------------------

const dark = matchMedia("(prefers-color-scheme: dark)");
const seen = () => {
  icons();
  for (const chart of page.charts) chart.draw();
};
inflated($("numbers").textContent).then(bytes => {
  prepare(bytes);
  switches();
  comparison();
  build();
  icons();
  dark.addEventListener("change", seen);
  $("theme").addEventListener("click", icons);
  addEventListener("resize", seen);
  document.documentElement.dataset.ready = "yes";
}).catch(error => {
  $("trouble").hidden = false;
  $("trouble").textContent = `These curves need a browser of 2023 or newer (${error}).`;
});
