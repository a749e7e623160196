// greedy.onnx or beam.onnx in a page: load, check the ids, run, show. No build step; index.html says where what lies.

const at = (id) => document.getElementById(id);
let ort, session, facts;

// The file's metadata: entries {1: key, 2: value} of field 14 of a protobuf message (onnx.proto, ModelProto).
function metadata(bytes) {
  const text = new TextDecoder();
  function* fields(start, end) {
    let place = start;
    const varint = () => {
      for (let value = 0, factor = 1; ; factor *= 128) {
        const byte = bytes[place++];
        value += (byte & 127) * factor;
        if (!(byte & 128)) return value;
      }
    };
    while (place < end) {
      const tag = varint();
      const length = (tag & 7) === 2 ? varint() : 0;
      yield [tag >> 3, place, place + length];
      if ((tag & 7) === 0) varint();
      else if ((tag & 7) === 2) place += length;
      else throw new Error("this is no ONNX file");
    }
  }
  const found = {};
  for (const [field, start, end] of fields(0, bytes.length)) {
    if (field !== 14) continue;
    const [key, value] = [...fields(start, end)].map((entry) => text.decode(bytes.subarray(entry[1], entry[2])));
    found[key] = value;
  }
  return found;
}

// Lines of ids -> sources, each ending with eos. Error, in the words of run_onnx.py, for what is no id.
function readSources(text) {
  const nIds = Number(facts.src_vocab_size);
  const eos = Number(facts.eos_id);
  return text.trim().split("\n").map((line, number) => {
    const words = line.trim().split(/\s+/);
    if (!words.every((word) => /^[+-]?\d+$/.test(word))) {
      throw new Error(`line ${number + 1}, '${line.trim()}', must hold ids: integers with spaces between`);
    }
    const ids = words.map(Number);
    for (const id of ids) {
      if (id < 0 || id >= nIds) throw new Error(`id ${id} must be an integer in the vocabulary, 0 to ${nIds - 1}`);
    }
    return ids.at(-1) === eos ? ids : [...ids, eos];
  });
}

async function search(sources, maxLen) {
  if (!(maxLen >= 1)) throw new Error(`max_len is ${maxLen}, but must be at least 1`);
  const length = Math.max(...sources.map((ids) => ids.length));
  const src = new BigInt64Array(sources.length * length).fill(BigInt(facts.pad_id));
  sources.forEach((ids, row) => src.set(ids.map(BigInt), row * length));
  return session.run({
    src: new ort.Tensor("int64", src, [sources.length, length]),
    max_len: new ort.Tensor("int64", BigInt64Array.of(BigInt(maxLen)), []),
  });
}

function say(text, wrong = false) {
  at("status").textContent = text;
  at("status").classList.toggle("wrong", wrong);
}

function element(tag, className, ...children) {
  const made = document.createElement(tag);
  made.className = className;
  made.append(...children);
  return made;
}

// One table a source: a line for each hypothesis, with its score if the graph gives one.
function show(sources, { tokens, scores }) {
  const length = tokens.dims.at(-1);
  const nBest = tokens.dims.length === 3 ? tokens.dims[1] : 1;
  const pad = BigInt(facts.pad_id);
  at("answers").replaceChildren(...sources.map((source, row) => {
    const head = element("tr", "", ...(scores ? [element("th", "score", "score")] : []));
    head.append(element("th", "ids", source.join(" ")));
    const lines = Array.from({ length: nBest }, (_, place) => {
      const start = (row * nBest + place) * length;
      const ids = tokens.data.slice(start, start + length).filter((id) => id !== pad);
      const cells = scores ? [element("td", "score", scores.data[row * nBest + place].toFixed(4))] : [];
      return element("tr", "answer", ...cells, element("td", "ids", ...Array.from(ids, (id) => element("span", "chip", `${id}`))));
    });
    return element("table", "", head, ...lines);
  }));
}

async function load(bytes, name) {
  facts = metadata(bytes);
  if (!["greedy", "beam"].includes(facts.graph)) {
    throw new Error(`${name} is a graph of another kind, ${facts.graph ?? "one without our metadata"}; here greedy or beam is needed`);
  }
  session = await ort.InferenceSession.create(bytes);
  await search([[Number(facts.eos_id)]], 2); // the first run is slower
  at("metadata").replaceChildren(...Object.entries(facts).map(([key, value]) =>
    element("tr", "", element("th", "", key), element("td", "ids", value))));
  say(`${name}: ${(bytes.length / 1e6).toFixed(2)} MB, ${facts.graph} search, ids 0 to ${facts.src_vocab_size - 1}, ${facts.dtype}`);
}

// Whatever goes wrong is said on the page, and nothing else can be pressed meanwhile.
async function work(what, action) {
  at("run").disabled = true;
  say(what);
  try {
    await action();
  } catch (error) {
    say(error.message, true);
  }
  at("run").disabled = !session;
}

async function fetchGraph() {
  session = undefined;
  at("answers").replaceChildren();
  ort ??= await import("onnxruntime-web").catch(() => {
    throw new Error("onnxruntime-web is missing: npm install --no-save --prefix examples/web onnxruntime-web");
  });
  const url = at("graph").value;
  const name = url.split("/").at(-1);
  const response = await fetch(url);
  if (!response.ok) {
    throw new Error(`onnx/${name} is not there: python export_onnx.py copy.pt writes it; then python -m http.server, in that folder`);
  }
  await load(new Uint8Array(await response.arrayBuffer()), name);
}

at("graph").addEventListener("change", () => (at("graph").value ? work("loading …", fetchGraph) : at("file").click()));
at("file").addEventListener("change", () => work("loading …", async () => {
  const [file] = at("file").files;
  session = undefined;
  at("answers").replaceChildren();
  await load(new Uint8Array(await file.arrayBuffer()), file.name);
}));
at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  work("searching …", async () => {
    const sources = readSources(at("ids").value);
    const longest = Math.max(...sources.map((ids) => ids.length));
    const maxLen = at("max-len").value === "" ? longest + 50 : Number(at("max-len").value);
    const started = performance.now();
    const outputs = await search(sources, maxLen);
    const taken = performance.now() - started;
    show(sources, outputs);
    const steps = outputs.tokens.dims.at(-1);
    say(`${steps} steps in ${taken.toFixed(1)} ms: ${(taken / steps).toFixed(2)} ms a token`);
  });
});
work("loading …", fetchGraph);
