"use strict";
/* Captions that are computed on this device, so that nothing is sent. On the site, this file replaces
   upload.js and requests.js of the server's page. It sends its requests to worker.js. */

/** The unchanged photo: the browser decodes it for the model in the same way as for the viewer. */
class Upload {
  static async of({ file }) {
    return { body: file, converted: true };
  }
}

class Pool extends JobPool {
  constructor(next) {
    super(next, 1);
    this.device = new Device(JSON.parse(document.getElementById("captioner-data").textContent).device);
  }

  captions(file, query, signal) {
    return this.device.captions(file, query, signal);
  }
}

/** The model cannot run, so no photo can be captioned. */
class ModelMissing extends Error {
  stopsAll = true;
}

class Device {
  /** `settings` from `site/writer.py`: files of the runtimes and of the model, and sizes in bytes. */
  constructor(settings) {
    this.settings = settings;
    this.numbers = new WeakMap(); // numbers of the photos, by file
    this.photos = 0;
    this.requests = new Map(); // {message, resolve, reject} by number
    this.sent = 0;
    this.line = document.querySelector(".device");
    this.note = this.line.querySelector(".note");
    this.ready = siteReady().then(() => this.start(false));
    this.ready.catch(() => {}); // every request reports this error
    this.offerGpu();
  }

  /** The response for a photo; see `Model.captions`. */
  async captions(file, query, signal) {
    if (!this.numbers.has(file)) this.numbers.set(file, (this.photos += 1));
    await this.ready;
    signal.throwIfAborted();
    const id = (this.sent += 1);
    const message = { kind: "caption", id, number: this.numbers.get(file), file, query };
    const response = new Promise((resolve, reject) => this.requests.set(id, { message, resolve, reject }));
    this.worker.postMessage(message);
    return response;
  }

  /** Start the worker. Returns a promise that is fulfilled when the worker is ready. */
  start(gpu) {
    const { runtimes, files, sizes } = this.settings;
    const runtime = runtimes[gpu ? "gpu" : "cpu"];
    const names = [runtime.binary, ...Object.values(files)];
    const total = names.reduce((sum, name) => sum + sizes[name], 0);
    let loaded = 0;
    this.worker?.terminate();
    // A worker from a blob has this page's content security policy, even before the service worker
    // answers requests.
    const code = `import ${JSON.stringify(new URL("code/worker.js", location.href).href)};`;
    const address = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
    const worker = (this.worker = new Worker(address, { type: "module" }));
    const bar = element("progress", { "aria-label": "Loading the model", max: `${total}`, value: "0" });
    this.show(`Loading the model, ${byteCount(total)} …`, bar);
    worker.postMessage({ kind: "load", settings: { runtime, files, gpu, threads: threadCount() } });
    for (const { message } of this.requests.values()) worker.postMessage(message);
    return new Promise((resolve, reject) => {
      const fail = (reason) => {
        const message = `The model cannot run: ${reason}. Check the network and reload this page.`;
        this.show(message);
        this.line.classList.add("failed");
        const error = new ModelMissing(message);
        for (const request of this.requests.values()) request.reject(error);
        this.requests.clear();
        reject(error);
      };
      worker.onerror = (event) => fail(event.message || "its code could not be loaded");
      worker.onmessage = ({ data }) => {
        if (data.kind === "progress") bar.value = loaded += data.bytes;
        else if (data.kind === "failed") fail(data.message);
        else if (data.kind === "captioned") this.settle(data);
        else {
          this.running(data, [...Object.values(runtime), ...Object.values(files)]);
          resolve();
        }
      };
    });
  }

  settle({ id, response, error }) {
    const { resolve, reject } = this.requests.get(id);
    this.requests.delete(id);
    if (error === undefined) resolve(response);
    else reject(new Error(error));
  }

  /** Show which processor the model uses, and whether the site now works without a network. */
  async running({ processor, threads }, names) {
    const where = processor === "GPU" || threads === 1 ? processor : `${processor}, ${threads} threads`;
    this.line.dataset.processor = processor;
    this.line.classList.remove("failed");
    this.show(`Ready. The model runs on the ${where}.`);
    const kept = await keptOffline(names);
    if (kept) this.show(`Ready. The model runs on the ${where}. You can now use this page without a network.`);
    this.line.dataset.offline = `${kept}`;
  }

  show(text, ...more) {
    this.line.querySelector("span").replaceChildren(text, ...more);
  }

  /** Offer the GPU if the browser has WebGPU. Its runtime is loaded when the reader chooses it. */
  offerGpu() {
    if (!navigator.gpu) return;
    const button = this.line.querySelector(".use-gpu");
    const { runtimes, sizes } = this.settings;
    button.append(` (loads ${byteCount(sizes[runtimes.gpu.binary])})`);
    button.hidden = false;
    button.addEventListener("click", async () => {
      button.hidden = true;
      const adapter = await navigator.gpu.requestAdapter().catch(() => null);
      await this.ready.catch(() => {});
      if (adapter) this.ready = this.start(true).catch(() => this.start(false)); // the CPU's files are cached
      else this.note.textContent = "This browser has no access to a GPU, so the model stays on the CPU.";
      this.ready.catch(() => {});
    });
  }
}

/** Number of CPU threads: ONNX Runtime's own choice, or `?threads=N`. */
function threadCount() {
  if (!self.crossOriginIsolated) return 1; // without isolation, threads cannot share memory
  const wanted = Number(new URLSearchParams(location.search).get("threads"));
  return wanted >= 1 ? Math.trunc(wanted) : Math.min(4, Math.ceil(navigator.hardwareConcurrency / 2));
}

/** Start the service worker. On the first visit, the page then reloads once before it loads the model.
    The model's threads need an isolated page, and only the service worker can isolate the page. */
async function siteReady() {
  const { serviceWorker } = navigator;
  const registration = await serviceWorker?.register("sw.js").catch(() => null);
  if (!registration || (registration.active && !serviceWorker.controller)) return; // forced reload
  if (!serviceWorker.controller) {
    await new Promise((resolve) => {
      serviceWorker.addEventListener("controllerchange", resolve, { once: true });
      setTimeout(resolve, 5000);
    });
  }
  const again = performance.getEntriesByType("navigation")[0]?.type === "reload";
  const used = !document.body.classList.contains("empty");
  if (self.crossOriginIsolated || !serviceWorker.controller || again || used) return;
  location.reload();
  await new Promise(() => {}); // wait for the reload
}

/** Return whether the service worker has stored the page and these files for use without a network. */
async function keptOffline(names) {
  const controller = navigator.serviceWorker?.controller;
  if (!controller) return false;
  return new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = ({ data }) => resolve(data);
    controller.postMessage(["index.html", ...names], [port2]);
    setTimeout(() => resolve(false), 10_000);
  });
}

addEventListener("beforeinstallprompt", (event) => {
  const button = document.querySelector(".device .install");
  event.preventDefault();
  button.hidden = false;
  button.addEventListener("click", () => event.prompt().then(() => (button.hidden = true)), { once: true });
});
