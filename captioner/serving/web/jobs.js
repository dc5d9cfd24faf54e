"use strict";
/** Runs jobs in parallel. A job is a function that returns a promise; `next()` returns the next job, or null. */
class JobPool {
  constructor(next, parallel) {
    this.next = next;
    this.parallel = parallel;
    this.running = 0;
  }

  fill() {
    while (this.running < this.parallel) {
      const job = this.next();
      if (job === null) return;
      this.running += 1;
      job().finally(() => {
        this.running -= 1;
        this.fill();
      });
    }
  }
}
