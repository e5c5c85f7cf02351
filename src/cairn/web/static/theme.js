// Runs before the first paint: the theme chosen here last, else that of the system.
try {
  const chosen = localStorage.getItem("cairn-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage is off: the system's theme applies.
}
