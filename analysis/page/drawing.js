"use strict";
// What chart.js draws with: places in columns, ticks, numbers as text, marks.

// The last index whose x is below the value; -1 where none is.
function before(x, value) {
  let low = 0, high = x.length;
  while (low < high) {
    const middle = low + high >> 1;
    if (x[middle] < value) low = middle + 1; else high = middle;
  }
  return low - 1;
}

// The index whose x is nearest to the value; -1 of nothing.
function nearest(x, value) {
  const i = before(x, value);
  if (i < 0) return x.length ? 0 : -1;
  return i + 1 < x.length && x[i + 1] - value < value - x[i] ? i + 1 : i;
}

// Round values, 1, 2 or 5 times a power of ten apart, about `count` of them.
function ticks(low, high, count) {
  const rough = (high - low) / Math.max(2, count), power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find(factor => factor * power >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high * (1 + 1e-12); i++) {
    found.push(Number((i * step).toPrecision(12)));
  }
  return found;
}

function logTicks(low, high) {
  const decades = Math.log10(high / low);
  if (decades < 0.8) return ticks(low, high, 6).filter(value => value >= low);
  const found = [], each = decades > 4 ? [1] : decades > 2 ? [1, 3] : [1, 2, 5];
  for (let k = Math.floor(Math.log10(low)); k <= Math.log10(high); k++) {
    for (const factor of each) {
      const value = Number((factor * 10 ** k).toPrecision(3));
      if (value >= low && value <= high) found.push(value);
    }
  }
  return found;
}

// On an axis: 1.5M, 200k, 0.003, 2e-5.
function short(value) {
  const size = Math.abs(value);
  if (size >= 1e12) return value.toExponential().replace("e+", "e");
  for (const [unit, letter] of [[1e9, "B"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= unit) return Number((value / (letter === "k" ? 1e3 : unit)).toPrecision(6)) + letter;
  }
  return size && size < 1e-3 ? value.toExponential().replace("e-0", "e-") : String(Number(value.toPrecision(8)));
}

// In full: 9 digits tell any two float32 apart.
function full(value) {
  if (value === undefined || Number.isNaN(value)) return "n/a";
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
  const text = Number.isInteger(value) ? value : Number(value.toPrecision(9));
  return Math.abs(text) >= 10000 ? text.toLocaleString("en", {maximumFractionDigits: 6}) : String(text);
}

function rounded(value, digits) {
  return Number.isFinite(value) ? full(Number(value.toPrecision(digits))) : full(value);
}

function star(pen, x, y, size) {
  for (let i = 0; i < 10; i++) {
    const far = i % 2 ? size * 0.45 : size, turn = i * Math.PI / 5;
    pen.lineTo(x + far * Math.sin(turn), y - far * Math.cos(turn));
  }
  pen.closePath();
}

// The mark of an event, its foot at this place.
function mark(pen, symbol, x, y, colour) {
  pen.fillStyle = pen.strokeStyle = colour;
  pen.lineWidth = 1.6;
  pen.beginPath();
  const shapes = {
    up: [[-4, 0], [4, 0], [0, -8]], right: [[-3, -9], [-3, 0], [5, -4.5]], left: [[3, -9], [3, 0], [-5, -4.5]],
    square: [[-3.5, -7], [3.5, -7], [3.5, 0], [-3.5, 0]], diamond: [[0, -10], [4.5, -5], [0, 0], [-4.5, -5]]};
  if (symbol in shapes) {
    for (const [right, down] of shapes[symbol]) pen.lineTo(x + right, y + down);
    pen.closePath();
    pen.fill();
  } else if (symbol === "ring") {
    pen.arc(x, y - 4.5, 3.5, 0, 7);
    pen.stroke();
  } else {
    for (const way of [-1, 1]) {
      pen.moveTo(x - 3.5 * way, y - 8);
      pen.lineTo(x + 3.5 * way, y - 1);
    }
    pen.stroke();
  }
}

// The mean of the finite values in a window centred on each: smoothed() of curves.py.
function smoothed(values, window) {
  const n = values.length, sums = new Float64Array(n + 1), counts = new Uint32Array(n + 1), means = new Float64Array(n);
  for (let i = 0; i < n; i++) {
    const known = Number.isFinite(values[i]);
    sums[i + 1] = sums[i] + (known ? values[i] : 0);
    counts[i + 1] = counts[i] + known;
  }
  const half = window >> 1;
  for (let i = 0; i < n; i++) {
    const reach = Math.min(half, i), left = i - reach, right = Math.min(i + reach, n - 1) + 1;
    means[i] = (sums[right] - sums[left]) / (counts[right] - counts[left]);
  }
  return means;
}
