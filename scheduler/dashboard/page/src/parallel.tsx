// Parallel coordinates: a line a trial over an axis a parameter, so that what the good ones have in common is seen.

import { useEffect, useRef, useState } from "preact/hooks";
import { ink, useWidth } from "./chart";
import { number } from "./format";
import { scoreOf } from "./parts";
import { linkTo } from "./route";
import { store } from "./store";
import type { Parameter, Trial } from "./types";

const HEIGHT = 300;
const TOP = 30;
const BOTTOM = 16;
const SIDE = 60;

interface Axis {
  name: string;
  log: boolean;
  choices: string[] | null;
  low: number;
  high: number;
}

const VALUE = "value";

function axisOf(name: string, found: (Parameter | undefined)[], log: boolean): Axis | null {
  const known = found.filter((each) => each !== undefined && each !== null);
  if (known.length === 0) return null;
  if (known.every((each) => typeof each === "number")) {
    const numbers = known as number[];
    const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
    return { name, log: log && low > 0, choices: null, low, high };
  }
  const choices = [...new Set(known.map(String))].sort();
  return { name, log: false, choices, low: 0, high: Math.max(1, choices.length - 1) };
}

export function spansDecades(found: (Parameter | undefined)[]): boolean {
  const numbers = found.filter((each) => typeof each === "number");
  return numbers.length > 0 && Math.min(...numbers) > 0 && Math.max(...numbers) / Math.min(...numbers) >= 50;
}

function place(axis: Axis, found: Parameter | undefined): number | null {
  if (found === undefined || found === null) return null;
  if (axis.choices) return 1 - axis.choices.indexOf(String(found)) / axis.high;
  const at = Number(found);
  const share = axis.log
    ? (Math.log(at) - Math.log(axis.low)) / (Math.log(axis.high) - Math.log(axis.low))
    : (at - axis.low) / (axis.high - axis.low);
  return 1 - (Number.isFinite(share) ? share : 0.5);
}

