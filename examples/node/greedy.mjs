// npm install onnxruntime-node; node greedy.mjs ../../onnx/greedy.onnx 5 6 7 2   (the source ends with eos, here 2)
import { InferenceSession, Tensor } from "onnxruntime-node";

const [graph, ...ids] = process.argv.slice(2);
const session = await InferenceSession.create(graph);
const { tokens } = await session.run({
  src: new Tensor("int64", BigInt64Array.from(ids, BigInt), [1, ids.length]),
  max_len: new Tensor("int64", BigInt64Array.of(BigInt(ids.length + 50)), []),
});
console.log(tokens.data.join(" "));
