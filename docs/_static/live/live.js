// What all live pictures share: how they begin, what they are built of, how they write numbers.
//
// A page has, for each picture, <figure class="live" data-live="KIND"> with a caption, a still
// picture (class "still") and a script element with JSON. KIND.js says
//
//     live.register("KIND", (stage, data, figure) => { ... });
//
// and draws into `stage`, an empty element. If that throws, the still picture stays.
"use strict";

const live = {
  kinds: {}, // by name, what else a picture's script offers, its calculations above all

  register(kind, draw, offers = {}) {
    live.kinds[kind] = offers;
    const begin = () => {
      for (const figure of document.querySelectorAll(`figure.live[data-live="${kind}"]`)) {
        const data = JSON.parse(figure.querySelector("script").textContent);
        const stage = live.element("div", { class: "stage" });
        figure.append(stage);
        figure.classList.add("lives");
        try {
          draw(stage, data, figure);
        } catch (error) {
          figure.classList.remove("lives");
          stage.remove();
          throw error;
        }
      }
    };
    if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", begin);
    else begin();
  },

  // Whether the reader asked for less motion: then nothing moves before it is asked to.
  lessMotion: () => matchMedia("(prefers-reduced-motion: reduce)").matches,

  // Elements of HTML and of SVG. Attributes that are functions are handlers ("click", "input").
  element: (tag, attributes = {}, ...children) =>
    fill(document.createElement(tag), attributes, children),
  shape: (tag, attributes = {}, ...children) =>
    fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children),

  // Controls. Each returns an element; what it does is told by a callback.

  // One of several, as buttons in a row: options are [value, label] pairs.
  choice(label, options, value, onChange) {
    const name = `live-${++count}`;
    const choose = live.element("fieldset", { class: "choice" }, live.element("legend", {}, label));
    for (const [each, text] of options) {
      const input = { type: "radio", name, value: each, change: () => onChange(each) };
      if (each === value) input.checked = "";
      choose.append(live.element("label", {}, live.element("input", input), text));
    }
    return choose;
  },

  // Any of several: options are [value, label] pairs, `values` those that are on.
  several(label, options, values, onChange) {
    const chosen = new Set(values);
    const choose = live.element("fieldset", { class: "choice" }, live.element("legend", {}, label));
    for (const [each, text] of options) {
      const change = (event) => {
        if (event.target.checked) chosen.add(each);
        else chosen.delete(each);
        onChange(options.map(([option]) => option).filter((option) => chosen.has(option)));
      };
      const input = { type: "checkbox", value: each, change };
      if (chosen.has(each)) input.checked = "";
      choose.append(live.element("label", {}, live.element("input", input), text));
    }
    return choose;
  },

  // A number in a range; `show` writes it. `element.set(value)` moves it without a callback.
  slider(label, { min, max, step = 1, value, show = String }, onInput) {
    const shown = live.element("output", {}, show(value));
    const input = live.element("input", { type: "range", min, max, step, value });
    const say = () => {
      shown.textContent = show(Number(input.value));
      input.setAttribute("aria-valuetext", shown.textContent);
    };
    input.addEventListener("input", () => {
      say();
      onInput(Number(input.value));
    });
    say();
    const whole = live.element("label", { class: "slider" }, live.element("span", {}, label), input, shown);
    whole.set = (to) => {
      input.value = to;
      say();
    };
    return whole;
  },

  button: (label, onClick) => live.element("button", { type: "button", click: onClick }, label),

  // A line of text that screen readers read out when it changes.
  told: () => live.element("p", { class: "told", role: "status" }),

  // A box beside the pointer or the focus, inside `stage`: `show(lines, x, y)` in client pixels.
  tip(stage) {
    const box = live.element("div", { class: "tip", "aria-hidden": "true", hidden: "" });
    stage.append(box);
    return {
      show(lines, x, y) {
        box.replaceChildren(...lines.map((line) => live.element("div", {}, line)));
        box.hidden = false;
        const frame = stage.getBoundingClientRect();
        const left = Math.min(x - frame.left + 12, frame.width - box.offsetWidth);
        const above = y - frame.top - box.offsetHeight - 12;
        box.style.left = `${Math.max(0, left)}px`;
        box.style.top = `${above < 0 ? y - frame.top + 16 : above}px`;
      },
      hide() {
        box.hidden = true;
      },
    };
  },

  // What colours and lines mean: entries are [name, ...shapes], these `width` x 12 in size.
  legend(entries, width = 28) {
    const list = live.element("ul", { class: "legend" });
    for (const [name, ...shapes] of entries) {
      const swatch = live.shape("svg", { width, height: 12, "aria-hidden": "true" }, ...shapes);
      list.append(live.element("li", {}, swatch, name));
    }
    return list;
  },

  // Diagonal stripes, repeated after `side` pixels, for a fill of url(#id); each a width and a fill.
  hatching(id, side, ...stripes) {
    const size = { width: side, height: side, patternUnits: "userSpaceOnUse" };
    return live.shape("pattern", { id, ...size, patternTransform: "rotate(45)" },
      ...stripes.map((stripe) => live.shape("rect", { height: side, ...stripe })));
  },

  // Numbers as the book's tables write them (microddp/report.py).
  number(value, digits = 3) {
    if (!Number.isFinite(value)) return value > 0 ? "inf" : String(value);
    if (value === 0) return "0";
    const [mantissa, exponent] = value.toExponential(digits - 1).split("e");
    if (exponent < -4 || exponent >= digits) {
      const sign = exponent < 0 ? "-" : "+";
      return `${Number(mantissa)}e${sign}${String(Math.abs(exponent)).padStart(2, "0")}`;
    }
    return String(Number(value.toPrecision(digits)));
  },
  seconds(value) {
    if (value === 0) return "0";
    for (const [factor, unit] of [[1e-6, "us"], [1e-3, "ms"]]) {
      if (Math.abs(value) < 999.5 * factor) return `${live.number(value / factor)} ${unit}`;
    }
    for (const [factor, unit, limit] of [[1, "s", 60], [60, "min", 60], [3600, "h", 48]]) {
      if (Math.abs(value) < factor * limit) return `${live.number(value / factor)} ${unit}`;
    }
    const days = value / 86400;
    return Math.abs(days) < 999.5 ? `${live.number(days)} days` : `${Math.round(days).toLocaleString("en-US")} days`;
  },
  bytes(value) {
    const units = ["B", "KiB", "MiB", "GiB"];
    let unit = 0;
    while (Math.abs(value) >= 1023.5 && unit < units.length - 1) {
      value /= 1024;
      unit += 1;
    }
    return `${Math.abs(value) < 100 ? live.number(value) : Math.round(value)} ${units[unit]}`;
  },
};

let count = 0;

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}
