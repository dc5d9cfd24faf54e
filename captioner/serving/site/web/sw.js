/* Service worker: keeps the site's files, so that it works without a network. It also adds headers that
   static hosts cannot set: isolation (threads need it) and the content security policy, also for workers.

   `captioner export --web` fills in the names between two pairs of @. A file is stored under the
   digest of its content, so a new version of the site loads only changed files. The new version replaces
   the old version when all tabs of the site are closed. */

const DIGESTS = @@digests@@; // SHA-256 in base64, by name
const PAGE = @@page@@; // files of the page itself; the model's files are stored when the page loads them
const POLICY = @@policy@@;

const SCOPE = self.registration.scope;
const CACHE = `captioner ${SCOPE}`;
const keyOf = (name) => `${new URL(name, SCOPE)}?sha256=${encodeURIComponent(DIGESTS[name])}`;
const nameOf = (url) => decodeURIComponent(new URL(url).pathname.slice(new URL(SCOPE).pathname.length)) || "index.html";
const underway = new Set(); // files that are being kept

/** Fetch a file and keep it; throws if the file does not belong to this version. */
async function keep(name) {
  const response = await fetch(new URL(name, SCOPE), { cache: "no-cache" });
  if (!response.ok || !(await store(name, response))) throw new Error(`${name} does not belong to this version`);
}

async function store(name, response) {
  const content = await response.arrayBuffer();
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", content));
  if (btoa(String.fromCharCode(...digest)) !== DIGESTS[name]) return false;
  const headers = { "Content-Type": response.headers.get("Content-Type") ?? "" };
  await (await caches.open(CACHE)).put(keyOf(name), new Response(content, { headers }));
  return true;
}

async function answer(name, wait) {
  const kept = await (await caches.open(CACHE)).match(keyOf(name));
  if (kept) return guarded(kept);
  const response = await fetch(new URL(name, SCOPE), { cache: "no-cache" });
  if (response.ok) {
    const storing = store(name, response.clone()).catch(() => false).finally(() => underway.delete(storing));
    underway.add(storing);
    wait(storing);
  }
  return guarded(response);
}

function guarded(response) {
  const headers = new Headers({
    "Content-Type": response.headers.get("Content-Type") ?? "",
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
  });
  const { body, status, statusText } = response;
  return new Response(body, { status, statusText, headers });
}

self.addEventListener("install", (event) => {
  const install = async () => {
    const before = (await (await caches.open(CACHE)).keys()).map(({ url }) => nameOf(url));
    const wanted = Object.keys(DIGESTS).filter((name) => PAGE.includes(name) || before.includes(name));
    const cache = await caches.open(CACHE);
    for (const name of wanted) {
      if (!(await cache.match(keyOf(name)))) await keep(name);
    }
  };
  event.waitUntil(install());
});

self.addEventListener("activate", (event) => {
  const activate = async () => {
    const cache = await caches.open(CACHE);
    const current = new Set(Object.keys(DIGESTS).map(keyOf));
    for (const request of await cache.keys()) {
      if (!current.has(request.url)) await cache.delete(request);
    }
    await self.clients.claim();
  };
  event.waitUntil(activate());
});

self.addEventListener("fetch", (event) => {
  const { request } = event;
  if (request.method !== "GET" || !request.url.startsWith(SCOPE)) return;
  const name = nameOf(request.url);
  if (name in DIGESTS) event.respondWith(answer(name, (promise) => event.waitUntil(promise)));
});

/** Answer the page's question whether these files are kept, once no file is being kept any more. */
self.addEventListener("message", (event) => {
  const reply = async () => {
    await Promise.all(underway);
    const cache = await caches.open(CACHE);
    const found = await Promise.all(event.data.map((name) => cache.match(keyOf(name))));
    event.ports[0].postMessage(found.every(Boolean));
  };
  event.waitUntil(reply());
});
