// Light or dark, before anything is drawn: the only script that is not a module.
"use strict";
{
  const KEY = "metal-lite-theme";
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const stored = () => {
    try { return localStorage.getItem(KEY); } catch { return null; }
  };
  const show = (theme) => {
    document.documentElement.dataset.theme = theme;
    document.dispatchEvent(new Event("theme"));
  };
  const apply = () => show(stored() ?? (dark.matches ? "dark" : "light"));
  dark.addEventListener("change", apply);
  apply();
  window.switchTheme = () => {
    const other = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem(KEY, other); } catch { /* only this visit */ }
    show(other);
  };
}
