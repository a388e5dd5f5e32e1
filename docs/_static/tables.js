// Sorts the tables that a chapter printed (docs/_ext/pages/printed_tables.py): a header's button sorts
// their rows by its column, ascending, then descending, then as they were printed. A cell counts by
// its first number, in its unit, as microddp/report.py writes them; behind these come words, and at
// last, in either direction, blanks.
"use strict";
{
  const NUMBER = /^([<>~=\s]*)([+\-\u2212]?(?:inf\b|(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+)?(?:e[+-]?\d+)?))\s*([^\s(,;]*)/i;
  const WORDS = new Intl.Collator("en", { numeric: true });

  // How many seconds, bytes, bits a second or ones are in a unit.
  const UNITS = { "%": 0.01, k: 1e3, M: 1e6, G: 1e9, T: 1e12 };
  const TIMES = { ns: 1e-9, us: 1e-6, "\u00b5s": 1e-6, ms: 1e-3, s: 1, min: 60, h: 3600, day: 86400, days: 86400 };
  Object.assign(UNITS, TIMES);
  ["", "k", "M", "G", "T"].forEach((prefix, power) => {
    for (const unit of ["bit/s", "B", "B/s", "FLOP", "FLOP/s"]) UNITS[prefix + unit] = 1000 ** power;
    const binary = power ? `${prefix.toUpperCase()}i` : "";
    for (const unit of ["B", "B/s"]) UNITS[binary + unit] = 1024 ** power;
  });

  // A cell's number in its unit, or NaN if it does not begin with one.
  function quantity(text) {
    const [, , digits, unit] = NUMBER.exec(text);
    if (!/\d|inf/i.test(digits)) return NaN;
    const number = Number(digits.replaceAll(",", "").replace("\u2212", "-").replace(/inf/i, "Infinity"));
    return number * (UNITS[unit] ?? 1);
  }

  // How two cells' texts are ordered; 0 where they are equal.
  function compared(one, other) {
    const [first, second] = [quantity(one), quantity(other)];
    if (Number.isNaN(first) !== Number.isNaN(second)) return Number.isNaN(first) ? 1 : -1;
    if (first < second) return -1;
    if (first > second) return 1;
    return WORDS.compare(one, other);
  }

  function sort(table, place, direction, printed) {
    const text = (row) => row.cells[place].textContent.trim();
    const rows = [...printed];
    if (direction) {
      const sign = direction === "ascending" ? 1 : -1;
      rows.sort((one, other) => {
        const [first, second] = [text(one), text(other)];
        if (!first || !second) return Number(!first) - Number(!second);
        return sign * compared(first, second);
      });
    }
    table.tBodies[0].append(...rows);
  }

  const NEXT = { ascending: "descending", descending: undefined, undefined: "ascending" };

  function makeSortable(table) {
    const headers = [...(table.tHead?.rows[0].cells ?? [])];
    const printed = [...table.tBodies[0].rows];
    if (printed.length < 2) return;
    headers.forEach((header, place) => {
      if (header.tagName !== "TH") return;
      const button = document.createElement("button");
      button.type = "button";
      button.title = "Sort by this column";
      button.append(...header.childNodes);
      header.append(button);
      button.addEventListener("click", () => {
        const direction = NEXT[header.getAttribute("aria-sort") ?? undefined];
        for (const each of headers) each.removeAttribute("aria-sort");
        if (direction) header.setAttribute("aria-sort", direction);
        sort(table, place, direction, printed);
      });
    });
  }

  document.querySelectorAll("table.printed").forEach(makeSortable);
}
