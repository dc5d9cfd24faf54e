"use strict";
/* What is sent for a photo: the file itself, or a smaller JPEG of a large one.

   A phone's photo has 12 megapixels and 4 MB, of which the model's input keeps 0.08 megapixels. The
   photo that is sent keeps at least twice the input's side, so its caption rarely changes. */
class Upload {
  static HEAVY = 1e6; // bytes; smaller files are sent as they are
  static SIDE = 1536; // pixels of the shorter side of a photo that is sent smaller
  static MAX_SIDE = 8192; // pixels; browsers limit the size of a canvas
  static turn = Promise.resolve(); // one photo is decoded at a time: 12 megapixels are 48 MB

  /** `{body, converted}` for a SessionPhoto; throws Error in plain words. */
  static async of(photo, { limits, imageSize }) {
    const mine = Upload.turn.then(() => Upload.make(photo, limits, imageSize));
    Upload.turn = mine.catch(() => {});
    const made = await mine;
    if (made.body.size > limits.max_bytes) {
      const [size, limit] = [made.body.size, limits.max_bytes].map(byteCount);
      throw new Error(`This file has ${size}; the server takes up to ${limit}.`);
    }
    return made;
  }

  static async make(photo, limits, imageSize) {
    const { file, kind } = photo;
    const original = { body: file, converted: false };
    const foreign = !SERVER_KINDS.includes(kind);
    await photo.load();
    const { naturalWidth: width, naturalHeight: height } = photo.image;
    const heavy = file.size > Math.min(Upload.HEAVY, limits.max_bytes);
    if (!foreign && !heavy && width * height <= limits.max_pixels) return original;
    // Browsers ignore the EXIF orientation of WebP files, which the server applies.
    if (photo.orientation > 1) return original;
    // Color profiles are ignored, as the server ignores them.
    const options = { imageOrientation: "from-image", colorSpaceConversion: "none" };
    const bitmap = await createImageBitmap(file, options).catch(() => null);
    if (bitmap === null) return original; // for example TIFF
    try {
      for (const [side, quality] of [[Upload.SIDE, 0.95], [0, 0.95], [0, 0.8]]) {
        const body = await Upload.jpeg(bitmap, Math.max(side, 2 * imageSize), quality);
        const smaller = body.size < file.size || foreign || width * height > limits.max_pixels;
        if (!smaller) return original;
        if (body.size <= limits.max_bytes) return { body, converted: true };
      }
      return original;
    } finally {
      bitmap.close();
    }
  }

  /** A JPEG file whose shorter side has `side` pixels, or as many as the photo if it has fewer. */
  static jpeg(bitmap, side, quality) {
    const { width, height } = bitmap;
    const fits = Math.min(side / Math.min(width, height), Upload.MAX_SIDE / Math.max(width, height));
    const canvas = paintedOnWhite(bitmap, width, height, Math.min(1, fits));
    return new Promise((resolve, reject) => {
      const done = (blob) => (blob ? resolve(blob) : reject(new Error("This photo cannot be converted.")));
      canvas.toBlob(done, "image/jpeg", quality);
    });
  }
}

/** A canvas with the picture, transparent pixels blended with white, as for the model. */
function paintedOnWhite(picture, width, height, scale) {
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(width * scale));
  canvas.height = Math.max(1, Math.round(height * scale));
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  return canvas;
}

/** The <img> of an address; 0 x 0 pixels if the browser does not support its format. */
async function loadedImage(url) {
  const image = new Image();
  image.src = url;
  await image.decode().catch(() => {});
  return image;
}

/** EXIF orientation of a WebP file, which the server applies and browsers ignore; otherwise 1. */
async function webpOrientation(file) {
  const view = new DataView(await file.arrayBuffer());
  const name = (at) => String.fromCharCode(...new Uint8Array(view.buffer, at, 4));
  try {
    if (name(0) !== "RIFF" || name(8) !== "WEBP") return 1;
    let chunk = 12;
    while (name(chunk) !== "EXIF") {
      const size = view.getUint32(chunk + 4, true);
      chunk += 8 + size + (size % 2);
    }
    const tiff = chunk + (name(chunk + 8) === "Exif" ? 14 : 8);
    const little = view.getUint16(tiff) === 0x4949;
    const entries = tiff + view.getUint32(tiff + 4, little);
    for (let entry = 0; entry < view.getUint16(entries, little); entry++) {
      const at = entries + 2 + 12 * entry;
      if (view.getUint16(at, little) === 0x0112) return view.getUint16(at + 8, little);
    }
  } catch {
    // end of file: no EXIF
  }
  return 1;
}

/** Why the browser's image differs from what the server captioned; empty if it does not. */
function mismatch({ image, orientation, converted }, { width, height }) {
  const { naturalWidth, naturalHeight } = image;
  if (naturalWidth === 0) return "This browser does not support this image format";
  if (converted) return ""; // the server captioned the browser's own image
  const rotated = naturalWidth * height !== naturalHeight * width;
  // With equal aspect ratios, it is unknown whether the browser applied the orientation.
  const unknown = orientation > 1 && (orientation < 5 || width === height);
  return rotated || unknown ? "This browser does not apply this image's EXIF orientation" : "";
}
