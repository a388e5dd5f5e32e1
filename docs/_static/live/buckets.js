// Buckets to refill: a cap, the plan it makes, and the step that is predicted with it.
//
// `plan` is plan_buckets of microddp/buckets.py with one cap for all buckets, `predict` is
// predict_plan of microddp/performance/prediction.py; a test holds each two to one result. A
// gradient in the data is [name, bytes, seconds from backward's begin until it is ready].
"use strict";

{
  const COLORS = {
    forward: "var(--forward)", backward: "var(--backward)", optimizer: "var(--optimizer)", exposed: "var(--waiting)",
  };
  // Of communication; neighbours differ.
  const SHADES = ["var(--communication)", "color-mix(in srgb, var(--communication) 56%, white)"];
  const BETWEEN = 12; // places of the slider from one cap to twice that
  const BAR = 26; // px of height
  let pictures = 0;

  // Calculations --------------------------------------------------------------------------------

  const bytesOf = (gradients, members) => members.reduce((sum, i) => sum + gradients[i][1], 0);

  // Indices of each bucket's gradients: it takes them until it has reached the cap, and splits none.
  function plan(gradients, cap) {
    const buckets = [];
    let members = [];
    gradients.forEach((_, i) => {
      members.push(i);
      if (bytesOf(gradients, members) < cap) return;
      buckets.push(members);
      members = [];
    });
    return members.length ? [...buckets, members] : buckets;
  }

  // Seconds of a step that sends these buckets, and its `messages` by bucket, since backward's begin.
  function predict({ gradients, compute, cost }, buckets) {
    const full = buckets.map((members, bucket) => {
      const ready = Math.max(...members.map((i) => gradients[i][2]));
      return { bucket, ready, bytes: bytesOf(gradients, members) };
    });
    let copied = 0, end = 0, sent = 0;
    const messages = full.map(({ bucket, ready, bytes }) => {
      copied += compute.copy * bytes;
      const start = Math.max(end, ready + copied);
      const travel = cost.alpha + cost.beta * bytes;
      end = start + travel;
      sent += travel;
      return { bucket, bytes, start, end };
    });
    const backward = compute.backward + copied;
    const exposed = Math.max(0, end - backward);
    for (const each of messages) each.alone = Math.min(each.end, Math.max(each.start, backward));
    const step = compute.forward + backward + exposed + compute.optimizer;
    return { step, exposed, hidden: sent - exposed, messages, backward };
  }

  // From each gradient alone to all in one bucket, in even ratios, with the caps that were measured.
  function capsOf({ gradients, measured }) {
    const sizes = gradients.map(([, bytes]) => bytes);
    const [least, most] = [Math.min(...sizes), sizes.reduce((a, b) => a + b)];
    const inside = (cap) => Math.min(most, Math.max(least, cap));
    const caps = new Set([most, ...measured.map(([cap]) => inside(cap))]);
    for (let k = 0; least * 2 ** (k / BETWEEN) < most; k += 1) {
      caps.add(Math.round(least * 2 ** (k / BETWEEN)));
    }
    return { caps: [...caps].sort((a, b) => a - b), inside };
  }

  // Words ---------------------------------------------------------------------------------------

  const count = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;

  function named(cap, gradients) {
    const alone = gradients.every(([, bytes]) => bytes >= cap);
    return alone ? `${live.bytes(cap)}, each gradient alone` : live.bytes(cap);
  }

  const exposure = ({ exposed }) => (exposed ? live.seconds(exposed) : "none");

  function sayCase(data, found, best) {
    const outcome = ({ cap, buckets, predicted }) =>
      `${live.bytes(cap)}: ${count(buckets.length, "all-reduce")}, a step predicted to take ` +
      `${live.seconds(predicted.step)}, ${exposure(predicted)} of it exposed`;
    const measured = data.measured.find(([cap]) => data.inside(cap) === found.cap);
    const ran = measured ? ` Measured: ${live.seconds(measured[2])}.` : "";
    const least = found.predicted.step <= best.predicted.step
      ? "No cap on the slider is predicted to take less."
      : `Least on the slider: ${live.seconds(best.predicted.step)}, for a cap of ${live.bytes(best.cap)}.`;
    return `Cap ${outcome(found)}.${ran} ${least}`;
  }

  function describe(data, { buckets, predicted }, bucket) {
    const { bytes, start, end, alone } = predicted.messages.find((each) => each.bucket === bucket);
    const members = buckets[bucket].map((i) => data.gradients[i][0]);
    const names = members.length > 1 ? `${members[0]} to ${members.at(-1)}` : members[0];
    const [from, to] = [start, end].map((time) => live.seconds(data.compute.forward + time));
    const waits = end > alone ? `, ${live.seconds(end - alone)} of it exposed` : "";
    return [
      `bucket ${bucket + 1} of ${buckets.length}: ${bytes.toLocaleString("en-US")} bytes`,
      `${count(members.length, "gradient")}: ${names}`,
      `sent from ${from} to ${to}${waits}`,
    ];
  }

  // The pictures --------------------------------------------------------------------------------

  const text = (x, y, words, more = {}) => live.shape("text", { x, y, ...more }, words);
  const rect = (x, y, width, height, more) => live.shape("rect", { x, y, width, height, ...more });
  const upright = (x, y1, y2, more) => live.shape("line", { x1: x, x2: x, y1, y2, ...more });

  const hatching = (id) =>
    live.hatching(id, 7, { width: 7, fill: COLORS.exposed }, { width: 2, fill: "var(--waiting-hatch)" });

  // Round times up to one, in seconds.
  function ticks(until, most) {
    const power = 10 ** Math.floor(Math.log10(until / most));
    const distance = [1, 2, 5, 10].map((times) => times * power).find((each) => until / each <= most);
    return Array.from({ length: Math.floor(until / distance) + 1 }, (_, k) => k * distance);
  }

  function label(svg, x, width, y, words) {
    if (width > 7 * words.length + 6) {
      svg.append(text(x + width / 2, y, words, { class: "on-bar", "text-anchor": "middle" }));
    }
  }

  // The plan, the recorded step and the predicted one. `longest` seconds fill the width.
  function drawStep(data, { buckets, predicted }, chosen, longest, width, hatch) {
    const { gradients, compute } = data;
    const svg = live.shape("svg", { width, height: 268, "aria-hidden": "true" }, hatching(hatch));
    const total = gradients.reduce((sum, [, bytes]) => sum + bytes, 0);
    const right = width - 2;
    const at = (time) => (time / longest) * right;
    const part = (bucket) => ({ class: "bucket", "data-bucket": bucket });
    const shade = (bucket) => ({ ...part(bucket), fill: SHADES[bucket % 2] });
    const outlines = [];

    for (const time of ticks(longest, right / 90)) {
      svg.append(upright(at(time), 74, 220, { class: "grid" }));
      const anchor = at(time) < 20 ? "start" : at(time) > right - 30 ? "end" : "middle";
      svg.append(text(at(time), 236, live.seconds(time), { "text-anchor": anchor }));
    }
    svg.append(text(right / 2, 258, "time since the step began", { "text-anchor": "middle" }));

    svg.append(text(0, 14, "Buckets, in the order of sending, and their gradients"));
    let x = 0;
    buckets.forEach((members, bucket) => {
      const from = x;
      for (const i of members) {
        const wide = (gradients[i][1] / total) * right;
        svg.append(rect(x, 20, wide, BAR, shade(bucket)));
        if (i !== members[0]) svg.append(upright(x, 38, 20 + BAR, { class: "seam" }));
        x += wide;
      }
      label(svg, from, x - from, 34, live.bytes(bytesOf(gradients, members)));
      if (bucket === chosen) outlines.push(rect(from, 20, x - from, BAR));
    });

    svg.append(text(0, 72, "Without messages"));
    const phase = (name, start, end, y) => {
      svg.append(rect(at(start), y, at(end) - at(start), BAR, { fill: COLORS[name] }));
      label(svg, at(start), at(end) - at(start), y + 18, name);
    };
    phase("forward", 0, compute.forward, 78);
    phase("backward", compute.forward, compute.forward + compute.backward, 78);
    const mine = new Set(buckets[chosen]);
    gradients.forEach(([, , ready], i) => {
      const place = at(compute.forward + ready);
      svg.append(upright(place, 106, mine.has(i) ? 120 : 114, { class: mine.has(i) ? "ready mine" : "ready" }));
    });

    const took = `${live.seconds(predicted.step)}, ${exposure(predicted)} exposed`;
    svg.append(text(0, 140, `Predicted, with messages: ${took}`));
    phase("forward", 0, compute.forward, 146);
    phase("backward", compute.forward, compute.forward + predicted.backward, 146);
    const over = compute.forward + predicted.backward + predicted.exposed;
    if (compute.optimizer) phase("optimizer", over, over + compute.optimizer, 146);
    for (const { bucket, start, end, alone } of predicted.messages) {
      const [from, open, to] = [start, alone, end].map((time) => at(compute.forward + time));
      svg.append(rect(from, 178, to - from, BAR, shade(bucket)));
      if (to > open) {
        svg.append(rect(open, 178, to - open, BAR, { ...part(bucket), fill: `url(#${hatch})` }));
      }
      if (open - from > to - open) label(svg, from, open - from, 196, String(bucket + 1));
      svg.append(upright(from, 178, 178 + BAR, { class: "edge" }));
      if (bucket === chosen) outlines.push(rect(from, 178, to - from, BAR));
    }
    svg.append(upright(at(predicted.step), 146, 214, { class: "end" }));

    for (const outline of outlines) {
      outline.setAttribute("class", "current");
      svg.append(outline);
    }
    return svg;
  }

  function drawCurve(data, cases, found, width) {
    const [left, right, top, bottom, height] = [58, 14, 12, 44, 230];
    const [least, most] = [cases[0].cap, cases.at(-1).cap];
    const x = (cap) =>
      left + (Math.log(cap / least) / (Math.log(most / least) || 1)) * (width - left - right);
    const highest = 1.05 * Math.max(
      ...cases.map(({ predicted }) => predicted.step), ...data.measured.map(([, , , high]) => high));
    const y = (time) => height - bottom - (time / highest) * (height - top - bottom);
    const svg = live.shape("svg", {
      width, height, role: "img",
      "aria-label": "Predicted step, exposed time, and the measured steps, against the cap",
    });
    for (const time of ticks(highest, 5)) {
      svg.append(
        live.shape("line", { class: "grid", x1: left, x2: width - right, y1: y(time), y2: y(time) }),
        text(left - 6, y(time) + 4, live.seconds(time), { "text-anchor": "end" }),
      );
    }
    const every = 2 ** Math.ceil((70 * Math.log2(most / least)) / (width - left - right));
    for (let cap = 2 ** Math.ceil(Math.log2(least)); cap <= most; cap *= Math.max(2, every)) {
      svg.append(text(x(cap), height - bottom + 18, live.bytes(cap), { "text-anchor": "middle" }));
    }
    const middle = (left + width - right) / 2;
    svg.append(text(middle, height - 6, "cap", { "text-anchor": "middle" }));
    svg.append(upright(x(found.cap), top, height - bottom, { class: "end" }));
    for (const [which, style] of [["step", "curve"], ["exposed", "curve exposed"]]) {
      const points = cases.map(({ cap, predicted }) =>
        `${x(cap).toFixed(1)},${y(predicted[which]).toFixed(1)}`);
      svg.append(
        live.shape("polyline", { class: style, points: points.join(" ") }),
        live.shape("circle", { class: style, cx: x(found.cap), cy: y(found.predicted[which]), r: 6 }),
      );
    }
    for (const [cap, low, median, high] of data.measured) {
      const place = x(data.inside(cap));
      svg.append(upright(place, y(low), y(high), { class: "measured" }), dot(place, y(median)));
    }
    return svg;
  }

  const dot = (cx, cy) => live.shape("circle", { class: "measured", cx, cy, r: 4 });

  // What happens --------------------------------------------------------------------------------

  function draw(stage, given) {
    const { caps, inside } = capsOf(given);
    const data = { ...given, inside };
    const hatch = `buckets-hatch-${(pictures += 1)}`;
    const cases = caps.map((cap) => {
      const buckets = plan(data.gradients, cap);
      return { cap, buckets, predicted: predict(data, buckets) };
    });
    // Of caps with the same plan the largest, which is nearest to what its buckets hold.
    const quicker = (a, b) => (b.predicted.step <= a.predicted.step ? b : a);
    const best = cases.reduce(quicker);
    const { forward, backward } = data.compute;
    const longest = 1.01 * Math.max(
      forward + backward, ...cases.map(({ predicted }) => predicted.step));
    // Where it begins: at the cap whose steps were measured to take least.
    const [fastest] = data.measured.reduce((a, b) => (b[2] < a[2] ? b : a));
    let found = cases.find(({ cap }) => cap === inside(fastest));
    let chosen = null; // a bucket

    const slider = live.slider("Cap of a bucket", {
      min: 0, max: cases.length - 1, value: cases.indexOf(found),
      show: (place) => named(cases[place].cap, data.gradients),
    }, (place) => refill(cases[place]));
    const toBest = live.button("Least predicted step", () => {
      slider.set(cases.indexOf(best));
      refill(best);
    });
    const told = live.told(), asked = live.told(), tip = live.tip(stage);
    const canvas = live.element("div", {
      class: "canvas", tabindex: "0", role: "application",
      "aria-label": "The plan, and the step without and with its messages. " +
        "Left and right arrow go from bucket to bucket.",
    });
    const curve = live.element("div", { class: "curves" });
    const color = (fill) => rect(0, 0, 28, 12, { fill });
    const path = (style) => live.shape("line", { class: style, x1: 0, x2: 28, y1: 6, y2: 6 });
    stage.append(
      live.element("div", { class: "controls" }, slider, toBest), told, canvas, asked,
      live.legend([
        ["forward", color(COLORS.forward)],
        ["backward", color(COLORS.backward)],
        ["gradient ready", upright(14, 0, 12, { class: "ready" })],
        ["all-reduces", rect(0, 0, 14, 12, { fill: SHADES[0] }), rect(14, 0, 14, 12, { fill: SHADES[1] })],
        ["exposed", color(`url(#${hatch})`)],
      ]),
      curve,
      live.legend([
        ["predicted step", path("curve")], ["predicted to be exposed", path("curve exposed")],
        ["measured step, quartiles", upright(14, 0, 12, { class: "measured" }), dot(14, 6)],
      ]),
    );

    function redraw() {
      const width = stage.clientWidth;
      if (!width) return; // not to be seen: there will be a call when it is
      canvas.replaceChildren(drawStep(data, found, chosen, longest, width, hatch));
      curve.replaceChildren(drawCurve(data, cases, found, width));
    }
    function refill(other) {
      found = other;
      chosen = null;
      tip.hide();
      told.textContent = sayCase(data, found, best);
      asked.textContent = "";
      redraw();
    }
    function choose(bucket) {
      chosen = bucket;
      asked.textContent = describe(data, found, bucket).join("; ");
      redraw();
    }

    canvas.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!by || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      const next = chosen === null ? 0 : chosen + by;
      choose(Math.min(found.buckets.length - 1, Math.max(0, next)));
    });
    const ask = (event) => {
      const under = event.target.closest("[data-bucket]");
      if (!under) return tip.hide();
      const bucket = Number(under.dataset.bucket);
      if (bucket !== chosen) choose(bucket);
      tip.show(describe(data, found, bucket), event.clientX, event.clientY);
    };
    canvas.addEventListener("pointermove", (event) => event.pointerType === "mouse" && ask(event));
    canvas.addEventListener("click", ask);
    canvas.addEventListener("pointerleave", () => tip.hide());
    canvas.addEventListener("blur", () => tip.hide());

    refill(found);
    new ResizeObserver(redraw).observe(stage);
  }

  live.register("buckets", draw, { plan, predict });
}
