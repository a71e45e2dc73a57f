// From packed columns and the view to lines {name, x, y, raw, low, high}, which are drawn, shown and saved.

// ---- Columns ----
async function inflate(text) {
  const packed = atob(text), bytes = new Uint8Array(packed.length);
  for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// What pack_columns() of build.py packed, bit for bit.
function unpack({at, n, order}, bytes) {
  const raw = new Uint8Array(8 * n), bits = new BigInt64Array(raw.buffer);
  for (let plane = 0; plane < 8; plane++) {
    const from = at + plane * n;
    for (let i = 0; i < n; i++) raw[8 * i + plane] = bytes[from + i];
  }
  for (; order; order--) for (let i = 1; i < n; i++) bits[i] += bits[i - 1];
  return new Float64Array(raw.buffer);
}

function unpackAll(heads, bytes) {
  return Object.fromEntries(Object.entries(heads).map(([name, head]) => [name, unpack(head, bytes)]));
}

// An axis never falls and has no gaps: a gap has the value before it.
function rising(values) {
  let last = 0;
  return values?.map(value => last = value > last ? value : last);
}

const AXES = {step: "step", tokens: "tokens", minutes: "training time", wall: "time since the first start"};

function openRuns(bytes) {
  for (const run of data.runs) {
    const columns = run.columns = unpackAll(run.columns, bytes), took = i => columns.step_ms?.[i] || 0;
    let sum = 0;  // the inverse of choose_columns() in build.py
    columns.minutes &&= columns.minutes.map((rest, i) => rest + (sum += took(i)) / 60000);
    const divide = (product, i) => product / (took(i) || 1);
    for (const rate of ["tokens_per_s", "mfu"]) columns[rate] &&= columns[rate].map(divide);
    run.samples = unpackAll(run.samples, bytes);
    run.group = data.groups[run.group];
    run.clock = rising(columns.time);
  }
  const isLong = data.runs.some(({clock, started}) => clock && clock.at(-1) - started > 10800);
  const [unit, seconds] = isLong ? ["hours", 3600] : ["minutes", 60];
  for (const key of ["minutes", "wall"]) AXES[key] += ` (${unit})`;
  for (const run of data.runs) {
    const {step, tokens, minutes} = run.columns;
    run.toWall = time => (time - run.started) / seconds;
    run.x = {step: rising(step), tokens: rising(tokens), wall: run.clock?.map(run.toWall),
             minutes: rising(minutes?.map(value => 60 * value / seconds))};
  }
}

// Where samples are on an axis, by the clock.
function placeSamples({clock, samples, x, toWall}, key) {
  const place = time => valueAt(clock, x[key], Math.min(Math.max(time, clock[0]), clock.at(-1)));
  return samples.time.map(key === "wall" ? toWall : place);
}

// ---- Places in a line ----
// The last index whose x is below the value; -1 if there is none.
function before(x, value) {
  let low = 0, high = x.length;
  while (low < high) {
    const middle = low + high >> 1;
    if (x[middle] < value) low = middle + 1; else high = middle;
  }
  return low - 1;
}

function nearest(x, value) {
  const i = Math.max(0, before(x, value));
  return i + 1 < x.length && x[i + 1] - value < value - x[i] ? i + 1 : i;
}

// A line between its points; NaN before the first and after the last one.
function valueAt(x, y, value) {
  const i = before(x, value) + 1;
  if (x[i] === value) return y[i];
  if (i === 0 || i >= x.length) return NaN;
  return y[i - 1] + (y[i] - y[i - 1]) * (value - x[i - 1]) / (x[i] - x[i - 1]);
}

// The index of the last step up to this one; and where a step is on an axis, as read_evals() of summary.py has it.
const indexOf = (run, step) => Math.max(0, before(run.columns.step, step + 0.5));
function placeOf({x, columns}, key, step) {
  const isBefore = step < columns.step[0], share = step / columns.step[0];
  return key === "step" ? step : isBefore ? x[key][0] * share : valueAt(columns.step, x[key], step);
}

// ---- Lines ----
const means = new Map();

// The mean of the finite values in a centered window, which is narrower at the ends: smooth() of summary.py.
function smooth(values, window) {
  const n = values.length, sums = new Float64Array(n + 1), counts = new Uint32Array(n + 1);
  for (let i = 0; i < n; i++) {
    const isKnown = Number.isFinite(values[i]);
    sums[i + 1] = sums[i] + (isKnown ? values[i] : 0);
    counts[i + 1] = counts[i] + isKnown;
  }
  return values.map((_, i) => {
    const reach = Math.min(window >> 1, i), left = i - reach, right = Math.min(i + reach, n - 1) + 1;
    return (sums[right] - sums[left]) / (counts[right] - counts[left]);
  });
}

// A smoothed column; null without smoothing. A loss that its log has as a mean is smoothed on demand only.
function findMean(run, column) {
  const isMean = column === "loss" && run.loss_is, window = Number(view.window) || (isMean ? 1 : run.window);
  if (window < 2) return null;
  const name = [run.name, column, window].join();
  if (!means.has(name)) means.set(name, smooth(run.columns[column], window));
  return means.get(name);
}

// `index` says to which step a point belongs.
function lineOf(run, panel, key) {
  const {columns, samples, name} = run;
  if (panel.kind === "samples") {
    const y = samples[panel.column], [low, high] = [samples[panel.low], samples[panel.high]];
    return y && run.clock && {run, name, x: placeSamples(run, key), y, low, high};
  }
  if (panel.kind === "evals") {
    const evals = run.evals.filter(record => !record.full && Number.isFinite(record[panel.column]));
    return evals.length > 1 && {run, name, index: i => indexOf(run, evals[i].step),
                                x: Float64Array.from(evals, record => placeOf(run, key, record.step)),
                                y: Float64Array.from(evals, record => record[panel.column])};
  }
  const values = columns[panel.column], mean = values && panel.is_smoothed && findMean(run, panel.column);
  return values && {run, name, index: i => i, x: run.x[key], y: mean || values, raw: mean && values};
}

// The mean of runs that differ in their seed, and the lowest and highest, as far as all of them have come.
function average(members) {
  const base = members.reduce((first, line) => line.x.at(-1) < first.x.at(-1) ? line : first), {x} = base;
  const [y, low, high] = [0, 1, 2].map(() => new Float64Array(x.length).fill(NaN));
  for (let i = 0; i < x.length; i++) {
    const values = members.map(line => line === base ? line.y[i] : valueAt(line.x, line.y, x[i]));
    if (!values.every(Number.isFinite)) continue;
    y[i] = values.reduce((sum, value) => sum + value, 0) / values.length;
    low[i] = Math.min(...values);
    high[i] = Math.max(...values);
  }
  return {members, x, y, low, high};
}

function subtract(line, first) {
  const y = line.y.map((value, i) => value - valueAt(first.x, first.y, line.x[i]));
  const {name, color, dash, x, run, index} = line;
  return {name: `${name} minus ${first.name}`, color, dash, x, y, run, index};
}

const findShown = key => data.runs.filter(run => run.x[key] && !view.hidden.includes(run.group.name));

function linesOf(panel, key) {
  const lines = [], runs = findShown(key);
  for (const group of data.groups) {
    const mine = runs.filter(run => run.group === group);
    const members = mine.map(run => lineOf(run, panel, key)).filter(Boolean);
    const color = panel.kind === "evals" && data.validation || group.color;
    if (members.length) lines.push({...group, color, ...(members.length > 1 ? average(members) : members[0])});
  }
  return panel.kind === "difference" ? lines.slice(1).map(line => subtract(line, lines[0])) : lines;
}

// Evaluations: the validation loss on top of the loss, and each result in its own panel.
function pointsOf(panel, key) {
  const column = panel.kind === "evals" ? panel.column : panel.has_evals && "val_loss", points = [];
  for (const run of findShown(key)) for (const {step, full: isFull, [column]: y} of run.evals) {
    const glyph = isFull ? STAR : DOT;
    const words = `validation${isFull ? ", full set" : ""} ${full(y, 6)} (step ${full(step)})`;
    const color = data.validation || run.group.color;
    if (Number.isFinite(y)) points.push({run, glyph, color, y, words, x: placeOf(run, key, step)});
  }
  return points;
}

function marksOf(key) {
  const marks = [];
  for (const run of findShown(key)) for (const {kind, step, words} of run.marks) {
    if (view.hiddenMarks.includes(kind)) continue;
    const place = {x: placeOf(run, key, Math.min(step, run.columns.step.at(-1))), words: `${words} (step ${full(step)})`};
    marks.push({...data.marks[kind], ...place, run});
  }
  return marks;
}
