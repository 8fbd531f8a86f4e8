// What the scheduler tells a page, as `scheduler/api/page/rows.py` writes it. Times are seconds since the epoch.

export interface Trial {
  id: string;
  study: string;
  number: number;
  state: string;
  code: string;
  why: string;
  replicas: number;
  min: number;
  max: number;
  size: number;
  submitted: number;
  finished?: number;
  layout?: string;
  losses?: number;
  parent?: string;
  held?: string;
  parameters?: Record<string, Parameter>;
  step?: number;
  latest?: number | null;
  progress?: number;
  value?: number | number[] | null;
  error?: string;
  slots?: number;
  promise?: number;
  rank?: string;
  batch?: number;
  goodput?: number;
  epoch?: number;
  done?: number;
  rate?: number;
  expected?: number;
}

export type Parameter = number | string | boolean | null;

export interface Study {
  name: string;
  title: string;
  direction: string;
  user: string;
  driven: boolean;
  weight: number;
  priority: number;
  yields_to: string[];
  quota: number | null;
  goal: string;
  deadline_at: number | null;
  budget_slot_hours: number | null;
}

export interface Node {
  name: string;
  slots: number;
  kind: string;
  reserved_for: string[];
  given_by: string;
}

export interface QueuedJob {
  job: string;
  queue: string;
  slots: number;
  waits: boolean;
  since: number;
  starts_at: number | null;
  node: string;
  reason: string;
}

export interface Queue {
  jobs: QueuedJob[];
  trouble: string;
}

/** Replica, trial (empty: somebody else's), node, slot, from, until (null: still held). */
export type Interval = [string, string, string, number, number, number | null];

/** Step, value, progress, and when it came. */
export type Point = [number, number | null, number, number | null];

export interface Told {
  all?: boolean;
  now: number;
  access?: string;
  emulated?: string;
  policy?: string;
  studies?: Study[];
  nodes?: Node[];
  queue?: Queue;
  trials?: Trial[];
  gone?: string[];
  intervals?: Interval[];
  reports?: [string, ...Point][];
}

export interface Entry {
  trial?: string;
  at: number;
  what: string;
  code: string;
  why: string;
  who: string;
  numbers?: Record<string, number>;
}

export interface Measurement {
  at: number;
  progress: number;
  replicas: number;
  batch: number;
  goodput: number;
  predicted_goodput: number | null;
  noise_scale: number | null;
  learning_rate: number | null;
  step_seconds: number | null;
  pause_seconds: number | null;
}

export interface Replica {
  replica_id: string;
  node: string;
  slot: number;
  state: string;
  launched_at: number;
  ready_at: number | null;
  gone_at: number | null;
  exit_status: number | null;
  job: string;
  pid: number | null;
}

export interface TrialStory {
  trial: Trial;
  traceback: string | null;
  pause_seconds: number | null;
  reports: Point[];
  measurements: Measurement[];
  history: Entry[];
  replicas: Replica[];
  decision: { policy: string; placement: Record<string, number>; why: string; numbers: Record<string, number> } | null;
}

export const FINAL = new Set(["succeeded", "pruned", "cancelled", "failed"]);
export const WAITING = new Set(["pending", "paused"]);
