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
})();
