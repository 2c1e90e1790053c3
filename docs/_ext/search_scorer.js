// Ranks the results of the site's search. Sphinx gives all pages that have the words of a query one
// score. Here pages come first that have the words in their headings, and a result leads to the section
// whose heading has most of them. A phrase of search_words.py (PHRASES) is one more heading of its page or
// section, for queries that have all of its words.

const HEADING = 10; // of each word in a heading, for a heading of these words alone; else less
const TITLE = 1.5; // times as much for the title of the page
const PAGE = 4; // of each word in any heading of the page
const FOR_MAKERS = 0.7; // of pages for those who change jaxrec: others look for guides
const REFERENCE = 0.85; // of pages of the API: a guide with the same words comes first

const stems = (text) => {
  const stemmer = new Stemmer();
  const skipped = new Set(stopwords); // An array before Sphinx 9.
  const words = text.toLowerCase().match(/[\p{L}\p{N}_]+/gu) ?? [];
  return new Set(words.map((word) => stemmer.stemWord(word)).filter((word) => !skipped.has(word)));
};

// Headings by page, each with its anchor and stems; made once, by the first result.
let headings = null;
const headingsOf = (page) => {
  if (headings === null) {
    headings = {};
    for (const [text, places] of Object.entries(Search._index.alltitles))
      for (const [number, anchor] of places)
        (headings[Search._index.docnames[number]] ??= []).push({ text, anchor, stems: stems(text) });
    for (const [place, phrases] of Object.entries(PHRASES)) {
      const [name, anchor] = place.split("#");
      const heading = headings[name].find((each) => (each.anchor ?? "") === (anchor ?? ""));
      for (const phrase of phrases)
        headings[name].push({ ...heading, stems: stems(phrase), isPhrase: true });
    }
  }
  return headings[page] ?? [];
};

var Scorer = {
  score: (result) => {
    const [page, title, , , score, , kind] = result;
    if (kind !== "text") return score;
    const query = stems(new URLSearchParams(window.location.search).get("q") ?? "");
    const covered = new Set();
    let best = 0;
    let pageBest = 0; // of its title and its own phrases
    let section = { score: 0 };
    for (const heading of headingsOf(page)) {
      const found = [...query].filter((word) => heading.stems.has(word));
      if (heading.isPhrase && found.length < heading.stems.size) continue;
      found.forEach((word) => covered.add(word));
      const words = found.length;
      const score = words && HEADING * words * (0.5 + words / (2 * heading.stems.size));
      const ofPage = heading.text === title;
      if (ofPage) pageBest = Math.max(pageBest, score);
      else if (score > section.score) section = { ...heading, score };
      best = Math.max(best, ofPage ? TITLE * score : score);
    }
    if (section.anchor && section.score >= pageBest) {
      result[1] = `${title} > ${section.text}`;
      result[2] = `#${section.anchor}`;
    }
    const isForMakers = /^(internals|results)\/|^changelog$/.test(page);
    const share = isForMakers ? FOR_MAKERS : page.startsWith("api/") ? REFERENCE : 1;
    return share * (score + best + PAGE * covered.size);
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
