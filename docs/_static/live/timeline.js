// Timelines of steps: switch between them, choose ranks, zoom, ask each span what it was.
//
// Times in the data are nanoseconds since the step's first span began, on any rank. A row is
// [rank, lane, name, start, end, bytes, track]: lane and name by number, bytes or null, and the
// track within its lane on which no other span overlaps it (microddp/figures/live_timelines.py).
"use strict";

(() => {
  const ORDER = ["data", "compute", "gradients", "communication", "wait"]; // from top to bottom
  const WIDE = 560; // px from which there is room for the lanes' names beside them
  const AXIS = 20, TITLE = 22, LABEL = 15, GAP = 4; // px of height
  const REACH = 8; // px at which a pointer still finds a span
  const CLOSEST = 2000; // so many times a step can be magnified
  let pictures = 0;

  function spansOf(data, step) {
    return step.spans.map(([rank, lane, name, start, end, bytes, track]) => ({
      step: step.name, rank, start, end, bytes, track,
      lane: data.lanes[lane],
      name: data.names[name][0],
      kind: data.names[name][1],
    }));
  }

  // What save_chrome_trace (microddp/timing/chrome_trace.py) writes for the spans of a step.
  function chromeTrace(data, step) {
    const spans = spansOf(data, step);
    const lanes = [...new Set(spans.map((span) => span.lane))];
    const threads = lanes.flatMap((lane) => {
      const last = Math.max(...spans.filter((span) => span.lane === lane).map((span) => span.track));
      return Array.from({ length: last + 1 }, (_, track) => (track ? `${lane} ${track + 1}` : lane));
    });
    const thread = (span) => threads.indexOf(span.lane) + span.track;
    const traceEvents = [];
    const say = (name, pid, tid, text) =>
      traceEvents.push({ name, ph: "M", pid, tid, args: { name: text } });
    for (const rank of [...new Set(spans.map((span) => span.rank))].sort((a, b) => a - b)) {
      say("process_name", rank, 0, `rank ${rank}`);
      threads.forEach((text, tid) => say("thread_name", rank, tid, text));
    }
    for (const span of spans) {
      const event = { name: span.name, pid: span.rank, tid: thread(span) };
      event.ts = (step.origin + span.start) / 1000; // the format counts in microseconds
      if (span.bytes !== null) event.args = { bytes: span.bytes };
      const took = (span.end - span.start) / 1000;
      traceEvents.push({ ...event, ...(took ? { ph: "X", dur: took } : { ph: "i", s: "t" }) });
    }
    return { traceEvents };
  }

  function save(name, content) {
    const url = URL.createObjectURL(
      new Blob([JSON.stringify(content)], { type: "application/json" }),
    );
    live.element("a", { href: url, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  }

  // ---- words

  const moment = (time) => `${(time / 1e6).toFixed(3)} ms`;
  const length = (time) => live.seconds(time / 1e9);

  function describe(span) {
    const took = span.end - span.start;
    const where = `${span.step}, rank ${span.rank}, ${span.lane}`;
    if (!took) return [`${span.name}, at ${moment(span.start)}`, where];
    const lines = [span.name, where, `${moment(span.start)} to ${moment(span.end)}: ${length(took)}`];
    if (span.bytes !== null) {
      lines.push(`${live.bytes(span.bytes)}, ${live.bytes(span.bytes / (took / 1e9))}/s`);
    } else if (span.lane === "communication") lines.push("bytes not known");
    return lines;
  }

  // ---- where things are

  // Rows from top to bottom, a title above those of each step and rank.
  function arrange(steps, ranks, wide) {
    const rows = [], titles = [];
    let y = AXIS;
    for (const step of steps) {
      for (const rank of ranks) {
        const mine = step.parsed.filter((span) => span.rank === rank);
        if (!mine.length) continue;
        const title = { step, rank, y, end: Math.max(...mine.map((span) => span.end)) };
        titles.push(title);
        y += TITLE;
        const place = (lane) => (ORDER.indexOf(lane) + 1 || ORDER.length + 1);
        const lanes = [...new Set(mine.map((span) => span.lane))];
        for (const lane of lanes.sort((a, b) => place(a) - place(b))) {
          const spans = mine.filter((span) => span.lane === lane);
          const tracks = Math.max(...spans.map((span) => span.track)) + 1;
          const each = lane === "gradients" ? 12 : Math.max(3, Math.min(18, 54 / tracks));
          if (!wide) y += LABEL;
          rows.push({ lane, spans: spans.sort(inTime), top: y, each, height: each * tracks });
          y += each * tracks + GAP;
        }
        title.bottom = y;
        y += GAP;
      }
    }
    return { rows, titles, height: y };
  }

  const inTime = (a, b) => a.start - b.start || a.end - b.end;
  const middle = (span) => (span.start + span.end) / 2;
  const nearest = (spans, time) =>
    spans.reduce((a, b) => (Math.abs(middle(b) - time) < Math.abs(middle(a) - time) ? b : a));

  // Times at round distances, and how to write them.
  function ticks(from, to, most) {
    const least = (to - from) / most;
    const power = 10 ** Math.floor(Math.log10(least));
    const distance = [1, 2, 5, 10].map((times) => times * power).find((each) => each >= least);
    const digits = Math.max(0, -Math.floor(Math.log10(distance / 1e6) + 1e-9));
    const found = [];
    for (let k = Math.ceil(from / distance); k * distance <= to; k += 1) {
      found.push([k * distance, `${((k * distance) / 1e6).toFixed(digits)} ms`]);
    }
    return found;
  }

  // ---- the picture

  function draw(stage, data, figure) {
    const hatch = `timeline-hatch-${(pictures += 1)}`;
    const steps = data.steps.map((step) => ({ ...step, parsed: spansOf(data, step) }));
    const all = Math.max(...steps.flatMap((step) => step.parsed.map((span) => span.end))) * 1.02;
    let shown = steps.slice(0, 1), ranks = data.ranks;
    let from = 0, to = all, current = null, layout = null;

    const told = live.told(), tip = live.tip(stage);
    const caption = figure.querySelector("figcaption").textContent;
    const canvas = live.element("div", {
      class: "canvas",
      tabindex: "0",
      role: "application",
      "aria-label": `${caption}. Arrow keys go from span to span, + and - zoom, 0 shows all.`,
    });
    const files = live.element("div", { class: "controls" });
    stage.append(controls(), told, canvas, legend(data, hatch), files, hint());

    function controls() {
      const names = steps.map((step) => [step.name, step.name]);
      if (steps.length > 1) names.push(["", "all"]);
      const choose = live.choice("Step", names, steps[0].name, (name) => {
        shown = steps.filter((step) => !name || step.name === name);
        leave();
      });
      const those = data.ranks.map((rank) => [rank, String(rank)]);
      const which = live.several("Ranks", those, ranks, (chosen) => {
        ranks = chosen;
        leave();
      });
      const box = live.element("div", { class: "controls" }, choose, which);
      if (data.world > data.ranks.length) box.append(`(the first of ${data.world})`);
      const zooms = live.element("div", { class: "choice" });
      zooms.append(
        live.button("zoom in", () => zoom(0.5)),
        live.button("zoom out", () => zoom(2)),
        live.button("whole step", () => view(0, all)),
      );
      box.append(zooms);
      return box;
    }

    function leave() {
      current = null;
      tip.hide();
      offer();
      render();
      say();
    }

    // ---- what is in sight

    function view(start, end) {
      const wanted = Math.min(all, Math.max(all / CLOSEST, end - start));
      from = Math.min(all - wanted, Math.max(0, start));
      to = from + wanted;
      tip.hide();
      render();
    }

    function zoom(times, at = aim()) {
      view(at - (at - from) * times, at + (to - at) * times);
    }

    // What is asked about, if it is in sight, else the middle.
    function aim() {
      const time = current ? middle(current) : from;
      return time > from && time < to ? time : (from + to) / 2;
    }

    // ---- which span is asked about

    function choose(span, place = null) {
      if (span.start > to || span.end < from) {
        view(middle(span) - (to - from) / 2, middle(span) + (to - from) / 2);
      }
      if (span !== current) {
        current = span;
        render();
        say();
      }
      const frame = canvas.getBoundingClientRect();
      const { x, y } = place ?? { x: frame.left + edge(middle(span)), y: frame.top + topOf(span) };
      tip.show(describe(span), x, y);
    }

    function say() {
      const sums = ([rank, step, exposed, hidden]) =>
        `rank ${rank}: ${length(step)}, ${length(exposed)} exposed, ${length(hidden)} hidden`;
      if (current) told.textContent = describe(current).join("; ");
      else if (!ranks.length) told.textContent = "Choose a rank.";
      else if (shown.length > 1) told.textContent = "All steps, on one scale.";
      else {
        const [first] = shown[0].sums.filter(([rank]) => rank === ranks[0]);
        told.textContent = `${shown[0].name}, ${sums(first)}.`;
      }
    }

    function offer() {
      const saved = (step) =>
        live.button(`Save '${step.name}' for Perfetto`, () =>
          save(`timeline-${step.name}.json`, chromeTrace(data, step)));
      files.replaceChildren(...shown.map(saved));
    }

    const rowOf = (span) => layout.rows.find((row) => row.spans.includes(span));
    const topOf = (span) => {
      const row = rowOf(span);
      return row.top + row.each * span.track;
    };

    // The span under a place of the canvas, or the nearest in that lane that is within reach.
    function under(x, y) {
      const row = layout.rows.find((each) => y >= each.top && y <= each.top + each.height + GAP);
      if (!row || x < layout.left - REACH) return null;
      const track = Math.floor((y - row.top) / row.each);
      const away = (span) => {
        const [start, end] = [edge(span.start), edge(span.end)];
        const beside = Math.max(start - x, x - end, 0);
        return beside + row.each * Math.abs(span.track - track);
      };
      const best = row.spans.reduce((a, b) => (away(b) < away(a) ? b : a));
      return away(best) <= Math.max(REACH, row.each) ? best : null;
    }

    function edge(time) {
      const x = layout.left + ((time - from) / (to - from)) * (layout.right - layout.left);
      return Math.min(layout.right, Math.max(layout.left, x));
    }

    // ---- drawing

    function render() {
      const width = stage.clientWidth;
      if (!width) return; // not to be seen: there will be a call when it is
      const wide = width >= WIDE;
      layout = arrange(shown, ranks, wide);
      layout.left = wide ? 108 : 2;
      layout.right = width - 8;
      const svg = live.shape("svg", { width, height: layout.height, "aria-hidden": "true" });
      svg.append(hatching(hatch, data));
      drawAxis(svg);
      for (const title of layout.titles) drawTitle(svg, title, wide);
      for (const row of layout.rows) drawRow(svg, row, wide);
      if (current) drawOutline(svg);
      canvas.replaceChildren(svg);
    }

    function drawAxis(svg) {
      for (const [time, text] of ticks(from, to, (layout.right - layout.left) / 90)) {
        const x = edge(time);
        svg.append(live.shape("line", { class: "grid", x1: x, x2: x, y1: AXIS, y2: layout.height }));
        const anchor = x > layout.right - 40 ? "end" : x < layout.left + 20 ? "start" : "middle";
        svg.append(live.shape("text", { x, y: 13, "text-anchor": anchor }, text));
      }
    }

    function drawTitle(svg, { step, rank, y, end, bottom }, wide) {
      const [, took, exposed, hidden] = step.sums.find(([each]) => each === rank);
      const name = shown.length > 1 ? `${step.name}, rank ${rank}` : `rank ${rank}`;
      const rest = wide ? `, ${length(hidden)} hidden` : "";
      const text = `${name}: ${length(took)}, ${length(exposed)} exposed${rest}`;
      svg.append(live.shape("text", { class: "title", x: 0, y: y + 16 }, text));
      if (end < from || end > to) return;
      const x = edge(end);
      svg.append(live.shape("line", { class: "end", x1: x, x2: x, y1: y + TITLE, y2: bottom }));
    }

    function drawRow(svg, row, wide) {
      const y = wide ? row.top + row.height / 2 + 4 : row.top - 3;
      svg.append(live.shape("text", { x: wide ? 8 : 0, y }, row.lane));
      for (const span of row.spans) {
        if (span.end < from || span.start > to) continue;
        const box = boxOf(row, span);
        const color = data.kinds[span.kind][1];
        const fill = span.lane === "wait" ? `url(#${hatch})` : color;
        svg.append(live.shape("rect", { class: span.lane === "wait" ? "wait" : "bar", fill, ...box }));
        if (span.lane !== "wait" && box.height >= 14 && box.width > 7 * span.name.length + 6) {
          const middle = { x: box.x + box.width / 2, y: box.y + box.height / 2 + 4 };
          svg.append(
            live.shape("text", { class: "on-bar", "text-anchor": "middle", ...middle }, span.name),
          );
        }
      }
    }

    function boxOf(row, span) {
      const x = edge(span.start);
      const width = Math.max(span.end > span.start ? 1 : 1.5, edge(span.end) - x);
      return { x, width, y: row.top + row.each * span.track, height: row.each };
    }

    function drawOutline(svg) {
      const { x, y, width, height } = boxOf(rowOf(current), current);
      const around = { x: x - 2, y: y - 2, width: width + 4, height: height + 4 };
      svg.append(live.shape("rect", { class: "current", ...around }));
    }

    // ---- keys and pointers

    function move(key) {
      if (!layout.rows.length) return;
      if (!current) return choose(layout.rows[0].spans[0]);
      const row = rowOf(current), i = row.spans.indexOf(current);
      const next = {
        ArrowLeft: () => row.spans[i - 1],
        ArrowRight: () => row.spans[i + 1],
        Home: () => row.spans[0],
        End: () => row.spans.at(-1),
        ArrowUp: () => beside(row, -1),
        ArrowDown: () => beside(row, 1),
      }[key]();
      choose(next ?? current);
    }

    function beside(row, by) {
      const other = layout.rows[layout.rows.indexOf(row) + by];
      return other && nearest(other.spans, middle(current));
    }

    const keys = {
      "+": () => zoom(0.5),
      "=": () => zoom(0.5), // the key of + without shift
      "-": () => zoom(2),
      0: () => view(0, all),
      Escape: () => tip.hide(),
    };
    for (const key of ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"]) {
      keys[key] = () => move(key);
    }
    canvas.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
      event.preventDefault();
      keys[event.key]();
    });
    canvas.addEventListener("focus", () => {
      // Not where a click or a tap brought the focus: that asks about what is under it.
      if (!current && canvas.matches(":focus-visible")) move("Home");
    });
    canvas.addEventListener("blur", () => tip.hide());

    let drag = null; // where a pointer went down, and what was in sight
    let dragged = false;
    const place = (event) => {
      const frame = canvas.getBoundingClientRect();
      return [event.clientX - frame.left, event.clientY - frame.top];
    };
    const ask = (event) => {
      const span = under(...place(event));
      if (span) choose(span, { x: event.clientX, y: event.clientY });
      else tip.hide();
    };
    canvas.addEventListener("pointerdown", (event) => {
      drag = { x: event.clientX, from, to, id: event.pointerId };
      dragged = false;
    });
    canvas.addEventListener("pointermove", (event) => {
      if (drag && event.pointerId === drag.id && event.buttons) {
        const by = event.clientX - drag.x;
        if (!dragged && Math.abs(by) < 5) return;
        dragged = true;
        canvas.setPointerCapture(drag.id);
        const time = (by / (layout.right - layout.left)) * (drag.to - drag.from);
        view(drag.from - time, drag.to - time);
      } else if (event.pointerType === "mouse") ask(event);
    });
    for (const over of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(over, () => (drag = null));
    }
    canvas.addEventListener("pointerleave", () => tip.hide());
    canvas.addEventListener("click", (event) => {
      if (!dragged) ask(event);
    });
    canvas.addEventListener(
      "wheel",
      (event) => {
        if (!event.ctrlKey) return; // the page scrolls
        event.preventDefault();
        const [x] = place(event);
        const at = from + ((x - layout.left) / (layout.right - layout.left)) * (to - from);
        zoom(2 ** (event.deltaY / 200), Math.min(to, Math.max(from, at)));
      },
      { passive: false },
    );

    new ResizeObserver(() => render()).observe(stage);
    render();
    say();
    offer();
  }

  // Stripes of the colour of waiting.
  function hatching(id, data) {
    const [, color] = data.kinds.find(([kind]) => kind.startsWith("wait")) ?? ["", "currentColor"];
    return live.hatching(id, 6, { width: 2.5, fill: color });
  }

  function legend(data, hatch) {
    const entries = [...new Set(data.kinds.map(([, each]) => each))].map((color) => {
      const kinds = data.kinds.filter(([, each]) => each === color).map(([kind]) => kind);
      const [kind] = kinds;
      const fill = kind.startsWith("wait") ? `url(#${hatch})` : color;
      const narrow = kind === "gradient ready"; // a mark
      const box = { x: narrow ? 7 : 0, y: 0.5, width: narrow ? 2 : 16, height: 11, fill };
      return [kinds.join(", "), live.shape("rect", { ...box, class: fill === color ? "bar" : "wait" })];
    });
    return live.legend(entries, 16);
  }

  function hint() {
    const text =
      "Point at a span or tap it; drag to move; zoom with the buttons or with Ctrl and the wheel. " +
      "By keyboard: arrows, + and -, 0. A file for Perfetto opens at ui.perfetto.dev.";
    return live.element("p", { class: "hint" }, text);
  }

  live.register("timeline", draw, { chromeTrace });
})();
