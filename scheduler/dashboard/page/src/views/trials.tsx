// All trials in a table that can be sorted and searched, and the curves of those that are chosen.

import { useEffect, useMemo, useState } from "preact/hooks";
import { Actions } from "../actions";
import { Chart, aligned } from "../chart";
import { colorOf } from "../colors";
import { duration, moment, number, percent, plural, value } from "../format";
import { Meter, Slots, State, TrialName, mine, scoreOf } from "../parts";
import { linkTo } from "../route";
import { store, useStore } from "../store";
import { type Column, Table, sortedBy } from "../table";
import { FINAL, type Trial, WAITING } from "../types";

const MOST_CHOSEN = 40;

export function TrialsView({ study }: { study: string }) {
  useStore(300);
  const [words, setWords] = useState("");
  const [state, setState] = useState("");
  const [sorted, setSorted] = useState({ column: "number", down: true });
  const [chosen, setChosen] = useState<ReadonlySet<string>>(new Set());

  const all = mine(study);
  const names = parameterNames(all);
  const wide = useMemo(nameWidth, [store.trials.size, store.studies.length]);
  const columns = useMemo(() => columnsOf(names.split("\n").filter(Boolean), wide, chosen, setChosen), [names, wide, chosen]);
  const found = all.filter((trial) => matches(trial, words, state));
  const rows = sortedBy(found, columns.find((column) => column.name === sorted.column), sorted.down);
  const picked = [...chosen].map((id) => store.trials.get(id)).filter((trial) => trial !== undefined);

  return (
    <>
      <div class="line">
        <h1>Trials</h1>
        <label>
          <span class="sr">Find</span>
          <input
            type="search"
            placeholder="find: words, lr>0.01, batch<64"
            size={30}
            value={words}
            onInput={(event) => setWords(event.currentTarget.value)}
          />
        </label>
        <label>
          <span class="sr">State</span>
          <select value={state} onChange={(event) => setState(event.currentTarget.value)}>
            <option value="">any state</option>
            {["live", "waiting", "running", "paused", "succeeded", "pruned", "failed", "cancelled"].map((each) => (
              <option key={each}>{each}</option>
            ))}
          </select>
        </label>
        <span class="dim" role="status">
          {plural(rows.length, "trial")}
          {rows.length < all.length ? ` of ${all.length}` : ""}
          {chosen.size ? `, ${chosen.size} chosen` : ""}
        </span>
        <span class="grow" />
        {chosen.size > 0 && (
          <button type="button" onClick={() => setChosen(new Set())}>
            Choose none
          </button>
        )}
        <button
          type="button"
          onClick={() => setChosen(new Set(rows.slice(0, 10).map((trial) => trial.id)))}
          disabled={rows.length === 0}
        >
          Compare the first 10
        </button>
      </div>
      {picked.length > 0 && <Actions trials={picked} />}
      <Table
        label="Trials"
        columns={columns}
        rows={rows}
        id={(trial) => trial.id}
        sorted={sorted}
        onSort={(column) => setSorted({ column, down: sorted.column === column ? !sorted.down : true })}
        onOpen={(trial) => (location.hash = linkTo({ view: "trial", trial: trial.id }))}
        height={picked.length ? "38vh" : "68vh"}
      />
      {picked.length > 0 && <Curves trials={picked.slice(0, MOST_CHOSEN)} />}
    </>
  );
}

function parameterNames(trials: Trial[]): string {
  const names = new Set<string>();
  for (const trial of trials) for (const name of Object.keys(trial.parameters ?? {})) names.add(name);
  return [...names].slice(0, 24).join("\n");
}

const COMPARED = /^([\w.]+)(<=|>=|<|>|=)(.+)$/;

/** Every word has to be found: in name, state, reason or parameters, or as a comparison. */
export function matches(trial: Trial, words: string, state: string): boolean {
  if (state === "live" && FINAL.has(trial.state)) return false;
  if (state === "waiting" && !WAITING.has(trial.state)) return false;
  if (state && state !== "live" && state !== "waiting" && trial.state !== state) return false;
  return words
    .split(/\s+/)
    .filter(Boolean)
    .every((word) => {
      const compared = COMPARED.exec(word);
      if (compared) {
        const [, name = "", sign = "=", wanted = ""] = compared;
        const own = { value: scoreOf(trial), batch: trial.batch, goodput: trial.goodput, promise: trial.promise, number: trial.number };
        const mine = trial.parameters?.[name] ?? own[name as keyof typeof own];
        if (mine === undefined || mine === null) return false;
        const [first, second] = [Number(mine), Number(wanted)];
        if (Number.isNaN(first) || Number.isNaN(second)) return sign === "=" && String(mine) === wanted;
        return sign === "<" ? first < second : sign === ">" ? first > second : sign === "<=" ? first <= second : sign === ">=" ? first >= second : first === second;
      }
      const text = `${store.label(trial)} ${trial.id} ${trial.study} ${trial.state} ${trial.why} ${trial.error ?? ""} ${JSON.stringify(trial.parameters ?? {})}`;
      return text.toLowerCase().includes(word.toLowerCase());
    });
}

const LETTER = 9;

/** As wide as the longest name of a study wants, up to 24 letters. */
function nameWidth(): number {
  const longest = [...store.trials.values()].reduce((most, trial) => Math.max(most, store.label(trial).length), 6);
  return 40 + LETTER * Math.min(longest, 24);
}

