"use strict";
// The view is all that a reader can choose. It is kept in the address: a reload or a link shows the same.

const $ = name => document.getElementById(name);
const data = JSON.parse($("data").textContent), several = data.runs.length > 1;

const DEFAULTS = {
  x: "step",       // step, tokens, minutes (of training) or wall (time since the first start)
  log: false,      // logarithmic loss
  window: "",      // steps of the moving mean; "" for each run's own
  raw: !several,   // also draw the recorded values, thin
  clip: true,      // spikes do not widen the range of y
  hidden: [],      // names of groups
  hiddenMarks: several ? Object.keys(data.marks) : [],
  search: "",      // runs and groups that contain this
  sort: "",        // a heading of the table of runs; with "-" before it the largest comes first
  theme: "",       // light, dark or "" for the system's
  zoom: {},        // axis -> [from, to]
  y: {},           // panel -> [from, to]
};
const view = {};

const isRange = range => Array.isArray(range) && range.every(Number.isFinite) && range[1] - range[0] > 1e-9;
const chooseRange = (range, whole) => isRange(range) ? range : whole;

// Take over what the address says. What is not of this page, or damaged, is the default.
function readAddress() {
  let address = {};
  try {
    address = Object(JSON.parse(decodeURIComponent(location.hash.slice(1))));
  } catch { /* there is no fragment, or it is not ours */ }
  for (const [name, value] of Object.entries(DEFAULTS)) {
    const given = address[name], isSame = given?.constructor === value.constructor;
    view[name] = structuredClone(isSame ? given : value);
  }
  if (!Object.hasOwn(AXES, view.x)) view.x = DEFAULTS.x;
}

function update(changes) {
  Object.assign(view, changes);
  const isChanged = ([name, value]) => JSON.stringify(value) !== JSON.stringify(DEFAULTS[name]);
  const changed = Object.fromEntries(Object.entries(view).filter(isChanged));
  history.replaceState(null, "", `#${encodeURIComponent(JSON.stringify(changed))}`);
  show();
}

const showAll = () => update({zoom: {}, y: {}});

// A control says in data-view what it sets.
function change({dataset, type, checked, value}) {
  const name = dataset.view, now = view[name];
  if (Array.isArray(now)) value = [...now.filter(item => item !== value), ...(checked ? [] : [value])];
  else if (type === "checkbox") value = checked;
  else if (name === "sort" && now === value) value = `-${value}`;
  update({[name]: value});
}

function showControls() {
  for (const control of document.querySelectorAll("[data-view]:not(button)")) {
    const value = view[control.dataset.view];
    if (Array.isArray(value)) control.checked = !value.includes(control.value);
    else if (control.type === "checkbox") control.checked = value;
    else if (control.value !== value) control.value = value;
  }
}
