// A classic script in the head, so that the first paint has the right theme. What was chosen is remembered.
(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const kept = () => {
    try { return localStorage.getItem("april-theme"); } catch { return null; } // storage may be blocked
  };
  const keep = (theme) => {
    try { localStorage.setItem("april-theme", theme); } catch { return; }
  };
  const apply = () => {
    root.dataset.theme = kept() ?? (system.matches ? "dark" : "light");
    root.dispatchEvent(new Event("april:theme"));
  };
  apply();
  system.addEventListener("change", apply);
  addEventListener("DOMContentLoaded", () => {
    for (const button of document.querySelectorAll("[data-theme-toggle]")) {
      button.hidden = false;
      button.addEventListener("click", () => {
        const theme = root.dataset.theme === "dark" ? "light" : "dark";
        keep(theme);
        root.dataset.theme = theme;
        root.dispatchEvent(new Event("april:theme"));
      });
    }
  });
})();
