// What was decided and why, as a story, and what trials waited for over time.

import { useEffect, useMemo, useState } from "preact/hooks";
import { get, part, useAsked } from "../api";
import { Chart, ink } from "../chart";
import { clock, moment, plural } from "../format";
import { TrialName, Weighed, mine } from "../parts";
import { store, useStore } from "../store";
import { type Entry, WAITING } from "../types";

const PAGE = 100;
const MOST = 1000;
const KEPT = 5000;
const KINDS: [string, string, (entry: Entry) => boolean][] = [
  ["", "everything", () => true],
  ["sizes", "rescales", (entry) => entry.what.endsWith("replicas") || entry.what.endsWith("replica")],
  ["waits", "waiting", (entry) => entry.what === "waits" || entry.what === "paused"],
  ["ends", "ends", (entry) => ["succeeded", "pruned", "failed", "cancelled"].includes(entry.what)],
  ["warnings", "warnings and losses", (entry) => entry.what === "warning" || entry.code.includes("lost")],
];

export function WhyView({ study }: { study: string }) {
  useStore(1000);
  const waiting = mine(study).filter((trial) => WAITING.has(trial.state));
  const reasons = new Map<string, number>();
  for (const trial of waiting) reasons.set(trial.why, (reasons.get(trial.why) ?? 0) + 1);
  return (
    <>
      <h1>Why</h1>
      <section aria-labelledby="now">
        <h2 id="now">Now{store.policy ? `, as the policy “${store.policy}” sees it` : ""}</h2>
        {waiting.length === 0 ? (
          <p class="empty">No trial waits.</p>
        ) : (
          <ul class="reasons">
            {[...reasons].sort((a, b) => b[1] - a[1]).map(([why, count]) => (
              <li key={why}>
                <b>{plural(count, "trial")}</b>: {why}
              </li>
            ))}
          </ul>
        )}
      </section>
      <Waiting study={study} />
      <Story study={study} />
    </>
  );
}

interface Series {
  at: number[];
  reasons: Record<string, number[]>;
}

function Waiting({ study }: { study: string }) {
  const [series, error] = useAsked<Series>(`/page/waiting${study ? `?study=${part(study)}` : ""}`, 5);
  // In one order, so that a reason keeps its colour whichever came up first.
  const names = Object.keys(series?.reasons ?? {}).sort((one, other) => placeOf(one) - placeOf(other) || one.localeCompare(other));
  // Stacked: each line is what it and those below it count.
  const stacked = useMemo(() => {
    if (!series) return null;
    const sums: number[][] = [];
    for (const name of names) {
      const below = sums[sums.length - 1];
      sums.push((series.reasons[name] ?? []).map((count, index) => count + (below?.[index] ?? 0)));
    }
    return [series.at, ...sums.reverse()] as [number[], ...number[][]];
  }, [series]);
  const shades = [...names].reverse();
  return (
    <section aria-labelledby="over-time">
      <h2 id="over-time">What trials waited for, over time</h2>
      {error && <p class="error">{error}</p>}
      {stacked && names.length > 0 ? (
        <Chart
          title="trials that wait, by reason"
          height={170}
          time
          data={stacked}
          lines={shades.map((name) => ({ label: reasonOf(name), color: shade(names.indexOf(name)), fill: shade(names.indexOf(name)), width: 1 }))}
        />
      ) : (
        <p class="empty">No trial has waited.</p>
      )}
      <p class="legend">
        {names.map((name, index) => (
          <span key={name}>
            <i class="dot" style={{ background: shade(index) }} /> {reasonOf(name)}
          </span>
        ))}
      </p>
    </section>
  );
}

/** What a reason's code says, for a legend: sentences differ in their numbers. */
const REASONS: Record<string, string> = {
  submitted: "the next decision",
  held: "its study's share, or others that come first",
  no_free_slot: "a free slot",
  no_free_block: "free slots on one node",
  preparing: "its imports",
  paused: "being resumed",
  gives_way: "more promising trials",
  lost: "a restart after a loss",
  launch_failed: "a replica that could not be started",
};

