// One colour a trial, the same as in the terminal and in pictures (`scheduler/dashboard/colors.py`); those of another
// study begin elsewhere on the wheel.

import { store } from "./store";
import type { Trial } from "./types";

const GOLDEN_RATIO = 0.61803398875;
const STUDY_TURN = 0.29;
const LIGHTNESS = [0.56, 0.46, 0.66];

export function trialColor(number: number, study = 0): string {
  const hue = (0.58 + number * GOLDEN_RATIO + study * STUDY_TURN) % 1;
  const lightness = LIGHTNESS[number % 3] ?? 0.56;
  return `hsl(${(hue * 360).toFixed(1)} 62% ${lightness * 100}%)`;
}

export function colorOf(trial: Trial | undefined): string {
  if (!trial) return "#8a8f98";
  const place = store.studies.findIndex((each) => each.name === trial.study);
  return trialColor(trial.number, Math.max(0, place));
}
