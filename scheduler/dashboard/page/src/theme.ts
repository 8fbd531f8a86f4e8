// Light or dark: as the system has it, until somebody chooses.

const KEY = "elastune.theme";

export function applyTheme(): void {
  const chosen = localStorage.getItem(KEY);
  if (chosen) document.documentElement.dataset.theme = chosen;
  else delete document.documentElement.dataset.theme;
}

export function isDark(): boolean {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

export function turnTheme(): void {
  localStorage.setItem(KEY, isDark() ? "light" : "dark");
  applyTheme();
}
