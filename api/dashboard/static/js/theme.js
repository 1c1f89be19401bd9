// Sets the theme before the first paint: the choice kept in this browser, else what the system prefers.
(() => {
  const wanted = () => {
    let kept = null;
    try { kept = localStorage.getItem("whimbrel-theme"); } catch { /* storage is switched off: follow the system */ }
    return kept ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  };
  const apply = (theme) => { document.documentElement.dataset.theme = theme; };
  apply(wanted());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    apply(wanted());
    document.dispatchEvent(new Event("themechange"));
  });
  document.addEventListener("click", (event) => {
    if (!event.target.closest?.("#theme")) return;
    const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("whimbrel-theme", theme); } catch { /* then it lasts for this page */ }
    apply(theme);
    document.dispatchEvent(new Event("themechange"));
  });
})();
