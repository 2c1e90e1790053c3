// Ranks the results of the site's search. Sphinx gives all pages that have the words of a query one
// score. Here pages come first that have the words in a heading, and results lead to that section.

const HEADING = 10; // of each word, times the share of the heading that the words are

const stems = (text) => {
  const stemmer = new Stemmer();
  const words = text.toLowerCase().match(/[\p{L}\p{N}_]+/gu) ?? [];
  return new Set(words.map((word) => stemmer.stemWord(word)).filter((word) => !stopwords.has(word)));
};

// Headings by page, each with its anchor and stems; made once, by the first result.
let headings = null;
const headingsOf = (page) => {
  if (headings === null) {
    headings = {};
    for (const [text, places] of Object.entries(Search._index.alltitles))
      for (const [number, anchor] of places)
        (headings[Search._index.docnames[number]] ??= []).push({ text, anchor, stems: stems(text) });
  }
  return headings[page] ?? [];
};

var Scorer = {
  score: (result) => {
    const [page, title, , , score, , kind] = result;
    if (kind !== "text") return score;
    const query = stems(new URLSearchParams(window.location.search).get("q") ?? "");
    let best = { score: 0 };
    for (const heading of headingsOf(page)) {
      const found = [...query].filter((word) => heading.stems.has(word)).length;
      const score = HEADING * found * (0.5 + found / (2 * heading.stems.size));
      if (found && score > best.score) best = { ...heading, score };
    }
    if (best.anchor) {
      result[1] = `${title} > ${best.text}`;
      result[2] = `#${best.anchor}`;
    }
    return score + best.score;
  },

  // As Sphinx has them.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
