"use strict";
// One diagram on a canvas: lines, points and events over x; drag to zoom, hover for the exact values.
//
// A line of more points than pixels is drawn by the first, lowest, highest and last of each column of pixels, taken
// anew from all points at every zoom. x never falls; y is NaN where nothing is known, and the line has a gap there.

const MARGIN = {left: 62, right: 16, top: 8, bottom: 38};
const REACH = 7;       // pixels, within which a point or an event counts as under the pointer
const CUT = 0.05;      // of x, which does not count for y where the steep beginning is cut
const FEW = 60;        // points in view, up to which each is marked
const DASHES = {solid: [], dash: [8, 5], dot: [2, 3], dashdot: [8, 3, 2, 3]};

class Chart {
  // spec: title, unit, zero (y begins at 0), digits of hovered means
  constructor(place, spec, page) {
    this.spec = spec;
    this.page = page;
    this.range = null;  // [from, to] of x; null for all
    this.lines = [];
    this.box = document.createElement("section");
    this.box.className = "panel";
    this.box.tabIndex = 0;
    this.box.setAttribute("aria-label", spec.title);
    this.box.innerHTML = '<h2></h2><div class="plot"><canvas></canvas><canvas></canvas></div>'
      + '<div class="tip" hidden></div>';
    this.box.querySelector("h2").textContent = spec.title;
    [this.canvas, this.over] = this.box.querySelectorAll("canvas");
    this.tip = this.box.querySelector(".tip");
    place.append(this.box);
    this.over.addEventListener("pointerdown", event => this.press(event));
    this.over.addEventListener("pointermove", event => this.move(event));
    this.over.addEventListener("pointerup", event => this.release(event));
    this.over.addEventListener("pointerleave", () => this.page.point(this, null));
    this.over.addEventListener("dblclick", () => this.page.zoom(this, null));
    this.box.addEventListener("keydown", event => this.key(event));
  }

  // lines: {x, y, mean, isMean, low, high, name, colour, dash}; points: {x, y, words, colour, full};
  // events: {x, words, symbol, colour, upright}.
  // axis: {key, title, extent}, extent being [from, to] of all runs shown.
  show(lines, points, events, axis, log) {
    Object.assign(this, {lines, points, events, axis, log});
    this.box.hidden = !lines.length && !points.length;
    this.draw();
  }

  // -------------------------------------------------------------------------------------------------
  // Scales
  // -------------------------------------------------------------------------------------------------

  scale() {
    const [x0, x1] = this.range || this.axis.extent;
    let low = Infinity, high = -Infinity;
    const start = this.page.cut && this.spec.loss && !this.range ? x0 + CUT * (x1 - x0) : x0;
    const see = value => {
      if (!Number.isFinite(value) || (this.log && value <= 0)) return;
      if (value < low) low = value;
      if (value > high) high = value;
    };
    for (const line of this.lines) {
      const [from, to] = this.inside(line, start, x1);
      const shown = [line.low, line.high, this.page.raw || !line.mean ? line.y : null, line.mean];
      for (const values of shown) if (values) for (let i = from; i < to; i++) see(values[i]);
    }
    for (const point of this.points) if (point.x >= start && point.x <= x1) see(point.y);
    if (low > high) [low, high] = this.log ? [0.1, 1] : [0, 1];
    if (this.log) {
      const room = Math.max(Math.log(high / low) * 0.04, 1e-6);
      [low, high] = [low * Math.exp(-room), high * Math.exp(room)];
    } else {
      if (this.spec.zero && low > 0) low = 0;
      const room = (high - low || Math.abs(high) || 1) * 0.05;
      high += room;
      if (!(this.spec.zero && low === 0)) low -= room;
    }
    const place = value => this.log ? Math.log(value) : value;
    const bottom = place(low), slope = (this.height - MARGIN.top - MARGIN.bottom) / (place(high) - bottom);
    const width = this.width - MARGIN.left - MARGIN.right;
    this.at = {
      x0, x1, low, high, width,
      x: value => MARGIN.left + (value - x0) / (x1 - x0) * width,
      y: value => this.height - MARGIN.bottom - (place(value) - bottom) * slope,
      back: pixel => x0 + (pixel - MARGIN.left) / width * (x1 - x0)};
  }

  // The points of a line in view, and one beyond on either side.
  inside(line, x0, x1) {
    return [Math.max(0, before(line.x, x0)), Math.min(line.x.length, before(line.x, x1) + 2)];
  }

  // -------------------------------------------------------------------------------------------------
  // Drawing
  // -------------------------------------------------------------------------------------------------

