// Numbers and times as people read them.

export function number(value: number | null | undefined, digits = 4): string {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(Math.max(0, digits - 2)).replace("e+", "e");
  return String(Number(value.toPrecision(digits)));
}

export function duration(seconds: number): string {
  if (!Number.isFinite(seconds)) return "–";
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min${whole % 60 && whole < 600 ? ` ${whole % 60} s` : ""}`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h${Math.floor((whole % 3600) / 60) ? ` ${Math.floor((whole % 3600) / 60)} min` : ""}`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

export function clock(at: number): string {
  return new Date(at * 1000).toLocaleTimeString(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
}

export function moment(at: number): string {
  const day = new Date(at * 1000);
  const today = new Date().toDateString() === day.toDateString();
  return today ? clock(at) : `${day.toLocaleDateString()} ${clock(at)}`;
}

export function percent(share: number | undefined): string {
  return share === undefined ? "–" : `${Math.round(share * 100)}%`;
}

export function value(found: number | number[] | null | undefined): string {
  return Array.isArray(found) ? found.map((each) => number(each)).join(", ") : number(found);
}

export function plural(count: number, word: string): string {
  return `${count} ${word}${count === 1 ? "" : "s"}`;
}
