// How the search goes: the best value so far, what good parameters have in common, and which of them matter.

import { useMemo, useState } from "preact/hooks";
import { part, useAsked } from "../api";
import { Chart, ink } from "../chart";
import { number } from "../format";
import { Parallel, spansDecades } from "../parallel";
import { isBetter, mine, scoreOf } from "../parts";
import { store, useStore } from "../store";
import { FINAL, type Study, type Trial } from "../types";

export function SearchView({ study }: { study: string }) {
  useStore(1000);
  const studies = study ? store.studies.filter((each) => each.name === study) : store.studies;
  return (
    <>
      <h1>Search</h1>
      {studies.length === 0 && <p class="empty">There is no study yet.</p>}
      {studies.slice(-6).map((each) => (
        <OneStudy key={each.name} study={each} open={studies.length === 1} />
      ))}
    </>
  );
}

function OneStudy({ study, open }: { study: Study; open: boolean }) {
  const [top, setTop] = useState(20);
  const trials = mine(study.name);
  const slots = useMemo(() => slotSeconds(), [store.version]);
  if (trials.length === 0) return null;
  return (
    <section aria-label={`Study ${study.title}`}>
      {!open && <h2>{study.title}</h2>}
      <div class="columns">
        <History study={study} trials={trials} over="time" slots={slots} />
        <History study={study} trials={trials} over="hours" slots={slots} />
      </div>
      <div class="line">
        <h3>Parallel coordinates</h3>
        <label>
          best{" "}
          <input type="range" min={1} max={100} value={top} onInput={(event) => setTop(Number(event.currentTarget.value))} /> {top}%
        </label>
      </div>
      <Parallel trials={trials} direction={study.direction} top={top} />
      <div class="columns">
        <Importance study={study} ended={trials.filter((trial) => FINAL.has(trial.state)).length} />
        <Slices study={study} trials={trials} />
      </div>
    </section>
  );
}

function slotSeconds(): Map<string, number> {
  const found = new Map<string, number>();
  const now = store.now();
  for (const [, id, , , began, ended] of store.intervals.values()) found.set(id, (found.get(id) ?? 0) + (ended ?? now) - began);
  return found;
}

interface HistoryProps {
  study: Study;
  trials: Trial[];
  over: "time" | "hours";
  slots: Map<string, number>;
}

function History({ study, trials, over, slots }: HistoryProps) {
  const ended = trials.filter((trial) => trial.state === "succeeded" && scoreOf(trial) !== null && trial.finished !== undefined);
  const mark = ended.map((trial) => trial.id).join(",");
  const data = useMemo(() => {
    const ordered = [...ended].sort((a, b) => (a.finished ?? 0) - (b.finished ?? 0));
    // What was spent until then: of all trials that had ended, whatever became of them.
    const spent = [...trials].filter((trial) => trial.finished !== undefined).sort((a, b) => (a.finished ?? 0) - (b.finished ?? 0));
    let [hours, next] = [0, 0];
    const x: number[] = [];
    const values: number[] = [];
    const best: number[] = [];
    for (const trial of ordered) {
      for (let each = spent[next]; each && (each.finished ?? 0) <= (trial.finished ?? 0); each = spent[next]) {
        hours += (slots.get(each.id) ?? 0) / 3600;
        next += 1;
      }
      const score = scoreOf(trial) ?? NaN;
      const before = best[best.length - 1];
      x.push(over === "time" ? (trial.finished ?? 0) : hours);
      values.push(score);
      best.push(before !== undefined && isBetter(before, score, study.direction) ? before : score);
    }
    return [x, values, best] as [number[], number[], number[]];
  }, [mark, over]);
  if (ended.length === 0) return <p class="empty">No trial of {study.title} has ended with a value yet.</p>;
  return (
    <Chart
      title={`best value over ${over === "time" ? "time" : "slot hours"} (${study.direction})`}
      height={200}
      time={over === "time"}
      xLabel={over === "hours" ? "slot hours of the trials that are over" : undefined}
      data={data}
      lines={[
        { label: "value", color: ink("--series-3"), points: true },
        { label: "best so far", color: ink("--series-0"), width: 2, stepped: true },
      ]}
    />
  );
}

function Importance({ study, ended }: { study: Study; ended: number }) {
  const [found, error] = useAsked<{ importance?: Record<string, number>; why?: string }>(`/page/importance?study=${part(study.name)}`, 0, Math.floor(ended / 4));
  const why = error || found?.why;
  return (
    <figure class="chart">
      <figcaption>how much each parameter mattered</figcaption>
      {why && <p class="empty">{why}</p>}
      <ul class="bars">
        {Object.entries(found?.importance ?? {}).map(([name, share]) => (
          <li key={name}>
            <span>{name}</span>
            <i style={{ width: `${Math.max(1, share * 100)}%` }} />
            <b>{Math.round(share * 100)}%</b>
          </li>
        ))}
      </ul>
    </figure>
  );
}

function Slices({ study, trials }: { study: Study; trials: Trial[] }) {
  const scored = trials.filter((trial) => scoreOf(trial) !== null && trial.parameters && (trial.state === "succeeded" || trial.state === "pruned"));
  const names = [...new Set(scored.flatMap((trial) => Object.keys(trial.parameters ?? {})))];
  const [name, setName] = useState("");
  const shown = names.includes(name) ? name : (names[0] ?? "");
  const mark = scored.map((trial) => trial.id).join(",");
  const log = spansDecades(scored.map((trial) => trial.parameters?.[shown]));
  const { data, choices } = useMemo(() => {
    const texts = [...new Set(scored.map((trial) => trial.parameters?.[shown]).filter((each) => typeof each !== "number" && each !== undefined).map(String))].sort();
    const points = scored
      .map((trial) => {
        const found = trial.parameters?.[shown];
        const at = typeof found === "number" ? (log ? Math.log10(found) : found) : texts.indexOf(String(found));
        return found === undefined ? null : ([at, scoreOf(trial), trial.state] as const);
      })
      .filter((each) => each !== null)
      .sort((a, b) => a[0] - b[0]);
    return {
      choices: texts,
      data: [
        points.map((each) => each[0]),
        points.map((each) => (each[2] === "succeeded" ? each[1] : null)),
        points.map((each) => (each[2] === "pruned" ? each[1] : null)),
      ] as [number[], (number | null)[], (number | null)[]],
    };
  }, [mark, shown, log]);
  if (!shown) return <p class="empty">The scheduler knows no parameters of {study.title}.</p>;
  return (
    <div>
      <label>
        value against{" "}
        <select value={shown} onChange={(event) => setName(event.currentTarget.value)}>
          {names.map((each) => (
            <option key={each}>{each}</option>
          ))}
        </select>
      </label>
      <Chart
        title={`value against ${shown}${log ? " (power of ten)" : ""}${choices.length ? `: ${choices.map((each, index) => `${index} = ${each}`).join(", ")}` : ""}`}
        height={200}
        xLabel={shown}
        data={data}
        lines={[
          { label: "value", color: ink("--series-0"), points: true },
          { label: "pruned", color: ink("--dim"), points: true },
        ]}
      />
      <p class="dim hint">{number(scored.length, 7)} trials; grey: pruned</p>
    </div>
  );
}
