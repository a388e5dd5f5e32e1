// Naive, direct and ring beside each other, message by message.
//
// A message is [from, to, bytes, where in the tensor its bytes begin], as the run recorded it. What
// is on its way together makes a round. Data: n, elements and itemsize of the run, and its rounds.
"use strict";

(() => {
  const NAMES = ["naive", "direct", "ring"];
  const MESSAGE = "var(--communication)";
  const RANK = 14; // pixels from a rank's middle to its edge
  const ASIDE = 9; // messages keep to the right, so that those towards each other pass
  const SECONDS = 1.2; // of a round, played round by round
  const ALL_SECONDS = 24; // of naive, played in time: it takes longest

  // What is sent, and what that makes of what ranks hold ------------------------------------------

  const upTo = (n) => [...Array(n).keys()];
  const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);

  // Where chunks begin, as tensor_split cuts: the first ones get the elements that are left over.
  const beginsOf = (n, elements, itemsize) =>
    upTo(n + 1).map((k) => (k * Math.floor(elements / n) + Math.min(k, elements % n)) * itemsize);

  function schedule(name, n, elements, itemsize) {
    const ranks = upTo(n);
    const others = ranks.slice(1);
    const whole = elements * itemsize;
    if (name === "naive") {
      return [...others.map((r) => [[r, 0, whole, 0]]), ...others.map((r) => [[0, r, whole, 0]])];
    }
    if (name === "direct") return others.map((k) => ranks.map((r) => [r, (r + k) % n, whole, 0]));
    const begins = beginsOf(n, elements, itemsize);
    return upTo(2 * (n - 1)).map((step) =>
      ranks.map((r) => {
        const chunk = (r - 1 - step + 2 * n) % n;
        return [r, (r + 1) % n, begins[chunk + 1] - begins[chunk], begins[chunk]];
      }),
    );
  }

  // The run's own messages for its number of ranks.
  const roundsOf = (data, name, n) =>
    n === data.n ? data.rounds[name] : schedule(name, n, data.elements, data.itemsize);

  const parts = (name, n) => (name === "ring" ? n : 1);
  const partOf = (data, name, n, [, , , offset]) =>
    name === "ring" ? beginsOf(n, data.elements, data.itemsize).indexOf(offset) : 0;

  // How many ranks' values each rank holds of each part, after so many rounds.
  function holdings(data, name, n, done) {
    const held = upTo(n).map((r) => Array(parts(name, n)).fill(1 << r)); // a bit for each rank
    for (const together of roundsOf(data, name, n).slice(0, done)) {
      const before = held.map((row) => [...row]);
      for (const message of together) {
        const [from, to] = message;
        const part = partOf(data, name, n, message);
        // Direct sends what a rank began with, and adds only at the end.
        held[to][part] |= name === "direct" ? 1 << from : before[from][part];
      }
    }
    return held.map((row) => row.map((bits) => sum([...bits.toString(2)].map(Number))));
  }

  // What has been sent after so many rounds. One unit of time is what S/n bytes take over a link.
  function counts(data, name, n, done) {
    const sent = roundsOf(data, name, n).slice(0, done).flat();
    const bytes = upTo(n).map((r) => sum(sent.filter(([from]) => from === r).map(([, , b]) => b)));
    return { rounds: done, messages: sent.length, most: Math.max(...bytes), time: done * unit(name, n) };
  }
  const unit = (name, n) => (name === "ring" ? 1 : n); // of a round

  function say(name, rounds, done) {
    if (done === rounds.length) return "Done: every rank has the sum.";
    const [from, to] = rounds[done][0];
    const begun = `Round ${done + 1}: `;
    if (name === "naive" && to === 0) return `${begun}rank ${from} sends its tensor to rank 0, which adds it.`;
    if (name === "naive") return `${begun}rank 0 sends the sum to rank ${to}.`;
    if (name === "direct") {
      const places = done === 0 ? "next rank" : `one ${done + 1} places on`;
      return `${begun}every rank sends its tensor to the ${places}.`;
    }
    return done < rounds.length / 2
      ? `${begun}every rank sends a chunk to the next, which adds it.`
      : `${begun}every rank sends a finished chunk to the next, which keeps it.`;
  }

  // One algorithm: a circle of ranks, what they hold, what they have sent -------------------------

  function panelOf(data, name) {
    const circle = live.element("div");
    const said = live.told();
    const held = live.element("table", { class: "held" });
    const counted = live.element("table", { class: "counted" });
    const heading = live.element("p", { class: "name" }, name);
    const element = live.element("div", { class: "panel" }, heading, circle, said, held, counted);
    let boxes = []; // of the messages on their way: a shape and where it goes
    const clock = live.element("td");
    let drawn = "";

    // The moment `at`, in rounds; what is behind the point is how far the messages have come.
    function show(n, at) {
      const rounds = roundsOf(data, name, n);
      const done = Math.floor(at);
      const now = [n, done, element.clientWidth].join();
      if (now !== drawn && element.clientWidth) {
        drawn = now;
        said.textContent = say(name, rounds, done);
        drawCircle(n, rounds[done] ?? [], said.textContent);
        fillHeld(n, done, rounds[done] ?? []);
        fillCounted(n, done, rounds);
      }
      const passed = Math.floor(at * unit(name, n) + 1e-9);
      clock.textContent = `${passed} of ${rounds.length * unit(name, n)}`;
      for (const { box, start, end } of boxes) {
        const [x, y] = [0, 1].map((axis) => start[axis] + (at - done) * (end[axis] - start[axis]));
        box.setAttribute("transform", `translate(${x.toFixed(1)} ${y.toFixed(1)})`);
      }
    }

    function drawCircle(n, together, words) {
      const size = Math.min(element.clientWidth, 300);
      const radius = size / 2 - RANK - 4;
      const places = upTo(n).map((r) => {
        const angle = (2 * Math.PI * r) / n;
        return [size / 2 + radius * Math.sin(angle), size / 2 - radius * Math.cos(angle)];
      });
      const busy = new Set(together.flatMap(([from, to]) => [from, to]));
      const ways = together.map(([from, to]) => wayBetween(places[from], places[to]));
      const ranks = places.map(([x, y], r) =>
        live.shape(
          "g",
          { transform: `translate(${x} ${y})`, class: busy.has(r) ? "rank" : "rank waits" },
          live.shape("circle", { r: RANK }),
          live.shape("text", { y: 5, "text-anchor": "middle" }, String(r)),
        ),
      );
      boxes = together.map((message, i) => {
        const text = name === "ring" ? String(partOf(data, name, n, message)) : "S";
        const half = name === "ring" ? 9 : 12;
        const { at, length } = ways[i];
        const box = live.shape(
          "g",
          { class: "message" },
          live.shape("rect", { x: -half, y: -9, width: 2 * half, height: 18, rx: 3, fill: MESSAGE }),
          live.shape("text", { y: 5, "text-anchor": "middle" }, text),
        );
        return { box, start: at(RANK + half, ASIDE), end: at(length - RANK - half, ASIDE) };
      });
      const arrows = ways.map(arrow);
      const shapes = [...arrows, ...ranks, ...boxes.map(({ box }) => box)];
      const label = `${name}, ${n} ranks in a circle. ${words}`;
      const view = { width: size, height: size, viewBox: `0 0 ${size} ${size}` };
      circle.replaceChildren(live.shape("svg", { ...view, role: "img", "aria-label": label }, ...shapes));
    }

    function fillHeld(n, done, together) {
      const sent = new Set(together.map((m) => `${m[0]},${partOf(data, name, n, m)}`));
      const gets = new Set(together.map((m) => `${m[1]},${partOf(data, name, n, m)}`));
      const heads = name === "ring" ? upTo(n) : ["whole tensor"];
      const rows = holdings(data, name, n, done).map((row, rank) => {
        const cells = row.map((count, part) => {
          const place = `${rank},${part}`;
          const marks = [sent.has(place) && "sent", gets.has(place) && "gets", count === n && "full"];
          const cell = live.element("td", { class: marks.filter(Boolean).join(" ") }, String(count));
          cell.style.setProperty("--share", `${(45 * count) / n}%`);
          return cell;
        });
        return live.element("tr", {}, live.element("th", { scope: "row" }, `rank ${rank}`), ...cells);
      });
      const corner = live.element("td", {}, name === "ring" ? "chunk" : "");
      const columns = heads.map((head) => live.element("th", { scope: "col" }, String(head)));
      const caption = live.element("caption", {}, "Holds the values of how many ranks?");
      held.replaceChildren(caption, live.element("tr", {}, corner, ...columns), ...rows);
    }

    function fillCounted(n, done, rounds) {
      const [so, all] = [done, rounds.length].map((count) => counts(data, name, n, count));
      const sending = new Set((rounds[done] ?? []).map(([from]) => from)).size;
      const rows = [
        ["rounds", `${so.rounds} of ${all.rounds}`],
        ["messages", `${so.messages} of ${all.messages}`],
        ["most bytes a rank sent", `${so.most.toLocaleString("en-US")} of ${all.most.toLocaleString("en-US")}`],
        ["ranks that send now", `${sending} of ${n}`],
        ["time, 1 for S/n bytes", clock],
      ];
      counted.replaceChildren(
        ...rows.map(([what, value]) => {
          const head = live.element("th", { scope: "row" }, what);
          return live.element("tr", {}, head, value === clock ? clock : live.element("td", {}, value));
        }),
      );
    }

    return { name, element, said, show };
  }

  // From place to place: `at(along, aside)` is so many pixels on, and to the right of the line.
  function wayBetween([x0, y0], [x1, y1]) {
    const length = Math.hypot(x1 - x0, y1 - y0);
    const [x, y] = [(x1 - x0) / length, (y1 - y0) / length];
    return { length, at: (along, aside) => [x0 + along * x - aside * y, y0 + along * y + aside * x] };
  }

  function arrow({ length, at }) {
    const tip = length - RANK + 1;
    const line = (...points) => `M${points.map((point) => point.map((v) => v.toFixed(1)).join(" ")).join("L")}`;
    const head = line(at(tip - 7, ASIDE + 4), at(tip, ASIDE), at(tip - 7, ASIDE - 4));
    return live.shape("path", { class: "way", stroke: MESSAGE, d: line(at(RANK, ASIDE), at(tip, ASIDE)) + head });
  }

  // All three, and the controls --------------------------------------------------------------------

  function draw(stage, data) {
    let n = data.n >= 2 && data.n <= 8 ? data.n : 4;
    let inTime = false; // else a step is a round of each
    let chosen = "ring"; // the one that a narrow screen shows
    let at = 0; // steps
    let until = 0; // where playing stops
    let timer = null; // while playing
    const panels = NAMES.map((name) => panelOf(data, name));

    const last = () => 2 * (n - 1) * (inTime ? unit("naive", n) : 1);
    const speed = () => (inTime ? Math.max(1, last() / ALL_SECONDS) : 1 / SECONDS); // steps a second

    function show() {
      for (const { name, show } of panels) {
        const steps = inTime ? at / unit(name, n) : at;
        show(n, Math.min(steps, roundsOf(data, name, n).length));
      }
      slider.set(Math.floor(at));
    }

    function stop() {
      if (timer) timer();
      timer = null;
      play.textContent = "Play";
      for (const { said } of panels) said.setAttribute("aria-live", "polite");
    }

    function run(to) {
      stop();
      until = to;
      play.textContent = "Pause";
      for (const { said } of panels) said.setAttribute("aria-live", "off"); // not each round read out
      timer = live.lessMotion() ? everySecond(leap) : everyFrame(move);
    }

    function move(seconds) {
      at = Math.min(until, at + seconds * speed());
      if (at === until) stop();
      show();
    }

    function leap() {
      at = Math.min(until, Math.floor(at) + Math.ceil(speed()));
      if (at === until) stop();
      show();
    }

    function goTo(step) {
      stop();
      at = Math.max(0, Math.min(last(), step));
      show();
    }

    function stepOn() {
      const next = Math.min(last(), Math.floor(at) + 1);
      if (live.lessMotion()) goTo(next);
      else if (at < next) run(next);
    }

    function begin() {
      if (at === last()) at = 0;
      run(last());
    }

    // For another number of ranks or another kind of step: from the start.
    function anew() {
      stop();
      at = 0;
      const made = newSlider();
      slider.replaceWith(made);
      slider = made;
      const size = `${(data.elements * data.itemsize).toLocaleString("en-US")} bytes`;
      source.textContent =
        n === data.n
          ? `Shown: the messages recorded in this run, ${n} ranks and S = ${size}.`
          : `Shown: the messages by the algorithms' schedules, ${n} ranks and S = ${size}. ` +
            `This run had ${data.n}.`;
      show();
    }

    const newSlider = () =>
      live.slider(inTime ? "Time" : "Round", {
        min: 0,
        max: last(),
        value: 0,
        show: (value) => `${value} of ${last()}`,
      }, goTo);

    function fit() {
      const narrow = stage.clientWidth < 720;
      which.hidden = !narrow;
      for (const { name, element } of panels) element.hidden = narrow && name !== chosen;
      show();
    }

    const ranks = [2, 3, 4, 5, 6, 7, 8].map((count) => [count, String(count)]);
    const chooseRanks = live.choice("Ranks", ranks, n, (count) => {
      n = count;
      anew();
    });
    const steps = [[false, "a round of each"], [true, "the same time"]];
    const chooseStep = live.choice("One step is", steps, inTime, (value) => {
      inTime = value;
      anew();
    });
    const which = live.choice("Show", NAMES.map((name) => [name, name]), chosen, (name) => {
      chosen = name;
      fit();
    });
    const play = live.button("Play", () => (timer ? stop() : begin()));
    const back = live.button("Step back", () => goTo(Math.ceil(at) - 1));
    const on = live.button("Step on", stepOn);
    let slider = newSlider();
    const source = live.told();
    const circles = live.element("div", { class: "panels" }, ...panels.map(({ element }) => element));
    stage.append(
      live.element("div", { class: "controls" }, chooseRanks, chooseStep, which),
      live.element("div", { class: "controls" }, play, back, on, slider),
      source,
      circles,
      live.element("p", { class: "note" }, NOTE),
    );
    anew();
    new ResizeObserver(fit).observe(stage);
    if (!live.lessMotion()) playWhenSeen(stage, circles, begin);
  }

  const NOTE =
    "S is the whole tensor; a message with a number carries that chunk. In the tables a frame is " +
    "what a rank sends, dashes where something arrives. Direct adds at the end; till then its " +
    "number says how many tensors a rank has. A dotted rank neither sends nor receives. Times and " +
    "rounds are not recorded but follow from the order in which the algorithms send and receive: " +
    "a link carries one message at a time in each direction, a message takes no time to start, " +
    "and S/n bytes take a time of 1. Chunks that differ by one value count as equal.";

  // Each starts something and returns what ends it.
  function everyFrame(move) {
    let before = performance.now();
    let frame = requestAnimationFrame(function next(now) {
      frame = requestAnimationFrame(next);
      const seconds = Math.min(0.1, Math.max(0, now - before) / 1000); // a hidden page has no frames
      before = now;
      move(seconds);
    });
    return () => cancelAnimationFrame(frame);
  }
  function everySecond(move) {
    const timer = setInterval(move, 1000);
    return () => clearInterval(timer);
  }

  // Unless the reader is at work on it already.
  function playWhenSeen(stage, circles, begin) {
    const observer = new IntersectionObserver(
      ([entry]) => {
        if (!entry.isIntersecting) return;
        observer.disconnect();
        begin();
      },
      { threshold: 0.4 },
    );
    observer.observe(circles);
    for (const event of ["click", "input"]) stage.addEventListener(event, () => observer.disconnect());
  }

  live.register("ring", draw, { schedule, roundsOf, holdings, counts, say });
})();
