// Which view is open, kept behind the address's `#`: links can be copied, and the browser's back button works.

import { useEffect, useState } from "preact/hooks";

export interface Route {
  view: string;
  /** Of the trial's view. */
  trial: string;
  /** Name of the study that is looked at alone; empty: all. */
  study: string;
}

export function readRoute(hash: string): Route {
  const [path = "", query = ""] = hash.replace(/^#\/?/, "").split("?");
  const [view = "", trial = ""] = path.split("/").map(decodeURIComponent);
  return { view: view || "slots", trial, study: new URLSearchParams(query).get("study") ?? "" };
}

export function linkTo(route: Partial<Route>): string {
  const { view = "slots", trial = "", study = "" } = route;
  const path = [view, ...(trial ? [trial] : [])].map(encodeURIComponent).join("/");
  return `#/${path}${study ? `?study=${encodeURIComponent(study)}` : ""}`;
}

export function useRoute(): Route {
  const [route, set] = useState(() => readRoute(location.hash));
  useEffect(() => {
    const look = () => set(readRoute(location.hash));
    addEventListener("hashchange", look);
    return () => removeEventListener("hashchange", look);
  }, []);
  return route;
}
