// The trials that a trial comes from, and those that come from it, as a tree over time.

import { useRef } from "preact/hooks";
import { useWidth } from "../chart";
import { colorOf } from "../colors";
import { clock, number } from "../format";
import { ticksOf } from "../gantt";
import { scoreOf } from "../parts";
import { linkTo } from "../route";
import { store } from "../store";
import type { Trial } from "../types";

const ROW = 18;
const LABELS = 90;
const AXIS = 20;
const MOST = 150;

export interface Branch {
  trial: Trial;
  row: number;
  /** Row of the trial whose state it began with. */
  parent?: number;
}

/** The whole family of a trial, parents above those that came from them, in the order in which these began. */
export function familyOf(trial: Trial, trials: Map<string, Trial>): Branch[] {
  let root = trial;
  const seen = new Set([root.id]);
  for (let next = trials.get(root.parent ?? ""); next && !seen.has(next.id); next = trials.get(root.parent ?? "")) {
    seen.add(next.id);
    root = next;
  }
  const heirs = new Map<string, Trial[]>();
  for (const each of trials.values()) if (each.parent) heirs.set(each.parent, [...(heirs.get(each.parent) ?? []), each]);
  const family: Branch[] = [];
  const waiting: { trial: Trial; parent?: number }[] = [{ trial: root }];
  for (let next = waiting.pop(); next && family.length < MOST; next = waiting.pop()) {
    const row = family.length;
    family.push({ ...next, row });
    const theirs = (heirs.get(next.trial.id) ?? []).sort((a, b) => b.submitted - a.submitted);
    waiting.push(...theirs.map((each) => ({ trial: each, parent: row })));
  }
  return family;
}

export function Descent({ trial }: { trial: Trial }) {
  const home = useRef<HTMLDivElement>(null);
  const width = useWidth(home, 600);
  const family = familyOf(trial, store.trials);
  if (family.length < 2) return null;
  const now = store.now();
  const from = Math.min(...family.map((each) => each.trial.submitted));
  const until = Math.max(from + 1, ...family.map((each) => each.trial.finished ?? now));
  const plot = Math.max(100, width - LABELS - 50);
  const x = (at: number) => LABELS + ((at - from) / (until - from)) * plot;
  const y = (row: number) => row * ROW + ROW / 2;
  const height = family.length * ROW;
  return (
    <section aria-labelledby="descent">
      <h2 id="descent">Whose state it began with, and who began with its own</h2>
      <div ref={home}>
        <svg width={width} height={height + AXIS} role="img" aria-label={`A tree of ${family.length} trials over time`}>
          {family.map(({ trial: each, row, parent }) => (
            <a key={each.id} href={linkTo({ view: "trial", trial: each.id })} class="branch">
              <text x={LABELS - 8} y={y(row)} text-anchor="end" dominant-baseline="middle" font-weight={each.id === trial.id ? 700 : 400}>
                {each.number}
              </text>
              {parent !== undefined && (
                <path d={`M ${x(each.submitted)} ${y(parent)} V ${y(row)}`} stroke="currentColor" opacity="0.45" />
              )}
              <rect
                x={x(each.submitted)}
                y={y(row) - 5}
                width={Math.max(2, x(each.finished ?? now) - x(each.submitted))}
                height={10}
                fill={colorOf(each)}
                opacity={each.id === trial.id ? 1 : 0.6}
              >
                <title>
                  {`trial ${store.label(each)}: ${each.state}`}
                  {each.parent ? `, began with the state of ${each.parent}` : ""}
                </title>
              </rect>
              <text x={x(each.finished ?? now) + 6} y={y(row)} dominant-baseline="middle" class="dim">
                {number(scoreOf(each), 3)}
              </text>
            </a>
          ))}
          {ticksOf({ from, until }, plot).map((tick) => (
            <text key={tick} x={x(tick)} y={height + 13} text-anchor="middle" class="dim">
              {clock(tick)}
            </text>
          ))}
        </svg>
      </div>
      {family.length === MOST && <p class="dim">The first {MOST} are shown.</p>}
    </section>
  );
}
