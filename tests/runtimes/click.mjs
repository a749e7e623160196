// node click.mjs BROWSER URL PICTURE: use examples/web as a person would; prints what the page showed, as JSON.
import { chromium } from "playwright-core";

const [executablePath, url, picture] = process.argv.slice(2);
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu", "--no-first-run"] });
const page = await browser.newPage({ viewport: { width: 900, height: 760 }, deviceScaleFactor: 1 });
const problems = [];
page.on("pageerror", (error) => problems.push(String(error)));
page.on("console", (message) => message.type() === "error" && problems.push(message.text()));

const ready = () => page.waitForFunction(() => !/…$/.test(document.getElementById("status").textContent));
async function choose(graph) {
  await page.selectOption("#graph", { label: (await page.locator("#graph option").allTextContents()).find((text) => text.startsWith(graph)) });
  await ready();
  return page.textContent("#status");
}
async function ask(ids, maxLen = "") {
  await page.fill("#ids", ids);
  await page.fill("#max-len", maxLen);
  await page.click("#run");
  await ready();
  const answers = await page.$$eval("tr.answer", (rows) =>
    rows.map((row) => [...row.querySelectorAll(".score, .chip")].map((cell) => cell.textContent)));
  return { status: await page.textContent("#status"), wrong: await page.$eval("#status", (p) => p.className), answers };
}

const saw = {};
await page.goto(url);
await ready();
saw.loaded = await page.textContent("#status");
saw.greedy = await ask("5 6 7 8 9\n11 12");
saw.short = await ask("5 6 7 8 9", "2");
saw.outside = await ask("5 99");
saw.word = await ask("5 x");
saw.nothing = await ask("");
saw.zero = await ask("5 6", "0");
saw.beamLoaded = await choose("beam");
saw.beam = await ask("5 6 7 8 9");
await page.click("summary");
saw.metadata = await page.$$eval("#metadata tr", (rows) => Object.fromEntries(rows.map((row) => [...row.cells].map((cell) => cell.textContent))));
await page.click("summary");
await page.screenshot({ path: picture });
await page.selectOption("#graph", "");
await page.setInputFiles("#file", { name: "mine.onnx", mimeType: "", buffer: Buffer.from("no graph at all") });
await ready();
saw.noGraph = await page.textContent("#status");
saw.problems = problems;
console.log(JSON.stringify(saw));
await browser.close();
