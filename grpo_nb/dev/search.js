"use strict";
const sections = JSON.parse(document.getElementById("sections").textContent);
const box = document.getElementById("search");
const list = document.getElementById("found");
box.addEventListener("input", () => {
  const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
  const rank = ([, , heading, text]) => {
    const [high, low] = [heading.toLowerCase(), text.toLowerCase()];
    if (!words.length || !words.every((word) => high.includes(word) || low.includes(word))) return 0;
    return 1 + words.filter((word) => high.includes(word)).length;
  };
  const ranked = sections.map((section) => [rank(section), section]).filter(([points]) => points);
  ranked.sort(([a], [b]) => b - a);
  list.replaceChildren(
    ...ranked.slice(0, 40).map(([, [page, anchor, heading, text]]) => {
      const [item, link, more] = ["li", "a", "div"].map((name) => document.createElement(name));
      link.href = `${page}.html#${anchor}`;
      link.textContent = `${page}: ${heading}`;
      const at = Math.max(0, text.toLowerCase().indexOf(words[0]) - 60);
      more.textContent = text.slice(at, at + 160);
      item.append(link, more);
      return item;
    }),
  );
});
