"use strict";
/* Requests to the server: two at a time, repeated when the server asks to come back later. */

class RequestError extends Error {
  /** `seconds`: when to try again; null: never. */
  constructor(message, seconds = null) {
    super(message);
    this.seconds = seconds;
  }
}

/** The user did not give an API key. */
class KeyMissing extends RequestError {
  stopsAll = true;

  constructor() {
    super("This server needs an API key. Press “Caption” to enter it.");
  }
}

/** Caption an uploaded photo; returns the body of the response, throws RequestError. */
async function requestCaptions(body, query, signal) {
  const request = {
    method: "POST",
    body,
    signal,
    headers: { "Content-Type": "application/octet-stream" },
  };
  const response = await fetchWithKey(`v1/captions?${query}`, request).catch((error) => {
    if (signal.aborted) throw error;
    throw new RequestError("The server does not respond; is it running?");
  });
  if (response.status === 401) throw new KeyMissing(); // at once, before another request asks again
  const answer = await response.json().catch(() => ({}));
  if (response.ok) return answer;
  const busy = response.status === 429 || response.status === 503;
  throw new RequestError(plainWords(response.status, answer.error), busy ? retryAfter(response) : null);
}

/** Seconds until the server wants the request again. */
function retryAfter(response) {
  const seconds = Number(response.headers.get("Retry-After") || "2");
  return Number.isFinite(seconds) && seconds >= 0 ? seconds : 2;
}

/** The server's message as a sentence for people, without the decoder's details and commands. */
function plainWords(status, message) {
  if (!message) return `The server cannot caption this photo (status ${status}).`;
  const text = message
    .replace(/[;:] [^;:]*(--data-binary|curl)[\s\S]*$/, "")
    .replace(/^the photo: /, "")
    .replace(/ (truncated|damaged) \(.*\)/, " $1");
  return text[0].toUpperCase() + text.slice(1) + (/[.?!]$/.test(text) ? "" : ".");
}

/** Two requests at a time. */
class Pool extends JobPool {
  static TRIES = 6;

  constructor(next, onWait) {
    super(next, 2);
    this.onWait = onWait;
    this.resumes = 0; // time at which a busy server may be asked again, in milliseconds
  }

  /** `requestCaptions`, until the server is no longer busy; all jobs wait then. */
  async captions(body, query, signal) {
    for (let tries = 1; ; tries++) {
      await this.pause(signal);
      try {
        return await requestCaptions(body, query, signal);
      } catch (error) {
        if ((error.seconds ?? null) === null || tries === Pool.TRIES) throw error;
        this.resumes = Math.max(this.resumes, Date.now() + 1000 * error.seconds);
        this.onWait(error.seconds);
      }
    }
  }

  async pause(signal) {
    while (Date.now() < this.resumes) {
      await new Promise((resolve) => {
        const timer = setTimeout(resolve, this.resumes - Date.now());
        signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
      });
      signal.throwIfAborted();
    }
  }
}
