// Of every page: the menu on a phone, the copy buttons, and the search, whose index is a script beside the page.
"use strict";

(() => {
  document.getElementById("menu").addEventListener("click", () => document.body.classList.toggle("open"));

  for (const button of document.querySelectorAll("button.copy")) {
    button.addEventListener("click", () => {
      const text = button.nextElementSibling.textContent;
      const done = () => { button.textContent = "copied"; setTimeout(() => { button.textContent = "copy"; }, 1500); };
      if (navigator.clipboard) navigator.clipboard.writeText(text).then(done, () => select(button));
      else select(button);
    });
  }

  function select(button) {  // where the clipboard is closed to a page, mark the text for the reader
    getSelection().selectAllChildren(button.nextElementSibling);
  }

  const input = document.getElementById("search"), found = document.getElementById("found");
  let asked = false;

  function load() {
    if (asked) return;
    asked = true;
    const script = document.createElement("script");
    script.src = "assets/index.js";
    script.onload = show;
    document.head.appendChild(script);
  }

  function show() {
    found.replaceChildren();
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length || typeof SEARCH_INDEX === "undefined") return;
    const score = (entry) => {
      const title = entry.title.toLowerCase(), text = entry.text.toLowerCase();
      if (!words.every((word) => text.includes(word) || title.includes(word))) return 0;
      return 1 + 9 * words.filter((word) => title.includes(word)).length;
    };
    const hits = SEARCH_INDEX.map((entry) => [score(entry), entry]).filter(([s]) => s);
    hits.sort((a, b) => b[0] - a[0]);
    for (const [, entry] of hits.slice(0, 12)) {
      const link = document.createElement("a");
      link.href = entry.url;
      const at = Math.max(0, entry.text.toLowerCase().indexOf(words[0]) - 40);
      link.innerHTML = "<b></b><span></span>";
      link.firstChild.textContent = entry.page === entry.title ? entry.page : `${entry.page}: ${entry.title}`;
      link.lastChild.textContent = `…${entry.text.slice(at, at + 110)}…`;
      found.appendChild(link);
    }
    if (!hits.length) found.textContent = "nothing found";
  }

  input.addEventListener("focus", load);
  input.addEventListener("input", () => { load(); show(); });
  document.addEventListener("click", (event) => {
    if (!event.target.closest("header")) found.replaceChildren();
    if (event.target.closest("nav a")) document.body.classList.remove("open");
  });
})();
