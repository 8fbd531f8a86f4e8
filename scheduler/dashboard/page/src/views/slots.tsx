// Who holds which slot, who waits for one, and what is idle.

import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { part, get } from "../api";
import { ink, useWidth } from "../chart";
import { colorOf } from "../colors";
import { clock, duration, number, percent, plural } from "../format";
import { type Bar, type Row, type Span, barAt, barsOf, rowsOf, ticksOf, wholeSpan } from "../gantt";
import { Meter, Slots, TrialName, bestOf, mine, scoreOf } from "../parts";
import { linkTo } from "../route";
import { useStore } from "../store";
import { FINAL, type Entry, type Interval, type Trial, type TrialStory, WAITING } from "../types";

const ROW = 26;
const GAP = 2;
const AXIS = 22;
const LABELS = 132;
const LATEST = 300;

export function SlotsView({ study }: { study: string }) {
  const store = useStore(250);
  const trials = mine(study);
  const live = trials.filter((trial) => !FINAL.has(trial.state));
  const waiting = live.filter((trial) => WAITING.has(trial.state));
  const training = live.filter((trial) => !WAITING.has(trial.state));
  const slots = store.nodes.reduce((sum, node) => sum + node.slots, 0);
  const held = [...store.intervals.values()].filter((interval) => interval[5] === null).length;
  const idle = Math.max(0, slots - held);
  return (
    <>
      <Head trials={trials} slots={slots} held={held} idle={idle} waiting={waiting} training={training} />
      <Picture study={study} />
      <div class="columns">
        <Training trials={training} />
        <Waiting trials={waiting} idle={idle} />
      </div>
    </>
  );
}

interface HeadProps {
  trials: Trial[];
  slots: number;
  held: number;
  idle: number;
  waiting: Trial[];
  training: Trial[];
}

function Head({ trials, slots, held, idle, waiting, training }: HeadProps) {
  const store = useStore(1000);
  const names = [...new Set(trials.map((trial) => trial.study))];
  // Of those that run first, then of the latest.
  const since = (name: string) => Math.max(...trials.filter((trial) => trial.study === name).map((trial) => trial.finished ?? Infinity));
  const best = names
    .sort((a, b) => (since(a) === since(b) ? 0 : since(b) - since(a)))
    .map((name) => bestOf(trials.filter((trial) => trial.study === name), store.study(name)?.direction ?? "minimize"))
    .filter((trial) => trial !== undefined);
  const ended = trials.filter((trial) => FINAL.has(trial.state));
  const count = (state: string) => ended.filter((trial) => trial.state === state).length;
  const goodput = training.reduce((sum, trial) => sum + (trial.goodput ?? 0), 0);
  return (
    <section class="cards" aria-label="At a glance">
      <div class="card">
        <b>
          {held} of {slots}
        </b>
        <span>slots in use</span>
        <small>{idle === 0 ? "none is idle" : `${idle} idle${waiting.length ? "" : ": nobody waits"}`}</small>
      </div>
      <div class="card">
        <b>{training.length}</b>
        <span>{training.length === 1 ? "trial trains" : "trials train"}</span>
        <small>{goodput ? `${number(goodput, 3)} useful examples/s` : "–"}</small>
      </div>
      <div class="card">
        <b>{waiting.length}</b>
        <span>{waiting.length === 1 ? "trial waits" : "trials wait"}</span>
        <small title={waiting[0]?.why}>{waiting[0]?.why ?? "–"}</small>
      </div>
      <div class="card">
        <b>{ended.length}</b>
        <span>{ended.length === 1 ? "trial is over" : "trials are over"}</span>
        <small>
          {count("succeeded")} done, {count("pruned")} pruned, {count("failed")} failed
        </small>
      </div>
      {best.slice(0, 2).map((trial) => (
        <div class="card" key={trial.id}>
          <b>{number(scoreOf(trial))}</b>
          <span>best{names.length > 1 ? ` of ${store.study(trial.study)?.title ?? trial.study}` : ""}</span>
          <small>
            <TrialName trial={trial} />
          </small>
        </div>
      ))}
    </section>
  );
}

