// One colour for each request, the same in all views, equally bright, in both themes.

const GOLDEN = 137.508;  // degrees: neighbours in number differ most

/** The palette of the theme that is shown. */
export function palette() {
  const dark = document.documentElement.dataset.theme === "dark";
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(name).trim();
  return {
    request: (n, strength = 1) => {
      const light = (dark ? 0.74 : 0.66) + (n % 3 - 1) * 0.05;
      return `oklch(${light} 0.145 ${(n * GOLDEN + 210) % 360} / ${strength})`;
    },
    free: of("--free"), cached: of("--cached"), shared: of("--shared"),
    line: of("--line"), text: of("--soft"), ink: of("--text"), back: of("--panel"),
  };
}
