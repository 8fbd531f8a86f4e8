// Who held which slot when, as rectangles: where they are is worked out here, drawing them is somebody else's.

import type { Interval, Node } from "./types";

export interface Row {
  node: string;
  slot: number;
  label: string;
}

export interface Bar {
  interval: Interval;
  row: number;
  left: number;
  right: number;
}

export interface Span {
  from: number;
  until: number;
}

/** A row for each slot that there is, and for each that somebody held which is gone. */
export function rowsOf(nodes: Node[], intervals: Iterable<Interval>): Row[] {
  const rows = new Map<string, Row>();
  const put = (node: string, slot: number) => {
    const key = `${node} ${slot}`;
    if (!rows.has(key)) rows.set(key, { node, slot, label: `${node} · ${slot}` });
  };
  for (const node of nodes) for (let slot = 0; slot < node.slots; slot += 1) put(node.name, slot);
  for (const interval of intervals) put(interval[2], interval[3]);
  const place = new Map(nodes.map((node, index) => [node.name, index]));
  const at = (row: Row) => place.get(row.node) ?? nodes.length;
  return [...rows.values()].sort((a, b) => at(a) - at(b) || a.node.localeCompare(b.node) || a.slot - b.slot);
}

export function wholeSpan(intervals: Iterable<Interval>, now: number): Span {
  let from = now;
  let until = -Infinity;
  for (const [, , , , began, ended] of intervals) {
    from = Math.min(from, began);
    until = Math.max(until, ended ?? now);
  }
  if (!Number.isFinite(until)) until = now;
  return { from, until: Math.max(until, from + 1) };
}

/** Rectangles within `width` pixels, those outside the span left out. */
export function barsOf(intervals: Iterable<Interval>, rows: Row[], span: Span, width: number, now: number): Bar[] {
  const place = new Map(rows.map((row, index) => [`${row.node} ${row.slot}`, index]));
  const scale = width / (span.until - span.from);
  const bars: Bar[] = [];
  for (const interval of intervals) {
    const [, , node, slot, began, ended] = interval;
    const row = place.get(`${node} ${slot}`);
    const left = (began - span.from) * scale;
    const right = ((ended ?? now) - span.from) * scale;
    if (row === undefined || right < 0 || left > width) continue;
    bars.push({ interval, row, left: Math.max(0, left), right: Math.min(width, right) });
  }
  return bars;
}

export function barAt(bars: Bar[], x: number, row: number): Bar | undefined {
  // Two that follow each other at once share a pixel; the later one is drawn over the other.
  let found: Bar | undefined;
  for (const bar of bars) if (bar.row === row && bar.left <= x && x <= Math.max(bar.right, bar.left + 1)) found = bar;
  return found;
}

export function ticksOf(span: Span, width: number): number[] {
  const least = ((span.until - span.from) * 90) / Math.max(width, 90);
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800];
  const step = steps.find((each) => each >= least) ?? 2592000;
  const ticks: number[] = [];
  for (let at = Math.ceil(span.from / step) * step; at <= span.until; at += step) ticks.push(at);
  return ticks;
}
