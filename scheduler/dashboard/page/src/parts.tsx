// Small things that several views show alike.

import type { ComponentChildren } from "preact";
import { colorOf } from "./colors";
import { number } from "./format";
import { linkTo } from "./route";
import { store } from "./store";
import type { Trial } from "./types";

export function TrialName({ trial }: { trial: Trial }) {
  return (
    <a class="trial" href={linkTo({ view: "trial", trial: trial.id })}>
      <i class="dot" style={{ background: colorOf(trial) }} />
      {store.label(trial)}
    </a>
  );
}

export function State({ state }: { state: string }) {
  return <span class={`state ${state}`}>{state}</span>;
}

/** Slots that it holds of those that it could use. */
export function Slots({ trial }: { trial: Trial }) {
  const held = trial.slots ?? 0;
  const most = Math.min(trial.max * trial.size, 16);
  return (
    <span class="slots" title={`${held} of at most ${trial.max * trial.size} slots`} aria-label={`${held} slots`} role="img">
      {Array.from({ length: Math.max(most, Math.min(held, 16)) }, (_, index) => (
        <i key={index} class={index < held ? "held" : ""} style={index < held ? { background: colorOf(trial) } : undefined} />
      ))}
      {held > 16 && `+${held - 16}`}
    </span>
  );
}

/** A table that scrolls where it is wider than the page; the children are its rows. */
export function Plain({ names, children }: { names: (string | false)[]; children: ComponentChildren }) {
  return (
    <div class="scroll">
      <table>
        <thead>
          <tr>
            {names.filter((name) => name !== false).map((name) => (
              <th scope="col" key={name}>
                {name || <span class="sr">change</span>}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>{children}</tbody>
      </table>
    </div>
  );
}

/** Numbers that a decision stood on. */
export function Weighed({ numbers }: { numbers: Record<string, number | null> }) {
  return (
    <span class="weighed">
      {Object.entries(numbers).map(([name, found]) => (
        <span key={name}>
          {name} <b>{number(found)}</b>
        </span>
      ))}
    </span>
  );
}

export function Meter({ share, label }: { share: number | undefined; label: string }) {
  if (share === undefined) return <span class="dim">–</span>;
  return (
    <span class="meter" role="img" aria-label={`${label} ${Math.round(share * 100)}%`} title={`${label} ${share.toFixed(3)}`}>
      <i style={{ width: `${Math.max(2, Math.min(100, share * 100))}%` }} />
    </span>
  );
}

export function mine(study: string): Trial[] {
  const all = [...store.trials.values()];
  return study ? all.filter((trial) => trial.study === study) : all;
}

/** What a trial is judged by: what it returned, else its latest report. */
export function scoreOf(trial: Trial): number | null {
  const found = trial.value === undefined || trial.value === null ? trial.latest : trial.value;
  const first = Array.isArray(found) ? found[0] : found;
  return first === undefined ? null : first;
}

export function isBetter(first: number, second: number, direction: string): boolean {
  return direction === "maximize" ? first > second : first < second;
}

/** A trial that counts: one that gave a value, and not one that was stopped on its way. */
export function bestOf(trials: Trial[], direction: string): Trial | undefined {
  let best: Trial | undefined;
  for (const trial of trials) {
    const score = trial.state === "succeeded" ? scoreOf(trial) : null;
    if (score !== null && (best === undefined || isBetter(score, scoreOf(best) ?? NaN, direction))) best = trial;
  }
  return best;
}