function columnsOf(names: string[], wide: number, chosen: ReadonlySet<string>, choose: (chosen: ReadonlySet<string>) => void): Column<Trial>[] {
  const turn = (id: string) => {
    const next = new Set(chosen);
    if (!next.delete(id)) next.add(id);
    choose(next);
  };
  return [
    {
      name: "chosen",
      label: "",
      width: 34,
      cell: (trial) => (
        <input type="checkbox" aria-label={`choose ${store.label(trial)}`} checked={chosen.has(trial.id)} onChange={() => turn(trial.id)} />
      ),
    },
    { name: "number", label: "trial", width: wide, key: (trial) => trial.submitted, cell: (trial) => <TrialName trial={trial} /> },
    { name: "state", label: "state", width: 92, key: (trial) => trial.state, cell: (trial) => <State state={trial.state} /> },
    { name: "value", label: "value", width: 84, right: true, key: scoreOf, cell: (trial) => value(trial.value ?? trial.latest) },
    { name: "slots", label: "slots", width: 96, key: (trial) => trial.slots ?? 0, cell: (trial) => (FINAL.has(trial.state) ? "" : <Slots trial={trial} />) },
    { name: "promise", label: "promise", width: 92, key: (trial) => trial.promise, cell: (trial) => (FINAL.has(trial.state) ? "" : <Meter share={trial.promise} label="promise" />) },
    { name: "done", label: "done", width: 66, right: true, key: (trial) => trial.done, cell: (trial) => (trial.done === undefined ? "" : percent(trial.done)) },
    { name: "step", label: "step", width: 64, right: true, key: (trial) => trial.step, cell: (trial) => (trial.step === undefined ? "" : number(trial.step, 7)) },
    { name: "batch", label: "batch", width: 64, right: true, key: (trial) => trial.batch, cell: (trial) => (trial.batch ? number(trial.batch, 7) : "") },
    { name: "goodput", label: "goodput/s", width: 104, right: true, key: (trial) => trial.goodput, cell: (trial) => (trial.goodput ? number(trial.goodput, 3) : "") },
    {
      name: "why",
      label: "why",
      width: 250,
      grow: 1,
      key: (trial) => trial.code,
      cell: (trial) => (
        <span>
          {trial.error ?? trial.why}
          {trial.expected !== undefined && !FINAL.has(trial.state) ? ` (in about ${duration(trial.expected - store.now())})` : ""}
        </span>
      ),
      title: (trial) => trial.error ?? trial.why,
    },
    ...names.map(
      (name): Column<Trial> => ({
        name: `parameter ${name}`,
        label: name,
        width: 100,
        right: true,
        key: (trial) => {
          const found = trial.parameters?.[name];
          return typeof found === "boolean" ? Number(found) : found;
        },
        cell: (trial) => {
          const found = trial.parameters?.[name];
          return typeof found === "number" ? number(found) : found === undefined ? "" : String(found);
        },
      }),
    ),
    {
      name: "took",
      label: "took",
      width: 84,
      right: true,
      key: (trial) => (trial.finished ?? store.now()) - trial.submitted,
      cell: (trial) => duration((trial.finished ?? store.now()) - trial.submitted),
      title: (trial) => `submitted ${moment(trial.submitted)}`,
    },
  ];
}

const AXES = [
  ["step", "step"],
  ["progress", "progress (examples at the initial batch size)"],
  ["time", "time"],
] as const;

export function Curves({ trials }: { trials: Trial[] }) {
  useStore(300);
  const [axis, setAxis] = useState<"step" | "progress" | "time">("step");
  const [log, setLog] = useState(false);
  const ids = trials.map((trial) => trial.id).join(",");
  useEffect(() => {
    const missing = ids.split(",").filter((id) => id && !store.curves.has(id));
    for (const id of missing) store.curves.set(id, []);
    void store.readCurves(missing);
  }, [ids]);
  useEffect(
    () => () => {
      store.curves.clear();
    },
    [],
  );
  const mark = trials.map((trial) => store.curves.get(trial.id)?.length ?? 0).join(",");
  const data = useMemo(() => {
    const place = axis === "step" ? 0 : axis === "progress" ? 2 : 3;
    return aligned(
      trials.map((trial) => {
        const points = (store.curves.get(trial.id) ?? []).filter((point) => point[place] !== null && point[1] !== null);
        return { x: points.map((point) => point[place] as number), y: points.map((point) => point[1]) };
      }),
    );
  }, [ids, axis, mark]);
  return (
    <section aria-labelledby="curves">
      <div class="line">
        <h2 id="curves">Learning curves</h2>
        <label>
          over{" "}
          <select value={axis} onChange={(event) => setAxis(event.currentTarget.value as typeof axis)}>
            {AXES.map(([name]) => (
              <option key={name}>{name}</option>
            ))}
          </select>
        </label>
        <label>
          <input type="checkbox" checked={log} onChange={(event) => setLog(event.currentTarget.checked)} /> logarithmic
        </label>
        <span class="legend">
          {trials.slice(0, 12).map((trial) => (
            <TrialName key={trial.id} trial={trial} />
          ))}
        </span>
      </div>
      {data[0].length === 0 ? (
        <p class="empty">None of them has reported yet.</p>
      ) : (
        <Chart
          title="reported values"
          lines={trials.map((trial) => ({ label: store.label(trial), color: colorOf(trial) }))}
          data={data}
          height={260}
          time={axis === "time"}
          xLabel={AXES.find(([name]) => name === axis)?.[1]}
          log={log}
          onPick={(line) => {
            const trial = trials[line];
            if (trial) location.hash = linkTo({ view: "trial", trial: trial.id });
          }}
        />
      )}
    </section>
  );
}
