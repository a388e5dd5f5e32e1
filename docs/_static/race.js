// The landing page's figure plays once, by its style sheet. This adds a button that plays it again.
"use strict";

for (const race of document.querySelectorAll("figure.race")) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Play again";
  button.addEventListener("click", () => {
    const again = race.classList.contains("again");
    race.classList.remove("again", "once-more");
    race.classList.add(again ? "once-more" : "again"); // another name, so that it starts anew
  });
  race.querySelector("figcaption").prepend(button);
}
