"use strict";
/** Runs jobs, functions that return a promise; `next()` returns the next one, or null. */
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
