"use strict";
// What analysis/page/column_packing.py packed, to Float64Arrays: {key: values}, NaN where nothing is known.

// The bytes behind a base64 text that is one zlib stream.
async function inflated(text) {
  const packed = atob(text), bytes = new Uint8Array(packed.length);
  for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function unpacked(heads, bytes) {
  const columns = {};
  for (const key of Object.keys(heads)) column(heads, key, bytes, columns);
  return columns;
}

function column(heads, key, bytes, columns) {
  if (columns[key]) return columns[key];
  const head = heads[key], n = head.n, values = new Float64Array(n);
  const words = new Uint32Array(values.buffer);  // pairs, the lower half first
  const other = head.from ? column(heads, head.from, bytes, columns) : null;
  if (head.form === "float64") {
    whole(head, bytes, words);
  } else {
    const pairs = new Uint32Array(2 * n);
    whole(head, bytes, pairs);
    if (head.form === "decimal") {
      const power = 10 ** head.decimals;
      for (let i = 0; i < n; i++) values[i] = ((pairs[2 * i + 1] | 0) * 4294967296 + pairs[2 * i]) / power;
    } else if (head.form === "float32") {
      const bits = new Int32Array(1), single = new Float32Array(bits.buffer);
      for (let i = 0; i < n; i++) {
        bits[0] = pairs[2 * i];
        values[i] = single[0];
      }
    } else {
      tell(head, other, values);
      for (let i = 0; i < n; i++) {
        const low = words[2 * i] + pairs[2 * i];
        words[2 * i] = low;
        words[2 * i + 1] += pairs[2 * i + 1] + (low > 4294967295 ? 1 : 0);
      }
    }
  }
  if (head.gaps !== undefined) {
    for (let i = 0; i < n; i++) if (bytes[head.gaps + (i >> 3)] >> (i & 7) & 1) values[i] = NaN;
  }
  columns[key] = values;
  return values;
}

// Whole numbers of 64 bits into pairs of words: planes of bytes, summed as often as differences were taken.
function whole(head, bytes, words) {
  const n = head.n, width = head.width;
  for (let i = 0; i < n; i++) {
    let low = 0, high = 0;
    for (let plane = 0; plane < width; plane++) {
      const byte = bytes[head.at + plane * n + i];
      if (plane < 4) low |= byte << 8 * plane; else high |= byte << 8 * (plane - 4);
    }
    if (width < 4) low = low << 32 - 8 * width >> 32 - 8 * width;
    if (width < 8) high = low >> 31;
    words[2 * i] = low;
    words[2 * i + 1] = high;
  }
  for (let order = 0; order < head.order; order++) {
    for (let i = 2; i < 2 * n; i += 2) {
      const low = words[i] + words[i - 2];
      words[i] = low;
      words[i + 1] += words[i - 1] + (low > 4294967295 ? 1 : 0);
    }
  }
}

// A column as another one tells it: RULES of column_packing.py.
function tell(head, other, values) {
  let sum = 0;
  for (let i = 0; i < values.length; i++) {
    if (head.form === "sum") {
      if (!Number.isNaN(other[i])) sum += other[i];
      values[i] = sum / head.constant;
    } else {
      values[i] = head.form === "over" ? head.constant / other[i] : other[i] * head.constant;
    }
  }
}
