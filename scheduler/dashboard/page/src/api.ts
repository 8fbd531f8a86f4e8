// Requests to the scheduler that served this page; the browser's cookie says who asks.

import { useEffect, useState } from "preact/hooks";

/** What went wrong, in words. */
export const saidBy = (error: unknown): string => (error instanceof Error ? error.message : String(error));

async function call<T>(method: string, path: string, body?: unknown): Promise<T> {
  let response: Response;
  try {
    response = await fetch(path, {
      method,
      headers: { "X-Elastune-Page": "1", ...(body === undefined ? {} : { "Content-Type": "application/json" }) },
      body: body === undefined ? undefined : JSON.stringify(body),
      credentials: "same-origin",
    });
  } catch {
    throw new Error("the scheduler does not answer");
  }
  const text = await response.text();
  if (!response.ok) throw new Error(sentence(text, response.status));
  return (text ? JSON.parse(text) : null) as T;
}

function sentence(text: string, status: number): string {
  try {
    const { detail } = JSON.parse(text) as { detail?: unknown };
    if (typeof detail === "string") return detail;
    if (Array.isArray(detail)) return detail.map((each: { msg?: string }) => each.msg ?? "").join("; ");
  } catch {
    // Not the scheduler's own answer.
  }
  return `the request was refused (HTTP status ${status})`;
}

export const get = <T>(path: string): Promise<T> => call<T>("GET", path);
export const post = <T>(path: string, body: unknown = {}): Promise<T> => call<T>("POST", path, body);
export const patch = <T>(path: string, body: unknown): Promise<T> => call<T>("PATCH", path, body);
export const drop = (path: string): Promise<null> => call<null>("DELETE", path);
export const part = encodeURIComponent;

/** What a path answers, and what went wrong: asked for at once, again every so many seconds, and where `mark` changes. */
export function useAsked<T>(path: string, seconds = 0, mark: unknown = ""): [T | null, string] {
  const [found, setFound] = useState<T | null>(null);
  const [error, setError] = useState("");
  useEffect(() => {
    let wanted = true;
    const look = () =>
      get<T>(path).then(
        (answer) => wanted && (setFound(answer), setError("")),
        (refused: unknown) => wanted && setError(saidBy(refused)),
      );
    void look();
    const timer = seconds ? setInterval(look, seconds * 1000) : 0;
    return () => {
      wanted = false;
      clearInterval(timer);
    };
  }, [path, seconds, mark]);
  return [found, error];
}
