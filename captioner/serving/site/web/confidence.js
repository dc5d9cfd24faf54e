/* The calibrated confidence of a caption, as in captioner/inference/confidence.py. */

import { sigmoid } from "./reading.js";

/** How much an image looks like a photo, from 0 to 1, computed from the encoder's summary of the image. */
export function familiarityOf({ kinds, familiar: [start, end] }, summary) {
  const strangeness = summary.reduce((sum, value, i) => sum + value * kinds[i], kinds.at(-1));
  return Math.min(Math.max((end - strangeness) / (end - start), 0), 1);
}

/** The probability that a caption is right if its image is a photo; null if these options have no confidence.

    fitted     `confidence` in the site's config
    odds       log-odds that each word is true, see `PhotoReading.logOdds`
    style      "" for a model without styles
    options    options of the search; all beam sizes of at least 2 count as equal */
export function confidenceOf(fitted, { tokens, logProb }, odds, style, options) {
  const { intercepts, search, features } = fitted;
  const sizes = [options.beam_size, search.beam_size];
  const others = sizes[0] !== sizes[1] && Math.min(...sizes) < 2;
  if (others || options.certainty !== search.certainty || !(style in intercepts)) return null;
  const known = odds.filter((value) => !Number.isNaN(value));
  const values = {
    mean_log_prob: logProb / (tokens.length + 1),
    least_true: known.length ? Math.min(...known) : 0,
    all_true: known.reduce((sum, value) => sum - Math.log1p(Math.exp(-value)), 0),
  };
  const parts = Object.entries(features).map(([name, { weights, mean, scale, lowest, highest }]) => {
    const limited = Math.min(Math.max(values[name], lowest), highest);
    return (weights * (limited - mean)) / scale;
  });
  return sigmoid(parts.reduce((sum, part) => sum + part, intercepts[style]));
}