function Training({ trials }: { trials: Trial[] }) {
  const ordered = [...trials].sort((a, b) => (b.promise ?? 0) - (a.promise ?? 0) || a.submitted - b.submitted);
  return (
    <section aria-labelledby="training">
      <h2 id="training">Running trials, most promising first</h2>
      {ordered.length === 0 && <p class="empty">Nobody.</p>}
      <ul class="list training">
        {ordered.slice(0, 60).map((trial) => (
          <li key={trial.id} title={trial.rank}>
            <TrialName trial={trial} />
            <Slots trial={trial} />
            <Meter share={trial.promise} label="promise" />
            <span class="num" title="latest value">
              {number(scoreOf(trial))}
            </span>
            <span class="num dim" title="share of its training that is done">
              {percent(trial.done)}
            </span>
            <span class="why" title={trial.why}>
              {trial.why}
            </span>
          </li>
        ))}
      </ul>
      {ordered.length > 60 && <p class="dim">and {ordered.length - 60} more</p>}
    </section>
  );
}

function Waiting({ trials, idle }: { trials: Trial[]; idle: number }) {
  const store = useStore(1000);
  return (
    <section aria-labelledby="waiting">
      <h2 id="waiting">Who waits, and why{idle > 0 && trials.length > 0 ? ` (${plural(idle, "slot")} idle)` : ""}</h2>
      {trials.length === 0 && <p class="empty">Nobody.</p>}
      <ul class="list waiting">
        {trials.slice(0, 60).map((trial) => (
          <li key={trial.id}>
            <TrialName trial={trial} />
            <span class="num dim">{duration(store.now() - trial.submitted)}</span>
            <span class="why" title={trial.why}>
              {trial.why}
            </span>
            {trial.expected !== undefined && <span class="num">in about {duration(trial.expected - store.now())}</span>}
          </li>
        ))}
      </ul>
      {trials.length > 60 && <p class="dim">and {trials.length - 60} more</p>}
    </section>
  );
}

// ---------------------------------------------------------------------- the picture

function Picture({ study }: { study: string }) {
  const store = useStore();
  const home = useRef<HTMLDivElement>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const width = useWidth(home, 800);
  const [chosen, setChosen] = useState<Span | "present" | "all" | "latest">("present");
  const [under, setUnder] = useState<{ bar: Bar; x: number; y: number } | null>(null);
  const drag = useRef<{ x: number; span: Span } | null>(null);

  const intervals = [...store.intervals.values()];
  const rows = useMemo(() => rowsOf(store.nodes, intervals), [store.nodes, intervals.length]);
  const anyLive = intervals.some((interval) => interval[5] === null);
  const now = store.now();
  const all = wholeSpan(intervals, now);
  const whole = presentSpan(intervals, store.trials, study, now) ?? all;
  const end = anyLive ? now : whole.until;
  const latest = { from: Math.max(all.from, end - LATEST), until: Math.max(end, all.from + 1) };
  const shown = chosen === "present" ? whole : chosen === "all" ? all : chosen === "latest" ? latest : chosen;
  const plot = Math.max(100, width - LABELS);
  const bars = barsOf(intervals, rows, shown, plot, now);
  const height = rows.length * (ROW + GAP) + AXIS;

  // A held slot grows with the time, also while nothing is told.
  const [, tick] = useState(0);
  useEffect(() => {
    if (!anyLive) return;
    const timer = setInterval(() => tick((count) => count + 1), 500);
    return () => clearInterval(timer);
  }, [anyLive]);

  useEffect(() => {
    const at = canvas.current;
    if (at) draw(at, { rows, bars, shown, plot, height, study, trials: store.trials, under: under?.bar.interval[1] });
  });

  const timeAt = (x: number) => shown.from + ((x - LABELS) / plot) * (shown.until - shown.from);
  const zoom = (factor: number, at: number) => {
    const next = { from: at - (at - shown.from) * factor, until: at + (shown.until - at) * factor };
    if (next.until - next.from < 0.5) return;
    setChosen(next.until - next.from >= all.until - all.from ? "all" : next);
  };
  const pan = (seconds: number) => {
    setChosen({ from: shown.from + seconds, until: shown.until + seconds });
  };
  const look = (event: MouseEvent) => {
    const box = canvas.current?.getBoundingClientRect();
    if (!box) return;
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    if (drag.current) {
      const seconds = ((drag.current.x - x) / plot) * (drag.current.span.until - drag.current.span.from);
      setChosen({ from: drag.current.span.from + seconds, until: drag.current.span.until + seconds });
      return;
    }
    const bar = barAt(bars, x - LABELS, Math.floor(y / (ROW + GAP)));
    setUnder(bar ? { bar, x, y } : null);
  };
  useEffect(() => {
    const at = canvas.current;
    if (!at) return;
    const wheel = (event: WheelEvent) => {
      if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return;
      event.preventDefault();
      zoom(event.deltaY > 0 ? 1.25 : 0.8, timeAt(event.offsetX));
    };
    at.addEventListener("wheel", wheel, { passive: false });
    return () => at.removeEventListener("wheel", wheel);
  });
  const keys = (event: KeyboardEvent) => {
    const step = (shown.until - shown.from) / 10;
    const middle = (shown.from + shown.until) / 2;
    const acts: Record<string, () => void> = {
      ArrowLeft: () => pan(-step),
      ArrowRight: () => pan(step),
      "+": () => zoom(0.8, middle),
      "-": () => zoom(1.25, middle),
      Home: () => setChosen("present"),
    };
    const act = acts[event.key];
    if (act) {
      event.preventDefault();
      act();
    }
  };

  return (
    <section aria-labelledby="picture" class="picture">
      <div class="line">
        <h2 id="picture">Slots over time</h2>
        <span class="grow" />
        <button type="button" onClick={() => zoom(0.6, shown.until)}>
          Zoom in
        </button>
        <button type="button" onClick={() => zoom(1.6, shown.until)}>
          Zoom out
        </button>
        <button type="button" aria-pressed={chosen === "present"} onClick={() => setChosen("present")}>
          {anyLive ? "What runs" : "The last"}
        </button>
        <button type="button" aria-pressed={chosen === "all"} onClick={() => setChosen("all")}>
          All
        </button>
        <button type="button" aria-pressed={chosen === "latest"} disabled={!anyLive} onClick={() => setChosen("latest")}>
          Follow the last {LATEST / 60} min
        </button>
      </div>
      <div ref={home} class="canvas">
        <canvas
          ref={canvas}
          tabIndex={0}
          role="img"
          aria-label={`${plural(rows.length, "slot")} from ${clock(shown.from)} to ${clock(shown.until)}; ${bars.length} times held. Arrow keys move, plus and minus zoom.`}
          data-from={shown.from}
          data-until={shown.until}
          data-labels={LABELS}
          data-row={ROW + GAP}
          style={{ width: `${width}px`, height: `${height}px` }}
          onMouseMove={look}
          onMouseLeave={() => {
            setUnder(null);
            drag.current = null;
          }}
          onMouseDown={(event) => (drag.current = { x: event.offsetX, span: shown })}
          onMouseUp={(event) => {
            const moved = drag.current && Math.abs(drag.current.x - event.offsetX) > 3;
            drag.current = null;
            if (!moved && under?.bar.interval[1]) location.hash = linkTo({ view: "trial", trial: under.bar.interval[1] });
          }}
          onKeyDown={keys}
        />
        {under && <Tip under={under} width={width} />}
      </div>
      <p class="dim hint">Drag to move, Ctrl or Shift with the wheel to zoom, click for the trial. A thin line is where a trial changed its size.</p>
    </section>
  );
}