function reasonOf(code: string): string {
  return REASONS[code] ?? code.replaceAll("_", " ");
}

function placeOf(code: string): number {
  const place = Object.keys(REASONS).indexOf(code);
  return place < 0 ? Object.keys(REASONS).length : place;
}

function shade(index: number): string {
  return ink(`--series-${index % 6}`);
}

function Story({ study }: { study: string }) {
  useStore(1000);
  const [entries, setEntries] = useState<Entry[]>([]);
  const [kind, setKind] = useState("");
  const [older, setOlder] = useState(true);
  const [error, setError] = useState("");
  const ask = (most: number, until?: number) =>
    get<Entry[]>(`/page/story?most=${most}${study ? `&study=${part(study)}` : ""}${until === undefined ? "" : `&until=${until}`}`);
  useEffect(() => {
    let wanted = true;
    let latest = -Infinity;
    const look = async () => {
      try {
        let found = await ask(PAGE);
        // More than a page has happened since: what lies in between is asked for as well.
        if (latest > -Infinity && (found[found.length - 1]?.at ?? 0) > latest) found = await ask(MOST);
        if (!wanted) return;
        if (latest === -Infinity) setOlder(found.length === PAGE);
        latest = found[0]?.at ?? latest;
        const oldest = found[found.length - 1]?.at ?? 0;
        setEntries((present) => [...found, ...present.filter((entry) => entry.at < oldest)].slice(0, KEPT));
        setError("");
      } catch (refused) {
        if (wanted) setError((refused as Error).message);
      }
    };
    setEntries([]);
    void look();
    const timer = setInterval(() => void look(), 3000);
    return () => {
      wanted = false;
      clearInterval(timer);
    };
  }, [study]);
  const shown = entries.filter(KINDS.find(([name]) => name === kind)?.[2] ?? (() => true));
  return (
    <section aria-labelledby="story">
      <div class="line">
        <h2 id="story">What happened, the latest first</h2>
        <label>
          <span class="sr">Kind</span>
          <select value={kind} onChange={(event) => setKind(event.currentTarget.value)}>
            {KINDS.map(([name, label]) => (
              <option key={name} value={name}>
                {label}
              </option>
            ))}
          </select>
        </label>
      </div>
      {error && <p class="error">{error}</p>}
      <Entries entries={shown} />
      {older && (
        <button
          type="button"
          onClick={() => {
            const last = entries[entries.length - 1];
            if (!last) return;
            // Those of the last moment that are known already come once more, first.
            const known = entries.filter((entry) => entry.at === last.at).length;
            void ask(PAGE + known, last.at).then((found) => {
              setEntries([...entries, ...found.slice(known)]);
              setOlder(found.length === PAGE + known);
            });
          }}
        >
          Earlier
        </button>
      )}
    </section>
  );
}

export function Entries({ entries }: { entries: Entry[] }) {
  if (entries.length === 0) return <p class="empty">Nothing yet.</p>;
  return (
    <ol class={entries.some((entry) => entry.trial) ? "story" : "story of-one"}>
      {entries.map((entry, index) => {
        const trial = entry.trial ? store.trials.get(entry.trial) : undefined;
        return (
          <li key={`${entry.at} ${entry.trial ?? ""} ${index}`}>
            <time title={moment(entry.at)}>{clock(entry.at)}</time>
            {entry.trial && <span class="who">{trial ? <TrialName trial={trial} /> : entry.trial}</span>}
            <span class="what">{entry.what}</span>
            <span class="because">
              {withNames(entry.why)}
              {entry.numbers && <Weighed numbers={entry.numbers} />}
            </span>
            <span class="dim">{entry.who}</span>
          </li>
        );
      })}
    </ol>
  );
}

/** People know trials by their number. */
export function withNames(sentence: string): string {
  return sentence.replace(/\bt[0-9a-f]{10}\b/g, (id) => {
    const trial = store.trials.get(id);
    return trial ? `trial ${store.label(trial)}` : id;
  });
}
