// What may be done to trials here: stop, pause, resume, run again with other parameters or with the state they have.

import { useRef, useState } from "preact/hooks";
import { part, post, saidBy } from "./api";
import { plural } from "./format";
import { store } from "./store";
import { FINAL, type Parameter, type Trial } from "./types";

async function each(trials: Trial[], act: (trial: Trial) => Promise<unknown>): Promise<string> {
  const refusals: string[] = [];
  for (const trial of trials) {
    try {
      await act(trial);
    } catch (error) {
      refusals.push(`${store.label(trial)}: ${saidBy(error)}`);
    }
  }
  return refusals.join("\n");
}

export function Actions({ trials, onDone }: { trials: Trial[]; onDone?: () => void }) {
  const [said, setSaid] = useState("");
  const [busy, setBusy] = useState(false);
  const [clones, setClones] = useState(false);
  const live = trials.filter((trial) => !FINAL.has(trial.state));
  const pausable = live.filter((trial) => !trial.held);
  const resumable = live.filter((trial) => trial.held);
  const run = async (words: string, chosen: Trial[], act: (trial: Trial) => Promise<unknown>) => {
    setBusy(true);
    setSaid("");
    const refused = await each(chosen, act);
    setBusy(false);
    setSaid(refused || `${words} ${plural(chosen.length, "trial")}`);
    onDone?.();
  };
  if (!store.mayAct) return null;
  return (
    <div class="actions">
      <button
        type="button"
        disabled={busy || !live.length}
        onClick={() => {
          if (confirm(`Stop ${live.map((trial) => store.label(trial)).slice(0, 5).join(", ")}${live.length > 5 ? "…" : ""}?`)) {
            void run("stopped", live, (trial) => post(`/trials/${part(trial.id)}/cancel`, { why: "stopped on the page" }));
          }
        }}
      >
        Stop
      </button>
      <button
        type="button"
        disabled={busy || !pausable.length}
        onClick={() => void run("paused", pausable, (trial) => post(`/trials/${part(trial.id)}/pause`, { why: "on the page" }))}
      >
        Pause
      </button>
      <button
        type="button"
        disabled={busy || !resumable.length}
        onClick={() => void run("resumed", resumable, (trial) => post(`/trials/${part(trial.id)}/resume`))}
      >
        Resume
      </button>
      <button type="button" disabled={busy || trials.length !== 1} onClick={() => setClones(true)}>
        Clone…
      </button>
      {said && (
        <span class="said" role="status">
          {said}
        </span>
      )}
      {clones && trials[0] && (
        <Clone
          trial={trials[0]}
          onClose={(words) => {
            setClones(false);
            if (words) setSaid(words);
          }}
        />
      )}
    </div>
  );
}

function Clone({ trial, onClose }: { trial: Trial; onClose: (words: string) => void }) {
  const form = useRef<HTMLFormElement>(null);
  const [error, setError] = useState("");
  const [busy, setBusy] = useState(false);
  const [forks, setForks] = useState(false);
  const parameters = Object.entries(trial.parameters ?? {});
  const send = async (event: Event) => {
    event.preventDefault();
    if (!form.current) return;
    const given = new FormData(form.current);
    const changed: Record<string, Parameter> = {};
    for (const [name, before] of parameters) {
      const found = given.get(`parameter ${name}`);
      if (typeof found !== "string" || found === String(before)) continue;
      changed[name] = typeof before === "string" ? found : read(found);
    }
    setBusy(true);
    try {
      const made = await post<{ number?: number }>(`/trials/${part(trial.id)}/clone`, {
        parameters: changed,
        forks,
        more_epochs: Number(given.get("more epochs") ?? 0),
      });
      onClose(made.number === undefined ? "queued; its sweep runs it next" : `submitted as trial ${made.number}`);
    } catch (refused) {
      setError(saidBy(refused));
      setBusy(false);
    }
  };
  return (
    <dialog open class="dialog" aria-label={`Run trial ${store.label(trial)} again`} onKeyDown={(event) => event.key === "Escape" && onClose("")}>
      <form ref={form} onSubmit={send}>
        <h2>Run {store.label(trial)} again, with changes</h2>
        {parameters.length === 0 && <p class="dim">The scheduler knows no parameters of this trial.</p>}
        {parameters.map(([name, before], index) => (
          <label key={name} class="field">
            <span>{name}</span>
            <input name={`parameter ${name}`} defaultValue={String(before)} autofocus={index === 0} />
          </label>
        ))}
        <label class="field">
          <span>begin with its model and optimizer as they are now</span>
          <input type="checkbox" checked={forks} onChange={(event) => setForks(event.currentTarget.checked)} />
        </label>
        {forks && (
          <label class="field">
            <span>epochs beyond its own</span>
            <input name="more epochs" type="number" min={0} defaultValue="0" />
          </label>
        )}
        {error && (
          <p class="error" role="alert">
            {error}
          </p>
        )}
        <p class="actions">
          <button type="submit" disabled={busy}>
            {busy ? "Asking its sweep…" : "Run it"}
          </button>
          <button type="button" onClick={() => onClose("")}>
            Close
          </button>
        </p>
      </form>
    </dialog>
  );
}

function read(text: string): Parameter {
  try {
    const found = JSON.parse(text) as unknown;
    if (found === null || ["number", "boolean", "string"].includes(typeof found)) return found as Parameter;
  } catch {
    // A text as it is.
  }
  return text;
}
