// Sphinx's search, whose weights these are. A result that leads to a section is named after it.
"use strict";

var Scorer = {
  score(result) {
    const [docname, title, anchor, , score] = result;
    const { docnames, alltitles } = Search._index;
    const place = docnames.indexOf(docname);
    const id = anchor.replace(/^#/, "");
    for (const [section, places] of Object.entries(alltitles)) {
      if (id && places.some(([file, at]) => file === place && at === id)) {
        if (!title.endsWith(section)) result[1] = `${title} > ${section}`;
        break;
      }
    }
    return score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