  draw() {
    if (this.box.hidden) return;
    const ratio = window.devicePixelRatio || 1;
    this.width = this.over.parentElement.clientWidth;
    this.height = this.over.parentElement.clientHeight;
    if (!this.width) return;
    for (const canvas of [this.canvas, this.over]) {
      canvas.width = this.width * ratio;
      canvas.height = this.height * ratio;
      canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    }
    this.css = getComputedStyle(document.documentElement);
    this.scale();
    const pen = this.canvas.getContext("2d");
    this.grid(pen);
    pen.save();
    pen.beginPath();
    pen.rect(MARGIN.left, MARGIN.top - 4, this.at.width + 1, this.height - MARGIN.top - MARGIN.bottom + 8);
    pen.clip();
    this.upright(pen);
    this.inView = 0;
    for (const line of this.lines) {
      const [from, to] = this.inside(line, this.at.x0, this.at.x1), few = to - from <= FEW;
      this.inView += to - from;
      if (line.low) this.band(pen, line, from, to);
      const bare = !line.mean || line.isMean;
      if (this.page.raw || bare) {
        this.stroke(pen, line, line.y, from, to, bare ? 1.7 : 0.8, bare ? 1 : 0.38, bare && !line.isMean, few);
      }
      if (line.mean && !line.isMean) this.stroke(pen, line, line.mean, from, to, 1.9, 1, true, false);
    }
    pen.restore();
    for (const point of this.points) if (point.x >= this.at.x0 && point.x <= this.at.x1) this.dot(pen, point);
    this.edge(pen);
    this.box.dataset.inView = this.inView;
    this.box.dataset.range = `${this.at.x0},${this.at.x1}`;
  }

  colour(name) {
    return name.startsWith("--") ? this.css.getPropertyValue(name).trim() : name;
  }

  grid(pen) {
    const {at, axis} = this, bottom = this.height - MARGIN.bottom;
    pen.clearRect(0, 0, this.width, this.height);
    pen.font = "11.5px system-ui, sans-serif";
    pen.strokeStyle = this.colour("--grid");
    pen.fillStyle = this.colour("--muted");
    pen.lineWidth = 1;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    const marks = this.log ? logTicks(at.low, at.high) : ticks(at.low, at.high, this.height / 48);
    for (const value of marks) {
      const y = Math.round(at.y(value)) + 0.5;
      pen.beginPath();
      pen.moveTo(MARGIN.left, y);
      pen.lineTo(this.width - MARGIN.right, y);
      pen.stroke();
      pen.fillText(short(value), MARGIN.left - 7, y);
    }
    pen.textAlign = "center";
    pen.textBaseline = "top";
    for (const value of ticks(at.x0, at.x1, at.width / 90)) {
      const x = Math.round(at.x(value)) + 0.5;
      pen.beginPath();
      pen.moveTo(x, bottom);
      pen.lineTo(x, bottom + 4);
      pen.stroke();
      pen.fillText(short(value), x, bottom + 7);
    }
    pen.fillText(axis.title, MARGIN.left + at.width / 2, bottom + 22);
  }

  // The lower edge with the events on it, which lie on all else.
  edge(pen) {
    const bottom = this.height - MARGIN.bottom + 0.5;
    pen.strokeStyle = this.colour("--muted");
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(MARGIN.left, bottom);
    pen.lineTo(this.width - MARGIN.right, bottom);
    pen.stroke();
    for (const event of this.events) {
      const x = this.at.x(event.x);
      if (x < MARGIN.left - 1 || x > this.width - MARGIN.right + 1) continue;
      mark(pen, event.symbol, x, bottom - 1, this.colour(event.colour));
    }
  }

  upright(pen) {
    pen.lineWidth = 1;
    pen.setLineDash([2, 3]);
    for (const event of this.events) if (event.upright) {
      pen.strokeStyle = this.colour(event.colour);
      pen.beginPath();
      pen.moveTo(this.at.x(event.x), MARGIN.top);
      pen.lineTo(this.at.x(event.x), this.height - MARGIN.bottom);
      pen.stroke();
    }
    pen.setLineDash([]);
  }