/** From the first slot of the studies that run now, or of the one that ran last, or of the one that is looked at. */
function presentSpan(intervals: Interval[], trials: Map<string, Trial>, study: string, now: number): Span | null {
  const all = [...trials.values()];
  const studies = new Set(study ? [study] : all.filter((trial) => !FINAL.has(trial.state)).map((trial) => trial.study));
  if (studies.size === 0) {
    const last = all.reduce<Trial | null>((latest, trial) => ((trial.finished ?? 0) > (latest?.finished ?? 0) ? trial : latest), null);
    if (last) studies.add(last.study);
  }
  const theirs = intervals.filter((interval) => studies.has(trials.get(interval[1])?.study ?? ""));
  return theirs.length ? wholeSpan(theirs, now) : null;
}

const stories = new Map<string, Promise<Entry[]>>();

/** Why it got that size: the latest decision on it before the bar began. */
function Tip({ under, width }: { under: { bar: Bar; x: number; y: number }; width: number }) {
  const store = useStore(1000);
  const [replica, id, node, slot, began, ended] = under.bar.interval;
  const trial = store.trials.get(id);
  const [decision, setDecision] = useState<Entry | undefined>();
  useEffect(() => {
    setDecision(undefined);
    if (!id) return;
    let wanted = true;
    const known = `${replica} ${ended ?? ""}`;
    if (!stories.has(known)) stories.set(known, get<TrialStory>(`/page/trials/${part(id)}`).then((story) => story.history));
    stories
      .get(known)
      ?.then((history) => {
        const before = history.filter((entry) => entry.at <= began + 0.5 && entry.who.startsWith("policy"));
        const launched = history.filter((entry) => entry.at <= began + 0.5 && entry.what === "starting");
        if (wanted) setDecision([...before, ...launched].sort((a, b) => a.at - b.at).pop());
      })
      .catch(() => stories.delete(known));
    return () => {
      wanted = false;
    };
  }, [replica]);
  return (
    <div class="hover" style={{ left: `${Math.min(under.x + 12, Math.max(0, width - 340))}px`, top: `${under.y + 14}px` }}>
      <b>{trial ? `trial ${store.label(trial)}` : "held by another study"}</b>
      <span class="dim">
        {" "}
        {node} · {slot}, {clock(began)} to {ended === null ? "now" : clock(ended)} ({duration((ended ?? store.now()) - began)})
      </span>
      {decision && (
        <p>
          {decision.what}: {decision.why}
          {Object.entries(decision.numbers ?? {}).map(([name, found]) => (
            <span key={name} class="dim">
              {" "}
              · {name} {number(found, 3)}
            </span>
          ))}
        </p>
      )}
      {trial && !FINAL.has(trial.state) && <p>now: {trial.why}</p>}
    </div>
  );
}

