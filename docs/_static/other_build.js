// Keeps which build's outputs a reader chose from page to page; on one page the switch needs no script.
"use strict";

(() => {
  const key = "outputs-of";
  const inputs = document.querySelectorAll(`input[name="${key}"]`);
  try {
    for (const input of inputs) {
      input.checked = input.value === (localStorage.getItem(key) ?? "here");
      input.addEventListener("change", () => localStorage.setItem(key, input.value));
    }
  } catch {
    // The browser keeps nothing.
  }
  // A link to what only one of the builds found shows that build's outputs.
  const show = () => {
    const aim = document.getElementById(location.hash.slice(1));
    const panel = aim?.closest(".of-here, .of-there");
    const input = panel && [...inputs].find(({ value }) => panel.classList.contains(`of-${value}`));
    if (input && !input.checked) {
      input.checked = true;
      aim.scrollIntoView();
    }
  };
  addEventListener("hashchange", show);
  show();
})();
