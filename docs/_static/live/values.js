// Figures whose values can be pointed at: with a mouse, by a tap, and by the arrow keys.
//
// A frame (class "figure") has a figure's pictures and a script (class "values") with its series:
// a name, labels and texts of each value, and where the values lie, in fractions of their axes,
// in the wide picture and in the narrow one. docs/_ext/figures/scraper.py writes it.
"use strict";

{
  const NEAR = 40; // pixels, from where on a value is meant
  const PHONE = matchMedia("(max-width: 40em)"); // as the narrow picture's

  // What is said of a value, in lines.
  const linesOf = ({ name, labels, texts }, index) => {
    const lines = texts[index].map((text, i) => (labels[i] ? `${labels[i]}: ${text}` : text));
    return name ? [name, ...lines] : lines;
  };

  // A value's box, or its point as a box without a size, in fractions of the picture.
  function boxOf(data, which, index) {
    const form = data[PHONE.matches ? "narrow" : "wide"];
    const places = form.places ?? data.wide.places;
    const [left, top, width, height] = form.boxes[data.series[which].axes];
    const [x0, y0, x1 = x0, y1 = y0] = places[which][index];
    return {
      left: left + width * x0,
      right: left + width * x1,
      top: top + height * y0,
      bottom: top + height * y1,
    };
  }

  // The value nearest to a place in the picture, as [series, index]; among boxes around it, that
  // whose middle is nearest. None if all are further away than `limit` pixels.
  function nearest(data, x, y, width, height, limit, only) {
    let best = null;
    let least = [limit, Infinity];
    data.series.forEach((series, which) => {
      if (only !== undefined && which !== only) return;
      series.texts.forEach((_, index) => {
        const box = boxOf(data, which, index);
        const aside = Math.max(box.left - x, 0, x - box.right) * width;
        const below = Math.max(box.top - y, 0, y - box.bottom) * height;
        const middle = [(box.left + box.right) / 2 - x, (box.top + box.bottom) / 2 - y];
        const far = [Math.hypot(aside, below), Math.hypot(middle[0] * width, middle[1] * height)];
        if (far[0] < least[0] || (far[0] === least[0] && far[1] < least[1])) {
          best = [which, index];
          least = far;
        }
      });
    });
    return best;
  }

  function begin(figure) {
    const data = JSON.parse(figure.querySelector("script.values").textContent);
    const picture = () => [...figure.querySelectorAll("img")].find((image) => image.offsetWidth);
    const heard = live.element("p", { class: "heard", role: "status" });
    const mark = live.element("div", { class: "mark", hidden: "", "aria-hidden": "true" });
    const label = "Values of this figure: the arrow keys go from one to the next";
    const keys = live.element("div", { class: "pointing", tabindex: "0", role: "application", "aria-label": label });
    figure.append(keys, mark, heard);
    const tip = live.tip(figure);
    let at = [0, 0];
    let shown = ""; // by "keys" or "pointer", or not at all

    const hide = () => {
      mark.hidden = true;
      shown = "";
      tip.hide();
    };

    function show(value, by) {
      at = value;
      shown = by;
      const lines = linesOf(data.series[at[0]], at[1]);
      const box = boxOf(data, ...at);
      const [image, frame] = [picture().getBoundingClientRect(), figure.getBoundingClientRect()];
      const place = {
        left: image.left - frame.left + box.left * image.width,
        top: image.top - frame.top + box.top * image.height,
        width: (box.right - box.left) * image.width,
        height: (box.bottom - box.top) * image.height,
      };
      for (const [side, pixels] of Object.entries(place)) mark.style[side] = `${pixels}px`;
      mark.classList.toggle("point", data.wide.places[at[0]][at[1]].length === 2);
      mark.hidden = false;
      tip.show(lines, frame.left + place.left + place.width / 2, frame.top + place.top);
      if (by === "keys") heard.textContent = lines.join(", ");
    }

    function point(event) {
      const image = picture().getBoundingClientRect();
      const x = (event.clientX - image.left) / image.width;
      const y = (event.clientY - image.top) / image.height;
      const value = nearest(data, x, y, image.width, image.height, NEAR);
      if (value) show(value, "pointer");
      else hide();
    }

    // Left and right go along a series; up and down to another one, to the value nearest to this.
    function step(key) {
      if (!shown) return at;
      let [which, index] = at;
      const count = data.series.length;
      if (key === "ArrowRight") index = Math.min(index + 1, data.series[which].texts.length - 1);
      if (key === "ArrowLeft") index = Math.max(index - 1, 0);
      if (key === "ArrowDown") which = (which + 1) % count;
      if (key === "ArrowUp") which = (which + count - 1) % count;
      if (which === at[0]) return [which, index];
      const { left, right, top } = boxOf(data, ...at);
      return nearest(data, (left + right) / 2, top, 1, 0, Infinity, which) ?? at;
    }

    figure.addEventListener("pointermove", (event) => event.pointerType === "mouse" && point(event));
    figure.addEventListener("pointerdown", point);
    figure.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && hide());
    document.addEventListener("pointerdown", (event) => figure.contains(event.target) || hide());
    document.addEventListener("keydown", (event) => event.key === "Escape" && hide());
    window.addEventListener("resize", hide);
    keys.addEventListener("blur", () => shown === "keys" && hide()); // a tap shows before it
    keys.addEventListener("keydown", (event) => {
      if (!event.key.startsWith("Arrow") || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      show(step(event.key), "keys");
    });
  }

  const beginAll = () => {
    for (const script of document.querySelectorAll(".figure > script.values")) begin(script.parentElement);
  };
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", beginAll);
  else beginAll();
}