  stroke(pen, line, y, from, to, width, alpha, dashed, few) {
    const {at} = this, log = this.log;
    pen.strokeStyle = pen.fillStyle = this.colour(line.colour);
    pen.globalAlpha = alpha;
    pen.lineWidth = width;
    pen.lineJoin = "round";
    pen.setLineDash(dashed ? DASHES[line.dash] : []);
    pen.beginPath();
    let open = false, i = from;
    const go = (x, value) => {
      if (open) pen.lineTo(x, at.y(value)); else pen.moveTo(x, at.y(value));
      open = true;
    };
    const thin = to - from > 4 * at.width;
    const xs = line.x, left = MARGIN.left, slope = at.width / (at.x1 - at.x0);
    while (i < to) {
      const first = y[i];
      if (!(log ? first > 0 && first < Infinity : Math.abs(first) < Infinity)) {
        open = false;
        i++;
        continue;
      }
      if (!thin) {
        go(left + (xs[i] - at.x0) * slope, first);
        i++;
        continue;
      }
      const pixel = Math.floor((xs[i] - at.x0) * slope), end = at.x0 + (pixel + 1) / slope;
      let low = first, high = first, last = first;
      for (i++; i < to && xs[i] < end; i++) {
        const value = y[i];
        if (!(log ? value > 0 && value < Infinity : Math.abs(value) < Infinity)) break;
        if (value < low) low = value;
        if (value > high) high = value;
        last = value;
      }
      const x = left + pixel + 0.5;
      go(x, first);
      if (low < first) go(x, low);
      if (high > low) go(x, high);
      if (last !== high) go(x, last);
    }
    pen.stroke();
    if (few) for (i = from; i < to; i++) if (Number.isFinite(y[i]) && !(log && y[i] <= 0)) {
      pen.beginPath();
      pen.arc(at.x(xs[i]), at.y(y[i]), 2.2, 0, 7);
      pen.fill();
    }
    pen.globalAlpha = 1;
    pen.setLineDash([]);
  }

  // From the lowest to the highest of each stretch.
  band(pen, line, from, to) {
    const go = (x, value) => {
      if (!Number.isNaN(value)) pen.lineTo(this.at.x(x), this.at.y(value));
    };
    pen.fillStyle = this.colour(line.colour);
    pen.globalAlpha = 0.2;
    pen.beginPath();
    for (let i = from; i < to; i++) go(line.x[i], line.high[i]);
    for (let i = to - 1; i >= from; i--) go(line.x[i], line.low[i]);
    pen.fill();
    pen.globalAlpha = 1;
  }

  dot(pen, point) {
    const x = this.at.x(point.x), y = this.at.y(point.y);
    if (y < MARGIN.top - 6 || y > this.height - MARGIN.bottom) return;
    pen.fillStyle = this.colour(point.colour);
    pen.strokeStyle = this.colour("--ink");
    pen.lineWidth = 1;
    pen.beginPath();
    if (point.full) star(pen, x, y, 8); else pen.arc(x, y, 4, 0, 7);
    pen.fill();
    pen.stroke();
  }

  // -------------------------------------------------------------------------------------------------
  // Pointer and keys
  // -------------------------------------------------------------------------------------------------

  press(event) {
    this.from = event.offsetX;
    this.over.setPointerCapture(event.pointerId);
  }

  move(event) {
    this.page.point(this, event.offsetX);
    if (this.from !== undefined && Math.abs(event.offsetX - this.from) > 4) {
      const pen = this.over.getContext("2d");
      pen.fillStyle = this.colour("--ink");
      pen.globalAlpha = 0.12;
      pen.fillRect(this.from, MARGIN.top, event.offsetX - this.from, this.height - MARGIN.top - MARGIN.bottom);
      pen.globalAlpha = 1;
    }
  }

  release(event) {
    const from = this.from;
    this.from = undefined;
    if (from === undefined || Math.abs(event.offsetX - from) <= 4) return;
    const ends = [this.at.back(from), this.at.back(event.offsetX)].sort((a, b) => a - b);
    const [first, last] = this.axis.extent;
    this.page.zoom(this, [Math.max(ends[0], first), Math.min(ends[1], last)]);
  }

  // Left and right go from point to point, + and - zoom, 0 and Escape show all.
  key(event) {
    const {x0, x1} = this.at, middle = this.cursor === undefined ? (x0 + x1) / 2 : this.at.back(this.cursor);
    const zoom = factor => this.page.zoom(this, [middle - (middle - x0) * factor, middle + (x1 - middle) * factor]);
    const line = this.lines[0];
    if (event.key === "+") zoom(0.5);
    else if (event.key === "-") zoom(2);
    else if (event.key === "0" || event.key === "Escape") this.page.zoom(this, null);
    else if ((event.key === "ArrowLeft" || event.key === "ArrowRight") && line) {
      const i = nearest(line.x, middle) + (event.key === "ArrowLeft" ? -1 : 1);
      if (i >= 0 && i < line.x.length) this.page.point(this, this.at.x(line.x[i]));
    } else return;
    event.preventDefault();
  }
}
