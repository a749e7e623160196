// Loads graphs and runs them, as JSON asks: what Node.js (node.mjs) and a page (chromium.mjs) share.

const ARRAYS = {
  int64: BigInt64Array,
  float32: Float32Array,
  float16: globalThis.Float16Array ?? Uint16Array, // onnxruntime expects the first where there is one
};
const sessions = [];

function unpack(ort, { type, dims, data }) {
  const bytes = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
  return new ort.Tensor(type, new ARRAYS[type](bytes.buffer), dims);
}

function pack({ type, dims, data }) {
  let text = "";
  for (const byte of new Uint8Array(data.buffer, data.byteOffset, data.byteLength)) {
    text += String.fromCharCode(byte);
  }
  return { type, dims, data: btoa(text) };
}

const mapValues = (object, change) =>
  Object.fromEntries(Object.entries(object).map(([name, value]) => [name, change(value)]));

// {graph: Uint8Array} -> number of the session; {session, feeds} -> outputs by name.
export async function answer(ort, { graph, session, feeds }) {
  if (graph) {
    return sessions.push(await ort.InferenceSession.create(graph)) - 1;
  }
  const values = mapValues(feeds, (packed) => unpack(ort, packed));
  return mapValues(await sessions[session].run(values), pack);
}
