// Nodes, studies with their shares, who used how much, and what other policies would have done.

import { useEffect, useState } from "preact/hooks";
import { get, part, patch, post, saidBy, useAsked } from "../api";
import { moment, number, percent, plural } from "../format";
import { Plain, State, mine } from "../parts";
import { store, useStore } from "../store";
import { FINAL, type Study } from "../types";

// As trials/terms.py has them; the scheduler refuses others with its own list.
const GOALS = ["completion_time", "time_to_best", "fairness", "makespan", "deadline", "budget"];

export function ClusterView({ study }: { study: string }) {
  useStore(1000);
  return (
    <>
      <h1>Cluster</h1>
      <Nodes />
      <Waiting />
      <Studies only={study} />
      <Usage />
      <Policies />
    </>
  );
}

function Nodes() {
  const held = new Map<string, number>();
  const given = store.nodes.some((node) => node.given_by);
  for (const interval of store.intervals.values()) if (interval[5] === null) held.set(interval[2], (held.get(interval[2]) ?? 0) + 1);
  return (
    <section aria-labelledby="nodes">
      <h2 id="nodes">{plural(store.nodes.length, "node")}</h2>
      <Plain names={["node", "kind", "slots in use", "reserved for", given && "given by"]}>
        {store.nodes.map((node) => (
          <tr key={node.name}>
            <td>{node.name}</td>
            <td>{node.kind || "–"}</td>
            <td>
              {held.get(node.name) ?? 0} of {node.slots}
            </td>
            <td>{node.reserved_for.join(", ") || "–"}</td>
            {given && <td>{node.given_by || "–"}</td>}
          </tr>
        ))}
      </Plain>
    </section>
  );
}

/** Jobs that wait in a queue, with which slots will come. */
function Waiting() {
  const waiting = store.queue.jobs.filter((job) => job.waits);
  if (waiting.length === 0 && !store.queue.trouble) return null;
  return (
    <section aria-labelledby="queue">
      <h2 id="queue">{plural(waiting.length, "job")} in the queue</h2>
      {store.queue.trouble && <p>{store.queue.trouble}</p>}
      {waiting.length > 0 && (
        <Plain names={["job", "queue", "slots", "since", "expected", "why"]}>
          {waiting.map((job) => (
            <tr key={job.job}>
              <td>{job.job}</td>
              <td>{job.queue}</td>
              <td>{job.slots}</td>
              <td>{moment(job.since)}</td>
              <td>{job.starts_at === null ? "–" : moment(job.starts_at)}</td>
              <td>{job.reason || "–"}</td>
            </tr>
          ))}
        </Plain>
      )}
    </section>
  );
}

function Studies({ only }: { only: string }) {
  const studies = only ? store.studies.filter((study) => study.name === only) : store.studies;
  return (
    <section aria-labelledby="studies">
      <h2 id="studies">{plural(studies.length, "study").replace("studys", "studies")}</h2>
      {studies.length === 0 ? (
        <p class="empty">None yet.</p>
      ) : (
        <Plain names={["study", "user", "driver", "trials", "slots now", "weight", "priority", "most slots", "goal", "deadline", "slot hours at most", ""]}>
          {studies.map((study) => (
            <StudyRow key={study.name} study={study} />
          ))}
        </Plain>
      )}
    </section>
  );
}

