// Draws lines on a pen: the context of a canvas, or an SvgPen. A line of more points than pixels is drawn by
// the first, lowest, highest and last of each column of pixels. x never falls; where y is NaN is a gap.

const MARGIN = {left: 62, right: 16, top: 10, bottom: 38};
const DASHES = {solid: [], dashed: [8, 6], dotted: [1, 5], dashdot: [8, 5, 1, 5]};
const DOT = "\u25cf", STAR = "\u2605";  // the validation loss on a subset, and on the full set
const GLYPHS = {up: "\u25b2", right: "\u25ba", left: "\u25c4", cross: "\u00d7", diamond: "\u25c6",
                ring: "\u25cb", square: "\u25a0"};

// ---- ColumnBuilder ----
// Round values, 1, 2 or 5 times a power of ten apart, about `count` of them.
function ticks(low, high, count) {
  const rough = (high - low) / Math.max(2, count), power = 10 ** Math.floor(Math.log10(rough)), places = [];
  const step = power * [1, 2, 5, 10].find(factor => factor * power >= rough * 0.999);
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high * (1 + 1e-12); i++) places.push(i * step + 0);
  return places;
}

function logTicks(low, high) {
  const places = [];
  if (high < 6 * low) return ticks(low, high, 6);
  for (let power = 10 ** Math.floor(Math.log10(low)); power <= high; power *= 10) {
    places.push(...[power, 2 * power, 5 * power].filter(value => value >= low && value <= high));
  }
  return places;
}

// On an axis: 1.5M, 200,000, 0.003, 2E-5.
function short(value) {
  const size = Math.abs(value), isTiny = value && size < 1e-3;
  const notation = isTiny ? "scientific" : size < 1e6 ? "standard" : "compact";
  return value.toLocaleString("en", {notation, maximumSignificantDigits: 6});
}

// In full: 9 digits tell any two float32 apart.
function full(value, digits = 9) {
  if (!Number.isFinite(value)) return {[Infinity]: "inf", [-Infinity]: "-inf"}[value] || "n/a";
  const maximumSignificantDigits = Number.isInteger(value) ? 21 : digits;
  return value.toLocaleString("en", {maximumSignificantDigits, useGrouping: "min2"});
}

// ---- Scales ----
// Pass the lowest and highest value between two indices to `see`; clipped: without those far from others.
function findRange(values, from, to, isKnown, see) {
  const size = view.clip ? Math.max(20, Math.ceil((to - from) / 100)) : 1, hop = Math.ceil(size / 100);
  for (let start = from; start < to; start += size) {
    const near = [];
    const end = Math.min(start + size, to);
    for (let i = start; i < end; i += hop) if (isKnown(values[i])) near.push(values[i]);
    if (!near.length) continue;
    near.sort((a, b) => a - b);
    const at = share => near[Math.round(share * (near.length - 1))], reach = 2 * (at(0.9) - at(0.1));
    see(Math.max(near[0], at(0.5) - reach));
    see(Math.min(near.at(-1), at(0.5) + reach));
  }
}

// The indices of a line's points in view, and one more on either side.
const inside = ({x}, x0, x1) => [Math.max(0, before(x, x0)), Math.min(x.length, before(x, x1) + 2)];

function findYRange({panel, lines, points, isLog}, x0, x1) {
  let low = Infinity, high = -Infinity;
  const isKnown = value => Number.isFinite(value) && (!isLog || value > 0);
  const see = value => {
    if (value < low) low = value;
    if (value > high) high = value;
  };
  for (const line of lines.flatMap(line => view.raw && line.members ? [line, ...line.members] : line)) {
    for (const values of [line.y, line.low, line.high, view.raw && line.raw]) {
      if (values) findRange(values, ...inside(line, x0, x1), isKnown, see);
    }
  }
  for (const {x, y} of points) if (x >= x0 && x <= x1 && isKnown(y)) see(y);
  if (low > high) return [0.1, 1];
  if (isLog) {
    const room = Math.max((high / low) ** 0.04, 1.001);
    return [low / room, high * room];
  }
  if (panel.starts_at_zero && low >= 0) return [0, 1.05 * high || 1];
  const room = (high - low || Math.abs(high) || 1) * 0.05;
  return [low - room, high + room];
}

