// One trial: how it trains, what was decided about it and why, and what its replicas say.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { Actions } from "../actions";
import { get, part, useAsked } from "../api";
import { Chart, ink } from "../chart";
import { colorOf } from "../colors";
import { clock, duration, moment, number, percent, plural, value } from "../format";
import { Slots, State, Weighed } from "../parts";
import { store, useStore } from "../store";
import { FINAL, type Measurement, type Replica, type TrialStory, WAITING } from "../types";
import { Descent } from "./descent";
import { Entries, withNames } from "./why";

const LOOK_SECONDS = 2;

export function TrialView({ id }: { id: string }) {
  useStore(300);
  const live = store.trials.get(id);
  const over = live ? FINAL.has(live.state) : false;
  const [story, error] = useAsked<TrialStory>(`/page/trials/${part(id)}`, over ? 0 : LOOK_SECONDS, `${live?.state} ${live?.replicas}`);
  useEffect(() => {
    if (story) store.curves.set(id, story.reports);
    return () => void store.curves.delete(id);
  }, [id, story]);
  if (error && !story) return <p class="error">{error}</p>;
  if (!story) return <p class="empty">Asking for the trial…</p>;
  const trial = live ?? story.trial;
  return (
    <>
      <div class="line">
        <h1>
          <i class="dot" style={{ background: colorOf(trial) }} /> Trial {store.label(trial)}
        </h1>
        <State state={trial.state} />
        {!over && <Slots trial={trial} />}
        <span class="grow" />
        <Actions trials={[trial]} />
      </div>
      <p class="lead">
        {withNames(trial.why)}
        {WAITING.has(trial.state) && trial.expected !== undefined && `; expected to start in about ${duration(trial.expected - store.now())}`}
      </p>
      <Descent trial={trial} />
      <dl class="facts">
        <Fact name="value" shown={value(trial.value ?? trial.latest)} />
        <Fact name="replicas" shown={over ? "" : `${trial.replicas} of ${trial.min} to ${trial.max}${trial.size > 1 ? `, ${trial.size} slots each` : ""}`} />
        <Fact name="promise" shown={trial.promise === undefined || over ? "" : `${number(trial.promise, 3)}${trial.rank ? ` (${trial.rank})` : ""}`} />
        <Fact name="batch" shown={trial.batch ? String(trial.batch) : ""} />
        <Fact name="goodput" shown={trial.goodput ? `${number(trial.goodput)} examples/s` : ""} />
        <Fact name="done" shown={trial.done === undefined ? "" : percent(trial.done)} />
        <Fact name="epoch" shown={trial.epoch === undefined ? "" : String(trial.epoch)} />
        <Fact name="hand-over pause" shown={story.pause_seconds === null ? "" : `${number(story.pause_seconds * 1000, 3)} ms (median)`} />
        <Fact name="submitted" shown={moment(trial.submitted)} />
        <Fact name="took" shown={duration((trial.finished ?? store.now()) - trial.submitted)} />
        <Fact name="id" shown={trial.id} />
        {Object.entries(trial.parameters ?? {}).map(([name, found]) => (
          <Fact key={name} name={name} shown={typeof found === "number" ? number(found) : String(found)} strong />
        ))}
      </dl>
      {trial.error && <pre class="error">{story.traceback ?? trial.error}</pre>}
      <Charts story={story} id={id} />
      {story.decision && (
        <section aria-labelledby="decision">
          <h2 id="decision">The last decision</h2>
          <p>
            The policy “{story.decision.policy}” grants{" "}
            {Object.entries(story.decision.placement).map(([node, count]) => `${count} on ${node}`).join(", ") || "nothing"}:{" "}
            {withNames(story.decision.why)}.
          </p>
          <p>
            <Weighed numbers={story.decision.numbers} />
          </p>
        </section>
      )}
      <Replicas replicas={story.replicas} id={id} />
      <section aria-labelledby="happened">
        <h2 id="happened">What happened</h2>
        <Entries entries={[...story.history].reverse()} />
      </section>
    </>
  );
}

function Fact({ name, shown, strong = false }: { name: string; shown: string; strong?: boolean }) {
  if (!shown) return null;
  return (
    <div class={strong ? "parameter" : ""}>
      <dt>{name}</dt>
      <dd>{shown}</dd>
    </div>
  );
}

const MEASURED: [string, string, (each: Measurement) => number | null][] = [
  ["batch size", "--series-1", (each) => each.batch],
  ["learning rate", "--series-2", (each) => each.learning_rate],
  ["gradient noise scale (examples)", "--series-3", (each) => each.noise_scale],
  ["step time (s)", "--series-4", (each) => each.step_seconds],
  ["replicas", "--series-5", (each) => each.replicas],
  ["latest hand-over pause (ms)", "--series-0", (each) => (each.pause_seconds === null ? null : each.pause_seconds * 1000)],
];

