import { render } from "preact";
import { App } from "./app";
import "./styles.css";

const home = document.getElementById("app");
if (home) render(<App />, home);
