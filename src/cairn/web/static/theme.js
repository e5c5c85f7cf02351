// Before the first paint: the theme that was chosen here last, else what the system prefers.
try {
  const chosen = localStorage.getItem("cairn-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage is switched off: the system's theme it is.
}