interface Drawing {
  rows: Row[];
  bars: Bar[];
  shown: Span;
  plot: number;
  height: number;
  study: string;
  trials: Map<string, Trial>;
  under: string | undefined;
}

function draw(canvas: HTMLCanvasElement, { rows, bars, shown, plot, height, study, trials, under }: Drawing): void {
  const ratio = devicePixelRatio || 1;
  const width = plot + LABELS;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const pen = canvas.getContext("2d");
  if (!pen) return;
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  rows.forEach((row, index) => {
    const top = index * (ROW + GAP);
    pen.fillStyle = ink("--idle");
    pen.fillRect(LABELS, top, plot, ROW);
    pen.fillStyle = ink("--dim");
    pen.textAlign = "right";
    pen.fillText(row.label.length > 20 ? `…${row.label.slice(-19)}` : row.label, LABELS - 8, top + ROW / 2);
  });
  pen.textAlign = "center";
  for (const bar of bars) {
    const id = bar.interval[1];
    const trial = trials.get(id);
    const top = bar.row * (ROW + GAP);
    const faded = (study && trial && trial.study !== study) || (under && under !== id);
    pen.globalAlpha = faded ? 0.25 : 1;
    pen.fillStyle = id ? colorOf(trial) : ink("--other");
    pen.fillRect(LABELS + bar.left, top, Math.max(bar.right - bar.left, 0.75), ROW);
    if (trial && bar.right - bar.left > 22) {
      pen.fillStyle = "#fff";
      pen.fillText(String(trial.number), LABELS + (bar.left + bar.right) / 2, top + ROW / 2);
    }
  }
  pen.globalAlpha = 1;
  drawEdges(pen, bars, under);
  const base = rows.length * (ROW + GAP);
  pen.fillStyle = ink("--dim");
  for (const tick of ticksOf(shown, plot)) {
    const x = LABELS + ((tick - shown.from) / (shown.until - shown.from)) * plot;
    pen.fillRect(Math.round(x), base, 1, 4);
    if (x > LABELS + 20 && x < width - 24) pen.fillText(clock(tick), x, base + 13);
  }
}

/** Where a trial that trains gets or loses a slot: a line over the slots that it has from then on. */
function drawEdges(pen: CanvasRenderingContext2D, bars: Bar[], under: string | undefined): void {
  const byTrial = new Map<string, Bar[]>();
  for (const bar of bars) byTrial.set(bar.interval[1], [...(byTrial.get(bar.interval[1]) ?? []), bar]);
  pen.strokeStyle = ink("--text");
  pen.lineWidth = 1;
  for (const [id, mine] of byTrial) {
    if (!id || mine.length < 2 || (under && under !== id)) continue;
    for (const bar of mine) {
      const others = mine.filter((each) => each !== bar && each.left < bar.left - 0.5 && each.right > bar.left + 0.5);
      const nearest = others.sort((a, b) => Math.abs(a.row - bar.row) - Math.abs(b.row - bar.row))[0];
      if (!nearest || bar.left <= 0.5) continue;
      const [low, high] = nearest.row < bar.row ? [nearest.row, bar.row] : [bar.row, nearest.row];
      const x = Math.round(LABELS + bar.left) + 0.5;
      pen.globalAlpha = under === id ? 0.9 : 0.35;
      pen.beginPath();
      pen.moveTo(x, low * (ROW + GAP) + ROW / 2);
      pen.lineTo(x, high * (ROW + GAP) + ROW / 2);
      pen.stroke();
    }
  }
  pen.globalAlpha = 1;
}