// From values to pixels, and back.
function findScale(chart) {
  const {width, height, isLog} = chart, [x0, x1] = chooseRange(view.zoom[chart.key], chart.extent);
  const given = view.y[chart.name], canShow = !isLog || given?.[0] > 0;
  const [low, high] = chooseRange(canShow && given, findYRange(chart, x0, x1));
  const wide = width - MARGIN.left - MARGIN.right, bottom = height - MARGIN.bottom;
  const place = isLog ? Math.log : Number, value = isLog ? Math.exp : Number;
  const base = place(low), slope = (bottom - MARGIN.top) / (place(high) - base);
  return {x0, x1, low, high, wide, bottom,
          x: x => MARGIN.left + (x - x0) / (x1 - x0) * wide,
          y: y => bottom - (place(y) - base) * slope,
          toX: pixel => x0 + (pixel - MARGIN.left) / wide * (x1 - x0),
          toY: pixel => value(base + (bottom - pixel) / slope)};
}

// ---- Drawing ----
// chart: panel, key (of x), extent, isLog, lines, points, marks, width, height; `at` becomes its scale.
function draw(pen, chart) {
  const at = chart.at = findScale(chart);
  const isInside = ({x, y}) => x >= at.x0 && x <= at.x1 && !(y < at.low || y > at.high);
  drawGrid(pen, chart);
  pen.save();
  pen.beginPath();
  pen.rect(MARGIN.left, MARGIN.top - 4, at.wide + 1, at.bottom - MARGIN.top + 8);
  pen.clip();
  pen.setLineDash([2, 3]);
  for (const mark of chart.marks) if (mark.is_upright) {
    pen.strokeStyle = findColor(mark.color);
    drawSegment(pen, at.x(mark.x), MARGIN.top, at.x(mark.x), at.bottom);
  }
  for (const line of chart.lines) {
    pen.strokeStyle = pen.fillStyle = findColor(line.color);
    pen.setLineDash([]);
    if (line.low) drawBand(pen, at, line);
    for (const thin of view.raw ? line.members || [line] : []) {
      if (thin.raw || line.members) drawLine(pen, chart, thin, thin.raw || thin.y, 0.8, 0.38);
    }
    pen.setLineDash(DASHES[line.dash]);
    drawLine(pen, chart, line, line.y, 1.9, 1);
  }
  pen.restore();
  pen.setLineDash([]);
  for (const {x, y, glyph, color} of chart.points.filter(isInside)) {
    drawText(pen, glyph, at.x(x), at.y(y), "center", color, glyph === STAR ? 18 : 12);
  }
  for (const mark of chart.marks.filter(isInside)) {
    drawText(pen, GLYPHS[mark.symbol], at.x(mark.x), at.bottom - 5, "center", mark.color);
  }
}

function drawSegment(pen, x0, y0, x1, y1) {
  pen.beginPath();
  pen.moveTo(x0, y0);
  pen.lineTo(x1, y1);
  pen.stroke();
}

function drawText(pen, text, x, y, align, color = "--muted", size = 11.5) {
  const font = `${size}px system-ui, sans-serif`;
  Object.assign(pen, {font, textAlign: align, textBaseline: "middle", fillStyle: findColor(color)});
  pen.fillText(text, x, y);
}

function drawGrid(pen, {at, width, height, isLog, key}) {
  const right = width - MARGIN.right;
  Object.assign(pen, {lineWidth: 1, strokeStyle: findColor("--grid")});
  for (const value of (isLog ? logTicks : ticks)(at.low, at.high, height / 48)) {
    const y = Math.round(at.y(value)) + 0.5;
    drawSegment(pen, MARGIN.left, y, right, y);
    drawText(pen, short(value), MARGIN.left - 7, y, "right");
  }
  pen.strokeStyle = findColor("--muted");
  drawSegment(pen, MARGIN.left, at.bottom + 0.5, right, at.bottom + 0.5);
  for (const value of ticks(at.x0, at.x1, at.wide / 90)) {
    const x = Math.round(at.x(value)) + 0.5;
    drawSegment(pen, x, at.bottom, x, at.bottom + 4);
    drawText(pen, short(value), x, at.bottom + 13, "center");
  }
  drawText(pen, AXES[key], MARGIN.left + at.wide / 2, at.bottom + 28, "center");
}

