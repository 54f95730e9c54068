// Markdown as language models write it, into DOM nodes. Nothing is ever parsed as HTML, so no text can become an element that is
// not made here: what isn't known stays text.

function element(name, ...children) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}

// A model that repeats itself nests marks without end; below this depth they stay text.
const deepest = 40;

// Code first, since nothing inside it means anything; bold before italic. Bounds keep a mark that is never closed from being sought to
// the end of a long line, again for each of thousands of them.
const marks = [
  [/(`+)([^`]|[^`][\s\S]{0,2000}?[^`])\1(?!`)/g, (m) => element("code", m[2].replace(/^ (.*) $/, "$1"))],
  [/\*\*(?=\S)([\s\S]{0,2000}?\S)\*\*/g, (m, ...within) => element("strong", ...inline(m[1], ...within))],
  [/(?<![\w*])\*(?=[^\s*])([^*\n]{0,2000}?[^\s*])\*(?![\w*])/g, (m, ...within) => element("em", ...inline(m[1], ...within))],
  [/(?<!\w)_(?=[^\s_])([^_\n]{0,2000}?[^\s_])_(?!\w)/g, (m, ...within) => element("em", ...inline(m[1], ...within))],
  [/~~(?=\S)([\s\S]{0,2000}?\S)~~/g, (m, ...within) => element("del", ...inline(m[1], ...within))],
];
// The text of a link takes marks alone: of a link in a link, the inner one would be followed.
const spans = [
  ...marks,
  [/\[([^\]\n]{1,500})\]\((https?:\/\/[^\s()<>]+(?:\([^\s()<>]*\)[^\s()<>]*)*)\)/g, (m, depth) => link(m[2], inline(m[1], depth, marks))],
  [/https?:\/\/[^\s<>()"'`\]]*[^\s<>()"'`\].,;:!?]/g, (m) => link(m[0], [m[0]])],
];

function link(address, children) {
  const made = element("a", ...children);
  made.href = address;
  made.target = "_blank";
  made.rel = "noopener noreferrer";
  return made;
}

function inline(text, depth = 0, known = spans) {
  const out = [], next = []; // next: what each pattern finds from here on; null: nothing
  let at = 0;
  while (at < text.length && depth < deepest) {
    let first = null, make = null;
    known.forEach(([pattern, builder], i) => {
      if (next[i] === undefined || next[i]?.index < at) {
        pattern.lastIndex = at;
        next[i] = pattern.exec(text);
      }
      if (next[i] && (!first || next[i].index < first.index)) [first, make] = [next[i], builder];
    });
    if (!first) break;
    if (first.index > at) out.push(text.slice(at, first.index));
    out.push(make(first, depth + 1, known));
    at = first.index + first[0].length;
  }
  if (at < text.length) out.push(text.slice(at));
  return out;
}

function withBreaks(lines) {
  const out = [];
  lines.forEach((line, i) => {
    if (i > 0) out.push(element("br"));
    out.push(...inline(line));
  });
  return out;
}

const fence = /^ {0,3}(```+|~~~+)\s*([^`]*)$/;
const heading = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const bullet = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const rule = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const quote = /^ {0,3}> ?(.*)$/;

function beginsBlock(line) {
  return fence.test(line) || heading.test(line) || bullet.test(line) || rule.test(line) || quote.test(line);
}

function cells(line) {
  return line.trim().replace(/^\|/, "").replace(/\|$/, "").split("|").map((cell) => cell.trim());
}

function isTableRule(line) { return cells(line).every((cell) => /^:?-+:?$/.test(cell)); }

function table(lines) {
  const row = (line, name) => element("tr", ...cells(line).map((cell) => element(name, ...inline(cell))));
  return element("table", element("thead", row(lines[0], "th")), element("tbody", ...lines.slice(2).map((line) => row(line, "td"))));
}

// Items of one list: a line that begins with a mark at this depth starts one, what is indented under it belongs to it.
function list(lines, depth) {
  const ordered = /\d/.test(bullet.exec(lines[0])[2]);
  const made = element(ordered ? "ol" : "ul");
  if (ordered) made.start = parseInt(bullet.exec(lines[0])[2], 10);
  const indent = bullet.exec(lines[0])[1].length;
  let item = null;
  const close = () => { if (item) made.append(element("li", ...blocks(item, depth, true))); };
  for (const line of lines) {
    const found = bullet.exec(line);
    if (found && found[1].length <= indent + 1) {
      close();
      item = [found[3]];
    } else {
      item.push(line.replace(/^\s{1,4}/, ""));
    }
  }
  close();
  return made;
}

function takeWhile(lines, from, test) {
  let to = from;
  while (to < lines.length && test(lines[to], to)) to++;
  return to;
}

function blocks(lines, depth = 0, tight = false) {
  if (depth >= deepest) return [element("p", lines.join("\n"))];
  const out = [];
  for (let i = 0; i < lines.length;) {
    const line = lines[i];
    let found, to;
    if (!line.trim()) {
      i++;
    } else if ((found = fence.exec(line))) {
      const end = new RegExp(`^ {0,3}${found[1][0] === "`" ? "`" : "~"}{${found[1].length},}\\s*$`);
      to = takeWhile(lines, i + 1, (l) => !end.test(l));
      out.push(element("pre", element("code", lines.slice(i + 1, to).join("\n"))));
      i = to + 1;
    } else if ((found = heading.exec(line))) {
      out.push(element(`h${Math.min(found[1].length + 2, 5)}`, ...inline(found[2])));
      i++;
    } else if (rule.test(line)) {
      out.push(element("hr"));
      i++;
    } else if (quote.test(line)) {
      to = takeWhile(lines, i, (l) => quote.test(l));
      out.push(element("blockquote", ...blocks(lines.slice(i, to).map((l) => quote.exec(l)[1]), depth + 1)));
      i = to;
    } else if (bullet.test(line)) {
      const ordered = /\d/.test(bullet.exec(line)[2]);
      to = takeWhile(lines, i, (l, at) => {
        const mark = bullet.exec(l);
        if (mark) return at === i || mark[1].length > 0 || /\d/.test(mark[2]) === ordered;
        return /^\s+\S/.test(l) || (!l.trim() && at + 1 < lines.length && /^(\s+\S)/.test(lines[at + 1])) ||
          (!l.trim() && at + 1 < lines.length && bullet.test(lines[at + 1]) && /\d/.test(bullet.exec(lines[at + 1])[2]) === ordered);
      });
      out.push(list(lines.slice(i, to), depth + 1));
      i = to;
    } else if (line.includes("|") && i + 1 < lines.length && isTableRule(lines[i + 1])) {
      to = takeWhile(lines, i, (l) => l.includes("|"));
      out.push(table(lines.slice(i, to)));
      i = to;
    } else {
      to = takeWhile(lines, i, (l, at) => l.trim() && (at === i || !beginsBlock(l)));
      const content = withBreaks(lines.slice(i, to));
      if (tight && out.length === 0) out.push(...content);
      else out.push(element("p", ...content));
      i = to;
    }
  }
  return out;
}

export function render(text) {
  const out = document.createDocumentFragment();
  out.append(...blocks(text.replace(/\r\n?/g, "\n").split("\n")));
  return out;
}
