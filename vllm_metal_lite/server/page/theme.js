// Light or dark, before anything is drawn: the only script that is not a module.
"use strict";
{
  const KEY = "metal-lite-theme";
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const stored = () => {
    try { return localStorage.getItem(KEY); } catch { return null; }
  };
  const apply = () => {
    document.documentElement.dataset.theme = stored() ?? (dark.matches ? "dark" : "light");
    document.dispatchEvent(new Event("theme"));
  };
  dark.addEventListener("change", apply);
  apply();
  window.switchTheme = () => {
    const other = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem(KEY, other); } catch { /* only this visit */ }
    document.documentElement.dataset.theme = other;
    document.dispatchEvent(new Event("theme"));
  };
}
