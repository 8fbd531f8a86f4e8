import { defineConfig } from "vite";

// One folder of files whose names carry digests; the scheduler serves it, and no other server is needed.
export default defineConfig({
  base: "/",
  build: { outDir: "built", assetsDir: "assets", target: "es2022", assetsInlineLimit: 0, modulePreload: { polyfill: false } },
});
