// node chromium.mjs BROWSER: JSON lines in, JSON lines out, answered by onnxruntime-web on a page in that browser.
import { createReadStream } from "node:fs";
import { createServer } from "node:http";
import { createInterface } from "node:readline";
import { chromium } from "playwright-core";

const PAGE = `<!doctype html><script type="module">
  import * as ort from "/node_modules/onnxruntime-web/dist/ort.wasm.min.mjs";
  import { answer } from "/session.mjs";
  globalThis.ask = async ({ path, ...request }) => {
    if (path) {
      const response = await fetch("/graph?" + encodeURIComponent(path));
      request.graph = new Uint8Array(await response.arrayBuffer());
    }
    return answer(ort, request);
  };
</script>`;
const TYPES = { mjs: "text/javascript", wasm: "application/wasm" };

const server = createServer((request, response) => {
  const [path, query] = request.url.split("?");
  if (path === "/") {
    response.setHeader("Content-Type", "text/html").end(PAGE);
    return;
  }
  const file = path === "/graph" ? decodeURIComponent(query) : new URL("." + path, import.meta.url);
  response.setHeader("Content-Type", TYPES[path.split(".").pop()] ?? "application/octet-stream");
  createReadStream(file).on("error", () => response.writeHead(404).end()).pipe(response);
});
await new Promise((listening) => server.listen(0, "127.0.0.1", listening));

const ARGUMENTS = [
  "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
  "--disable-component-update", "--disable-sync",
];
const browser = await chromium.launch({ executablePath: process.argv[2], args: ARGUMENTS });
const page = await browser.newPage();
await page.goto(`http://127.0.0.1:${server.address().port}/`);
await page.waitForFunction("globalThis.ask");

for await (const line of createInterface({ input: process.stdin })) {
  try {
    console.log(JSON.stringify({ answer: await page.evaluate((request) => ask(request), JSON.parse(line)) }));
  } catch (error) {
    console.log(JSON.stringify({ error: String(error?.message ?? error) }));
  }
}
await browser.close();
server.close();
