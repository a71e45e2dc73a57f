// Builds the charts, the legend and the table, and lets pointer, touch and keys change the view.

const REACH = 7, ROWS = 10, charts = [];  // how many pixels are under the pointer; how many lines a tip has

const findColor = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function element(name, properties, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

// ---- Charts ----
function addChart(panel) {
  const canvas = element("canvas", {role: "img"}), tip = element("div", {className: "tip", role: "status"});
  const chart = {panel, canvas, tip, heading: element("h2"), name: `${panel.title} ${panel.x}`};
  const buttons = ["CSV", "PNG", "SVG"].map(format => element("button",
    {textContent: format, title: `Save this chart as ${format}`, onclick: () => save(chart, format)}));
  chart.over = element("canvas", {
    onpointerdown: event => (chart.from = [event.offsetX, event.offsetY], move(chart, event)),
    onpointermove: event => move(chart, event), onpointerup: event => release(chart, event),
    onpointercancel: () => chart.from = null,
    onpointerleave: event => event.pointerType === "mouse" && point(chart, null), ondblclick: showAll});
  chart.box = element("figure", {className: "panel", tabIndex: 0, onkeydown: event => pressKey(chart, event)},
    chart.heading, element("div", {className: "save"}, ...buttons),
    element("div", {className: "plot"}, chart.canvas, chart.over), chart.tip);
  $("panels").append(chart.box);
  charts.push(chart);
}

// From the first to the last x of all; from 0 if they begin near it.
function findExtent(lines) {
  const low = Math.min(...lines.map(line => line.x[0])), high = Math.max(...lines.map(line => line.x.at(-1)));
  if (!(low < high)) return [low - 0.5, low + 0.5];
  return [low > 0 && low < 0.1 * high ? 0 : low, high];
}

const system = matchMedia("(prefers-color-scheme: dark)");

// Redraw everything as the view has it.
function show(theme = view.theme || (system.matches ? "dark" : "light")) {
  document.documentElement.dataset.theme = theme;
  showControls();
  const other = view.x === "minutes" ? "step" : "minutes";  // one chart of the loss is always over time
  for (const chart of charts) {
    const {panel} = chart, key = chart.key = panel.x === "step" ? view.x : other;
    chart.lines = linesOf(panel, key);
    chart.box.hidden = !chart.lines.length;
    chart.points = pointsOf(panel, key);
    chart.marks = marksOf(key);
    chart.isLog = panel.is_log || (view.log && panel.title.includes("nats") && panel.kind !== "difference");
    chart.heading.textContent = `${panel.title} by ${AXES[key].split(" (")[0]}`;
  }
  for (const chart of charts) {
    chart.extent = findExtent(charts.flatMap(other => other.key === chart.key ? other.lines : []));
    drawChart(chart);
  }
  showTable();
}

function drawChart(chart) {
  if (chart.box.hidden) return;
  const ratio = devicePixelRatio, {clientWidth: width, clientHeight: height} = chart.over.parentElement;
  Object.assign(chart, {width, height});
  for (const canvas of [chart.canvas, chart.over]) {
    Object.assign(canvas, {width: width * ratio, height: height * ratio});
    canvas.getContext("2d").scale(ratio, ratio);
  }
  chart.tip.hidden = true;
  draw(chart.canvas.getContext("2d"), chart);
  chart.canvas.ariaLabel = describe(chart);
}

function describe({heading, key, lines, at}) {
  const parts = lines.map(({name, x, y}) => {
    const ends = [y.findIndex(Number.isFinite), y.findLastIndex(Number.isFinite)];
    return `${name}: ${ends.map(i => `${full(y[i], 5)} at ${full(x[i], 6)}`).join(" to ")}`;
  });
  const range = `${AXES[key]} from ${full(at.x0, 6)} to ${full(at.x1, 6)}`;
  return `${heading.textContent}. ${range}. ${parts.join("; ")}.`;
}

// ---- Pointer and keys ----
// Zoom, but not past the ends of the data. range: null to leave x as it is.
function zoom(chart, range, yRange) {
  const [first, last] = chart.extent, changes = {zoom: {...view.zoom}, y: {...view.y}};
  if (range) changes.zoom[chart.key] = [Math.max(range[0], first), Math.min(range[1], last)];
  if (yRange) changes.y[chart.name] = yRange;
  update(changes);
}

// The selected pixels: [from, to] in x, or null; and the same in y.
function findSelection({from}, {offsetX, offsetY}) {
  const sides = from ? [[from[0], offsetX], [from[1], offsetY]] : [];
  return sides.map(([a, b], i) => Math.abs(b - a) > (i ? 24 : 6) ? [Math.min(a, b), Math.max(a, b)] : null);
}

function move(chart, event) {
  if (event.buttons) chart.over.setPointerCapture(event.pointerId);
  point(chart, event.offsetX, event.offsetY);
  const [x, y] = findSelection(chart, event), {at} = chart, pen = chart.over.getContext("2d");
  const [left, right] = x || [MARGIN.left, MARGIN.left + at.wide];
  const [top, bottom] = y || [MARGIN.top, at.bottom];
  Object.assign(pen, {fillStyle: findColor("--ink"), globalAlpha: 0.12});
  if (x || y) pen.fillRect(left, top, right - left, bottom - top);
  pen.globalAlpha = 1;
}

function release(chart, event) {
  const [x, y] = findSelection(chart, event);
  chart.from = null;
  if (x || y) zoom(chart, x && x.map(chart.at.toX), y && y.map(chart.at.toY).reverse());
}

function pressKey(chart, event) {
  const {at, lines} = chart, middle = chart.cursor ?? (at.x0 + at.x1) / 2;
  const scale = (factor, center, ...ends) => ends.map(end => center + (end - center) * factor);
  const zoomX = factor => zoom(chart, scale(factor, middle, at.x0, at.x1));
  const zoomY = factor => zoom(chart, null, scale(factor, at.bottom / 2, at.bottom, MARGIN.top).map(at.toY));
  const {x} = lines[0], walk = by => point(chart, at.x(x[nearest(x, middle) + by] ?? middle));
  const actions = {"+": () => zoomX(0.5), "-": () => zoomX(2), "0": showAll, Escape: showAll,
                   ArrowUp: () => zoomY(0.5), ArrowDown: () => zoomY(2),
                   ArrowLeft: () => walk(-1), ArrowRight: () => walk(1)};
  if (!actions[event.key] || event.target !== chart.box) return;
  event.preventDefault();
  actions[event.key]();
}

// The pointer is at this pixel of a chart (null: nowhere). All charts over the same axis show where that is.
function point(chart, pixel, pixelY = 0) {
  const value = pixel === null ? NaN : chart.at.toX(pixel);
  for (const other of charts) if (!other.box.hidden) {
    const pen = other.over.getContext("2d"), {at} = other;
    pen.clearRect(0, 0, other.width, other.height);
    other.tip.hidden = true;
    other.cursor = null;
    if (other.key !== chart.key || !(value >= at.x0 && value <= at.x1)) continue;
    other.cursor = value;
    pen.strokeStyle = findColor("--muted");
    const x = Math.round(at.x(value)) + 0.5;
    drawSegment(pen, x, MARGIN.top, x, at.bottom);
    if (other === chart) showTip(chart, pen, value, pixelY);
  }
}

// Where a point is, in all that is known of it.
function describePlace({run, index, x}, key, i) {
  if (!index) return `${AXES[key]} ${full(x[i], 6)}`;
  const {step, tokens, minutes} = run.columns, k = index(i), parts = [`step ${full(step[k])}`];
  if (tokens && !several) parts.push(`${full(tokens[k])} tokens`);
  if (minutes && !several) parts.push(`${minutes[k].toFixed(2)} min`);
  return parts.join(" \u00b7 ");
}

function describeValue({run, members, y, raw, low, high, index, name}, panel, i) {
  const value = (raw || y)[i], lost = panel.column === "loss" && run && run.columns.not_finite;
  const isLost = lost && lost[index(i)] && Number.isNaN(value);
  const parts = [element("b", {textContent: isLost ? "not finite" : full(value, members ? 6 : 9)})];
  if (raw) parts.push(` mean ${full(y[i], 6)}`);
  const count = members ? `, ${members.length} runs` : "";
  if (low) parts.push(` (${full(low[i], 5)} to ${full(high[i], 5)}${count})`);
  if (several) parts.push(element("small", {textContent: ` ${name}`}));
  return parts;
}

function showTip(chart, pen, value, pixelY) {
  const {at, lines, key, panel, tip, points, marks} = chart, places = new Set(), items = [];
  const distance = line => Math.abs(at.y(line.y[nearest(line.x, value)]) - pixelY);
  for (const line of lines.toSorted((a, b) => distance(a) - distance(b))) {
    const i = nearest(line.x, value), x = at.x(line.x[i]), y = at.y(line.y[i]), color = findColor(line.color);
    if (!(Math.abs(x - at.x(value)) <= Math.max(REACH, 0.03 * at.wide))) continue;
    places.add(describePlace(line, key, i));
    const swatch = element("i", {style: `background: ${color}`});
    items.push(element("div", {}, swatch, ...describeValue(line, panel, i)));
    pen.fillStyle = color;
    pen.beginPath();
    pen.arc(x, y, 3.5, 0, 7);
    pen.fill();
  }
  for (const {x, words, run} of [...points, ...marks]) {
    const textContent = several ? `${words}, ${run.name}` : words;
    if (Math.abs(at.x(x) - at.x(value)) <= REACH) items.push(element("div", {textContent}));
  }
  if (!items.length) return;
  const hidden = items.splice(ROWS).length;
  if (hidden) items.push(element("div", {textContent: `and ${hidden} more`}));
  tip.replaceChildren(element("header", {textContent: [...places].slice(0, 3).join("; ")}), ...items);
  tip.hidden = false;
  const right = at.x(value) + 14, width = tip.offsetWidth;
  tip.style.left = `${Math.max(0, right + width > chart.width ? right - width - 28 : right)}px`;
}

// ---- Files ----
// The chart as it is shown, with its title and the names of the lines.
function drawFile(pen, chart, width, height) {
  const legend = [{name: chart.heading.textContent}, ...(several ? chart.lines : [])];
  const bottom = height - 20 * legend.length;
  pen.fillStyle = findColor("--raised");
  pen.fillRect(0, 0, width, height);
  draw(pen, {...chart, width, height: bottom});
  legend.forEach((line, i) => {
    const y = bottom + 20 * i + 8;
    pen.strokeStyle = findColor(line.color || "--raised");
    pen.setLineDash(DASHES[line.dash || "solid"]);
    drawSegment(pen, MARGIN.left, y, MARGIN.left + 34, y);
    drawText(pen, line.name, MARGIN.left + (i ? 44 : 0), y, "left", "--ink", 13);
  });
}

// What is in view, as recorded.
function writeCsv({lines, key, at}) {
  const rows = [["run", AXES[key], "value", "smoothed", "lowest", "highest"]];
  for (const {name, x, y, raw, low, high} of lines) for (let i = 0; i < x.length; i++) {
    if (x[i] < at.x0 || x[i] > at.x1) continue;
    const quoted = `"${name.replaceAll('"', '""')}"`;
    rows.push([quoted, x[i], (raw || y)[i], raw ? y[i] : "", low ? low[i] : "", high ? high[i] : ""]);
  }
  return rows.map(row => `${row.map(cell => Number.isNaN(cell) ? "" : cell).join()}\n`).join("");
}

async function save(chart, format) {
  const width = 900, height = 500 + 20 * chart.lines.length, pen = new SvgPen(width, height);
  let file = new Blob([writeCsv(chart)]);
  if (format === "SVG") {
    drawFile(pen, chart, width, height);
    file = new Blob([pen.toString()], {type: "image/svg+xml"});
  } else if (format === "PNG") {
    const canvas = new OffscreenCanvas(2 * width, 2 * height), context = canvas.getContext("2d");
    context.scale(2, 2);
    drawFile(context, chart, width, height);
    file = await canvas.convertToBlob();
  }
  const name = chart.heading.textContent.replace(/ \(.*?\)/, "").replaceAll(" ", "_").toLowerCase();
  element("a", {href: URL.createObjectURL(file), download: `${name}.${format.toLowerCase()}`}).click();
}

// ---- Legend and table ----
function addToggle(place, list, value, ...words) {
  const box = element("input", {type: "checkbox", value});
  box.dataset.view = list;
  $(place).append(element("label", {}, box, ...words));
}

function drawSample(color, dash, lineWidth = 2.5) {
  const pen = Object.assign(new SvgPen(34, 14), {strokeStyle: `var(${color})`, lineWidth});
  pen.setLineDash(DASHES[dash]);
  drawSegment(pen, 2, 7, 32, 7);
  return element("span", {innerHTML: pen.toString()});
}

// What lines and points are. Those of several runs have the color of their run.
function addKey() {
  const isFull = isWanted => data.runs.some(({evals}) => evals.some(({full}) => Boolean(full) === isWanted));
  const color = several ? "--muted" : data.groups[0].color, points = data.validation || color;
  const add = (icon, words) => $("key").append(element("label", {}, icon, words));
  add(drawSample(color, "solid"), "training, smoothed");
  add(drawSample(color, "solid", 0.8), "training, each step");
  for (const [glyph, words, isWanted] of [[DOT, "subset", false], [STAR, "full set", true]]) {
    const icon = element("span", {textContent: glyph, style: `color: var(${points})`});
    if (isFull(isWanted)) add(icon, `validation, ${words}`);
  }
}

function addLegend() {
  $("groups").parentElement.hidden = !several;
  for (const {color, dash, name} of data.groups) addToggle("groups", "hidden", name, drawSample(color, dash), name);
  addKey();
  for (const [kind, {symbol, color, name, meaning}] of Object.entries(data.marks)) {
    const icon = element("span", {textContent: GLYPHS[symbol], style: `color: var(${color})`});
    addToggle("marks", "hiddenMarks", kind, icon, name, element("small", {textContent: meaning}));
  }
  for (const heading of document.querySelectorAll("#runs th")) {
    const {textContent} = heading, button = element("button", {value: textContent, textContent});
    button.dataset.view = "sort";
    heading.replaceChildren(button);
  }
}

const matches = text => text.toLowerCase().includes(view.search.toLowerCase());
// Show or hide all groups that the search finds.
function setShown(isShown) {
  const names = data.groups.map(group => group.name), others = names.filter(name => !matches(name));
  update({hidden: names.filter(name => others.includes(name) ? view.hidden.includes(name) : !isShown)});
}

// The number that a cell begins with: 1.5M is a million and a half, and 1:02:03 a time in seconds.
const readNumber = text => {
  const numbers = text.replaceAll(",", "").split(":").map(parseFloat);
  return numbers.reduce((a, b) => 60 * a + b) * ({M: 1e6, B: 1e9, T: 1e12}[text.at(-1)] || 1);
};

function showTable() {
  for (const label of $("groups").children) label.hidden = !matches(label.textContent);
  const body = $("runs").tBodies[0], rows = body ? [...body.rows] : [], isDown = view.sort.startsWith("-");
  const headings = [...document.querySelectorAll("#runs th")], name = isDown ? view.sort.slice(1) : view.sort;
  const column = headings.findIndex(heading => heading.textContent === name);
  for (const row of rows) row.hidden = !matches(row.textContent);
  headings.forEach((heading, i) => heading.ariaSort = i === column ? "other" : "none");
  if (column < 0) return;
  rows.sort((a, b) => {
    const [first, second] = [a, b].map(row => row.cells[column].textContent);
    return readNumber(first) - readNumber(second) || first.localeCompare(second);
  });
  body.append(...(isDown ? rows.reverse() : rows));
}

// ---- Start ----
readAddress();
inflate($("numbers").textContent).then(bytes => {
  openRuns(bytes);
  for (const option of $("axis").options) option.disabled = !data.runs.some(run => run.x[option.value]);
  addLegend();
  document.documentElement.dataset.ready = "yes";
  data.panels.forEach(addChart);
  show();
  document.addEventListener("input", ({target}) => target.dataset.view && change(target));
  document.addEventListener("click", ({target}) => target.matches("button[data-view]") && change(target));
  $("whole").onclick = showAll;
  for (const name of ["all", "none"]) $(name).onclick = () => setShown(name === "all");
  addEventListener("hashchange", () => (readAddress(), show()));
  addEventListener("resize", () => charts.forEach(drawChart));
  addEventListener("beforeprint", () => show("light"));
  addEventListener("afterprint", () => show());
  system.addEventListener("change", () => show());
}).catch(error => {
  $("trouble").hidden = false;
  $("trouble").textContent = `The curves need a browser of 2024 or later (${error}).`;
});
