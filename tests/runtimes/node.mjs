// node node.mjs PACKAGE: JSON lines in, JSON lines out, answered by that npm package.
import { readFile } from "node:fs/promises";
import { createInterface } from "node:readline";
import { answer } from "./session.mjs";

const ort = await import(process.argv[2]);
for await (const line of createInterface({ input: process.stdin })) {
  const { path, ...request } = JSON.parse(line);
  try {
    if (path) {
      request.graph = new Uint8Array(await readFile(path));
    }
    console.log(JSON.stringify({ answer: await answer(ort, request) }));
  } catch (error) {
    console.log(JSON.stringify({ error: String(error?.message ?? error) }));
  }
}
process.exit(); // onnxruntime's threads would keep it alive
