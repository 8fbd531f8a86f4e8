// Getting in without a session: by the code of a link, or by a token.

import { useState } from "preact/hooks";
import { post, saidBy } from "./api";
import { store } from "./store";

/** Takes the code out of the address, which must not stay there, and gets a session for it. */
export async function enterByLink(): Promise<string> {
  const found = /^#code=([\w-]+)/.exec(location.hash);
  if (!found) return "";
  history.replaceState(null, "", location.pathname);
  try {
    await post("/page/session", { code: found[1] });
    return "";
  } catch (error) {
    return saidBy(error);
  }
}

export function Entry({ words }: { words: string }) {
  const [token, setToken] = useState("");
  const [said, setSaid] = useState(words);
  const enter = async (event: Event) => {
    event.preventDefault();
    try {
      await post("/page/session", { token });
      store.connection = "connecting";
      store.connect();
      store.changed();
    } catch (error) {
      setSaid(saidBy(error));
    }
  };
  return (
    <main class="entry">
      <h1>Elastune</h1>
      <p>
        Open the link that <code>elastune up</code> printed, or have <code>elastune page</code> print a new one. Or enter a token: the
        owner's, a study's, or one that only reads.
      </p>
      <form onSubmit={enter}>
        <label for="token">Token</label>
        <input
          id="token"
          type="password"
          autocomplete="off"
          value={token}
          onInput={(event) => setToken(event.currentTarget.value)}
        />
        <button type="submit" disabled={!token}>
          Open
        </button>
      </form>
      {said && (
        <p class="error" role="alert">
          {said}
        </p>
      )}
    </main>
  );
}