function StudyRow({ study }: { study: Study }) {
  const [changes, setChanges] = useState<Record<string, string> | null>(null);
  const [said, setSaid] = useState("");
  const trials = mine(study.name);
  const slots = trials.reduce((sum, trial) => sum + (FINAL.has(trial.state) ? 0 : (trial.slots ?? 0)), 0);
  const ended = trials.filter((trial) => FINAL.has(trial.state)).length;
  const field = (name: keyof Study, label: string) =>
    changes === null ? (
      shownTerm(study, name)
    ) : (
      <input
        aria-label={`${label} of ${study.title}`}
        type={name === "deadline_at" ? "datetime-local" : "text"}
        size={7}
        value={changes[name] ?? ""}
        onInput={(event) => setChanges({ ...changes, [name]: event.currentTarget.value })}
      />
    );
  const begin = () => {
    setSaid("");
    setChanges({
      weight: String(study.weight),
      priority: String(study.priority),
      quota: study.quota === null ? "" : String(study.quota),
      goal: study.goal,
      deadline_at: study.deadline_at === null ? "" : localMinute(study.deadline_at),
      budget_slot_hours: study.budget_slot_hours === null ? "" : String(study.budget_slot_hours),
    });
  };
  const save = async () => {
    if (changes === null) return;
    try {
      const body: Record<string, unknown> = {};
      const numbers: [keyof Study, boolean][] = [
        ["weight", false],
        ["priority", false],
        ["quota", true],
        ["budget_slot_hours", true],
      ];
      for (const [name, optional] of numbers) {
        const text = (changes[name] ?? "").trim();
        const found = text === "" && optional ? null : Number(text);
        if (Number.isNaN(found)) throw new Error(`${name} is ${JSON.stringify(text)}; it must be a number`);
        if (found !== study[name]) body[name] = found;
      }
      const until = changes.deadline_at ? Date.parse(changes.deadline_at) / 1000 : null;
      if (until !== null && Number.isNaN(until)) throw new Error("the deadline must be a date and a time");
      if (until !== study.deadline_at && Math.abs((until ?? 0) - (study.deadline_at ?? 0)) >= 60) body.deadline_at = until;
      if (changes.goal !== study.goal) body.goal = changes.goal;
      const answer = await patch<{ warnings: string[] }>(`/studies/${part(study.name)}`, body);
      setSaid(answer.warnings.join(" ") || "changed");
      setChanges(null);
    } catch (error) {
      setSaid(saidBy(error));
    }
  };
  return (
    <>
      <tr>
        <td title={study.name}>{study.title}</td>
        <td>{study.user || "–"}</td>
        <td>{study.driven ? "connected" : "gone"}</td>
        <td>
          {ended} of {trials.length} over
        </td>
        <td>{slots}</td>
        <td>{field("weight", "weight")}</td>
        <td>{field("priority", "priority")}</td>
        <td>{field("quota", "most slots")}</td>
        <td>
          {changes === null ? (
            study.goal
          ) : (
            <select aria-label={`goal of ${study.title}`} value={changes.goal} onChange={(event) => setChanges({ ...changes, goal: event.currentTarget.value })}>
              {[...new Set([...GOALS, study.goal])].map((goal) => (
                <option key={goal}>{goal}</option>
              ))}
            </select>
          )}
        </td>
        <td>{field("deadline_at", "deadline")}</td>
        <td>{field("budget_slot_hours", "slot hours at most")}</td>
        <td>
          {store.mayAct &&
            (changes === null ? (
              <button type="button" onClick={begin}>
                Change<span class="sr"> {study.title}</span>
              </button>
            ) : (
              <>
                <button type="button" onClick={() => void save()}>
                  Save
                </button>{" "}
                <button type="button" onClick={() => setChanges(null)}>
                  Cancel
                </button>
              </>
            ))}
        </td>
      </tr>
      {said && (
        <tr>
          <td colSpan={12} role="status" class="said">
            {said}
          </td>
        </tr>
      )}
    </>
  );
}

/** As an input for a day and a time of this browser's clock takes it. */
function localMinute(at: number): string {
  const when = new Date(at * 1000);
  return new Date(at * 1000 - when.getTimezoneOffset() * 60_000).toISOString().slice(0, 16);
}

function shownTerm(study: Study, name: keyof Study): string {
  const found = study[name];
  if (found === null) return "–";
  return name === "deadline_at" ? moment(found as number) : String(found);
}

interface Used {
  study: string;
  title: string;
  user: string;
  day: string;
  hours: number;
  trials: number;
}

