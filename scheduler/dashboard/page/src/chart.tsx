// A line chart over uPlot: made once, given new data when there is some, and as wide as its place.

import { type RefObject } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { number } from "./format";

export interface Line {
  label: string;
  color: string;
  dashed?: boolean;
  points?: boolean;
  stepped?: boolean;
  fill?: string;
  width?: number;
}

interface Props {
  title: string;
  lines: Line[];
  /** The x of all lines, then each line's y. */
  data: uPlot.AlignedData;
  height?: number;
  time?: boolean;
  xLabel?: string;
  log?: boolean;
  /** Where vertical marks go, with their words. */
  marks?: { x: number; words: string }[];
  onPick?: (line: number) => void;
}

function timeTick(at: number, step: number): string {
  const when = new Date(at * 1000);
  if (step >= 86400) return when.toLocaleDateString(undefined, { month: "short", day: "numeric" });
  return when.toLocaleTimeString(undefined, { hour: "2-digit", minute: "2-digit", hour12: false, ...(step < 60 ? { second: "2-digit" } : {}) });
}

export function ink(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** The width of a place, as it is now. */
export function useWidth(home: RefObject<HTMLElement>, first: number): number {
  const [width, setWidth] = useState(first);
  useEffect(() => {
    if (!home.current) return;
    const watch = new ResizeObserver(([entry]) => entry && setWidth(Math.floor(entry.contentRect.width)));
    watch.observe(home.current);
    return () => watch.disconnect();
  }, []);
  return width;
}

export function Chart({ title, lines, data, height = 180, time = false, xLabel, log = false, marks, onPick }: Props) {
  const place = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const seen = useRef({ marks, onPick });
  seen.current = { marks, onPick };
  const shape = JSON.stringify([lines, time, log, height, xLabel, document.documentElement.dataset.theme ?? ""]);

  useEffect(() => {
    const home = place.current;
    if (!home) return;
    const axis = (): uPlot.Axis => ({
      stroke: ink("--dim"),
      grid: { stroke: ink("--line"), width: 1 },
      ticks: { stroke: ink("--line"), width: 1 },
      font: "11px system-ui, sans-serif",
      labelFont: "11px system-ui, sans-serif",
    });
    const options: uPlot.Options = {
      width: Math.max(200, home.clientWidth),
      height,
      scales: { x: { time }, y: log ? { distr: 3 } : {} },
      axes: [
        {
          ...axis(),
          ...(xLabel ? { label: xLabel, labelSize: 18 } : {}),
          size: 30,
          ...(time ? { values: (_plot: uPlot, ticks: number[], _axis: number, _space: number, step: number) => ticks.map((each) => timeTick(each, step)) } : {}),
        },
        { ...axis(), size: 58, values: (_plot, ticks) => ticks.map((each) => (each === null ? "" : number(each, 3))) },
      ],
      legend: { show: false },
      cursor: { points: { size: 6 }, focus: { prox: 12 } },
      focus: { alpha: onPick ? 0.35 : 1 },
      series: [
        {},
        ...lines.map((line) => ({
          label: line.label,
          stroke: line.color,
          width: line.width ?? 1.5,
          dash: line.dashed ? [5, 4] : undefined,
          fill: line.fill,
          spanGaps: true,
          points: line.points ? { show: true, size: 5, fill: line.color } : { show: false },
          ...(line.points ? { paths: () => null } : {}),
          ...(line.stepped && uPlot.paths.stepped ? { paths: uPlot.paths.stepped({ align: 1 }) } : {}),
        })),
      ],
      hooks: {
        draw: [
          (drawn) => {
            const { ctx, bbox } = drawn;
            ctx.save();
            ctx.strokeStyle = ink("--dim");
            ctx.setLineDash([3, 3]);
            let line = 0;
            for (const mark of seen.current.marks ?? []) {
              const x = Math.round(drawn.valToPos(mark.x, "x", true)) + 0.5;
              if (x < bbox.left || x > bbox.left + bbox.width) continue;
              ctx.beginPath();
              ctx.moveTo(x, bbox.top);
              ctx.lineTo(x, bbox.top + bbox.height);
              ctx.stroke();
              ctx.fillStyle = ink("--dim");
              ctx.font = `${10 * devicePixelRatio}px system-ui, sans-serif`;
              ctx.textAlign = "left";
              // Those that are close to each other are written below each other.
              ctx.fillText(mark.words, x + 3 * devicePixelRatio, bbox.top + (10 + 11 * (line % 3)) * devicePixelRatio);
              line += 1;
            }
            ctx.restore();
          },
        ],
        setCursor: [
          (drawn) => {
            const tip = home.querySelector<HTMLElement>(".tip");
            if (!tip) return;
            const index = drawn.cursor.idx;
            if (index === null || index === undefined) {
              tip.hidden = true;
              return;
            }
            const at = drawn.data[0][index];
            const shown = lines
              .map((line, place) => ({ line, found: drawn.data[place + 1]?.[index] }))
              .filter((each) => each.found !== null && each.found !== undefined)
              .slice(0, 8);
            tip.hidden = shown.length === 0;
            tip.textContent = [
              at === undefined ? "" : time ? new Date(at * 1000).toLocaleTimeString() : `${xLabel ?? "x"} ${number(at)}`,
              ...shown.map((each) => `${each.line.label}: ${number(each.found)}`),
            ].join("\n");
            const left = drawn.cursor.left ?? 0;
            tip.style.left = `${Math.min(left + 70, home.clientWidth - 150)}px`;
            tip.style.top = "6px";
          },
        ],
      },
    };
    const made = new uPlot(options, data, home);
    plot.current = made;
    const pick = () => {
      const found = made.series.findIndex((each, index) => index > 0 && (each as { _focus?: boolean })._focus === true);
      if (found > 0) seen.current.onPick?.(found - 1);
    };
    if (onPick) made.over.addEventListener("click", pick);
    const watch = new ResizeObserver(() => made.setSize({ width: Math.max(200, home.clientWidth), height }));
    watch.observe(home);
    return () => {
      watch.disconnect();
      made.destroy();
      plot.current = null;
    };
    // The data has an effect of its own.
  }, [shape]);

  useEffect(() => plot.current?.setData(data), [data]);

  const points = data[0].length;
  return (
    <figure class="chart">
      <figcaption>{title}</figcaption>
      <div ref={place} class="plot" role="img" aria-label={`${title}: ${lines.length} lines, ${points} points`}>
        <pre class="tip" hidden />
      </div>
    </figure>
  );
}

/** Lines whose x differ, over one x. */
export function aligned(series: { x: number[]; y: (number | null)[] }[]): uPlot.AlignedData {
  const all = [...new Set(series.flatMap((each) => each.x))].sort((a, b) => a - b);
  const place = new Map(all.map((x, index) => [x, index]));
  return [
    all,
    ...series.map((each) => {
      const column: (number | null | undefined)[] = new Array<undefined>(all.length).fill(undefined);
      each.x.forEach((x, index) => (column[place.get(x) ?? 0] = each.y[index] ?? null));
      return column;
    }),
  ] as uPlot.AlignedData;
}
