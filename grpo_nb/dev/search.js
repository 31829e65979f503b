"use strict";
const sections = JSON.parse(document.getElementById("sections").textContent);
const box = document.getElementById("search");
const list = document.getElementById("found");
const plain = (text) => text.toLowerCase().replaceAll("β", "beta").replaceAll("custom", "own");
box.addEventListener("input", () => {
  const words = plain(box.value).split(/\s+/).filter(Boolean);
  const rank = ([, , heading, text]) => {
    const [high, low] = [plain(heading), plain(text)];
    const [inText, inHeading] = [low, high].map((where) => words.filter((word) => where.includes(word)).length);
    return 2 * Math.max(inText, inHeading) < words.length + 1 ? 0 : inText + 2 * inHeading;
  };
  const ranked = sections.map((section) => [rank(section), section]).filter(([points]) => points);
  ranked.sort(([a], [b]) => b - a);
  list.replaceChildren(
    ...ranked.slice(0, 40).map(([, [page, anchor, heading, text]]) => {
      const [item, link, more] = ["li", "a", "div"].map((name) => document.createElement(name));
      link.href = `${page}.html#${anchor}`;
      link.textContent = `${page}: ${heading}`;
      const at = Math.max(0, plain(text).indexOf(words.find((word) => plain(text).includes(word))) - 60);
      more.textContent = text.slice(text.lastIndexOf(" ", at) + 1, at + 160);
      item.append(link, more);
      return item;
    }),
  );
});
