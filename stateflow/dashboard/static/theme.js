// Sets light or dark before anything is drawn: as chosen here, otherwise as the system says.
"use strict";
const dark = matchMedia("(prefers-color-scheme: dark)");
function chosen() {
  try {
    return localStorage.getItem("stateflow-theme");
  } catch {
    return null;
  } // storage may be forbidden
}
function follow() {
  const theme = chosen();
  document.documentElement.dataset.theme = theme === "light" || theme === "dark" ? theme : dark.matches ? "dark" : "light";
}
dark.addEventListener("change", follow);
follow();
