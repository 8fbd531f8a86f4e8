// The frame around the views: where one is, which study, and whether what is shown is still true.

import { useEffect, useState } from "preact/hooks";
import { drop } from "./api";
import { Entry, enterByLink } from "./entry";
import { type Route, linkTo, useRoute } from "./route";
import { type Connection, store, useStore } from "./store";
import { applyTheme, turnTheme } from "./theme";
import { ClusterView } from "./views/cluster";
import { SearchView } from "./views/search";
import { SlotsView } from "./views/slots";
import { TrialView } from "./views/trial";
import { TrialsView } from "./views/trials";
import { WhyView } from "./views/why";

const VIEWS = [
  ["slots", "Slots"],
  ["trials", "Trials"],
  ["why", "Why"],
  ["search", "Search"],
  ["cluster", "Cluster"],
] as const;

const CONNECTION: Record<Connection, string> = {
  connecting: "connecting",
  live: "live",
  lost: "connection lost, trying again",
  over: "the scheduler has ended",
  locked: "signed out",
};

export function App() {
  const [words, setWords] = useState<string | null>(null);
  const [, turn] = useState(0);
  useStore(500);
  const route = useRoute();
  useEffect(() => {
    applyTheme();
    void enterByLink().then((said) => {
      setWords(said);
      store.connect();
    });
    return () => store.disconnect();
  }, []);
  useEffect(() => {
    const name = VIEWS.find(([view]) => view === route.view)?.[1] ?? "Trial";
    document.title = `${name} · Elastune`;
  }, [route.view]);
  if (words === null) return null;
  if (store.connection === "locked") return <Entry words={words} />;
  const leave = () => {
    void drop("/page/session").then(() => {
      store.disconnect();
      store.connection = "locked";
      store.changed();
    });
  };
  return (
    <>
      <a class="skip" href="#main" onClick={(event) => skip(event)}>
        Skip to the content
      </a>
      <header class="bar">
        <a class="brand" href={linkTo({ view: "slots", study: route.study })}>
          Elastune
        </a>
        <nav aria-label="Views">
          {VIEWS.map(([view, label]) => (
            <a key={view} href={linkTo({ view, study: route.study })} aria-current={route.view === view ? "page" : undefined}>
              {label}
            </a>
          ))}
        </nav>
        {store.studies.length > 1 && (
          <label class="study">
            <span>Study</span>
            <select
              value={route.study}
              onChange={(event) => {
                location.hash = linkTo({ ...route, trial: "", view: route.view === "trial" ? "trials" : route.view, study: event.currentTarget.value });
              }}
            >
              <option value="">all {store.studies.length}</option>
              {store.studies.map((study) => (
                <option key={study.name} value={study.name}>
                  {store.called(study.name)}
                </option>
              ))}
            </select>
          </label>
        )}
        <span class="grow" />
        <span class={`connection ${store.connection}`} role="status">
          {CONNECTION[store.connection]}
        </span>
        {store.access && !store.mayAct && <span class="badge">read-only</span>}
        <button
          type="button"
          class="plain"
          onClick={() => {
            turnTheme();
            turn((count) => count + 1);
          }}
        >
          Light / dark
        </button>
        <button type="button" class="plain" onClick={leave}>
          Sign out
        </button>
        {store.emulated && <p class="note">{store.emulated}</p>}
      </header>
      <main id="main" tabIndex={-1}>
        {store.connection === "connecting" ? <p class="empty">Asking the scheduler…</p> : <View route={route} />}
      </main>
    </>
  );
}

function skip(event: Event) {
  event.preventDefault();
  document.getElementById("main")?.focus();
}

function View({ route }: { route: Route }) {
  switch (route.view) {
    case "trials":
      return <TrialsView study={route.study} />;
    case "why":
      return <WhyView study={route.study} />;
    case "search":
      return <SearchView study={route.study} />;
    case "cluster":
      return <ClusterView study={route.study} />;
    case "trial":
      return <TrialView key={route.trial} id={route.trial} />;
    default:
      return <SlotsView study={route.study} />;
  }
}
