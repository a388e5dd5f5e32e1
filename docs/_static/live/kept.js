// What ranks keep during a step, moment by moment: one panel for each way, on one scale.
//
// Data (microddp/figures/live_memory.py): kinds as [name, color], moments as [phase, what], and ways, each
// with the bytes of every kind at every moment and the most that was predicted for all together.
"use strict";

{
  const TITLE = 20, PLOT = 130, PHASES = 22, GAP = 14; // px of height
  const WIDE = 560; // px from which two panels stand side by side
  const PACE = 350; // ms from one moment to the next

  // Bytes of a way at a moment: of all kinds, or of the one that is chosen.
  const kept = (way, moment, kind) =>
    way.bytes[moment].reduce((sum, bytes, i) => sum + (kind === null || kind === i ? bytes : 0), 0);

  const most = (way, kind) => Math.max(...way.bytes.map((_, moment) => kept(way, moment, kind)));

  function say({ moments }, moment) {
    const [phase, what] = moments[moment];
    return `Moment ${moment + 1} of ${moments.length}, ${phase}: ${what}.`;
  }

  const text = (x, y, words, more = {}) => live.shape("text", { x, y, "font-size": 13, ...more }, words);

  // Where each phase begins and ends, as numbers of moments.
  function phasesOf(moments) {
    const found = [];
    moments.forEach(([phase], i) => {
      if (found.at(-1)?.phase === phase) found.at(-1).end = i + 1;
      else found.push({ phase, start: i, end: i + 1 });
    });
    return found;
  }

  function drawPanel(data, way, { moment, kind }, top, width) {
    const y = (bytes) => TITLE + PLOT - (bytes / top) * PLOT;
    const x = (place) => (place / data.moments.length) * (width - 1);
    const bar = x(1) - (x(1) > 6 ? 1.5 : 0);
    const height = TITLE + PLOT + PHASES;
    const svg = live.shape("svg", { width, height, "aria-hidden": "true" });
    svg.append(text(0, 14, `${way.name}: at most ${live.bytes(most(way, kind))}`, { class: "named" }));
    way.bytes.forEach((parts, i) => {
      let under = 0;
      parts.forEach((bytes, k) => {
        if (kind !== null && kind !== k) return;
        const tall = y(under) - y(under + bytes);
        const faded = i === moment ? 1 : 0.72;
        svg.append(live.shape("rect", {
          x: x(i), y: y(under + bytes), width: bar, height: tall,
          fill: data.kinds[k][1], "fill-opacity": faded,
        }));
        under += bytes;
      });
    });
    if (kind === null) {
      const at = y(way.predicted);
      svg.append(live.shape("line", { class: "predicted", x1: 0, x2: width, y1: at, y2: at }));
    }
    const now = { x: x(moment) - 1, y: TITLE - 2, width: bar + 2, height: PLOT + 3 };
    svg.append(live.shape("rect", { class: "now", ...now }));
    svg.append(live.shape("line", { class: "ground", x1: 0, x2: width, y1: TITLE + PLOT, y2: TITLE + PLOT }));
    for (const { phase, start, end } of phasesOf(data.moments)) {
      const middle = (x(start) + x(end)) / 2;
      svg.append(text(middle, height - 6, phase, { "text-anchor": "middle" }));
      if (start) {
        const [y1, y2] = [TITLE + PLOT, height - 2];
        svg.append(live.shape("line", { class: "ground", x1: x(start), x2: x(start), y1, y2 }));
      }
    }
    return svg;
  }

  function table(data, { moment, kind }) {
    const shown = data.kinds.map(([name], k) => [name, k]).filter(([, k]) => kind === null || kind === k);
    const cell = (tag, words, scope) => live.element(tag, scope ? { scope } : {}, words);
    const heads = [...shown.map(([name]) => name), ...(kind === null ? ["together", "at most, predicted"] : [])];
    const lines = data.ways.map((way) => {
      const sizes = shown.map(([, k]) => way.bytes[moment][k]);
      if (kind === null) sizes.push(kept(way, moment, null), way.predicted);
      return live.element("tr", {}, cell("th", way.name, "row"), ...sizes.map((size) => cell("td", live.bytes(size))));
    });
    const head = live.element("tr", {}, cell("td", ""), ...heads.map((name) => cell("th", name, "col")));
    return live.element("table", { class: "docutils" }, head, ...lines);
  }

  function draw(stage, data) {
    const last = data.moments.length - 1;
    const top = 1.04 * Math.max(...data.ways.flatMap((way) => [most(way, null), way.predicted]));
    const state = { moment: 0, kind: null };
    let playing = null;

    const options = [["all", "all"], ...data.kinds.map(([name], k) => [String(k), name])];
    const kinds = live.choice("Show", options, "all", (value) => {
      state.kind = value === "all" ? null : Number(value);
      redraw();
    });
    const slider = live.slider("Moment", {
      min: 0, max: last, value: 0, show: (place) => `${place + 1} of ${last + 1}`,
    }, (place) => {
      stop();
      go(place);
    });
    const play = live.button("Play", () => (playing === null ? start() : stop()));
    const told = live.told();
    const panels = live.element("div", { class: "panels" });
    const numbers = live.element("div", { class: "results", tabindex: "0", role: "region", "aria-label": "Bytes at this moment" });
    const dashed = live.shape("line", { class: "predicted", x1: 0, x2: 28, y1: 6, y2: 6 });
    const legend = live.legend([
      ...data.kinds.map(([name, fill]) => [name, live.shape("rect", { width: 28, height: 12, fill })]),
      ["most of all, predicted", dashed],
    ]);

    function go(moment) {
      state.moment = moment;
      slider.set(moment);
      redraw();
    }
    function start() {
      play.textContent = "Stop";
      told.setAttribute("aria-live", "off"); // not each moment read out
      if (state.moment === last) go(0);
      playing = setInterval(() => {
        go(state.moment + 1);
        if (state.moment === last) stop();
      }, PACE);
    }
    function stop() {
      clearInterval(playing);
      playing = null;
      play.textContent = "Play";
      told.setAttribute("aria-live", "polite");
    }
    function redraw() {
      const whole = stage.clientWidth;
      if (!whole) return; // not to be seen: there will be a call when it is
      const width = Math.floor(whole >= WIDE ? (whole - GAP) / 2 - 1 : whole);
      panels.replaceChildren(...data.ways.map((way) => drawPanel(data, way, state, top, width)));
      numbers.replaceChildren(table(data, state));
      told.textContent = say(data, state.moment);
    }
    const point = (event) => {
      const panel = event.target.closest("svg");
      if (!panel) return;
      const { left, width } = panel.getBoundingClientRect();
      const place = Math.floor(((event.clientX - left) / width) * (last + 1));
      stop();
      go(Math.min(last, Math.max(0, place)));
    };
    panels.addEventListener("pointermove", (event) => event.pointerType === "mouse" && playing === null && point(event));
    panels.addEventListener("pointerdown", point);

    stage.append(live.element("div", { class: "controls" }, slider, play, kinds), told, panels, legend, numbers);
    new ResizeObserver(redraw).observe(stage);
    go(0);
  }

  live.register("kept", draw, { kept, most });
}
