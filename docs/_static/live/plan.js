// A step to plan: how long it takes on several devices, and on one for the same tokens.
//
// A test holds `budget` to the same form in Python.
"use strict";

{
  const COLORS = {
    forward: "var(--forward)", backward: "var(--backward)", sent: "var(--communication)", exposed: "var(--waiting)",
  };
  const HOW = { overlapped: "hidden as far as possible", unhidden: "nothing hidden" };
  const DASHES = { overlapped: "", unhidden: "8 5", even: "2 4" };
  const STAGES = { 0: "DDP", 1: "stage 1", 3: "stage 3" };
  const MOST_DEVICES = 1024;
  const LEAST_SHARE = 0.001; // of efficiency, at the bottom of its axis
  const FRAGMENT = "#plan=";
  let patterns = 0;

  // Halves of an all-reduce in forward and in backward.
  const HALVES = { 0: [0, 2], 1: [1, 1], 2: [1, 1], 3: [1, 2] };

  // The bandwidth with which phases, as [seconds that may be hidden, bytes], are exposed for `room`.
  function breakEven(room, [first, second]) {
    const both = [first[0] + second[0], first[1] + second[1]];
    const least = Math.min(...[first, second, both].map(([hides, bytes]) =>
      bytes ? (room + hides) / bytes : room + hides > 0 ? Infinity : 0));
    return least > 0 ? 1 / least : Infinity;
  }

  function budget(plan) {
    const { parameters, tokens, devices, peak, utilisation, bandwidth, latency, stage = 0 } = plan;
    const forward = (2 * parameters * tokens) / (peak * utilisation);
    const compute = plan.accumulation * 3 * forward;
    const startUp = (devices - 1) * latency; // of half an all-reduce
    const sent = ((devices - 1) / devices) * parameters * plan.gradient_bytes;
    const times = stage === 3 ? plan.accumulation : 1;
    const halves = HALVES[stage];
    const messages = halves.map((count) => times * count * (startUp + sent / bandwidth));

    function outcome(...hidden) {
      const exposed = messages.map((takes, i) => Math.max(0, takes - hidden[i]));
      const step = compute + exposed[0] + exposed[1];
      const phases = halves.map((count, i) =>
        [hidden[i] - times * count * startUp, times * count * sent]);
      return {
        exposed: exposed[0] + exposed[1],
        gathering: exposed[0],
        step,
        speedup: (devices * compute) / step,
        efficiency: compute / step,
        break_even: devices > 1 ? breakEven((devices - 1) * compute, phases) : Infinity,
      };
    }

    const kept = [4, 4, 8].map((bytes, i) => (stage >= 3 - i ? bytes / devices : bytes));
    return {
      compute,
      communication: messages[0] + messages[1],
      gathering: messages[0],
      memory: parameters * (kept[0] + kept[1] + kept[2]), // parameters, gradients, Adam's moments
      overlapped: outcome(times * forward, times * 2 * forward),
      unhidden: outcome(0, 0),
    };
  }

  function verdict(plan) {
    const { devices, tokens, accumulation } = plan;
    if (devices === 1) return "One device has nobody to wait for, and is as fast as itself.";
    const { overlapped, unhidden } = budget(plan);
    const [least, most] = [overlapped, unhidden].map((each) => live.number(1 / each.speedup));
    const all = (devices * tokens * accumulation).toLocaleString("en-US");
    const who = `${devices} devices take ${most} times as long as one for the same ${all} tokens`;
    const so = { true: "Worth it", false: "Not worth it" };
    if (least === most) return `${who}, hidden or not. ${so[unhidden.speedup > 1]}.`;
    const both = `${who} if nothing is hidden, ${least} times if computing hides all it can.`;
    if (unhidden.speedup > 1 || !(overlapped.speedup > 1)) {
      return `${both} ${so[unhidden.speedup > 1]} either way.`;
    }
    return `${both} Worth it only as far as computing hides communication.`;
  }

  // In decimal units, as networks are sold.
  function perSecond(value) {
    if (value === Infinity) return "no link is enough";
    for (const [factor, unit] of [[1e12, "TB/s"], [1e9, "GB/s"], [1e6, "MB/s"], [1e3, "kB/s"]]) {
      if (value >= 0.9995 * factor) return `${live.number(value / factor)} ${unit}`;
    }
    return `${live.number(value)} B/s`;
  }

  // The fields ----------------------------------------------------------------------------------

  // Values in even ratios, of two digits or whole: the places of a slider.
  function ladder(from, to, whole) {
    const values = new Set();
    for (let k = 0; k <= 20 * Math.log10(to / from) + 1e-9; k += 1) {
      const value = from * 10 ** (k / 20);
      values.add(whole ? Math.round(value) : Number(value.toPrecision(2)));
    }
    return [...values.add(to)];
  }
  const percents = Array.from({ length: 20 }, (_, i) => (5 * i + 5) / 100);

  // What each is called, the unit of its number field, and the places of its slider.
  const FIELDS = {
    parameters: ["Parameters, millions", 1e6, ladder(1e4, 1e12)],
    tokens: ["Tokens a device and micro-batch", 1, ladder(1, 1e7, true)],
    accumulation: ["Micro-batches a step (accumulation)", 1, ladder(1, 1024, true)],
    devices: ["Devices", 1, ladder(1, MOST_DEVICES, true)],
    gradient_bytes: ["Bytes sent for a gradient", 1, [0.125, 0.25, 0.5, 1, 2, 4, 8]],
    peak: ["Device: peak, TFLOP/s", 1e12, ladder(1e9, 1e16)],
    utilisation: ["Device: utilisation, %", 0.01, percents],
    bandwidth: ["Link, GB/s each way", 1e9, ladder(1e6, 1e13)],
    latency: ["Start of a round, microseconds", 1e-6, [0, ...ladder(1e-7, 1e-2)]],
  };
  const WHOLE = new Set(["tokens", "accumulation", "devices"]);

  function nearest(places, value) {
    const apart = places.map((place) => Math.abs(Math.log((place + 1e-9) / (value + 1e-9))));
    return apart.indexOf(Math.min(...apart));
  }

  function allowed(key, value) {
    const places = FIELDS[key][2];
    const inside = value >= places[0] && value <= places[places.length - 1];
    return inside && (!WHOLE.has(key) || Number.isInteger(value));
  }

  // A slider and a field for the same number. `field.set(value)` moves both.
  function makeField(key, onChange) {
    const [name, unit, places] = FIELDS[key];
    const write = (value) => String(Number((value / unit).toPrecision(10)));
    const [least, most] = [write(places[0]), write(places[places.length - 1])];
    const wrong = live.element("span", { class: "wrong", id: `plan-wrong-${++patterns}`, role: "alert" });
    const sayValid = (valid) => {
      number.setAttribute("aria-invalid", String(!valid));
      const kind = WHOLE.has(key) ? "a whole number" : "a number";
      wrong.textContent = valid ? "" : `Not used: not ${kind} from ${least} to ${most}.`;
    };
    const slider = live.element("input", {
      type: "range", min: 0, max: places.length - 1, step: 1, "aria-label": name,
      input() {
        const value = places[slider.value];
        number.value = write(value);
        sayValid(true);
        slider.setAttribute("aria-valuetext", number.value);
        onChange(key, value);
      },
    });
    const number = live.element("input", {
      type: "number", step: "any", min: least, max: most, "aria-describedby": wrong.id,
      input() {
        const value = number.value === "" ? NaN : Number(number.value) * unit;
        sayValid(allowed(key, value));
        if (!allowed(key, value)) return;
        slider.value = nearest(places, value);
        slider.setAttribute("aria-valuetext", number.value);
        onChange(key, value);
      },
    });
    const label = live.element("label", {}, name);
    const field = live.element("div", { class: "field" }, label, slider, number, wrong);
    number.id = `plan-${key}-${++patterns}`;
    label.htmlFor = number.id;
    field.set = (value) => {
      slider.value = nearest(places, value);
      number.value = write(value);
      slider.setAttribute("aria-valuetext", number.value);
      sayValid(true);
    };
    return field;
  }

  // The pictures --------------------------------------------------------------------------------

  function hatching(svg) {
    const id = `plan-hatch-${++patterns}`;
    const stripe = { width: 2, fill: "#000", "fill-opacity": 0.45 };
    svg.append(live.hatching(id, 8, { width: 8, fill: COLORS.exposed }, stripe));
    return `url(#${id})`;
  }

  const text = (x, y, words, more = {}) =>
    live.shape("text", { x, y, "font-size": 13, ...more }, words);

  // Two bars, one for each way, with the all-reduce under what it overlaps.
  function drawBars(plan, width) {
    const { compute, communication, gathering, ...outcomes } = budget(plan);
    const scale = width / outcomes.unhidden.step;
    const svg = live.shape("svg", {
      viewBox: `0 0 ${width} 158`, role: "img",
      "aria-label": "The step with communication hidden as far as possible, and with none hidden",
    });
    const hatched = hatching(svg);
    Object.entries(HOW).forEach(([how, name], row) => {
      const { exposed, gathering: waited, step } = outcomes[how];
      const y = 79 * row;
      svg.append(text(0, y + 14, `${live.seconds(step)} a step, ${name}`));
      const parts = [
        ["exposed", waited], ["forward", compute / 3],
        ["backward", (2 * compute) / 3], ["exposed", exposed - waited],
      ];
      let start = 0;
      for (const [part, seconds] of parts) {
        const wide = Math.max(0, seconds) * scale;
        const fill = part === "exposed" ? hatched : COLORS[part];
        svg.append(live.shape("rect", { x: start, y: y + 20, width: wide, height: 26, fill }));
        if (wide > 70 && part !== "exposed") {
          svg.append(text(start + wide / 2, y + 38, part, { class: "on-bar", "text-anchor": "middle" }));
        }
        start += wide;
      }
      // What is gathered comes first, what is reduced last.
      for (const [begins, seconds] of [[0, gathering], [step - communication + gathering, communication - gathering]]) {
        const sent = { x: begins * scale, y: y + 48, width: seconds * scale, height: 8 };
        svg.append(live.shape("rect", { ...sent, fill: COLORS.sent }));
      }
    });
    return svg;
  }

  function drawCurve(plan, width) {
    const [left, right, top, bottom] = [56, 22, 10, 44];
    const height = 230;
    const x = (n) => left + (Math.log2(n) / Math.log2(MOST_DEVICES)) * (width - left - right);
    const decades = (share) => Math.log10(Math.max(share, LEAST_SHARE) / LEAST_SHARE);
    const y = (share) => height - bottom - (decades(share) / decades(1)) * (height - top - bottom);
    const svg = live.shape("svg", {
      viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": "Efficiency against the number of devices; below the dotted curve one is faster",
    });
    for (const share of [0.001, 0.01, 0.1, 1]) {
      svg.append(
        live.shape("line", {
          x1: left, x2: width - right, y1: y(share), y2: y(share),
          stroke: "currentColor", "stroke-opacity": 0.18,
        }),
        text(left - 6, y(share) + 4, `${Number((100 * share).toPrecision(1))} %`, { "text-anchor": "end" }),
      );
    }
    for (let n = 1; n <= MOST_DEVICES; n *= width < 450 ? 4 : 2) {
      svg.append(text(x(n), height - bottom + 18, n, { "text-anchor": "middle" }));
    }
    const middle = (left + width - right) / 2;
    svg.append(text(middle, height - 6, "devices", { "text-anchor": "middle" }));
    const counts = FIELDS.devices[2];
    const line = (share, attributes) =>
      svg.append(live.shape("polyline", {
        points: counts.map((n) => `${x(n).toFixed(1)},${y(share(n)).toFixed(1)}`).join(" "),
        fill: "none", ...attributes,
      }));
    const stroke = "currentColor";
    line((n) => 1 / n, { stroke, "stroke-width": 2, "stroke-dasharray": DASHES.even });
    for (const how of Object.keys(HOW)) {
      const share = (n) => budget({ ...plan, devices: n })[how].efficiency;
      line(share, { stroke, "stroke-width": 2.5, "stroke-dasharray": DASHES[how] });
      svg.append(live.shape("circle", {
        cx: x(plan.devices), cy: y(share(plan.devices)), r: 6, fill: stroke,
      }));
    }
    return svg;
  }

  function key(entries) {
    const row = live.element("div", { class: "controls" });
    for (const [name, stroke, dash] of entries) {
      const line = live.shape("line", { x1: 0, x2: 30, y1: 6, y2: 6, stroke, "stroke-width": 3, "stroke-dasharray": dash });
      row.append(live.element("span", {}, live.shape("svg", { width: 30, height: 12, "aria-hidden": "true" }, line), ` ${name}`));
    }
    return row;
  }

  function results(plan) {
    const found = budget(plan);
    const percent = (share) => `${live.number(100 * share)} %`;
    const rows = [
      ["exposed communication", (way) => live.seconds(way.exposed)],
      ["step", (way) => live.seconds(way.step)],
      ["speed-up over one device", (way) => live.number(way.speedup)],
      ["efficiency", (way) => percent(way.efficiency)],
    ];
    if (plan.devices > 1) {
      rows.push(
        ["worth it from a link of", (way) => perSecond(way.break_even)],
        ["worth it", (way) => (way.speedup > 1 ? "yes" : "no")],
      );
    }
    const cell = (tag, words, scope) => live.element(tag, scope ? { scope } : {}, words);
    const lines = rows.map(([name, write]) =>
      live.element("tr", {}, cell("th", name, "row"),
        ...Object.keys(HOW).map((how) => cell("td", write(found[how])))));
    const head = ["", ...Object.values(HOW)].map((name) => (name ? cell("th", name, "col") : cell("td", "")));
    const all = plan.devices * plan.tokens * plan.accumulation;
    return [
      live.element("table", { class: "docutils" }, live.element("tr", {}, ...head), ...lines),
      live.element("p", {},
        `Each device computes for ${live.seconds(found.compute)} a step; messages take ` +
        `${live.seconds(found.communication)}. All devices train on ` +
        `${Number((all / found.overlapped.step).toPrecision(3)).toLocaleString("en-US")} tokens a ` +
        "second at best. " +
        `Weights, gradients and Adam's moments in 32 bits take ${live.bytes(found.memory)} of ` +
        `each device's memory${plan.stage ? "" : ", however many there are"}; activations come on top.`),
    ];
  }

  // The form ------------------------------------------------------------------------------------

  function fromAddress() {
    if (!location.hash.startsWith(FRAGMENT)) return null;
    const numbers = location.hash.slice(FRAGMENT.length).split(",").map(Number);
    const keys = Object.keys(FIELDS);
    if (numbers.length - keys.length !== 0 && numbers.length - keys.length !== 1) return null;
    const plan = Object.fromEntries(keys.map((name, i) => [name, numbers[i]]));
    plan.stage = numbers[keys.length] ?? 0;
    return plan.stage in STAGES && keys.every((name) => allowed(name, plan[name])) ? plan : null;
  }

  function draw(stage, data, figure) {
    const shared = fromAddress();
    const [, peak, utilisation, latency] = data.devices[0];
    const first = { accumulation: 1, bandwidth: data.links[0][1], stage: 0 };
    const plan = shared ?? { ...data.start, peak, utilisation, latency, ...first };

    const fields = {};
    const form = live.element("div", { class: "plan" });
    for (const name of Object.keys(FIELDS)) {
      fields[name] = makeField(name, change);
      form.append(fields[name]);
    }
    // Presets set fields; a field that is moved makes a preset "another".
    const deviceKeys = ["peak", "utilisation", "latency"];
    const presets = [
      ["Device", deviceKeys, data.devices.map(([name, ...values]) => [name, values])],
      ["Link", ["bandwidth"], data.links.map(([name, value]) => [name, [value]])],
    ].map(([label, keys, options]) => {
      const chosen = options.findIndex(([, values]) => keys.every((name, i) => plan[name] === values[i]));
      const pairs = [...options.map(([name], i) => [String(i), name]), ["other", "another"]];
      const choice = live.choice(label, pairs, chosen < 0 ? "other" : String(chosen), (value) => {
        keys.forEach((name, i) => { plan[name] = options[value][1][i]; });
        show();
      });
      // Not to be chosen: it says that a field was moved.
      choice.querySelector("[value=other]").disabled = true;
      return { keys, choice };
    });

    const sharding = live.choice("Sharding", Object.entries(STAGES), String(plan.stage), (value) => {
      plan.stage = Number(value);
      redraw();
    });

    function change(name, value) {
      plan[name] = value;
      for (const { keys, choice } of presets) {
        if (keys.includes(name)) choice.querySelector("[value=other]").checked = true;
      }
      redraw();
    }

    const said = live.element("p", { class: "verdict", role: "status" });
    const bars = live.element("div", {});
    const table = live.element("div", { class: "results", tabindex: "0", role: "region", "aria-label": "Results" });
    const curve = live.element("div", {});
    const kept = live.told();
    const share = live.button("Put this plan into the page's address", () => {
      const numbers = [...Object.keys(FIELDS), "stage"].map((name) => plan[name]).join();
      history.replaceState(null, "", FRAGMENT + numbers);
      kept.textContent = "The address of this page now leads to this plan.";
    });

    function redraw() {
      const width = stage.clientWidth;
      said.textContent = verdict(plan);
      kept.textContent = "";
      bars.replaceChildren(drawBars(plan, width));
      table.replaceChildren(...results(plan));
      curve.replaceChildren(drawCurve(plan, width));
    }
    function show() {
      for (const name of Object.keys(FIELDS)) fields[name].set(plan[name]);
      redraw();
    }

    stage.append(
      live.element("div", { class: "controls" }, ...presets.map(({ choice }) => choice), sharding),
      form, said, bars,
      key([["forward", COLORS.forward, ""], ["backward", COLORS.backward, ""],
        ["exposed", COLORS.exposed, "3 2"], ["messages", COLORS.sent, ""]]),
      table,
      live.element("p", {}, "Efficiency against the number of devices:"),
      curve,
      key([...Object.keys(HOW).map((how) => [HOW[how], "currentColor", DASHES[how]]),
        ["below it, one device is faster", "currentColor", DASHES.even]]),
      live.element("div", { class: "controls" }, share), kept,
    );
    show();
    let drawn = stage.clientWidth;
    new ResizeObserver(() => {
      if (stage.clientWidth === drawn) return;
      drawn = stage.clientWidth;
      redraw();
    }).observe(stage);
    if (shared) addEventListener("load", () => figure.scrollIntoView()); // the browser's own is over
  }

  live.register("plan", draw, { budget, verdict });
}
