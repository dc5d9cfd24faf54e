/* The model in a worker, so that the page stays usable while it runs; device.js is its counterpart.

   Messages to it:    {kind: "load", settings}, then {kind: "caption", id, number, file, query}
   Messages from it:  {kind: "progress", bytes}, {kind: "ready", processor, threads} or
                      {kind: "failed", message}, and {kind: "captioned", id, response | error} */

import { Model } from "./model.js";

let model = null;

/** Fetch a file of the site; decompress it if its name ends in .gzip. Hosts often do not compress
    graphs and WebAssembly, and some decompress files named .gz, so the site does not use that name. */
async function fetchFile(name) {
  const url = new URL(`../${name}`, import.meta.url);
  const response = await fetch(url).catch(() => null);
  if (!response?.ok) throw new Error(`${name} could not be loaded`);
  const counted = new TransformStream({
    transform(part, controller) {
      postMessage({ kind: "progress", bytes: part.length });
      controller.enqueue(part);
    },
  });
  let stream = response.body.pipeThrough(counted);
  if (name.endsWith(".gzip")) stream = stream.pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Load the runtime and the model.

    runtime    names of ONNX Runtime's files: api, loader, binary
    files      the model's files by name
    gpu        run the encoder on the GPU
    threads    number of CPU threads */
async function load({ runtime, files, gpu, threads }) {
  const at = (name) => new URL(`../${name}`, import.meta.url).href;
  const [ort, binary, ...contents] = await Promise.all([
    import(at(runtime.api)),
    fetchFile(runtime.binary),
    ...Object.values(files).map(fetchFile),
  ]);
  ort.env.wasm.wasmPaths = { mjs: at(runtime.loader) };
  ort.env.wasm.wasmBinary = binary.buffer;
  ort.env.wasm.numThreads = threads;
  ort.env.logLevel = "error";
  const loaded = Object.fromEntries(Object.keys(files).map((name, i) => [name, contents[i]]));
  const config = JSON.parse(new TextDecoder().decode(loaded["config.json"]));
  model = await Model.load(ort, config, loaded, gpu ? ["webgpu", "wasm"] : ["wasm"]);
  postMessage({ kind: "ready", processor: gpu ? "GPU" : "CPU", threads });
}

let turn = null; // one photo at a time, once the model is loaded

onmessage = ({ data }) => {
  if (data.kind === "load") {
    turn = load(data.settings).catch((error) => postMessage({ kind: "failed", message: error.message }));
    return;
  }
  const { id, number, file, query } = data;
  turn = turn
    .then(() => model.captions(number, file, query))
    .then((response) => postMessage({ kind: "captioned", id, response }))
    .catch((error) => postMessage({ kind: "captioned", id, error: error.message }));
};