function Charts({ story, id }: { story: TrialStory; id: string }) {
  const marks = useMemo(
    () =>
      story.history
        .filter((entry) => entry.what.endsWith(" replicas") && entry.what.includes("->"))
        .map((entry) => ({ x: entry.at, words: entry.what.replace(" replicas", "").replace("->", "→") })),
    [story],
  );
  const points = store.curves.get(id) ?? story.reports;
  const [over, setOver] = useState<"time" | "step" | "progress">("time");
  const place = over === "step" ? 0 : over === "progress" ? 2 : 3;
  const reported = useMemo(() => {
    const known = points.filter((point) => point[place] !== null);
    return [known.map((point) => point[place] as number), known.map((point) => point[1])] as [number[], (number | null)[]];
  }, [points, points.length, place]);
  const at = useMemo(() => story.measurements.map((each) => each.at), [story]);
  const goodput = useMemo(
    () => [at, story.measurements.map((each) => each.goodput || null), story.measurements.map((each) => each.predicted_goodput)] as [number[], (number | null)[], (number | null)[]],
    [story],
  );
  return (
    <>
      <div class="line">
        <h2>How it trains</h2>
        <label>
          values over{" "}
          <select value={over} onChange={(event) => setOver(event.currentTarget.value as typeof over)}>
            <option>time</option>
            <option>step</option>
            <option>progress</option>
          </select>
        </label>
        <span class="dim">dashed lines: rescales</span>
      </div>
      <div class="charts">
        {reported[0].length > 0 ? (
          <Chart title="reported value" lines={[{ label: "value", color: ink("--series-0"), width: 2 }]} data={reported} time={over === "time"} xLabel={over === "time" ? undefined : over} marks={over === "time" ? marks : undefined} />
        ) : (
          <p class="empty">It has reported nothing yet.</p>
        )}
        {at.length > 0 && (
          <Chart
            title="goodput (examples/s): measured, and predicted (dashed)"
            lines={[
              { label: "measured", color: ink("--series-0"), width: 2 },
              { label: "predicted", color: ink("--dim"), dashed: true },
            ]}
            data={goodput}
            time
            marks={marks}
          />
        )}
        {MEASURED.map(([title, color, read]) => (
          <Measured key={title} title={title} color={color} at={at} values={story.measurements.map(read)} marks={marks} />
        ))}
      </div>
      {at.length === 0 && <p class="dim">Nothing was measured: the trial does not train with dist_core, or has not started.</p>}
    </>
  );
}

interface MeasuredProps {
  title: string;
  color: string;
  at: number[];
  values: (number | null)[];
  marks: { x: number; words: string }[];
}

function Measured({ title, color, at, values, marks }: MeasuredProps) {
  const data = useMemo(() => [at, values] as [number[], (number | null)[]], [at]);
  if (values.every((each) => each === null)) return null;
  return <Chart title={title} lines={[{ label: title, color: ink(color) }]} data={data} time marks={marks} height={150} />;
}

function Replicas({ replicas, id }: { replicas: Replica[]; id: string }) {
  const [open, setOpen] = useState<string | null>(null);
  const alive = replicas.filter((replica) => replica.gone_at === null);
  const ordered = [...replicas].sort((a, b) => Number(b.gone_at === null) - Number(a.gone_at === null) || b.launched_at - a.launched_at);
  return (
    <section aria-labelledby="replicas">
      <h2 id="replicas">
        {plural(alive.length, "replica")} now, {replicas.length} in all
      </h2>
      <ul class="list">
        {ordered.slice(0, 100).map((replica) => (
          <li key={replica.replica_id}>
            <span class="who">
              {replica.node} · {replica.slot}
            </span>
            <State state={replica.state} />
            <span class="dim">
              {clock(replica.launched_at)} to {replica.gone_at === null ? "now" : clock(replica.gone_at)}
              {replica.ready_at !== null && `, ready after ${duration(replica.ready_at - replica.launched_at)}`}
              {replica.exit_status !== null && `, exit status ${replica.exit_status}`}
              {replica.pid !== null && `, process ${replica.pid}`}
            </span>
            <span class="grow" />
            {store.mayAct && (
              <button
                type="button"
                class="plain"
                aria-expanded={open === replica.replica_id}
                onClick={() => setOpen(open === replica.replica_id ? null : replica.replica_id)}
              >
                {open === replica.replica_id ? "Close its log" : "Log"}
              </button>
            )}
            {open === replica.replica_id && <Log id={id} replica={replica.replica_id} />}
          </li>
        ))}
      </ul>
    </section>
  );
}

const KEPT = 400_000;

function Log({ id, replica }: { id: string; replica: string }) {
  const [words, setWords] = useState("");
  const [error, setError] = useState("");
  const end = useRef<HTMLPreElement>(null);
  useEffect(() => {
    let next = -1;
    let wanted = true;
    let timer = 0;
    const look = () =>
      get<{ words: string; next: number; over: boolean }>(`/trials/${part(id)}/log/${part(replica)}?after=${next}`).then(
        (found) => {
          if (!wanted) return;
          next = found.next;
          if (found.words) setWords((before) => (before + found.words).slice(-KEPT));
          timer = window.setTimeout(look, found.over ? 5000 : 700);
        },
        (refused: Error) => {
          if (!wanted) return;
          setError(refused.message);
          timer = window.setTimeout(look, 3000);
        },
      );
    void look();
    return () => {
      wanted = false;
      clearTimeout(timer);
    };
  }, [id, replica]);
  useEffect(() => {
    const box = end.current;
    if (box) box.scrollTop = box.scrollHeight;
  }, [words]);
  return (
    <pre ref={end} class="log" tabIndex={0} aria-label={`Log of ${replica}`}>
      {words || error || "It has printed nothing."}
    </pre>
  );
}
