"use strict";
/* Requests to the server: two at a time, repeated later if the server is busy. */

class RequestError extends Error {
  /** `seconds` after which the request may be sent again, or null if it must not be repeated. */
  constructor(message, seconds = null) {
    super(message);
    this.seconds = seconds;
  }
}

/** The user has not entered an API key. */
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
    throw new RequestError("The server does not respond. Check the network and that the server is running.");
  });
  if (response.status === 401) throw new KeyMissing(); // before a parallel request asks again
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

/** The server's message as a sentence, without the decoder's details and without commands. */
function plainWords(status, message) {
  if (!message) return `The server cannot caption this photo (status ${status}). Try again later.`;
  const text = message
    .replace(/[;:] [^;:]*(--data-binary|curl)[\s\S]*$/, "")
    .replace(/^the photo: /, "")
    .replace(/ (truncated|damaged) \(.*\)/, " $1");
  return text[0].toUpperCase() + text.slice(1) + (/[.?!]$/.test(text) ? "" : ".");
}

/** Sends two requests at a time. */
class Pool extends JobPool {
  static TRIES = 6;

  constructor(next, onWait) {
    super(next, 2);
    this.onWait = onWait;
    this.resumes = 0; // time in milliseconds at which a busy server may get requests again
  }

  /** `requestCaptions`, repeated while the server is busy. Meanwhile, all jobs wait. */
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
