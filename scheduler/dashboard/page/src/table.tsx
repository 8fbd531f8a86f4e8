// A table of any length: only the rows that can be seen are there.

import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

export interface Column<T> {
  name: string;
  label: string;
  cell: (row: T) => ComponentChildren;
  /** What it is sorted by; none: it is not. */
  key?: (row: T) => number | string | null | undefined;
  right?: boolean;
  /** Of the width that is left, in parts. */
  grow?: number;
  width: number;
  title?: (row: T) => string;
}

interface Props<T> {
  label: string;
  columns: Column<T>[];
  rows: T[];
  id: (row: T) => string;
  sorted: { column: string; down: boolean };
  onSort: (column: string) => void;
  onOpen?: (row: T) => void;
  height?: string;
}

const ROW = 30;

export function sortedBy<T>(rows: T[], column: Column<T> | undefined, down: boolean): T[] {
  const key = column?.key;
  if (!key) return rows;
  const sign = down ? -1 : 1;
  const keyed = rows.map((row, index) => ({ row, index, at: key(row) }));
  keyed.sort((a, b) => {
    const [first, second] = [a.at, b.at];
    // What has no value comes last, either way.
    if (first === null || first === undefined) return second === null || second === undefined ? a.index - b.index : 1;
    if (second === null || second === undefined) return -1;
    const order =
      typeof first === "number" && typeof second === "number" ? first - second : String(first).localeCompare(String(second));
    return order * sign || a.index - b.index;
  });
  return keyed.map((each) => each.row);
}

export function Table<T>({ label, columns, rows, id, sorted, onSort, onOpen, height = "60vh" }: Props<T>) {
  const home = useRef<HTMLDivElement>(null);
  const [view, setView] = useState({ top: 0, height: 600 });
  const look = () => {
    const box = home.current;
    if (box && (box.scrollTop !== view.top || box.clientHeight !== view.height)) {
      setView({ top: box.scrollTop, height: box.clientHeight });
    }
  };
  useEffect(look);
  const first = Math.max(0, Math.floor(view.top / ROW) - 4);
  const shown = rows.slice(first, first + Math.ceil(view.height / ROW) + 8);
  const widths = columns.map((column) => (column.grow ? `minmax(${column.width}px, ${column.grow}fr)` : `${column.width}px`)).join(" ");
  const least = columns.reduce((sum, column) => sum + column.width, 0) + 16;
  return (
    <div class="table" ref={home} onScroll={look} style={{ maxHeight: height }} tabIndex={0} role="region" aria-label={`${label}, scrolls`}>
      <div role="table" aria-label={label} aria-rowcount={rows.length + 1} style={{ minWidth: `${least}px` }}>
        <div role="rowgroup" class="head">
          <div role="row" class="row" style={{ gridTemplateColumns: widths }}>
            {columns.map((column) => (
              <div
                key={column.name}
                role="columnheader"
                class={column.right ? "right" : ""}
                aria-sort={sorted.column === column.name ? (sorted.down ? "descending" : "ascending") : undefined}
              >
                {column.key ? (
                  <button type="button" class="plain" onClick={() => onSort(column.name)}>
                    {column.label}
                    {sorted.column === column.name ? (sorted.down ? " ▾" : " ▴") : ""}
                  </button>
                ) : (
                  column.label
                )}
              </div>
            ))}
          </div>
        </div>
        <div role="rowgroup" class="body" style={{ height: `${rows.length * ROW}px` }}>
          {shown.map((row, index) => (
            <div
              key={id(row)}
              role="row"
              class="row"
              aria-rowindex={first + index + 2}
              style={{ gridTemplateColumns: widths, transform: `translateY(${(first + index) * ROW}px)` }}
              onDblClick={() => onOpen?.(row)}
            >
              {columns.map((column) => (
                <div key={column.name} role="cell" class={column.right ? "right" : ""} title={column.title?.(row)}>
                  {column.cell(row)}
                </div>
              ))}
            </div>
          ))}
        </div>
      </div>
    </div>
  );
}