function drawLine(pen, {at, isLog}, line, ys, lineWidth, alpha) {
  const xs = line.x, [from, to] = inside(line, at.x0, at.x1), isDense = to - from > 4 * at.wide;
  const slope = at.wide / (at.x1 - at.x0);
  const isKnown = value => isLog ? value > 0 && value < Infinity : Math.abs(value) < Infinity;
  let isOpen = false;
  const go = (x, value) => {
    if (!isOpen) pen.moveTo(x, at.y(value));
    pen.lineTo(x, at.y(value));  // also a point alone, as a dot
    isOpen = true;
  };
  Object.assign(pen, {globalAlpha: alpha, lineWidth, lineJoin: "round", lineCap: "round"});
  pen.beginPath();
  for (let i = from; i < to; i++) {
    const first = ys[i];
    if (!isKnown(first)) {
      isOpen = false;
    } else if (!isDense) {
      go(MARGIN.left + (xs[i] - at.x0) * slope, first);
    } else {
      const pixel = Math.floor((xs[i] - at.x0) * slope), end = at.x0 + (pixel + 1) / slope;
      let low = first, high = first, last = first;
      for (; i + 1 < to && xs[i + 1] < end && isKnown(ys[i + 1]); i++) {
        last = ys[i + 1];
        if (last < low) low = last;
        if (last > high) high = last;
      }
      for (const value of [first, low, high, last]) go(MARGIN.left + pixel + 0.5, value);
    }
  }
  pen.stroke();
  pen.globalAlpha = 1;
}

function drawBand(pen, at, {x, low, high}) {
  const [from, to] = inside({x}, at.x0, at.x1), hop = Math.ceil((to - from) / (4 * at.wide)), order = [];
  for (let i = from; i < to; i += hop) if (Number.isFinite(low[i])) order.push(i);
  pen.globalAlpha = 0.2;
  pen.beginPath();
  for (const i of order) pen.lineTo(at.x(x[i]), at.y(high[i]));
  for (const i of order.reverse()) pen.lineTo(at.x(x[i]), at.y(low[i]));
  pen.fill();
  pen.globalAlpha = 1;
}

// What draw() needs of a canvas, as an SVG document.
class SvgPen {
  constructor(width, height) { Object.assign(this, {width, height, parts: [], globalAlpha: 1, dash: ""}); }
  beginPath() { this.path = ""; }
  moveTo(x, y) { this.path += `M${x.toFixed(2)} ${y.toFixed(2)}`; }
  lineTo(x, y) { this.path += `${this.path ? "L" : "M"}${x.toFixed(2)} ${y.toFixed(2)}`; }
  rect(x, y, width, height) { this.path += `M${x} ${y}h${width}v${height}h${-width}z`; }
  fillRect(...sides) { this.beginPath(); this.rect(...sides); this.fill(); }
  add(style) { this.parts.push(`<path d="${this.path}" opacity="${this.globalAlpha}" ${style}/>`); }
  fill() { this.add(`fill="${this.fillStyle}"`); }
  stroke() {
    const dash = `stroke-linecap="round" stroke-dasharray="${this.dash}"`;
    this.add(`fill="none" stroke="${this.strokeStyle}" stroke-width="${this.lineWidth}" ${dash}`);
  }
  setLineDash(dash) { this.dash = dash.join(" "); }
  save() {}
  clip() {
    this.parts.push(`<clipPath id="plot"><path d="${this.path}"/></clipPath><g clip-path="url(#plot)">`);
  }
  restore() { this.parts.push("</g>"); }
  fillText(text, x, y) {
    const anchor = {right: "end", center: "middle", left: "start"}[this.textAlign];
    const place = `x="${x}" y="${y + 0.35 * parseFloat(this.font)}" text-anchor="${anchor}"`;
    const words = text.replace(/[&<>]/g, letter => `&#${letter.charCodeAt(0)};`);
    this.parts.push(`<text ${place} style="font: ${this.font}" fill="${this.fillStyle}">${words}</text>`);
  }
  toString() {
    const size = `width="${this.width}" height="${this.height}"`;
    return `<svg xmlns="http://www.w3.org/2000/svg" ${size}>${this.parts.join("")}</svg>`;
  }
}
