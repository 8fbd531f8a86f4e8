// All that the page knows of the scheduler: told once as a whole, then change by change. Views look at it when a frame
// is drawn, not when a change comes, so that two hundred trials that report cost no more than one.

import { useEffect, useState } from "preact/hooks";
import { get, part } from "./api";
import type { Interval, Node, Point, Queue, Study, Told, Trial } from "./types";

export type Connection = "connecting" | "live" | "lost" | "over" | "locked";

class Store {
  trials = new Map<string, Trial>();
  studies: Study[] = [];
  nodes: Node[] = [];
  queue: Queue = { jobs: [], trouble: "" };
  intervals = new Map<string, Interval>();
  /** Reports of the trials whose curves somebody looks at. */
  curves = new Map<string, Point[]>();
  access = "";
  emulated = "";
  policy = "";
  connection: Connection = "connecting";
  /** How far the scheduler's clock is before this machine's. */
  private ahead = 0;
  private listeners = new Set<() => void>();
  private drawn = false;
  private source: EventSource | null = null;
  /** Counts what has been told. */
  version = 0;

  now(): number {
    return Date.now() / 1000 + this.ahead;
  }

  connect(): void {
    this.source?.close();
    const source = new EventSource("/page/events");
    this.source = source;
    source.onmessage = (event: MessageEvent<string>) => {
      this.connection = "live";
      this.take(JSON.parse(event.data) as Told);
    };
    // The scheduler has ended as it should; another one may begin there.
    source.addEventListener("over", () => {
      this.connection = "over";
      this.changed();
    });
    source.onerror = () => {
      if (this.connection !== "over") this.connection = "lost";
      this.changed();
      // The browser tries again by itself, unless it was refused: then somebody has to sign in.
      if (source.readyState === EventSource.CLOSED) void this.findOut();
    };
  }

  disconnect(): void {
    this.source?.close();
    this.source = null;
  }

  private async findOut(): Promise<void> {
    try {
      const response = await fetch("/whoami", { headers: { "X-Elastune-Page": "1" } });
      if (response.status === 401 || response.status === 403) {
        this.connection = "locked";
        this.changed();
        return;
      }
    } catch {
      // Away altogether.
    }
    setTimeout(() => this.connect(), 1000);
  }

  take(told: Told): void {
    this.ahead = told.now - Date.now() / 1000;
    if (told.all) {
      this.trials.clear();
      this.intervals.clear();
      // What was reported while the page was away; away again, the next whole telling comes with the next try.
      this.readCurves([...this.curves.keys()]).catch(() => undefined);
    }
    if (told.access !== undefined) this.access = told.access;
    if (told.emulated !== undefined) this.emulated = told.emulated;
    if (told.policy !== undefined) this.policy = told.policy;
    if (told.studies) this.studies = told.studies;
    if (told.nodes) this.nodes = told.nodes;
    if (told.queue) this.queue = told.queue;
    for (const trial of told.trials ?? []) this.trials.set(trial.id, trial);
    for (const interval of told.intervals ?? []) this.intervals.set(interval[0], interval);
    for (const id of told.gone ?? []) {
      this.trials.delete(id);
      this.curves.delete(id);
      for (const [name, interval] of this.intervals) if (interval[1] === id) this.intervals.delete(name);
    }
    for (const [id, ...point] of told.reports ?? []) {
      const curve = this.curves.get(id);
      if (curve) insert(curve, point);
    }
    this.changed();
  }

  /** Reports of the trials that are looked at. */
  async readCurves(ids: string[]): Promise<void> {
    if (ids.length === 0) return;
    const found = await get<Record<string, Point[]>>(`/page/curves?${ids.map((id) => `trial=${part(id)}`).join("&")}`);
    for (const [id, points] of Object.entries(found)) if (this.curves.has(id)) this.curves.set(id, points);
    this.changed();
  }

  changed(): void {
    this.version += 1;
    if (this.drawn) return;
    this.drawn = true;
    requestAnimationFrame(() => {
      this.drawn = false;
      for (const listener of this.listeners) listener();
    });
  }

  listen(listener: () => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  study(name: string): Study | undefined {
    return this.studies.find((each) => each.name === name);
  }

  /** By its title, unless another study has the same. */
  called(name: string): string {
    const title = this.study(name)?.title ?? name;
    return this.studies.some((each) => each.title === title && each.name !== name) ? name : title;
  }

  /** As people call it: by its study where there are several. */
  label(trial: Trial): string {
    return this.studies.length > 1 ? `${this.called(trial.study)}/${trial.number}` : `${trial.number}`;
  }

  get mayAct(): boolean {
    return this.access === "owner" || this.access === "study";
  }
}

function insert(curve: Point[], point: Point): void {
  const last = curve[curve.length - 1];
  if (!last || point[0] > last[0]) curve.push(point);
  else if (!curve.some((each) => each[0] === point[0])) {
    curve.push(point);
    curve.sort((a, b) => a[0] - b[0]);
  }
}

export const store = new Store();

/** Has a view drawn again when something was told; at most once in `milliseconds`. */
export function useStore(milliseconds = 0): Store {
  const [, draw] = useState(0);
  useEffect(() => {
    let due = 0;
    let timer = 0;
    const stop = store.listen(() => {
      const left = due - performance.now();
      if (timer) return;
      const look = () => {
        timer = 0;
        due = performance.now() + milliseconds;
        draw((count) => count + 1);
      };
      if (left <= 0) look();
      else timer = window.setTimeout(look, left);
    });
    return () => {
      stop();
      if (timer) clearTimeout(timer);
    };
  }, [milliseconds]);
  return store;
}