function Usage() {
  const [rows, error] = useAsked<Used[]>("/page/usage", 10);
  const [price, setPrice] = useState(() => localStorage.getItem("elastune.price") ?? "");
  const [by, setBy] = useState<"study" | "user" | "day">("study");
  const groups = new Map<string, { hours: number; trials: number }>();
  for (const row of rows ?? []) {
    const name = by === "study" ? row.title : by === "user" ? row.user || "unknown" : row.day;
    const sum = groups.get(name) ?? { hours: 0, trials: 0 };
    groups.set(name, { hours: sum.hours + row.hours, trials: sum.trials + row.trials });
  }
  const total = [...groups.values()].reduce((sum, each) => sum + each.hours, 0);
  const cost = Number(price);
  return (
    <section aria-labelledby="usage">
      <div class="line">
        <h2 id="usage">Slot hours</h2>
        <label>
          by{" "}
          <select value={by} onChange={(event) => setBy(event.currentTarget.value as typeof by)}>
            <option>study</option>
            <option>user</option>
            <option>day</option>
          </select>
        </label>
        <label>
          price of a slot hour{" "}
          <input
            size={6}
            inputMode="decimal"
            value={price}
            onInput={(event) => {
              setPrice(event.currentTarget.value);
              localStorage.setItem("elastune.price", event.currentTarget.value);
            }}
          />
        </label>
      </div>
      {error && <p class="error">{error}</p>}
      <Plain names={[by, "slot hours", "share", cost > 0 && "cost"]}>
        {[...groups].sort((a, b) => (by === "day" ? a[0].localeCompare(b[0]) : b[1].hours - a[1].hours)).map(([name, sum]) => (
          <tr key={name}>
            <td>{name}</td>
            <td class="right">{sum.hours.toFixed(3)}</td>
            <td class="right">{percent(total ? sum.hours / total : 0)}</td>
            {cost > 0 && <td class="right">{(sum.hours * cost).toFixed(2)}</td>}
          </tr>
        ))}
      </Plain>
    </section>
  );
}

interface WhatIf {
  state: string;
  error?: string;
  ran?: string;
  policies?: { policy: string; trials: number; makespan_seconds: number; mean_completion_seconds: number; rescales_per_trial: number; slot_hours: number }[];
}

function Policies() {
  const [found, setFound] = useState<WhatIf | null>(null);
  const [said, setSaid] = useState("");
  const ask = () => get<WhatIf>("/page/what-if").then(setFound, (refused: Error) => setSaid(refused.message));
  useEffect(() => {
    void ask();
  }, []);
  useEffect(() => {
    if (found?.state !== "running") return;
    const timer = setInterval(ask, 1000);
    return () => clearInterval(timer);
  }, [found?.state]);
  const start = async () => {
    setSaid("");
    try {
      setFound(await post<WhatIf>("/page/what-if"));
    } catch (error) {
      setSaid(saidBy(error));
    }
  };
  return (
    <section aria-labelledby="what-if">
      <div class="line">
        <h2 id="what-if">What other policies would have done</h2>
        {store.access === "owner" && (
          <button type="button" disabled={found?.state === "running"} onClick={() => void start()}>
            {found?.state === "running" ? "Simulating the recorded trials…" : "Simulate from the record"}
          </button>
        )}
        {found && found.state !== "none" && <State state={found.state} />}
      </div>
      {(said || found?.error) && <p class="error">{said || found?.error}</p>}
      {found?.ran && <p class="dim">{found.ran}</p>}
      {found?.policies && (
        <Plain names={["policy", "makespan", "mean completion time", "rescales per trial", "slot hours"]}>
          {found.policies.map((each) => (
            <tr key={each.policy}>
              <td>{each.policy}</td>
              <td class="right">{number(each.makespan_seconds)} s</td>
              <td class="right">{number(each.mean_completion_seconds)} s</td>
              <td class="right">{number(each.rescales_per_trial, 3)}</td>
              <td class="right">{each.slot_hours.toFixed(3)}</td>
            </tr>
          ))}
        </Plain>
      )}
    </section>
  );
}