export function Parallel({ trials, direction, top }: { trials: Trial[]; direction: string; top: number }) {
  const home = useRef<HTMLDivElement>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const width = useWidth(home, 800);
  const [logs, setLogs] = useState<Record<string, boolean>>({});
  const [near, setNear] = useState<Trial | null>(null);

  const scored = trials.filter((trial) => scoreOf(trial) !== null && trial.parameters);
  const names = [...new Set(scored.flatMap((trial) => Object.keys(trial.parameters ?? {})))].slice(0, 14);
  const read = (trial: Trial, name: string) => (name === VALUE ? scoreOf(trial) : trial.parameters?.[name]);
  const axes = [...names, VALUE]
    .map((name) => {
      const found = scored.map((trial) => read(trial, name));
      return axisOf(name, found, logs[name] ?? (name !== VALUE && spansDecades(found)));
    })
    .filter((axis) => axis !== null);
  const ordered = [...scored].sort((a, b) => ((scoreOf(b) ?? 0) - (scoreOf(a) ?? 0)) * (direction === "maximize" ? 1 : -1));
  const good = new Set(ordered.slice(0, Math.max(1, Math.ceil((ordered.length * top) / 100))));
  const x = (index: number) => SIDE + (index / Math.max(1, axes.length - 1)) * (width - 2 * SIDE);
  const y = (share: number) => TOP + share * (HEIGHT - TOP - BOTTOM);
  const lineOf = (trial: Trial) => axes.map((axis) => place(axis, read(trial, axis.name)));

  useEffect(() => {
    const at = canvas.current;
    const pen = at?.getContext("2d");
    if (!at || !pen) return;
    const ratio = devicePixelRatio || 1;
    at.width = width * ratio;
    at.height = HEIGHT * ratio;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, HEIGHT);
    const stroke = (trial: Trial) => {
      pen.beginPath();
      let down = false;
      lineOf(trial).forEach((share, index) => {
        if (share === null) {
          down = false;
          return;
        }
        if (down) pen.lineTo(x(index), y(share));
        else pen.moveTo(x(index), y(share));
        down = true;
      });
      pen.stroke();
    };
    pen.lineWidth = 1;
    pen.strokeStyle = ink("--line");
    for (const trial of ordered) if (!good.has(trial)) stroke(trial);
    const best = [...good].reverse();
    best.forEach((trial, index) => {
      const share = best.length > 1 ? index / (best.length - 1) : 1;
      pen.strokeStyle = `hsl(${(210 - 185 * share).toFixed(0)} 75% 48%)`;
      pen.lineWidth = 1.2 + share;
      stroke(trial);
    });
    if (near) {
      pen.strokeStyle = ink("--text");
      pen.lineWidth = 3;
      stroke(near);
    }
    pen.font = "11px system-ui, sans-serif";
    axes.forEach((axis, index) => {
      pen.strokeStyle = ink("--dim");
      pen.lineWidth = 1;
      pen.beginPath();
      pen.moveTo(x(index), y(0));
      pen.lineTo(x(index), y(1));
      pen.stroke();
      pen.fillStyle = ink("--dim");
      pen.textAlign = "center";
      const ends = axis.choices ? [axis.choices[axis.choices.length - 1] ?? "", axis.choices[0] ?? ""] : [number(axis.high, 3), number(axis.low, 3)];
      pen.fillText(String(ends[0]).slice(0, 14), x(index), TOP - 6);
      pen.fillText(String(ends[1]).slice(0, 14), x(index), HEIGHT - 3);
    });
  });

  const look = (event: MouseEvent) => {
    let [nearest, least]: [Trial | null, number] = [null, 14];
    const piece = axes.findIndex((_, index) => x(index) <= event.offsetX && event.offsetX <= x(index + 1));
    if (piece < 0) return;
    for (const trial of good) {
      const line = lineOf(trial);
      const [from, to] = [line[piece], line[piece + 1]];
      if (from === null || from === undefined || to === null || to === undefined) continue;
      const share = (event.offsetX - x(piece)) / (x(piece + 1) - x(piece));
      const away = Math.abs(y(from + (to - from) * share) - event.offsetY);
      if (away < least) [nearest, least] = [trial, away];
    }
    setNear(nearest);
  };

  if (scored.length === 0) return <p class="empty">No trial with parameters has reported yet.</p>;
  return (
    <div ref={home} class="canvas">
      <div class="axes">
        {axes.map((axis, index) => (
          <span key={axis.name} style={{ left: `${x(index)}px` }}>
            {axis.name}
            {!axis.choices && axis.low > 0 && (
              <button
                type="button"
                class="plain"
                title={`${axis.log ? "logarithmic" : "linear"} axis; changes it`}
                onClick={() => setLogs({ ...logs, [axis.name]: !axis.log })}
              >
                {axis.log ? "log" : "lin"}
                <span class="sr"> axis of {axis.name}</span>
              </button>
            )}
          </span>
        ))}
      </div>
      <canvas
        ref={canvas}
        role="img"
        aria-label={`${scored.length} trials over ${axes.map((axis) => axis.name).join(", ")}`}
        style={{ width: `${width}px`, height: `${HEIGHT}px` }}
        onMouseMove={look}
        onMouseLeave={() => setNear(null)}
        onClick={() => near && (location.hash = linkTo({ view: "trial", trial: near.id }))}
      />
      <p class="dim hint" role="status">
        {near
          ? `trial ${store.label(near)}: ${number(scoreOf(near))}, ${Object.entries(near.parameters ?? {})
              .map(([name, found]) => `${name} ${typeof found === "number" ? number(found) : String(found)}`)
              .join(", ")}`
          : `the best ${good.size} of ${scored.length} are in colour, warmer is better; point at a line to read it`}
      </p>
    </div>
  );
}
