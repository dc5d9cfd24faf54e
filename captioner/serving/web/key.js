"use strict";
/* Requests with an API key, if the server needs a key. The page asks for it once, and keeps it until
   the tab is closed. */
const fetchWithKey = (() => {
  const STORED = "captioner-api-key";
  let asking = null; // promise of the open dialog, shared by parallel requests

  /** Ask for the key; the promise is false if the user cancels. */
  function ask(message) {
    asking ??= new Promise((resolve) => {
      const input = element("input", { type: "password", autocomplete: "off", required: "" });
      const dialog = element(
        "dialog",
        { class: "key-dialog", "aria-label": "API key" },
        element("p", {}, message),
        element("form", { method: "dialog" },
          element("label", {}, "API key", input),
          element("button", { type: "submit", value: "use" }, "Use this key")),
      );
      dialog.addEventListener("close", () => {
        const key = dialog.returnValue === "use" ? input.value.trim() : "";
        if (key) sessionStorage.setItem(STORED, key);
        asking = null;
        dialog.remove();
        resolve(key !== "");
      });
      document.body.append(dialog);
      dialog.showModal();
    });
    return asking;
  }

  /** `fetch` with the stored key; asks for a new one and repeats the request after status 401. */
  return async function fetchWithKey(url, options = {}) {
    for (;;) {
      const key = sessionStorage.getItem(STORED);
      const headers = new Headers(options.headers);
      if (key) headers.set("X-Api-Key", key);
      const response = await fetch(url, { ...options, headers });
      if (response.status !== 401) return response;
      if (sessionStorage.getItem(STORED) !== key) continue; // a parallel request has got a key
      const message = key
        ? "The server does not accept this API key. Enter a different key."
        : "This server needs an API key. It is kept until you close this tab.";
      if (!(await ask(message))) return response;
    }
  };
})();
