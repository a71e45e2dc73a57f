"use strict";
// Runs side by side at equal step, tokens or time: the loss and how far it is from the first run's.

const AT = ["step", "tokens", "minutes", "wall"];

function comparison() {
  if (page.runs.length < 2) return;
  $("compare").hidden = false;
  $("equal").addEventListener("change", () => {
    $("place").value = "";
    compare();
  });
  $("place").addEventListener("input", compare);
}

const reference = () => page.runs.find(run => run.shown);

// The last x that all of these runs reached.
function common(runs, key) {
  return Math.min(...runs.map(run => run.x[key][run.x[key].length - 1]));
}

// A run's line at any x, between its points; NaN before its first and behind its last.
function valueAt(x, y, value) {
  const i = before(x, value);
  if (i + 1 >= x.length) return NaN;
  if (x[i + 1] === value) return y[i + 1];
  if (i < 0) return NaN;
  return y[i] + (y[i + 1] - y[i]) * (value - x[i]) / (x[i + 1] - x[i]);
}

// The smoothed loss less that of the first run shown, at this run's points.
function differenceOf(run, key, base) {
  const first = reference();
  if (page.runs.length < 2 || run === first || !run.columns.loss || !first.columns.loss || !first.x[key]) return [];
  const line = lossLine(run), against = lossLine(first), x = run.x[key];
  const y = Float64Array.from(line, (value, i) => value - valueAt(first.x[key], against, x[i]));
  return y.some(Number.isFinite) ? [{...base, x, y, name: `${run.name} less ${first.name}`}] : [];
}

function lastEval(run, index) {
  const step = run.columns.step[index];
  return run.evals.filter(e => e.step <= step && !e.full && e.val_loss !== null).pop();
}

// Mean of tokens/s or MFU up to a point, each step counted for as long as it took.
function meanTo(run, key, index) {
  const values = run.columns[key], took = run.columns.step_ms;
  if (!values || !took) return NaN;
  let sum = 0, total = 0;
  for (let i = 0; i <= index; i++) if (Number.isFinite(values[i]) && took[i] > 0) {
    sum += values[i] * took[i];
    total += took[i];
  }
  return sum / total;
}

function sumTo(values, index) {
  let sum = 0;
  for (let i = 0; i <= index; i++) sum += values[i];  // NaN where a step is not known
  return sum;
}

function compare() {
  if (page.runs.length < 2) return;
  const key = $("equal").value, runs = page.runs.filter(run => run.shown && run.x[key] && run.columns.loss);
  const left = page.runs.filter(run => run.shown && !runs.includes(run));
  $("left").textContent = left.length
    ? `${left.map(run => run.name).join(", ")}: not known by ${page.axes[key].title}.` : "";
  if (!runs.length) {
    $("by").replaceChildren();
    $("there").replaceChildren();
    return;
  }
  const end = common(runs, key), start = Math.max(...runs.map(run => run.x[key][0]));
  const places = [...new Set([start, ...ticks(start, end, 5).filter(at => at > start), end])].filter(at => at <= end);
  const wanted = Number($("place").value.replace(/[, ]/g, ""));
  const place = $("place").value && Number.isFinite(wanted) ? wanted : end;
  $("place").placeholder = full(end);
  $("unit").textContent = page.axes[key].title;
  const first = runs[0];
  const loss = (run, at) => valueAt(run.x[key], lossLine(run), at);
  const signed = value => Number.isFinite(value) ? (value >= 0 ? "+" : "\u2212") + Math.abs(value).toFixed(4) : "n/a";
  const fixed = value => Number.isFinite(value) ? value.toFixed(4) : "n/a";
  const heads = runs.flatMap((run, i) => i ? [run.name, `less ${first.name}`, ""] : [run.name]);
  table("by", [page.axes[key].title, ...heads],
    places.map(at => [rounded(at, 6), ...runs.flatMap((run, i) => {
      const gap = loss(run, at) - loss(first, at);
      return i ? [fixed(loss(run, at)), signed(gap), share(gap, loss(first, at))] : [fixed(loss(run, at))];
    })]));
  const facts = runs.map(run => {
    const i = Math.min(run.x[key].length - 1, Math.max(0, before(run.x[key], place * (1 + 1e-12))));
    const e = lastEval(run, i);
    const {step, tokens, minutes, energy_j: energy} = run.columns, known = place <= run.x[key][run.x[key].length - 1];
    return {run, loss: known ? loss(run, place) : NaN, val: e ? e.val_loss : NaN, at: e ? e.step : NaN, step: step[i],
      tokens: tokens ? tokens[i] : NaN, minutes: minutes ? minutes[i] : NaN, rate: meanTo(run, "tokens_per_s", i),
      mfu: meanTo(run, "mfu", i), kwh: energy ? sumTo(energy, i) / 3.6e6 : NaN};
  });
  const row = (name, value, form, relative) => [name, ...facts.map((fact, i) => {
    const number = value(fact), gap = number - value(facts[0]);
    if (!Number.isFinite(number)) return "n/a";
    if (!i || !Number.isFinite(gap) || relative === null) return form(number);
    return `${form(number)} (${relative ? share(gap, value(facts[0])) : signed(gap)})`;
  })];
  table("there", [`at ${rounded(place, 6)}`, ...runs.map(run => run.name)], [
    row("loss, smoothed", fact => fact.loss, fixed), row("last validation loss", fact => fact.val, fixed),
    row("of step", fact => fact.at, full, null),
    row("step", fact => fact.step, full, true), row("tokens", fact => fact.tokens, full, true),
    row("training time, minutes", fact => fact.minutes, value => value.toFixed(2), true),
    row("mean tokens/s", fact => fact.rate, value => full(Math.round(value)), true),
    row("mean MFU, %", fact => fact.mfu, value => value.toFixed(2), true),
    row("energy of the steps, kWh", fact => fact.kwh, value => rounded(value, 4), true),
  ].filter(cells => cells.slice(1).some(cell => cell !== "n/a")));
}

function share(gap, of) {
  const value = 100 * gap / of;
  return Number.isFinite(value) ? `${value >= 0 ? "+" : "\u2212"}${Math.abs(value).toFixed(1)}%` : "n/a";
}

function table(place, head, rows) {
  const made = document.createElement("table"), line = (cells, name) => {
    const row = document.createElement("tr");
    row.append(...cells.map(cell => element(name, cell)));
    return row;
  };
  made.append(line(head, "th"), ...rows.map(cells => line(cells, "td")));
  $(place).replaceChildren(made);
}
